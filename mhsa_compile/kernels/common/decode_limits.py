"""Attention of one or few queries, as a language model's next token asks for it: every key and value is read once, for
all rows that share a key head."""

from __future__ import annotations

from mhsa_compile.kernels.common.score_scale import why_not_scores
from mhsa_compile.kernels.interface.ops import AttentionOp

MOST_QUERIES = 12
"""The most that any kernel for few queries takes, of either family; what kernels say of themselves may be less."""


def rows_of_key_head(op: AttentionOp) -> int:
    """Query rows that share a key head."""
    assert isinstance(op.q_length, int)
    return op.q_length * (op.num_heads // op.num_kv_heads)


def why_not_few_queries(
    op: AttentionOp, most_queries: int, most_rows: int, *, functions: bool = False, formats: bool = False
) -> str | None:
    """Why a kernel for so many queries, and rows that share a key head, is not for this attention, or None if it is."""
    if not isinstance(op.q_length, int):
        return f"the query length {op.q_length!r} is symbolic; this kernel is for a fixed one"
    rows = rows_of_key_head(op)
    if op.q_length > most_queries or rows > most_rows:
        return f"for at most {most_queries} queries and {most_rows} rows a key head, not {op.q_length} and {rows}"
    if op.pairs is not None:
        return "no constant masks"
    return why_not_scores(op, functions=functions, formats=formats)
