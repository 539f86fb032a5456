"""What a process that only loads an artifact finds: every function that its code calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper
from support.onnx_models import model_of

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError


def _model(nodes: list[tuple[str, list[str], list[str]]], outputs: dict[str, int]) -> ModelProto:
    made = [helper.make_node(kind, inputs, results) for kind, inputs, results in nodes]
    values = {name: (kind, None) for name, kind in outputs.items()}
    return model_of(made, {"x": ["n", 5]}, values, {"three": np.array([3]), "one": np.array(1)}, opset=18)


def test_a_fresh_process_has_all_of_them(tmp_path: Path) -> None:
    nodes = [
        ("TopK", ["x", "three"], ["v", "i"]),
        ("CumSum", ["x", "one"], ["c"]),
        ("NonZero", ["x"], ["z"]),
    ]
    outputs = {"v": TensorProto.FLOAT, "i": TensorProto.INT64, "c": TensorProto.FLOAT, "z": TensorProto.INT64}
    mhsa.compile(_model(nodes, outputs), without_attention="accept").save(tmp_path / "a.mhsa")
    x = np.array([[0, 4, np.nan, 3, 4], [2, 0, 0, -1, 5]], np.float32)
    np.save(tmp_path / "x.npy", x)
    program = (
        "import sys, numpy as np, mhsa_compile as mhsa; folder = sys.argv[1]; "
        "values, places, sums, found = mhsa.load(folder + '/a.mhsa')(np.load(folder + '/x.npy')); "
        "np.savez(folder + '/y.npz', values=values, places=places, sums=sums, found=found); "
        "assert 'tvm.relax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    results = np.load(tmp_path / "y.npz")
    np.testing.assert_array_equal(results["values"], np.array([[np.nan, 4, 4], [5, 2, 0]]))
    np.testing.assert_array_equal(results["places"], [[2, 1, 4], [4, 0, 1]])
    np.testing.assert_array_equal(results["sums"], x.cumsum(1))
    np.testing.assert_array_equal(results["found"], np.nonzero(x))


def test_code_that_calls_others_is_refused_by_its_node() -> None:
    """TVM has a Unique in Python, which is there while it compiles."""
    model = _model([("Unique", ["x"], ["u"])], {"u": TensorProto.FLOAT})
    with pytest.raises(ModelError, match=r"Unique node 'u'.* calls relax\.\S*unique, which TVM's runtime has not"):
        mhsa.compile(model, without_attention="accept")


def test_a_name_within_another_is_none(tmp_path: Path) -> None:
    from mhsa_compile.compiler.codegen.runtime_functions import AbsentFunctions, check_functions

    library, without, complete = (tmp_path / f"{name}.so" for name in ("module", "without", "complete"))
    library.write_bytes(b"\0ffi.Array\0")
    without.write_bytes(b"\0ffi.ArraySize\0")
    with pytest.raises(AbsentFunctions, match=r"ffi\.Array,"):
        check_functions(library, [without])
    complete.write_bytes(b"\0ffi.ArraySize\0ffi.Array\0")
    check_functions(library, [without, complete])
