"""Weights are packed in steps: right values, whoever reads a weight, and memory for hardly more than one of each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from support.bind_functions import Machine
from support.onnx_models import model_of

import mhsa_compile as mhsa
from mhsa_compile.runtime import weight_binding
from mhsa_compile.runtime.standalone.bundle import bundle

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


@pytest.fixture(scope="module")
def artifact() -> mhsa.Artifact:
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
    # On matrix tiles "auto" packs three terms of two bytes for a number, half as much again as a float32.
    return mhsa.compile(model, without_attention="accept", float32_products="ieee")


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
attention = mhsa_compile.load(sys.argv[1], threads=1)
print(peak() - before)
"""


def test_weights_are_not_in_memory_twice(artifact: mhsa.Artifact) -> None:
    """Loading takes little more than what stays; the file, its tensors and their packed form took three times that."""
    size = sum(array.nbytes for array in drawn(0).values()) / 2**20
    words = [sys.executable, "-c", _PEAK, str(artifact.path)]
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
