"""What runs on the emulated machine: artifacts are loaded and called there, as `arm_runs` asks over a socket.

python arm_worker.py DESCRIPTOR THREADS
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from typing import Any

import mhsa_compile as mhsa


def main() -> None:
    asked = Connection(int(sys.argv[1]))
    loaded: dict[str, Any] = {}
    while True:
        try:
            path, weights, inputs = asked.recv()
        except EOFError:
            return
        try:
            if inputs is None:
                loaded[path] = mhsa.load(path, weights=weights, threads=int(sys.argv[2]))
                answer: Any = None
            else:
                results = loaded[path](*inputs) if isinstance(inputs, tuple) else loaded[path](**inputs)
                answer = list(results) if isinstance(results, tuple) else [results]
            asked.send((True, answer))
        except Exception as error:
            asked.send((False, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    assert "torch" not in sys.modules and "onnx" not in sys.modules
    main()
