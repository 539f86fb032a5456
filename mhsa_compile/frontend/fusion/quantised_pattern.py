"""A product of bytes with a constant weight, and what makes floats of it, as one linear.

    MatMulInteger(x, W, x_zero, zero) -> Cast -> Mul(x_scale * scale) -> Add(bias)

So quantize_dynamic of ONNX Runtime writes a MatMul, with a DynamicQuantizeLinear for x, which others may read, too. The
scales may be multiplied in any order; each may be missing. In files of quantize_static it is

    MatMul(DequantizeLinear(x, x_scale, x_zero), DequantizeLinear(W, scale, zero)) -> Add(bias)

What does not fit stays a product of whole numbers, or of floats.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from mhsa_compile.frontend.fusion.fused_nodes import FusedQuantisedLinear
from mhsa_compile.frontend.fusion.linear_pattern import Linear, is_matrix, with_bias
from mhsa_compile.frontend.onnx_graph import GraphDim, GraphView, attributes, is_standard

BYTES = ("int8", "uint8")


@dataclass(kw_only=True)
class QuantisedLinear(Linear):
    """output = (x - x_zero) (W - zero)^T * (x_scale * scale) + b; None of what is missing."""

    x_zero: str | None = None
    x_scale: str | None = None
    zero: str | None = None
    scale: str | None = None

    @property
    def source(self) -> tuple[str | None, ...]:
        return (self.x, self.x_zero, self.x_scale)

    def node(self) -> onnx.NodeProto:
        members = [member for member in self.group or [self] if isinstance(member, QuantisedLinear)]
        fused = FusedQuantisedLinear(
            x_zeroed=self.x_zero is not None,
            x_scaled=self.x_scale is not None,
            widths=tuple(m.width for m in members),
            zeroed=tuple(m.zero is not None for m in members),
            scaled=tuple(m.scale is not None for m in members),
            biased=tuple(m.bias is not None for m in members),
            transposed=tuple(m.transposed for m in members),
            padding=self.padding or 0,
        )
        numbers = ([m.weight for m in members], [m.zero for m in members], [m.scale for m in members])
        inputs = [*self.source, *(name for each in numbers for name in each), *(m.bias for m in members)]
        return fused.to_node(self.nodes[0], [name for name in inputs if name is not None], [self.output])


def find_quantised_linears(graph: GraphView) -> dict[str, Linear]:
    """Every product of bytes with a constant weight that becomes floats, by the name of its output."""
    forms = {"MatMulInteger": _of_whole_numbers, "MatMul": _of_floats}
    nodes = [node for node in graph.nodes if is_standard(node, *forms)]
    linears = (forms[node.op_type](graph, node) for node in nodes)
    return {linear.output: linear for linear in linears if linear is not None}


def _of_whole_numbers(graph: GraphView, node: onnx.NodeProto) -> QuantisedLinear | None:
    """MatMulInteger, with the floats that its sums become and nobody else reads."""
    x, weight, x_zero, zero = (*(name or None for name in node.input), None, None)[:4]
    weight, turned = _upright(graph, str(weight))
    linear = _product(graph, node, (str(x), x_zero), (weight, zero), turned=turned)
    cast = graph.only_consumer(node.output[0], "Cast")
    if linear is None or cast is None or attributes(cast)["to"] != onnx.TensorProto.FLOAT:
        return None
    _add_node(linear, cast)
    scales = _Scales(graph, linear.width)
    while (scaled := graph.only_consumer(linear.output, "Mul")) is not None:
        (factor,) = [name for name in scaled.input if name != linear.output] or [""]
        if not scales.take(factor):
            break
        _add_node(linear, scaled)
    linear.x_scale, linear.scale = scales.of_x, scales.of_weight
    return with_bias(graph, linear, "float32")


def _of_floats(graph: GraphView, node: onnx.NodeProto) -> QuantisedLinear | None:
    """MatMul of DequantizeLinears, by one number for x, by one or one for each feature for the weight."""
    floats, (other, turned) = graph.producer(node.input[0], "DequantizeLinear"), _upright(graph, node.input[1])
    weights = graph.producer(other, "DequantizeLinear")
    if floats is None or weights is None:
        return None
    (x, x_scale, x_zero), (weight, scale, zero) = (
        (*(name or None for name in one.input), None)[:3] for one in (floats, weights)
    )
    values = attributes(weights)
    axis, by_features = values.get("axis", 1) % 2, graph.shape(str(scale)) not in ((), (1,))
    linear = _product(graph, node, (str(x), x_zero), (str(weight), zero), turned=turned)
    if linear is None or values.get("block_size", 0) or (by_features and axis != (0 if turned else 1)):
        return None
    scales = _Scales(graph, linear.width)
    if not is_number(graph, str(x_scale)) or graph.dtype(str(x_scale)) != "float32" or not scales.take(str(scale)):
        return None
    linear.x_scale, linear.scale = x_scale, scales.of_weight
    return with_bias(graph, linear, "float32") if linear.scale is not None else None


def _upright(graph: GraphView, name: str) -> tuple[str, bool]:
    """(a matrix, whether it is stored as its transpose)."""
    transpose = graph.producer(name, "Transpose")
    if transpose is None or attributes(transpose).get("perm", [1, 0]) != [1, 0]:
        return name, False
    return transpose.input[0], True


def _product(
    graph: GraphView,
    node: onnx.NodeProto,
    left: tuple[str, str | None],
    right: tuple[str, str | None],
    *,
    turned: bool,
) -> QuantisedLinear | None:
    """The linear of bytes and their zeros, of x and of a weight, without scales; None where that is none of ours."""
    (x, x_zero), (weight, zero) = left, right
    shape = graph.shape(weight) if is_stored(graph, weight) or is_matrix(graph, weight) else None
    if shape is None or len(shape) != 2 or not all(isinstance(size, int) and size for size in shape):
        return None
    if not {graph.dtype(x), graph.dtype(weight)} <= {*BYTES} or len(graph.dims(x)) < 2:
        return None
    width = int(shape[0 if turned else 1] or 0)
    if x_zero is not None and not is_number(graph, x_zero):
        return None
    if zero is not None and ((array := graph.constant(zero)) is None or not _of_features(array.shape, width)):
        return None
    return QuantisedLinear(
        x=x, weight=weight, bias=None, transposed=not turned, width=width, output=node.output[0], nodes=[node],
        x_zero=x_zero, zero=zero,
    )  # fmt: skip


def _add_node(linear: QuantisedLinear, node: onnx.NodeProto) -> None:
    linear.nodes.append(node)
    linear.output = node.output[0]


@dataclass
class _Scales:
    """What a sum is multiplied by: one number of the call, one constant or one for each feature."""

    graph: GraphView
    width: int
    of_x: str | None = None
    of_weight: str | None = None

    def take(self, factor: str) -> bool:
        """Adds a factor, if it is one of these or their product, and there is none of its kind yet."""
        taken = {"of_x": self.of_x, "of_weight": self.of_weight}
        for name in self._leaves(factor):
            place = self._place(name)
            if place is None or taken[place] is not None:
                return False
            taken[place] = name
        self.of_x, self.of_weight = taken["of_x"], taken["of_weight"]
        return True

    def _leaves(self, name: str) -> list[str]:
        product = self.graph.producer(name, "Mul")
        return [name] if product is None else [leaf for one in product.input for leaf in self._leaves(one)]

    def _place(self, name: str) -> str | None:
        shape = self.graph.shape(name)
        if shape is None or self.graph.dtype(name) != "float32":
            return None
        if is_stored(self.graph, name):
            return "of_weight" if _of_features(shape, self.width) else None
        return "of_x" if is_number(self.graph, name) else None


def is_stored(graph: GraphView, name: str) -> bool:
    """Whether the file has the value, in whichever place."""
    return name in graph.initializers or graph.producer(name, "Constant") is not None


def is_number(graph: GraphView, name: str) -> bool:
    shape = graph.shape(name)
    return shape is not None and shape in ((), (1,))


def _of_features(shape: tuple[GraphDim, ...], width: int) -> bool:
    """Whether it is one number, or one for each feature of a row."""
    return shape in ((), (1,), (width,), (1, width))
