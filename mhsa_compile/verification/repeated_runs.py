"""One call made again and again, with any number of threads and by several callers at once: all give the same bits.

What threads do to each other shows in some calls only, at sizes that are shared among threads at all, and never with
one thread. No oracle is needed: the first call with one thread says what all others must give.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from mhsa_compile.verification.error_budget import max_error
from mhsa_compile.verification.random_inputs import Arrays

Run = Callable[[Arrays], list[np.ndarray]]
"""Takes inputs by name, and gives the outputs in order."""

THREADS = (1, 2, 3, 8)
CALLERS = 2
"""How many callers call at once, after one has called alone with each number of threads."""


@dataclass(frozen=True)
class Repeats:
    """What calls with `threads` threads gave, made by `callers` at once: how many there were, how many of them differed
    from the first call of all, and by how much at most."""

    threads: int
    callers: int
    calls: int
    different: int
    difference: float


def repeat(
    start: Callable[[int], Run],
    inputs: Arrays,
    *,
    calls: int,
    seconds: float = float("inf"),
    threads: Iterable[int] = THREADS,
) -> list[Repeats]:
    """Makes one call again and again, with each number of threads and by several callers at once: a `Repeats` for each.

    start     loads the function for a number of threads; it is called in a thread of its own, and so is what it gives
    calls     how many calls are made for each number of threads
    seconds   the time after which fewer are made, but at least three
    """
    with ThreadPoolExecutor(1) as alone:
        expected = alone.submit(lambda: _outputs_of(start(1), inputs)).result()
    ways = [*((count, 1) for count in threads), (2, CALLERS)]
    return [_repeat(start, inputs, expected, count, callers, calls, seconds) for count, callers in ways]


def _repeat(
    start: Callable[[int], Run],
    inputs: Arrays,
    expected: list[np.ndarray],
    threads: int,
    callers: int,
    calls: int,
    seconds: float,
) -> Repeats:
    def calling(run: Run) -> list[float]:
        end = time.monotonic() + seconds
        differences: list[float] = []
        while len(differences) < calls // callers and (len(differences) < _FEWEST or time.monotonic() < end):
            differences.append(_difference(expected, _outputs_of(run, inputs)))
        return differences

    with ThreadPoolExecutor(callers) as executor:
        run = executor.submit(start, threads).result()
        all_differences = [one for some in executor.map(calling, [run] * callers) for one in some]
    return Repeats(
        threads, callers, len(all_differences), sum(one > 0 for one in all_differences), max(all_differences)
    )


_FEWEST = 3


def _outputs_of(run: Run, inputs: Arrays) -> list[np.ndarray]:
    """The outputs of a call with copies of the inputs, since it may write into a cache."""
    return run({name: array.copy() for name, array in inputs.items()})


def _difference(expected: list[np.ndarray], actual: list[np.ndarray]) -> float:
    """The largest difference; 0 where all bits are the same, which NaN may be, too."""
    if [array.shape for array in actual] != [array.shape for array in expected]:
        return float("inf")
    pairs = [(e, g) for e, g in zip(expected, actual, strict=True) if e.tobytes() != g.tobytes()]
    return max((max_error(e.astype(np.float64), g) or _LEAST for e, g in pairs), default=0.0)


_LEAST = 5e-324  # of numbers that differ in their bits only, as 0 and -0 do
