"""Workers and devices on one study, for real, and what is left when some are killed: `make fleet`.

    python -m campaigns.fleet --trials 40 --json fleet.json

A tracker and two devices on loopback, a PostgreSQL of its own (or --storage URL), and 1, 2 and 4 times `mhsa tune` on
one study. Then 4 once more, of which one is killed with -9 in the middle, and a device, too. After each run the
database is asked: was every trial told, and every config once? Does the records file load?

Here everything shares the CPUs: what a worker does is mostly compiling. Where each worker has a machine of its own, as
each device has, it is the devices that they wait for.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from support import postgres

from mhsa_compile.errors import MhsaError
from mhsa_compile.records import record_files
from mhsa_compile.tuning.measure import rpc_server
from mhsa_compile.tuning.search.search import BATCH
from mhsa_compile.tuning.search.study_storage import GRACE, open_storage

KEY = "pair"
SPEC = "embed_dim = 256\nnum_heads = 4\n"
LONGEST = 900.0
"""Seconds until a run counts as hanging."""


@dataclass(frozen=True)
class Run:
    """`trials` were told: `complete` with a time, `failed` with a reason. `again` were drawn, and had to be drawn again
    because their process or device was killed; `gave_way` to one that had the same config. `seconds` from the first
    draw of an operation to its last outcome, all operations together. CPU seconds are those of a trial, of the workers
    from the first draw on, and of the devices; None where some of them were killed."""

    workers: int
    killed: str
    trials: int
    complete: int
    failed: int
    again: int
    gave_way: int
    seconds: float
    per_minute: float
    records: int
    worker_cpu: float | None
    device_cpu: float | None


class Fleet:
    """A tracker, two devices, a database, and a folder."""

    def __init__(self, storage: str, folder: Path, stack: ExitStack) -> None:
        self.storage, self.folder, self.stack = storage, folder, stack
        self.port = _free_port()
        place = ["--host", rpc_server.LOOPBACK, "--port", str(self.port), "--port-end", str(self.port + 1)]
        self._start("tracker", "-m", "tvm.exec.rpc_tracker", *place)
        self.wait_for(lambda: rpc_server.require_tracker((rpc_server.LOOPBACK, self.port)))
        self.devices = [self.device(number) for number in range(2)]
        self.spec = folder / "layer.toml"
        self.spec.write_text(SPEC)

    def device(self, number: int) -> subprocess.Popen[bytes]:
        place = ["--port", "0", "--tracker", f"{rpc_server.LOOPBACK}:{self.port}", "--key", KEY]
        return self._start(f"device{number}", "-m", "mhsa_compile", "serve", "--threads", "1", *place)

    def worker(self, name: str, number: int, trials: int) -> subprocess.Popen[bytes]:
        where = ["--on", "tracker", f"{rpc_server.LOOPBACK}:{self.port}/{KEY}", "--storage", self.storage]
        what = ["--batch", "1", "--length", "37", "--trials", str(trials), "--seconds", str(LONGEST)]
        kept = ["--records", str(self.records(name)), "--study", name, "--seed", str(number), "--json"]
        words = ["-m", "mhsa_compile", "tune", str(self.spec), *where, *what, *kept]
        return self._start(f"{name}-{number}", *words)

    def records(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait_for(self, happens: Any) -> None:
        end = time.monotonic() + 60
        while True:
            try:
                return happens()
            except MhsaError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def _start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        log = self.stack.enter_context((self.folder / f"{name}.log").open("wb"))
        child = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.stack.callback(child.wait)
        self.stack.callback(child.kill)
        return child


def campaign(fleet: Fleet, trials: int) -> Iterator[Run]:
    """Runs of 1, 2 and 4 workers, and one of which a worker and a device are killed. Raises AssertionError for the
    first trial that was lost or doubled."""
    for workers in (1, 2, 4):
        name = f"fleet-{workers}"
        before = _spent_by_children()
        children = [fleet.worker(name, number, trials) for number in range(workers)]
        begun = _spent_until_the_first_draw(fleet, name, children)
        device_cpu = sum(map(_spent, fleet.devices))
        finish(fleet, name, children)
        spent = _spent_by_children() - before - begun, sum(map(_spent, fleet.devices)) - device_cpu
        yield looked_at(fleet, name, workers, "", spent)
    name = "fleet-killed"
    children = [fleet.worker(name, number, trials) for number in range(4)]
    kill_in_the_middle(fleet, name, children)
    finish(fleet, name, children[1:])
    run = looked_at(fleet, name, 4, "a worker and a device", None)
    assert run.again, "nothing ran where it was killed"
    yield run


def finish(fleet: Fleet, name: str, children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        code = child.wait(timeout=LONGEST)
        assert code == 0, "\n".join(fleet.said(log.stem) for log in fleet.folder.glob(f"{name}-*.log"))


def _spent_by_children() -> float:
    """CPU seconds of the processes that have ended: workers, and what they started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _spent(process: subprocess.Popen[bytes]) -> float:
    """CPU seconds of a process that runs, and of those it has waited for."""
    numbers = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    return sum(map(int, numbers)) / os.sysconf("SC_CLK_TCK")


def _spent_until_the_first_draw(fleet: Fleet, name: str, children: Sequence[subprocess.Popen[bytes]]) -> float:
    _until(lambda: _trials(fleet, name), children)
    return sum(map(_spent, children))


def kill_in_the_middle(fleet: Fleet, name: str, children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kills the first worker, once there are so many trials that it must be at some; and a device that serves a
    connection, which is started again some seconds later, as whoever runs a fleet would do."""
    first, device = children[0], fleet.devices[0]
    others = BATCH * (len(children) - 1)
    _until(lambda: sum(trial.state.name == "RUNNING" for _, trial in _trials(fleet, name)) > others, children)
    first.kill()
    _until(lambda: Path(f"/proc/{device.pid}/task/{device.pid}/children").read_text().strip(), children[1:])
    device.kill()
    time.sleep(5)
    fleet.devices[0] = fleet.device(0)


def _until(happens: Any, children: Sequence[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + LONGEST
    while not happens():
        assert time.monotonic() < end and all(child.poll() is None for child in children), "it ended too early"
        time.sleep(0.05)


def _trials(fleet: Fleet, name: str) -> list[tuple[str, Any]]:
    """(study, trial) of all studies of a run."""
    import optuna

    with opened(fleet.storage) as storage:
        names = [study for study in optuna.get_all_study_names(storage) if study.startswith(f"{name}.")]
        studies = [optuna.load_study(study_name=study, storage=storage) for study in names]
        return [(study.study_name, trial) for study in studies for trial in study.get_trials()]


@contextmanager
def opened(url: str) -> Iterator[Any]:
    storage = open_storage(url)
    try:
        yield storage
    finally:
        storage.engine.dispose()


def _done(trial: Any) -> bool:
    return "found" in trial.user_attrs or "failed" in trial.user_attrs


def looked_at(fleet: Fleet, name: str, workers: int, killed: str, spent: tuple[float, float] | None) -> Run:
    """What the trials of a run came to. Raises AssertionError where a trial has no outcome, or a config two."""
    trials = _trials(fleet, name)
    open_ = [(study, trial.number) for study, trial in trials if not trial.state.is_finished()]
    assert not open_, f"lost: {open_}"
    told = [(study, trial) for study, trial in trials if _done(trial)]
    lost = [pair for pair in told if pair[1].user_attrs.get("failed", {}).get("reason") == "device lost"]
    counted = Counter(_config(*pair) for pair in told if pair not in lost)
    assert max(counted.values()) == 1, f"doubled: {[config for config, times in counted.items() if times > 1]}"
    missing = {_config(*pair) for pair in trials if "config" in pair[1].user_attrs} - counted.keys()
    assert not missing, f"drawn, and not asked again: {missing}"
    stale = sum("failed_trial" in trial.system_attrs for _, trial in trials)  # drawn again: their process was killed
    complete = sum("found" in trial.user_attrs for _, trial in told)
    seconds = sum(_span([trial for study, trial in told if study == one]) for one in {study for study, _ in told})
    contents = record_files.read(fleet.records(name))
    return Run(
        workers=workers,
        killed=killed,
        trials=len(counted),
        complete=complete,
        failed=len(counted) - complete,
        again=len(lost) + stale,
        gave_way=len(trials) - len(told) - stale,
        seconds=seconds,
        per_minute=60 * len(counted) / seconds,
        records=len(contents.records),
        worker_cpu=spent and spent[0] / len(counted),
        device_cpu=spent and spent[1] / len(counted),
    )


def _config(study: str, trial: Any) -> str:
    return json.dumps([study, trial.user_attrs["config"]])


def _span(trials: Sequence[Any]) -> float:
    starts: list[datetime] = [trial.datetime_start for trial in trials if trial.datetime_start is not None]
    ends: list[datetime] = [trial.datetime_complete for trial in trials]
    return (max(ends) - min(starts)).total_seconds()


def _free_port() -> int:
    with rpc_server.bind() as listening:
        return int(listening.getsockname()[1])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=40, help="of each operation in each run (default: %(default)s)")
    parser.add_argument("--storage", help="an empty database, instead of a PostgreSQL of its own")
    parser.add_argument("--json", type=Path, help="where the figures go")
    given = parser.parse_args(arguments)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
    runs = []
    row = "{:>7}  {:<22} {:>6} {:>6} {:>5} {:>8} {:>8} {:>10} {:>10} {:>10} {:>7}"
    print(f"{os.cpu_count()} CPUs, 2 devices of 1 thread, {given.trials} trials of each operation")
    head = ("workers", "killed", "trials", "failed", "again", "gave way", "seconds", "per minute")
    print(row.format(*head, "worker CPU", "device CPU", "records"))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mhsa-fleet-")))
        if given.storage is None and postgres.programs() is None:
            sys.exit("No PostgreSQL server here: apt-get install postgresql, or --storage sqlite:////some/file.db")
        storage = given.storage or stack.enter_context(postgres.server(postgres.require()))
        for run in campaign(Fleet(storage, folder, stack), given.trials):
            runs.append(run)
            columns = (run.workers, run.killed or "none", run.trials, run.failed, run.again, run.gave_way)
            spent = ("-" if cpu is None else f"{cpu:.2f}" for cpu in (run.worker_cpu, run.device_cpu))
            rates = (f"{run.seconds:.0f}", f"{run.per_minute:.0f}", *spent)
            print(row.format(*columns, *rates, run.records), flush=True)
    print("CPU: seconds a trial. Workers, devices and the database share the CPUs here.")
    print(f"No trial lost or doubled. A dead worker's wait {GRACE} s to be drawn again.")
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(run) for run in runs], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
