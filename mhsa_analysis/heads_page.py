"""A page about the heads of a model's layers: one file that needs nothing else, for any browser."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mhsa_analysis.head_report import HeadReport
    from mhsa_analysis.pruning import PruningPlan


_TEMPLATE = Path(__file__).with_name("heads_page.html")
_PLACE = "/*DATA*/null"
MEASURES = ("cka", "js", "contribution", "information", "rho")
LONGEST_MAP = 48
"""Tokens of a text whose attention is shown; of a longer one the first."""


@dataclass(frozen=True, eq=False)
class ShownLayer:
    """maps: for each text the attention weights (H, L, L) of its tokens."""

    name: str
    report: HeadReport
    maps: Sequence[np.ndarray] = ()


def heads_page(title: str, layers: Sequence[ShownLayer], texts: Sequence[Sequence[str]] = ()) -> str:
    """HTML. `texts` are the tokens that `maps` are of."""
    data = {
        "title": title,
        "texts": [list(tokens[:LONGEST_MAP]) for tokens in texts],
        "cut": [len(tokens) > LONGEST_MAP for tokens in texts],
        "layers": [_description(layer) for layer in layers],
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")  # no text ends the script
    template = _TEMPLATE.read_text(encoding="utf-8")
    return template.replace("/*TITLE*/", html.escape(title)).replace(_PLACE, text)


def in_frame(page: str) -> str:
    """The page within another one, such as a notebook."""
    source = html.escape(page, quote=True)
    return f'<iframe srcdoc="{source}" style="width:100%;height:900px;border:0" title="What heads do"></iframe>'


def _description(layer: ShownLayer) -> dict[str, Any]:
    report = layer.report
    return {
        "name": layer.name,
        "tokens": report.tokens,
        "roles": report.roles,
        "entropy": _numbers(report.entropy),
        "share": _numbers(report.entropy_share),
        "distance": None if report.distance is None else _numbers(report.distance),
        "places": {place: _numbers(share) for place, share in report.shares.items()},
        "order": report.order,
        "apart": _numbers(report.dissimilarity),
        "measures": {name: _numbers(getattr(report, name)) for name in MEASURES},
        "curve": [_costs(plan) for plan in report.pruning_curve()],
        "maps": [_bytes(weights[:, :LONGEST_MAP, :LONGEST_MAP]) for weights in layer.maps],
    }


def _costs(plan: PruningPlan) -> dict[str, Any]:
    """What a plan costs on the text of its fit and on other text; None where there is too little of it."""
    unseen = plan.split.unseen is not None
    fit = plan.fit if unseen and plan.split.why_not_fit(plan.kept) is None else None
    return {
        "heads": plan.heads,
        "error": round(plan.relative_error, 4),
        "unseen": round(plan.unseen_error, 4) if unseen else None,
        "refit": None if fit is None else round(fit.training_error, 4),
        "unseen_refit": None if fit is None else round(fit.unseen_error, 4),
    }


def _numbers(values: np.ndarray) -> Any:
    """Nested lists, of three digits; None for what is infinite."""
    if values.ndim > 1:
        return [_numbers(row) for row in values]
    return [round(float(value), 3) if np.isfinite(value) else None for value in values]


def _bytes(weights: np.ndarray) -> str:
    """(H, L, L) as bytes, 255 for 1, in base64."""
    return base64.b64encode(np.clip(np.rint(weights * 255), 0, 255).astype(np.uint8).tobytes()).decode()
