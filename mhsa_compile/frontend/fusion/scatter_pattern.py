"""One TensorScatter node of an ONNX graph: a cache, the rows that go into it, and whether it is written in place.

A model says in its metadata, under "mhsa.in_place", which caches a call may write into: a JSON object, input -> output,
such as {"past_key": "present_key"}. ONNX has no word for that; its operator returns a copy.

Whatever the standard forbids, or the kernel cannot do, is refused by the node's name.
Source: ONNX TensorScatter-24 (onnx.ai/onnx/operators/onnx__TensorScatter.html).
Notation: B batch, L length of the update, S length of the cache.
"""

from __future__ import annotations

import msgspec
import onnx

from mhsa_compile.errors import ModelError
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.frontend.fusion.fused_nodes import FusedScatter
from mhsa_compile.frontend.fusion.head_layout import NodePattern, Operand, contradict, split_rows
from mhsa_compile.frontend.onnx_graph import GraphDim, GraphView, metadata_of
from mhsa_compile.spec.attention_spec import IN_PLACE_KEY
from mhsa_compile.spec.checks import DTYPES


class ScatterPattern(NodePattern):
    """One TensorScatter node, with the views before its update."""

    def __init__(self, graph: GraphView, node: onnx.NodeProto) -> None:
        super().__init__(graph, node)
        self.cache, self.update, self.indices = (*node.input, "")[:3]
        self.circular = self._is_circular()
        self.axis = self._check_shapes()
        self._check_dtypes()
        self.rows = self._unrounded()
        self.operand = self._rows()
        self.operands = [] if self.operand is None else [self.operand]
        self.in_place = in_place(graph).get(self.cache) == node.output[0]

    def _is_circular(self) -> bool:
        mode = self.attributes.get("mode", "linear")
        if mode not in ("linear", "circular"):
            raise self.refusal('mode of "linear" or "circular"', repr(mode))
        return bool(mode == "circular")

    def _check_shapes(self) -> int:
        """Checks the shapes, and returns the axis of the rows, counted from the front."""
        cache, update = self._known(self.cache, "past_cache"), self._known(self.update, "update")
        rank, attribute = len(cache), int(self.attributes.get("axis", -2))
        axis = attribute + rank if attribute < 0 else attribute
        if not 0 < axis < rank:
            raise self.refusal(
                f"axis from 1 to {rank - 1}, or from {1 - rank} to -1, as past_cache has {rank}", attribute
            )
        expected = (*cache[:axis], update[axis] if len(update) == rank else None, *cache[axis + 1 :])
        if len(update) != rank or contradict(update, expected):
            raise self.refusal(f"an update of the shape of past_cache, {cache}, but for axis {axis}", update)
        most, new = cache[axis], update[axis]
        if isinstance(most, int) and isinstance(new, int) and new > most:
            raise self.refusal(f"an update of at most {most} on axis {axis}, as past_cache has", new)
        if self.indices and contradict(self.ranked(self.indices, "write_indices", 1), cache[:1]):
            raise self.refusal(f"write_indices of shape ({cache[0]},)", self.graph.shape(self.indices))
        return axis

    def _known(self, name: str, role: str) -> tuple[GraphDim, ...]:
        shape = self.graph.shape(name)
        if shape is None or len(shape) < 2:
            raise self.refusal(f"{role} of known rank, 2 or more", shape)
        return shape

    def _check_dtypes(self) -> None:
        cache, update = self.graph.dtype(self.cache), self.graph.dtype(self.update)
        if cache is None or cache != update:
            raise self.refusal("past_cache and update of one dtype", f"{cache} and {update}")
        if self.indices and self.graph.dtype(self.indices) != "int64":
            raise self.refusal("write_indices of int64", self.graph.dtype(self.indices))

    def _rows(self) -> Operand | None:
        """The rows that the update is a view of, where it is one; None where it lies by itself, as the cache does."""
        shape = self.graph.dims(self.rows)
        if len(shape) == 3 and self.axis == 1 and isinstance(shape[2], int):
            return Operand(self.rows, "rows", 1, shape[2], width=shape[2])
        if self.axis != 2:
            return None
        split = split_rows(self.graph, self.rows, [self.node, *self.absorbed])
        self.absorbed += [] if split is None else split[1]
        return None if split is None else split[0]

    def _unrounded(self) -> str:
        """The update before a Cast that rounds it for this cache alone."""
        rounding = self.graph.producer(self.update, "Cast")
        alone = rounding is not None and self.graph.consumers(self.update) == [self.node]
        if rounding is None or not alone or self.update in self.graph.outputs:
            return str(self.update)
        if not {self.graph.dtype(self.update), self.graph.dtype(rounding.input[0])} <= set(DTYPES):
            return str(self.update)
        self.absorbed.append(rounding)
        return str(rounding.input[0])

    def fused_node(self) -> onnx.NodeProto:
        rows = self.operand
        fused = FusedScatter(
            axis=self.axis,
            circular=self.circular,
            in_place=self.in_place,
            update=None if rows is None else rows.as_input(1),
            indices_name=self.spoken(self.indices, "write_indices"),
            update_name=self.spoken(self.update, "update"),
        )
        inputs = [self.cache, self.rows if rows is None else rows.source, *([self.indices] if self.indices else [])]
        return fused.to_node(self.node, inputs, self.node.output)


def in_place(graph: GraphView) -> dict[str, str]:
    """Input -> output, of the caches that a call writes into. Raises ModelError where that would change a result."""
    pairs = declared_in_place(graph.model)
    for source, result in pairs.items():
        node = graph.producer(result, "TensorScatter")
        if source not in graph.inputs or result not in graph.outputs or node is None or node.input[0] != source:
            expected = "an input that a TensorScatter takes as past_cache, and the output that it makes"
            raise _refuse_pair(source, result, expected, "another pair")
        others = [other.op_type for other in graph.consumers(source) if other is not node]
        if others or source in graph.outputs or list(node.input).count(source) > 1:
            reader = others[0] if others else "the graph's outputs" if source in graph.outputs else "its update"
            raise _refuse_pair(source, result, "an input that the TensorScatter alone reads", f"{reader}, too")
    return pairs


def declared_in_place(model: onnx.ModelProto) -> dict[str, str]:
    """Input -> output, of the caches that the model says are written in place. Raises ModelError."""
    names = metadata_of(model).get(IN_PLACE_KEY, "{}")
    with reading(ModelError, f"metadata {IN_PLACE_KEY!r}", 'a JSON object such as {"past_key": "present_key"}'):
        return msgspec.json.decode(names, type=dict[str, str])


def _refuse_pair(source: str, result: str, expected: str, got: str) -> ModelError:
    return ModelError(f"metadata {IN_PLACE_KEY!r}, {source!r} -> {result!r}", expected, got)
