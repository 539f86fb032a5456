"""Which dims of a user's own module stay free: what its examples suggest, or what is named; what it fixes is said."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.functional import scaled_dot_product_attention

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.frontend.export.export import export
from mhsa_compile.frontend.export.signatures import guess_symbols
from mhsa_compile.verification.random_inputs import largest_sizes


class Tail(nn.Module):
    """x (B, L, 24) and whatever a test does to it."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor], rows: int = 40) -> None:
        super().__init__()
        self.change, self.table = change, nn.Parameter(torch.randn(rows, 24))

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x, self.table)


def branching(x: Tensor, table: Tensor) -> Tensor:
    return x * 2 if x.shape[1] <= 8 else x * 3


def refusing_long(x: Tensor, table: Tensor) -> Tensor:
    if x.shape[1] > len(table):
        raise ValueError("too long")
    return x + table[: x.shape[1]]


def refusing(x: Tensor, table: Tensor) -> Tensor:
    if x.shape[0] != 2:
        raise ValueError("two at a time")
    return x + table[0]


def lengthened(x: Tensor, table: Tensor) -> Tensor:
    return x * 2 if x.shape[1] < 3 else x * 3


def shifted(x: Tensor, table: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    return y


def dims(model: onnx.ModelProto) -> list[tuple[int | str, ...]]:
    return [tuple(d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim) for value in model.graph.input]


X = torch.zeros(2, 5, 24)
FIXED = {
    "of a parameter's size": (
        Tail(lambda x, table: x + table, rows=5),
        ("B", 5, 24),
        r"L \(axis 1 of 'x'\) at 5: it works with no other size",
    ),
    "of a length with another branch below": (
        Tail(lengthened),
        ("B", 5, 24),
        r"L \(axis 1 of 'x'\) at 5: one that takes at least 3 there",
    ),
    "a batch that the code asks for": (
        Tail(refusing),
        (2, "L", 24),
        r"B \(axis 0 of 'x'\) at 2: it works with no other size",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("module", "left", "said"), FIXED.values(), ids=FIXED)
def test_what_a_module_fixes_is_fixed_and_said(module: nn.Module, left: tuple[int | str, ...], said: str) -> None:
    with pytest.warns(
        UserWarning, match=f"example_inputs: the module fixes {said}.*Fix them in dims, or say in dynamic"
    ):
        assert dims(export(module, example_inputs=[X])) == [left]
    stated = {axis: dim for axis, dim in enumerate(left) if isinstance(dim, str)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dims(export(module, example_inputs=[X], dynamic_shapes={"x": stated})) == [left]
    fixed = {symbol: size for symbol, size, dim in (("B", 2, left[0]), ("L", 5, left[1])) if dim != symbol}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dims(export(module, example_inputs=[X], dims=fixed)) == [left]


@pytest.mark.thorough_only("L0")
@pytest.mark.parametrize("entry", ["L", Dim("L"), Dim.DYNAMIC])
def test_what_is_named_stays_free_or_is_an_error(entry: object) -> None:
    module, _, _ = FIXED["of a parameter's size"]
    with pytest.raises(ModelError, match=r"constant \(5\).*leave it out of dynamic_shapes"):
        export(module, example_inputs=[X], dynamic_shapes={"x": {1: entry}})


def test_a_length_less_one_is_free() -> None:
    """The exporter speaks of 3 and more alone, as it takes 0 and 1 for special; the graph is right at each size."""
    module = Tail(shifted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        artifact = mhsa.compile(module, example_inputs=[X], without_attention="accept")
    run = mhsa.load(artifact)
    for length in (1, 2, 3, 9):
        x = torch.randn(2, length, 24)
        assert torch.equal(run(x), module(x).detach())


def written(part: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def write(x: Tensor, table: Tensor) -> Tensor:
        y = x.clone()
        y[part] = 2 * x[part]
        return y

    return write


EVERY = slice(None)
SLICES = {
    "a head": (EVERY, slice(0, 3)),
    "a tail": (EVERY, slice(2, None)),
    "a middle": (EVERY, slice(1, 4)),
    "a step": (EVERY, slice(None, None, 2)),
    "from the end": (EVERY, slice(-2, None)),
    "up to the end": (EVERY, slice(1, -1)),
    "features": (..., slice(5, 9)),
    "all": (EVERY,),
}


@pytest.mark.parametrize("part", SLICES.values(), ids=SLICES)
def test_what_is_written_into_a_slice(part: Any) -> None:
    module = Tail(written(part))
    model = export(module, example_inputs=[X], dims={"B": 2, "L": 5})
    x = torch.randn(2, 5, 24)
    (result,) = ReferenceEvaluator(model).run(None, {"x": x.numpy()})
    assert np.array_equal(result, module(x).detach().numpy())


LIMITED = {
    "a check": (Tail(refusing_long), 40),
    "a branch": (Tail(branching), 8),
}


@pytest.mark.thorough_but("a branch")
@pytest.mark.parametrize(("module", "most"), LIMITED.values(), ids=LIMITED)
def test_a_length_may_have_a_limit(module: nn.Module, most: int) -> None:
    """Beyond it another branch would be the right one: calls are refused there."""
    model = export(module, example_inputs=[X])
    assert dims(model) == [("B", "L", 24)]
    assert largest_sizes(model) == {"L": most}


FORMS = {
    "a dict of names": ({"x": {0: "N", 1: "T"}}, ("N", "T", 24)),
    "an entry for each axis": ({"x": (None, "T", None)}, (2, "T", 24)),
    "by position": (((Dim("N"), Dim("T", max=17), Dim.STATIC),), ("N", "T", 24)),
    "hints": ({"x": {0: Dim.AUTO, 1: Dim.DYNAMIC}}, ("B", "L", 24)),
    "nothing is free": ({"x": None}, (2, 5, 24)),
}


@pytest.mark.thorough_but("hints")
@pytest.mark.parametrize(("stated", "left"), FORMS.values(), ids=FORMS)
def test_forms_of_torch_export(stated: object, left: tuple[int | str, ...]) -> None:
    model = export(Tail(lambda x, table: x + table[0]), example_inputs=[X], dynamic_shapes=stated)
    assert dims(model) == [left]
    assert largest_sizes(model) == ({"T": 17} if "by position" in str(stated) or "17" in str(stated) else {})


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"z": {0: "B"}}, "dynamic_shapes: expected inputs among x, got 'z'"),
        ({"x": {3: "B"}}, r"dynamic_shapes\['x'\]: expected axes from 0 to 2, got 3"),
        ({"x": "BL"}, r"dynamic_shapes\['x'\]: expected None, \{axis: symbol\}"),
        ({"x": {1: 7}}, r"dynamic_shapes\['x'\]\[1\]: expected a name, a Dim.* or its size 5, got 7"),
        ({"x": {1: 2 * Dim("T")}}, "expected a name, a Dim.*Name each axis by itself"),
        ({"x": {1: Dim("T", min=4)}}, "a dim without a lower bound, got one from 4 on"),
        (({0: "B"}, {0: "B"}), "dynamic_shapes: expected at most 1 entries, got 2"),
    ],
)
def test_what_is_no_form(stated: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        export(Tail(branching), example_inputs=[X], dynamic_shapes=stated)


def test_who_has_symbols_already_takes_none() -> None:
    model = mhsa.MultiHeadAttention(mhsa.AttentionSpec(embed_dim=8, num_heads=2))
    with pytest.raises(InputError, match="dynamic_shapes: expected None for MultiHeadAttention"):
        mhsa.compile(model, dynamic_shapes={"x": {0: "B"}})
    with pytest.raises(InputError, match=r"dynamic_shapes: expected it with an nn.Module.*, got it with an ONNX model"):
        mhsa.compile("model.onnx", dynamic_shapes={"x": {0: "B"}})


def test_what_looks_like_a_batch_or_a_length() -> None:
    widths: set[int] = set()

    def symbols(**shapes: tuple[int, ...]) -> dict[str, tuple[int | str, ...]]:
        examples = {
            n: torch.zeros(s, dtype=torch.long if "ids" in n or n == "mask" else None) for n, s in shapes.items()
        }
        found = guess_symbols(examples, frozenset(widths))
        return {n: tuple(found.get((n, axis), size) for axis, size in enumerate(s)) for n, s in shapes.items()}

    assert symbols(input_ids=(2, 7), mask=(2, 7)) == {"input_ids": ("B", "L"), "mask": ("B", "L")}
    assert symbols(x=(1, 7, 24), context=(1, 9, 16), context_mask=(1, 9)) == {
        "x": ("B", "L", 24), "context": ("B", "S", 16), "context_mask": ("B", "S"),
    }  # fmt: skip
    assert symbols(q=(2, 4, 7, 8), k=(2, 4, 9, 8), attn_bias=(1, 4, 7, 9)) == {
        "q": ("B", 4, "L", 8), "k": ("B", 4, "S", 8), "attn_bias": (1, 4, "L", "S"),
    }  # fmt: skip
    assert symbols(x=(2, 7, 24), cos=(7, 6), y=(2, 9, 3), z=(2, 11, 3)) == {
        "x": ("B", "L", 24), "cos": ("L", 6), "y": ("B", "S", 3), "z": ("B", "z_1", 3),
    }  # fmt: skip
    assert symbols(x=(7, 24), y=(7, 3), z=(5, 3), bias=(3,)) == {
        "x": ("N", 24), "y": ("N", 3), "z": ("z_0", 3), "bias": (3,),
    }  # fmt: skip
    assert symbols(x=(7, 24), attn_bias=(7, 7)) == {"x": ("N", 24), "attn_bias": ("N", "N")}
    assert symbols(ids=(7,)) == {"ids": ("N",)}
    past = {"past_0_key": (2, 4, 5, 8), "past_0_value": (2, 4, 5, 8)}
    assert symbols(input_ids=(2, 7), mask=(2, 12), **past) == {
        "input_ids": ("B", "L"), "mask": ("B", "P + L"), **dict.fromkeys(past, ("B", 4, "P", 8)),
    }  # fmt: skip
    widths |= {16, 3, 80}
    assert symbols(x=(2, 16)) == {"x": ("N", 16)}
    assert symbols(sound=(2, 400), mask=(2, 400)) == {"sound": ("B", "L"), "mask": ("B", "L")}  # no weight is as wide
    assert symbols(mel=(2, 80, 300)) == {"mel": ("B", "L", "S")}
    assert symbols(x=(2, 7, 300)) == {"x": ("B", "L", 300)}


class Unbatched(nn.Module):
    """Self-attention on (L, 24), then a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.project = nn.MultiheadAttention(24, 3), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.thorough
def test_rows_without_a_sequence_are_free() -> None:
    module = Unbatched().eval()
    compiled = mhsa.load(mhsa.compile(module, example_inputs=(torch.randn(4, 24),)))
    assert compiled.inputs[0].dims == ("N", 24)
    for rows in (1, 3, 64):
        x = torch.randn(rows, 24)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), module(x))


class Tokens(nn.Module):
    """ids (B, L) and a mask (B, L), with positions from a table of 40."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.project = nn.Embedding(50, 24), nn.Embedding(40, 24), nn.Linear(24, 24)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1])[None])
        heads = self.project(x).unflatten(-1, (3, 8)).transpose(1, 2)
        y = scaled_dot_product_attention(heads, heads, heads, attn_mask=attention_mask[:, None, None].bool())
        return y.transpose(1, 2).flatten(2)


@pytest.mark.thorough
def test_token_ids_leave_batch_and_length_free() -> None:
    module = Tokens().eval()
    ids = torch.randint(0, 50, (3, 11))
    given = (ids[:2, :5], torch.ones(2, 5, dtype=torch.long))
    model = mhsa.load(
        mhsa.compile(
            module,
            example_inputs=given,
            dynamic_shapes={"input_ids": {0: Dim.AUTO, 1: Dim("L", max=17)}, "attention_mask": {0: Dim.AUTO, 1: "L"}},
        )
    )
    assert [info.dims for info in model.inputs] == [("B", "L"), ("B", "L")]
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[1, 4:] = 0
    with torch.no_grad():
        assert torch.allclose(model(ids, mask), module(ids, mask), atol=1e-5)
    with pytest.raises(
        InputError, match="dim 'L': expected at most 17, the most that the model has tables or checks for"
    ):
        model(torch.zeros(1, 18, dtype=torch.long), torch.ones(1, 18, dtype=torch.long))
