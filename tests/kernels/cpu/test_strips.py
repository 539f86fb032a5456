"""A tile of queries has the same bits whether its thread goes on to another one, among whose scores its last values are
added, or ends with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fuzz.kernels import profile
from kernels.cpu.test_tile_attention import KERNEL, agree, function, operands, operation
from support import this_cpu

from mhsa_compile.kernels.cpu import strips
from mhsa_compile.kernels.cpu.tile_attention.output import TileOutput
from mhsa_compile.kernels.interface.ops import AttentionOp, WindowSpec
from mhsa_compile.kernels.scores.call_mask import CallMask

SIZES = ((2, 1, 7), (1, 45, 31), (2, 70, 131), (1, 130, 300))
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"H": 4, "G": 2, "E": 32, "F": 96},
    "causal": {"band": WindowSpec(None, 0, "top_left")},
    "causal from the end": {"band": WindowSpec(None, 0, "bottom_right")},
    "window": {"band": WindowSpec(9, 3, "top_left")},
    "lengths": {"lengths": True},
    "lengths, sinks": {"lengths": True, "sinks": True},
    "mask": {"mask": CallMask("bool", (1, 1, "L", "S"))},
    "float16": {"dtype": "float16"},
    "bf16x6": {"dtype": "float32", "float32_products": "bf16x6"},
    "bf16x3": {"dtype": "float32", "float32_products": "bf16x3"},
}


def in_strips(op: AttentionOp, threads: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel, cut into strips as for so many threads: for one, one strip; for a thousand, each tile is a strip."""
    text = f"define i32 @mhsa_strip_threads() alwaysinline nounwind {{ ret i32 {threads} }}"
    with monkeypatch.context() as patch:
        patch.setattr(strips, "TEXT", text)
        return function(op)


@this_cpu.with_tiles
@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_a_tile_has_the_bits_that_it_has_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = dict(CASES[name])
    op = operation(**fields)
    alone, among = (in_strips(op, threads, monkeypatch) for threads in (1000, 1))
    rng = np.random.default_rng(3)
    for B, L, S in SIZES:
        q, k, v = operands(op, B, L, S, seed=L)
        k = (k.astype(np.float32) * np.linspace(0.1, 6, S, dtype=np.float32)[:, None]).astype(op.dtype)
        v[0, 0, S // 2, 3] = np.nan
        mask = rng.random((1, 1, L, S)) < 0.3 if "mask" in fields else None
        lengths = np.array([0, S][:B], np.int64) if "lengths" in fields else None
        sinks = rng.standard_normal(op.num_heads, np.float32).astype(op.dtype) if "sinks" in fields else None
        others = [array for array in (mask, lengths, sinks) if array is not None]
        y, expected = among(q, k, v, *others), alone(q, k, v, *others)
        assert y.tobytes() == expected.tobytes(), (B, L, S)
        if op.dtype != "float32":
            agree(op, y, q, k, v, mask, lengths, sinks)


@this_cpu.with_tiles
@pytest.mark.thorough
def test_sums_that_are_open_are_another_tile_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the scores of a tile raise shrinks the sums of the tile before, where they are not told apart."""
    op = operation(H=1, G=1)
    q, k, v = operands(op, 1, 64, 96)
    k = (k.astype(np.float32) * np.linspace(0.1, 30, 96, dtype=np.float32)[:, None]).astype(op.dtype)
    right = in_strips(op, 1, monkeypatch)(q, k, v)
    agree(op, right, q, k, v, None)
    monkeypatch.setattr(TileOutput, "own", lambda self: strips.T.int64(1))
    assert in_strips(op, 1, monkeypatch)(q, k, v).tobytes() != right.tobytes()


def test_a_strip_has_scratch_for_half_a_tile_where_a_known_length_is_no_more() -> None:
    configs = [KERNEL.default_config(op, profile("tiles", 2)) for op in (operation(L=13), operation(L=17), operation())]
    assert [config["queries"] for config in configs] == [16, 32, 32]


@this_cpu.with_tiles
@pytest.mark.thorough
def test_few_queries_have_the_bits_that_they_have_among_more() -> None:
    few, free = operation(L=13), operation()
    arrays = operands(free, 2, 13, 131)
    y = function(few)(*arrays)
    assert y.tobytes() == function(free)(*arrays).tobytes()
    agree(free, y, *arrays, None)
