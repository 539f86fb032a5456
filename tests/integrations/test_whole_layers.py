"""Whole layers of encoders and decoders as one artifact: PyTorch's numbers in float64, edits, threads, choices."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError
from mhsa_compile.frontend.export.torch_layers import slow_path
from mhsa_compile.integrations import weight_state
from mhsa_compile.integrations.acceleration_report import AccelerationReport
from mhsa_compile.integrations.layers import encoder, timed_turns, ways
from mhsa_compile.integrations.layers.graph import WholeLayerKind
from mhsa_compile.integrations.layers.whole import WholeLayerForward
from mhsa_compile.verification.error_budget import budget, max_error

B, L, S, D, H, HIDDEN = 2, 7, 5, 32, 4, 48
CAUSAL = torch.ones(L, L).triu(1).bool()
PADDING = torch.arange(L) >= torch.tensor([[L], [L - 3]])


@pytest.fixture(autouse=True)
def no_call_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "SMALL", 0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def layer_of(kind: type[nn.Module] = nn.TransformerEncoderLayer, **fields: Any) -> nn.Module:
    torch.manual_seed(0)
    layer = kind(D, H, HIDDEN, **{"batch_first": True, **fields}).eval()
    for weight in layer.parameters():
        nn.init.normal_(weight, 0.1 if weight.ndim == 1 else 0, 0.2)
    return layer


def excess(layer: nn.Module, model: Callable[..., Tensor], *inputs: Tensor, **given: Any) -> float:
    """The largest error of a model's result, as a part of float32's budget around the layer's in float64."""

    def exact(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    with torch.no_grad():
        result = model(*inputs, **given)
        with slow_path():
            truth = copy.deepcopy(layer).double()(*map(exact, inputs), **{k: exact(v) for k, v in given.items()})
            own = layer(*inputs, **given)
    return float(max_error(truth.numpy(), result.numpy()) / budget(truth.numpy(), own.numpy(), "float32"))


def accelerated(layer: nn.Module, **options: Any) -> tuple[nn.Module, AccelerationReport]:
    model = copy.deepcopy(layer)
    return model, mhsa.accelerate(model, **{"layers": "whole", **options})


def assert_whole(report: AccelerationReport) -> None:
    assert [(row.is_whole, row.why_parts, row.parts) for row in report.layers] == [(True, "", {})], repr(report)


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, nn.Module]:
    """A layer and its accelerated copy, which was called."""
    layer = layer_of()
    return layer, accelerated(layer)[0]


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"src_key_padding_mask": PADDING},
    "boolean and padding": {"src_mask": CAUSAL, "src_key_padding_mask": PADDING},
    "floats": {"src_mask": drawn(L, L)},
    "floats of each head": {"src_mask": drawn(B * H, L, L)},
    "floats and padding": {"src_mask": drawn(L, L), "src_key_padding_mask": PADDING},
    "causal": {"src_mask": CAUSAL, "is_causal": True},
}


@pytest.mark.thorough_but("0-none")
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"norm_first": True, "activation": "gelu"},
        {"bias": False, "batch_first": False, "activation": nn.ReLU()},
        {"activation": F.gelu, "layer_norm_eps": 1e-3},
    ],
    ids=["0", "before, gelu", "no bias, length first", "gelu, epsilon"],
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:Support for mismatched")
def test_an_encoders_layer(fields: dict[str, Any], masks: str) -> None:
    layer = layer_of(**fields)
    model, report = accelerated(layer)
    x = drawn(B, L, D) if fields.get("batch_first", True) else drawn(L, B, D)
    assert excess(layer, model, x, **MASKS[masks]) <= 1
    assert excess(layer, model, x * 3, **MASKS[masks]) <= 1
    assert_whole(report)
    mhsa.restore(model)
    assert not any("forward" in vars(part) for part in model.modules())
    with torch.no_grad():
        # NaN where PyTorch's operator for a layer takes a mask of floats for one of booleans.
        plain = layer(x, **MASKS[masks])
        torch.testing.assert_close(model(x, **MASKS[masks]), plain, rtol=0, atol=0, equal_nan=True)


@pytest.mark.thorough
@pytest.mark.parametrize("fields", [{}, {"norm_first": True, "activation": "gelu", "batch_first": False}])
@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"tgt_mask": CAUSAL, "tgt_is_causal": True, "memory_key_padding_mask": PADDING[:, -S:]},
        {"tgt_mask": drawn(B * H, L, L), "memory_mask": drawn(L, S), "tgt_key_padding_mask": PADDING},
    ],
)
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_a_decoders_layer(fields: dict[str, Any], masks: dict[str, Any]) -> None:
    layer = layer_of(nn.TransformerDecoderLayer, **fields)
    model, report = accelerated(layer)
    x, memory = drawn(B, L, D), drawn(B, S, D)
    if not fields.get("batch_first", True):
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    assert excess(layer, model, x, memory, **masks) <= 1
    assert_whole(report)


def bound_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on artifacts of layers are given other weights."""
    source = WholeLayerForward._source

    def wrong(self: WholeLayerForward, kind: WholeLayerKind) -> tuple[WholeLayerKind, dict[str, Tensor]]:
        return kind, {name: weight * 1.001 for name, weight in source(self, kind)[1].items()}

    monkeypatch.setattr(WholeLayerForward, "_source", wrong)


@pytest.mark.thorough
def test_a_layer_that_differs_is_called_by_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controls of all above: weights off by a thousandth are seen by the budget, and by the first call's check."""
    bound_wrong(monkeypatch)
    layer, x = layer_of(), drawn(B, L, D)
    model, report = accelerated(layer, check=False)
    assert excess(layer, model, x) > 10
    model, report = accelerated(layer)
    with pytest.warns(UserWarning, match="a result is off by"):
        assert excess(layer, model, x) <= 1
    assert excess(layer, model, x) <= 1
    assert sum(report.layers[0].parts.values()) == 2 and "a result is off by" in repr(report)


@pytest.mark.thorough
def test_a_query_that_sees_no_key_gets_no_attention(pair: tuple[nn.Module, nn.Module]) -> None:
    layer, model = pair
    x, masked = drawn(B, L, D), torch.zeros(L, L).bool()
    masked[2] = True
    padding = torch.zeros(B, L).bool()
    with torch.no_grad():
        result = model(x, src_mask=masked, src_key_padding_mask=padding)
        alone: Any = copy.deepcopy(layer)
        rows = alone.norm1(x[:, 2] + alone.self_attn.out_proj.bias)
        expected = alone.norm2(rows + alone.linear2(alone.activation(alone.linear1(rows))))
    assert (result[:, 2] - expected).abs().max() < 1e-5


class Lora(nn.Module):
    """A linear and an adapter beside it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) + self.up(self.down(x))
        return result


def put_adapter(layer: Any) -> None:
    torch.manual_seed(3)
    layer.linear1 = Lora(layer.linear1).eval()


def write_in_place(layer: Any) -> None:
    with torch.no_grad():
        layer.linear2.weight.mul_(1.5)


def write_data(layer: Any) -> None:
    layer.norm1.weight.data.mul_(2)
    layer.linear2.weight.data.mul_(2)
    layer.self_attn.out_proj.bias.data.add_(1)


def load_state(layer: Any) -> None:
    layer.load_state_dict({name: value * 0.7 for name, value in layer.state_dict().items()})


def put_parameter(layer: Any) -> None:
    layer.norm2.bias = nn.Parameter(torch.ones(D))


def hook_a_part(layer: Any) -> None:
    layer.linear2.register_forward_hook(lambda module, inputs, output: output * 0.5)


def hook_the_layer(layer: Any) -> None:
    layer.register_forward_hook(lambda module, inputs, output: output * 0.5)


def other_switches(layer: Any) -> None:
    layer.norm_first, layer.norm2.eps = True, 0.1


def other_activation(layer: Any) -> None:
    layer.activation, layer.activation_relu_or_gelu = torch.sigmoid, 0


def parametrize(layer: Any) -> None:
    nn.utils.parametrizations.weight_norm(layer.linear1)
    with torch.no_grad():
        layer.linear1.parametrizations.weight.original0.mul_(2)


OF_WEIGHTS = [write_in_place, write_data, load_state, put_parameter, hook_the_layer]
OF_PARTS = [hook_a_part, put_adapter, other_activation, parametrize, other_switches]


@pytest.mark.parametrize("edit", [*OF_WEIGHTS, *(pytest.param(edit, marks=pytest.mark.thorough) for edit in OF_PARTS)])
def test_edits_of_an_accelerated_layer(edit: Callable[[Any], None], pair: tuple[nn.Module, nn.Module]) -> None:
    layer, model = copy.deepcopy(pair)
    x = drawn(B, L, D)
    assert excess(layer, model, x) <= 1
    before = copy.deepcopy(layer)
    edit(layer)
    edit(model)
    with slow_path():  # PyTorch's operator knows no adapter
        assert excess(before, layer, x) > 10, "the edit changes the result, so that one which is missed is seen"
    assert excess(layer, model, x) <= 1


def test_an_edit_past_the_counter_is_missed_without_the_sample(
    pair: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the edits."""
    monkeypatch.setattr(weight_state, "_views", lambda places: [])
    layer, model = copy.deepcopy(pair)
    assert excess(layer, model, drawn(B, L, D)) <= 1
    for each in (layer, model):
        write_data(each)
    assert excess(layer, model, drawn(B, L, D)) > 10


def wrong_threads(layer: nn.Module, model: nn.Module, threads: int) -> int:
    """How many of a hundred calls by so many threads at once differ from the layer's by more than the budget."""
    inputs = [drawn(B, 3 + number, D) for number in range(threads)]

    def wrong(number: int) -> int:
        with torch.no_grad():
            return sum(not torch.allclose(model(inputs[number]), expected[number], atol=1e-5) for _ in range(100))

    with torch.no_grad():
        expected = [layer(x) for x in inputs]
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(wrong, range(threads)))


@pytest.mark.thorough
def test_several_threads_call_and_bind_at_once(
    pair: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, model = pair
    for threads in (1, 2, 3, 8):
        assert wrong_threads(layer, copy.deepcopy(model), threads) == 0  # a copy binds anew
    bound_wrong(monkeypatch)
    model, _ = accelerated(layer, check=False)
    assert wrong_threads(layer, model, 2) == 200


def test_copies_are_layers_of_their_own(pair: tuple[nn.Module, nn.Module]) -> None:
    layer, model = pair
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other = copy.deepcopy(layer)
        for each in (twin, other):
            write_data(each)
        assert excess(other, twin, drawn(B, L, D)) <= 1 and excess(layer, model, drawn(B, L, D)) <= 1


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_training_gradients_and_others_numbers_are_as_before(pair: tuple[nn.Module, nn.Module]) -> None:
    layer, model = copy.deepcopy(pair)
    x = drawn(B, L, D)
    with pytest.raises(InputError, match="without a gradient"):
        model(x)
    with torch.no_grad():
        over = torch.vmap(lambda row: model(row[None])[0])(x)
        assert torch.allclose(over, layer(x), atol=1e-5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.allclose(model(x).float(), layer(x).float(), atol=0.1)
        assert torch.equal(model(x), model(x))
        model.dropout1.train()  # type: ignore[union-attr, operator]
        assert not torch.allclose(model(x), model(x), atol=1e-2), "what a part in training mode drops is dropped"
        with pytest.raises(InputError, match="training mode"):
            model.train()(x)


@pytest.mark.parametrize(
    ("ours", "theirs", "way"), [(1.0, 2.0, "whole"), (2.0, 1.0, "left to PyTorch"), (0.95, 1.0, "left to PyTorch")]
)
def test_the_faster_way_is_taken_and_reported(
    ours: float, theirs: float, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []

    def timed(one: Callable[[], Tensor], other: Callable[[], Tensor]) -> tuple[float, float]:
        seen.extend((one(), other()))
        return ours, theirs

    monkeypatch.setattr(ways, "in_turns", timed)
    plain = nn.TransformerEncoder(layer_of(), 2, enable_nested_tensor=False).eval()  # type: ignore[arg-type]
    model, report = accelerated(plain, layers="fastest")
    x = drawn(B, L, D)
    with torch.no_grad():
        assert "first calls tell" in repr(report)
        model(x)
        assert len(seen) == 2, "the second layer of a kind takes the first one's word"
        result, expected = model(x), plain(x)
    assert torch.equal(result, expected) == (way != "whole")
    assert torch.allclose(result, expected, atol=1e-5)
    assert [row.outcome() for row in report.layers] == [
        f"{way} at 2 x 7 ({ours * 1e3:.3g} ms, PyTorch's {theirs * 1e3:.3g})"
    ] * 2
    assert way in repr(report)


class Doubled(nn.TransformerEncoderLayer):
    """A layer that became another."""

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        return super().forward(*inputs, **named) * 2


@pytest.mark.parametrize("ours", [1.0, 3.0])
def test_a_layer_that_became_another_after_a_way_was_chosen(ours: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "in_turns", lambda *calls: (ours, 2.0))
    layer, x = layer_of(), drawn(B, L, D)
    model, report = accelerated(layer, layers="fastest")
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(model(x), layer(x), atol=1e-5)
        model.__class__ = Doubled
        assert torch.allclose(model(x), 2 * layer(x), atol=1e-5)
    assert list(report.layers[0].parts) == ["a layer that became a Doubled"]


MASKED = torch.zeros(L, L).bool()
MASKED[2] = True


@pytest.mark.thorough
@pytest.mark.parametrize("ours", [1.0, 3.0])
def test_calls_with_a_mask_are_measured_by_themselves(ours: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the ways of a call with a mask, too, the faster one; and a query that sees no key is NaN in neither."""
    layer, x = layer_of(), drawn(B, L, D)
    model, report = accelerated(layer, layers="fastest")
    with torch.no_grad():
        monkeypatch.setattr(ways, "in_turns", lambda one, other: (ours, 2.0))
        hidden = [model(x, src_mask=MASKED, src_key_padding_mask=PADDING) for _ in range(2)]
        some = [model(x, src_mask=CAUSAL, src_key_padding_mask=PADDING) for _ in range(2)]
        plain = layer(x, src_mask=CAUSAL, src_key_padding_mask=PADDING)
        assert layer(x, src_mask=MASKED, src_key_padding_mask=PADDING)[:, 2].isnan().all(), "PyTorch's has NaN there"
        monkeypatch.setattr(ways, "in_turns", lambda one, other: (2.0, 1.0))
        added = model(x, src_mask=drawn(L, L))
        model(x)
    assert not any(y.isnan().any() for y in hidden)
    assert torch.equal(some[1], plain) == (ours > 2), "PyTorch's bits where it was faster"
    assert (
        torch.allclose(some[1], plain, atol=1e-5) and excess(layer, lambda x, **_: added, x, src_mask=drawn(L, L)) <= 1
    )
    measured = [(timing.way, ", masked" in str(timing)) for timing in report.layers[0].timings]
    assert measured == [("whole" if ours < 2 else "pytorch", True), ("parts", True), ("pytorch", False)]


def test_later_calls_that_contradict_a_measurement_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first call on a busy machine decided wrongly: what PyTorch's layer takes later is more than ours did."""
    turns = iter([(1e-5, 1e-6), (0.5, 1.0)])
    monkeypatch.setattr(ways, "in_turns", lambda one, other: next(turns))
    layer, x = layer_of(), drawn(B, L, D)
    model, report = accelerated(layer, layers="fastest")
    with torch.no_grad():
        model(x)
        (timing,) = report.layers[0].timings
        assert (timing.way, timing.measurements) == ("pytorch", 1)
        for _ in range(ways._LATER - 1):
            assert not timing.is_due and torch.equal(model(x), layer(x))
        assert timing.is_due
        model(x)
        assert (timing.way, timing.measurements) == ("whole", 2) and "measured 2 times" in repr(report)
        for _ in range(3 * ways._LATER):
            model(x)
        assert timing.measurements == 2, "calls that take less than the other way's time contradict nothing"


def test_turns_that_contradict_each_other_are_more(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = {"one": iter([1.0, 3.0, 1.0, 3.0, 1.0, *[1.0] * 10]), "other": iter([2.0] * 15)}
    monkeypatch.setattr(timed_turns, "_seconds", lambda call: next(call()))
    assert timed_turns.in_turns(lambda: turns["one"], lambda: turns["other"]) == (1.0, 2.0)
    assert len(list(turns["one"])) == 15 - 10, "from ten turns on, eight agreed"
    clear = iter([1.0] * 15)
    timed_turns.in_turns(lambda: clear, lambda: iter([2.0]))
    assert len(list(clear)) == 10, "five turns do where all agree"


def test_what_is_not_taken_whole_says_why() -> None:
    class Scaled(nn.TransformerEncoderLayer):
        pass

    odd, hooked = layer_of(activation=torch.sigmoid), layer_of()
    hooked.norm1.register_forward_hook(lambda module, inputs, output: None)  # type: ignore[union-attr, operator]
    attention = layer_of()
    attention.self_attn.register_forward_hook(lambda module, inputs, output: None)  # type: ignore[union-attr, operator]
    report = mhsa.accelerate(nn.Sequential(odd, hooked, layer_of(Scaled), attention).eval())
    reasons = [row.why_parts for row in report.layers]
    assert reasons == [
        "an activation other than ReLU and GELU",
        "its norm1 has hooks, which would not run",
        "it is a Scaled, which may compute something else",
        "attention in it is kept",
    ]
    assert all(why in repr(report) for why in reasons)
    assert mhsa.accelerate(layer_of(), layers="parts").layers[0].why_parts == 'layers="parts"'
    assert "few bits" in mhsa.accelerate(layer_of(), linears="int4").layers[0].why_parts
    with pytest.raises(InputError, match="layers"):
        mhsa.accelerate(layer_of(), layers="all")  # type: ignore[arg-type]
