"""ONNX Runtime in a process of its own: where it crashes on a file, that process ends, and not the user's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import onnx

from mhsa_compile.verification import runtime_worker
from mhsa_compile.verification.random_inputs import Arrays
from mhsa_compile.verification.runtime_worker import REFUSAL, packed, receive, send, unpacked

_PROGRAM = Path(runtime_worker.__file__)


class RuntimeRefusedError(Exception):
    """What ONNX Runtime says of a file or a call, or how its process ended."""


class RuntimeProcess:
    """A session of ONNX Runtime on a model, or on the file that it lies in, with its weights beside it. The process
    ends with this object."""

    def __init__(self, model: onnx.ModelProto, file: Path | None) -> None:
        """Raises OSError where no process can be started."""
        self._model, self._file = model, file
        self._inputs: list[str] | None = None  # in the order of their arrays, once the process has the model
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        weakref.finalize(self, _end, self._process)

    def run(self, inputs: Arrays) -> list[np.ndarray]:
        """The model's outputs. Raises RuntimeRefusedError."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            if self._inputs is None:
                self._inputs = list(inputs)
                send(stdin, self._names())
                send(stdin, self._model.SerializeToString() if self._file is None else b"")
            send(stdin, packed(np.asarray(inputs[name]) for name in self._inputs))
            answer = receive(stdout)
        except (EOFError, OSError) as error:
            raise RuntimeRefusedError(f"its process ended {_how(self._process.wait())}") from error
        kind, content = answer[:1], memoryview(answer)[1:]
        if kind == REFUSAL:
            raise RuntimeRefusedError(bytes(content).decode(errors="replace"))
        return unpacked(content)

    def _names(self) -> bytes:
        outputs = [value.name for value in self._model.graph.output]
        path = None if self._file is None else str(self._file)
        return json.dumps({"path": path, "inputs": self._inputs, "outputs": outputs}).encode()


def _how(code: int) -> str:
    if code >= 0:
        return f"with code {code}"
    return f"by {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"by signal {-code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
