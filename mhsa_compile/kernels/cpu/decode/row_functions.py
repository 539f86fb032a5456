"""mask_mod and score_mod of decode's rows: each lane is a query row and, where few share a vector, one of its keys."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.score_emission import Value
from mhsa_compile.kernels.cpu.attention.inputs import place_of
from mhsa_compile.kernels.cpu.decode.query_key import ScoreLayout
from mhsa_compile.kernels.cpu.decode.work import Heads
from mhsa_compile.kernels.cpu.score_functions import HIDDEN, TaskFunction, number
from mhsa_compile.kernels.cpu.simd.vectors import Expr, constant, load, materialize, splat
from mhsa_compile.kernels.interface.ops import AttentionOp


class RowFunctions:
    """The functions of one task, where the attention has some."""

    def __init__(self, op: AttentionOp, layout: ScoreLayout, kv_length: Expr, heads: Heads) -> None:
        self.op, self.layout, self.kv_length, self.heads = op, layout, kv_length, heads
        self.lanes, self.size = layout.lanes, layout.lanes * layout.row_vectors
        self.mask_mod, self.score_mod = (
            None
            if getattr(op, name) is None
            else TaskFunction(heads.tensors, name, self.size, frozenset({"q_idx", "h"}))
            for name in ("mask_mod", "score_mod")
        )

    @property
    def hide(self) -> bool:
        """Whether keys may be hidden by them."""
        return self.mask_mod is not None or self.score_mod is not None

    def prepare(self) -> None:
        """Computes what depends on the rows alone."""
        if not self.hide:
            return
        assert isinstance(self.op.q_length, int)
        ratio, rows = self.op.num_heads // self.op.num_kv_heads, self.layout.rows
        first_place = materialize(
            T.cast(place_of(self.op, T.int64(0), self.op.q_length, self.kv_length), "int32"), "int32"
        )
        first_head = materialize(T.cast(self.heads.first_head, "int32"), "int32")
        places, numbers = (T.alloc_buffer((self.size,), "int32") for _ in range(2))
        for lane in range(self.size):
            # Rows of padding are as the last row.
            row = min(lane % self.layout.padded_rows, rows - 1)
            T.buffer_store(places, first_place + T.int32(row // ratio), [T.int64(lane)])
            T.buffer_store(numbers, first_head + T.int32(row % ratio), [T.int64(lane)])
        b = number(materialize(self.heads.entry))
        for slot in range(0, self.size, self.lanes):
            q_idx, h = (
                Value(materialize(load(buffer, [T.int64(slot)], self.lanes), "int32", self.lanes), "int32", self.lanes)
                for buffer in (places, numbers)
            )
            for function in (self.mask_mod, self.score_mod):
                if function is not None:
                    function.prepare(slot, self.lanes, {"b": b, "h": h, "q_idx": q_idx})

    def modified(self, score: Expr, key: Expr, vector: int) -> Expr:
        """What score_mod makes of a vector of scores; `key` is its first key."""
        if self.score_mod is None:
            return score
        return materialize(
            self.score_mod.score(vector * self.lanes, self.lanes, self._keys(key), score), "float32", self.lanes
        )

    def masked(self, score: Expr, key: Expr, vector: int) -> Expr:
        """The scores, -inf where mask_mod hides."""
        if self.mask_mod is None:
            return score
        bias = materialize(self.mask_mod.bias(vector * self.lanes, self.lanes, self._keys(key)), "float32", self.lanes)
        hidden = constant(HIDDEN, self.lanes)
        return T.Select(bias == hidden, hidden, score + bias)

    def _keys(self, first: Expr) -> Value:
        """The key of each lane; beyond the last one the last again: nothing is read from outside of a tensor."""
        lanes = self.lanes
        keys = splat(T.cast(first, "int32"), lanes) + self.layout.key_of_lane()
        last = splat(T.cast(self.kv_length - 1, "int32"), lanes)
        return Value(materialize(T.min(keys, last), "int32", lanes), "int32", lanes)
