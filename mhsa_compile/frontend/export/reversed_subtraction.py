"""`1.0 - mask` of a mask of whole numbers: PyTorch's exporter to ONNX promotes every operand but this one's."""

from __future__ import annotations

import torch


def promote(program: torch.export.ExportedProgram) -> None:
    """Gives what a number is subtracted from the dtype of the difference, in place."""
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.rsub.Scalar):
        subtracted, dtype = node.args[0], node.meta["val"].dtype
        if subtracted.meta["val"].dtype == dtype:
            continue
        with graph.inserting_before(node):
            cast = graph.call_function(torch.ops.aten.to.dtype, (subtracted, dtype))
        cast.meta = {**subtracted.meta, "val": subtracted.meta["val"].to(dtype)}
        node.args = (cast, *node.args[1:])
