"""What a graph computes whatever its inputs hold: constants, and sizes, some of which are symbols."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from mhsa_compile.frontend.detach_weights import FLOATS, is_many_bytes
from mhsa_compile.frontend.onnx_graph import GraphView, attributes, node_error

ShapeEntry = int | bool | str | None
"""A size or a flag, the name of a size that is symbolic, or what is not known."""

_SHOWN = 8  # elements of a constant in a message
_MOST_ELEMENTS = 1 << 24  # of a constant that is computed here
_FOLDABLE = frozenset(
    ("Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Concat", "ConstantOfShape", "Cos", "CumSum", "Div", "Equal",
     "Exp", "Expand", "Floor", "Gather", "Greater", "GreaterOrEqual", "Identity", "IsInf", "Less", "LessOrEqual", "Log",
     "Max", "MelWeightMatrix", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "Range", "Reciprocal", "Reshape",
     "Size", "Slice", "Sqrt", "Squeeze", "Sub", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor")
)  # fmt: skip


def product(entries: Sequence[ShapeEntry]) -> int:
    """The product of the entries that are numbers."""
    return math.prod(entry for entry in entries if isinstance(entry, int))


class KnownGraph(GraphView):
    """A graph with the values that do not depend on what its inputs hold, computed when somebody asks for one. Weights
    are left alone, to be bound later."""

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__(model)
        self._arrays: dict[str, np.ndarray] = {}
        self._partial: dict[str, np.ndarray] = {}
        self._is_computed = False

    def array(self, name: str) -> np.ndarray | None:
        """A value, where all of it is known; None where it is not."""
        self._compute()
        return self._arrays.get(name)

    def partial(self, name: str) -> np.ndarray | None:
        """A list of sizes (or one) as an array of entries, where at least its length is known."""
        array = self.array(name)
        if name in self._partial:
            return self._partial[name]
        return None if array is None or array.ndim > 1 or array.dtype.kind not in "bi" else _object(array.tolist())

    def scalar(self, name: str) -> float | None:
        """The value of a constant of one element."""
        array = self.array(name)
        return None if array is None or array.size != 1 else float(array.reshape(-1)[0])

    def _compute(self) -> None:
        if self._is_computed:
            return
        self._is_computed = True
        for name, tensor in self.initializers.items():
            small = math.prod(tensor.dims) == 1
            if small or not (tensor.data_type in FLOATS or is_many_bytes(tensor)):
                self._arrays[name] = np.asarray(numpy_helper.to_array(tensor))
        for node in self.nodes:
            if node.domain in ("", "ai.onnx"):
                self._learn(node)

    def _learn(self, node: onnx.NodeProto) -> None:
        inputs, output = [name for name in node.input if name], node.output[0] if node.output else ""
        if node.op_type == "Constant":
            if (value := self.constant(output)) is not None:
                self._arrays[output] = value
        elif node.op_type in _FOLDABLE and inputs and all(map(self._arrays.__contains__, inputs)) and self._fits(node):
            self._arrays[output] = self._evaluated(node)
        elif node.op_type == "CastLike" and inputs[0] in self._arrays and (like := self.dtype(output)):
            self._arrays[output] = self._arrays[inputs[0]].astype(like)  # like what, is known by its type
        elif (entries := self._entries(node)) is not None:
            if all(isinstance(entry, int) for entry in entries.reshape(-1).tolist()):
                self._arrays[output] = entries.astype(self.dtype(output) or "int64")
            else:
                self._partial[output] = entries

    def _fits(self, node: onnx.NodeProto) -> bool:
        shape = self.shape(node.output[0])
        return shape is not None and all(isinstance(d, int) for d in shape) and product(shape) <= _MOST_ELEMENTS

    def _evaluated(self, node: onnx.NodeProto) -> np.ndarray:
        names = filter(None, dict.fromkeys(node.input))
        arrays = {name: self._arrays[name] for name in names}
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in arrays.items()
        ]
        output = helper.make_tensor_value_info(node.output[0], onnx.TensorProto.UNDEFINED, None)
        graph = helper.make_graph([node], "constant", inputs, [output])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)
        try:
            with np.errstate(all="ignore"):
                return np.asarray(ReferenceEvaluator(model).run(None, arrays)[0])
        except Exception as error:  # the evaluator's own kinds, and NumPy's
            values = [f"{name} {a.tolist() if a.size <= _SHOWN else a.shape}" for name, a in arrays.items()]
            expected, hint = "constants of which it can be computed", "Correct the file, or export it again."
            raise node_error(node, expected, ", ".join(values), hint) from error

    def _entries(self, node: onnx.NodeProto) -> np.ndarray | None:
        """Sizes as far as they are known, by the operators that exporters compute them with."""
        if node.op_type == "Shape":
            dims, attrs = self.shape(node.input[0]), attributes(node)
            return None if dims is None else _object(list(dims)[attrs.get("start", 0) : attrs.get("end")])
        inputs = {name: self.partial(name) for name in node.input if name}
        if node.op_type not in _OPERATORS or any(v is None for v in inputs.values()):
            return None
        try:
            return _object(_OPERATORS[node.op_type](*(inputs.get(name) for name in node.input)))
        except (IndexError, TypeError, ValueError):  # indices that are themselves not known
            return None


def _slice(
    entries: np.ndarray, start: np.ndarray, end: np.ndarray, axis: np.ndarray | None = None, step: Any = None
) -> Any:
    return entries[slice(int(start[0]), int(end[0]), 1 if step is None else int(step[0]))]


def _lone(entries: np.ndarray) -> Any:
    """The entry of a size, or of a list of one."""
    (entry,) = entries.reshape(-1)  # a longer list has no form here: ValueError
    return entry


def _object(value: Any) -> np.ndarray:
    array = np.empty(np.shape(value), dtype=object)
    array[...] = value
    return array


def multiplied(a: ShapeEntry, b: ShapeEntry) -> ShapeEntry:
    """The product of two sizes, where it is a number or one of them."""
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    return b if a == 1 else a if b == 1 else None


def _divide(a: ShapeEntry, b: ShapeEntry) -> ShapeEntry:
    if isinstance(a, int) and isinstance(b, int) and b:
        return int(a / b)
    return a if b == 1 else None


def _add(a: ShapeEntry, b: ShapeEntry) -> ShapeEntry:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    return b if a == 0 else a if b == 0 else None


def _subtract(a: ShapeEntry, b: ShapeEntry) -> ShapeEntry:
    if isinstance(a, int) and isinstance(b, int):
        return a - b
    if a is not None and a == b:
        return 0
    return a if b == 0 else None


def _equal(a: ShapeEntry, b: ShapeEntry) -> ShapeEntry:
    if (isinstance(a, int) and isinstance(b, int)) or (isinstance(a, str) and a == b):
        return a == b
    negative = any(isinstance(x, int) and x < 0 for x in (a, b))
    return False if negative and None not in (a, b) else None  # a symbol is a size


def _where(condition: ShapeEntry, a: ShapeEntry, b: ShapeEntry) -> ShapeEntry:
    if a is not None and a == b:
        return a
    return None if not isinstance(condition, int) else a if condition else b


_OPERATORS: dict[str, Callable[..., Any]] = {
    "Gather": lambda entries, indices: entries[indices.astype(np.int64)],
    "Slice": _slice,
    "Concat": lambda *parts: np.concatenate(parts),
    "Unsqueeze": lambda entries, *_: [_lone(entries)],
    "Squeeze": lambda entries, *_: _lone(entries),
    "Reshape": lambda entries, target: entries.reshape([int(size) for size in target]),
    "Cast": lambda entries: entries,
    "Identity": lambda entries: entries,
    "Mul": np.frompyfunc(multiplied, 2, 1),
    "Div": np.frompyfunc(_divide, 2, 1),
    "Add": np.frompyfunc(_add, 2, 1),
    "Sub": np.frompyfunc(_subtract, 2, 1),
    "Equal": np.frompyfunc(_equal, 2, 1),
    "Where": np.frompyfunc(_where, 3, 1),
}
