"""The steps of scores, in the order in which they act: what bends scores, what hides keys, what is added in the end."""

from __future__ import annotations

from mhsa_compile.kernels.interface.score_step import NodeScores, ScoreStep
from mhsa_compile.kernels.scores.band import Band
from mhsa_compile.kernels.scores.call_mask import CallMask
from mhsa_compile.kernels.scores.functions import MaskMod, ScoreMod
from mhsa_compile.kernels.scores.lengths import Lengths
from mhsa_compile.kernels.scores.limit import Softcap, SoftClamp
from mhsa_compile.kernels.scores.sinks import Sinks
from mhsa_compile.kernels.scores.slopes import Slopes
from mhsa_compile.kernels.scores.static_mask import StaticMask

STEPS: tuple[type[ScoreStep], ...] = (
    Softcap,
    SoftClamp,
    ScoreMod,
    StaticMask,
    CallMask,
    MaskMod,
    Band,
    Lengths,
    Sinks,
    Slopes,
)


def steps_of(node: NodeScores) -> tuple[ScoreStep, ...]:
    """The steps that a node's attributes and inputs ask for, in the order of STEPS."""
    return in_order(*(kind.read(node) for kind in STEPS))


def in_order(*steps: ScoreStep | None) -> tuple[ScoreStep, ...]:
    """The steps that are not None, in the order of STEPS."""
    return tuple(sorted((step for step in steps if step is not None), key=lambda step: STEPS.index(type(step))))
