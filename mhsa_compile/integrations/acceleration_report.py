"""What `accelerate` did to a model, and how the calls of it went: a row for each attention, layer and linear."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mhsa_compile.integrations.layers.ways import LayerRow
from mhsa_compile.integrations.weight_state import MOST_SETS
from mhsa_compile.runtime.artifact.manifest import Manifest
from mhsa_compile.spec.float32_products import Float32Request


@dataclass(frozen=True)
class AccelerationRow:
    """One attention or linear: `name` in the model ("" is the model itself), the class, and why it was kept, "" if it
    was replaced. `weights` says what a linear of few bits multiplies, `why_floats` why one has none of a checkpoint's.
    """

    name: str
    kind: str
    why_kept: str = ""
    weights: str = ""
    why_floats: str = ""

    @property
    def replaced(self) -> bool:
        return not self.why_kept


class AccelerationReport:
    """The rows, in the order of the model's modules. Printed, it is a table.

    `layers` has a row for each layer of PyTorch's encoders and decoders, and of models of transformers: it may be one
    artifact, or left to PyTorch.
    `linears` has rows of its own, where linears were asked for, and of each that another tool quantised.
    `calls`: reason -> how many calls of replaced layers PyTorch computed itself for it. `checked`: how many first calls
    of a kind were held against PyTorch's. `repacked`, `repacking_s`: how often layers packed weights that had changed,
    and how many seconds that took. `float32_products` is how float32 was asked to be multiplied.
    """

    def __init__(self, float32_products: Float32Request = "auto") -> None:
        self.float32_products = float32_products
        self.rows: list[AccelerationRow] = []
        self.layers: list[LayerRow] = []
        self.linears: list[AccelerationRow] = []
        self.calls: dict[str, int] = {}
        self.checked = 0
        self.repacked, self.repacking_s = 0, 0.0
        self._outcomes: dict[str, int] = {}
        self._refreshes = 0
        self.registered: list[Any] = []  # what a copy in another process needs to be there

    def __iter__(self) -> Iterator[AccelerationRow]:
        return iter(self.rows)

    @property
    def replaced(self) -> list[AccelerationRow]:
        return [row for row in self.rows if row.replaced]

    @property
    def kept(self) -> list[AccelerationRow]:
        return [row for row in self.rows if not row.replaced]

    def refresh(self) -> None:
        """Binds the weights of all replaced layers anew, for edits of a few numbers that PyTorch does not count: by
        `.data`, by NumPy's views, and of inference tensors. All others are noticed by the next call: `weight_state`."""
        self._refreshes += 1

    def refreshes(self) -> int:
        """How often weights were to be bound anew. Layers ask; no report knows a layer, so that a copy of one layer is
        none of the whole model."""
        return self._refreshes

    def count(self, why: str) -> None:
        """Counts a call that PyTorch computes itself."""
        self.calls[why] = self.calls.get(why, 0) + 1

    def count_check(self) -> None:
        """Counts a call that was held against PyTorch's."""
        self.checked += 1

    def count_repacked(self, seconds: float) -> None:
        """Counts weights that had changed, and were packed in these seconds."""
        self.repacked, self.repacking_s = self.repacked + 1, self.repacking_s + seconds

    def count_outcome(self, manifest: Manifest) -> None:
        """Counts an artifact that a layer was given, by how it multiplies float32."""
        if outcome := manifest.float32_outcome():
            self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1

    def float32_outcomes(self) -> dict[str, int]:
        """What layers got of `float32_products`, and why not what was asked for -> in how many artifacts: known from
        their first calls on. Those of transformers' attention are of all models that asked the same."""
        tables = {registration.name: registration.table for registration in self.registered}
        return dict(sum((Counter(table.float32_outcomes()) for table in tables.values()), Counter(self._outcomes)))

    def __repr__(self) -> str:
        lines = [f"{len(self.replaced)} of {len(self.rows)} attentions replaced"]
        width = max((len(row.name) for row in self.rows), default=0)
        for row in self.rows:
            outcome = "replaced" if row.replaced else f"kept: {row.why_kept}"
            lines.append(f"  {row.name or '(the model)':{max(width, 11)}}  {row.kind}  {outcome}")
        if self.layers:
            lines.append(
                f"{sum(not row.why_parts for row in self.layers)} of {len(self.layers)} layers can be one artifact each"
            )
            lines += [f"  {row.name or '(the model)':{max(width, 11)}}  {row.outcome()}" for row in self.layers]
        if self.linears:
            lines.append(f"{sum(row.replaced for row in self.linears)} of {len(self.linears)} linears replaced")
            reasons = Counter(row.why_kept for row in self.linears if not row.replaced)
            lines += [f"  {number} kept: {why}" for why, number in reasons.items()]
            words = Counter(row.weights for row in self.linears if row.replaced and row.weights)
            lines += [f"  {number} of {word}" for word, number in words.items()]
            floats = Counter(row.why_floats for row in self.linears if row.replaced and row.why_floats)
            lines += [f"  {number} of float32: {why}" for why, number in floats.items()]
        if self.checked:
            lines.append(f"  {self.checked} first calls of a kind checked against PyTorch's")
        if self.repacked:
            times = f"weights packed anew {self.repacked} times, {self.repacking_s:.2g} s in all"
            lines.append(f"  {times}: they had changed; sets in memory of their own stay packed, the last {MOST_SETS}")
        lines += [f"  {number} calls computed by PyTorch: {why}" for why, number in self.calls.items()]
        outcomes = [f"{what}, in {number} artifacts" for what, number in self.float32_outcomes().items()]
        if not outcomes and self.float32_products not in ("auto", "ieee"):
            outcomes = [f"asked {self.float32_products}; first calls show what layers get"]
        lines += [f"float32 products: {outcome}" for outcome in outcomes]
        return "\n".join(lines)
