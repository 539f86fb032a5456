"""Queries, keys and values of a decomposed attention, from the operands of its two products.

Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from mhsa_compile.frontend.canonicalize.decomposed.scores import NotRecognised, scalar_factor
from mhsa_compile.frontend.canonicalize.rewriting.constant_values import KnownGraph
from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.onnx_graph import GraphDim, GraphView, attributes
from mhsa_compile.spec.checks import DTYPES

GraphDims = tuple[GraphDim, ...]


@dataclass(frozen=True)
class AttentionOperands:
    """query (B, H, L, E), key (B, G, S, E), value (B, G, S, F); of `dtype`; `factor` was taken out of Q and K.

    `scores` are the dims (B, H, L, S). Where the products are of rank 3, H and G are axes of 1 that were put in, unless
    batch and heads were one axis there: they are two here.
    """

    query: str
    key: str
    value: str
    factor: float
    dtype: str
    scores: GraphDims
    rank: int


def attention_operands(
    rewriter: Rewriter, product: onnx.NodeProto, values: str, apart: GraphDims = ()
) -> AttentionOperands:
    """What MatMul(queries, transposed keys) and the product with the values multiply. `apart`: (B, H, L) where those
    are of B * H matrices.

    Raises NotRecognised.
    """
    graph = rewriter.graph
    dims = [_dims_of(graph, name) for name in (*product.input, values)]
    rank = len(dims[0])
    if rank not in (3, 4) or {len(shape) for shape in dims} != {rank}:
        raise NotRecognised(f"queries, keys and values are of rank {', '.join(str(len(shape)) for shape in dims)}")
    if dims[0][0] is None or len({shape[0] for shape in dims}) > 1:
        raise NotRecognised(f"the batch of queries, keys and values is {', '.join(str(shape[0]) for shape in dims)}")
    dtype = str(graph.dtype(values))
    if dtype not in DTYPES:
        raise NotRecognised(f"the values are {dtype}, not {', '.join(DTYPES)}")
    query, query_factor = without_factor(rewriter, product.input[0])
    key, key_factor = without_factor(rewriter, product.input[1])
    kinds = [graph.dtype(name) for name in product.input]  # without factors they may be new, and nobody knows theirs
    query, key = (_of_dtype(rewriter, *one, dtype) for one in zip((query, key), kinds, strict=True))
    if apart:
        key = _swap_axes(rewriter, key, rank)
        query, key, value = (_of_heads(rewriter, name, apart) for name in (query, key, values))
        scores = (*apart, dims[1][-1])
        return AttentionOperands(query, key, value, query_factor * key_factor, dtype, scores, 4)
    key, value = _swap_axes(rewriter, key, rank), values
    heads: GraphDim = 1
    if rank == 3:
        axis = rewriter.constant([1], "int64")
        query, key, value = (rewriter.node("Unsqueeze", name, axis) for name in (query, key, value))
    else:
        heads = dims[0][1]
        key, value = _before_repeats(graph, key, value, (heads, dims[1][1], dims[2][1]))
    sizes = {"head size": dims[0][-1], "value head size": dims[2][-1], "number of heads": heads}
    for what, size in sizes.items():
        if not isinstance(size, int):
            raise NotRecognised(f"the {what} is not a fixed number")
    scores = (dims[0][0], heads, dims[0][-2], dims[1][-1])
    return AttentionOperands(query, key, value, query_factor * key_factor, dtype, scores, rank)


def _of_heads(rewriter: Rewriter, name: str, apart: GraphDims) -> str:
    """(B, H, n, E) that was reshaped to the value, (B * H, n, E). Raises NotRecognised."""
    graph = rewriter.graph
    reshape = graph.producer(name, "Reshape")
    before, after = (graph.dims(reshape.input[0]), graph.dims(name)) if reshape is not None else ((), ())
    if reshape is None or len(before) != 4 or before[:2] != apart[:2] or None in before or before[2:] != after[1:]:
        whole = f"({apart[0]}, {apart[1]}, ...)"
        raise NotRecognised(f"{name!r} has batch and heads as one axis, and is no Reshape of {whole}")
    if not isinstance(before[3], int):
        raise NotRecognised(f"the head size of {name!r} is not a fixed number")
    return str(reshape.input[0])


def _dims_of(graph: GraphView, name: str) -> GraphDims:
    dims = graph.shape(name)
    if dims is None:
        raise NotRecognised(f"the rank of {name!r} is not known")
    return dims


def without_factor(rewriter: Rewriter, name: str) -> tuple[str, float]:
    """(the value without the constant factors it was multiplied by, their product); views in between are made anew."""
    node = rewriter.graph.producer(name)
    if node is not None and node.op_type in ("Mul", "Div"):
        try:
            inner, factor = scalar_factor(rewriter.graph, node)
        except NotRecognised:
            return name, 1.0
        inner, other = without_factor(rewriter, inner)
        return inner, factor * other
    if node is not None and node.op_type in ("Transpose", "Reshape", "Identity"):
        inner, factor = without_factor(rewriter, node.input[0])
        if inner != node.input[0]:
            return rewriter.node(node.op_type, inner, *node.input[1:], **attributes(node)), factor
    return name, 1.0


def _of_dtype(rewriter: Rewriter, name: str, kind: str | None, dtype: str) -> str:
    """The value before it was cast up, where the values are of the dtype it had; cast up where they are wider, as where
    the scores are, and not what they are of. Raises NotRecognised."""
    graph = rewriter.graph
    cast = graph.producer(name, "Cast")
    if cast is not None and graph.dtype(name) != dtype:
        name, kind = cast.input[0], graph.dtype(cast.input[0])
    kind = graph.dtype(name) or kind
    if kind in ("float16", "bfloat16") and dtype == "float32":
        return rewriter.node("Cast", name, to=onnx.TensorProto.FLOAT)
    if kind not in (dtype, None):
        raise NotRecognised(f"{name!r} is {kind}, the values are {dtype}")
    return name


def _swap_axes(rewriter: Rewriter, name: str, rank: int) -> str:
    """The value with its last two axes swapped: keys from transposed keys, by one Transpose at most."""
    perm = [*range(rank - 2), rank - 1, rank - 2]
    if (whole := _before_flat_swap(rewriter.graph, name)) is not None:
        return whole
    node = rewriter.producer(name, "Transpose")
    if node is not None:
        before = attributes(node)["perm"]
        name, perm = node.input[0], [before[axis] for axis in perm]
    return name if perm == list(range(rank)) else rewriter.node("Transpose", name, perm=perm)


def _before_flat_swap(graph: GraphView, name: str) -> str | None:
    """The keys (B, G, S, E) where they were swapped as (B * G, S, E), with a Reshape before and after it."""
    last = graph.producer(name, "Reshape")
    swap = None if last is None else graph.producer(last.input[0], "Transpose")
    first = None if swap is None else graph.producer(swap.input[0], "Reshape")
    if swap is None or first is None or attributes(swap).get("perm") != [0, 2, 1]:
        return None
    before, flat, after = (graph.dims(value) for value in (first.input[0], first.output[0], name))
    if None in before or len(before) != 4 or flat[1:] != before[2:]:
        return None
    return first.input[0] if after == (*before[:2], before[3], before[2]) else None


def _before_repeats(
    graph: KnownGraph, key: str, value: str, heads: tuple[GraphDim, GraphDim, GraphDim]
) -> tuple[str, str]:
    """Keys and values before each of their heads was repeated for a group of query heads. Raises NotRecognised."""
    (one, many), (other, others) = (_repeats(graph, name) for name in (key, value))
    if many == others > 1:
        return one, other
    if heads[1] != heads[2] or not isinstance(heads[0], int) or not isinstance(heads[1], int) or heads[0] % heads[1]:
        raise NotRecognised("queries, keys and values have {}, {} and {} heads".format(*heads))
    return key, value


def _repeats(graph: KnownGraph, name: str) -> tuple[str, int]:
    """(the value before, how often each of its heads stands in a row), for (B, G, S, E) -> (B, G * n, S, E)."""
    node = graph.producer(name)
    if node is not None and node.op_type == "Gather" and attributes(node).get("axis", 0) == 1:
        return _gather_repeats(graph, node)
    copies = None if node is None or node.op_type != "Reshape" else graph.producer(node.input[0])
    if copies is None or copies.op_type not in ("Expand", "Tile"):
        return name, 1
    single = graph.producer(copies.input[0])
    if single is None or single.op_type not in ("Unsqueeze", "Reshape"):
        return name, 1
    names = (single.input[0], single.output[0], copies.output[0], name)
    before, apart, wide, after = (graph.dims(value) for value in names)
    if not len(before) == len(after) == 4 or not len(apart) == len(wide) == 5:
        return name, 1
    G, n = before[1], wide[2]
    views = apart == (*before[:2], 1, *before[2:]) and wide == (*before[:2], n, *before[2:])
    if views and isinstance(G, int) and isinstance(n, int) and after == (before[0], G * n, *before[2:]):
        return single.input[0], n
    return name, 1


def _gather_repeats(graph: KnownGraph, node: onnx.NodeProto) -> tuple[str, int]:
    indices, dims = graph.array(node.input[1]), graph.dims(node.input[0])
    G = dims[1] if len(dims) == 4 else None
    if indices is None or indices.ndim != 1 or not isinstance(G, int) or len(indices) % G:
        return node.output[0], 1
    n = len(indices) // G
    is_repeat = np.array_equal(indices, np.repeat(np.arange(G), n))
    return (node.input[0], n) if is_repeat else (node.output[0], 1)
