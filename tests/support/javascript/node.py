"""A process of Node that calls a bundle."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mhsa_compile.verification.random_inputs import Arrays
from support.browser import REQUIRED

_CALLS = Path(__file__).with_name("calls.mjs")


def program() -> str:
    """Node's path; the test that asks is skipped without one, and fails where it has to be there."""
    path = shutil.which("node")
    if path is None:
        why = "no Node on this machine: apt-get install nodejs"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(why)
        pytest.skip(why)
    return str(path)


@functools.cache
def _flags() -> tuple[str, ...]:
    """What Node before 22 has to be told to take relaxed SIMD."""
    flag = "--experimental-wasm-relaxed-simd"
    options = subprocess.run([program(), "--v8-options"], capture_output=True, text=True, check=True).stdout
    return (flag,) if flag in options else ()


class Calls:
    """Calls of one bundle, whose process is there. `answer` is the last line of it."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder = process, folder
        self.answer = self._read()

    def __call__(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """The outputs by name; asserts that there are some."""
        outputs = self._outputs(inputs)
        assert outputs is not None, self.answer
        return outputs

    def refusal(self, inputs: Arrays) -> str:
        """What a call that is refused says."""
        assert self._outputs(inputs) is None
        return self.answer

    def _outputs(self, inputs: Arrays) -> dict[str, np.ndarray] | None:
        source, result = self._folder / "in.safetensors", self._folder / "out.safetensors"
        save_file({name: np.ascontiguousarray(array) for name, array in inputs.items()}, source)
        result.unlink(missing_ok=True)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{source}\t{result}\n")
        self._process.stdin.flush()
        self.answer = self._read()
        return load_file(result) if result.exists() else None

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")


@contextmanager
def calls(bundle: Path, folder: Path) -> Iterator[Calls]:
    """Calls of a bundle; files of arrays go into `folder`."""
    command = [program(), *_flags(), str(_CALLS), str(bundle)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Calls(process, folder)
        finally:
            process.kill()
