"""A size that a call brings is named before whoever reads it, whatever TVM joins; and what holds a call to what it
brings runs on the host: on a GPU, where the number lies, none is left."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper, numpy_helper, parser
from tvm import tirx

import mhsa_compile as mhsa
from mhsa_compile.compiler.fallback import cpu_schedule, cuda_schedule
from mhsa_compile.compiler.fallback.binding_order import sizes_first
from mhsa_compile.compiler.pipeline import import_source
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


MODEL = """<ir_version: 9, opset_import: ["" : 17]> g (int32 n) => (float[m] y) {
    whole = HannWindow(n)  half = HannWindow <periodic = 0> (n)  y = Mul(whole, half) }"""


def test_windows_of_a_length_that_comes_by_the_call() -> None:
    call = mhsa.load(mhsa.compile(parser.parse_model(MODEL), without_attention="accept"))
    for n in (7, 400):
        angles = 2 * np.pi * np.arange(n)
        right = (0.5 - 0.5 * np.cos(angles / n)) * (0.5 - 0.5 * np.cos(angles / (n - 1)))
        np.testing.assert_allclose(call(np.array(n, np.int32)), right, atol=1e-5)


def test_what_is_in_order_stays_as_it_is() -> None:
    with pytest.warns(UserWarning, match="holds no attention"):
        module = import_source(parser.parse_model(MODEL)).module
    assert sizes_first(module) is module


FIRST_ROWS = """<ir_version: 9, opset_import: ["" : 17]> g (float[L, 96] x) => (float[m, n] y)
<int64[1] begin = {0}, int64[1] end = {2000000000}> {
    twice = Concat <axis = 0> (x, x)  rows = Slice(twice, begin, end)  turned = Transpose(rows)
    products = MatMul(rows, turned)  y = Tanh(products) }"""


def test_memory_is_planned_for_the_sizes_of_a_call_not_for_the_bounds_of_a_slice() -> None:
    call = mhsa.load(mhsa.compile(parser.parse_model(FIRST_ROWS), without_attention="accept"))
    for count in (1, 7):
        x = np.linspace(-1, 1, 96 * count, dtype=np.float32).reshape(count, 96)
        twice = np.concatenate((x, x))
        np.testing.assert_allclose(call(x), np.tanh(twice @ twice.T), atol=1e-6)


UNSHUFFLED = """<ir_version: 9, opset_import: ["" : 18]> g (float[B, 3, H, W] x) => (float[m, n, h, 2, w, 2] y)
<int64[1] all = {-1}, int64[1] channels = {3}, int64[1] two = {2}> {
    height = Shape <start = 2, end = 3> (x)  width = Shape <start = 3> (x)  h = Div(height, two)  w = Div(width, two)
    sizes = Concat <axis = 0> (all, channels, h, two, w, two)  y = Reshape(x, sizes) }"""


def test_an_input_in_another_shape_of_computed_lengths_is_a_copy_and_no_place_is_sought() -> None:
    """LLVM took more than ten minutes for the divisions by three such lengths."""
    model = parser.parse_model(UNSHUFFLED)
    profile = load_profile("x86-64-v3")
    assert isinstance(profile, CpuProfile)
    lowered = cpu_schedule.lower(import_onnx(model).module, profile, RecordSet([], profile)).module
    names = {str(v.name_hint) for v, f in lowered.functions_items() if isinstance(f, tirx.PrimFunc)}
    assert any(name.startswith("copy") for name in names) and not any(name.startswith("reshape") for name in names)
    call = mhsa.load(mhsa.compile(model, without_attention="accept"))
    x = np.arange(2 * 3 * 4 * 10, dtype=np.float32).reshape(2, 3, 4, 10)
    y = call(x)
    assert not np.shares_memory(x, y)
    np.testing.assert_array_equal(y, x.reshape(2, 3, 2, 2, 5, 2))
