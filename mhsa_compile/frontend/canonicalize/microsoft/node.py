"""One node of Microsoft's, with what its rewriting asks of it again and again."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.canonicalize.definitions import Definitions
from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.detach_weights import Tensors
from mhsa_compile.frontend.onnx_graph import GraphDim, attributes, node_error

_AS_WEIGHT = "Make it an initializer: weights are bound at load, and another one by mhsa.load(artifact, weights=...)."
MOST_INPUTS = 18
"""Those of QEmbedLayerNormalization."""


class NotYet(Exception):
    """A shape or a dtype is not known, perhaps because an operator before is not rewritten yet."""


class MicrosoftNode:
    """One of Microsoft's nodes. `inputs` are as many as any operator may have, "" where one is missing; `outputs`
    too. `shared`: floats -> their bytes, scale and zero point, which all nodes of a graph that ask for them have in
    common; so have they the `definitions` of our own operator."""

    def __init__(
        self,
        rewriter: Rewriter,
        node: onnx.NodeProto,
        tensors: Tensors,
        shared: dict[str, list[str]],
        definitions: Definitions,
    ) -> None:
        self.rewriter, self.node, self._tensors = rewriter, node, tensors
        self.shared, self.definitions = shared, definitions
        self.write, self.constant = rewriter.node, rewriter.constant
        self.attrs: dict[str, Any] = attributes(node)
        self.inputs = [*node.input, *[""] * (MOST_INPUTS - len(node.input))]
        self.outputs = [*node.output, *[""] * (4 - len(node.output))]
        self.name = node.name or node.output[0]
        self.note = ""

    def refused(self, expected: str, got: str, next_step: str = "") -> ModelError:
        return node_error(self.node, expected, got, next_step)

    def dims(self, name: str) -> tuple[GraphDim, ...]:
        dims = self.rewriter.graph.shape(name)
        if dims is None:
            raise NotYet(f"{name!r} of unknown rank")
        return dims

    def size(self, name: str, axis: int) -> int:
        size = self.dims(name)[axis]
        if not isinstance(size, int):
            raise NotYet(f"{name!r} of unknown size")
        return size

    def dtype(self, *names: str) -> str:
        """The dtype of the first value of which it is known. Raises NotYet where it is known of none."""
        dtype = next((kind for name in names if name and (kind := self.rewriter.graph.dtype(name))), None)
        if dtype is None:
            raise NotYet(f"{names[0]!r} of unknown dtype")
        return dtype

    def array(self, name: str) -> np.ndarray:
        """A weight's value."""
        if name in self._tensors:
            return np.asarray(numpy_helper.to_array(self._tensors[name]))
        value = self.rewriter.graph.constant(name)
        if value is None:
            is_input = name in self.rewriter.graph.inputs
            got, hint = ("an input of the model", _AS_WEIGHT) if is_input else ("a computed value", "")
            raise self.refused(f"{name!r} as a constant", got, hint)
        return value

    # What the nodes below are written with.

    def ints(self, *values: int) -> str:
        return self.constant(list(values), "int64")

    def heads_apart(self, rows: str, heads: int) -> str:
        """(B, L, heads * E) -> (B, heads, L, E)"""
        split = self.write("Reshape", rows, self.ints(0, 0, heads, -1))
        return self.write("Transpose", split, perm=[0, 2, 1, 3])

    def heads_together(self, heads: str, output: str) -> None:
        """(B, heads, L, F) -> (B, L, heads * F), under the name `output`."""
        rows = self.write("Transpose", heads, perm=[0, 2, 1, 3])
        self.write("Reshape", rows, self.ints(0, 0, -1), output=output)

    def positions(self, *parts: tuple[str, int]) -> str:
        """0, 1, 2, ... up to the sizes together of an axis of each of several values: (value, axis)."""
        lengths = [self.write("Shape", of, start=axis, end=axis + 1) for of, axis in parts]
        length = lengths[0]
        for more in lengths[1:]:
            length = self.write("Add", length, more)
        zero, one = self.constant(0, "int64"), self.constant(1, "int64")
        return self.write("Range", zero, self.write("Squeeze", length, self.ints(0)), one)

    @property
    def scale(self) -> dict[str, float]:
        """The attribute `scale`; theirs is 0 where it is to be 1 / sqrt(E), as it is without."""
        return {"scale": self.attrs["scale"]} if self.attrs.get("scale") else {}
