"""Weights are packed in steps: right values, whoever reads a weight, and memory for hardly more than one of each."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from onnx import TensorProto, helper
from support.bind_functions import Machine
from support.onnx_models import model_of

import mhsa_compile as mhsa
from mhsa_compile.runtime import weight_binding
from mhsa_compile.runtime.standalone.bundle import bundle
from mhsa_compile.runtime.weight_binding import SharedWeights

D, LAYERS, V = 512, 24, 301


def drawn(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    weights = {f"w{i}": (rng.standard_normal((D, D)) / np.sqrt(D)).astype("f4") for i in range(LAYERS)}
    return {"zero": np.full(D, 0.01, "f4"), "table": rng.standard_normal((V, D)).astype("f4"), **weights}


def right(weights: dict[str, Any], ids: Any) -> Any:
    wide = {name: value.astype(np.float64) for name, value in weights.items()}
    x = wide["table"][ids]
    for i in range(LAYERS):
        x = np.maximum(x @ wide[f"w{i}"] + wide["zero"], 0)
    return x @ (wide["table"].T + wide["zero"][:1])


def compiled(**dims: int) -> mhsa.Artifact:
    """Layers that share one small bias, and a table whose rows are picked, and of which the last weight is made."""
    node, value = helper.make_node, "x0"
    nodes = [node("Gather", ["table", "ids"], ["x0"])]
    for i in range(LAYERS):
        nodes += [
            node("Gemm", [value, f"w{i}", "zero"], [f"a{i}"]),
            node("Relu", [f"a{i}"], [value := f"x{i + 1}"]),
        ]
    nodes += [
        node("Transpose", ["table"], ["turned"], perm=[1, 0]),
        node("Slice", ["zero", "begin", "end"], ["first"]),
        node("Add", ["turned", "first"], ["head"]),
        node("MatMul", [value, "head"], ["y"]),
    ]
    constants = {**drawn(0), "begin": np.array([0]), "end": np.array([1])}
    model = model_of(nodes, {"ids": (TensorProto.INT64, ["n"])}, {"y": ["n", V]}, constants)
    return mhsa.compile(model, dims=dims, without_attention="accept")


@pytest.fixture(scope="module")
def artifact() -> mhsa.Artifact:
    return compiled()


@pytest.fixture(scope="module")
def step() -> mhsa.Artifact:
    """The same of a single row, as a decoder's step beside its prompt."""
    return compiled(n=1)


def test_any_weights_are_bound_right_and_stay_their_owners(artifact: mhsa.Artifact) -> None:
    ids = np.arange(7) * 41
    for seed in (0, 1):
        weights = drawn(seed)
        before = {name: array.copy() for name, array in weights.items()}
        for _ in range(2):
            attention = mhsa.load(artifact, weights=weights if seed else None)
            expected = right(weights, ids)
            assert np.abs(attention(ids) - expected).max() < 1e-4 * np.abs(expected).max()
        assert all(np.array_equal(before[name], weights[name]) for name in weights)


def test_a_prompt_and_a_step_have_their_weights_in_common(artifact: mhsa.Artifact, step: mhsa.Artifact) -> None:
    """As long as either is loaded, and no longer; what a caller brings is its own."""
    assert artifact.manifest.files["module.so"] != step.manifest.files["module.so"]
    before, ids = len(weight_binding._results()), np.arange(7) * 41
    expected = right(drawn(0), ids)
    many, one, other = mhsa.load(artifact), mhsa.load(step), mhsa.load(artifact, weights=drawn(0))
    packed = list(map(id, many._packed))
    assert list(map(id, one._packed)) == packed
    assert not {*map(id, other._packed)} & {*packed}
    assert np.abs(many(ids) - expected).max() < 1e-4 * np.abs(expected).max()
    del many
    assert np.abs(one(ids[:1]) - expected[:1]).max() < 1e-4 * np.abs(expected).max()
    many = mhsa.load(artifact)
    assert list(map(id, many._packed)) == packed
    del many, one
    assert len(weight_binding._results()) == before


def test_only_what_is_made_of_the_same_weights_alike_is_in_common(artifact: mhsa.Artifact) -> None:
    manifest, names = artifact.manifest, [info.name for info in artifact.manifest.weights]
    first, *others = manifest.packing
    own, of_others = ({names[i] for one in steps for i in one.weights} for steps in ([first], others))
    loaded = mhsa.load(artifact)
    for changed, reads in (
        (manifest, set()),
        (replace(manifest, packing=(replace(first, digest="0" * 64), *others)), own),
        (replace(manifest, files={**manifest.files, "weights.safetensors": "0" * 64}), own | of_others),
    ):
        shared = SharedWeights(changed, None)
        assert {name for name in names if shared.needs(name)} == reads
        assert (shared.get(0) is None) == bool(reads)
    assert all(map(SharedWeights(manifest, drawn(0)).needs, names))
    assert loaded(np.array([3])).shape == (1, V)


@pytest.mark.thorough
def test_loads_at_once_give_each_its_weights(artifact: mhsa.Artifact, step: mhsa.Artifact) -> None:
    expected = right(drawn(0), np.array([5]))

    def error(number: int) -> float:
        loaded = [mhsa.load((artifact, step)[(number + i) % 2], threads=1) for i in range(3)]
        return max(float(np.abs(one(np.array([5])) - expected).max()) for one in loaded)

    with ThreadPoolExecutor(4) as callers:
        assert max(callers.map(error, range(12))) < 1e-4 * np.abs(expected).max()


def test_a_large_weight_is_read_by_one_step(artifact: mhsa.Artifact) -> None:
    reads: dict[int, set[str]] = {}
    machine = mhsa.load(artifact)._thread._vm.machine
    names = list(weight_binding._names(machine))
    for name in names:
        for place in weight_binding._weights_of(machine, name, len(artifact.manifest.weights)):
            reads.setdefault(place, set()).add(name)
    steps = {info.name: len(reads.get(place, ())) for place, info in enumerate(artifact.manifest.weights)}
    assert steps.pop("zero") > 1
    assert set(steps.values()) == {1}
    assert 8 <= len(names) <= 24


def test_what_was_read_is_let_go_of() -> None:
    """Behind the last step that reads it; what nobody reads, at once."""
    machine = Machine(bind_weights_0=[2, 0], bind_weights_1=[2, 3])
    weights: list[Any] = list("abcd")
    kept = []

    def bind(function: Any, arguments: list[Any]) -> list[str]:
        kept.append("".join(weight or "." for weight in weights))
        return [function + "".join(arguments)]

    assert weight_binding.bound(machine, weights, bind) == ("bind_weights_0ca", "bind_weights_1cd")
    assert kept == ["..cd", "...."]
    with pytest.raises(ValueError, match="bind_weights_1 takes weight_2, weight_3, of 3 weights"):
        weight_binding.bound(machine, list("abc"), bind)


def test_formats_before_bind_all_at_once() -> None:
    machine = Machine(bind_weights=[])
    assert weight_binding.bound(machine, ["a", "b"], lambda function, arguments: [*arguments, function]) == (
        "a", "b", "bind_weights",
    )  # fmt: skip


_PEAK = """
import sys, mhsa_compile
from mhsa_compile.runtime import tvm_runtime
tvm_runtime.start(), mhsa_compile.load
peak = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
before = peak()
loaded = [mhsa_compile.load(path, threads=1) for path in sys.argv[1:]]
print(peak() - before)
"""


@pytest.mark.thorough_but("1")
@pytest.mark.parametrize("artifacts", [1, 2])
def test_weights_are_not_in_memory_twice(artifacts: int, artifact: mhsa.Artifact, step: mhsa.Artifact) -> None:
    """Loading takes little more than what stays; the file, its tensors and their packed form took three times that. A
    second artifact of the same weights takes none."""
    size = sum(array.nbytes for array in drawn(0).values()) / 2**20
    words = [sys.executable, "-c", _PEAK, *(str(one.path) for one in (artifact, step)[:artifacts])]
    grown = float(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert size < grown < 1.5 * size


_OF_A_PROGRAM = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
"""  # of a small process: a child has what its parent had, before it is the program


@pytest.mark.thorough
def test_nor_are_they_in_the_program_of_a_bundle(artifact: mhsa.Artifact, tmp_path: Path) -> None:
    bundle(artifact, tmp_path / "b", build=True)
    words = [sys.executable, "-c", _OF_A_PROGRAM, tmp_path / "b" / "attention", "--dim", "n=3", "--repeat", "1"]
    most = float(subprocess.run(list(map(str, words)), capture_output=True, text=True, check=True).stdout)
    size = sum(array.nbytes for array in drawn(0).values()) / 2**20
    assert size < most < 1.4 * size + 16  # its code and libraries among it
