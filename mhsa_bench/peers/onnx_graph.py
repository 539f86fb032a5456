"""An artifact's computation as ONNX graphs that runtimes read who do not know Attention, or know it under another name;
and peers that compute those.

Inputs are q, k, v, or x and context, or x, key and value, and `mask`, which is always what is added to the scores.
Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from mhsa_bench.peers.peer import Opened, Problem
from mhsa_compile.errors import ModelError
from mhsa_compile.verification.random_inputs import Arrays

if TYPE_CHECKING:
    from onnx import ModelProto

OPSET = 21  # of the standard operators: the newest that every reader of these graphs knows
INPUTS = ("q", "k", "v", "x", "context", "key", "value", "mask")
MICROSOFT = "com.microsoft"


Feed = Callable[[Arrays, list[str]], dict[str, np.ndarray]]
"""(the problem's inputs, the graph's names of its inputs) -> what the graph takes."""
OpenSession = Callable[[bytes, int, Problem, Feed], Opened]
"""(model, threads, problem, feed) -> the peer, ready to be called."""


class GraphBuilder:
    """Nodes as they are added; a value is its name."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.spec = problem, problem.spec
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}

    def node(self, operator: str, *inputs: str, domain: str = "", outputs: int = 1, **attributes: Any) -> Any:
        """The output's name, or a list of names."""
        names = [f"{operator}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(operator, inputs, names, domain=domain, **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, array: np.ndarray) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants[name] = array
        return name

    def reshaped(self, value: str, *shape: int) -> str:
        return str(self.node("Reshape", value, self.constant(np.array(shape, np.int64))))

    def swapped(self, value: str) -> str:
        """(B, length, heads, width) <-> (B, heads, length, width)"""
        return str(self.node("Transpose", value, perm=[0, 2, 1, 3]))

    def linear(self, value: str, *parts: str) -> str:
        """The projections `parts` of one input, side by side, as one product."""
        weights = self.problem.weights
        weight = np.concatenate([weights[f"{part}_proj.weight"] for part in parts]).T
        product = str(self.node("MatMul", value, self.constant(np.ascontiguousarray(weight))))
        if not self.spec.bias:
            return product
        bias = np.concatenate([weights[f"{part}_proj.bias"] for part in parts])
        return str(self.node("Add", product, self.constant(bias)))

    def model(self, result: str) -> onnx.ModelProto:
        """The checked model; `result` is its output."""
        problem, (B, L) = self.problem, (self.problem.sizes["B"], self.problem.sizes["L"])
        kind = helper.np_dtype_to_tensor_dtype(problem.dtype)
        inputs_of_nodes = {name for node in self.nodes for name in node.input}
        feeds = inputs(problem, problem.inputs[0], [name for name in INPUTS if name in inputs_of_nodes])
        shape = (B, self.spec.num_heads, L, self.spec.v_head_dim) if problem.is_core else (B, L, self.spec.embed_dim)
        self.nodes.append(helper.make_node("Identity", [result], ["y"]))
        graph = helper.make_graph(
            self.nodes,
            "attention",
            [helper.make_tensor_value_info(name, kind, array.shape) for name, array in feeds.items()],
            [helper.make_tensor_value_info("y", kind, shape)],
            [numpy_helper.from_array(array, name) for name, array in self.constants.items()],
        )
        domains = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        opsets = [domain for domain in domains if any(node.domain == domain.domain for node in self.nodes)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def inputs(problem: Problem, arrays: Arrays, names: Iterable[str]) -> dict[str, np.ndarray]:
    """What a graph with these inputs is fed."""
    pairs = ((name, problem.additive_mask(arrays) if name == "mask" else arrays[name]) for name in names)
    return {name: array for name, array in pairs if array is not None}


def standard(problem: Problem) -> onnx.ModelProto:
    """Attention as two products and a softmax; the query heads of one key/value head lie below each other."""
    graph, spec, (B, L, S) = GraphBuilder(problem), problem.spec, _sizes(problem)
    H, G, E, F = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim
    q, k, v = _heads(graph)
    queries = graph.node("Mul", q, graph.constant(np.array(_scale(problem), problem.dtype)))
    rows = queries if G == H else graph.reshaped(queries, B, G, H // G * L, E)
    scores = graph.node("MatMul", rows, graph.node("Transpose", k, perm=[0, 1, 3, 2]))
    if problem.spec.hides_keys:
        apart = scores if G == H else graph.reshaped(scores, B, H, L, S)
        scores = graph.node("Add", apart, "mask")
        scores = scores if G == H else graph.reshaped(scores, B, G, H // G * L, S)
    y = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), v)
    y = y if G == H else graph.reshaped(y, B, H, L, F)
    return graph.model(y if problem.is_core else _out(graph, graph.reshaped(graph.swapped(y), B, L, H * F)))


def fused_attention(problem: Problem) -> onnx.ModelProto:
    """Microsoft's Attention: it owns the projections of q, k and v, and puts their heads where it wants them."""
    spec = problem.spec
    _require(not problem.is_core and not spec.is_cross, "self-attention with its projections")
    _require(spec.num_kv_heads == spec.num_heads, "as many key/value heads as heads")
    graph, H = GraphBuilder(problem), spec.num_heads
    parts = [f"{name}_proj" for name in "qkv"]
    weight = np.ascontiguousarray(np.concatenate([problem.weights[f"{part}.weight"] for part in parts]).T)
    if spec.bias:
        bias = np.concatenate([problem.weights[f"{part}.bias"] for part in parts])
    else:
        bias = np.zeros(weight.shape[1], problem.dtype)
    causal, mask = _causality(problem)
    operands = ["x", graph.constant(weight), graph.constant(bias), *(["", "", mask] if mask else [])]
    widths = [H * spec.head_dim, H * spec.head_dim, H * spec.v_head_dim]
    attributes: dict[str, Any] = {
        "num_heads": H,
        "unidirectional": causal,
        "qkv_hidden_sizes": widths,
        "scale": _scale(problem),
    }
    return graph.model(_out(graph, graph.node("Attention", *operands, domain=MICROSOFT, **attributes)))


def fused_multi_head(problem: Problem) -> onnx.ModelProto:
    """Microsoft's MultiHeadAttention: heads side by side; keys and values of the core stay as they are."""
    spec = problem.spec
    _require(spec.num_kv_heads == spec.num_heads, "as many key/value heads as heads")
    graph = GraphBuilder(problem)
    q, k, v = _rows(graph, keep_heads="kv")
    causal, mask = _causality(problem)
    operands = [q, k, v, *(["", "", mask] if mask else [])]
    attributes: dict[str, Any] = {"num_heads": spec.num_heads, "unidirectional": causal, "scale": _scale(problem)}
    return _from_rows(graph, graph.node("MultiHeadAttention", *operands, domain=MICROSOFT, **attributes))


def fused_grouped(problem: Problem) -> onnx.ModelProto:
    """Microsoft's GroupQueryAttention: always causal, with a left window; k and v are the keys and values of x."""
    spec, (B, L, S) = problem.spec, _sizes(problem)
    _require(spec.band is not None and spec.band.right == 0 and not spec.needs_lengths, "causal attention")
    _require(spec.mask is None and L == S and spec.head_dim == spec.v_head_dim, "L = S, E = F and no mask of the call")
    graph = GraphBuilder(problem)
    q, k, v = _rows(graph)
    lengths = [graph.constant(np.full(B, L - 1, np.int32)), graph.constant(np.array(L, np.int32))]
    attributes: dict[str, Any] = {
        "num_heads": spec.num_heads,
        "kv_num_heads": spec.num_kv_heads,
        "scale": _scale(problem),
    }
    if spec.band is not None and spec.band.left is not None:
        attributes["local_window_size"] = spec.band.left + 1  # it counts the query itself
    operands = [q, k, v, "", "", *lengths]
    y, _, _ = graph.node("GroupQueryAttention", *operands, domain=MICROSOFT, outputs=3, **attributes)
    return _from_rows(graph, y)


def _heads(graph: GraphBuilder) -> Sequence[str]:
    """q, k and v as (B, heads, length, width)."""
    if graph.problem.is_core:
        return "q", "k", "v"
    spec, (keys, values), (B, L, S) = graph.spec, graph.spec.sources, _sizes(graph.problem)
    q = graph.reshaped(graph.linear("x", "q"), B, L, spec.num_heads, spec.head_dim)
    k = graph.reshaped(graph.linear(keys, "k"), B, S, spec.num_kv_heads, spec.head_dim)
    v = graph.reshaped(graph.linear(values, "v"), B, S, spec.num_kv_heads, spec.v_head_dim)
    return graph.swapped(q), graph.swapped(k), graph.swapped(v)


def _rows(graph: GraphBuilder, keep_heads: str = "") -> Sequence[str]:
    """q, k and v as (B, length, heads * width); those of `keep_heads` stay as the core has them."""
    if not graph.problem.is_core:
        keys, values = graph.spec.sources
        return graph.linear("x", "q"), graph.linear(keys, "k"), graph.linear(values, "v")
    arrays = graph.problem.inputs[0]
    return [
        name if name in keep_heads else graph.reshaped(graph.swapped(name), shape[0], shape[2], shape[1] * shape[3])
        for name, shape in ((name, arrays[name].shape) for name in "qkv")
    ]


def _from_rows(graph: GraphBuilder, y: str) -> onnx.ModelProto:
    if not graph.problem.is_core:
        return graph.model(_out(graph, y))
    B, L, _ = _sizes(graph.problem)
    return graph.model(graph.swapped(graph.reshaped(y, B, L, graph.spec.num_heads, graph.spec.v_head_dim)))


def _out(graph: GraphBuilder, rows: str) -> str:
    return graph.linear(rows, "out")


def _sizes(problem: Problem) -> tuple[int, int, int]:
    return problem.sizes["B"], problem.sizes["L"], problem.sizes["S"]


def _scale(problem: Problem) -> float:
    return float(problem.spec.head_dim**-0.5 if problem.spec.scale is None else problem.spec.scale)


def _causality(problem: Problem) -> tuple[int, str]:
    """(unidirectional, the name of the mask): plain causality is an attribute, all else is added."""
    _, L, S = _sizes(problem)
    plain = problem.spec.is_causal_alone and L == S
    return int(plain), "" if plain or not problem.spec.hides_keys else "mask"


def _require(fits: bool, what: str) -> None:
    if not fits:
        raise ModelError("peer", f"{what}: its operator does no other", "something else")


class RewrittenGraph:
    """`write` says which operators; `holds_scores` whether the peer keeps all scores in memory at once."""

    def __init__(
        self, name: str, write: Callable[[Problem], ModelProto], session: OpenSession, *, holds_scores: bool
    ) -> None:
        self.name, self.write, self.session, self.holds_scores = name, write, session, holds_scores

    @contextmanager
    def open(self, problem: Problem, threads: int) -> Iterator[Opened]:
        if self.holds_scores:
            problem.check_scores_fit()  # before the graph is written, whose constants may be as large
        model = self.write(problem).SerializeToString()
        yield self.session(model, threads, problem, partial(inputs, problem))
