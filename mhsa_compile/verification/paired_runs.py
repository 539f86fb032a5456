"""Two runs of one artifact, compared: what a self-check is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mhsa_compile.errors import MhsaError
from mhsa_compile.runtime.artifact.manifest import Manifest, TensorInfo
from mhsa_compile.verification import top_k_parity
from mhsa_compile.verification.error_budget import budget, max_error, share_of_budget
from mhsa_compile.verification.oracle.evaluate import Reference
from mhsa_compile.verification.random_inputs import Arrays

EXACT = 1e-9
"""How near two float64 results are that mean the same, as a share of the largest."""

SAME = "to the bit"
"""What a check says of runs whose results are equal."""

Cut = Callable[[np.ndarray, TensorInfo], np.ndarray]
"""The part of an output that is compared."""


@dataclass(frozen=True)
class SelfCheck:
    """One property: the largest difference between two runs, and what was allowed; both None where it does not apply.

    `note` says whether the runs agreed to the bit, or at which sizes they ran, or why the check does not apply.
    """

    name: str
    difference: float | None = None
    budget: float | None = None
    note: str = ""

    @property
    def applies(self) -> bool:
        return self.difference is not None

    @property
    def ok(self) -> bool:
        return self.difference is None or self.budget is None or self.difference <= self.budget

    @property
    def ratio(self) -> float:
        """The difference as a share of the budget; above 1 fails."""
        if self.difference is None or self.budget is None:
            return 0.0
        return share_of_budget(self.difference, self.budget)


@dataclass(frozen=True)
class Variant:
    """Another call, and which part of its outputs must equal which part of the base's.

    `first_key`: which of the base's keys is its first one.
    """

    inputs: Arrays
    part: Cut
    base_part: Cut
    first_key: int = 0


class CallRefused(Exception):
    """A call that the compiled function does not take, though the oracle does."""


class Meaningless(Exception):
    """Sizes that a graph made elsewhere does not take, or a property that it does not have, says the oracle."""


class RunPairs:
    """Runs a compiled function, the oracle and the yardstick, and compares runs of the first.

    What the oracle says of a graph made elsewhere comes first: it raises Meaningless. After that it is the compiled
    function's fault not to run: Refused.
    """

    def __init__(self, reference: Reference, manifest: Manifest, run: Callable[[Arrays], list[np.ndarray]]) -> None:
        self.reference, self.manifest, self._run = reference, manifest, run
        self.model = model = reference.model
        self.own = manifest.spec is not None
        probe = top_k_parity.in_weights(model)
        self._judged = reference if probe is model else Reference(probe, reference.precision)
        names = [value.name for value in model.graph.output]
        self._keys = {names.index(name): name for name in top_k_parity.key_outputs(model)}

    def run(self, inputs: Arrays) -> list[np.ndarray]:
        """The outputs of a call with copies of the inputs, since it may write into a cache."""
        try:
            return self._run({name: array.copy() for name, array in inputs.items()})
        except MhsaError as error:
            raise CallRefused(f"refused: {error}") from error

    def truth(self, inputs: Arrays) -> list[np.ndarray]:
        """The outputs in float64; where they are keys, the weights of the right ones."""
        try:
            return self._judged.oracle(inputs)
        except Exception as error:  # whatever the evaluator trips over
            if self.own:
                raise
            raise Meaningless("the model does not take these sizes") from error

    def compare(self, name: str, base: Arrays, variants: Iterable[Variant]) -> SelfCheck:
        """The worst output's difference. Each of the two runs may be off by the budget: they may differ by two."""
        expected = self.truth(base)
        yardstick = self._judged.eager(base)
        base_results = self.run(base)
        if [a.shape for a in base_results] != [e.shape for e in expected]:
            return SelfCheck(name, np.inf, 0.0, "another shape than the oracle's")
        at_base = (self._in_weights(base, base_results), expected, yardstick)
        infos = {i: info for i, info in enumerate(self.manifest.outputs) if self._is_comparable(i, info)}
        pieces_of: dict[int, list[tuple[np.ndarray, ...]]] = {i: [] for i in infos}
        for variant in variants:
            exact = None if self.own else self.truth(variant.inputs)
            results = self.run(variant.inputs)
            of_keys = self._weights_of_keys(variant, results, base_results, at_base[0])
            for i, info in infos.items():
                parts = [variant.base_part(arrays[i], info) for arrays in at_base]
                if exact is not None and not _same(variant.part(exact[i], info), parts[1]):
                    raise Meaningless("the model itself is not so, says the oracle")
                ours = of_keys[i] if i in of_keys else variant.part(results[i], info)
                pieces_of[i].append((ours, *parts))
        verdicts = (_judged(name, pieces) for pieces in pieces_of.values())
        return max(verdicts, key=lambda check: (check.ratio, check.note != SAME))

    def _weights_of_keys(
        self, variant: Variant, results: list[np.ndarray], base: list[np.ndarray], weights: list[np.ndarray]
    ) -> dict[int, np.ndarray]:
        """The weights of the keys in the variant's part: those of the base, `weights`, where the keys are the same.

        None where a shape is wrong: the parts themselves show that.
        """
        outputs = self.manifest.outputs
        cuts = {i: (variant.part(results[i], outputs[i]), variant.base_part(base[i], outputs[i])) for i in self._keys}
        if any(ours.shape != theirs.shape for ours, theirs in cuts.values()):
            return {}
        if all(np.array_equal(np.where(k < 0, k, k + variant.first_key), theirs) for k, theirs in cuts.values()):
            return {i: variant.base_part(weights[i], outputs[i]) for i in cuts}
        weights_of_variant = self._in_weights(variant.inputs, results)
        return {i: variant.part(weights_of_variant[i], outputs[i]) for i in cuts}

    def _in_weights(self, inputs: Arrays, results: list[np.ndarray]) -> list[np.ndarray]:
        """What a run gave, with the weights of keys, by the oracle, in the places of keys."""
        if not self._keys:
            return results
        keys = {name: results[i] for i, name in self._keys.items()}
        triples = top_k_parity.weigh(self.model, inputs, keys, self.reference.precision)
        weights = {i: triples[name][2] for i, name in self._keys.items()}
        return [weights.get(i, array) for i, array in enumerate(results)]

    def _is_comparable(self, i: int, info: TensorInfo) -> bool:
        """Whether an output of two runs is the same: not chosen rows of weights, which are other ones where lengths are
        others, nor whole numbers that are no keys of a softmax."""
        has_fixed_rows = info.name == "weights" and len(info.dims) == 4 and isinstance(info.dims[2], int)
        return not has_fixed_rows and (i in self._keys or not info.dtype.startswith("int"))


def _judged(name: str, pieces: Sequence[tuple[np.ndarray, ...]]) -> SelfCheck:
    """One output: (the variant's, the base's, the base's in float64, PyTorch's) of every part, as one."""
    if any(ours.shape != theirs.shape for ours, theirs, *_ in pieces):
        return SelfCheck(name, np.inf, 0.0, "another shape than the other run's")
    columns = zip(*pieces, strict=True)
    ours, theirs, expected, yardstick = (np.concatenate([part.ravel() for part in parts]) for parts in columns)
    same = np.array_equal(ours.view(np.uint8), theirs.view(np.uint8))
    difference = 0.0 if same else max_error(theirs.astype(np.float64), ours)
    most = 2 * budget(expected, yardstick, str(yardstick.dtype))
    return SelfCheck(name, difference, most, SAME if same else "within the budget" if difference <= most else "")


def _same(ours: np.ndarray, theirs: np.ndarray) -> bool:
    if ours.shape != theirs.shape:
        return False
    scale = np.abs(theirs[np.isfinite(theirs)]).max(initial=1.0)
    return bool(np.allclose(ours, theirs, rtol=0, atol=EXACT * scale, equal_nan=True))
