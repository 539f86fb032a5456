"""OpenVINO on the CPU: one stream, latency, at the precision of the workload.

It fuses products and softmax, whichever way they are written, and holds no scores in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from mhsa_bench.peers import onnx_graph
from mhsa_bench.peers.onnx_graph import Feed, RewrittenGraph
from mhsa_bench.peers.peer import DTYPES, Opened, Problem
from mhsa_compile.hardware import environment
from mhsa_compile.runtime.artifact.manifest import MODEL

PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class OpenVinoOwnGraph:
    """The artifact's model.onnx: OpenVINO reads the standard operator Attention."""

    name = "Attention"

    @contextmanager
    def open(self, problem: Problem, threads: int) -> Iterator[Opened]:
        yield _compiled(problem.artifact.path / MODEL, threads, problem, lambda arrays, names: dict(arrays))


def _compiled(model: Any, threads: int, problem: Problem, feed: Feed) -> Opened:
    """A compiled model, with a request of its own for each set of inputs, which it reads in place."""
    core = _openvino().Core()
    graph = core.read_model(model)
    dtype = problem.artifact.manifest.inputs[0].dtype
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": PRECISIONS[dtype],
        "ENABLE_CPU_PINNING": False,  # the benchmark places every pool's threads itself
    }
    compiled = core.compile_model(graph, "CPU", settings)
    names = [port.get_any_name() for port in compiled.inputs]
    calls = []
    for arrays in problem.inputs:
        request, feeds = compiled.create_infer_request(), feed(arrays, names)
        for name, array in feeds.items():
            request.set_tensor(name, _tensor(array))
        calls.append(partial(_infer, request, feeds))
    return Opened(calls, lambda request: [_array(tensor) for tensor in request.output_tensors])


def _openvino() -> Any:
    """The package `openvino`, without its telemetry: that would send an event from a process of its own, which imports
    the main program once more and so takes one CPU for seconds, among the first measurements."""
    environment.require("openvino", extra="bench")
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # it takes a stub instead
    import openvino

    return openvino


def _infer(request: Any, _feeds: dict[str, np.ndarray]) -> Any:
    """Runs a request, and keeps the arrays alive, whose memory the request only points to."""
    request.infer()
    return request


def _tensor(array: np.ndarray) -> Any:
    """A tensor of OpenVINO's over the array itself, not over a copy."""
    import openvino

    if array.dtype.name == "bfloat16":  # NumPy's own dtypes do not have it
        return openvino.Tensor(array.view(np.uint16), array.shape, openvino.Type.bf16)
    return openvino.Tensor(array, shared_memory=True)


def _array(tensor: Any) -> np.ndarray:
    import openvino

    array: np.ndarray = np.array(tensor.data)
    return array.view(DTYPES["bfloat16"]) if tensor.element_type == openvino.Type.bf16 else array


FORMS = (OpenVinoOwnGraph(), RewrittenGraph("MatMul and Softmax", onnx_graph.standard, _compiled, holds_scores=False))
