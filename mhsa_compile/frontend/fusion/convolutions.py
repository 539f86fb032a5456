"""Convolutions as products: each patch of the input becomes a row, and a linear takes all rows at once.

    Conv(x (B, C, ...), w (O, C, taps ...), b)  ->  MatMul(MhsaPatches(x), rows of w) + b, the channels put back

Of bytes, too, with the zero point of x around it: ConvInteger becomes MatMulInteger, a Conv of two DequantizeLinears
a MatMul of two, as `quantised_pattern` reads them. Where those are of 16 bits or of four, or one stands alone, its
floats are multiplied; they are computed once of weights.

    ConvTranspose(x, w, b)  ->  MhsaPixelShuffle(such products, one for all phases with the same patches) + b

as `output_phases` says which they are.

The Transpose that puts the channels back is moved on, past what works on each element, until another one undoes it:
the next convolution reads rows as they lie, and so does whoever flattens an image and puts the channels last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import onnx

from mhsa_compile.frontend.canonicalize.passes.remove_identities import without_aliases
from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.fusion.fused_nodes import (
    FusedDepthwise,
    FusedGroupedConvolution,
    FusedPatches,
    FusedPixelShuffle,
)
from mhsa_compile.frontend.fusion.output_phases import PhasedAxis, by_windows
from mhsa_compile.frontend.fusion.quantised_pattern import BYTES, is_number, is_stored
from mhsa_compile.frontend.onnx_graph import GraphView, add_import, attributes, is_standard
from mhsa_compile.spec.attention_spec import DOMAIN
from mhsa_compile.spec.checks import DTYPES

_ELEMENTWISE = frozenset(
    ("Abs", "Add", "Cast", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Max",
     "Min", "Mish", "Mul", "Neg", "Pow", "Relu", "Selu", "Sigmoid", "Softplus", "Sub", "Tanh",
     "DequantizeLinear", "QuantizeLinear")
)  # fmt: skip
_WIDE = 4
"""Channels from which on they are put last before patches are taken, which then are copies of as many neighbours."""
_EXACT_PRODUCTS = (1 << 24) // 255**2
"""The sums of so many products of two bytes are exact in float32."""
_MOST_PATCHES = 1 << 26
"""Elements of all patches of one entry, where that is known: an overlap copies each element several times."""


def as_products(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with patches and a product for every convolution over all channels, of groups for those of constant
    weights."""
    if not any(is_standard(node, *_CONVOLUTIONS, "ConvTranspose") for node in model.graph.node):
        return model
    return _Rewriting(model).result()


class _Rewriting:
    """One walk over the graph. `moved`: values that are a Transpose, by these axes, of another value."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.rewriter = Rewriter(model)
        self.graph = self.rewriter.graph
        self.moved: dict[str, tuple[str, tuple[int, ...]]] = {}

    def result(self) -> onnx.ModelProto:
        steps = {"Transpose": self._transpose, "Reshape": self._reshape, "DynamicQuantizeLinear": self._quantise}
        steps |= dict.fromkeys(_CONVOLUTIONS, self._convolution) | dict.fromkeys(_ELEMENTWISE, self._elementwise)
        steps["ConvTranspose"] = self._transposed_convolution
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
        plan = _CONVOLUTIONS[node.op_type](self.graph, node)
        patches = None if plan is None else _patches(self.graph, node, plan)
        if plan is None or patches is None:
            return
        if patches.groups > 1:
            floats = self._exact_floats(plan) if plan.of_sums else plan
            y = self._grouped_sums(node, floats, patches, floats.weight)
            y = self.rewriter.node("Add", y, plan.bias) if plan.bias else y
            y = self.rewriter.node("Cast", y, to=onnx.TensorProto.INT32) if plan.of_sums else y
            self._move(node, y, _channels_first(len(self.graph.dims(plan.weight))))
            return
        rewriter, dims = self.rewriter, list(self.graph.dims(plan.weight))
        rank, width = len(dims), math.prod(int(size or 0) for size in dims[1:])
        x, weight = plan.x if plan.channels_last else self._with_channels_last(plan.x, rank), plan.weight
        if x is None and int(dims[1] or 0) >= _WIDE:
            x = rewriter.node("Transpose", plan.x, perm=_last(rank))
        if x is None:
            patches = replace(patches, channels_last=False)
        else:
            weight = rewriter.node("Transpose", weight, perm=_last(rank))
        matrix = rewriter.node("Reshape", weight, rewriter.constant([dims[0], width], "int64"))
        rows = rewriter.fresh(f"{node.output[0]}/patches")
        rewriter.append(patches.to_node(node, [x or plan.x, *filter(None, [plan.x_zero])], [rows]))
        rewriter.hint(rows, [*(self.graph.shape(node.output[0]) or [None] * rank)[:1], *[None] * (rank - 2), width],
                      self.graph.dtype(plan.x))  # fmt: skip
        y = self._product(plan, rows, matrix)
        if plan.bias:
            y = rewriter.node("Add", y, plan.bias)
        self._move(node, y, _channels_first(rank))

    def _exact_floats(self, plan: _Convolution) -> _Convolution:
        """A convolution of bytes as one of floats, whose sums are the same whole numbers."""
        rank = len(self.graph.dims(plan.weight))

        def floats(name: str, zero: str, shape: Sequence[int]) -> str:
            numbers = self.rewriter.node("Cast", name, to=onnx.TensorProto.FLOAT)
            if not zero:
                return numbers
            places = self.rewriter.node("Reshape", zero, self.rewriter.constant(shape, "int64"))
            return self.rewriter.node("Sub", numbers, self.rewriter.node("Cast", places, to=onnx.TensorProto.FLOAT))

        x = self._with_channels_last(plan.x, rank) or self.rewriter.node("Transpose", plan.x, perm=_last(rank))
        weight = floats(plan.weight, plan.zero, [-1, *[1] * (rank - 1)])
        return _Convolution(floats(x, plan.x_zero, [1]), weight, channels_last=True)

    def _grouped_sums(self, node: onnx.NodeProto, plan: _Convolution, patches: FusedPatches, weight: str) -> str:
        """The rows of a convolution of groups, of weights (O, C / groups, ...): a sum for each channel where groups are
        that, else a product for each group."""
        rewriter, taps, groups = self.rewriter, patches.kernel, patches.groups
        total, channels = _channels(self.graph, node)
        rank, inner, outer = len(taps) + 2, channels // groups, total // groups
        x = plan.x if plan.channels_last else self._with_channels_last(plan.x, rank)
        x = x or rewriter.node("Transpose", plan.x, perm=_last(rank))
        kind = FusedDepthwise if inner == outer == 1 else FusedGroupedConvolution
        if kind is FusedDepthwise:
            turned, shape = rewriter.node("Transpose", weight, perm=[*range(2, rank), 1, 0]), [*taps, channels]
        else:
            apart = rewriter.constant([groups, outer, inner, *taps], "int64")
            turned = rewriter.node("Reshape", weight, apart)
            turned = rewriter.node("Transpose", turned, perm=[0, *range(3, rank + 1), 2, 1])
            shape = [groups, inner * math.prod(taps), outer]
        weights = rewriter.node("Reshape", turned, rewriter.constant(shape, "int64"))
        y = rewriter.fresh(f"{node.output[0]}/sums")
        rewriter.append(kind(**asdict(patches)).to_node(node, [x, weights], [y]))
        dtype = self.graph.dtype(node.input[0])
        rewriter.hint(y, [*[None] * (rank - 1), total], dtype if dtype in DTYPES else "float32")
        return y

    def _transposed_convolution(self, node: onnx.NodeProto) -> None:
        """Each phase is a sum of its own, and those that read the same patches are one product."""
        graph, rewriter, axes = self.graph, self.rewriter, _axes(self.graph, node)
        groups = attributes(node).get("group", 1)
        plan = _of_floats(graph, node, features=1) if groups == 1 else _as_floats(graph, node)
        if axes is None or plan is None:
            return
        if not _is_of_weights(plan, graph) and (groups > 1 or plan.x_scale):
            return
        rank, kind = len(axes) + 2, graph.dtype(plan.x)
        if not plan.channels_last:
            x = self._with_channels_last(plan.x, rank)
            x = x or rewriter.node("Transpose", plan.x, perm=_last(rank))
            plan = replace(plan, x=x, channels_last=True)
        rows, phases = list[str](), list[tuple[tuple[int, ...], ...]]()
        spread = tuple(axis.spread for axis in axes)
        for (counts, before, behind), of_windows in by_windows(axes).items():
            patches = FusedPatches(counts, (1,) * len(axes), spread, before, behind, channels_last=True, groups=groups)
            seen = self._seen(node, plan, patches, kind) if groups == 1 else ""
            for some in [[phase] for phase in of_windows] if groups > 1 or plan.by_features else [of_windows]:
                taps = [self._taps(plan.weight, axes, phase, groups) for phase in some]
                weight = taps[0] if len(taps) == 1 else rewriter.node("Concat", *taps, axis=0)
                if groups > 1:
                    rows.append(self._grouped_sums(node, plan, patches, weight))
                else:
                    turned = rewriter.node("Transpose", weight, perm=_last(rank))
                    rows.append(self._product(plan, seen, rewriter.node("Flatten", turned, axis=1)))
                phases.append(tuple(tuple(sorted(set(one))) for one in zip(*some, strict=True)))
        strides, before, behind = zip(*((axis.stride, axis.before, axis.cut) for axis in axes), strict=True)
        y, out = rewriter.fresh(f"{node.output[0]}/phases"), graph.shape(node.output[0])
        inputs = [*rows, *filter(None, [plan.bias])]
        rewriter.append(FusedPixelShuffle(strides, before, behind, tuple(phases)).to_node(node, inputs, [y]))
        rewriter.hint(y, [out[0], *out[2:], out[1]] if out else [None] * rank, graph.dtype(node.output[0]))
        self._move(node, y, _channels_first(rank))

    def _seen(self, node: onnx.NodeProto, plan: _Convolution, patches: FusedPatches, dtype: str | None) -> str:
        """The patches of x, whose channels are last: x itself where each is one element of it."""
        if patches.is_each_element:
            return plan.x
        rows, rank = self.rewriter.fresh(f"{node.output[0]}/patches"), len(patches.kernel)
        self.rewriter.append(patches.to_node(node, [plan.x, *filter(None, [plan.x_zero])], [rows]))
        batch = (self.graph.shape(node.output[0]) or [None])[0]
        width = int(self.graph.dims(plan.weight)[0] or 0) * math.prod(patches.kernel)
        self.rewriter.hint(rows, [batch, *[None] * rank, width], dtype)
        return rows

    def _taps(self, weight: str, axes: Sequence[PhasedAxis], phase: Sequence[int], groups: int) -> str:
        """The weights of a phase, (C, O / groups, ...) as (O, C / groups, ...), in the order of what taps are for."""
        rewriter = self.rewriter
        inner, outer = (int(size or 0) for size in self.graph.dims(weight)[:2])
        for i, (axis, r) in enumerate(zip(axes, phase, strict=True)):
            weight = rewriter.node("Gather", weight, rewriter.constant(axis.taps(r), "int64"), axis=2 + i)
        if groups == 1:
            return rewriter.node("Transpose", weight, perm=[1, 0, *range(2, len(axes) + 2)])
        counts = [len(axis.taps(r)) for axis, r in zip(axes, phase, strict=True)]
        apart = rewriter.constant([groups, inner // groups, outer, *counts], "int64")
        apart = rewriter.node("Reshape", weight, apart)
        turned = rewriter.node("Transpose", apart, perm=[0, 2, 1, *range(3, len(axes) + 3)])
        return rewriter.node("Reshape", turned, rewriter.constant([groups * outer, inner // groups, *counts], "int64"))

    def _with_channels_last(self, x: str, rank: int) -> str | None:
        """The value that x is with its channels put first, if there is one."""
        source, perm = self.moved.get(x, ("", ()))
        return source if perm == _channels_first(rank) else _channels_last(self.graph, x, rank)

    def _product(self, plan: _Convolution, rows: str, matrix: str) -> str:
        """The rows times those of the matrix."""
        rewriter = self.rewriter
        if plan.x_scale:
            rows = rewriter.node("DequantizeLinear", rows, plan.x_scale, plan.x_zero)
            matrix = rewriter.node("DequantizeLinear", matrix, plan.scale, plan.zero, axis=0)
        turned = rewriter.node("Transpose", matrix, perm=[1, 0])
        if plan.of_sums:
            return rewriter.node("MatMulInteger", rows, turned, plan.x_zero, plan.zero)
        return rewriter.node("MatMul", rows, turned)

    def _quantise(self, node: onnx.NodeProto) -> None:
        """Moves a Transpose past the bytes of a whole array."""
        if (move := self.moved.get(node.input[0])) is not None:
            source, perm = move
            numbers = [self.rewriter.fresh(f"{node.output[0]}/rows"), *node.output[1:]]
            self._move(node, self.rewriter.nodes("DynamicQuantizeLinear", (source,), numbers)[0], perm)

    def _transpose(self, node: onnx.NodeProto) -> None:
        order = attributes(node).get("perm", ())
        if (move := self.moved.get(node.input[0])) is not None:
            source, perm = move
            self._move(node, source, [perm[axis] for axis in order or range(len(perm))[::-1]])
        elif len(order) > 2 and tuple(order) == _channels_first(len(order)):  # of a convolution of one pixel, say
            self.moved[node.output[0]] = node.input[0], tuple(order)

    def _elementwise(self, node: onnx.NodeProto) -> None:
        """Moves a Transpose past an elementwise node, if all that it reads was transposed alike, or is one number."""
        perms = {self.moved[name][1] for name in node.input if name in self.moved}
        if len(perms) != 1:
            return
        (perm,) = perms
        operands = [self._operand(name, perm) for name in node.input]
        inputs = [name for name in operands if name is not None]
        if len(inputs) < len(operands) or attributes(node).get("block_size", 0):
            self.rewriter.drop()
        else:
            self._move(node, self.rewriter.node(node.op_type, *inputs, **attributes(node)), perm)

    def _operand(self, name: str, perm: tuple[int, ...]) -> str | None:
        """What an elementwise node reads in the place of a value once the Transpose is behind it; None where that is no
        value there is."""
        if name in self.moved:
            return self.moved[name][0]
        if not name or self._is_number(name, len(perm)):
            return name
        return self._of_channels(name, len(perm)) if perm == _channels_first(len(perm)) else None

    def _of_channels(self, name: str, rank: int) -> str | None:
        """What the file spreads along the channels alone, as a vector of them."""
        dims, view = self.graph.dims(name), self.graph.producer(name, "Reshape")
        axis = len(dims) - rank + 1
        if not 0 <= axis <= 1 or any(size != 1 for i, size in enumerate(dims) if i != axis):
            return None
        if view is not None and self.graph.shape(view.input[0]) == dims[axis : axis + 1]:
            return view.input[0] if view.input[0] in self.graph.initializers else None
        if name not in self.graph.initializers:
            return None
        others = self.rewriter.constant([i for i in range(len(dims)) if i != axis], "int64")
        return self.rewriter.node("Squeeze", name, others)

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


def _last(rank: int) -> list[int]:
    """The axes of a value whose channels are put last."""
    return [0, *range(2, rank), 1]


def _channels_last(graph: GraphView, x: str, rank: int) -> str | None:
    """The value whose channels a Transpose of the file puts first, which makes x of it."""
    before = graph.producer(x, "Transpose")
    moved = before is not None and tuple(attributes(before).get("perm", ())) == _channels_first(rank)
    return before.input[0] if before is not None and moved else None


@dataclass(frozen=True)
class _Convolution:
    """What a convolution multiplies, by name, "" where there is none. Of bytes it has zero points, and scales, or gives
    sums of whole numbers. `channels_last`: whether x has its channels last, which a Transpose puts first.
    `by_features`: whether the output's channels have a scale each."""

    x: str
    weight: str
    bias: str = ""
    x_zero: str = ""
    x_scale: str = ""
    zero: str = ""
    scale: str = ""
    of_sums: bool = False
    channels_last: bool = False
    by_features: bool = False


def _of_floats(graph: GraphView, node: onnx.NodeProto, features: int = 0) -> _Convolution | None:
    """Conv, which multiplies bytes where both of its factors are made of such, by a scale for each channel at most;
    those of the output are that axis of the weights."""
    x, weight, bias = [*node.input, ""][:3]
    rows = _channels_last(graph, x, len(graph.dims(x)))
    floats, weights = (graph.producer(name, "DequantizeLinear") for name in (rows or x, weight))
    as_they_are = _as_floats(graph, node)
    if floats is None or weights is None or graph.dtype(x) != "float32" or attributes(node).get("group", 1) > 1:
        return as_they_are
    (x_bytes, x_scale, x_zero), (stored, scale, zero) = ([*one.input, ""][:3] for one in (floats, weights))
    words, one = attributes(weights), is_number(graph, scale)
    of_channels = one or (
        graph.dims(scale) == graph.dims(stored)[features : features + 1] and words.get("axis", 1) == features
    )
    if words.get("block_size", 0) or not of_channels or not is_stored(graph, scale) or not is_number(graph, x_scale):
        return as_they_are
    plan = _Convolution(
        x_bytes, stored, bias, x_zero, x_scale, zero, scale, channels_last=rows is not None, by_features=not one
    )
    return _of_bytes(graph, plan, features) or as_they_are


def _of_whole_numbers(graph: GraphView, node: onnx.NodeProto) -> _Convolution | None:
    """ConvInteger."""
    x, weight, x_zero, zero = [*node.input, "", ""][:4]
    return _of_bytes(graph, _Convolution(x, weight, x_zero=x_zero, zero=zero, of_sums=True))


def _of_bytes(graph: GraphView, plan: _Convolution, features: int = 0) -> _Convolution | None:
    """The plan, if both factors have eight bits, x at most one zero point, and the weights at most one a channel, which
    the file has."""
    kinds, channels = {graph.dtype(plan.x), graph.dtype(plan.weight)}, graph.dims(plan.weight)[features : features + 1]
    if not kinds <= {*BYTES} or (plan.x_zero and not is_number(graph, plan.x_zero)):
        return None
    if plan.zero and not (is_stored(graph, plan.zero) and graph.shape(plan.zero) in ((), (1,), channels)):
        return None
    return plan


_CONVOLUTIONS = {"Conv": _of_floats, "ConvInteger": _of_whole_numbers}


def _is_made_of_weights(graph: GraphView, name: str) -> bool:
    """Whether the file has a value, or all that it is computed from."""
    pending, reached = [name], set[str]()
    while pending:
        if (one := pending.pop()) in reached or is_stored(graph, one):
            continue
        reached.add(one)
        node = graph.producer(one)
        if node is None or not any(node.input):
            return False
        pending += filter(None, node.input)
    return True


def _is_of_weights(plan: _Convolution, graph: GraphView) -> bool:
    """Whether a file has the weights and the bias."""
    return all(_is_made_of_weights(graph, name) for name in (plan.weight, plan.bias) if name)


def _as_floats(graph: GraphView, node: onnx.NodeProto) -> _Convolution | None:
    """A convolution of floats, whatever these are made of."""
    x, weight, bias = [*node.input, ""][:3]
    return _Convolution(x, weight, bias) if graph.dtype(x) in DTYPES and graph.dtype(weight) == graph.dtype(x) else None


def _channels(graph: GraphView, node: onnx.NodeProto) -> tuple[int, int]:
    """How many channels a convolution of floats gives, and how many it takes."""
    one, other = (int(size or 0) for size in graph.dims(node.input[1])[:2])
    groups = attributes(node).get("group", 1)
    return (other * groups, one) if node.op_type == "ConvTranspose" else (one, other * groups)


def _axes(graph: GraphView, node: onnx.NodeProto) -> list[PhasedAxis] | None:
    """A transposed convolution along each of its axes; None where it stays as it is."""
    x, dims, attrs = graph.dims(node.input[0]), graph.dims(node.input[1]), attributes(node)
    if len(dims) < 3 or len(x) != len(dims) or 0 in dims or not all(isinstance(size, int) for size in dims):
        return None
    if attrs.get("output_shape") or (isinstance(x[1], int) and x[1] != dims[0]):
        return None
    kind, ones, zeros = attrs.get("auto_pad", "NOTSET"), [1] * (len(dims) - 2), [0] * (len(dims) - 2)
    pads = attrs.get("pads", 2 * zeros) if kind == "NOTSET" else 2 * zeros
    if kind not in ("NOTSET", "VALID") or min(pads) < 0:
        return None
    words = (attrs.get(word, ones) for word in ("strides", "dilations"))
    both = zip(pads[: len(ones)], pads[len(ones) :], strict=True)
    return [
        PhasedAxis.of(int(size or 0), stride, dilation, (before, behind), more)
        for size, stride, dilation, (before, behind), more in zip(
            dims[2:], *words, both, attrs.get("output_padding", zeros), strict=True
        )
    ]


def _patches(graph: GraphView, node: onnx.NodeProto, plan: _Convolution) -> FusedPatches | None:
    """What the rows of a convolution are, as read from rows; None where it stays as it is."""
    dims, attrs, shape = graph.dims(plan.weight), attributes(node), graph.dims(plan.x)
    groups = attrs.get("group", 1)
    if len(dims) < 3 or len(shape) != len(dims) or 0 in dims or not all(isinstance(size, int) for size in dims):
        return None
    if not _is_of_weights(plan, graph) and (groups > 1 or plan.of_sums or plan.x_scale):
        return None
    if (
        groups > 1
        and plan.of_sums
        and (dims[1] == 1 or math.prod(int(size or 0) for size in dims[1:]) > _EXACT_PRODUCTS)
    ):
        return None  # of one channel each, loops over bytes are faster
    channels = shape[-1 if plan.channels_last else 1]
    if dims[:2] == (1, 1) or (isinstance(channels, int) and channels != int(dims[1] or 0) * groups):
        return None
    if attrs.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return None  # what SAME comes to follows from the sizes here; where it does not, it was stated before
    kernel = tuple(int(size or 0) for size in dims[2:])
    ones, zeros = [1] * len(kernel), [0] * (2 * len(kernel))
    pads = zeros if attrs.get("auto_pad") == "VALID" else attrs.get("pads", zeros)
    steps = tuple(attrs.get("strides", ones))
    outer = [size for size in graph.dims(node.output[0])[2:] if isinstance(size, int)]
    overlaps = any(size > step for size, step in zip(kernel, steps, strict=True))
    if min(pads) < 0 or (overlaps and math.prod((*outer, *kernel, int(dims[1] or 0) * groups)) > _MOST_PATCHES):
        return None
    return FusedPatches(
        kernel=kernel,
        strides=steps,
        dilations=tuple(attrs.get("dilations", ones)),
        before=tuple(pads[: len(kernel)]),
        behind=tuple(pads[len(kernel) :]),
        channels_last=True,
        groups=groups,
    )
