"""Batch entries with numbers of keys of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx
from tvm.ir import Expr

from mhsa_compile.kernels.interface.ops import AttentionOp, TensorInput
from mhsa_compile.kernels.interface.score_step import NodeScores, ScoreStep


@dataclass(frozen=True)
class Lengths(ScoreStep):
    """An input (B,) int64 says how many keys of each batch entry there are, held to 0 .. S: the others are hidden, and
    places that are counted from the last key are counted from that number."""

    role = "nonpad_kv_seqlen"
    extra = "lengths"
    counts_keys = True

    @classmethod
    def mistake(cls, node: NodeScores) -> tuple[str, ...] | None:
        if cls.role not in node.inputs:
            return None
        ((dtype, dims),) = node.inputs[cls.role]
        if dtype != "int64":
            return f"{cls.role} of int64", str(dtype)
        if dims is None or len(dims) != 1:
            return f"{cls.role} of known rank 1", str(dims)
        if cache := [what for what in node.beside if what.startswith(("past", "present"))]:
            expected = f"a cache inside (past, present) or outside ({cls.role}) of the operator"
            return expected, f"{cls.role} with {', '.join(cache)}"
        if isinstance(dims[0], int) and isinstance(node.batch, int) and dims[0] != node.batch:
            return f"equal batch sizes of {cls.role} and Q", f"{dims[0]} and {node.batch}"
        return None

    def arguments(self, op: AttentionOp) -> tuple[tuple[str, TensorInput], ...]:
        return (("lengths", TensorInput("int64", (op.batch,))),)

    def cuda_registers(self, row_tiles: int, keys: int, stages: int) -> dict[str, int]:
        return {"masks": 24}

    def keys(self, own: Sequence[Expr], b: Expr, count: Expr) -> Expr:
        return tirx.max(tirx.const(0, "int64"), tirx.min(count, own[0][b]))

    def random_inputs(self, rng: np.random.Generator, kinds: Sequence[tuple[str, tuple[int, ...]]]) -> list[np.ndarray]:
        """More than any: all keys."""
        ((dtype, shape),) = kinds
        return [np.full(shape, np.iinfo(np.int32).max, dtype)]

    def semantics(self) -> dict[str, Any]:
        return {"lengths": "a number of keys for each batch entry"}
