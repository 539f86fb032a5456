"""Sessions: what is right is timed, and what crashes, hangs, or is wrong costs only itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import measured
import pytest

from mhsa_compile import host, sessions
from mhsa_compile.jobs import BUILD, CRASH, TIMEOUT, WRONG, Candidate, Failure, Timing
from mhsa_compile.sessions import Session


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with sessions.local(threads=1, patience=2) as session:
        yield session


def test_the_child_says_what_it_is(session: Session) -> None:
    assert (session.threads, session.device.architecture) == (1, host.architecture())
    assert set(session.device.features) == host.cpu_features()


def test_right_candidates_are_timed_in_the_same_rounds(session: Session) -> None:
    kernel = measured.kernel()
    one, other = session.measure(measured.job(), [kernel, measured.planted(measured.RIGHT)], 0.02)
    assert isinstance(one, Timing) and isinstance(other, Timing)
    assert len(one.samples_us) == len(other.samples_us) >= 1
    assert 0 < one.error_share < 1 and min(one.samples_us) > 0


GOES_WRONG = {
    "a crash": (lambda: measured.planted(measured.CRASHES), CRASH),
    "a crash at the second call": (lambda: measured.planted(measured.CRASHES_LATER), CRASH),
    "a hang": (lambda: measured.planted(measured.HANGS), TIMEOUT),
    "a wrong result": (lambda: measured.planted(measured.RIGHT, off_by=1e-3), WRONG),
    "a missing tail": (lambda: measured.planted(measured.RIGHT, written=29), WRONG),
    "no library": (lambda: Candidate(b"nonsense"), BUILD),
}


@pytest.mark.parametrize(("bad", "reason"), GOES_WRONG.values(), ids=GOES_WRONG.keys())
def test_what_goes_wrong_costs_only_itself(session: Session, bad: Callable[[], Candidate], reason: str) -> None:
    outcomes = session.measure(measured.job(), [measured.kernel(), bad(), measured.kernel()], 0.01)
    assert isinstance(outcomes[0], Timing) and isinstance(outcomes[2], Timing)
    assert isinstance(outcomes[1], Failure) and outcomes[1].reason == reason
