"""Compiled code against the file that it was compiled from, evaluated by others, at two sets of free sizes.

Truth is the file in float64. The budget is that of `error_budget`; its yardstick is ONNX Runtime on that file, or
PyTorch's arithmetic. Where both evaluators run, both must say that the compiled code is wrong. What evaluators may
differ in by right is left out, and said: rows that are masked whole, overflow of a narrow dtype, and what jumps when
inputs move by their rounding (the index of a maximum, say).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from mhsa_compile.errors import MhsaError
from mhsa_compile.runtime.artifact.manifest import Check
from mhsa_compile.runtime.symbolic_dims import is_expression
from mhsa_compile.spec.float32_products import Float32Products
from mhsa_compile.verification.error_budget import (
    FRACTION_BITS,
    budget,
    coarse_budget,
    fraction_bits,
    max_error,
    share_of_budget,
)
from mhsa_compile.verification.evaluators import Evaluators, NotEvaluated
from mhsa_compile.verification.parity import Draw, judge
from mhsa_compile.verification.random_inputs import Arrays, drawn_elements, largest_sizes, random_inputs
from mhsa_compile.verification.repeated_runs import Run

RUNS = 2
_SECONDS = 10.0
"""After so long no further set of sizes is begun."""
_FIRST, _SECOND = (2, 5, 9, 11, 13, 7), (3, 8, 6, 4, 10, 12)
_ALIKE = (8, 4, 16, 1, 64, 224)
"""Sizes of the free dims: each its own, then all lengths alike, which graphs want whose symbols are not independent."""
_MOST_ELEMENTS = 1 << 22
"""Of inputs, beyond which an evaluation in Python takes too long."""
_NUDGES, _MOST_NUDGES = 3, 24
"""How often inputs are nudged; further times as long as a place of whole numbers differs that has not jumped: of a tie
between values, rounding decides each time anew which is the least."""
_FLOATS = ("float32", "float64")
_STEPS = 4
"""Inputs are nudged by so many of their rounding steps, or of those of factors, to see what jumps."""


@dataclass(frozen=True)
class Difference:
    """An output that is wrong: what came, what should have, and for which inputs."""

    name: str
    sizes: dict[str, int]
    inputs: dict[str, np.ndarray]
    actual: np.ndarray
    expected: np.ndarray
    error: float
    budget: float
    against: tuple[str, ...]


class _Refused(Exception):
    """Sizes that nobody takes, or that the compiled code refuses; the text says why."""


def check_file(evaluators: Evaluators, run: Run, outputs: Sequence[str]) -> Check | Difference:
    """The outcome. `outputs` names what `run` returns, of which the file's own outputs are compared."""
    try:
        evaluators.check_evaluable()
    except NotEvaluated as error:
        return Check(note=str(error))
    checks = _FileCheck(evaluators, run, outputs)
    begin, reason = time.monotonic(), "no evaluator takes it"
    cases: list[dict[str, int]] = []
    for sizes in _candidates(evaluators.canonical):
        if len(cases) == RUNS or (cases and time.monotonic() - begin > _SECONDS):
            break
        try:
            difference = checks.at(sizes)
        except _Refused as error:
            reason = str(error)
            continue
        if difference is not None and evaluators.doubtful and not evaluators.has_runtime:
            return Check(note=f"onnx.reference, which alone takes it, gets {evaluators.doubtful} wrong")
        if difference is not None:
            return difference
        cases.append(sizes)
    if not cases:
        return Check(note=reason)
    largest, error_budget = checks.worst
    notes = [note for note in (checks.note(), "" if evaluators.used else reason) if note]
    return Check(tuple(evaluators.used), tuple(cases), largest, error_budget, "; ".join(notes))


def sensible_inputs(model: onnx.ModelProto, sizes: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """Random inputs whose masks hide no row whole: every query sees the first key."""
    inputs = random_inputs(model, sizes, seed)
    for name, array in inputs.items():
        if "mask" in name and array.ndim and array.size:
            array[..., 0] = 1 if array.dtype.kind in "biu" else 0
    return inputs


def _place_in_caches(evaluators: Evaluators, inputs: dict[str, np.ndarray], seed: int) -> None:
    """What calls say to a GroupQueryAttention of Microsoft's with a past: the last place of each entry, and how many
    places there are, as the furthest has them. In a buffer a token stands anywhere, several are a first prompt. A past
    that grows is full: ONNX Runtime makes presents as long as the total says, and what lies in them behind a shorter
    entry is nobody's. It takes numbers that disagree for a first prompt."""
    rng = np.random.default_rng(seed)
    for node in evaluators.original.graph.node:
        names = [*node.input, *[""] * 10][:10]
        query, past, last, total = (inputs.get(names[number]) for number in (0, 3, 5, 6))
        if node.op_type != "GroupQueryAttention" or query is None or last is None or total is None:
            continue
        if past is None and names[3]:
            continue
        length, places = query.shape[1], 0 if past is None else past.shape[2]
        if past is None or _is_longer(evaluators.canonical, names[3], [*node.output, ""][1]):
            first, end = places + length - 1, places + length
        else:
            first, end = (0, places) if length == 1 else (length - 1, length)
        inputs[names[5]] = rng.integers(first, end, last.shape).astype(last.dtype)
        if (positions := inputs.get(names[9])) is not None and length > 1:  # of a prompt it reads the first alone
            positions[...] = np.arange(length)
        inputs[names[6]] = np.full(total.shape, inputs[names[5]].max() + 1, total.dtype)
        for cache in (inputs[name] for name in names[3:5] if name in inputs):
            for entry, place in zip(cache, inputs[names[5]].reshape(-1), strict=True):
                entry[:, place + 1 - length :] = 0  # as ONNX Runtime leaves what lies behind


def _is_longer(model: onnx.ModelProto, past: str, present: str) -> bool:
    """Whether a present that a model gives out has another length than its past, (B, G, P, E)."""
    dims = {value.name: value.type.tensor_type.shape.dim for value in (*model.graph.input, *model.graph.output)}
    if not len(dims.get(past, ())) == len(dims.get(present, ())) == 4:
        return False
    return bool(dims[past][2] != dims[present][2])


def _candidates(model: onnx.ModelProto) -> Iterator[dict[str, int]]:
    most = largest_sizes(model)
    weights = {tensor.name for tensor in model.graph.initializer}
    values = (value for value in model.graph.input if value.name not in weights)
    dims = [dim.dim_param for value in values for dim in value.type.tensor_type.shape.dim if dim.dim_param]
    symbols = [symbol for symbol in dict.fromkeys(dims) if not is_expression(symbol)]
    if not symbols:
        yield {}
        return
    cases: list[dict[str, int]] = []
    apart = ([row[i % len(row)] for i in range(len(symbols))] for row in (_FIRST, _SECOND))
    alike = ([batch, *[size] * (len(symbols) - 1)] for size, batch in zip(_ALIKE, (2, 3, 1, 1, 1, 1), strict=True))
    whole = ([size] * len(symbols) for size in _ALIKE)
    for row in (*apart, *alike, *whole):
        sizes = {symbol: min(size, most.get(symbol, size)) for symbol, size in zip(symbols, row, strict=True)}
        if sizes not in cases:
            cases.append(sizes)
            yield sizes


class _FileCheck:
    """The runs of one check, and the worst of what they showed."""

    def __init__(self, evaluators: Evaluators, run: Run, outputs: Sequence[str]) -> None:
        self.evaluators, self._run = evaluators, run
        self._places = [outputs.index(name) for name in evaluators.names]
        self.worst = (0.0, 0.0)
        self._left_out: dict[str, float] = {}

    def note(self) -> str:
        return ", ".join(f"{share:.0%} not judged: {why}" for why, share in self._left_out.items())

    def at(self, sizes: dict[str, int]) -> Difference | None:
        """Compares at these sizes. Raises _Refused."""
        model = self.evaluators.canonical
        if drawn_elements(model, sizes) > _MOST_ELEMENTS:
            raise _Refused("its inputs are too large for an evaluation in Python")
        try:
            inputs = self._inputs(sizes, 0)
        except (MhsaError, ValueError, TypeError) as error:
            raise _Refused(f"no inputs could be drawn ({error})") from error
        rounded = self.evaluators.rounded(inputs)
        exact = self._exact(inputs, rounded)
        if exact is None and rounded is None:
            raise _Refused(self.evaluators.last_refusal or "no evaluator takes it")
        actual = self._outputs_of(inputs)
        if exact is None:
            return self._by_runtime_alone(sizes, inputs, actual, rounded or [])
        result = judge(lambda turn: self._draws(sizes, turn, lenient=False), sizes)
        if not result.ok:
            result = judge(lambda turn: self._draws(sizes, turn, lenient=True), sizes)
        if result.ok:
            self._note_worst(result.error, result.budget)
            return None
        return self._difference(sizes)

    def _outputs_of(self, inputs: Arrays) -> list[np.ndarray]:
        try:
            outputs = self._run({name: array.copy() for name, array in inputs.items()})
        except MhsaError as error:
            raise _Refused(f"the compiled code refuses the inputs that were drawn ({error})") from error
        return [outputs[place] for place in self._places]

    def _exact(self, inputs: Arrays, rounded: list[np.ndarray] | None) -> list[np.ndarray] | None:
        """The file in float64. Where onnx's evaluator does not know an operator, the canonical model in float64, which
        is believed where ONNX Runtime confirms it."""
        exact = self.evaluators.exact(inputs)
        if exact is not None or rounded is None:
            return exact
        exact = self.evaluators.exact_of_canonical(inputs)
        if exact is None:
            return None
        pairs = zip(exact, rounded, strict=True)
        return exact if all(max_error(_wide(e), r) <= self._coarse_budget(r) for e, r in pairs) else None

    def _coarse_budget(self, rounded: np.ndarray) -> float:
        """How near evaluations are that mean the same: an output has no more digits than what it was made of."""
        kind = str(rounded.dtype)
        return coarse_budget(_wide(rounded), self.evaluators.narrow or kind if kind in _FLOATS else kind)

    def _inputs(self, sizes: dict[str, int], turn: int) -> dict[str, np.ndarray]:
        inputs = sensible_inputs(self.evaluators.canonical, sizes, turn)
        _place_in_caches(self.evaluators, inputs, turn)
        return inputs

    def _draws(self, sizes: dict[str, int], turn: int, *, lenient: bool) -> list[Draw]:
        inputs = self._inputs(sizes, turn)
        actual, rounded = self._outputs_of(inputs), self.evaluators.rounded(inputs)
        exact = self._exact(inputs, rounded)
        yardstick = rounded if rounded is not None and not lenient else self._wider(exact, rounded, inputs)
        if exact is None or yardstick is None:
            raise _Refused(self.evaluators.last_refusal)
        if rounded is not None:
            exact = [_of_their_shape(*one) for one in zip(exact, rounded, actual, strict=True)]
        draws = [_of_one_dtype(*one) for one in zip(exact, yardstick, actual, strict=True)]
        if not lenient or any(truth.shape != output.shape for truth, _, output in draws):
            return draws
        return self._judgeable(inputs, draws, rounded)

    def _wider(
        self, exact: list[np.ndarray] | None, rounded: list[np.ndarray] | None, inputs: Arrays
    ) -> list[np.ndarray] | None:
        """The outputs of ONNX Runtime, or of PyTorch's arithmetic where that means the same and errs more."""
        eager = self.evaluators.eager(inputs)
        if eager is None or exact is None or rounded is None:
            return rounded if eager is None else eager
        pairs = zip(exact, rounded, eager, strict=True)
        return [e if _roughly(t, e) and max_error(t, e) > max_error(t, r) else r for t, r, e in pairs]

    def _judgeable(self, inputs: Arrays, draws: list[Draw], rounded: list[np.ndarray] | None) -> list[Draw]:
        """The draws without the places in which evaluators differ by right."""
        canonical, blurred = self.evaluators.exact_of_canonical(inputs), self.evaluators.blurred(inputs)
        jumps = self._jumps(inputs, draws)
        result = []
        for i, (truth, yardstick, actual) in enumerate(draws):
            if canonical is not None and canonical[i].shape == truth.shape:
                sightless = ~np.isfinite(truth) & np.isfinite(canonical[i]) & np.isfinite(actual)
                truth = np.where(sightless, canonical[i], truth)  # rows that see no key: NaN there, zeros here
                yardstick = np.where(sightless, truth, yardstick).astype(yardstick.dtype)
            out = {
                "rows that a finite fill hides whole": np.zeros(truth.shape, bool) if blurred is None else blurred[i],
                "beyond the dtype's largest number": np.isfinite(truth) & ~np.isfinite(yardstick),
                "it jumps when inputs move by their rounding": jumps[i],
            }
            places = np.zeros(truth.shape, bool)
            for why, where in out.items():
                if where.any():
                    self._left_out[why] = max(self._left_out.get(why, 0.0), float(where.mean()))
                    places |= where
            if rounded is not None and rounded[i].shape == actual.shape and not places.all():
                alike = max_error(_wide(rounded[i]), actual) <= budget(_wide(rounded[i]), yardstick, str(actual.dtype))
                if alike:  # two against one
                    truth = _wide(rounded[i])
            result.append((truth[~places], yardstick[~places], actual[~places]))
        return result

    def _jumps(self, inputs: Arrays, draws: list[Draw]) -> list[np.ndarray]:
        """Where the file's outputs move by more than the budget when its inputs move by their rounding."""
        places = [np.zeros(truth.shape, bool) for truth, _, _ in draws]
        budgets = [budget(truth, yardstick, str(yardstick.dtype)) for truth, yardstick, _ in draws]
        with np.errstate(invalid="ignore"):
            differ = [
                (actual.dtype.kind in "iub") & (np.abs(_wide(actual) - _wide(truth)) > limit)
                for (truth, _, actual), limit in zip(draws, budgets, strict=True)
            ]
        for seed in range(_MOST_NUDGES):
            unexplained = any((other & ~place).any() for other, place in zip(differ, places, strict=True))
            if seed >= _NUDGES and not unexplained:
                break
            rng = np.random.default_rng(seed)
            word = self.evaluators.precision.float32_products
            neighbours = {name: _neighbour(array, rng, word) for name, array in inputs.items()}
            nearby = self.evaluators.exact(neighbours)
            nearby = self.evaluators.exact_of_canonical(neighbours) if nearby is None else nearby
            if nearby is None or any(m.shape != p.shape for m, p in zip(nearby, places, strict=True)):
                continue
            for place, other, (truth, _, _), limit in zip(places, nearby, draws, budgets, strict=True):
                with np.errstate(invalid="ignore"):
                    place |= np.abs(_wide(other) - _wide(truth)) > limit
        return places

    def _by_runtime_alone(
        self, sizes: dict[str, int], inputs: dict[str, np.ndarray], actual: list[np.ndarray], rounded: list[np.ndarray]
    ) -> Difference | None:
        """Against ONNX Runtime, which nobody has confirmed: rounding is told from another meaning, and no more."""
        for name, ours, theirs in zip(self.evaluators.names, actual, rounded, strict=True):
            error, most = max_error(_wide(theirs), ours), self._coarse_budget(theirs)
            if error <= most:
                self._note_worst(error, most)
            elif np.isfinite(_wide(theirs)).all():
                against = tuple(self.evaluators.used)
                return Difference(name, sizes, inputs, ours, theirs, error, most, against)
            else:
                self._left_out["ONNX Runtime's result is not finite, and nobody else evaluates it"] = 1.0
        return None

    def _difference(self, sizes: dict[str, int]) -> Difference | None:
        """The output that is off by most of its budget, of the first draw in which one is."""
        for turn in range(8):
            inputs = self._inputs(sizes, turn)
            actual, exact = self._outputs_of(inputs), self._exact(inputs, self.evaluators.rounded(inputs))
            if exact is None:
                continue
            draws = self._draws(sizes, turn, lenient=True)
            shares = [_share(draw) for draw in draws]
            if max(shares) > 1:
                i = shares.index(max(shares))
                truth, yardstick, output = draws[i]
                most = budget(truth, yardstick, str(yardstick.dtype))
                against = tuple(self.evaluators.used)
                error = max_error(truth, output)
                return Difference(self.evaluators.names[i], sizes, inputs, actual[i], exact[i], error, most, against)
        return None

    def _note_worst(self, error: float, most: float) -> None:
        share = error / most if most else float(error > 0)
        before = self.worst[0] / self.worst[1] if self.worst[1] else 0.0
        if share >= before:
            self.worst = (error, most)


def _share(draw: Draw) -> float:
    truth, yardstick, actual = draw
    return share_of_budget(max_error(truth, actual), budget(truth, yardstick, str(yardstick.dtype)))


def _of_their_shape(exact: np.ndarray, rounded: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """The truth; ours where ONNX Runtime and ours agree on a shape that onnx's evaluator does not have."""
    if exact.shape == actual.shape or rounded.shape != actual.shape or not _roughly(rounded, actual):
        return exact
    return _wide(actual)


def _of_one_dtype(truth: np.ndarray, yardstick: np.ndarray, actual: np.ndarray) -> Draw:
    """The draw; where the yardstick has another shape than the truth, or the output another dtype, as one that is wrong
    whatever the values."""
    if yardstick.shape != truth.shape:
        yardstick = truth.astype(yardstick.dtype)
    if actual.dtype != yardstick.dtype:
        actual = np.full((*truth.shape, 0), 0, actual.dtype)
    return truth, yardstick, actual


def _roughly(expected: np.ndarray, actual: np.ndarray) -> bool:
    return max_error(_wide(expected), actual) <= coarse_budget(_wide(expected), str(actual.dtype))


def _wide(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.kind == "f" and array.dtype.itemsize == 8 else array.astype(np.float64)


def _neighbour(array: np.ndarray, rng: np.random.Generator, products: Float32Products) -> np.ndarray:
    name = str(array.dtype)
    if name not in FRACTION_BITS:
        return array
    step = np.ldexp(1.0, _STEPS.bit_length() - 1 - fraction_bits(name, products))
    with np.errstate(invalid="ignore"):
        return np.asarray(array.astype(np.float64) * (1 + step * rng.uniform(-1, 1, array.shape)))
