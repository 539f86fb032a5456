"""Fused nodes: what is written into an ONNX node is what TVM's importer gives back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import helper
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

from mhsa_compile.frontend.fusion.fused_nodes import (
    FusedAttention,
    FusedLinear,
    FusedNode,
    FusedQuantisedLinear,
    FusedRotary,
    FusedScatter,
)
from mhsa_compile.kernels.interface.ops import HeadLayout
from mhsa_compile.spec.outputs import SoftmaxOutputs

ROWS, HEADS = HeadLayout(1, "rows", 96, 32), HeadLayout(0, "heads", 0)
ATTENTION = FusedAttention(
    num_heads=6, num_kv_heads=2, head_dim=16, v_head_dim=5, query=ROWS, key=HEADS, value=HEADS, output_layout="rows",
    gives=("y", "lse", "weights"), softmax_outputs=SoftmaxOutputs(lse=True, weights=True, heads=(0, 3), rows=(-1,)),
    left=-1, right=0, alignment="bottom_right", softmax="float32", stage=0, key_mask=False, pads_mask=True,
    words={"softcap": 2.5, "score_mod": "{}"}, roles={"attn_mask": (2,), "score_mod": (4, 3)},
)  # fmt: skip
NODES: dict[str, FusedNode] = {
    "linear": FusedLinear((64, 32), (True, False), (False, False), 0),
    "linear of bytes": FusedQuantisedLinear(
        x_zeroed=True,
        x_scaled=False,
        widths=(64, 32),
        zeroed=(True, False),
        scaled=(True, True),
        biased=(False, True),
        transposed=(True, False),
        padding=16,
    ),
    "rotary": FusedRotary(ROWS, "heads", 6, 16, 8, interleaved=True, shared_angles=False, positions_name="input 'é'"),
    "rotary, no name": FusedRotary(HEADS, "rows", 6, 16, 8, interleaved=False, shared_angles=True, whole_angles=True),
    "scatter": FusedScatter(2, circular=False, in_place=True, indices_name="a", update_name="b"),
    "scatter of rows": FusedScatter(1, circular=True, in_place=False, indices_name="", update_name="b", update=ROWS),
    "attention": ATTENTION,
    "attention, scaled": replace(ATTENTION, scale=0.25, roles={}, past_key=0, past_value=1),
}


def read_back(fused: FusedNode) -> FusedNode:
    node = fused.to_node(helper.make_node("Any", ["x"], ["y"]), ["x"], ["y"])
    assert (node.op_type, node.name, node.domain) == (fused.op_type, "y", "mhsa")
    return type(fused).from_attributes({**ONNXGraphImporter(None, None)._parse_attr(node.attribute), "other": 1})


@pytest.mark.parametrize("fused", NODES.values(), ids=NODES)
def test_what_is_written_is_read(fused: FusedNode) -> None:
    assert vars(read_back(fused)) == vars(fused)


def test_a_constant_mask() -> None:
    visible = np.tri(3, 5, dtype=np.bool_)[None]
    found = read_back(replace(ATTENTION, pairs=visible))
    assert isinstance(found, FusedAttention) and found.pairs is not None
    assert found.pairs.dtype == np.bool_
    assert np.array_equal(found.pairs, visible)
