"""One RotaryEmbedding node of an ONNX graph: what it turns, and where its heads lie.

Whatever the standard forbids, or the kernel cannot do, is refused by the node's name.
Source: ONNX RotaryEmbedding-23 (onnx.ai/onnx/operators/onnx__RotaryEmbedding.html).
Notation: B batch, L length, H heads, E head dim, R the elements of a head that turn.
"""

from __future__ import annotations

import onnx

from mhsa_compile.frontend.fusion.fused_nodes import FusedRotary
from mhsa_compile.frontend.fusion.head_layout import NodePattern, Operand, contradict
from mhsa_compile.frontend.onnx_graph import GraphView
from mhsa_compile.spec.checks import DTYPES


class RotaryPattern(NodePattern):
    """One RotaryEmbedding node, with the views before it."""

    def __init__(self, graph: GraphView, node: onnx.NodeProto) -> None:
        super().__init__(graph, node)
        self.x, self.cos, self.sin, self.positions = (*node.input, "")[:4]
        self._check_dtypes()
        self.operand = self._operand()
        self.operands = [self.operand]
        self.rotary_dim = self._rotary_dim()
        self.shared_angles = self._check_angles()

    def _check_dtypes(self) -> None:
        names = {"X": self.x, "cos_cache": self.cos, "sin_cache": self.sin}
        dtypes = {role: self.graph.dtype(name) for role, name in names.items()}
        if dtypes["X"] not in DTYPES or len(set(dtypes.values())) > 1:
            got = ", ".join(f"{role} of {dtype or 'unknown dtype'}" for role, dtype in dtypes.items())
            raise self.refusal(f"X, cos_cache and sin_cache all of {', or all of '.join(DTYPES)}", got)
        if self.positions and self.graph.dtype(self.positions) != "int64":
            raise self.refusal("position_ids of int64", self.graph.dtype(self.positions))

    def _operand(self) -> Operand:
        """Where the heads of X lie: in it, or before the Reshape and Transpose that split them."""
        shape, num_heads = self.ranked(self.x, "X", 3, 4), self.attributes.get("num_heads", 0)
        if len(shape) == 3:
            width = shape[2]
            if num_heads < 1 or not isinstance(width, int) or width % num_heads:
                raise self.refusal("num_heads that divides the fixed last dim of X, as X has three axes", num_heads)
            return Operand(self.x, "rows", num_heads, width // num_heads, width=width)
        heads, head_dim = shape[1], shape[3]
        if not isinstance(heads, int) or not isinstance(head_dim, int):
            raise self.refusal("fixed heads and head size of X", shape)
        if num_heads not in (0, heads):
            raise self.refusal(f"num_heads of {heads}, as X has", num_heads)
        return self.split_rows(self.x) or Operand(self.x, "heads", heads, head_dim)

    def _rotary_dim(self) -> int:
        head_dim, rotary_dim = self.operand.head_dim, int(self.attributes.get("rotary_embedding_dim", 0))
        turning = rotary_dim or head_dim
        if turning % 2 or not 0 < turning <= head_dim:
            expected = f"an even number of elements to turn, at most the {head_dim} of a head"
            raise self.refusal(expected, f"rotary_embedding_dim={rotary_dim}" if rotary_dim else f"all {head_dim}")
        if self.attributes.get("interleaved", 0) not in (0, 1):
            raise self.refusal("interleaved of 0 or 1", self.attributes["interleaved"])
        return turning

    def _check_angles(self) -> bool:
        """Whether all batch entries share their angles; these are read at positions, or are those of each place."""
        x, half = self.graph.dims(self.x), self.rotary_dim // 2
        B, L = x[0], x[1 if len(x) == 3 else 2]
        rank = 2 if self.positions else 3
        cos, sin = self.ranked(self.cos, "cos_cache", rank), self.ranked(self.sin, "sin_cache", rank)
        places = self.ranked(self.positions, "position_ids", 2) if self.positions else cos[:2]
        shared = places[0] == 1 != B
        place = (1 if shared else B, L)
        table = (cos[0], half) if self.positions else (*place, half)
        shapes = {"position_ids": (places, place), "cos_cache": (cos, table), "sin_cache": (sin, table)}
        for role, (shape, expected) in shapes.items():
            if contradict(shape, expected):
                raise self.refusal(f"{role} of shape {expected}", shape)
        return shared

    def fused_node(self) -> onnx.NodeProto:
        fused = FusedRotary(
            x=self.operand.as_input(0),
            output_layout="rows" if len(self.graph.dims(self.x)) == 3 else "heads",
            num_heads=self.operand.heads,
            head_dim=self.operand.head_dim,
            rotary_dim=self.rotary_dim,
            interleaved=self.attributes.get("interleaved") == 1,
            shared_angles=self.shared_angles,
            positions_name=self.spoken(self.positions, "position_ids") if self.positions else "",
        )
        angles = [self.cos, self.sin, *([self.positions] if self.positions else [])]
        return fused.to_node(self.node, [self.operand.source, *angles], [self.node.output[0]])
