"""What must hold between the runs of one artifact, whatever the numbers are.

The oracle says what a result must be; a self-check says how results hang together: a batch is its entries, padding is
nothing, a step of decoding is a row of the prefill. One that means nothing for an artifact says why. Of a graph made
elsewhere the oracle knows the properties: what does not hold in float64 is not asked of the compiled function.

Notation: B batch, L query length, S key length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from mhsa_compile.artifact import Manifest, TensorInfo
from mhsa_compile.parity import budget, check, max_error
from mhsa_compile.reference import Array, Arrays, eager, oracle
from mhsa_compile.subject import LENGTHS, Subject

PRIMES = tuple(n for n in range(11, 256) if all(n % d for d in range(2, 16) if d < n) and n not in (*LENGTHS, 197))
"""Lengths that no other check uses, nor the default cases."""
BATCHES = (2, 5, 7)
EXACT = 1e-9
"""How near two float64 results are that mean the same, as a share of the largest."""

Part = Callable[[Array, TensorInfo], Array]


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
        return self.difference / self.budget if self.budget else (0.0 if self.ok else np.inf)


@dataclass(frozen=True)
class _Variant:
    """Another call, and which part of its outputs must equal which part of the base's."""

    inputs: Arrays
    part: Part
    base_part: Part


def self_checks(
    model: onnx.ModelProto, manifest: Manifest, run: Callable[[Arrays], list[Array]], seed: int = 0
) -> tuple[SelfCheck, ...]:
    """Every check on a compiled function: `run` takes inputs by name and gives the outputs in the manifest's order."""
    subject = Subject(manifest, seed)
    pairs = _Pairs(model, manifest, run)
    return (
        _batch_invariance(subject, pairs),
        _batch_permutation(subject, pairs),
        _padded_batch(subject, pairs),
        _poisoned_padding(subject, pairs),
        _unseen_lengths(subject, pairs),
        _decode_is_prefill(subject, pairs),
    )


class _Pairs:
    """Runs pairs of calls and compares them."""

    def __init__(self, model: onnx.ModelProto, manifest: Manifest, run: Callable[[Arrays], list[Array]]) -> None:
        self.model, self.manifest, self.run = model, manifest, run

    def compare(self, name: str, base: Arrays, variants: Iterable[_Variant]) -> SelfCheck:
        """The worst output's difference. Each of the two runs may be off by the budget: they may differ by two."""
        expected = oracle(self.model, base)
        yardstick = eager(self.model, base, int8_weights=self.manifest.int8_weights)
        at_base = (self.run(base), expected, yardstick)
        if [a.shape for a in at_base[0]] != [e.shape for e in expected]:
            return SelfCheck(name, np.inf, 0.0, "another shape than the oracle's")
        infos = self.manifest.outputs
        found: list[list[tuple[Array, ...]]] = [[] for _ in infos]
        for variant in variants:
            results = self.run(variant.inputs)
            exact = None if self.manifest.spec is not None else oracle(self.model, variant.inputs)
            for i, info in enumerate(infos):
                parts = [variant.base_part(arrays[i], info) for arrays in at_base]
                if exact is not None and not _same(variant.part(exact[i], info), parts[1]):
                    return SelfCheck(name, note="the model itself is not so, says the oracle")
                found[i].append((variant.part(results[i], info), *parts))
        return max((_judged(name, pieces) for pieces in found), key=lambda check: (check.ratio, not check.note))


def _judged(name: str, pieces: Sequence[tuple[Array, ...]]) -> SelfCheck:
    """One output: (the variant's, the base's, the base's in float64, PyTorch's) of every part, as one."""
    if any(got.shape != wanted.shape for got, wanted, *_ in pieces):
        return SelfCheck(name, np.inf, 0.0, "another shape than the other run's")
    columns = zip(*pieces, strict=True)
    got, wanted, expected, yardstick = (np.concatenate([part.ravel() for part in parts]) for parts in columns)
    same = np.array_equal(got.view(np.uint8), wanted.view(np.uint8))
    difference = 0.0 if same else max_error(wanted.astype(np.float64), got)
    allowed = 2 * budget(expected, yardstick, str(yardstick.dtype))
    return SelfCheck(name, difference, allowed, "to the bit" if same else "")


def _same(ours: Array, theirs: Array) -> bool:
    if ours.shape != theirs.shape:
        return False
    scale = np.abs(theirs[np.isfinite(theirs)]).max(initial=1.0)
    return bool(np.allclose(ours, theirs, rtol=0, atol=EXACT * scale, equal_nan=True))


def _whole(array: Array, info: TensorInfo) -> Array:
    return array


def _entry(b: int) -> Part:
    return lambda array, info: array[b : b + 1]


def _batch_invariance(subject: Subject, pairs: _Pairs) -> SelfCheck:
    """An entry of a batch gives what it gives alone."""
    name = "an entry of a batch is the entry alone"
    if why := subject.why_no_batch:
        return SelfCheck(name, note=why)
    base = subject.draw()
    variants = (_Variant(subject.alone(base, b), _entry(0), _entry(b)) for b in range(subject.sizes[subject.batch]))
    return pairs.compare(name, base, variants)


def _batch_permutation(subject: Subject, pairs: _Pairs) -> SelfCheck:
    """The entries of a batch in another order give the outputs in that order."""
    name = "permuting a batch permutes the output"
    if why := subject.why_no_batch:
        return SelfCheck(name, note=why)
    base, order = subject.draw(), [*range(1, subject.sizes[subject.batch]), 0]
    permuted = _Variant(subject.take(base, order), _whole, lambda array, info: array[order])
    return pairs.compare(name, base, [permuted])


def _padded_batch(subject: Subject, pairs: _Pairs) -> SelfCheck:
    """Sequences of several lengths in one batch, the rest of it masked, give what each gives without the rest."""
    name = "a padded batch is its rows alone"
    if why := subject.why_no_padding:
        return SelfCheck(name, note=why)
    base, spans = subject.padded(subject.padding)

    def variant(b: int) -> _Variant:
        here = {subject.keys: spans[b]}
        alone = subject.cut(subject.alone(base, b), here)
        return _Variant(alone, _entry(0), lambda array, info: subject.cut_one(array[b : b + 1], info.dims, here))

    return pairs.compare(name, base, map(variant, range(len(spans))))


def _poisoned_padding(subject: Subject, pairs: _Pairs) -> SelfCheck:
    """NaN and infinity in keys that are hidden (by a mask, lengths, causality or a window) change no other output.

    Which outputs see them the oracle says: those where it is not finite.
    """
    name = "NaN and Inf in hidden keys stay there"
    if why := subject.why_no_keys:
        return SelfCheck(name, note=why)
    base, spans = subject.padded("around" if subject.mask else "after")
    with np.errstate(invalid="ignore", over="ignore"):  # NumPy says so of every NaN that is on its way
        variants = [_poisoned(subject, pairs, base, spans, poison) for poison in (np.nan, np.inf)]
        if None in variants:
            return SelfCheck(name, note="every output sees every key")
        return pairs.compare(name, base, filter(None, variants))


def _poisoned(subject: Subject, pairs: _Pairs, base: Arrays, spans: list[slice], poison: float) -> _Variant | None:
    spoiled = subject.poisoned(base, spans, poison)
    truth = zip(pairs.manifest.outputs, oracle(pairs.model, spoiled), strict=True)
    clean = {info.name: np.isfinite(array) for info, array in truth}

    def untouched(array: Array, info: TensorInfo) -> Array:
        part: Array = array[clean[info.name]]
        return part

    return _Variant(spoiled, untouched, untouched) if any(map(np.any, clean.values())) else None


def _unseen_lengths(subject: Subject, pairs: _Pairs) -> SelfCheck:
    """Two sizes of every symbolic dim that nothing was compiled, exported or tried with, against the oracle."""
    name = "two sizes never seen of each symbolic dim"
    if not subject.free:
        return SelfCheck(name, note="every size is fixed")
    rng = np.random.default_rng(subject.seed)
    drawn = {symbol: rng.choice(BATCHES if symbol == subject.batch else PRIMES, 2, False) for symbol in subject.free}
    cases = [subject.sizes | {symbol: int(sizes[i]) for symbol, sizes in drawn.items()} for i in range(2)]
    cases = [case | subject.mask_sizes(case, narrow=i == 1) for i, case in enumerate(cases)]
    results = [
        check(pairs.model, pairs.run, case, subject.seed + i, int8_weights=pairs.manifest.int8_weights)
        for i, case in enumerate(cases)
    ]
    worst = max(results, key=lambda result: result.ratio)
    tried = ", ".join(f"{symbol} {sizes[0]} and {sizes[1]}" for symbol, sizes in drawn.items())
    return SelfCheck(name, worst.error, worst.budget, tried)


def _decode_is_prefill(subject: Subject, pairs: _Pairs) -> SelfCheck:
    """The last row for every prefix of a sequence is that row of the whole sequence."""
    name = "decode is prefill: the last row of every prefix"
    if why := subject.why_no_prefixes:
        return SelfCheck(name, note=why)
    base = subject.draw(same_length=True)

    def variant(length: int) -> _Variant:
        prefix = dict.fromkeys(subject.lengths, slice(0, length))
        row = dict.fromkeys(subject.lengths, slice(length - 1, length))
        last = dict.fromkeys(subject.lengths, slice(-1, None))
        return _Variant(
            subject.cut(base, prefix),
            lambda array, info: subject.cut_one(array, info.dims, last),
            lambda array, info: subject.cut_one(array, info.dims, row),
        )

    return pairs.compare(name, base, map(variant, range(1, max(LENGTHS) + 1)))
