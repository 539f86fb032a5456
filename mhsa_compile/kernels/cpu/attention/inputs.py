"""What an attention on a CPU takes besides Q, K and V, as its kernels read it; its scores within their softcap."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.attention_args import ExtraInputs
from mhsa_compile.kernels.common.score_scale import LOG2_E
from mhsa_compile.kernels.cpu.simd import vector_math
from mhsa_compile.kernels.cpu.simd.dtypes import load_wide
from mhsa_compile.kernels.cpu.simd.vectors import (
    Expr,
    constant,
    let,
    materialize,
)
from mhsa_compile.kernels.interface.ops import AttentionOp, MaskInput

MaskReader = Callable[[Expr, Expr, Expr], Expr]  # (head, query, key) -> the mask's element


def mask_reader(mask: Expr, b: Expr) -> MaskReader:
    """Reads the mask at (head, query, key), a bool or a float32; clamping each index makes an axis of 1 broadcast."""
    last = [let(size - 1) for size in mask.shape]

    def read(head: Expr, query: Expr, key: Expr) -> Expr:
        at = [T.min(i, end) for i, end in zip((b, head, query, key), last, strict=True)]
        return mask[tuple(at)] if mask.dtype == "bool" else load_wide(mask, at, 1)

    return read


def mask_bias(mask: MaskInput | None, element: Expr) -> Expr:
    """An element of the mask as a number to add to a score, in units of log2; -inf where it hides."""
    assert mask is not None
    if mask.dtype == "bool":
        return T.Select(element, T.float32(0), T.float32(-math.inf))
    return element * T.float32(LOG2_E)


class CpuExtraInputs(ExtraInputs):
    """The extra inputs of an attention on a CPU; numbers of keys are int64 here."""

    def keys(self, b: Expr, kv_length: Expr) -> Expr:
        return kv_length if self.lengths is None else materialize(self.held(b, kv_length))

    def settled(self, value: Expr) -> Expr:
        return materialize(value, "float32")

    def element(self, buffer: Expr, head: Expr) -> Expr:
        return load_wide(buffer, [head], 1)


def place_of(op: AttentionOp, query: Expr, q_length: Expr | int, kv_length: Expr) -> Expr:
    """The place of a query among the keys: what its band, and the distance to a key, are counted from."""
    if op.band is None or op.band.alignment == "top_left":
        return query
    return materialize(query + kv_length - q_length)


def capped(op: AttentionOp, score: Expr, lanes: int) -> Expr:
    """A score in units of log2, within the softcap if there is one."""
    if not op.softcap:
        return score
    return vector_math.tanh(score, lanes) * constant(op.softcap * LOG2_E, lanes)
