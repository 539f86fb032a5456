"""What `make cuda-configs` compiles: operations of every kernel for GPUs, and the configs of each one's space.

The operations are few and differ in what changes the code: dtypes, widths of heads, what hides keys and what adds to
scores, where operands lie, fixed and symbolic lengths. They cover each kind with each kernel, not each with each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from support.attention_ops import scattered
from support.cuda.cuda_linear import linear
from support.cuda.cuda_tile_kernels import operation
from support.rope_cases import BASE as ROPE
from support.scatter_cases import BASE as SCATTER

from mhsa_compile.hardware.profile import CudaProfile
from mhsa_compile.kernels.interface.ops import (
    AttentionOp,
    AttentionProbsOp,
    HeadLayout,
    KvConcatOp,
    Op,
    SoftmaxStatsOp,
)
from mhsa_compile.kernels.registry import KERNELS
from mhsa_compile.kernels.scores.call_mask import CallMask
from mhsa_compile.kernels.scores.static_mask import StaticMask
from mhsa_compile.spec.window import WindowSpec
from mhsa_compile.tuning.search.space import Point

AMPERE, SMALL, HOPPER = "cuda-sm80", "cuda-sm86", "cuda-sm90a"
TARGETS = (AMPERE, SMALL, HOPPER)
WHOLE = 64
"""Points of a space that are all compiled; of a larger one, those that `covering` chooses."""


@dataclass(frozen=True)
class Case:
    """An operation for a kernel, and the targets that it is compiled for: cuda-sm86 gets the PTX of cuda-sm80, so fewer
    operations show what ptxas makes of it there."""

    kernel: str
    name: str
    op: Op
    targets: tuple[str, ...] = TARGETS


CAUSAL, LATE = WindowSpec(None, 0), WindowSpec(None, 0, "bottom_right")
SCORES: dict[str, Any] = {"softcap": 5.0, "lengths": True, "sinks": True, "slopes": True}
WINDOW: dict[str, Any] = {"band": WindowSpec(70, 0, "bottom_right"), "lengths": True, "sinks": True}
EVERYTHING: dict[str, Any] = {**SCORES, "band": LATE, "mask": CallMask("bfloat16", ("B", 4, "L", "S"))}
BOOL = CallMask("bool", ("B", 1, "L", "S"))


def _square(width: int, **fields: Any) -> AttentionOp:
    return operation(widths=(width, width), **fields)


def _constant(width: int, heads: int, **fields: Any) -> AttentionOp:
    mask = StaticMask(scattered((heads, 256, 512)))
    return replace(_square(width, static_mask=mask, **fields), q_length=256, kv_length=512)


def _fused(width: int, **fields: Any) -> AttentionOp:
    """Q, K and V in the rows of one projection; of a fixed, ragged length."""
    H, G = 4, 2
    parts = {"query": 0, "key": H * width, "value": (H + G) * width}
    places = {role: HeadLayout(0, "rows", (H + 2 * G) * width + 8, first) for role, first in parts.items()}
    return replace(_square(width, **places, **fields), batch=2, q_length=197, kv_length=197)


ATTENTION: dict[str, tuple[AttentionOp, tuple[str, ...]]] = {
    "64": (_square(64, dtype="float16"), (AMPERE,)),
    "64 of everything": (_square(64, **EVERYTHING), (AMPERE, SMALL)),
    "96 window": (_square(96, **WINDOW), (AMPERE,)),
    "96 masked": (_square(96, mask=BOOL), (HOPPER,)),
    "128 causal, fused": (_fused(128, band=CAUSAL), (AMPERE, SMALL)),
    "128 constant": (_constant(128, 4, **SCORES), (AMPERE,)),
    "256 causal": (_square(256, band=CAUSAL), (SMALL,)),
    "256 window, slopes": (_square(256, slopes=True, dtype="float16", **WINDOW), (AMPERE,)),
    "256 masked": (_square(256, mask=BOOL), (HOPPER,)),  # what attention_hopper leaves
    "192 and 128": (operation(widths=(192, 128), softcap=50.0, band=LATE), (HOPPER,)),
    "24 and 40": (operation(widths=(24, 40), dtype="float16", lengths=True), (AMPERE,)),
}
HOPPERS: dict[str, AttentionOp] = {
    "64 causal": _square(64, dtype="float16", band=CAUSAL),
    "64 of everything": _square(64, **EVERYTHING),
    "64 constant": _constant(64, 4, **SCORES),
    "96 masked": _square(96, mask=BOOL, slopes=True),
    "128": _square(128),
    "128 causal, fused": _fused(128, band=CAUSAL),
    "128 window": _square(128, softcap=50.0, **WINDOW),
    "256 causal": _square(256, band=CAUSAL),
    "192 and 128": operation(widths=(192, 128), band=LATE),
    "24 and 40": operation(widths=(24, 40), dtype="float16", lengths=True),
}
FLOAT32: dict[str, tuple[AttentionOp, tuple[str, ...]]] = {
    "64 of everything": (_square(64, dtype="float32", **EVERYTHING), (AMPERE,)),
    "96 constant": (_constant(96, 4, dtype="float32"), (AMPERE,)),
    "128 causal, fused": (_fused(128, dtype="float32", band=CAUSAL), (HOPPER,)),
    "256": (_square(256, dtype="float32"), (AMPERE, SMALL)),
    "20 and 68": (operation(widths=(20, 68), dtype="float32", mask=BOOL), (SMALL,)),
}


def _decode(heads: tuple[int, int], width: int, queries: int = 1, **fields: Any) -> AttentionOp:
    return replace(operation(heads, (width, width), **fields), q_length=queries)


def _decodes(dtype: Any) -> dict[str, tuple[AttentionOp, tuple[str, ...]]]:
    everything = {**SCORES, "band": WindowSpec(100, 0, "bottom_right")}
    mask = CallMask(dtype, ("B", 32, 2, "S"))
    more, fewer = (1, 1) if dtype == "float32" else (3, 2)  # for more rows no block has room
    return {
        "64, a head each": (_decode((8, 8), 64, dtype=dtype, lengths=True), (AMPERE,)),
        "64 of everything": (_decode((32, 8), 64, 2, dtype=dtype, mask=mask, **everything), (AMPERE, SMALL)),
        "96, eight heads each": (_decode((16, 2), 96, more, dtype=dtype, band=LATE), (AMPERE,)),
        "128, four heads each": (_decode((32, 8), 128, dtype=dtype), (SMALL, HOPPER)),
        "128, eight heads each": (_decode((64, 8), 128, fewer, dtype=dtype, lengths=True, band=LATE), (HOPPER,)),
        "256, four heads each": (_decode((8, 2), 256, dtype=dtype, softcap=30.0), (AMPERE, HOPPER)),
    }


def _linears(dtype: Any) -> dict[str, tuple[Op, tuple[str, ...]]]:
    return {
        "projections": (linear((4096,), 776, (768, 384, 384), dtype), (AMPERE,)),
        "any rows": (linear(("B", "L"), 264, (40, 29, 11), dtype, padding=8), (SMALL,)),
        "no bias": (linear((4096,), 512, (771,), dtype, biased=(False,), transposed=(True,)), (HOPPER,)),
        "one row": (linear((1,), 4096, (4096,), dtype), (AMPERE, SMALL)),
    }


def _inside(dtype: Any, **fields: Any) -> AttentionOp:
    return operation(widths=(128, 128), dtype=dtype, **fields)


OTHERS: dict[str, dict[str, Op]] = {
    "cuda.statistics": {
        "sums": SoftmaxStatsOp(_inside("float16"), True, True),
        "everything": SoftmaxStatsOp(_inside("bfloat16", **EVERYTHING), True, True, 100),
        "constant": SoftmaxStatsOp(_constant(64, 4, dtype="float32"), True, True, 3),
    },
    "cuda.weights": {
        "all": AttentionProbsOp(_inside("float16")),
        "chosen": AttentionProbsOp(_inside("bfloat16", **EVERYTHING), (1,), (0, -1)),
        "constant": AttentionProbsOp(_constant(64, 1, dtype="float32")),
    },
    "cuda.rope": {
        "halves": replace(ROPE, dtype="bfloat16", head_dim=128, rotary_dim=64, x=HeadLayout(0, "rows", 384),
                          output=HeadLayout(0, "heads", 384)),
        "interleaved": replace(ROPE, dtype="float16", interleaved=True, rotary_dim=26),
        "whole": replace(ROPE, whole_angles=True, rotary_dim=14, max_positions=None),
    },
    "cuda.scatter": {
        "in place": replace(SCATTER, cache=("B", 3, "S", 64), dtype="bfloat16", in_place=True),
        "circular": replace(SCATTER, dtype="bool", circular=True),
        "copied": replace(SCATTER, cache=("B", 3, "S", 64)),
    },
    "cuda.present": {
        "past": KvConcatOp("B", "P", "L", 3, 64, HeadLayout(0, "rows", 192), "float16"),
        "odd": KvConcatOp("B", "P", "L", 3, 7, HeadLayout(0, "rows", 21), "bfloat16"),
        "new alone": KvConcatOp("B", None, "L", 3, 64, HeadLayout(0, "rows", 192)),
    },
}  # fmt: skip


def _cases() -> Iterator[Case]:
    for kernel, family in (
        ("cuda.attention", ATTENTION),
        ("cuda.attention_hopper", {name: (op, (HOPPER,)) for name, op in HOPPERS.items()}),
        ("cuda.attention_float32", FLOAT32),
        ("cuda.linear", _linears("bfloat16")),
        ("cuda.linear_float32", _linears("float32")),
    ):
        for name, (op, targets) in family.items():
            yield Case(kernel, name, op, targets)
    for dtype in ("float16", "float32"):
        for name, (op, targets) in _decodes(dtype).items():
            yield Case("cuda.decode", f"{dtype} {name}", op, targets)
    for dtype, rows in (("bfloat16", (4096,)), ("float16", ("B", "L"))):
        op = linear(rows, 776, (768, 768), dtype)
        yield Case("cuda.linear_hopper", f"{dtype} {rows}", op, (HOPPER,))
    for kernel, ops in OTHERS.items():
        for name, other in ops.items():
            yield Case(kernel, name, other)


CASES = tuple(_cases())


def kernel_of(name: str) -> Any:
    return next(kernel for kernel in KERNELS["cuda"] if kernel.name == name)


def space(case: Case, profile: CudaProfile) -> list[Point]:
    """All that can be emitted by the case's kernel, though another one may come before it."""
    kernel = kernel_of(case.kernel)
    if reason := kernel.why_not(case.op, profile):
        raise AssertionError(f"{case.kernel} does not take {case.name!r} on {profile.name}: {reason}")
    default = kernel.default_config(case.op, profile)
    choices = {knob: sorted({*values, default[knob]}) for knob, values in kernel.search_space(case.op, profile).items()}
    configs = (dict(zip(choices, values, strict=True)) for values in product(*choices.values()))
    return [Point.of(kernel.name, c) for c in configs if kernel.why_not_config(case.op, profile, c) is None]


def covering(points: Sequence[Point], strength: int) -> list[Point]:
    """Some of the points, in which so many values of different knobs come together as often as they do in all: each
    pair, for a strength of 2. Those that bring the most new ones, one after the other; all points for 0."""
    if not strength:
        return list(points)
    brings = [set(combinations(point.knobs, strength)) for point in points]
    pairs_to_cover, cover = set().union(*brings), list[Point]()
    while pairs_to_cover:
        best = max(range(len(points)), key=lambda i: len(brings[i] & pairs_to_cover))
        pairs_to_cover -= brings[best]
        cover.append(points[best])
    return cover
