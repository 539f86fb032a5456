"""Every kernel for GPUs with the configs of its space, down to machine code, without a GPU: `make cuda-configs`.

    python -m campaigns.cuda_configs --compiler nvrtc --kernels cuda.decode --json build/cuda-configs.json

Operations and targets are those of `cuda_configs`. A config of a space that does not compile is wrong, as is one that
spills, asks for more registers, threads or shared memory than its target has, or does not multiply where it should.
Of spaces of thousands of points those are compiled in which every pair of values of two knobs occurs (`--strength`).
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import multiprocessing
import pickle
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from support.cuda import cuda_code
from support.cuda.cuda_code import Lowered, MachineCode
from support.cuda.cuda_configs import CASES, TARGETS, WHOLE, Case, covering, kernel_of, space

from mhsa_compile.compiler.codegen import cuda_compiler
from mhsa_compile.hardware.profile import CudaProfile, load_profile
from mhsa_compile.tuning.search.space import Point

MULTIPLIES = {
    "cuda.linear_hopper": "HGMMA",
    "cuda.linear": "HMMA",
    "cuda.linear_float32": "FFMA",
    "cuda.decode": "HMMA",
    "cuda.attention_hopper": "HGMMA",
    "cuda.attention": "HMMA",
    "cuda.attention_float32": "FFMA",
}
"""The instruction that a kernel multiplies by, where it is not float32; that multiplies by FFMA alone."""
_HELD_BACK = r"C75\d\d|serialized"
"""The pattern of what ptxas says where it could not leave wgmma under way."""


@dataclass(frozen=True)
class Job:
    case: int
    target: str
    point: Point

    def __str__(self) -> str:
        return f"{self.target} {CASES[self.case].name}: {self.point}"


@dataclass(frozen=True)
class Outcome:
    """What came of a job: of its kernels the most `registers` of a thread and the most bytes of `shared` memory, the
    accesses of local memory, the products, what is `wrong`; and the `source`, by its hash."""

    job: Job
    source: str = ""
    registers: int = 0
    shared: int = 0
    spilled: int = 0
    products: int = 0
    wrong: tuple[str, ...] = ()


def profile_of(target: str) -> CudaProfile:
    profile = load_profile(target)
    assert isinstance(profile, CudaProfile)
    return profile


def jobs(cases: Iterable[int], targets: Sequence[str], strength: int) -> Iterator[tuple[Job, int]]:
    """(what to compile, how many points its space has)."""
    for number in cases:
        for target in targets:
            if target in CASES[number].targets:
                points = space(CASES[number], profile_of(target))
                some = points if len(points) <= WHOLE else covering(points, strength)
                yield from ((Job(number, target, point), len(points)) for point in some)


def done(job: Job, compiler: str, folder: Path) -> Outcome:
    """Compiles what a job says; whatever happens is an outcome."""
    case, profile = CASES[job.case], profile_of(job.target)
    try:
        emitted = kernel_of(case.kernel).emit(case.op, profile, job.point.config)
        lowered = cuda_code.lowered(emitted, profile.tvm.arch)
        source = hashlib.sha256(f"{profile.tvm.arch}\n{lowered.text}".encode()).hexdigest()
        code = compiled(lowered.text, profile.tvm.arch, compiler, folder / source)
    except subprocess.CalledProcessError as error:
        return Outcome(job, wrong=(f"nvcc: {error.stderr.strip()[-500:]}",))
    except Exception as error:
        return Outcome(job, wrong=(f"{type(error).__name__}: {error}",))
    return Outcome(
        job,
        source,
        code.registers,
        max(launch.shared for launch in lowered.launches),
        code.spilled,
        code.instructions[multiplies(case)],
        tuple(wrongs(case, profile, lowered, code, job.point.config.get("blocks", 1))),
    )


def compiled(text: str, arch: str, compiler: str, folder: Path) -> MachineCode:
    """The machine code of CUDA C++, which is compiled once in a run, by whichever process comes first."""
    folder.mkdir(exist_ok=True)
    result = folder / "code"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            code = cuda_code.machine_code(text, arch, folder, by_nvrtc=compiler == "nvrtc")
            for large in ("kernel.cu", "kernel.cubin"):
                (folder / large).unlink()
            result.write_bytes(pickle.dumps(code))
    found = pickle.loads(result.read_bytes())
    assert isinstance(found, MachineCode)
    return found


def multiplies(case: Case) -> str:
    return "FFMA" if case.op.dtype == "float32" else MULTIPLIES.get(case.kernel, "")


def wrongs(case: Case, profile: CudaProfile, lowered: Lowered, code: MachineCode, blocks: int = 1) -> Iterator[str]:
    """What is wrong with the machine code of a case's kernel; `blocks` are those that a multiprocessor has to hold at
    once."""
    if code.spilled or code.stack:
        yield f"spills: {code.spilled} accesses of {code.stack} bytes of local memory"
    if re.search(r"(?<!extern )__shared__", lowered.text):
        yield "shared memory beside what it is launched with"
    available = 1024 * profile.hardware.shared_kib_per_block
    for launch in lowered.launches:
        registers = code.registers_of[launch.kernel]
        held = profile.blocks_at_once(launch.threads, registers, launch.shared)
        if launch.shared > available:
            yield f"{launch.kernel}: {launch.shared} bytes of shared memory of {available}"
        elif held < blocks:
            sizes = f"{launch.threads} threads of {registers} registers and {launch.shared} bytes"
            yield f"{launch.kernel}: of blocks of {sizes} a multiprocessor holds {held}, not {blocks}"
    if not lowered.launches:
        yield "launches nothing"
    unit = multiplies(case)
    if case.kernel in MULTIPLIES and not code.instructions[unit]:
        yield f"no {unit}"
    if unit == "FFMA" and (code.instructions["HMMA"] or code.instructions["HGMMA"]):
        yield "float32 on tensor cores"
    if held_back := re.search(_HELD_BACK, code.said):
        yield f"ptxas: {held_back[0]}"


def campaign(todo: Sequence[tuple[Job, int]], compiler: str, workers: int, console: Console) -> list[Outcome]:
    """Does all jobs; what is wrong is printed when it is found."""
    outcomes: list[Outcome] = []
    with (
        tempfile.TemporaryDirectory(prefix="mhsa-configs-") as folder,
        ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool,
        Progress(console=console) as progress,
    ):
        task = progress.add_task("configs", total=len(todo))
        futures: list[Future[Outcome]] = [pool.submit(done, job, compiler, Path(folder)) for job, _ in todo]
        for future in as_completed(futures):
            outcome = future.result()
            outcomes.append(outcome)
            for words in outcome.wrong:
                progress.console.print(f"{outcome.job}: {words}", markup=False, highlight=False, soft_wrap=True)
            progress.advance(task)
    return outcomes


def rows(todo: Sequence[tuple[Job, int]], outcomes: Iterable[Outcome]) -> list[dict[str, str | int]]:
    """A row of the table for each kernel and target."""
    points: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    for job, count in todo:
        points[CASES[job.case].kernel, job.target][job.case] = count
    found: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        found[CASES[outcome.job.case].kernel, outcome.job.target].append(outcome)
    return [
        {
            "kernel": kernel,
            "target": target,
            "operations": len(points[kernel, target]),
            "points": sum(points[kernel, target].values()),
            "configs": len(here),
            "sources": len({outcome.source for outcome in here if outcome.source}),
            "compiled": sum(bool(outcome.source) for outcome in here),
            "spilled": sum(outcome.spilled > 0 for outcome in here),
            "spilled_words": max(outcome.spilled for outcome in here),
            "registers": max(outcome.registers for outcome in here),
            "shared_bytes": max(outcome.shared for outcome in here),
            "wrong": sum(bool(outcome.wrong) for outcome in here),
        }
        for (kernel, target), here in sorted(found.items())
    ]


def table(made: Iterable[dict[str, str | int]]) -> Table:
    result = Table("kernel", "target", box=SIMPLE)
    names = ("operations", "points", "configs", "sources", "compiled", "spilled", "(words)", "registers")
    for name in (*names, "shared bytes", "wrong"):
        result.add_column(name, justify="right")
    for row in made:
        result.add_row(*(f"{value:,}" if isinstance(value, int) else value for value in row.values()))
    return result


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compiler", choices=["nvcc", "nvrtc"], help="by default nvcc where it is on the path")
    parser.add_argument("--kernels", nargs="+", choices=sorted({c.kernel for c in CASES}), help="by default all")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS, help="by default all")
    parser.add_argument(
        "--strength", type=int, default=2, help=f"of spaces of more than {WHOLE} points: each so many values of "
        "different knobs that occur together occur; 0 is all points (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="where to write the table and every outcome")
    given = parser.parse_args(words)
    if given.compiler == "nvcc" and cuda_code.NVCC is None:
        parser.error("nvcc is not on the path")
    console, started = Console(), time.monotonic()
    compiler = given.compiler or cuda_compiler.compiler()[0]
    numbers = [i for i, case in enumerate(CASES) if not given.kernels or case.kernel in given.kernels]
    todo = list(jobs(numbers, given.targets, given.strength))
    console.print(f"{len(todo):,} configs by {compiler}, {given.workers} processes")
    outcomes = campaign(todo, compiler, given.workers, console)
    made, seconds = rows(todo, outcomes), time.monotonic() - started
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    Console(width=150).print(table(made))
    wrong = sum(bool(outcome.wrong) for outcome in outcomes)
    console.print(
        f"{len(outcomes):,} configs in {seconds:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of CPU, by {compiler}; "
        f"{wrong} of them wrong"
    )
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        listed = [{"operation": CASES[o.job.case].name, **asdict(o)} for o in outcomes]
        given.json.write_text(json.dumps({"compiler": compiler, "seconds": seconds, "rows": made, "outcomes": listed}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
