"""Peak memory of one forward, in a fresh process, as a multiple of inputs + weights + outputs.

    python benchmarks/memory.py [--length 16384] [--dtype float32] [--window 512] [--json]

Of the core alone the ratio says whether an array of all scores, or a copy of an input, was ever made. Of a block it is
above 1 by what the projections must leave somewhere: q, k, v and the heads' outputs.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import mhsa_compile as mhsa
from mhsa_compile.bench.workloads import Workload, compile_workload
from mhsa_compile.spec.checks import DTYPES

CHILD = "--in-child"


def main() -> int:
    if sys.argv[1:2] == [CHILD]:
        print(json.dumps(forward(Path(sys.argv[2]), int(sys.argv[3]))))
        return 0
    options = parse()
    for kind in ("core", "block"):
        sizes = measured(kind, options)
        ratio = sizes["peak"] / sizes["ideal"]
        if options.json:
            print(json.dumps({"kind": kind, "length": options.length, "ratio": ratio, **sizes}))
        else:
            peak, ideal = (f"{sizes[name] / 2**20:,.0f} MiB" for name in ("peak", "ideal"))
            print(
                f"{kind}, L = {options.length}: {peak} at the peak, {ideal} of inputs, weights and outputs: {ratio:.2f}"
            )
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--window", type=int, help="keys that a query sees before itself; by default all, causally")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def measured(kind: str, options: argparse.Namespace) -> dict[str, int]:
    """What `forward` returns in a fresh process, in bytes: {"peak": ..., "ideal": ...}"""
    window = None if options.window is None else (options.window, 0)
    spec = mhsa.AttentionSpec(embed_dim=768, num_heads=12, causal=True, window=window, dtype=options.dtype)
    workload = Workload("memory", kind, "memory", spec, 1, options.length, options.length)
    with tempfile.TemporaryDirectory() as folder:
        artifact = compile_workload(workload).save(Path(folder) / "memory.mhsa")
        command = [sys.executable, __file__, CHILD, str(artifact.path), str(options.threads)]
        child = subprocess.run(command, capture_output=True, text=True, check=True)
    sizes: dict[str, int] = json.loads(child.stdout)
    return sizes


def forward(path: Path, threads: int) -> dict[str, int]:
    """Calls the artifact in a process that has only the runtime. Returns {"peak": ..., "ideal": ...}: the bytes
    resident at the peak beyond those before the artifact, and those of inputs, weights and outputs."""
    import ml_dtypes
    import numpy as np

    from mhsa_compile.runtime import compiled_attention, tvm_runtime

    tvm_runtime.start()
    before = status("VmRSS")
    attention = compiled_attention.load(path, threads=threads)
    rng = np.random.default_rng(0)
    dtypes = {"bfloat16": np.dtype(ml_dtypes.bfloat16)}
    inputs = []
    for info in attention.inputs:
        array = np.empty(info.dims, dtypes.get(info.dtype, info.dtype))
        for part in array.reshape(-1, info.dims[-1]):  # row by row: a wider array of random numbers would be the peak
            part[:] = rng.standard_normal(info.dims[-1], np.float32)
        inputs.append(array)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from what is resident
    y = attention(*inputs)
    peak = status("VmHWM") - before
    weights = sum(int(np.prod(info.dims)) * y.itemsize for info in attention.manifest.weights)
    return {"peak": peak, "ideal": sum(array.nbytes for array in inputs) + y.nbytes + weights}


def status(name: str) -> int:
    """The bytes that the line `name` of /proc/self/status tells."""
    line = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert line is not None
    return 1024 * int(line.group(1))


if __name__ == "__main__":
    sys.exit(main())
