"""ONNX Runtime beside the user's process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from mhsa_compile.verification import runtime_process
from mhsa_compile.verification.evaluators import Evaluators
from mhsa_compile.verification.runtime_process import RuntimeProcess, RuntimeRefusedError

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def sum_of(x: str = "x", operator: str = "Add") -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["B", 3]) for name in (x, "y")]
    weight = numpy_helper.from_array(np.float32([1, 2, 3]), "w")
    graph = helper.make_graph([helper.make_node(operator, [x, "w"], ["y"])], "g", values[:1], values[1:], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_outputs_come_call_after_call_whatever_inputs_are_named(tmp_path: Path) -> None:
    for name in ("x", "file", "a/b é"):
        process = RuntimeProcess(sum_of(name), None)
        for factor in (1, 2):
            (y,) = process.run({name: X[:factor] * factor})
            np.testing.assert_array_equal(y, X[:factor] * factor + np.float32([1, 2, 3]))
    onnx.save(sum_of(), tmp_path / "m.onnx")
    (y,) = RuntimeProcess(sum_of(), tmp_path / "m.onnx").run({"x": X})
    np.testing.assert_array_equal(y, X + np.float32([1, 2, 3]))


def test_what_it_refuses_is_its_own_words_and_it_goes_on() -> None:
    process = RuntimeProcess(sum_of(), None)
    with pytest.raises(RuntimeRefusedError, match="x"):
        process.run({"x": X.astype(np.float64)})
    assert len(process.run({"x": X})) == 1
    with pytest.raises(RuntimeRefusedError, match="Addd"):
        RuntimeProcess(sum_of(operator="Addd"), None).run({"x": X})


def test_a_crash_is_a_refusal_that_names_the_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "crash.py"
    program.write_text("import os, signal, sys\nsys.stdin.buffer.read(9)\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setattr(runtime_process, "_PROGRAM", program)
    evaluators = Evaluators(sum_of(), sum_of(), None)
    assert evaluators.rounded({"x": X}) is None
    assert "its process ended by SIGSEGV" in evaluators.last_refusal
    assert not evaluators.has_runtime


CRASH = """
import numpy as np, onnx
from onnx import helper, numpy_helper
import mhsa_compile as mhsa
x, y = (helper.make_tensor_value_info(name, 1, [2, 7, 32]) for name in "xy")
weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal((32, 96), np.float32), "w")
node = helper.make_node("Attention", ["x", "w"], ["y"], domain="com.microsoft", num_heads=4)
imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
model = helper.make_model(helper.make_graph([node], "g", [x], [y], [weight]), opset_imports=imports, ir_version=10)
artifact = mhsa.compile(model, check=True)
print(mhsa.load(artifact)(np.ones((2, 7, 32), np.float32)).shape, artifact.manifest.check.note)
"""


@pytest.mark.thorough
def test_a_file_that_onnx_runtime_crashes_on_is_compiled() -> None:
    """Attention of com.microsoft without its bias, which its schema allows: a segmentation fault in 1.31.1."""
    run = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.startswith("(2, 7, 32)")
