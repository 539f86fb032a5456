"""Every node test that the installed onnx ships, through compile, load and call: right, refused, or a fault.

python -m support.node_sweep [--slice 3/8] ['^test_(resize|isinf)']

Right is every output that onnx states, in number, shape, dtype and value, to the test's own tolerance. Refused is an
error of this library's that blames the file or the call. A fault is a wrong value, a raw error, one of this library's
that blames the compiler, a crash, or more than a minute. Exit code 1 if there is a fault. Tests of random numbers are
left out, and those that spell an operator's definition out.
"""

from __future__ import annotations

import argparse
import json
import re
import select
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import import_module

import numpy as np
from onnx import TensorProto, numpy_helper
from onnx.backend.test.case.test_case import TestCase

import mhsa_compile as mhsa
from mhsa_compile.errors import BuildError, MhsaError

FINE = ("right", "refused")
SECONDS = 60
_EACH = 150  # tests of one worker, so that what they leave in memory goes
_START = 120
_RANDOM = re.compile(r"bernoulli|random|training_dropout(?!.*zero_ratio)")
_NARROW = {"bfloat16": 2**-6, "float16": 2**-9}  # two units in the last place


def cases(modules: Iterable[str] | None = None) -> dict[str, TestCase]:
    """The tests by name: all, or at least those of some modules of onnx's. Collecting all takes eight seconds."""
    warnings.simplefilter("ignore")
    from onnx.backend.test.case import node

    if modules is None:
        node.collect_testcases(None)
    for module in modules or ():
        import_module(f"{node.__name__}.{module}")
    every = {case.name: case for case in node._NodeTestCases}
    return {name: case for name, case in every.items() if not _RANDOM.search(name) and "_expanded" not in name}


def judge(case: TestCase) -> tuple[str, str]:
    """(right, refused, wrong or defect; why)."""
    try:
        compiled = mhsa.load(mhsa.compile(case.model, without_attention="accept"))
        for inputs, expected in case.data_sets:
            results = compiled(*map(_array, inputs))
            outputs = results if isinstance(results, tuple | list) else [results]
            if (difference := _difference(case, outputs, expected)) is not None:
                return "wrong", difference
    except BuildError as error:
        return "defect", str(error)
    except MhsaError as error:
        return "refused", str(error)
    return "right", ""


def _array(value: object) -> np.ndarray:
    """Some tests hold values of dtypes that NumPy has not as onnx's own tensors."""
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


def _difference(case: TestCase, outputs: object, expected: object) -> str | None:
    ours, theirs = ([_array(value) for value in values] for values in (outputs, expected))
    if len(ours) != len(theirs):
        return f"{len(ours)} outputs, not {len(theirs)}"
    for x, y in zip(ours, theirs, strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{x.dtype}{x.shape}, not {y.dtype}{y.shape}"
        wide = np.complex128 if y.dtype.kind == "c" else y.dtype if y.dtype.kind in "biu" else np.float64
        rtol = max(case.rtol, _NARROW.get(y.dtype.name, 0))
        if not np.allclose(x.astype(wide), y.astype(wide), rtol=rtol, atol=case.atol, equal_nan=True):
            return f"{x.ravel()[:3]}, not {y.ravel()[:3]}"
    return None


def work() -> None:
    """Reads names of tests, and writes a line for each."""
    all_cases = cases()
    print("ready", flush=True)
    for name in sys.stdin:
        try:
            verdict, why = judge(all_cases[name.strip()])
        except BaseException as error:
            verdict, why = "raw", f"{type(error).__name__}: {error}"
        print(json.dumps([verdict, " ".join(why.split())[:300]]), flush=True)


class Worker:
    """A process that judges one test after the other; a new one where it crashed or hung."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "support.node_sweep", "--work"]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True, bufsize=1)
        self.judged = 0
        if self._line(_START) is None:
            raise SystemExit("a worker did not start: python -m support.node_sweep --work says why")

    def judge(self, name: str) -> tuple[str, str]:
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self.judged += 1
        line = self._line(SECONDS)
        if line is None:
            self.end()
            return "hang", f"over {SECONDS} s"
        if not line:
            return "crash", f"exit code {self._process.wait()}"
        verdict, why = json.loads(line)
        return verdict, why

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _line(self, seconds: float) -> str | None:
        output = self._process.stdout
        assert output is not None
        return output.readline() if select.select([output], [], [], seconds)[0] else None


def verdicts(names: list[str]) -> Iterator[tuple[str, str, str]]:
    """(name, verdict, why) of each test."""
    worker: Worker | None = None
    try:
        for name in names:
            if worker is None or not worker.runs or worker.judged >= _EACH:
                if worker is not None:
                    worker.end()
                worker = Worker()
            yield (name, *worker.judge(name))
    finally:
        if worker is not None:
            worker.end()


def main() -> int:
    parser = argparse.ArgumentParser(description="How many of ONNX's node tests are right.")
    parser.add_argument("names", nargs="?", default="", help="a regular expression")
    parser.add_argument("--slice", default="1/1", help="I/N: one test of N, from the I-th on")
    parser.add_argument("--verbose", "-v", action="store_true", help="a line for each test")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
        return 0
    first, step = map(int, options.slice.split("/"))
    names = [name for name in cases() if re.search(options.names, name)][first - 1 :: step]
    count: Counter[str] = Counter()
    for name, verdict, why in verdicts(names):
        count[verdict] += 1
        if options.verbose or verdict not in FINE:
            print(f"{verdict:8} {name}: {why}", flush=True)
    kinds = ("right", "refused", "wrong", "raw", "defect", "crash", "hang")
    print(f"{len(names)} node tests: " + ", ".join(f"{count[kind]} {kind}" for kind in kinds))
    return 1 if set(count) - {*FINE} else 0


if __name__ == "__main__":
    sys.exit(main())
