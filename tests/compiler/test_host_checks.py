"""Functions that hold a call to what it brings run on the host: on a GPU, where their number lies, none is left."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper, numpy_helper, parser
from tvm import tirx

from mhsa_compile.compiler.fallback import cpu_schedule, cuda_schedule
from mhsa_compile.frontend.relax.importer import import_onnx
from mhsa_compile.frontend.relax.sizes.call_checks import CHECK
from mhsa_compile.hardware.profile import CpuProfile, CudaProfile, load_profile
from mhsa_compile.records.record import RecordSet


@pytest.mark.parametrize("target", ["x86-64-v3", "cuda-sm80"])
def test_checks_are_left_to_the_host(target: str) -> None:
    text = "g (float[B, L, 4] x) => (float[N, 2, 4] y, float[M, 3, 4] z) { y, z = Split <axis=1> (x, n) }"
    graph = parser.parse_graph(text)
    graph.initializer.append(numpy_helper.from_array(np.array([2, 3]), "n"))
    module = import_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])).module
    profile = load_profile(target)
    if isinstance(profile, CudaProfile):
        lowered = cuda_schedule.lower(module, profile)
    else:
        assert isinstance(profile, CpuProfile)
        lowered = cpu_schedule.lower(module, profile, RecordSet([], profile)).module
    functions = [f for _, f in lowered.functions_items() if isinstance(f, tirx.PrimFunc)]
    checks = [f for f in functions if CHECK in f.attrs]
    assert len(checks) == (0 if isinstance(profile, CudaProfile) else 1)
    assert "match_cast" in lowered["main"].script()
