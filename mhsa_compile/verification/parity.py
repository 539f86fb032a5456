"""One run against the oracle on random inputs: the error, held against the budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from mhsa_compile.verification import top_k_parity
from mhsa_compile.verification.error_budget import budget, max_error, share_of_budget
from mhsa_compile.verification.oracle.evaluate import Reference
from mhsa_compile.verification.precision import AS_STATED, Precision
from mhsa_compile.verification.random_inputs import Arrays, random_inputs

Draw = tuple[np.ndarray, np.ndarray, np.ndarray]
"""One output of one draw: in float64, PyTorch's at the dtype, and what is judged."""
ENOUGH_VALUES = 1024
"""The values that an output must have had before its largest error says something about the code that made it."""
MOST_DRAWS = 32
DECIDING_VALUES, DECIDING_DRAWS = 1 << 16, 512
"""The values that decide about an output a little over its budget, and the most draws for them; MOST_DRAWS at least."""
FILLED = "not judged: rows that a finite fill (-1e9, say) hides whole, where every runtime differs"
"""What is said of the places that `Reference.blurred` finds."""
BEYOND_CHANCE = 2.0
"""The multiple of its budget above which an output's error is no chance, so that no more draws are made."""
NEXT_DRAW = 1_000_003
"""The distance between the seeds of two draws of a case: it keeps them far from the seeds of other cases."""


@dataclass(frozen=True)
class CaseResult:
    """One run: the worst output's largest error against the oracle, and what was allowed. `note` says what was not
    judged."""

    dims: dict[str, int]
    error: float
    budget: float
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.budget

    @property
    def ratio(self) -> float:
        """Error as a share of the budget; above 1 fails."""
        return share_of_budget(self.error, self.budget)


def check(
    model: onnx.ModelProto,
    run: Callable[[Arrays], Sequence[np.ndarray]],
    dims: Mapping[str, int],
    seed: int = 0,
    *,
    precision: Precision = AS_STATED,
    reference: Reference | None = None,
) -> CaseResult:
    """One case: `run` (inputs by name -> outputs in the graph's order) against the oracle, on random inputs.

    `precision`: what the yardstick's products round, as `run`'s do. The oracle's never.
    `reference`: the evaluations of this model at that precision, where they are at hand.
    """
    evaluations = Reference(model, precision) if reference is None else reference

    shares: list[float] = []

    def draw(turn: int) -> list[Draw]:
        inputs = random_inputs(model, dims, seed + NEXT_DRAW * turn)
        results = list(zip(evaluations.oracle(inputs), evaluations.eager(inputs), run(inputs), strict=True))
        results = top_k_parity.by_weight(model, inputs, results, evaluations.precision)
        blurred = evaluations.blurred(inputs)
        if blurred is None or all(map(np.all, blurred)):
            return results
        shares.append(sum(map(np.sum, blurred)) / sum(array.size for array in blurred))
        return [_judgeable(one, places) for one, places in zip(results, blurred, strict=True)]

    result = judge(draw, dims)
    return replace(result, note=f"{max(shares):.0%} {FILLED}") if shares else result


def _judgeable(draw: Draw, blurred: np.ndarray) -> Draw:
    """The draw without the places where no two runtimes agree; the whole draw where ours has another shape."""
    truth, yardstick, actual = draw
    if not truth.shape == actual.shape == blurred.shape:
        return draw
    return truth[~blurred], yardstick[~blurred], actual[~blurred]


def judge(draw: Callable[[int], list[Draw]], dims: Mapping[str, int]) -> CaseResult:
    """The worst output's error and budget, over as many draws as it takes to know.

    The largest of a few errors is chance, ours and the yardstick's: one run in a hundred of right code is over its
    budget. So there are draws until every output has had ENOUGH_VALUES. Where one is then over its budget, but not by
    more than chance does it, more draws are made, and they decide: their number follows from the output's size, it is
    not drawn until it passes. Small ones take many, as all values of a row share the error of its weights; and so do
    those whose rows are all alike, since what is the same number has the same error. What is compared are the largest
    errors of all draws: what is wrong stays wrong, in whichever draw.
    """
    draws = [draw(0)]
    values = min(_different(truth) for truth, _, _ in draws[0])
    draws += map(draw, range(1, min(MOST_DRAWS, -(-ENOUGH_VALUES // max(1, values)))))
    result = _verdict(draws, dims)
    if result.ok or result.ratio > BEYOND_CHANCE:
        return result
    deciding = max(MOST_DRAWS, min(DECIDING_DRAWS, DECIDING_VALUES // max(1, values)))
    draws += map(draw, range(len(draws), deciding))
    return _verdict(draws, dims)


def _different(values: np.ndarray) -> int:
    """How many different numbers there are among the values, to float32's precision."""
    with np.errstate(over="ignore"):
        return int(np.unique(values.astype(np.float32)).size)


def _verdict(draws: Sequence[Sequence[Draw]], dims: Mapping[str, int]) -> CaseResult:
    results = []
    for output in zip(*draws, strict=True):
        expected, yardsticks = (np.concatenate([triple[i].ravel() for triple in output]) for i in (0, 1))
        error = max(max_error(truth, actual) for truth, _, actual in output)
        results.append(CaseResult(dict(dims), error, budget(expected, yardsticks, str(yardsticks.dtype))))
    return max(results, key=lambda result: result.ratio)
