"""Instructions that a call executes on an ARM CPU, counted under QEMU: ours, ONNX Runtime's and XNNPACK's (in LiteRT).

    python benchmarks/arm_instructions.py [--workload NAME|GROUP ...] [--target neoverse-n1] [--json FILE]

No time is measured: an emulator has none to offer. What is compared is how much a CPU is asked to do for the same
result: all instructions of a call, the interpreter's few thousand included, by the multiply-adds that the mathematics
needs. A count is the difference between two processes, one with more calls. One thread; float32.

It needs what `tests/support/arm/machine.py` does, and a QEMU of version 6 to 8 with plugins: Debian's qemu-user.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tflite_graph
from rich.console import Console
from rich.table import Table

import mhsa_compile as mhsa
from mhsa_bench.peers import onnx_graph
from mhsa_bench.peers.peer import Problem
from mhsa_compile.bench.workloads import Workload, choose, module_of
from mhsa_compile.verification.random_inputs import random_inputs

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
arm_machine = importlib.import_module("support.arm.machine")

WORKLOADS = ("tiny", "base128", "vit197", "core384", "core512c", "decode2048")
ENOUGH = 500_000_000
"""Multiply-adds that the second process does beyond those of the first: Python's start varies by a million."""
PEERS = ("onnxruntime", "ai-edge-litert==2.3.0")
"""The packages of the peers, which have wheels for aarch64 of their own."""
# ONNX Runtime looks for its CPU there, and dies where it finds an x86 one: what QEMU before 8.1 shows.
CPUINFO = """\
processor\t: 0
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1
"""


@dataclass(frozen=True)
class Count:
    """Counts of one call: all instructions, those that multiply and add vectors, and the multiply-adds it needs."""

    workload: str
    candidate: str
    instructions: int
    multiplying: int
    needed: int

    @property
    def each(self) -> float:
        """Instructions for each multiply-add; a vector of four float32 makes 0.25 the least."""
        return self.instructions / self.needed


@dataclass(frozen=True)
class Counter:
    """QEMU with the plugin, in front of a system whose /proc/cpuinfo is ARM's."""

    qemu: str
    cpu: str
    root: Path
    folder: Path

    def count(self, runtime: str, path: Path, inputs: Path, least: int) -> tuple[int, int]:
        """(all, multiplying) instructions of one call, which needs so many multiply-adds."""
        more = max(2, ENOUGH // least)
        first, second = (self._process(runtime, path, inputs, calls) for calls in (1, 1 + more))
        return (second[0] - first[0]) // more, (second[1] - first[1]) // more

    def _process(self, runtime: str, path: Path, inputs: Path, calls: int) -> tuple[int, int]:
        log = self.folder / "counted"
        options = ["-plugin", f"file={self.folder / 'plugin.so'}", "-d", "plugin", "-D", log]
        program = [self.root / "usr/bin/python3.11", "-S", HERE / "arm_calls.py", runtime, path, inputs, str(calls)]
        environment = arm_machine.environment(self.root, self.cpu) | {"PYTHONHASHSEED": "0"}
        environment["PYTHONPATH"] += f"{os.pathsep}{self.folder / 'peers'}"
        environment["QEMU_LD_PREFIX"] = str(self.folder / "system")
        process = subprocess.run([self.qemu, *options, *program], env=environment, capture_output=True, text=True)
        if process.returncode:
            sys.exit(f"{runtime} failed under QEMU: {process.stderr}")
        _, instructions, multiplying = log.read_text().split()
        return int(instructions), int(multiplying)


def main() -> int:
    options = parse()
    table = Table("workload", "candidate", *HEADINGS, title=f"Instructions of a call, {options.target}, one thread")
    counts = []
    with counter(options.target) as ready:
        for workload in choose(options.workload):
            for count in counted(workload, options.target, ready):
                counts.append(count)
                share = f"{count.multiplying / count.instructions:.1%}"
                millions = f"{count.instructions / 1e6:.2f}"
                table.add_row(count.workload, count.candidate, millions, f"{count.each:.3f}", share)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([asdict(count) for count in counts], indent=1) + "\n")
    return 0


HEADINGS = ("millions", "for each multiply-add", "that multiply and add")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--target", default="neoverse-n1", help="one whose CPU QEMU knows by that name")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


@contextmanager
def counter(cpu: str) -> Iterator[Counter]:
    qemu = shutil.which("qemu-aarch64")
    if qemu is None or "-plugin" not in subprocess.run([qemu, "-h"], capture_output=True, text=True).stdout:
        sys.exit("no qemu-aarch64 with plugins on this machine: apt-get install qemu-user")
    root = arm_machine.prepared()
    with tempfile.TemporaryDirectory(prefix="mhsa-count-") as name:
        folder = Path(name)
        compiler = [sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", "-O2"]
        subprocess.run([*compiler, "-o", folder / "plugin.so", HERE / "count_instructions.c"], check=True)
        arm_machine.install(folder / "peers", list(PEERS), "--no-deps")
        (folder / "system/proc").mkdir(parents=True)
        (folder / "system/proc/cpuinfo").write_text(CPUINFO)
        for part in ("lib", "usr"):
            (folder / "system" / part).symlink_to(root / part)
        yield Counter(qemu, cpu, root, folder)


def counted(workload: Workload, target: str, ready: Counter) -> Iterator[Count]:
    artifact = mhsa.compile(module_of(workload), target, dims=workload.dims)
    arrays = random_inputs(artifact.manifest, workload.dims)
    problem = Problem(artifact, [arrays])
    spec, sizes = workload.spec, problem.sizes
    flops = spec.attention_flops(**sizes) + (0 if problem.is_core else spec.projection_flops(**sizes))
    for name, runtime, path, inputs in candidates(problem, ready.folder):
        yield Count(workload.name, name, *ready.count(runtime, path, inputs, flops // 2), flops // 2)


def candidates(problem: Problem, folder: Path) -> Iterator[tuple[str, str, Path, Path]]:
    """(name, runtime, model, inputs) of each candidate, whose files are written into the folder."""
    (arrays,) = problem.inputs
    own, inputs = folder / "own.npz", folder / "onnx.npz"
    np.savez(own, **arrays)
    yield "mhsa_compile", "artifact", problem.artifact.path, own
    groups = problem.spec.num_kv_heads != problem.spec.num_heads
    graph = (onnx_graph.fused_grouped if groups else onnx_graph.fused_multi_head)(problem)
    (folder / "model.onnx").write_bytes(graph.SerializeToString())
    np.savez(inputs, **onnx_graph.inputs(problem, arrays, [value.name for value in graph.graph.input]))
    (attention,) = (node.op_type for node in graph.graph.node if node.op_type.endswith("Attention"))
    yield f"ONNX Runtime, {attention}", "onnxruntime", folder / "model.onnx", inputs
    if tflite_graph.is_plain(problem):
        place = folder / "peers/ai_edge_litert/schema_py_generated.py"
        stated = importlib.util.spec_from_file_location("schema_py_generated", place)
        schema = importlib.util.module_from_spec(stated)
        stated.loader.exec_module(schema)
        (folder / "model.tflite").write_bytes(tflite_graph.written(problem, schema))
        yield "XNNPACK, in LiteRT", "litert", folder / "model.tflite", own


if __name__ == "__main__":
    sys.exit(main())
