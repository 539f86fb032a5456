"""What happens in one connection to a device: its arrays go there, each candidate is checked, all are timed in turns.

Nobody trusts a candidate: it may write where it should not, so whatever goes wrong here is one connection's, and is
reported as a `Fault` (`sessions` finds out whose it was). TVM's RPC carries the calls; its `time_evaluator` has the
device's own clock, so the way there is not in the times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import ml_dtypes
import numpy as np

from mhsa_compile.tuning.measure.job import BUILD, CRASH, TIMEOUT, WRONG, Candidate, Failure, MeasureJob, Timing
from mhsa_compile.tuning.measure.rpc_server import SECONDS

TURN = 0.004
"""Seconds of one candidate's calls that make one sample, after one call that does not count."""
SLICES = 5
"""Parts of a turn, whose median is the sample."""
LEAST_ROUNDS = 5
_EXTENDED = {"bfloat16": ml_dtypes.bfloat16}


class Fault(Exception):
    """The candidate at `position` was being run, or loaded, when the connection became useless. It may be innocent."""

    def __init__(self, position: int, failure: Failure) -> None:
        super().__init__(f"candidate {position} {failure.reason}: {failure.detail}")
        self.position = position
        self.failure = failure


def timings(
    remote: Any, job: MeasureJob, candidates: Sequence[Candidate], seconds: float, patience: float
) -> list[Timing]:
    """Each candidate's times in the same rounds, which go on for `seconds` a candidate, at least five.

    `remote` is a `tvm.rpc.RPCSession` that ends within `patience` seconds: rounds of slow candidates stop at half of
    that, after one at least. Raises Fault; RuntimeError where the job's arrays could not be sent.
    """
    end = perf_counter() + patience / 2
    device = remote.device(candidates[0].memory, 0)
    inputs = [[_send(array, device) for array in job.inputs] for _ in range(job.sets)]
    weights = [_send(array, device) for array in job.weights]
    runners = []
    for position, candidate in enumerate(candidates):
        with _blame(position):
            runners.append(_Runner.loaded(remote, f"{position}.so", candidate, (inputs, weights), job))
    samples = _rounds(runners, seconds, end)
    for position, runner in enumerate(runners):
        with _blame(position):
            runner.check(job)
    return [
        Timing(tuple(1e6 * sample for sample in own), runner.share)
        for own, runner in zip(samples, runners, strict=True)
    ]


def _rounds(runners: Sequence[_Runner], seconds: float, end: float) -> list[list[float]]:
    """Seconds a call, as [candidate][round]; the order is reversed from round to round. The first round is left out."""
    samples: list[list[float]] = [[] for _ in runners]
    order = list(range(len(runners)))

    def turn(position: int) -> float:
        with _blame(position):
            return runners[position].turn()

    for position in order:
        turn(position)
    enough = perf_counter() + seconds * len(runners)
    while not samples[0] or (perf_counter() < end and (len(samples[0]) < LEAST_ROUNDS or perf_counter() < enough)):
        for position in order:
            samples[position].append(turn(position))
        order.reverse()
    return samples


@dataclass
class _Runner:
    """A candidate on the device, that was right. `arguments` are those of a call, for each set of inputs; `last` is the
    seconds a call of its last turn, and `seconds` the device's clock for several sets, None where there is one."""

    module: Any
    device: Any
    arguments: list[list[Any]]
    output: Any
    share: float
    last: float
    seconds: Any = None

    @classmethod
    def loaded(
        cls, remote: Any, name: str, candidate: Candidate, memory: tuple[list[list[Any]], list[Any]], job: MeasureJob
    ) -> _Runner:
        """Loads a candidate, packs, runs it once over an output of NaN, and checks what it wrote."""
        device, (inputs, weights) = remote.device(candidate.memory, 0), memory
        module = _module(remote, name, candidate)
        packed = [_empty(shape, dtype, device) for shape, dtype in candidate.packed]
        if packed:
            module["pack"](*weights, *packed)
        output = _send(_nonsense(*job.output), device)
        room = [_empty(candidate.workspace, "float32", device)] if candidate.workspace else []
        own = [*packed, *(_send(array, device) for array in candidate.constants), output, *room]
        runner = cls(module, device, [[*arrays, *own] for arrays in inputs], output, 0.0, 0.0, _clock(remote, job))
        module["run"](*runner.arguments[0])
        runner.check(job)
        return runner

    def check(self, job: MeasureJob) -> None:
        """Looks at the output of the last call: of the first, and again of the last, since two threads may be at odds
        only now and then, and memory may have been written by the others."""
        self.share = max(self.share, job.error_share(self.output.numpy()))
        if self.share > 1:
            raise _NotTimed(Failure(WRONG, f"its error is {self.share:.3g} times the budget"))

    def turn(self) -> float:
        """The median seconds of a call. How many there are follows from the turn before."""
        slices = max(1, min(SLICES, int(TURN / self.last))) if self.last else 1
        number = max(1, round(TURN / slices / self.last)) if self.last else 1
        if self.seconds is None:
            timed = self.module.time_evaluator("run", self.device, number=number, repeat=slices)
            samples = timed(*self.arguments[0]).results
        else:
            sets, flat = len(self.arguments), [argument for arrays in self.arguments for argument in arrays]
            samples = [self.seconds(self.module, max(number, sets), sets, *flat) for _ in range(slices)]
        self.last = max(median(samples), 1e-8)
        return self.last


def _clock(remote: Any, job: MeasureJob) -> Any:
    """The device's own clock, where inputs take turns and it has one: `mhsa serve` does, TVM's own server does not."""
    if job.sets == 1:
        return None
    try:
        return remote.get_function(SECONDS)
    except AttributeError:
        return None


def _module(remote: Any, name: str, candidate: Candidate) -> Any:
    from tvm.error import RPCError

    try:
        remote.upload(bytearray(candidate.library), name)
        module = remote.load_module(name)
        for function in ("pack", "run") if candidate.packed else ("run",):
            module[function]
        return module
    except (RPCError, AttributeError) as error:
        if _is_timeout(error):
            raise
        raise _NotTimed(Failure(BUILD, f"the device cannot load it: {last_words(error)}")) from None


class _NotTimed(RuntimeError):
    """A candidate that the device cannot load, or whose output is over the error budget."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


@contextmanager
def _blame(position: int) -> Iterator[None]:
    """Whatever goes wrong inside is a Fault of the candidate there. Every error of TVM's RPC is a RuntimeError."""
    from tvm.error import RPCError

    try:
        yield
    except _NotTimed as error:
        raise Fault(position, error.failure) from None
    except RuntimeError as error:
        if _is_timeout(error):
            raise Fault(position, Failure(TIMEOUT)) from None
        raise Fault(position, Failure(CRASH, last_words(error) if isinstance(error, RPCError) else "")) from None


def _is_timeout(error: Exception) -> bool:
    from tvm.error import RPCSessionTimeoutError

    return isinstance(error, RPCSessionTimeoutError)


def last_words(error: Exception) -> str:
    """What the device said, in one line."""
    return " ".join(str(error).split())[-300:]


def _send(array: np.ndarray, device: Any) -> Any:
    tensor = _empty(array.shape, str(array.dtype), device)
    return tensor.copyfrom(np.ascontiguousarray(array).reshape(array.shape))


def _empty(shape: Sequence[int], dtype: str, device: Any) -> Any:
    import tvm

    return tvm.runtime.empty(shape, dtype, device)


def _nonsense(shape: Sequence[int], dtype: str) -> np.ndarray:
    """An array of NaN in every place; of -1 where there are whole numbers."""
    kind = np.dtype(_EXTENDED.get(dtype, dtype))
    memory: np.ndarray = np.full(int(np.prod(shape)) * kind.itemsize, 0xFF, np.uint8)
    values: np.ndarray = memory.view(kind)
    return values.reshape(shape)
