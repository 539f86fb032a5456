"""Large weights of a float64 evaluation, which stay as their file has them: products and picked rows widen as much of
them at a time as fits a cache. Copies in float64 of a model of 110 million weights would be 0.9 GB, and take longer to
write than the evaluation takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx.reference.op_run import OpRun

_LEAST = 1 << 16
"""Elements of a weight that stays narrow."""
_PART = 1 << 16
"""Elements that are widened at a time: half a megabyte in float64."""
_READERS = (("MatMul", 1), ("Gemm", 1), ("Gather", 0))
_VIEWS = ("Identity", "Transpose")


def narrow_weights(graph: onnx.GraphProto) -> set[str]:
    """The large floating matrices of a graph that nobody reads but the operators of this file, and views of them."""
    readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
    for node in graph.node:
        for place, name in enumerate(node.input):
            readers.setdefault(name, []).append((node, place))
    elsewhere = {value.name for value in graph.output} | _names_in_branches(graph)

    def is_narrow(name: str) -> bool:
        return name not in elsewhere and all(
            node.domain in ("", "ai.onnx")
            and ((node.op_type, place) in _READERS or (node.op_type in _VIEWS and is_narrow(node.output[0])))
            for node, place in readers.get(name, ())
        )

    large = (t.name for t in graph.initializer if len(t.dims) == 2 and t.dims[0] * t.dims[1] >= _LEAST)
    return {name for name in large if is_narrow(name)}


def _names_in_branches(graph: onnx.GraphProto) -> set[str]:
    branches = [a.g for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    names = {name for branch in branches for node in branch.node for name in node.input}
    names |= {value.name for branch in branches for value in branch.output}
    return names.union(*map(_names_in_branches, branches))


def widened_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a (M, K) times b (K, N), of which b may be narrower than a."""
    if b.dtype == a.dtype or not b.size:
        return np.asarray(a @ b)
    by_columns = b.flags.f_contiguous
    rows = b.T if by_columns else b  # as they lie in memory
    step = max(1, _PART // rows.shape[1])
    wide, result = np.empty((min(step, len(rows)), rows.shape[1])), np.zeros((a.shape[0], b.shape[1]))
    for first in range(0, len(rows), step):
        part = slice(first, min(first + step, len(rows)))
        some = wide[: part.stop - first]  # one buffer: the system clears each new one
        some[:] = rows[part]
        if by_columns:
            np.matmul(a, some.T, out=result[:, part])
        else:
            result += a[:, part] @ some
    return result


class _NarrowMatMul(OpRun):  # type: ignore[misc]  # one product for all rows, where onnx's own makes one for each entry
    def _run(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray]:
        if b.ndim != 2 or a.ndim < 2:
            return (np.matmul(a, b),)
        rows = a.reshape(-1, a.shape[-1])
        return (widened_product(rows, b).reshape(*a.shape[:-1], b.shape[-1]),)


class _NarrowGemm(OpRun):  # type: ignore[misc]
    def _run(self, a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None, **attributes: Any) -> tuple[np.ndarray]:
        left, right = a.T if attributes["transA"] else a, b.T if attributes["transB"] else b
        product = attributes["alpha"] * widened_product(left, right)
        return (product if c is None else product + attributes["beta"] * c,)


class _NarrowGather(OpRun):  # type: ignore[misc]
    def _run(self, data: np.ndarray, indices: np.ndarray, axis: int | None = None) -> tuple[np.ndarray]:
        rows = np.take(data, indices, axis or 0)
        return (rows if data.dtype.kind in "biu" else rows.astype(np.float64, copy=False),)


for _operator, _name in ((_NarrowMatMul, "MatMul"), (_NarrowGemm, "Gemm"), (_NarrowGather, "Gather")):
    _operator.__name__ = _name  # the evaluator goes by these names
WIDENING: tuple[type[OpRun], ...] = (_NarrowMatMul, _NarrowGemm, _NarrowGather)
"""The operators of a float64 evaluation that read narrow weights."""
