"""MatMulNBits, a product with a weight in few bits by blocks, as one linear, with the bias behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import onnx

from mhsa_compile.frontend.fusion.fused_nodes import FusedBlockLinear
from mhsa_compile.frontend.fusion.linear_pattern import Linear, with_bias
from mhsa_compile.frontend.onnx_graph import GraphView, attributes
from mhsa_compile.frontend.reading.microsoft import BYTES_LEVEL, stored_products


@dataclass(kw_only=True)
class BlockLinear(Linear):
    """output = x W^T + b, W = (weight - zeros) scales; None of what is missing."""

    scales: str
    zeros: str | None
    kind: Literal["", "bytes", "floats"]
    in_features: int
    bits: int
    block: int
    rounds_x: bool

    @property
    def source(self) -> tuple[str | None, ...]:
        return (self.x, f"{self.bits}, {self.block}, {self.rounds_x}")

    def node(self) -> onnx.NodeProto:
        members = [member for member in self.group or [self] if isinstance(member, BlockLinear)]
        fused = FusedBlockLinear(
            widths=tuple(m.width for m in members),
            zeros=tuple(m.kind for m in members),
            biased=tuple(m.bias is not None for m in members),
            in_features=self.in_features,
            bits=self.bits,
            block=self.block,
            rounds_x=self.rounds_x,
            padding=self.padding or 0,
        )
        numbers = ([m.weight for m in members], [m.scales for m in members])
        optional = ([m.zeros for m in members], [m.bias for m in members])
        inputs = [self.x, *(name for names in (*numbers, *optional) for name in names if name is not None)]
        return fused.to_node(self.nodes[0], inputs, [self.output])


def find_block_linears(graph: GraphView) -> dict[str, Linear]:
    """Every such product with a weight that is stored, by the name of its output."""
    linears = (_block_linear(graph, node) for node in stored_products(graph.nodes, graph.initializers))
    return {linear.output: linear for linear in linears}


def _block_linear(graph: GraphView, node: onnx.NodeProto) -> BlockLinear:
    x, weight, scales, zeros, _, bias = (*(name or None for name in node.input), *[None] * 6)[:6]
    words, dtype = attributes(node), graph.dtype(str(x))
    bits = words.get("bits", 4)
    kind: Literal["", "bytes", "floats"] = ""
    if zeros is not None:
        kind = "bytes" if graph.dtype(zeros) == "uint8" else "floats"
    # As ONNX Runtime does: it multiplies floats where zeros are some, or numbers have two bits.
    rounds_x = words.get("accuracy_level", 0) == BYTES_LEVEL and kind != "floats" and bits >= 4
    linear = BlockLinear(
        x=str(x), weight=str(weight), bias=bias, transposed=False, width=words["N"], output=node.output[0],
        nodes=[node], scales=str(scales), zeros=zeros, kind=kind, in_features=words["K"], bits=bits,
        block=words["block_size"], rounds_x=rounds_x,
    )  # fmt: skip
    return linear if bias is not None else with_bias(graph, linear, dtype)
