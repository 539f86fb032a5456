"""Attentions and the steps of their scores, written by the features that there are: for tests, and for references that
read them again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from mhsa_compile.kernels.interface.ops import AttentionOp, Dim, HeadLayout, TensorInput
from mhsa_compile.kernels.interface.score_step import ScoreStep
from mhsa_compile.kernels.scores.band import Band
from mhsa_compile.kernels.scores.call_mask import CallMask
from mhsa_compile.kernels.scores.functions import MaskMod, ScoreMod
from mhsa_compile.kernels.scores.lengths import Lengths
from mhsa_compile.kernels.scores.limit import Softcap, SoftClamp
from mhsa_compile.kernels.scores.order import in_order
from mhsa_compile.kernels.scores.sinks import Sinks
from mhsa_compile.kernels.scores.slopes import Slopes
from mhsa_compile.kernels.scores.static_mask import StaticMask
from mhsa_compile.spec.score_functions import ScoreFunction
from mhsa_compile.spec.window import WindowSpec


@dataclass(frozen=True)
class Features:
    """What the scores of an attention have, by name."""

    band: WindowSpec | None = None
    mask: CallMask | None = None
    static_mask: StaticMask | None = None
    softcap: float = 0.0
    softclamp: float = 0.0
    lengths: bool = False
    sinks: bool = False
    slopes: bool = False
    mask_mod: ScoreFunction | None = None
    score_mod: ScoreFunction | None = None
    tensors: tuple[TensorInput, ...] = ()
    """What score_mod captures, then what mask_mod does."""

    def steps(self) -> tuple[ScoreStep, ...]:
        count = 0 if self.score_mod is None else len(self.score_mod.tensors)
        return in_order(
            Softcap(self.softcap) if self.softcap else None,
            SoftClamp(self.softclamp) if self.softclamp else None,
            None if self.score_mod is None else ScoreMod(self.score_mod, self.tensors[:count]),
            self.static_mask,
            self.mask,
            None if self.mask_mod is None else MaskMod(self.mask_mod, self.tensors[count:]),
            None if self.band is None else Band(self.band),
            Lengths() if self.lengths else None,
            Sinks() if self.sinks else None,
            Slopes() if self.slopes else None,
        )


def features(op: AttentionOp) -> Features:
    """The features of an attention."""
    of: dict[type[ScoreStep], Any] = {type(step): step for step in op.scores}
    functions = [of[kind] for kind in (ScoreMod, MaskMod) if kind in of]
    return Features(
        band=op.window,
        mask=of.get(CallMask),
        static_mask=of.get(StaticMask),
        softcap=of[Softcap].limit if Softcap in of else 0.0,
        softclamp=of[SoftClamp].limit if SoftClamp in of else 0.0,
        lengths=Lengths in of,
        sinks=Sinks in of,
        slopes=Slopes in of,
        mask_mod=of[MaskMod].function if MaskMod in of else None,
        score_mod=of[ScoreMod].function if ScoreMod in of else None,
        tensors=tuple(tensor for step in functions for tensor in step.tensors),
    )


def changed(op: AttentionOp, **fields: Any) -> AttentionOp:
    """The attention with other fields, or features."""
    stated = {name: fields.pop(name) for name in list(fields) if name in Features.__dataclass_fields__}
    return replace(op, **fields, **({"scores": replace(features(op), **stated).steps()} if stated else {}))


def attention_of(*sizes: Any, **fields: Any) -> AttentionOp:
    """An attention of these fields and features."""
    stated = {name: fields.pop(name) for name in list(fields) if name in Features.__dataclass_fields__}
    return AttentionOp(*sizes, **fields, scores=Features(**stated).steps())


def by_heads(
    L: int, S: int, H: int = 4, G: int = 2, E: int = 24, F: int = 40, *, B: int = 1, **fields: Any
) -> AttentionOp:
    """An attention of operands by heads, in three buffers, with rows as its output."""
    places = {role: HeadLayout(i, "heads", 0) for i, role in enumerate(("query", "key", "value"))}
    fields = {"band": None, "mask": None, "output": HeadLayout(0, "rows", H * F), **places, **fields}
    return attention_of(B, L, S, H, G, E, F, E**-0.5, **fields)


def three_buffers(
    L: Dim = "L",
    H: int = 4,
    G: int = 2,
    E: int = 16,
    F: int = 24,
    layout: Literal["rows", "heads"] = "rows",
    **fields: Any,
) -> AttentionOp:
    """An attention of B entries and S keys whose operands and output lie alike."""
    op = attention_of(
        batch="B", q_length=L, kv_length="S", num_heads=H, num_kv_heads=G, head_dim=E, v_head_dim=F,
        scale=0.3, band=None, mask=None, query=HeadLayout(0, layout, H * E), key=HeadLayout(1, layout, G * E),
        value=HeadLayout(2, layout, G * F), output=HeadLayout(0, layout, H * F),
    )  # fmt: skip
    return changed(op, **fields)


def scattered(shape: tuple[int, int, int], seed: int = 1) -> np.ndarray:
    """Random pairs, with keys that nobody sees, a corner that everybody sees, and a query that sees nothing."""
    visible = np.random.default_rng(seed).random(shape) < 0.5
    _, L, S = shape
    visible[:, :, S // 3 : S // 2] = False
    visible[:, : L // 2, S // 2 :] = True
    visible[:, L - 1] = False
    return visible
