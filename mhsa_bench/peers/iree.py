"""IREE: compiled ahead of time for this CPU, from ONNX operators that its importer reads.

Its attention operator is no option: on the CPU it took ten times as long as the products and the softmax by themselves
(IREE 3.13, 12 heads of 64, L = S = 1024).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mhsa_bench.peers import onnx_graph
from mhsa_bench.peers.peer import Opened, Problem
from mhsa_compile.hardware import environment

if TYPE_CHECKING:
    from onnx import ModelProto

FLAGS = ("--iree-llvmcpu-target-cpu=host", "--iree-opt-level=O3")


class Iree:
    """Matrix products and a softmax; weights are constants, so that it may pack them."""

    name = "iree"

    @contextmanager
    def open(self, problem: Problem, threads: int) -> Iterator[Opened]:
        problem.check_scores_fit()
        environment.require("iree.compiler", "iree.runtime", extra="bench")
        from iree import runtime

        model = onnx_graph.standard(problem)
        device = _device(threads)
        config = runtime.Config(device=device)
        context = runtime.SystemContext(config=config)
        module = runtime.VmModule.copy_buffer(config.vm_instance, _binary(model))
        context.add_vm_module(module)
        function = context.modules[module.name][model.graph.name]
        names = [value.name for value in model.graph.input]
        calls = []
        for arrays in problem.inputs:
            feeds = onnx_graph.inputs(problem, arrays, names)
            calls.append(partial(function, *(runtime.asdevicearray(device, feeds[name]) for name in names)))
        yield Opened(calls, lambda result: [np.asarray(result.to_host())], caller_works=threads == 1)


def _binary(model: ModelProto) -> bytes:
    """ONNX -> IREE's form of it -> code for this CPU."""
    import onnx
    from iree import compiler
    from iree.compiler.extras import onnx_importer

    info = onnx_importer.ModelInfo(onnx.shape_inference.infer_shapes(model))  # it reads no shape that is not written
    module = info.create_module(context=compiler.ir.Context()).operation
    onnx_importer.NodeImporter.define_function(info.main_graph, module).import_all()
    text = module.get_asm(binary=True)
    return bytes(compiler.compile_str(text, target_backends=["llvm-cpu"], input_type="onnx", extra_args=list(FLAGS)))


def _device(threads: int) -> Any:
    """The calling thread alone, or a pool of `threads` workers, whom the caller waits for."""
    from iree.runtime import _binding, flags

    if threads == 1:
        return _binding.create_hal_driver("local-sync").create_default_device()
    flags.parse_flags(f"--task_topology_group_count={threads}")  # read when a driver is made; cached ones keep theirs
    return _binding.create_hal_driver("local-task").create_default_device()
