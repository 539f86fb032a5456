"""Convolutions as products: each patch of the input becomes a row, and a linear takes all rows at once.

    Conv(x (B, C, ...), w (O, C, taps ...), b)  ->  MatMul(MhsaPatches(x), rows of w) + b, the channels put back

The Transpose that puts the channels back is moved on, past what works on each element, until another one undoes it:
the next convolution reads rows as they lie, and so does whoever flattens an image and puts the channels last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx

from mhsa_compile.frontend.canonicalize.passes.remove_identities import without_aliases
from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.fusion.fused_nodes import FusedPatches
from mhsa_compile.frontend.onnx_graph import GraphView, add_import, attributes
from mhsa_compile.spec.attention_spec import DOMAIN
from mhsa_compile.spec.checks import DTYPES

_ELEMENTWISE = frozenset(
    ("Abs", "Add", "Cast", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Max",
     "Min", "Mish", "Mul", "Neg", "Pow", "Relu", "Selu", "Sigmoid", "Softplus", "Sub", "Tanh")
)  # fmt: skip
_MOST_PATCHES = 1 << 26
"""Elements of all patches of one entry, where that is known: an overlap copies each element several times."""


def as_products(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with patches and MatMul for every convolution of constant weights over all channels."""
    if not any(node.op_type == "Conv" for node in model.graph.node):
        return model
    return _Rewriting(model).result()


class _Rewriting:
    """One walk over the graph. `moved`: values that are a Transpose, by these axes, of another value."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.rewriter = Rewriter(model)
        self.graph = self.rewriter.graph
        self.moved: dict[str, tuple[str, tuple[int, ...]]] = {}

    def result(self) -> onnx.ModelProto:
        steps = {"Conv": self._convolution, "Transpose": self._transpose, "Reshape": self._reshape}
        steps |= dict.fromkeys(_ELEMENTWISE, self._elementwise)
        for node in self.graph.nodes:
            if node.domain in ("", "ai.onnx") and node.op_type in steps:
                steps[node.op_type](node)
        result = self.rewriter.finished()
        if result is self.rewriter.model:
            return result
        add_import(result, DOMAIN)  # else nobody infers the shapes behind ours
        return without_aliases(result)

    def _move(self, node: onnx.NodeProto, source: str, perm: Sequence[int]) -> None:
        """The value of `node` is `source` with its axes like this: all that was written since stands in its place."""
        output = node.output[0]
        if list(perm) == sorted(perm):
            self.rewriter.node("Identity", source, output=output)
        else:
            self.rewriter.node("Transpose", source, output=output, perm=list(perm))
            self.moved[output] = source, tuple(perm)
        self.rewriter.place(node)

    def _convolution(self, node: onnx.NodeProto) -> None:
        patches = _patches(self.graph, node)
        if patches is None:
            return
        x, weight, *bias = node.input
        rank = len(patches.kernel) + 2
        first, dims = _channels_first(rank), list(self.graph.dims(weight))
        before = self.graph.producer(x, "Transpose")
        if x in self.moved and self.moved[x][1] == first:
            x = self.moved[x][0]
        elif before is not None and tuple(attributes(before).get("perm", ())) == first:
            x = before.input[0]
        else:
            patches = FusedPatches(**vars(patches) | {"channels_last": False})
        rewriter, width = self.rewriter, math.prod(int(size or 0) for size in dims[1:])
        if patches.channels_last:
            weight = rewriter.node("Transpose", weight, perm=[0, *range(2, rank), 1])
        matrix = rewriter.node("Reshape", weight, rewriter.constant([dims[0], width], "int64"))
        rows = rewriter.fresh(f"{node.output[0]}/patches")
        rewriter.append(patches.to_node(node, [x], [rows]))
        rewriter.hint(rows, [*(self.graph.shape(node.output[0]) or [None] * rank)[:1], *[None] * (rank - 2), width],
                      self.graph.dtype(node.input[0]))  # fmt: skip
        y = rewriter.node("MatMul", rows, rewriter.node("Transpose", matrix, perm=[1, 0]))
        if bias and bias[0]:
            y = rewriter.node("Add", y, bias[0])
        self._move(node, y, first)

    def _transpose(self, node: onnx.NodeProto) -> None:
        if (move := self.moved.get(node.input[0])) is not None:
            source, perm = move
            order = attributes(node).get("perm", range(len(perm))[::-1])
            self._move(node, source, [perm[axis] for axis in order])

    def _elementwise(self, node: onnx.NodeProto) -> None:
        """Moves a Transpose past an elementwise node, if all that it reads was transposed alike, or is one number."""
        perms = {self.moved[name][1] for name in node.input if name in self.moved}
        if len(perms) != 1:
            return
        (perm,) = perms
        if all(name in self.moved or not name or self._is_number(name, len(perm)) for name in node.input):
            inputs = [self.moved[name][0] if name in self.moved else name for name in node.input]
            self._move(node, self.rewriter.node(node.op_type, *inputs, **attributes(node)), perm)

    def _is_number(self, name: str, rank: int) -> bool:
        dims = self.graph.shape(name)
        return dims is not None and len(dims) <= rank and all(size == 1 for size in dims)

    def _reshape(self, node: onnx.NodeProto) -> None:
        """(B, C, Y, X) -> (B, C, YX) of what has its channels last: (B, Y, X, C) -> (B, YX, C)."""
        source, perm = self.moved.get(node.input[0], ("", ()))
        dims, target = self.graph.shape(node.input[0]), self.graph.constant(node.input[1])
        if not perm or perm != _channels_first(len(perm)) or dims is None or target is None or target.size != 3:
            return
        if 0 in target and attributes(node).get("allowzero"):
            return
        batch, channels, pixels = map(int, target)
        every = math.prod(size for size in dims[2:] if isinstance(size, int))
        known = all(isinstance(size, int) for size in dims[2:])
        keeps = batch in (0, dims[0]) or (batch == -1 and known and pixels == every)
        if not keeps or channels not in (0, dims[1]) or not isinstance(dims[1], int):
            return
        rows = self.rewriter.constant([batch, pixels, dims[1]], "int64")
        self._move(node, self.rewriter.node("Reshape", source, rows), (0, 2, 1))


def _channels_first(rank: int) -> tuple[int, ...]:
    """The axes of a value whose channels are last, as ONNX has them."""
    return (0, rank - 1, *range(1, rank - 1))


def _patches(graph: GraphView, node: onnx.NodeProto) -> FusedPatches | None:
    """What the rows of a convolution are, as read from rows; None where it stays as it is."""
    x, weight, *bias = node.input
    dims, attrs, shape = graph.dims(weight), attributes(node), graph.dims(x)
    constant = weight in graph.initializers and all(name in graph.initializers for name in bias if name)
    if not constant or len(dims) < 3 or len(shape) != len(dims) or attrs.get("group", 1) != 1 or 0 in dims:
        return None
    if graph.dtype(x) not in DTYPES or graph.dtype(weight) != graph.dtype(x) or dims[:2] == (1, 1):
        return None
    if attrs.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return None  # what SAME comes to follows from the sizes here; where it does not, it was stated before
    kernel = tuple(int(size or 0) for size in dims[2:])
    ones, zeros = [1] * len(kernel), [0] * (2 * len(kernel))
    pads = zeros if attrs.get("auto_pad") == "VALID" else attrs.get("pads", zeros)
    steps = tuple(attrs.get("strides", ones))
    outer = [size for size in graph.dims(node.output[0])[2:] if isinstance(size, int)]
    overlaps = any(size > step for size, step in zip(kernel, steps, strict=True))
    if min(pads) < 0 or (overlaps and math.prod((*outer, *kernel, int(dims[1] or 0))) > _MOST_PATCHES):
        return None
    return FusedPatches(
        kernel=kernel,
        strides=steps,
        dilations=tuple(attrs.get("dilations", ones)),
        before=tuple(pads[: len(kernel)]),
        behind=tuple(pads[len(kernel) :]),
        channels_last=True,
    )
