"""Attention as a .tflite file, which LiteRT gives to XNNPACK: unmasked, in float32, with as many key heads as queries.

LiteRT's wheel has the schema of the format as a module; this is what its converter would write for the plain operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import flatbuffers
import numpy as np

from mhsa_bench.peers.peer import Problem

VERSION = 3


class Graph:
    """One subgraph, built operator by operator; a tensor is its index."""

    def __init__(self, schema: ModuleType) -> None:
        self.schema = schema
        self.tensors: list[Any] = []
        self.buffers: list[Any] = [schema.BufferT()]  # the first is that of tensors without data
        self.codes: list[int] = []
        self.operators: list[Any] = []

    def tensor(self, shape: Sequence[int], name: str = "", data: np.ndarray | None = None) -> int:
        made = self.schema.TensorT()
        made.shape, made.name = list(shape), name or f"t{len(self.tensors)}"
        made.type = self.schema.TensorType.INT32 if data is not None and data.dtype == np.int32 else 0
        if data is not None:
            stored = self.schema.BufferT()
            stored.data = np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8)
            self.buffers.append(stored)
            made.buffer = len(self.buffers) - 1
        self.tensors.append(made)
        return len(self.tensors) - 1

    def constant(self, data: np.ndarray) -> int:
        return self.tensor(data.shape, data=data)

    def apply(self, name: str, options: str, inputs: Sequence[int], shape: Sequence[int], **stated: Any) -> int:
        code = getattr(self.schema.BuiltinOperator, name)
        if code not in self.codes:
            self.codes.append(code)
        operator, output = self.schema.OperatorT(), self.tensor(shape)
        operator.opcodeIndex, operator.inputs, operator.outputs = self.codes.index(code), list(inputs), [output]
        operator.builtinOptionsType = getattr(self.schema.BuiltinOptions, options)
        operator.builtinOptions = getattr(self.schema, f"{options}T")()
        vars(operator.builtinOptions).update(stated)
        self.operators.append(operator)
        return output

    def linear(self, x: int, rows: int, weight: np.ndarray, bias: np.ndarray | None) -> int:
        inputs = [x, self.constant(weight), -1 if bias is None else self.constant(bias)]
        return self.apply("FULLY_CONNECTED", "FullyConnectedOptions", inputs, (rows, weight.shape[0]))

    def heads(self, x: int, B: int, length: int, H: int, E: int) -> int:
        """(B * length, H * E) -> (B, H, length, E)."""
        apart = self.reshape(x, (B, length, H, E))
        order = self.constant(np.array([0, 2, 1, 3], np.int32))
        return self.apply("TRANSPOSE", "TransposeOptions", [apart, order], (B, H, length, E))

    def reshape(self, x: int, shape: Sequence[int]) -> int:
        size = self.constant(np.array(shape, np.int32))
        return self.apply("RESHAPE", "ReshapeOptions", [x, size], shape, newShape=list(shape))

    def attention(self, q: int, k: int, v: int, scale: float, sizes: tuple[int, int, int, int, int]) -> int:
        B, H, L, S, E = sizes
        scaled = self.apply("MUL", "MulOptions", [q, self.constant(np.array([scale], np.float32))], (B, H, L, E))
        scores = self.apply("BATCH_MATMUL", "BatchMatMulOptions", [scaled, k], (B, H, L, S), adjY=True)
        weights = self.apply("SOFTMAX", "SoftmaxOptions", [scores], (B, H, L, S), beta=1.0)
        return self.apply("BATCH_MATMUL", "BatchMatMulOptions", [weights, v], (B, H, L, E))

    def packed(self, inputs: Sequence[int], output: int) -> bytes:
        model, subgraph = self.schema.ModelT(), self.schema.SubGraphT()
        subgraph.tensors, subgraph.operators = self.tensors, self.operators
        subgraph.inputs, subgraph.outputs = list(inputs), [output]
        for code in self.codes:
            made = self.schema.OperatorCodeT()
            made.builtinCode, made.deprecatedBuiltinCode = code, min(code, 127)
            model.operatorCodes = [*(model.operatorCodes or ()), made]
        model.version, model.subgraphs, model.buffers = VERSION, [subgraph], self.buffers
        builder = flatbuffers.Builder(1024)
        builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
        return bytes(builder.Output())


def is_plain(problem: Problem) -> bool:
    """Whether `written` has a form for the problem."""
    spec = problem.spec
    return not (problem.spec.hides_keys or spec.is_cross or spec.num_kv_heads != spec.num_heads)


def written(problem: Problem, schema: ModuleType) -> bytes:
    """The bytes of a .tflite file that computes a problem; its inputs have the problem's names: q, k and v, or x."""
    spec, sizes = problem.spec, problem.sizes
    B, L, S = sizes["B"], sizes["L"], sizes["S"]
    H, E = spec.num_heads, spec.head_dim
    graph, scale = Graph(schema), spec.scale or E**-0.5
    shape = (B, H, L, S, E)
    if problem.is_core:
        q, k, v = (graph.tensor((B, H, length, E), name) for name, length in (("q", L), ("k", S), ("v", S)))
        return graph.packed((q, k, v), graph.attention(q, k, v, scale, shape))
    x = graph.tensor((B, L, spec.embed_dim), "x")
    rows = graph.reshape(x, (B * L, spec.embed_dim))
    weights = problem.weights
    q, k, v = (
        graph.heads(graph.linear(rows, B * L, weights[f"{name}.weight"], weights.get(f"{name}.bias")), B, L, H, E)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    y = graph.attention(q, k, v, scale, shape)
    order = graph.constant(np.array([0, 2, 1, 3], np.int32))
    together = graph.apply("TRANSPOSE", "TransposeOptions", [y, order], (B, L, H, E))
    out = graph.linear(
        graph.reshape(together, (B * L, H * E)), B * L, weights["out_proj.weight"], weights.get("out_proj.bias")
    )
    return graph.packed((x,), graph.reshape(out, (B, L, spec.embed_dim)))
