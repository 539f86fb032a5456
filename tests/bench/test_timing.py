"""The timing protocol on a clock of the test's own, and the loops of the limits against NumPy."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from mhsa_bench import roofline
from mhsa_compile.bench.timing import BURST, LEAST_ROUNDS, LONG, SETTLE, interleave, quickest, tasks, workers_apart
from mhsa_compile.hardware.profile import detect
from mhsa_compile.kernels.cpu.units.choice import units
from mhsa_compile.runtime.profile.call_profile import spread


class Clock:
    """Time passes only in calls; `log` keeps who was called when."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[tuple[str, float]] = []

    def __call__(self) -> float:
        return self.now

    def call(self, name: str, seconds: float, first: float | None = None):
        """Takes `seconds`, but `first` after somebody else's call."""

        def run() -> None:
            disturbed = not self.log or self.log[-1][0][0] != name[0]
            self.log.append((name, self.now))
            self.now += first if disturbed and first is not None else seconds

        return run

    def turns(self) -> list[str]:
        names = [name[0] for name, _ in self.log]
        return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


def test_candidates_take_turns_and_disturbed_calls_do_not_count():
    clock = Clock()
    fast, slow = clock.call("a", 1e-4, first=3e-3), clock.call("b", 0.1, first=0.2)
    samples = interleave([[fast], [slow]], 0.0, clock)
    assert [len(rounds) for rounds in samples] == [LEAST_ROUNDS] * 2
    assert samples[0] == pytest.approx([1e-4] * LEAST_ROUNDS)
    assert samples[1] == pytest.approx([0.1] * LEAST_ROUNDS)
    # The warm-up is a b; then rounds in alternating order, whose neighbours meet: a b, b a, a b, b a, a b.
    assert clock.turns() == ["a", "b", "a", "b", "a", "b", "a", "b"]


def test_a_turn_settles_and_then_lasts_as_long_as_a_burst():
    clock = Clock()
    interleave([[clock.call("a", 1e-3)], [clock.call("b", 1e-3)]], 0.0, clock)
    first_turn = [name for name, _ in clock.log].index("b")  # calls of a millisecond each
    assert first_turn * 1e-3 == pytest.approx(SETTLE + BURST, abs=2e-3)


def test_long_calls_settle_only_once():
    clock = Clock()
    interleave([[clock.call("a", 2 * LONG)], [clock.call("b", 2 * LONG)]], 0.0, clock)
    calls = [name for name, _ in clock.log]
    assert calls.count("a") == calls.count("b") == 2 + LEAST_ROUNDS


def test_calls_go_through_all_sets_of_inputs_for_as_long_as_asked():
    clock = Clock()
    (samples,) = interleave([[clock.call(f"a{i}", 1e-3 * (i + 1)) for i in range(3)]], 1.0, clock)
    assert [name for name, _ in clock.log[:4]] == ["a0", "a1", "a2", "a0"]
    assert samples == pytest.approx([2e-3] * len(samples))
    assert clock.now == pytest.approx(1.0 + SETTLE + BURST, abs=0.05)


def test_spread_is_a_share_of_the_median():
    assert spread([10.0, 10.0, 10.0, 10.0, 90.0]) == 0
    assert spread([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(0.2)


def test_the_quickest_call_counts():
    assert 0 < quickest(lambda: None) < 1e-3


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: there is nothing to keep apart")
def test_workers_are_kept_apart_and_set_free_again():
    stop, started = threading.Event(), threading.Barrier(3)

    def worker() -> None:
        started.wait()
        stop.wait()

    before, cpus = tasks(), os.sched_getaffinity(0)
    others = [threading.Thread(target=worker) for _ in range(2)]
    for other in others:
        other.start()
    started.wait()
    try:
        helper, sole = sorted(tasks() - before)[-2:]
        with workers_apart({sole}):
            assert os.sched_getaffinity(0) == {min(cpus)}
            assert os.sched_getaffinity(helper) == cpus - {min(cpus)}
            assert os.sched_getaffinity(sole) == {min(cpus)}  # its caller waits, so it has that CPU for itself
        assert os.sched_getaffinity(0) == os.sched_getaffinity(helper) == os.sched_getaffinity(sole) == cpus
    finally:
        stop.set()
        for other in others:
            other.join()


def run(function, *arguments):
    import tvm

    module = tvm.IRModule({"loop": function.with_attr("global_symbol", "loop")})
    tvm.compile(module, target=tvm.target.Target(detect().tvm_config()))["loop"](*arguments)


def tensor(array: np.ndarray):
    import tvm

    return tvm.runtime.tensor(array)


def test_the_loop_of_multiply_adds_multiplies_and_adds():
    total = tensor(np.zeros(4, np.float32))
    run(roofline._fma_loop(4, 3), tensor(np.array([3.0, 0.5], np.float32)), total, 2)
    expected = sum((start * 3 + 0.5) * 3 + 0.5 for start in range(3))
    assert total.numpy().tolist() == [expected] * 4


@pytest.mark.skipif(len(units(detect(), "bfloat16")) == 1, reason="this CPU has no bfloat16 dot products")
def test_the_loop_of_dot_products_adds_pairs_of_products():
    unit = next(unit for unit in units(detect(), "bfloat16") if unit.rows == 1)
    total = tensor(np.zeros(unit.lanes, np.float32))
    one_and_two, three_and_one = 0x40003F80, 0x3F804040  # pairs of bfloat16, the first in the lowest bits
    run(roofline._dot_loop(unit, 3), tensor(np.array([one_and_two, three_and_one], np.int32)), total, 2)
    assert total.numpy().tolist() == [0 + 1 + 2 + 3 * 2 * (1 * 3 + 2 * 1)] * unit.lanes


def test_the_loop_of_reading_reads_everything():
    array, total = np.arange(96, dtype=np.float32), tensor(np.zeros(4, np.float32))
    run(roofline._sum_loop(4, 3, 96), tensor(array), total)
    assert total.numpy().tolist() == array.reshape(-1, 4).sum(axis=0).tolist()


@pytest.mark.thorough_but("float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.thorough)])
def test_the_limits_count_what_all_threads_do(dtype):
    with roofline.multiply_adds(detect(), 1, dtype) as one, roofline.multiply_adds(detect(), 2, dtype) as two:
        one.run()
        two.run()
        assert two.amount == 2 * one.amount > 0


@pytest.mark.thorough
def test_reading_is_of_arrays_that_no_cache_holds():
    with roofline.reading(detect(), 2, least_bytes=1 << 20) as few:
        few.run()
        assert 1 << 20 <= few.amount < 2 << 20
    mib = 1 << 20
    assert roofline.read_bytes(32 * mib, None) == 256 * mib  # all of a desktop's eight caches
    assert roofline.read_bytes(480 * mib, None) == roofline.MOST_READ == 1024 * mib  # and no 3840 MiB
    assert roofline.read_bytes(1024 * mib, None) == 2048 * mib  # but never less than two caches
    assert roofline.read_bytes(480 * mib, 400 * mib) == 100 * mib  # unless memory is short
    with roofline.reading(detect(), 1) as own:
        assert own.amount <= 1.01 * roofline.read_bytes(roofline.last_level_cache(), None)
