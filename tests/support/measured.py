"""A tiny job for devices to measure: a linear operation of odd sizes, ways to compute it, and ways to go wrong."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from mhsa_compile.hardware.profile import detect
from mhsa_compile.kernels.cpu.linear.kernel import CpuLinearKernel
from mhsa_compile.kernels.interface.ops import LinearOp
from mhsa_compile.tuning.measure.job import Candidate, MeasureJob
from mhsa_compile.tuning.op_jobs import candidate_of, job_of

OP = LinearOp(rows=(1, 3), in_features=5, widths=(7, 3), biased=(True, False), transposed=(False, False))

PLANTED = """
#include <stdint.h>
typedef struct { int32_t type, padding; void *value; } Any;
typedef struct { void *data; } Tensor;
int __tvm_ffi_run(void *self, const Any *arguments, int32_t count, Any *result) {
    const float *mode = ((Tensor *)arguments[count - 2].value)->data;
    float *output = ((Tensor *)arguments[count - 1].value)->data;
    if (mode[0] == 1) *(volatile int *)0 = 1;
    if (mode[0] == 2) for (volatile int go = 1; go;) {}
    for (int i = 0; i < mode[1]; i++) output[i] = mode[2 + i];
    if (mode[0] == 3) { static int calls; if (calls++) *(volatile int *)0 = 1; }
    return 0;
}
"""
RIGHT, CRASHES, HANGS, CRASHES_LATER = range(4)


@cache
def job() -> MeasureJob:
    return job_of(OP, {})


@cache
def kernel() -> Candidate:
    """The project's own kernel at its default config."""
    profile, own = detect(), CpuLinearKernel()
    return candidate_of(OP, own, own.default_config(OP, profile), profile)


@cache
def _planted() -> bytes:
    with TemporaryDirectory() as folder:
        source, library = Path(folder, "planted.c"), Path(folder, "planted.so")
        source.write_text(PLANTED)
        command = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-gnu.2.17", "-shared", "-fPIC"]
        subprocess.run([*command, "-fno-sanitize=undefined", "-o", library, source], check=True)
        return library.read_bytes()


def planted(mode: int, *, off_by: float = 0.0, written: int = 30) -> Candidate:
    """Code that knows the answer, all of it or its beginning, and goes wrong in one way."""
    answer = job().expected + off_by
    return Candidate(_planted(), constants=(np.array([mode, written, *answer], np.float32),))
