"""What runs what, on one screen: operations that are alike in one row, by their share of the predicted time.

Predicted is the arithmetic: projections and attentions by their multiply-adds, at the dims that are fixed and, of
others, at B = 1 and a length of 128. What TVM's own code takes, nobody predicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mhsa_compile.runtime.profile.op_work import attention_flops, linear_flops

if TYPE_CHECKING:
    from mhsa_compile.runtime.artifact.manifest import Manifest, OpReport

_SHOWN = 14
_BATCH, _LENGTH = 1, 128
COLUMNS = ("operations", "kind", "kernel", "predicted>", "config from", "note")


@dataclass(frozen=True)
class _Group:
    """Operations with the same kind, kernel, origin of the config, and note."""

    ops: tuple[OpReport, ...]
    flops: int | None


def rows(manifest: Manifest, *, verbose: bool) -> list[tuple[str, ...]]:
    """The rows of a table with COLUMNS; `verbose` gives each operation a row, in the order of the code."""
    flops = {op.name: _flops(manifest, op) for op in manifest.ops}
    total = sum(known for known in flops.values() if known is not None)
    if verbose:
        return [_row(_Group((op,), flops[op.name]), total) for op in manifest.ops]
    groups = _groups(manifest, flops)
    shown = groups if len(groups) <= _SHOWN + 1 else groups[:_SHOWN]
    rest = sum(len(group.ops) for group in groups[len(shown) :])
    more = [(f"{rest} others", "", "", "", "", "--verbose shows all")] if rest else []
    return [*(_row(group, total) for group in shown), *more]


def _groups(manifest: Manifest, flops: Mapping[str, int | None]) -> list[_Group]:
    """Groups of operations that are alike, the longest time first; those of unknown time last, the largest first."""
    alike: dict[tuple[str, ...], list[OpReport]] = {}
    for op in manifest.ops:
        by_tvm = op.kernel == "tvm"
        alike.setdefault((op.op, op.kernel, op.source, "" if by_tvm else op.note), []).append(op)
    groups = []
    for ops in alike.values():
        known = [number for op in ops if (number := flops[op.name]) is not None]
        groups.append(_Group(tuple(ops), sum(known) if known else None))
    return sorted(groups, key=lambda group: (group.flops is None, -(group.flops or 0), -len(group.ops)))


def _row(group: _Group, total: int) -> tuple[str, ...]:
    first, count = group.ops[0], len(group.ops)
    name = first.name if count == 1 else f"{count}: {first.name} ... {group.ops[-1].name}"
    share = "" if group.flops is None or not total else f"{group.flops / total:.0%}"
    return name, first.op, first.kernel, share, first.source, first.note


def _flops(manifest: Manifest, op: OpReport) -> int | None:
    B, L, S = _sizes(manifest)
    if op.op == "linear":
        return linear_flops(op, B * L)
    meaning = next((one for one in manifest.semantics if one.op == op.name), None)
    return None if op.op != "attention" or meaning is None else attention_flops(manifest, meaning, L, S, [S] * B)


def _sizes(manifest: Manifest) -> tuple[int, int, int]:
    """B, L and S: those of the inputs, where they are fixed and say so."""
    spec, dims = manifest.spec, {info.name: info.dims for info in manifest.inputs}
    batch, length = next(((d[0], d[-2]) for d in dims.values() if len(d) > 2), (_BATCH, _LENGTH))
    if len(next(iter(dims.values()), ())) == 2:  # tokens (B, L)
        batch, length = next(iter(dims.values()))
    B, L = (size if isinstance(size, int) else usual for size, usual in ((batch, _BATCH), (length, _LENGTH)))
    of_keys = () if spec is None else ("past_key", "context", "key", "k")
    other = next((dims[name][-2] for name in of_keys if name in dims), L)
    return B, L, other if isinstance(other, int) else max(L, _LENGTH)
