"""GELUs that an exporter wrote as what they consist of, as the one operator that they are.

    x (1 + erf(x / sqrt 2)) / 2                               ->  Gelu(x)                        before opset 20
    x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2         ->  Gelu(x, approximate="tanh")    GPT-2's

The factors in any order. As one operator it takes half of the arithmetic. Of float32 alone: narrower floats would be
rounded at other places than the file says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import onnx

from mhsa_compile.frontend.canonicalize.rewriting.constant_values import KnownGraph
from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.onnx_graph import is_standard

TOLERANCE = 1e-6
"""Relative, of a constant: a file has as many digits as its author typed, or float32's."""
CUBIC = 0.044715


@dataclass(frozen=True)
class _Factors:
    """A number times values, by their names, sorted."""

    number: float
    values: tuple[str, ...]

    def is_of(self, number: float, *values: str) -> bool:
        return math.isclose(self.number, number, rel_tol=TOLERANCE) and self.values == tuple(sorted(values))


def rewrite(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with GELUs as one node each, where nobody else reads what lies between."""
    if not any(node.op_type in ("Erf", "Tanh") for node in model.graph.node):
        return model
    rewriter = Rewriter(model)
    graph = rewriter.graph
    for node in graph.nodes:
        if not is_standard(node, "Mul", "Div") or graph.dtype(node.output[0]) != "float32":
            continue
        factors = _factors(graph, node)
        if math.isclose(factors.number, 0.5, rel_tol=TOLERANCE) and len(factors.values) == 2:
            for x, gate in (factors.values, factors.values[::-1]):
                approximate, shape = _approximate(graph, x, gate), graph.shape(x)
                if approximate is not None and shape is not None and shape == graph.shape(node.output[0]):
                    rewriter.node("Gelu", x, output=node.output[0], approximate=approximate)
                    rewriter.place(node)
                    break
    return rewriter.finished()


def _approximate(graph: KnownGraph, x: str, gate: str) -> str | None:
    """How a Gelu says that `gate` is 1 + erf or tanh of what it is of x; None where it is something else."""
    kinds: dict[str, tuple[str, Callable[[KnownGraph, str, str], bool]]]
    kinds = {"Erf": ("none", _is_scaled), "Tanh": ("tanh", _is_cubic)}
    for number, value in _terms(graph, gate):
        node = graph.producer(value) if number == 1 and graph.is_read_once(gate) else None
        if node is not None and is_standard(node, *kinds) and graph.is_read_once(value):
            approximate, is_argument = kinds[node.op_type]
            return approximate if is_argument(graph, x, node.input[0]) else None
    return None


def _is_scaled(graph: KnownGraph, x: str, name: str) -> bool:
    return _product(graph, name).is_of(0.5**0.5, x)


def _is_cubic(graph: KnownGraph, x: str, name: str) -> bool:
    """Whether a value is sqrt(2 / pi) (x + c x^3), or sqrt(2 / pi) x (1 + c x^2)."""
    product, scale = _product(graph, name), (2 / math.pi) ** 0.5
    rest = [value for value in product.values if value != x]
    if len(rest) != 1 or not product.is_of(scale, *rest, *[x] * (len(product.values) - 1)):
        return False
    if len(product.values) == 2:
        return any(number == 1 and _power(graph, value).is_of(CUBIC, x, x) for number, value in _terms(graph, rest[0]))
    return any(one == x and _power(graph, other).is_of(CUBIC, x, x, x) for one, other in _summands(graph, rest[0]))


def _terms(graph: KnownGraph, name: str) -> list[tuple[float, str]]:
    """(a number, a value) that a value is the sum of, if it is one."""
    numbers = [(graph.scalar(one), other) for one, other in _summands(graph, name)]
    return [(number, other) for number, other in numbers if number is not None]


def _summands(graph: KnownGraph, name: str) -> list[tuple[str, str]]:
    """The two values that a value is the sum of, in both orders; none of what is no sum."""
    node = graph.producer(name, "Add")
    return [] if node is None else [(node.input[0], node.input[1]), (node.input[1], node.input[0])]


def _power(graph: KnownGraph, name: str) -> _Factors:
    """What a value is the product of, powers as what they multiply."""
    product = _product(graph, name)
    values: list[str] = []
    for value in product.values:
        node = graph.producer(value, "Pow") if graph.is_read_once(value) else None
        count = {2.0: 2, 3.0: 3}.get(graph.scalar(node.input[1]) or 0) if node is not None else None
        values += [value] if node is None or count is None else [node.input[0]] * count
    return _Factors(product.number, tuple(sorted(values)))


def _product(graph: KnownGraph, name: str) -> _Factors:
    """What a value is the product of; itself where something else reads it."""
    node = graph.producer(name)
    if node is None or not is_standard(node, "Mul", "Div") or not graph.is_read_once(name):
        return _Factors(1.0, (name,))
    return _factors(graph, node)


def _factors(graph: KnownGraph, node: onnx.NodeProto) -> _Factors:
    """What a Mul, or a Div by a constant, computes, products of its operands included."""
    first, second = node.input
    divisor = graph.scalar(second) if node.op_type == "Div" else None
    if node.op_type == "Div" and not divisor:
        return _Factors(1.0, (str(node.output[0]),))
    number = 1.0 if divisor is None else 1 / divisor
    values: tuple[str, ...] = ()
    for name in (first, second) if divisor is None else (first,):
        constant = graph.scalar(name)
        part = _Factors(constant, ()) if constant is not None else _product(graph, name)
        number *= part.number
        values += part.values
    return _Factors(number, tuple(sorted(values)))
