"""PyTorch's own layer, converted: the same results."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mhsa_compile import masks
from mhsa_compile.conversion.from_torch import from_torch
from mhsa_compile.errors import ModelError

pytestmark = pytest.mark.usefixtures("float64")

CLOSE = {"rtol": 0, "atol": 1e-12}  # everything here runs in float64, where both sides are exact to about 1e-15


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_from_torch(cross: bool, bias: bool, batch_first: bool) -> None:
    layer = nn.MultiheadAttention(24, 4, bias=bias, batch_first=batch_first, dtype=torch.float32).eval()
    for parameter in layer.parameters():  # PyTorch starts biases at zero, which would hide a swap
        nn.init.normal_(parameter)
    ours = from_torch(layer, cross=cross).double()
    layer = layer.double()
    x = torch.randn(2, 5, 24)
    context = torch.randn(2, 7, 24) if cross else x
    inputs = (x, context, context) if batch_first else [t.transpose(0, 1) for t in (x, context, context)]
    expected = layer(*inputs, need_weights=False)[0]
    expected = expected if batch_first else expected.transpose(0, 1)
    torch.testing.assert_close(ours(x, context) if cross else ours(x), expected, **CLOSE)


@pytest.mark.parametrize("lacking", ["in_proj_bias", "bias"])
def test_from_torch_of_a_bias_on_one_side(lacking: str) -> None:
    layer = nn.MultiheadAttention(24, 4, batch_first=True, dtype=torch.float32).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    setattr(layer if lacking == "in_proj_bias" else layer.out_proj, lacking, None)
    ours, x = from_torch(layer).double(), torch.randn(2, 5, 24)
    torch.testing.assert_close(ours(x), layer.double()(x, x, x, need_weights=False)[0], **CLOSE)


def test_from_torch_with_separate_weights_and_masks() -> None:
    layer = nn.MultiheadAttention(24, 4, kdim=10, vdim=10, batch_first=True, dtype=torch.float32).eval()
    nn.init.normal_(layer.in_proj_bias)
    ours = from_torch(layer, mask="key_padding").double()
    x, context = torch.randn(2, 5, 24), torch.randn(2, 7, 10)
    padding = torch.from_numpy(masks.key_padding([7, 3], 7))
    expected = layer.double()(x, context, context, key_padding_mask=~padding, need_weights=False)[0]
    torch.testing.assert_close(ours(x, context, mask=padding), expected, **CLOSE)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("kdim", "vdim"), [(24, 24), (10, 17), (24, 17), (10, 24), (10, 10)])
def test_from_torch_of_three_inputs(kdim: int, vdim: int, batch_first: bool) -> None:
    layer = nn.MultiheadAttention(24, 4, kdim=kdim, vdim=vdim, batch_first=batch_first, dtype=torch.float32).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    ours = from_torch(layer, separate_values=kdim == vdim, mask="key_padding").double()
    assert (ours.spec.kv_embed_dim, ours.spec.v_embed_dim) == (kdim, vdim)
    q, k, v = torch.randn(2, 5, 24), torch.randn(2, 7, kdim), torch.randn(2, 7, vdim)
    padding = torch.from_numpy(masks.key_padding([7, 3], 7))
    inputs = (q, k, v) if batch_first else [x.transpose(0, 1) for x in (q, k, v)]
    expected = layer.double()(*inputs, key_padding_mask=~padding, need_weights=False)[0]
    expected = expected if batch_first else expected.transpose(0, 1)
    for mask in (padding, padding.long(), padding.to(torch.uint8)):
        torch.testing.assert_close(ours(q, k, v, mask), expected, **CLOSE)
        torch.testing.assert_close(ours(x=q, value=v, key=k, mask=mask), expected, **CLOSE)


def test_from_torch_causal() -> None:
    layer = nn.MultiheadAttention(24, 4, batch_first=True, dtype=torch.float32).eval()
    ours = from_torch(layer, causal=True).double()
    x = torch.randn(2, 5, 24)
    hidden = ~torch.from_numpy(masks.causal(5, 5, "top_left"))
    expected = layer.double()(x, x, x, attn_mask=hidden, need_weights=False)[0]
    torch.testing.assert_close(ours(x), expected, **CLOSE)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"add_bias_kv": True}, "add_bias_kv"), ({"add_zero_attn": True}, "add_zero_attn")],
)
def test_from_torch_refuses(options: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        from_torch(nn.MultiheadAttention(24, 4, dtype=torch.float32, **options))


def test_from_torch_refuses_other_dtypes() -> None:
    with pytest.raises(ModelError, match="weights of float32, bfloat16, float16, got float64"):
        from_torch(nn.MultiheadAttention(24, 4))


def test_a_layer_in_bfloat16_stays_in_it() -> None:
    assert from_torch(nn.MultiheadAttention(24, 4, dtype=torch.bfloat16)).spec.dtype == "bfloat16"


def test_a_subclass_with_a_forward_of_its_own_is_refused() -> None:
    class Reversed(nn.MultiheadAttention):
        def forward(self, *args, **named):
            return super().forward(*(one.flip(1) for one in args), **named)

    class Renamed(nn.MultiheadAttention):
        pass

    with pytest.raises(ModelError, match=r"layer: expected an nn\.MultiheadAttention, got a Reversed"):
        from_torch(Reversed(24, 4, dtype=torch.float32))
    assert from_torch(Renamed(24, 4, dtype=torch.float32)).spec.num_heads == 4
