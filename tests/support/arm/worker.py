"""What runs on the emulated machine: artifacts are loaded and called there, as `arm_runs` asks over a socket.

python worker.py DESCRIPTOR THREADS
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from typing import Any

import mhsa_compile as mhsa


def main() -> None:
    connection, threads = Connection(int(sys.argv[1])), int(sys.argv[2])
    loaded: list[Any] = []

    def load(path: str, weights: Any) -> int:
        loaded.append(mhsa.load(path, weights=weights, threads=threads))
        return len(loaded) - 1

    def call(number: int, positional: tuple[Any, ...], by_name: dict[str, Any]) -> list[Any]:
        results = loaded[number](*positional, **by_name)
        return list(results) if isinstance(results, tuple) else [results]

    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, {"load": load, "call": call}[name](*arguments)))
        except Exception as error:
            connection.send((False, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    assert "torch" not in sys.modules and "onnx" not in sys.modules
    main()
