"""The attentions of a canonical graph by number, in the graph's order: what a user calls layer 3."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx

from mhsa_compile.runtime.artifact.manifest import AttentionCoverage
from mhsa_compile.spec.attention_spec import DOMAIN


@dataclass(frozen=True)
class Layer:
    """One attention; `place` is that of its operator among the graph's nodes, None where it was not fused, or where
    nobody reads what it makes."""

    number: int
    block: AttentionCoverage
    place: int | None

    @property
    def title(self) -> str:
        """The layer as errors name it, by its number and the name of its attention."""
        return f"layer {self.number} ({self.block.name!r})"


def in_order(model: onnx.ModelProto, blocks: Iterable[AttentionCoverage]) -> list[Layer]:
    """One layer for each block, as their nodes stand in the graph. An attention has the name of what it was before."""
    nodes = {
        place: node for place, node in enumerate(model.graph.node) if is_attention(node) or node.op_type == "Softmax"
    }
    behind, entries = len(model.graph.node), []
    for block in blocks:
        alike = (p for p, node in nodes.items() if name_of(node) == block.name and is_attention(node) == block.fused)
        place = next(alike, behind)
        nodes.pop(place, None)  # names need not be unique
        entries.append((place, block))
    entries.sort(key=lambda entry: entry[0])
    return [
        Layer(number, block, place if block.fused and place < behind else None)
        for number, (place, block) in enumerate(entries)
    ]


def is_attention(node: onnx.NodeProto) -> bool:
    """Whether a node is the standard's Attention or ours."""
    return node.op_type == "Attention" and node.domain in ("", "ai.onnx", DOMAIN)


def name_of(node: onnx.NodeProto) -> str:
    return str(node.name or node.output[0])
