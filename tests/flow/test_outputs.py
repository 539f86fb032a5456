"""What a call returns beside y, through the whole flow: words, export, its definition, the compiled function."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import mhsa_compile as mhsa
from mhsa_bench.bench import bench
from mhsa_compile import masks
from mhsa_compile.errors import InputError, ModelError, SpecError
from mhsa_compile.frontend.export.export import export
from mhsa_compile.spec.outputs import SoftmaxOutputs, array_names, inside_of, split_words
from mhsa_compile.verification.error_budget import max_error
from mhsa_compile.verification.oracle.evaluate import oracle
from mhsa_compile.verification.random_inputs import random_inputs

EVERYTHING = ("y", "lse", "entropy", "top_k:3", "weights:heads=1,rows=0,-1", "heads")


def spec_of(outputs: tuple[str, ...] = EVERYTHING, **fields: Any) -> mhsa.AttentionSpec:
    return mhsa.AttentionSpec(**{"embed_dim": 20, "num_heads": 4, "num_kv_heads": 2, "outputs": outputs, **fields})


def test_words_have_one_spelling_and_name_arrays():
    spec = spec_of(["weights:rows=-1,3,heads=02", "y", "top_k:5"])
    assert spec.outputs == ("weights:heads=2,rows=-1,3", "y", "top_k:5")
    assert array_names(spec.outputs) == ("weights", "y", "top_k_weights", "top_k_keys")
    assert inside_of(spec.outputs) == SoftmaxOutputs(top_k=5, weights=True, heads=(2,), rows=(-1, 3))
    assert mhsa.AttentionSpec.from_json(spec.to_json()) == mhsa.AttentionSpec.from_toml(spec.to_toml()) == spec
    assert mhsa.AttentionSpec(embed_dim=8, num_heads=2).outputs == ("y",)
    words = ["y", "weights:heads=0,3,rows=0,-1", "lse", "top_k:5", "weights", "heads"]
    assert split_words("y,weights:heads=0,3,rows=0,-1, lse,top_k:5,weights,heads") == words


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("lse", "a tuple of some of"),
        ("weights", "Did you mean ('y', 'weights')?"),
        ("y,top_k:5", "Did you mean ('y', 'top_k:5')?"),
        ((), "some of"),
        (("lse",), '"y"'),
        (("y", "entropi"), "Did you mean 'entropy'?"),
        (("y", "top_k"), "'top_k:5'"),
        (("y", "top_k:0"), "'top_k:5'"),
        (("y", "lse:3"), "'lse' alone"),
        (("y", "weights:heads=4"), "heads from 0 to 3"),
        (("y", "weights:heads=1,1"), "each of heads once"),
        (("y", "weights:keys=1"), "chosen heads or rows"),
        (("y", "weights:rows=1,rows=2"), "chosen heads or rows"),
        (("y", "weights", "weights:rows=1"), "each output once"),
    ],
    ids=str,
)
def test_words_that_mean_nothing_are_refused(words, expected):
    with pytest.raises(SpecError) as refused:
        spec_of(words)
    assert expected in str(refused.value)


def test_the_core_has_no_heads_apart_from_y():
    with pytest.raises(SpecError, match="Its y holds"):
        mhsa.ScaledDotProductAttention(spec_of())


FLOWS = {
    "everything": (spec_of(causal=True, mask="key_padding"), {}),
    "bfloat16": (spec_of(("weights", "lse", "y"), dtype="bfloat16", window=(9, 3), num_kv_heads=4), {}),
    "pattern": (spec_of(static_mask=masks.Longformer(window=6, global_tokens=1)), {"L": 67}),
}
CASES = [{"B": 3, "L": 7, "S": 13}, {"B": 1, "L": 67, "S": 41}]


@pytest.mark.thorough_but("pattern")
@pytest.mark.parametrize("name", FLOWS)
def test_every_output_is_within_its_budget(name):
    spec, dims = FLOWS[name]
    torch.manual_seed(3)
    artifact = mhsa.compile(spec, dims=dims)
    cases = [{**case, "L": dims.get("L", case["L"])} for case in CASES]
    verdict = mhsa.verify(artifact, cases=cases, self_checks=name == "everything", threads=1)
    assert verdict.ok, (verdict.worst, [check for check in verdict.checks if not check.ok])
    assert {op.source for op in artifact.manifest.ops if op.op in ("statistics", "weights")} == {"default"}
    assert [info.name for info in artifact.manifest.outputs] == list(array_names(spec.outputs))
    if name == "everything":
        with pytest.raises(InputError, match="returns y alone"):
            bench(artifact, dims=CASES[0], against=())


@pytest.mark.thorough
def test_sinks_and_slopes_are_in_what_is_inside():
    """The core by itself; sinks take their share of the weights."""
    torch.manual_seed(3)
    outputs = ("y", "top_k:70", "weights", "lse", "entropy")
    module = mhsa.ScaledDotProductAttention(
        spec_of(outputs, sinks=True, alibi=True, softcap=5.0, causal="bottom_right")
    )
    artifact = mhsa.compile(module)
    verdict = mhsa.verify(artifact, cases=CASES, self_checks=False, threads=1)
    assert verdict.ok, verdict.worst
    attention = mhsa.load(artifact)
    inputs = random_inputs(artifact.manifest, {"B": 2, "L": 5, "S": 9})
    result = attention(**inputs)
    assert result._fields == ("y", "top_k_weights", "top_k_keys", "weights", "lse", "entropy")
    assert result.top_k_keys.shape == (2, 4, 5, 70) and (result.weights.sum(axis=-1) < 1).all()
    in_torch = attention(**{name: torch.from_numpy(array) for name, array in inputs.items()})
    assert all(isinstance(tensor, torch.Tensor) for tensor in in_torch)
    assert np.array_equal(in_torch.lse.numpy(), result.lse)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "fields",
    [{}, {"sinks": True, "alibi": True, "causal": True, "softcap": 3.0}, {"mask": "bool", "kv_embed_dim": 24}],
    ids=["plain", "sinks", "masked"],
)
def test_the_definition_in_standard_operators_says_the_same(fields):
    """The definition is what another ONNX tool computes, in its own float32."""
    spec = spec_of(("lse", "y", "weights:rows=0,-1,40,heads=3", "top_k:3", "entropy"), **fields)
    model = export(mhsa.MultiHeadAttention(spec))
    inputs = random_inputs(model, {"B": 2, "L": 6, "S": 9})
    expected = oracle(model, inputs)
    with np.errstate(all="ignore"):  # 0 ln 0, before it is selected away
        found = ReferenceEvaluator(model).run(None, inputs)
    for truth, value, output in zip(expected, found, model.graph.output, strict=True):
        if value.dtype == np.int64:
            assert np.array_equal(truth, value)
        else:
            assert max_error(truth, value) <= 2**-20 * np.abs(truth[np.isfinite(truth)]).max(), output.name


@pytest.mark.thorough
def test_onnx_runtime_runs_the_exported_file():
    runtime = pytest.importorskip("onnxruntime")
    model = export(mhsa.MultiHeadAttention(spec_of()))
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    inputs = random_inputs(model, {"B": 2, "L": 6})
    for truth, value in zip(oracle(model, inputs), session.run(None, inputs), strict=True):
        assert max_error(truth, value) <= 2**-20 * max(1, np.abs(truth[np.isfinite(truth)]).max())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("attribute", "value", "expected"),
    [
        ("top_k", 0, "top_k of 1 or more"),
        ("weights_heads", [7], "from 0 to 3"),
        ("weights_heads", [], "weights_heads of one number or more"),
    ],
)
def test_a_node_that_contradicts_itself_is_refused(attribute, value, expected):
    model = export(mhsa.MultiHeadAttention(spec_of(("y", "top_k:3", "weights:heads=1"))))
    (node,) = (node for node in model.graph.node if node.op_type == "Attention")
    (old,) = (said for said in node.attribute if said.name == attribute)
    old.CopyFrom(onnx.helper.make_attribute(attribute, value, attr_type=old.type))
    with pytest.raises(ModelError, match=expected):
        mhsa.compile(model)


@pytest.mark.thorough
def test_a_cache_is_looked_into_and_does_not_mind(tmp_path):
    """A prompt that says more than the steps after it: one cache for both."""
    torch.manual_seed(3)
    module = mhsa.MultiHeadAttention(spec_of(("y", "top_k:2", "entropy"), kv_cache=True, causal=True))
    attention = mhsa.load(mhsa.compile(module, dims={"B": 1, "C": 32}))
    x = np.random.default_rng(0).standard_normal((1, 9, 20), dtype=np.float32)
    cache = attention.new_cache()
    first, second = attention(x[:, :5], cache=cache), attention(x[:, 5:], cache=cache)
    assert first._fields == ("y", "top_k_weights", "top_k_keys", "entropy")
    plain = mhsa.MultiHeadAttention(spec_of(("y", "top_k:2", "entropy"), causal=True))
    plain.load_state_dict(module.state_dict())
    with torch.no_grad():
        y, largest, keys, entropy = plain.double()(torch.from_numpy(x).double())
    axes = {"y": 1}
    for name, expected in (("y", y), ("top_k_weights", largest), ("top_k_keys", keys), ("entropy", entropy)):
        parts = (getattr(first, name), getattr(second, name))
        assert np.abs(np.concatenate(parts, axis=axes.get(name, 2)) - expected.numpy()).max() < 1e-6


LONG = """
import resource, sys
import numpy as np
from mhsa_compile import load

attention = load(sys.argv[1])
x = np.random.default_rng(0).standard_normal((1, 8192, 8), dtype=np.float32)
attention(x[:, :64])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result = attention(x)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert result.lse.shape == (1, 1, 8192) and np.isfinite(result.lse).all()
print(after - before)
"""


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_square_of_the_length(tmp_path):
    """The weights of 8192 queries and keys are 256 MiB in float32; what is asked for here is less than 1 MiB."""
    artifact = mhsa.compile(spec_of(("y", "lse", "entropy", "top_k:5", "weights:rows=0,-1"), embed_dim=8, num_heads=1,
                                    num_kv_heads=1))  # fmt: skip
    artifact.save(tmp_path / "long")
    child = subprocess.run([sys.executable, "-c", LONG, tmp_path / "long"], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) < 32 * 1024  # KiB
