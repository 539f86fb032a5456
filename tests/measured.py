"""A tiny job for devices to measure: a linear operation of odd sizes, ways to compute it, and ways to go wrong."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tvm

from mhsa_compile.build import _linker, pass_context
from mhsa_compile.jobs import Candidate, Job
from mhsa_compile.kernels.cpu.linear import LinearKernel
from mhsa_compile.kernels.operations import LinearOp
from mhsa_compile.profile import detect

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
def job() -> Job:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((1, 3, 5), np.float32)
    weights = [rng.standard_normal((width, 5), np.float32) for width in OP.widths]
    bias = rng.standard_normal(7, np.float32)
    y = np.concatenate([x[0].astype("f8") @ w.T.astype("f8") for w in weights], axis=1)
    y[:, :7] += bias
    return Job((x,), (*weights, bias), ((1, 3, 10), "float32"), np.arange(30), y.reshape(-1), budget=2e-6, flops=300)


@cache
def kernel(**config: int) -> Candidate:
    """The project's own kernel, by default at its default config."""
    profile = detect()
    kernel = LinearKernel()
    emitted = kernel.emit(OP, profile, {**kernel.default(OP, profile), **config})
    functions = {"run": emitted.run, "pack": emitted.pack}
    module = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items()})
    with pass_context():
        library = tvm.compile(module, target=tvm.target.Target(profile.tvm_config()))
    with TemporaryDirectory() as folder:
        path = Path(folder, "candidate.so")
        library.export_library(str(path), fcompile=_linker(profile.link.triple))
        return Candidate(path.read_bytes(), emitted.packed, emitted.constants)


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
