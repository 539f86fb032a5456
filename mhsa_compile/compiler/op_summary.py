"""An operation in one line, for reports."""

from __future__ import annotations

from mhsa_compile.kernels.interface.ops import (
    AttentionProbsOp,
    KvConcatOp,
    KvScatterOp,
    LinearOp,
    Op,
    RotaryOp,
    ScoresOp,
    SoftmaxStatsOp,
    WindowSpec,
)


def summary(op: Op) -> str:
    """What there is to compute, without its lengths."""
    if isinstance(op, LinearOp):
        return f"{op.in_features} -> {' + '.join(map(str, op.widths))}"
    if isinstance(op, RotaryOp):
        pairs = "interleaved" if op.interleaved else "in halves"
        return f"{op.num_heads} heads of {op.head_dim}, {op.rotary_dim} turned, {pairs}"
    if isinstance(op, KvScatterOp):
        mode = "circular" if op.circular else "linear"
        return f"axis {op.axis} of {list(op.cache)}, {mode}, {'in place' if op.in_place else 'into a copy'}"
    if isinstance(op, KvConcatOp):
        return f"{op.num_heads} heads of {op.head_dim}" + ("" if op.past is None else ", behind the past")
    if isinstance(op, SoftmaxStatsOp):
        stated = {"lse": op.lse, "entropy": op.entropy, f"top_k {op.top_k}": op.top_k > 0}
        return ", ".join(word for word, present in stated.items() if present)
    if isinstance(op, AttentionProbsOp):
        chosen = {"head": op.heads, "row": op.rows}
        return ", ".join(f"{axis}s {list(n)}" if n is not None else f"every {axis}" for axis, n in chosen.items())
    if isinstance(op, ScoresOp):
        return f"qk_matmul_output_mode {op.stage}"
    grouped = "" if op.num_heads == op.num_kv_heads else f"/{op.num_kv_heads}"
    words = {"lengths": op.lengths, "sinks": op.sinks, "ALiBi": op.slopes, f"softcap {op.softcap:g}": op.softcap}
    besides = "".join(f", {word}" for word, present in words.items() if present)
    return f"{op.num_heads}{grouped} heads of {op.head_dim}" + _band(op.band) + besides


def _band(band: WindowSpec | None) -> str:
    if band is None:
        return ""
    if band.left is None and band.right == 0:
        return f", {band.alignment} causal"
    return f", window {band.left}, {band.right}, {band.alignment}"
