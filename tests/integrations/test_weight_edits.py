"""Weights written past PyTorch's counter, calls that ask for more than numbers, copies, and padding that is dropped."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzz.model_edits import EDITS, Block, campaign
from torch import Tensor, nn
from torch.autograd import forward_ad

import mhsa_compile as mhsa
from mhsa_compile.integrations.torch_linear import LinearForward, LinearKind
from mhsa_compile.integrations.weight_state import WeightStates
from mhsa_compile.runtime.compiled_attention import CompiledAttention

X = torch.linspace(-1, 1, 2 * 7 * 256).reshape(2, 7, 256)


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, nn.Module]:
    """An accelerated block and a plain one with the same weights."""
    plain = Block().eval()
    model = copy.deepcopy(plain)
    mhsa.accelerate(model, linears=True)
    return model, plain


def off(one: Tensor, other: Tensor) -> float:
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.thorough
def test_a_slice_of_the_campaign() -> None:
    assert len(EDITS) == 20
    assert not campaign(25, seed=3)
    assert not campaign(25, seed=4, layers=True)


@pytest.mark.parametrize("shape", [(1,), (7,), (64, 192), (192, 64), (256, 256), (97, 1013)])
def test_what_a_sample_sees(shape: tuple[int, ...]) -> None:
    """Any row in 256, any scaling, another memory: of the weights themselves, whatever object has them, it sees nothing
    new."""
    weight = nn.Parameter(torch.randn(shape))
    state = WeightStates([weight])
    assert state.hold([weight])
    rows = max(1, -(-shape[0] // 256))
    with torch.no_grad():
        kept = weight.detach().clone()
        for first in range(0, shape[0] - rows + 1, max(1, shape[0] // 5)):
            weight.data[first : first + 2 * rows] += 1
            assert not state.hold([weight])
            weight.data.copy_(kept)
            assert state.hold([weight])
    weight.data = kept
    assert not state.hold([weight])
    assert WeightStates([weight]).hold([nn.Parameter(weight.detach())])
    assert not WeightStates([weight]).hold([nn.Parameter(weight.detach().clone())])
    assert not WeightStates([weight]).hold([None])


@pytest.mark.parametrize(
    "other",
    [lambda w: w.t(), torch._neg_view, lambda w: w[:32], lambda w: w.view(32, 128)],
    ids=["transposed", "negated", "cut", "viewed"],
)
def test_the_same_memory_read_otherwise(other: Callable[[Tensor], Tensor]) -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    state = WeightStates([weight])
    weight.data = other(weight.data)
    assert not state.hold([weight])


def test_a_weight_that_does_not_lie_densely() -> None:
    weight = nn.Parameter(torch.randn(64, 64, 2)[..., 0])
    state = WeightStates([weight])
    assert state.hold([weight])
    weight.data[1:] *= 2
    assert not state.hold([weight])


def test_states_keep_no_weight_alive() -> None:
    weights = [nn.Parameter(torch.ones(4, 4)), None]
    states = WeightStates(weights)
    assert states.hold(weights) and not states.hold(weights[:1])
    memory = weights[0].detach()
    del weights[0]
    assert not states.are_gone() and not states.hold([None, None])
    del memory
    assert states.are_gone()


@pytest.mark.parametrize("other", [Tensor.to_sparse, lambda w: w.to("meta"), lambda w: w.view(16)])
def test_weights_that_have_other_memory_or_none(other: Callable[[Tensor], Tensor]) -> None:
    weight = torch.ones(4, 4)
    assert not WeightStates([weight]).hold([other(weight)])


def test_inference_tensors_of_the_memory_that_was_counted() -> None:
    weight = torch.ones(4, 4)
    states = WeightStates([weight])
    with torch.inference_mode():
        uncounted = torch.from_numpy(weight.numpy())
    assert uncounted.is_inference() and uncounted.data_ptr() == weight.data_ptr() and not states.hold([uncounted])


def swapped(model: nn.Module) -> None:
    for layer in (model.linear, model.attention.out_proj):  # type: ignore[union-attr]
        torch.utils.swap_tensors(layer.weight, nn.Parameter(layer.weight.detach() * 1.5))  # type: ignore[arg-type, union-attr]


def loaded_by_swapping(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.thorough_but("loaded_by_swapping")
@pytest.mark.parametrize("edit", [swapped, loaded_by_swapping])
def test_weights_that_were_swapped(pair: tuple[nn.Module, nn.Module], edit: Callable[[nn.Module], None]) -> None:
    models = model, plain = copy.deepcopy(pair)
    with torch.no_grad():
        assert off(model(X), plain(X)) < 1e-5
        for each in models:
            edit(each)
        assert off(model(X), plain(X)) < 1e-5 and off(plain(X), pair[1](X)) > 1e-2


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_weights_that_became_sparse_are_pytorchs(pair: tuple[nn.Module, nn.Module]) -> None:
    model = copy.deepcopy(pair[0])
    with torch.no_grad():
        model(X)
        model.linear.weight = nn.Parameter(pair[1].linear.weight.detach().to_sparse_csr(), requires_grad=False)  # type: ignore[union-attr, operator, assignment]
        assert off(model(X), pair[1](X)) < 1e-5
    assert model._mhsa_acceleration.calls == {"weights that are sparse_csr": 1}  # type: ignore[union-attr]


def packed(model: nn.Module) -> tuple[int, int]:
    """Of a block's report: how often weights were packed anew; of its linear: sets that are packed."""
    report: Any = model._mhsa_acceleration
    return report.repacked, len(vars(model.linear)["forward"]._bound)  # type: ignore[arg-type]


def test_sets_of_weights_that_take_turns_stay_packed(pair: tuple[nn.Module, nn.Module]) -> None:
    model, plain = copy.deepcopy(pair)
    own = dict(model.named_parameters())
    sets = [{name: nn.Parameter(value * size) for name, value in own.items()} for size in (0.5, 1.5, 0.8)]
    with torch.no_grad():
        expected = [torch.func.functional_call(plain, weights, (X,)) for weights in sets]
        model(X)
        for turn in range(9):
            y = torch.func.functional_call(model, sets[turn % 3], (X,))
            assert off(y, expected[turn % 3]) < 1e-5
        assert off(model(X), plain(X)) < 1e-5
        assert packed(model) == (6, 4)  # of an attention and a linear, once each for three sets
        sets[0]["linear.weight"].mul_(2.0)
        for weights in sets:
            assert off(*(torch.func.functional_call(each, weights, (X,)) for each in (model, plain))) < 1e-5
        assert packed(model) == (7, 4)
        del sets, weights
        model.linear.weight.mul_(2.0)  # type: ignore[union-attr, operator]
        model(X)
    assert packed(model) == (8, 1)  # nothing stays of what is gone, or was written over
    assert "weights packed anew 8 times" in repr(model._mhsa_acceleration)  # type: ignore[union-attr]


def test_memory_that_an_object_had_is_not_taken_for_unchanged(pair: tuple[nn.Module, nn.Module]) -> None:
    """One number of what was `.data` is written meanwhile, which no count of the weight's tells, and no sample."""
    models = model, plain = copy.deepcopy(pair)
    kept = {each: each.linear.weight.data for each in models}  # type: ignore[union-attr]
    with torch.no_grad():
        model(X)
        for each in models:
            each.linear.weight.data = kept[each] * 0.5  # type: ignore[union-attr, assignment, operator]
        assert off(model(X), plain(X)) < 1e-5
        for each in models:
            kept[each][5, 7] += 50.0  # type: ignore[index, operator]
            each.linear.weight.data = kept[each]  # type: ignore[union-attr, assignment]
        assert off(model(X), plain(X)) < 1e-5 and off(plain(X), pair[1](X)) > 1e-2


def test_weights_that_are_only_refreshed_are_not_said_to_have_changed(pair: tuple[nn.Module, nn.Module]) -> None:
    model = copy.deepcopy(pair[0])
    with torch.no_grad():
        model(X)
        model._mhsa_acceleration.refresh()  # type: ignore[union-attr, operator]
        assert off(model(X), pair[1](X)) < 1e-5
    assert packed(model) == (0, 1) and "packed anew" not in repr(model._mhsa_acceleration)  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_what_a_replaced_forward_looks_like(pair: tuple[nn.Module, nn.Module]) -> None:
    model, plain = pair
    with pytest.raises(mhsa.errors.InputError, match=r"TorchScript compiles the source.*mhsa\.restore\(model\)"):
        torch.jit.script(model)
    forward = model.attention.forward  # type: ignore[union-attr]
    assert inspect.signature(forward) == inspect.signature(plain.attention.forward)  # type: ignore[union-attr, arg-type]
    assert not hasattr(forward, "__globals__") and not hasattr(forward, "other")
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 64, batch_first=True), 1).eval()
    x = torch.ones(2, 7, 64)
    with torch.no_grad():
        expected = encoder(x)
        mhsa.accelerate(encoder)
        program = torch.export.export(encoder, (x,), strict=False)
        assert off(program.module()(x), expected) < 1e-5


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_calls_that_ask_for_more_than_numbers_are_pytorchs(pair: tuple[nn.Module, nn.Module]) -> None:
    model, plain = pair
    direction = torch.ones_like(X)
    with torch.no_grad():
        over = torch.vmap(lambda x: model(x[None])[0])(X)
        assert off(over, plain(X)) < 1e-5
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        tangents = [torch.func.jvp(each, (X,), (direction,))[1] for each in pair]
        with forward_ad.dual_level():
            tangents += [forward_ad.unpack_dual(each(forward_ad.make_dual(X, direction))).tangent for each in pair]
    assert tangents[1].detach().abs().max() > 0.1
    assert all(off(tangent, tangents[1]) < 1e-5 for tangent in tangents)
    grads = [torch.func.grad(lambda x, each=each: each(x).square().sum())(X) for each in pair]
    assert off(grads[0], grads[1]) < 1e-5


def test_a_switch_of_the_layer_that_was_turned_after_a_call(pair: tuple[nn.Module, nn.Module]) -> None:
    models = model, plain = copy.deepcopy(pair)
    with torch.no_grad():
        assert off(model(X), plain(X)) < 1e-5
        for each in models:
            each.attention.add_zero_attn = True  # type: ignore[union-attr]
        assert off(plain(X), pair[1](X)) > 1e-4
        assert off(model(X), plain(X)) < 1e-5


def test_weights_are_bound_whatever_device_new_tensors_have(pair: tuple[nn.Module, nn.Module]) -> None:
    model = copy.deepcopy(pair[0])
    with torch.no_grad(), torch.device("meta"):
        result = model(X)
    assert not result.is_meta and off(result, pair[1](X)) < 1e-5


def test_random_numbers_stay_the_users(pair: tuple[nn.Module, nn.Module]) -> None:
    model = copy.deepcopy(pair[1])
    before = torch.get_rng_state()
    with torch.no_grad():
        mhsa.accelerate(model, linears=True)
        model(X)
        model.attention.in_proj_weight.mul_(1.5)  # type: ignore[union-attr, operator]
        model(X)
    assert torch.equal(before, torch.get_rng_state())


def test_copies_are_accelerated_models_of_their_own(pair: tuple[nn.Module, nn.Module]) -> None:
    model, plain = pair
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            twin.linear.weight.data.mul_(3)
            expected = copy.deepcopy(plain)
            expected.linear.weight.data.mul_(3)  # type: ignore[operator, union-attr]
            assert off(twin(X), expected(X)) < 1e-5
            assert off(model(X), plain(X)) < 1e-5
        mhsa.restore(twin)
        assert "forward" not in vars(twin.linear) and "forward" in vars(model.linear)  # type: ignore[arg-type]


@pytest.mark.thorough_but("lengths1")
@pytest.mark.parametrize("lengths", [(11, 3, 5, 2), (4, 4, 11, 0), (1, 1, 11, 1)])
def test_padding_is_dropped(lengths: tuple[int, ...]) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    plain = nn.TransformerEncoder(layer, num_layers=2).eval()
    model = copy.deepcopy(plain)
    mhsa.accelerate(model)
    x = torch.randn(4, 11, 32)
    padding = torch.arange(11)[None] >= torch.tensor(lengths)[:, None]
    padding = padding[:, torch.randperm(11)] if lengths[0] == 1 else padding  # tokens anywhere
    poisoned = torch.where(padding[..., None], torch.nan, x)
    with torch.no_grad():
        result = model(poisoned, src_key_padding_mask=padding)
        exact = plain.double()
        for i, row in enumerate(padding):
            if not row.all():
                alone = exact(x[i : i + 1, ~row].double())
                assert off(result[i, ~row], alone[0]) < 1e-5
    assert not result[padding].any()
    mhsa.restore(model)
    assert "forward" not in vars(model) and model.use_nested_tensor


def test_a_layer_that_differs_goes_back_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the check: an artifact that was given other weights."""
    plain = Block().eval()
    model, unchecked = copy.deepcopy(plain), copy.deepcopy(plain)
    bind = LinearForward._bound_or_why

    def bound_wrong(self: LinearForward, kind: LinearKind) -> CompiledAttention:
        compiled = bind(self, kind)
        return lambda rows: compiled(rows) * 1.01  # type: ignore[operator, return-value]

    monkeypatch.setattr(LinearForward, "_bound_or_why", bound_wrong)
    report = mhsa.accelerate(model, linears=True)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="linear: a result is off by"):
            assert off(model(X), plain(X)) < 1e-5
        assert off(model(X), plain(X)) < 1e-5
    assert report.checked == 2 and sum(report.calls.values()) == 2
    report = mhsa.accelerate(unchecked, linears=True, check=False)
    with torch.no_grad():
        assert off(unchecked(X), plain(X)) > 1e-3
    assert report.checked == 0
