"""Where the operands of an attention lie: its arguments, one head of each read in place, its mask, what it takes
besides; and the units of its scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu import functions
from mhsa_compile.kernels.cpu.storage import load_wide
from mhsa_compile.kernels.cpu.vectors import Expr, argument, bind, constant, settle
from mhsa_compile.kernels.operations import AttentionOp, MaskInput, Placement

LOG2_E = math.log2(math.e)
LARGEST = (2 - 2.0**-23) * 2.0**127  # float32
SOFTCAPS = (1e-12, 1e12)
MaskReader = Callable[[Expr, Expr, Expr], Expr]  # (head, query, key) -> the mask's element


@dataclass(frozen=True)
class HeadView:
    """One head of one operand, read in place: `buffer[at(row, column)]` is an element."""

    buffer: Expr
    at: Callable[[Expr, Expr], list[Expr]]


def input_arguments(op: AttentionOp, batch: Expr, q_length: Expr, kv_length: Expr) -> dict[int, Expr]:
    """One argument for each distinct input: a fused projection hands Q, K and V over in one buffer."""
    roles = (
        (op.query, q_length, op.num_heads, op.head_dim),
        (op.key, kv_length, op.num_kv_heads, op.head_dim),
        (op.value, kv_length, op.num_kv_heads, op.v_head_dim),
    )
    buffers: dict[int, Expr] = {}
    for place, length, heads, width in sorted(roles, key=lambda role: role[0].buffer):
        if place.buffer not in buffers:
            shape = placed_shape(place, batch, length, heads, width)
            buffers[place.buffer] = argument(f"input{place.buffer}", shape, op.dtype)
    return buffers


def placed_shape(place: Placement, batch: Expr, length: Expr, heads: int, head_dim: int) -> list[Expr]:
    if place.layout == "rows":
        return [batch, length, T.int64(place.width)]
    return [batch, T.int64(heads), length, T.int64(head_dim)]


def head_view(buffer: Expr, place: Placement, head_dim: int, b: Expr, head: Expr) -> HeadView:
    if place.layout == "rows":
        return HeadView(buffer, lambda row, column: [b, row, place.offset + head * head_dim + column])
    return HeadView(buffer, lambda row, column: [b, head, row, column])


def mask_reader(mask: Expr, b: Expr) -> MaskReader:
    """Reads the mask at (head, query, key), a bool or a float32; clamping each index makes an axis of 1 broadcast."""
    last = [bind(size - 1) for size in mask.shape]

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


@dataclass(frozen=True)
class Extras:
    """The inputs of an attention after its mask, None where it has none: lengths (B,), sinks and slopes (H,)."""

    lengths: Expr | None
    sinks: Expr | None
    slopes: Expr | None

    def keys(self, b: Expr, kv_length: Expr) -> Expr:
        """How many keys batch entry b has; what a call brings is held to 0 .. `kv_length`."""
        if self.lengths is None:
            return kv_length
        return settle(T.max(T.int64(0), T.min(kv_length, self.lengths[b])))

    def sink(self, head: Expr) -> Expr | None:
        """The sink of a head, in units of log2. An infinite one is held to the largest number: what is infinitely below
        its row's maximum has a weight of 0, but the maximum itself must be one that can be subtracted from."""
        if self.sinks is None:
            return None
        sink, largest = _in_log2(self.sinks, head), T.float32(LARGEST)
        return settle(T.Select(sink > largest, largest, sink), "float32")

    def slope(self, head: Expr) -> Expr | None:
        """What a head adds to a score for each key that lies further on, in units of log2."""
        return None if self.slopes is None else _in_log2(self.slopes, head)


def _in_log2(buffer: Expr, head: Expr) -> Expr:
    return settle(load_wide(buffer, [head], 1) * T.float32(LOG2_E), "float32")


def extra_arguments(op: AttentionOp, batch: Expr) -> Extras:
    """The arguments that stand between the mask and the constants."""
    heads = T.int64(op.num_heads)
    return Extras(
        argument("lengths", [batch], "int64") if op.lengths else None,
        argument("sinks", [heads], op.dtype) if op.sinks else None,
        argument("slopes", [heads], op.dtype) if op.slopes else None,
    )


def place_of(op: AttentionOp, query: Expr, q_length: Expr | int, kv_length: Expr) -> Expr:
    """Where a query stands among the keys: what its band, and the distance to a key, are counted from."""
    if op.band is None or op.band.alignment == "top_left":
        return query
    return settle(query + kv_length - q_length)


def unfit_softcap(op: AttentionOp) -> str | None:
    """Why the softcap cannot be the unit of products in float32, or None if it can."""
    if not op.softcap or SOFTCAPS[0] <= op.softcap <= SOFTCAPS[1]:
        return None
    return f"a softcap from {SOFTCAPS[0]:g} to {SOFTCAPS[1]:g}, or 0 for none, not {op.softcap:g}"


def score_factor(op: AttentionOp) -> float:
    """Makes scores of the products of queries and keys: in units of log2 or, for `capped`, of the softcap."""
    return op.scale / op.softcap if op.softcap else op.scale * LOG2_E


def capped(op: AttentionOp, score: Expr, lanes: int) -> Expr:
    """A score in units of log2, within the softcap if there is one."""
    if not op.softcap:
        return score
    return functions.tanh(score, lanes) * constant(op.softcap * LOG2_E, lanes)
