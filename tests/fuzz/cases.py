"""The cases of a fuzzing campaign: what one is.

A case is a plain value whose repr is Python, so that a failing one can be printed as a program. It holds everything
that a run needs: the operation, the machine, the sizes of a few calls, and the seed of the numbers.
Notation: B batch, L query length, S key length, D embed, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mhsa_compile.spec.float32_products import Float32Request

TILES = ("amx_bf16", "amx_int8", "amx_tile", "avx512_bf16", "avx512_vnni")
MACHINES = {  # vector bits, registers, LLVM's CPU, features beyond it
    "native": None,
    "avx2": (256, 16, "x86-64-v3", ()),
    "avx512": (512, 32, "x86-64-v4", ()),
    "split512": (512, 32, "x86-64-v3", ()),
    "neon": (128, 32, "x86-64-v3", ()),
    "scalar": (64, 8, "x86-64-v3", ()),
    "dots512": (512, 32, "x86-64-v4", ("avx512_bf16", "avx512_vnni")),
    "dots256": (256, 16, "x86-64-v3", ("avx_vnni",)),
    "tiles": (512, 32, "x86-64-v4", TILES),
    "tiles of float16": (512, 32, "x86-64-v4", ("amx_fp16", *TILES)),
}
"""`native` is this one; the others are made up, and any x86-64-v3 machine runs those of x86-64-v3 without features.
`strategies.drawn` has those that this one runs."""


@dataclass(frozen=True)
class AttentionCase:
    """One attention kernel and some calls of it.

    machine     a name of MACHINES; `cores` decides how the work is cut
    heads       (H, G); `widths` are (E, F)
    layout      of Q, K and V: "heads", "rows", or "fused", three projections side by side in one buffer (then L = S)
    fixed       which of "B", "L" and "S" are sizes that the kernel is made for; they are those of the first call
    band        (left, right, alignment) or None; left and right may be None
    mask        (dtype, axes) or None: each axis 1, or full ("B", "H", "L", "S"), or of a size that the kernel reads
                ("mask_B", ...: 1 in every other call)
    static      a constant mask: (heads that differ, a pattern's text or the share that is visible), or None
    calls       (B, L, S) of each
    magnitude   of the scores: 1 is what random numbers give, 30 leaves one key, 0 makes all alike
    poison      NaN and Inf in keys and values that nobody sees
    extras      what else the operation has, of "lengths", "sinks", "slopes"; and `softcap`, 0 where it has none
    products    how products of float32 are asked for; what no kernel of the machine makes is "ieee"
    inputs      classes of numbers (`fuzz.numbers`): each call is made with each
    """

    seed: int
    machine: str
    cores: int
    dtype: str
    heads: tuple[int, int]
    widths: tuple[int, int]
    scale: float | None
    layout: str
    output: str
    fixed: str
    band: tuple[int | None, int | None, str] | None
    mask: tuple[str, tuple[Any, ...]] | None
    static: tuple[bool, str | float] | None
    magnitude: float
    poison: bool
    extras: tuple[str, ...]
    softcap: float
    calls: tuple[tuple[int, int, int], ...]
    products: Float32Request = "ieee"
    inputs: tuple[str, ...] = ("normal",)


@dataclass(frozen=True)
class LinearCase:
    """One linear kernel, projections side by side, and some calls of it: (B, L) of each, with numbers of each class of
    `inputs`. `weights` is the class of the weights' numbers."""

    seed: int
    machine: str
    cores: int
    dtype: str
    int8: bool
    in_features: int
    widths: tuple[int, ...]
    biased: tuple[bool, ...]
    transposed: tuple[bool, ...]
    padding: int
    fixed: bool
    calls: tuple[tuple[int, int], ...]
    products: Float32Request = "ieee"
    inputs: tuple[str, ...] = ("normal",)
    weights: str = "normal"


@dataclass(frozen=True)
class ProductCase:
    """A product of two activations, and some calls of it: sizes of b, h, m, k and n, with numbers of each class.

    order       a name of `support.product_ops.ORDERS`
    result      the dtype of Y
    fixed       letters of axes whose sizes the kernel is made for; they are those of the first call
    """

    seed: int
    machine: str
    cores: int
    dtype: str
    result: str
    order: str
    fixed: str
    calls: tuple[tuple[int, int, int, int, int], ...]
    products: Float32Request = "ieee"
    inputs: tuple[str, ...] = ("normal",)


@dataclass(frozen=True)
class BytesCase:
    """One linear kernel of bytes that a file stores, and some calls of it: (B, L) of each.

    x_dtype     of x; `stored` has that of each weight
    centred     whether the weights' zeros are all in the middle
    """

    seed: int
    machine: str
    cores: int
    x_dtype: str
    stored: tuple[str, ...]
    in_features: int
    widths: tuple[int, ...]
    centred: bool
    padding: int
    fixed: bool
    calls: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class FlowCase:
    """One spec through the whole flow: `spec` are the fields of AttentionSpec, `calls` are cases of `verify`."""

    seed: int
    module: str
    spec: dict[str, Any]
    target: str
    dims: dict[str, int]
    weights: str | None
    calls: tuple[dict[str, int], ...]


@dataclass(frozen=True)
class InsideCase:
    """A kernel that looks into the softmax of an attention.

    outputs     words of `mhsa_compile.spec.outputs`: some of lse, entropy and top_k, or weights
    """

    attention: AttentionCase
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class DecodeCase:
    """A prompt and what follows it through a cache, in several calls of two artifacts, against the whole sequence.

    spec        without `kv_cache` and `causal`, which it has; of its outputs y comes first
    prompts     positions of each entry's prompt; they are padded to the longest, and cut back
    steps       new positions of each call after it; those of one go to an artifact that is made for one
    spare       positions that the cache has beyond those that are written
    """

    seed: int
    spec: dict[str, Any]
    target: str
    prompts: tuple[int, ...]
    steps: tuple[int, ...]
    spare: int


Case = AttentionCase | InsideCase | LinearCase | ProductCase | BytesCase | FlowCase | DecodeCase


@dataclass(frozen=True)
class Outcome:
    """What a run found: the worst call's error as a share of its budget, and what the case counts as.

    controls    what is wrong on purpose, of some calls: the largest share of the budget that it came to
    """

    share: float
    calls: int
    kind: str
    dtype: str
    features: tuple[str, ...]
    controls: tuple[tuple[str, float], ...] = ()
