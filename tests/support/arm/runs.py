"""Artifacts that were compiled here, loaded and called on the emulated machine of `support.arm.machine`."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from support import runs_noted
from support.arm import machine as arm_machine

from mhsa_compile.hardware.profile import TargetProfile, load_profile
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.verification.parity import CaseResult

PATIENCE = 900.0
"""Seconds for one load or call, which take a few at most where nothing else runs."""
SVE = {128: "max,sve-max-vq=1", 256: "max,sve-max-vq=2", 512: "max,sve-max-vq=4"}
"""QEMU's CPU that has everything, by the bits of its SVE vectors."""
CPUS = {"aarch64-generic": "cortex-a53", "neoverse-v1": SVE[256], "neoverse-v2": SVE[128]}
"""What QEMU emulates for a target, where that is not the CPU of the target's name: the least that has it all."""

Arrays = Mapping[str, np.ndarray]


class Refused(Exception):
    """What a call or a load raised there: the error's name and words."""


class There:
    """A process on the emulated machine."""

    def __init__(self, process: subprocess.Popen[bytes], connection: Connection) -> None:
        self._process, self._asked = process, connection

    def load(
        self, artifact: Artifact | Path, weights: Arrays | None = None
    ) -> Callable[[Arrays | tuple[Any, ...]], list[np.ndarray]]:
        """Loads it there; what is returned calls it, inputs by name or by position. Raises Refused, as calls do."""
        path = artifact.path if isinstance(artifact, Artifact) else artifact
        number = self._ask("load", str(path), None if weights is None else dict(weights))

        def call(inputs: Arrays | tuple[Any, ...]) -> list[np.ndarray]:
            outputs: list[np.ndarray] = (
                self._ask("call", number, inputs, {})
                if isinstance(inputs, tuple)
                else self._ask("call", number, (), dict(inputs))
            )
            return outputs

        return call

    @property
    def died(self) -> bool:
        return self._process.poll() is not None

    def _ask(self, name: str, *arguments: Any) -> Any:
        self._asked.send((name, arguments))
        try:
            if not self._asked.poll(PATIENCE):
                self._process.kill()  # its answer would be taken for that of the next question
                raise AssertionError(f"no answer from the emulated machine in {PATIENCE:g} s")
            fine, answer = self._asked.recv()
        except (EOFError, ConnectionError):
            raise AssertionError(f"the emulated process died: exit code {self._process.wait()}") from None
        if not fine:
            raise Refused(answer)
        return answer


class Machines:
    """A process on each emulated CPU that is asked for, started at first use, and again where it has died."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._found: dict[str, There] = {}

    def __getitem__(self, cpu: str) -> There:
        if cpu not in self._found or self._found[cpu].died:
            self._found[cpu] = self._open.enter_context(runs(cpu))
        return self._found[cpu]

    def close(self) -> None:
        self._open.close()


@contextmanager
def runs(cpu: str = "max", threads: int = 1) -> Iterator[There]:
    """A process there, until the block ends. `threads` is what its calls use."""
    root = arm_machine.require()
    here, other = socket.socketpair()
    with here, other:
        worker = arm_machine.command(root, Path(__file__).with_name("worker.py"), other.fileno(), threads)
        process = subprocess.Popen(
            worker, env=arm_machine.environment(root, cpu), pass_fds=[other.fileno()], stdin=subprocess.DEVNULL
        )
        other.close()
        with Connection(here.detach()) as connection:
            try:
                yield There(process, connection)
            finally:
                process.kill()
                process.wait()


def note(record_property: Callable[[str, Any], None], name: str, *cases: CaseResult, machine: str = "aarch64") -> None:
    """Notes cases for the summary at the end of a test run (`conftest.py`)."""
    runs_noted.note(record_property, name, *cases, machine=f"emulated {machine}")


def emulable(target: str) -> TargetProfile:
    """A target's profile, less what QEMU does not announce: QEMU 7.2 has no FEAT_LSE2 (unaligned atomics), which no
    kernel uses."""
    profile = load_profile(target)
    if "uscat" not in profile.hardware.features:
        return profile
    features = tuple(feature for feature in profile.hardware.features if feature != "uscat")
    return msgspec.structs.replace(
        profile,
        tvm=msgspec.structs.replace(profile.tvm, mattr=(*profile.tvm.mattr, "-lse2")),
        hardware=msgspec.structs.replace(profile.hardware, features=features),
    )


def cpu_of(target: str) -> str:
    """What QEMU calls the CPU that a target is tried on."""
    return CPUS.get(target, target)
