"""Several processes that share a study over a database: no trial is lost, and none is doubled."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep

import optuna
import pytest
from support import postgres, study_workers

from mhsa_compile.errors import InstallationError
from mhsa_compile.tuning.measure.job import LOST
from mhsa_compile.tuning.search import study_storage
from mhsa_compile.tuning.search.study import Study

SQLITE, POSTGRES = "sqlite", "postgresql"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, str]]]:
    """Database -> (what each process wrote, its URL), once all have ended."""
    folders = {name: tmp_path_factory.mktemp(name) for name in (SQLITE, POSTGRES)}
    programs = postgres.programs()
    with ExitStack() as stack:
        found = {SQLITE: (folders[SQLITE], f"sqlite:///{folders[SQLITE] / 'studies.db'}")}
        if programs is not None:
            found[POSTGRES] = (folders[POSTGRES], stack.enter_context(postgres.server(programs)))
        arguments = [str(word) for pair in found.values() for word in pair]
        subprocess.run([sys.executable, study_workers.__file__, *arguments], check=True, timeout=120)
        yield found


@pytest.mark.thorough
@pytest.mark.parametrize("database", [SQLITE, POSTGRES])
def test_no_trial_is_lost_or_doubled(database: str, request: pytest.FixtureRequest) -> None:
    """Four processes begin at once, on an empty database: one loses its device now and then, and two are killed."""
    if database == POSTGRES:
        postgres.require()
    folder, url = request.getfixturevalue("finished")[database]
    written = {role: (folder / role).read_text().splitlines() for role in study_workers.ROLES}
    drawn = {role: [line.split(" ", 1) for line in lines] for role, lines in written.items()}
    numbers = [int(number) for lines in drawn.values() for number, _ in lines]
    assert len(set(numbers)) == len(numbers)

    storage = study_storage.open_storage(url)
    trials = optuna.load_study(study_name=study_workers.STUDY, storage=storage).get_trials()
    storage.engine.dispose()
    assert all(trial.state.is_finished() for trial in trials)
    complete = Counter(config_of(trial) for trial in trials if trial.value is not None)
    assert complete == Counter(map(str, study_workers.space().points))

    again = [n for n in numbers if trials[n].value is None]
    lost = [n for n in again if trials[n].user_attrs.get("failed", {}).get("reason") == LOST]
    killed = int(drawn["dies"][-1][0])
    assert lost and sorted(again) == sorted([*lost, killed])  # and every other one was told once
    assert all(int(number) not in again for number, _ in drawn["works"])


def config_of(trial: optuna.trial.FrozenTrial) -> str:
    """The config of a trial, as `str(Point)` has it."""
    said = trial.user_attrs["config"]
    return " ".join((said["kernel"], *(f"{knob}={value}" for knob, value in said["knobs"])))


def test_signs_of_life_outlast_a_database_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise what is measured meanwhile would be taken for dead, once it is back."""
    monkeypatch.setattr(study_storage, "BEAT", 0.01)
    storage = study_storage.open_storage(f"sqlite:///{tmp_path / 'studies.db'}")
    with Study(storage, study_workers.IDENTITY, study_workers.space()) as study:
        assert study.ask()
        beats = []

        def record(trial_id: int) -> None:
            beats.append(trial_id)
            if len(beats) < 3:
                raise optuna.exceptions.StorageInternalError("away")

        monkeypatch.setattr(storage, "record_heartbeat", record)
        end = monotonic() + 10
        while len(beats) < 4 and monotonic() < end:
            sleep(0.01)
        assert len(beats) >= 4
    storage.engine.dispose()


@pytest.mark.thorough
def test_a_database_without_its_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(InstallationError, match=r"psycopg on this machine.* pip install psycopg\[binary\]") as caught:
        study_storage.open_storage("postgresql+psycopg://me:secret@127.0.0.1:9/none")
    assert "secret" not in str(caught.value)
