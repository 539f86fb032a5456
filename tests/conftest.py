"""Set up before any test module: two pytest processes share the machine, so each library gets one thread; and no test
sees what whoever runs it has tuned."""

from __future__ import annotations

import os
from functools import cache

os.environ.setdefault("OMP_NUM_THREADS", "1")

import atexit
import shutil
import tempfile

import pytest
from hypothesis import settings

# Child processes look there as well.
os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="mhsa-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_DATA_HOME"], ignore_errors=True)

# The same examples on every run, kept nowhere; a slow machine is no failure.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def torchlib_read_once() -> None:
    """torch.onnx.export reads the sources of torchlib's 500 functions anew each time, a third of its work on a small
    graph. They stay as they are, and a process of the suite exports hundreds of graphs."""
    from torch.onnx._internal._lazy_import import onnxscript_apis

    onnxscript_apis.get_torchlib_ops = cache(onnxscript_apis.get_torchlib_ops)


@pytest.fixture(scope="session")
def cuda_compiler() -> None:
    """For tests that compile CUDA C++: they are skipped where nothing can, and fail in CI."""
    import cuda_compiler

    cuda_compiler.require()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many runs on emulated machines and on GPUs were held against float64, and the worst of them."""
    import runs_noted

    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    noted = [value for report in reports for name, value in report.user_properties if name == runs_noted.PROPERTY]
    for line in runs_noted.summary(noted):
        terminalreporter.write_line(line)
