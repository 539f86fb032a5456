"""A tracker of devices, and programs that end with their test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

TRACKER = """
from mhsa_compile.runtime import tvm_runtime
tvm_runtime.start()
from tvm.rpc.tracker import PopenTrackerServerState
print(PopenTrackerServerState("127.0.0.1", 9190, 9490, silent=True).port, flush=True)
"""


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "TVM_USE_RUNTIME_LIB": "1"}
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, *arguments], stdin=pipe, stdout=pipe, text=True, env=environment)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()
