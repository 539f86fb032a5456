"""Verify's self-checks: each holds for what is right, fails for a fault that breaks just that, and knows when it has
nothing to say. PyTorch's evaluation of the graph stands in for the compiled function."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from support.onnx_models import model_of

import mhsa_compile as mhsa
from mhsa_compile.frontend.export.export import export
from mhsa_compile.runtime.artifact.manifest import Manifest, TensorInfo
from mhsa_compile.spec.semantics import Semantics
from mhsa_compile.spec.window import WindowSpec
from mhsa_compile.verification.oracle.evaluate import Reference
from mhsa_compile.verification.paired_runs import RunPairs, SelfCheck
from mhsa_compile.verification.self_check_inputs import LENGTHS, PRIMES, SelfCheckInputs
from mhsa_compile.verification.self_checks import CHECKS, THREADS, self_checks
from mhsa_compile.verification.verify import Verdict, eager

BATCH = "an entry of a batch is the entry alone"
PERMUTED = "permuting a batch permutes the output"
PADDED = "a padded batch is its rows alone"
POISONED = "NaN and Inf in hidden keys stay there"
UNSEEN = "two sizes never seen of each symbolic dim"
DECODED = "decoding step by step is the prefill"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the sequences of the checks short: PyTorch's evaluation is slow, and knows no tiles."""
    monkeypatch.setattr("mhsa_compile.verification.self_check_inputs.LENGTHS", (11, 19))
    monkeypatch.setattr("mhsa_compile.verification.self_checks.PROMPT", 5)


Run = Callable[[dict[str, np.ndarray]], list[np.ndarray]]


@cache
def subject(module: str = "MultiHeadAttention", dims: tuple[tuple[str, int], ...] = (), **fields) -> tuple:
    """(graph, manifest) of a small spec, as the compiler would describe it."""
    spec = mhsa.AttentionSpec(**{"embed_dim": 24, "num_heads": 3, **fields})
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)  # the budget follows from how large the weights let outputs be
        layer = getattr(mhsa, module)(spec).eval()
    model = export(layer, dims=dict(dims))
    keys = "S" if spec.is_cross or module == "ScaledDotProductAttention" else "L"
    full = tuple(dict(dims).get(axis, axis) for axis in ("B", spec.num_heads, "L", keys))
    return model, manifest(model, spec, [meaning(spec.band)], {"mask": full})


def meaning(band: WindowSpec | None) -> Semantics:
    """Where queries see keys; the rest of a meaning, nobody asks for here."""
    sizes = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 1, "v_head_dim": 1, "scale": 1.0, "dtype": "float32"}
    words = dict.fromkeys(("op", "operator", "bool_mask", "fully_masked_row", "softmax"), "")
    return Semantics(**sizes, **words, band=band)


def manifest(
    model: onnx.ModelProto, spec: mhsa.AttentionSpec | None, semantics: list[object], broadcast: dict | None = None
):
    def info(value: onnx.ValueInfoProto) -> TensorInfo:
        kind = value.type.tensor_type
        dims = tuple(d.dim_param or d.dim_value for d in kind.shape.dim)
        full = (broadcast or {}).get(value.name) if len(dims) == 4 else None
        return TensorInfo(value.name, str(helper.tensor_dtype_to_np_dtype(kind.elem_type)), dims, full)

    inputs, outputs = (tuple(map(info, values)) for values in (model.graph.input, model.graph.output))
    return Manifest(
        mhsa_version="", inputs=inputs, outputs=outputs, weights=(), semantics=tuple(semantics), spec=spec, target={},
        versions={}, ops=(), files={},
    )  # fmt: skip


def checked(case: tuple, fault: Callable[[Run, dict], list[np.ndarray]] | None = None) -> dict[str, SelfCheck]:
    """Every check on PyTorch's evaluation, or on what `fault` makes of it."""
    model, described = case

    def run(inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        return eager(model, inputs)

    results = self_checks(Reference(model), described, run if fault is None else lambda inputs: fault(run, inputs))
    assert tuple(result.name for result in results) == tuple(CHECKS)
    return {result.name: result for result in results}


def failed(results: dict[str, SelfCheck]) -> set[str]:
    return {name for name, result in results.items() if not result.ok}


CAUSAL = {"causal": True, "mask": "key_padding"}
CACHED = {"kv_cache": True, "causal": True, "rope": True, "num_kv_heads": 1}
KEYS = {"outputs": ("y", "top_k:3")}
RIGHT = {
    "causal-key-padding": CAUSAL,
    "causal-additive": {"causal": True, "mask": "additive"},
    "cross-bool": {"kv_embed_dim": 16, "mask": "bool"},
    "cross-bottom-right": {"kv_embed_dim": 16, "mask": "key_padding", "causal": "bottom_right", **KEYS},
    "values-apart": {"kv_embed_dim": 16, "v_embed_dim": 11, "mask": "key_padding", **KEYS},
    "window-bfloat16": {"window": (5, 0), "causal": True, "mask": "bool", "dtype": "bfloat16"},
    "core": {"module": "ScaledDotProductAttention", "mask": "key_padding", "causal": "bottom_right"},
    "cache": CACHED | KEYS,
}


@pytest.mark.thorough
@pytest.mark.parametrize("fields", RIGHT.values(), ids=RIGHT)
def test_what_is_right_passes(fields):
    results = checked(subject(**fields))
    assert failed(results) == set()
    skipped = {name for name, result in results.items() if not result.applies}
    assert skipped == (set() if "causal" in fields else {DECODED})


@pytest.mark.thorough
def test_runs_that_agree_to_the_bit_are_said_to():
    exact = checked(subject(**CAUSAL), lambda run, inputs: [inputs["x"] * 2])
    assert {exact[name].note for name in (BATCH, PERMUTED, PADDED, DECODED)} == {"to the bit"}
    # small numbers: what is added must not cost large ones a rounding that is more than the budget
    near = checked(subject(**CAUSAL), lambda run, inputs: [inputs["x"] / 64 + np.float32(1e-9) * len(inputs["x"])])
    assert near[BATCH].note == "within the budget" and near[BATCH].ok and near[BATCH].difference > 0


def others_leak(run, inputs):
    """A little of every entry in every other: alone, an entry is right."""
    (y,) = run(inputs)
    return [y + 1e-3 * (np.nan_to_num(y).mean(axis=0, keepdims=True) - np.nan_to_num(y))]


def place_counts(run, inputs):
    """The second entry is off, whatever it holds."""
    (y,) = run(inputs)
    y = y.copy()
    y[1:2] *= 1.001
    return [y]


def mask_of_the_last(run, inputs):
    """Every entry gets the padding of the last."""
    return run({**inputs, "mask": np.repeat(inputs["mask"][-1:], len(inputs["mask"]), axis=0)})


def masked_by_zero(run, inputs):
    """Hidden keys are multiplied by zero instead of left out: right, until one is NaN."""
    (y,) = run(inputs)
    with np.errstate(invalid="ignore"):
        return [y + 0 * inputs["x"].sum(axis=1, keepdims=True)]


def one_length(run, inputs):
    """What was compiled for the lengths of the other checks only."""
    (y,) = run(inputs)
    y = y.copy()
    if y.shape[0] not in (1, 3):
        y[:, -1] = 0
    return [y]


def row_before(run, inputs):
    """Causality that is off by one, in short sequences."""
    (y,) = run(inputs)
    y = y.copy()
    if 1 < y.shape[1] < 9:
        y[:, -1] = y[:, -2]
    return [y]


def steps_forget(run, inputs):
    """A step of one position sees one key less than there are."""
    if inputs["x"].shape[1] > 1:
        return run(inputs)
    cache = run(inputs)[1:]
    return [run({**inputs, "length": np.maximum(inputs["length"] - 1, 0)})[0], *cache]


@pytest.mark.thorough
def test_a_step_that_forgets_is_caught():
    assert failed(checked(subject(**CACHED), steps_forget)) == {DECODED}


@pytest.mark.thorough_but("mask_of_the_last-a padded batch is its rows alone-False")
@pytest.mark.parametrize(
    ("fault", "caught", "alone"),
    [
        (others_leak, BATCH, False),
        (place_counts, PERMUTED, False),
        (mask_of_the_last, PADDED, False),
        (masked_by_zero, POISONED, True),
        (one_length, UNSEEN, False),
        (row_before, DECODED, False),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_is_caught(fault, caught, alone):
    results = checked(subject(**CAUSAL), fault)
    assert caught in failed(results)
    assert not alone or failed(results) == {caught}
    assert not Verdict((), (results[caught],)).ok


def second_place_first(run, inputs):
    """The largest two in the other order, in an entry alone."""
    y, weights, keys = run(inputs)
    swapped = np.where(keys[..., 1:2] < 0, keys, keys[..., [1, 0, 2]])
    return [y, weights, keys if len(keys) > 1 else swapped]


def keys_of_the_padding(run, inputs):
    """Keys counted from the first one that is not padding."""
    y, weights, keys = run(inputs)
    first = inputs["mask"].argmax(axis=1).reshape(-1, 1, 1, 1)
    return [y, weights, np.where(keys < 0, keys, np.maximum(keys - first, 0))]


def of_one_check(name: str, case: tuple, fault: Callable[[Run, dict], list[np.ndarray]]) -> SelfCheck:
    model, described = case
    pairs = RunPairs(Reference(model), described, lambda inputs: fault(lambda given: eager(model, given), inputs))
    return CHECKS[name](name, SelfCheckInputs(described), pairs)


@pytest.mark.parametrize(
    ("fault", "caught"),
    [pytest.param(second_place_first, BATCH, marks=pytest.mark.thorough), (keys_of_the_padding, PADDED)],
)
def test_keys_that_are_wrong_are_caught(fault, caught):
    result = of_one_check(caught, subject(**CAUSAL, **KEYS), fault)
    assert result.applies and not result.ok


def test_keys_of_equal_weights_may_be_others():
    """All keys that a query sees have one weight where the queries are zero."""
    model, described = subject(**CAUSAL, **KEYS)
    equal = onnx.ModelProto()
    equal.CopyFrom(model)
    for weight in equal.graph.initializer:
        if weight.name.startswith("q_proj"):
            zeros = np.zeros_like(onnx.numpy_helper.to_array(weight))
            weight.CopyFrom(onnx.numpy_helper.from_array(zeros, weight.name))
    assert of_one_check(BATCH, (equal, described), second_place_first).ok


def test_another_shape_is_a_fault():
    found = checked(subject(**CAUSAL), lambda run, inputs: [y[:, :9] for y in run(inputs)])
    assert {UNSEEN, DECODED} <= failed(found)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, {PADDED: "it takes no mask", POISONED: "every output sees every key", DECODED: "not causal"}),
        (CAUSAL | {"dims": (("B", 1), ("L", 31))}, {
            BATCH: "the batch is fixed at 1", PERMUTED: "the batch is fixed at 1", PADDED: "the length is fixed",
            UNSEEN: "every size is fixed", DECODED: "a length is fixed",
        }),
        ({"causal": True, "dims": (("L", 1),)}, {
            PADDED: "it takes no mask", POISONED: "there is one key", DECODED: "a length is fixed",
        }),
    ],
    ids=["plain", "fixed", "one-key"],
)  # fmt: skip
def test_what_means_nothing_says_why(fields, why):
    results = checked(subject(**fields))
    assert failed(results) == set()
    assert {name: result.note for name, result in results.items() if not result.applies} == why


@pytest.mark.thorough
def test_a_fixed_batch_is_checked_in_batches_of_copies():
    results = checked(subject(dims=(("B", 2),), **CAUSAL))
    assert failed(results) == set() and all(result.applies for result in results.values())
    assert {BATCH, PERMUTED} <= failed(checked(subject(dims=(("B", 2),), **CAUSAL), place_counts))


def foreign(*nodes: onnx.NodeProto, **attributes: int) -> tuple:
    """A graph made elsewhere around one Attention with a boolean mask over (N, T)."""
    four = ["N", 2, "T", 8]
    attention = helper.make_node("Attention", ["q", "q", "q", "wide"], ["a"], **attributes)
    unsqueeze = helper.make_node("Unsqueeze", ["attention_mask", "axes"], ["wide"])
    inputs = {"q": four, "attention_mask": (TensorProto.BOOL, ["N", "T"])}
    last = nodes[-1].output[0] if nodes else "a"
    model = model_of([unsqueeze, attention, *nodes], inputs, {last: four}, {"axes": np.array([1, 2])}, opset=24)
    band = WindowSpec(None, 0) if attributes else None
    return model, manifest(model, None, [meaning(band)])


def no_mask(run, inputs):
    return run({**inputs, "attention_mask": np.ones_like(inputs["attention_mask"])})


def test_a_graph_made_elsewhere_is_known_by_its_symbols():
    results = checked(foreign(is_causal=1))
    assert failed(results) == set() and all(result.applies for result in results.values())
    assert failed(checked(foreign(is_causal=1), no_mask)) >= {POISONED, UNSEEN}
    assert failed(checked(foreign(), no_mask)) >= {PADDED, POISONED}


def test_what_the_model_itself_does_not_promise_is_not_asked():
    """This one takes the mean of the batch away."""
    mean = helper.make_node("ReduceMean", ["a", "first"], ["mean"], keepdims=1)
    model, described = foreign(mean, helper.make_node("Sub", ["a", "mean"], ["y"]), is_causal=1)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "first"))
    results = checked((model, described))
    assert failed(results) == set()
    assert results[BATCH].note == results[PADDED].note == "the model itself is not so, says the oracle"
    assert results[PERMUTED].applies and results[DECODED].applies


def test_unseen_sizes_are_fresh_primes_of_the_seed():
    _, described = subject(**CAUSAL)
    first, again, other = (SelfCheckInputs(described, seed).unseen() for seed in (0, 0, 1))
    assert first == again != other
    for axis in "BL":
        assert len({case[axis] for case in first}) == 2
    assert all(case["L"] in PRIMES for case in (*first, *other))
    assert {7, 197, *LENGTHS}.isdisjoint(PRIMES)


@pytest.mark.thorough
def test_a_compiled_artifact_is_held_to_all_of_them():
    artifact = mhsa.compile(mhsa.AttentionSpec(embed_dim=24, num_heads=3, num_kv_heads=1, **CAUSAL))
    verdict = mhsa.verify(artifact, cases=[{"B": 2, "L": 7}])
    assert [check.name for check in verdict.checks] == [*CHECKS, THREADS]
    assert verdict.ok and all(check.applies for check in verdict.checks)
    assert verdict.checks[0].note == "to the bit"
    assert mhsa.verify(artifact, cases=[{"B": 2, "L": 7}], self_checks=False).checks == ()
