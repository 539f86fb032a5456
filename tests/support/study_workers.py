"""Processes that work on one study, with times that are made up: what is drawn, told, lost and left behind.

    python -m support.study_workers FOLDER URL FOLDER URL ...

At each database there is a process for each of ROLES. It writes what it drew to a file in FOLDER. They are forked,
because importing takes seconds.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from time import sleep
from typing import Any

from mhsa_compile.hardware.profile import detect
from mhsa_compile.tuning.measure.job import LOST, Failure, Timing
from mhsa_compile.tuning.search import study_storage
from mhsa_compile.tuning.search.space import Point, Space
from mhsa_compile.tuning.search.study import Study, StudyIdentity

ROLES = ("works", "loses", "dies", "dies early")
"""One goes on until nothing is left; one has a device that is gone, now and then; one is killed while it measures, and
one before its first sign of life."""
STUDY = "shared"
KNOBS = {"rows": (1, 2, 3), "columns": (1, 2, 4, 8, 16, 32)}
IDENTITY = StudyIdentity(STUDY, {"op": "made up"}, "a source")
INCUMBENT = Timing((10.0, 10.0), 0.1)


class Fits:
    """A kernel that takes any config but one."""

    name = "made up"

    def why_not_config(self, op: Any, profile: Any, config: dict[str, int]) -> str | None:
        return "no such tile" if config == {"rows": 3, "columns": 32} else None


def space() -> Space:
    kernel: Any = Fits()
    op: Any = None
    default = Point(kernel.name, (("rows", 1), ("columns", 1)))
    return Space(op, detect(), {kernel.name: kernel}, {kernel.name: KNOBS}, default)


def work(study: Study, role: str, log: Path) -> None:
    study.guess([study.space.default, *study.space.points[5:9]])
    count = 0
    while not (study.is_settled() and not study.left()):
        if role == "dies early" and count == 2:
            study._heart.add = lambda trial_id: die(log)  # type: ignore[method-assign]
        if count == 3:
            wait_for_the_dead(log.parent)
        trial = study.ask()
        if trial is None:
            sleep(0.5)  # asking reads all trials, and what the dead left comes seconds later
            continue
        with log.open("a") as file:
            file.write(f"{trial.number} {trial.point}\n")
        count += 1
        sleep(0.01)
        if role == "dies" and count == 3:
            die(log)
        if role == "loses" and count % 3 == 0:
            study.tell(trial, Failure(LOST, "the device is gone"), INCUMBENT)
        else:
            us = 10.0 + sum(trial.point.config.values())
            study.tell(trial, Timing((us, us), 0.1), INCUMBENT)


def wait_for_the_dead(folder: Path) -> None:
    """Waits until the processes that die are dead, so that there is something left to die at, however slowly they come
    to it."""
    while not all((folder / f"{role}.dead").exists() for role in ROLES if role.startswith("dies")):
        sleep(0.01)


def die(log: Path) -> None:
    log.with_suffix(".dead").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def main(*arguments: str) -> int:
    study_storage.BEAT, study_storage.GRACE = 1, 5
    choices, children = space(), {}
    for folder, url in zip(arguments[::2], arguments[1::2], strict=True):
        for number, role in enumerate(ROLES):
            if (child := os.fork()) == 0:
                with Study(study_storage.open_storage(url), IDENTITY, choices, seed=number) as study:
                    work(study, role, Path(folder, role))
                os._exit(0)
            children[child] = role
    for child, role in children.items():
        end = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert end == (-signal.SIGKILL if role.startswith("dies") else 0), f"the one that {role} ended with {end}"
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
