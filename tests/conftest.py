"""Set up before any test module: two pytest processes share the machine, so each library gets one thread; and no test
sees what whoever runs it has tuned or compiled."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from zlib import crc32

os.environ.setdefault("OMP_NUM_THREADS", "1")

import atexit
import copy
import gc
import shutil
import tempfile
from typing import Any

import pytest
from hypothesis import settings

gc.disable()  # until all is imported: `pytest_collection_finish`
# Child processes find what the tests share, and look for data there as well.
os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="mhsa-tests-")
os.environ["MHSA_CACHE"] = "0"  # what is tested is compiled; tests of the cache switch it on, in a folder of their own
# Tests hold what they compile against references of their own. MHSA_CHECK=1 tries the check on all that they compile.
os.environ.setdefault("MHSA_CHECK", "0")
atexit.register(shutil.rmtree, os.environ["XDG_DATA_HOME"], ignore_errors=True)

# The same examples on every run, kept nowhere; a slow machine is no failure.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")

# Nor do examples come from the sources of whatever modules there are, which to read takes seconds of each process.
with suppress(ImportError, AttributeError):  # insides of Hypothesis': without them the suite takes longer
    from hypothesis.internal.conjecture import providers

    providers._get_local_constants = lambda nothing=providers._local_constants: nothing


if os.environ.get("MHSA_EMULATED_TILES") == "1":
    from support.tiles import emulator

    emulator.refuse()

    @pytest.fixture(scope="session", autouse=True)
    def tiles_emulated() -> Iterator[None]:
        """pytest's own handler of SIGILL is there by now, and this one comes before it."""
        emulator.install()
        yield
        assert not emulator.held()


@pytest.fixture(scope="session", autouse=True)
def exporter_prepared_once() -> None:
    """torch.onnx.export prepares for each graph anew what does not depend on it, more than half of its work on a small
    one: it reads the sources of torchlib's 500 functions, writes their signatures, and names every composite operator
    of PyTorch's. A process of the suite exports hundreds of graphs."""
    import torch

    try:  # insides of PyTorch's: without them the suite takes longer, and is right
        from torch._export import utils
        from torch.onnx._internal._lazy_import import onnxscript_apis
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        name_all = utils._materialize_cpp_cia_ops
        complete = cache(ONNXRegistry.from_torchlib)
        registrations = torch._C._dispatch_get_registrations_for_dispatch_key
    except (ImportError, AttributeError):
        return

    onnxscript_apis.get_torchlib_ops = cache(onnxscript_apis.get_torchlib_ops)

    def from_torchlib(opset_version: int) -> ONNXRegistry:
        registry = copy.copy(complete(opset_version=opset_version))
        registry.functions = {name: list(found) for name, found in registry.functions.items()}  # exports may add to it
        return registry

    ONNXRegistry.from_torchlib = staticmethod(from_torchlib)
    named = set[str]()

    def name_new_ones() -> None:
        there = set(registrations("CompositeImplicitAutograd"))
        if not there <= named:
            name_all()
            named.update(there)

    utils._materialize_cpp_cia_ops = name_new_ones


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", metavar="K/N", help="of the tests chosen only the K-th of N parts, by their names")


LEFT_OUT = pytest.StashKey[Counter[str]]()  # by marker, how many tests the run leaves out
MARKERS = ("thorough", "arm", "cuda", "slow", "gpu")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the cases that their tests name. A name that is no case's fails, where whole files are collected."""
    from support.thorough_cases import failing, mark_cases

    absent = mark_cases(items)
    if not any("::" in argument for argument in config.args):
        items += failing(absent)


@pytest.hookimpl(specname="pytest_collection_modifyitems", trylast=True)  # after `-m` has chosen
def pytest_keep_slice(config: pytest.Config, items: list[pytest.Item]) -> None:
    if wanted := config.getoption("--slice"):
        part, parts = map(int, wanted.split("/"))
        others = [item for item in items if crc32(item.nodeid.encode()) % parts != part % parts]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if crc32(item.nodeid.encode()) % parts == part % parts]


def pytest_deselected(items: list[pytest.Item]) -> None:
    marks = (next((mark for mark in MARKERS if item.get_closest_marker(mark)), None) for item in items)
    count(items[0].config, Counter(mark for mark in marks if mark))


def count(config: pytest.Config, left_out: Counter[str]) -> None:
    config.stash[LEFT_OUT] = config.stash.get(LEFT_OUT, Counter()) + left_out


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left_out"] = dict(session.config.stash.get(LEFT_OUT, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each process of pytest-xdist collects all tests: what the first leaves out, all do."""
    if LEFT_OUT not in node.config.stash:
        count(node.config, Counter(getattr(node, "workeroutput", {}).get("left_out", {})))


def pytest_collection_finish() -> None:
    """What the imports have left stays: millions of objects that each collection of garbage would go through. What
    comes is looked through seldom: exporting and lowering make many objects, and hardly a cycle."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="module", autouse=True)
def native_code(request: pytest.FixtureRequest) -> Iterator[None]:
    """What no vectors decide `make test` compiles for any CPU; a run of what is thorough, too, has all for this one."""
    from support import this_cpu

    with this_cpu.native_of(request.path, request.config):
        yield


@pytest.fixture
def float64() -> Iterator[None]:
    """PyTorch's default dtype while a test runs, which begins with the same random numbers every time."""
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def cuda_compiler() -> None:
    """Stands before tests that compile CUDA C++: they are skipped where nothing can, and fail in CI."""
    from support.cuda import cuda_compiler

    cuda_compiler.require()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What was left out; how many runs on emulated machines and GPUs were held against float64, and the worst."""
    from support import runs_noted

    if left_out := config.stash.get(LEFT_OUT, None):
        counts = ", ".join(f"{number} {marker}" for marker, number in left_out.items())
        terminalreporter.write_line(f"Left out: {counts}. `make test-all` runs all but those for a GPU.")
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    noted = [value for report in reports for name, value in report.user_properties if name == runs_noted.PROPERTY]
    for line in runs_noted.summary(noted):
        terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def _modes_as_they_were() -> Iterator[None]:
    """PyTorch's modes belong to the thread: one that a test leaves on would change what the next ones mean."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
