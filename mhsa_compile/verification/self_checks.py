"""What must hold between the runs of one artifact, whatever the numbers are.

The oracle says what a result must be; a self-check says how results hang together: a batch is its entries, padding is
nothing, a step of decoding is a row of the prefill. One that means nothing for an artifact says why. Of a graph made
elsewhere the oracle knows the properties: what does not hold in float64 is not asked of the compiled function.

Notation: B batch, L query length, S key length, C capacity of a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from mhsa_compile.errors import InputError
from mhsa_compile.hardware import host
from mhsa_compile.runtime.artifact.manifest import Manifest, TensorInfo
from mhsa_compile.verification import repeated_runs
from mhsa_compile.verification.oracle.evaluate import Reference
from mhsa_compile.verification.paired_runs import SAME, CallRefused, Cut, Meaningless, RunPairs, SelfCheck, Variant
from mhsa_compile.verification.parity import check
from mhsa_compile.verification.random_inputs import Arrays, random_inputs
from mhsa_compile.verification.self_check_inputs import SelfCheckInputs

CheckFunction = Callable[[str, SelfCheckInputs, RunPairs], SelfCheck]
THREADS = "any number of threads gives the same"
MOST_CALLS, SECONDS = 50, 0.15
"""The calls made with each number of threads, and the seconds for them: fewer are made where time runs out."""
PROMPT = 29
"""Positions that go into a cache at once, before the steps of one position each."""


def self_checks(
    reference: Reference, manifest: Manifest, run: Callable[[Arrays], list[np.ndarray]], seed: int = 0
) -> tuple[SelfCheck, ...]:
    """Every check on a compiled function: `run` takes inputs by name and gives the outputs in the manifest's order."""
    subject, pairs = SelfCheckInputs(manifest, seed), RunPairs(reference, manifest, run)
    return tuple(_result(name, check, subject, pairs) for name, check in CHECKS.items())


def with_any_threads(manifest: Manifest, start: Callable[[int], repeated_runs.Run], seed: int = 0) -> SelfCheck:
    """Calls with any number of threads, by several callers at once, give the same bits as one with one thread.

    Inputs are large: little work is not shared among threads. `start` loads the artifact for a number of threads.
    """
    inputs = SelfCheckInputs(manifest, seed).draw_large()
    numbers = [n for n in repeated_runs.THREADS if n <= max(2, host.allowed_cpus())]  # TVM warns of more
    try:
        repeats = repeated_runs.repeat(start, inputs, calls=MOST_CALLS, seconds=SECONDS, threads=numbers)
    except InputError as error:
        return SelfCheck(THREADS, note=f"its largest sizes are refused: {error}")
    calls, different = (sum(counts) for counts in zip(*((one.calls, one.different) for one in repeats), strict=True))
    note = f"{different} of {calls} calls differ" if different else SAME
    return SelfCheck(THREADS, max(one.difference for one in repeats), 0.0, note)


def _result(name: str, check: CheckFunction, subject: SelfCheckInputs, pairs: RunPairs) -> SelfCheck:
    try:
        return check(name, subject, pairs)
    except Meaningless as reason:
        return SelfCheck(name, note=str(reason))
    except CallRefused as reason:
        return SelfCheck(name, np.inf, 0.0, str(reason))


def _whole(array: np.ndarray, info: TensorInfo) -> np.ndarray:
    return array


def _entry(b: int) -> Cut:
    return lambda array, info: array[b : b + 1]


def _batch_invariance(name: str, subject: SelfCheckInputs, pairs: RunPairs) -> SelfCheck:
    """An entry of a batch gives what it gives alone."""
    if why := subject.why_no_batch:
        return SelfCheck(name, note=why)
    base = subject.draw()
    variants = (Variant(subject.alone(base, b), _entry(0), _entry(b)) for b in range(subject.sizes[subject.batch]))
    return pairs.compare(name, base, variants)


def _batch_permutation(name: str, subject: SelfCheckInputs, pairs: RunPairs) -> SelfCheck:
    """The entries of a batch in another order give the outputs in that order."""
    if why := subject.why_no_batch:
        return SelfCheck(name, note=why)
    base, order = subject.draw(), [*range(1, subject.sizes[subject.batch]), 0]
    return pairs.compare(name, base, [Variant(subject.take(base, order), _whole, lambda array, info: array[order])])


def _padded_batch(name: str, subject: SelfCheckInputs, pairs: RunPairs) -> SelfCheck:
    """Sequences of several lengths in one batch, the rest of it masked, give what each gives without the rest."""
    if why := subject.why_no_padding:
        return SelfCheck(name, note=why)
    base, spans = subject.padded(subject.padding)

    def variant(b: int) -> Variant:
        here = {subject.keys: spans[b]}
        alone = subject.cut(subject.alone(base, b), here)
        part = _entry(b)
        return Variant(
            alone, _entry(0), lambda array, info: subject.cut_one(part(array, info), info.name, here), spans[b].start
        )

    return pairs.compare(name, base, map(variant, range(len(spans))))


def _poisoned_padding(name: str, subject: SelfCheckInputs, pairs: RunPairs) -> SelfCheck:
    """NaN and infinity in keys that are hidden (by a mask, lengths, causality or a window) change no other output.

    Which outputs see them the oracle says: those where it is not finite, for NaN (an infinite key may have a score of
    -inf, which no sum shows).
    """
    if why := subject.why_no_keys:
        return SelfCheck(name, note=why)
    base, spans = subject.padded("around" if subject.mask else "after")
    with np.errstate(invalid="ignore", over="ignore"):  # NumPy says so of every NaN that is on its way
        variants = [subject.poisoned(base, spans, poison) for poison in (np.nan, np.inf)]
        finite = [np.isfinite(one) & np.isfinite(other) for one, other in zip(*map(pairs.truth, variants), strict=True)]
        if not any(map(np.any, finite)):
            raise Meaningless("every output sees every key")
        clean = {info.name: array for info, array in zip(pairs.manifest.outputs, finite, strict=True)}

        def untouched(array: np.ndarray, info: TensorInfo) -> np.ndarray:
            part: np.ndarray = array[clean[info.name]]
            return part

        return pairs.compare(name, base, [Variant(inputs, untouched, untouched) for inputs in variants])


def _unseen_sizes(name: str, subject: SelfCheckInputs, pairs: RunPairs) -> SelfCheck:
    """Two sizes of every symbolic dim that nothing was compiled, exported or tried with, against the oracle."""
    if not subject.free:
        return SelfCheck(name, note="every size is fixed")
    cases = subject.unseen()
    results = []
    for i, case in enumerate(cases):
        if not pairs.own:
            pairs.truth(random_inputs(pairs.model, case, subject.seed + i))
        result = check(pairs.model, pairs.run, case, subject.seed + i, reference=pairs.reference)
        results.append(result)
    worst = max(results, key=lambda result: result.ratio)
    note = ", ".join(f"{symbol} {cases[0][symbol]} and {cases[1][symbol]}" for symbol in subject.free)
    return SelfCheck(name, worst.error, worst.budget, "; ".join(filter(None, (note, worst.note))))


def _decode_is_prefill(name: str, subject: SelfCheckInputs, pairs: RunPairs) -> SelfCheck:
    """The last row for every prefix of a sequence is that row of the whole sequence; with a cache, every step's."""
    if why := subject.why_no_prefixes:
        return SelfCheck(name, note=why)
    base = subject.draw(same_length=True)
    return pairs.compare(name, base, (_steps if subject.cached else _prefixes)(subject, pairs, base))


def _prefixes(subject: SelfCheckInputs, pairs: RunPairs, base: Arrays) -> Iterator[Variant]:
    for length in range(1, subject.longest_prefix + 1):
        prefix = dict.fromkeys(subject.lengths, slice(0, length))
        yield Variant(subject.cut(base, prefix), _row(subject, -1), _row(subject, length - 1))


def _row(subject: SelfCheckInputs, place: int) -> Cut:
    parts = dict.fromkeys(subject.lengths, slice(place, place + 1 or None))
    return lambda array, info: subject.cut_one(array, info.name, parts)


def _steps(subject: SelfCheckInputs, pairs: RunPairs, base: Arrays) -> Iterator[Variant]:
    """A prompt into an empty cache, then one position after the other, each behind what the steps before left there."""
    cache = {name: array for name, array in base.items() if name.startswith("past_")}
    first = 0
    while first < subject.longest_prefix:
        last = first + 1 if first else min(PROMPT, subject.longest_prefix)
        inputs = {"x": base["x"][:, first:last], "length": np.full_like(base["length"], first), **cache}
        rows, written_part = slice(first, last), {"C": slice(0, last)}

        def part(array: np.ndarray, info: TensorInfo, written_part: dict[str, slice] = written_part) -> np.ndarray:
            return subject.cut_one(array, info.name, written_part)

        def of_base(
            array: np.ndarray, info: TensorInfo, written_part: dict[str, slice] = written_part, rows: slice = rows
        ) -> np.ndarray:
            return subject.cut_one(array, info.name, {"L": rows, **written_part})

        yield Variant(inputs, part, of_base)
        results = dict(zip((info.name for info in pairs.manifest.outputs), pairs.run(inputs), strict=True))
        cache = {name: results[name.replace("past", "present")] for name in cache}
        first = last


CHECKS: dict[str, CheckFunction] = {
    "an entry of a batch is the entry alone": _batch_invariance,
    "permuting a batch permutes the output": _batch_permutation,
    "a padded batch is its rows alone": _padded_batch,
    "NaN and Inf in hidden keys stay there": _poisoned_padding,
    "two sizes never seen of each symbolic dim": _unseen_sizes,
    "decoding step by step is the prefill": _decode_is_prefill,
}
