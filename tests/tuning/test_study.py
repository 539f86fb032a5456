"""Studies: what is drawn, that nothing is measured twice, and what a database keeps."""

from __future__ import annotations

import math

import pytest
from support.attention_ops import attention_of
from support.made_session import ROUNDS
from support.records_made import made

from mhsa_compile.compiler.selection.op_key import key_of
from mhsa_compile.errors import InputError, OutputError
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.kernels.interface.ops import HeadLayout, LinearOp
from mhsa_compile.tuning.measure.job import CRASH, LOST, Failure, Timing
from mhsa_compile.tuning.search import study_storage
from mhsa_compile.tuning.search.space import Space
from mhsa_compile.tuning.search.study import Study, StudyIdentity
from mhsa_compile.tuning.search.warm_start import first_guesses

PROFILE = load_profile("x86-64-v4")
LINEAR = LinearOp(rows=(1, 13), in_features=37, widths=(29,), biased=(True,), transposed=(False,))
PLACES = [HeadLayout(buffer, "heads", 0) for buffer in range(4)]
ATTENTION = attention_of(1, 3, 197, 6, 2, 16, 16, 0.25, *PLACES)
DEFAULT = Timing((100.0,) * ROUNDS, 0.5)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('studies')}/studies.db"


@pytest.fixture(scope="module")
def storage(url: str):
    return study_storage.open_storage(url)


@pytest.fixture(scope="module")
def space() -> Space:
    return Space.of(LINEAR, PROFILE)


def identity(name: str, source: str = "a source", **about: object) -> StudyIdentity:
    return StudyIdentity(name, {"op": "linear", **about}, source)


def timed(us: float) -> Timing:
    return Timing((us,) * ROUNDS, 0.5)


def test_a_space_holds_every_willing_kernel_and_the_default():
    space = Space.of(ATTENTION, PROFILE)
    assert list(space.values) == ["cpu.decode", "cpu.attention"]
    assert space.default in space.points
    assert {point.kernel for point in space.points} == set(space.values)
    assert len(set(space.points)) == len(space.points)
    assert all(space.why_not(point) is None for point in space.points)
    size = sum(math.prod(map(len, knobs.values())) for knobs in space.values.values())
    assert len(space.points) < size  # some tiles need more registers than there are


@pytest.mark.thorough
def test_everything_is_drawn_once_and_then_nothing(storage, space: Space):
    few = {
        knob: choices[:2] if knob != "group" else choices[:1] for knob, choices in space.values["cpu.linear"].items()
    }
    small = Space(space.op, space.profile, space.kernels, {"cpu.linear": few}, space.default)
    with Study(storage, identity("all"), small) as study:
        drawn = []
        while (one := study.ask()) is not None:
            drawn.append(one.point)
            study.tell(one, timed(50.0 + len(drawn)), DEFAULT)
        assert sorted(map(str, drawn)) == sorted(map(str, small.points))
        assert len(drawn) == 16
        assert [trial.point for trial in study.trials()] == drawn
        assert study.left() == []


def test_guesses_come_first_and_failures_are_kept(storage, space: Space):
    guesses = [space.default, space.points[7]]
    with Study(storage, identity("guesses"), space) as study:
        study.guess(guesses)
        study.guess(guesses)
        first, second, third = study.ask(), study.ask(), study.ask()
        assert first and second and third
        assert [first.point, second.point] == guesses and third.point not in guesses
        study.tell(first, timed(100.0), DEFAULT)
        study.tell(second, Failure(CRASH, "signal 11"), DEFAULT)
        study.tell(third, Failure(LOST), DEFAULT)
        again = study.ask()
        assert again is not None and again.point == third.point  # it was no fault of the candidate's
        study.tell(again, timed(80.0), DEFAULT)
    with Study(storage, identity("guesses"), space) as study:
        found = {trial.point: trial.result for trial in study.trials()}
        assert found[space.points[7]] == Failure(CRASH, "signal 11")
        result = found[third.point]
        assert (result.score, result.us, result.default_us) == (0.8, 80.0, 100.0)
        assert len(found) == 3


def test_the_score_is_by_rounds(storage, space: Space):
    """A machine that slows down twofold in between changes nothing."""
    with Study(storage, identity("rounds"), space) as study:
        drawn = study.ask()
        assert drawn is not None
        rounds = [1.0, 1.0, 2.0, 2.0, 2.0]
        study.tell(drawn, Timing(tuple(50 * r for r in rounds), 0.5), Timing(tuple(100 * r for r in rounds), 0.5))
        (trial,) = study.trials()
        assert trial.result.score == 0.5
        again = study.ask()
        assert again is not None
        study.tell(again, Timing((50.0, 60.0, 70.0), 0.5), Timing((100.0, 80.0), 0.5))  # its company was broken up
        assert study.trials()[-1].result.score == 60 / 90


@pytest.mark.thorough
def test_two_workers_never_draw_the_same(storage, url: str, space: Space):
    other = study_storage.open_storage(url)
    with Study(storage, identity("two"), space, seed=1) as one, Study(other, identity("two"), space, seed=1) as two:
        one.guess([space.default])
        two.guess([space.default])
        drawn = [study.ask() for _ in range(5) for study in (one, two)]
        points = [draw.point for draw in drawn if draw]
        assert len(points) == 10
        assert len(set(points)) == 10
        assert points[0] == space.default


def test_what_a_dead_process_had_drawn_is_drawn_again(storage, space: Space):
    """The dead process's results stay; what it was at comes first, once it gives no sign of life."""
    dead = Study(storage, identity("dead"), space)
    dead.guess([space.points[3]])
    done, left = dead.ask(), dead.ask()
    assert done and left
    dead.tell(done, timed(70.0), DEFAULT)
    dead._heart.stop()  # as a kill leaves it
    with Study(storage, identity("dead"), space) as study:
        assert [trial.point for trial in study.trials()] == [space.points[3]]
        other = study.ask()
        assert other and other.point != left.point  # whoever drew it may live
        storage.grace_period = -1  # but not any more
        try:
            again = study.ask()
        finally:
            storage.grace_period = study_storage.GRACE
        assert again and again.point == left.point
        dead.tell(left, timed(60.0), DEFAULT)  # if it lived after all, it is not believed
        assert len(study.trials()) == 1


def test_results_from_elsewhere_are_added_once(storage, space: Space):
    with Study(storage, identity("elsewhere"), space) as study:
        for _ in range(2):
            study.add(space.default, timed(100.0), DEFAULT)
            study.add(space.points[5], Failure(CRASH), DEFAULT)
            study.add(space.points[6], Failure(LOST), DEFAULT)
        assert [trial.point for trial in study.trials()] == [space.default, space.points[5]]
        assert space.points[6] in study.left()


def test_a_study_of_another_source_or_operation_is_refused(storage, space: Space):
    for _ in range(2):
        with Study(storage, identity("named", rows=13, features=("fma",)), space):
            pass
    with pytest.raises(InputError, match=r"study 'named': expected one of this source .* Choose another name"):
        Study(storage, identity("named", "another", rows=13, features=("fma",)), space)
    with pytest.raises(InputError, match=r"study 'named': expected one of this operation, got one with another rows"):
        Study(storage, identity("named", rows=14, features=("fma",)), space)


@pytest.mark.parametrize(
    ("url", "kind", "words"),
    [
        ("nonsense", InputError, "--storage: expected a database that SQLAlchemy knows"),
        ("nobase://here", InputError, "nobase"),
        ("sqlite:////no/such/folder/studies.db", OutputError, "expected a database that answers"),
        ("postgresql+psycopg://me:secret@127.0.0.1:9/none", OutputError, "me:\\*\\*\\*@127.0.0.1"),
    ],
)
def test_a_database_that_is_none_is_named_without_its_password(url: str, kind: type[Exception], words: str):
    with pytest.raises(kind, match=words) as caught:
        study_storage.open_storage(url)
    assert "secret" not in str(caught.value)


def test_guesses_are_the_default_then_the_most_alike_on_record(space: Space):
    key = key_of(LINEAR)
    config = space.default.config

    records = [
        made("neoverse-n1", key=key, kernel="cpu.linear", config={**config, "block": 8}),  # another architecture
        made("x86-64-v3", key=key, kernel="cpu.linear", config={**config, "rows": 2, "columns": 3}),
        made(key={**key, "rows": 256}, kernel="cpu.linear", config={**config, "depth": 33}),  # to the nearest: 32
        made(key={**key, "rows": 32}, kernel="cpu.linear", config={**config, "rows": 6}),
        made(key={**key, "dtype": "float16"}, kernel="cpu.linear", config={**config, "group": 1}),
        made(key=key, kernel="cpu.linear", config={"other": 1}),
    ]
    expected = [{}, {"rows": 6}, {"depth": 32}, {"rows": 2, "columns": 3}]
    assert [point.config for point in first_guesses(space, records)] == [{**config, **change} for change in expected]
