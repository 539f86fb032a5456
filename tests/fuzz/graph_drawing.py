"""One random graph as it is drawn: values so far, nodes, constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CODES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "int64": TensorProto.INT64,
         "int32": TensorProto.INT32, "bool": TensorProto.BOOL}  # fmt: skip
OPSETS = (13, 17, 18, 20, 21)
BATCHES = 7  # the size of the free dim while a graph is drawn; it is free where nothing says otherwise


@dataclass(frozen=True)
class Value:
    """A value of the graph: axis 0 is the free one, where `free`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    free: bool


class Drawing:
    """One graph as it is drawn: values so far, nodes, constants."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.opset = int(self.rng.choice(OPSETS))
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.values: list[Value] = []
        self.may_be_nan = False  # then nothing is put in order: where NaN belongs, the standard leaves open

    def one_of(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def perhaps(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def constant(self, array: np.ndarray) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(self, op: str, inputs: list[str], dtype: str, shape: tuple[int, ...], free: bool, **said: Any) -> None:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=f"n{len(self.nodes)}", **said))
        self.values.append(Value(name, dtype, shape, free))

    def nodes_of(
        self, op: str, inputs: list[str], results: Sequence[tuple[str, tuple[int, ...]]], free: bool, **said: Any
    ) -> None:
        """A node of several results, (dtype, shape) of each."""
        names = [f"v{len(self.nodes)}_{i}" for i in range(len(results))]
        self.nodes.append(helper.make_node(op, inputs, names, name=f"n{len(self.nodes)}", **said))
        self.values += [Value(n, dtype, shape, free) for n, (dtype, shape) in zip(names, results, strict=True)]

    def value(self, *dtypes: str, rank: int = 0) -> Value | None:
        fit = [v for v in self.values if v.dtype in dtypes and len(v.shape) >= rank]
        return fit[-1 - min(len(fit) - 1, int(self.rng.geometric(0.4)) - 1)] if fit else None

    def axis(self, value: Value, least: int = 0) -> int:
        axis = int(self.rng.integers(least, len(value.shape)))
        return axis - len(value.shape) if self.perhaps(0.5) else axis
