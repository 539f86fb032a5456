"""The whole flow on one layer: define, export, compile, save, load elsewhere, verify, time.

Multi-head attention with D 512 and H 8, for any batch and length, compiled for this machine. The exit code is 1 if a
result is over its error budget. Run it with `make demo`, or: python examples/demo.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

import mhsa_compile as mhsa

if TYPE_CHECKING:
    import onnx

    from mhsa_bench.report import BenchReport
    from mhsa_compile.runtime.artifact.artifact import Artifact
    from mhsa_compile.verification.verify import Verdict

ARTIFACT = Path("build/demo.mhsa")
DIMS = {"B": 1, "L": 128, "S": 128}  # for the timing alone: the artifact takes any

# Runs in a process of its own: argv is the artifact, the input, the output. The last lines look at what was loaded.
APPLICATION = """\
import sys
import numpy as np
import mhsa_compile as mhsa

attention = mhsa.load(sys.argv[1])
y = attention(np.load(sys.argv[2]))
np.save(sys.argv[3], y)
"""
INSPECTION = """
import json
with open("/proc/self/maps") as file:
    maps = file.read()
loaded = {name: name in sys.modules for name in ("torch", "onnx", "mhsa_compile.compiler.pipeline")}
print(json.dumps(loaded | {"libtvm_compiler.so": "libtvm_compiler" in maps}))
"""

console = Console()


def main() -> int:
    console.rule("[bold]Multi-head attention: from PyTorch to a library of its own")
    with step("Define it in PyTorch"):
        import torch  # here and not above, since it takes a second or two: the title is already on the screen

        torch.manual_seed(0)
        model = mhsa.MultiHeadAttention(mhsa.AttentionSpec(embed_dim=512, num_heads=8)).eval()
    say(f"D 512, H 8, E 64: {sum(p.numel() for p in model.parameters()):,} parameters, an ordinary nn.Module")
    with step("Export it to ONNX, batch and length symbolic, and check that"):
        from mhsa_compile.frontend.export.export import export

        graph = export(model)
    say(describe(graph))
    with step("Compile it for this machine through TVM, with our own kernels") as detail:
        artifact = mhsa.compile(graph, "native", progress=detail)
    for op in artifact.manifest.ops:
        say(f"{op.op} {op.note}: kernel {op.kernel}, config from {op.source}")
    with step(f"Save the artifact to {ARTIFACT}"):
        ARTIFACT.parent.mkdir(exist_ok=True)
        artifact.save(ARTIFACT, force=True)
    say(", ".join(f"{path.name} {path.stat().st_size:,} bytes" for path in sorted(ARTIFACT.iterdir())))
    run_elsewhere(model)
    with step("Verify it against the float64 oracle, at lengths it never saw"):
        verdict = mhsa.verify(ARTIFACT)
    for case in verdict.cases:
        dims = ", ".join(f"{name} {size}" for name, size in case.dims.items())
        say(f"{dims}: error {case.error:.1e}, budget {case.budget:.1e}")
    with step("Time it and PyTorch, interleaved, and this machine's FMA peak"):
        from mhsa_bench.bench import bench

        report = bench(ARTIFACT, against=("torch",), dims=DIMS, seconds=2.0)
    console.print(summary(artifact, verdict, report))
    say(f"FMA peak: {report.peak_gflops:.0f} GFLOP/s on {report.threads} threads.")
    say(f"What next: mhsa inspect {ARTIFACT}, mhsa bench {ARTIFACT}\n")
    return 0 if verdict.ok else 1


def describe(graph: onnx.ModelProto) -> str:
    """Opset, operators and inputs in one line."""
    operators = [node.op_type for node in graph.graph.node]
    counted = ", ".join(f"{operators.count(name)} {name}" for name in dict.fromkeys(operators))
    (x,) = graph.graph.input
    dims = ", ".join(dim.dim_param or str(dim.dim_value) for dim in x.type.tensor_type.shape.dim)
    return f"opset {graph.opset_import[0].version}, input {x.name} ({dims}), operators: {counted}"


def run_elsewhere(model: mhsa.MultiHeadAttention) -> None:
    """Loads and calls the artifact in a fresh process; shows what that loaded, and how near PyTorch the result is."""
    import torch

    x = np.random.default_rng(0).standard_normal((3, 197, 512), dtype=np.float32)
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "x.npy"), Path(folder, "y.npy")
        np.save(source, x)
        with step("Load and call it in a fresh process, without PyTorch and ONNX"):
            command = [sys.executable, "-c", APPLICATION + INSPECTION, ARTIFACT, source, result]
            child = subprocess.run(command, capture_output=True, text=True, check=False)
        if child.returncode:
            sys.exit(f"The process failed:\n{child.stderr}")
        y = np.load(result)
    console.print(Syntax(APPLICATION.rstrip(), "python", theme="ansi_dark", background_color="default", padding=(0, 4)))
    loaded = json.loads(child.stdout)
    say("loaded there: " + ", ".join(f"{name} {'YES' if there else 'no'}" for name, there in loaded.items()))
    with torch.no_grad():
        difference = np.abs(y - model(torch.from_numpy(x)).numpy()).max()
    say(f"x {x.shape} -> y {y.shape}, largest difference to PyTorch {difference:.1e}")
    if any(loaded.values()):
        sys.exit("The runtime loaded more than it may.")


def summary(artifact: Artifact, verdict: Verdict, report: BenchReport) -> Table:
    target = artifact.manifest.target
    rows = {row.name: row for row in report.rows}
    ours, torch = rows["mhsa_compile"], rows["torch"]
    title = "base128: B 1, L 128, D 512, H 8, float32"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("target", "error / budget", "latency", "PyTorch", "share of peak"):
        table.add_column(column)
    table.add_row(
        f"{target.name} ({target.tvm.mcpu or target.tvm.mtriple})",
        f"{verdict.worst.error:.1e} / {verdict.worst.budget:.1e} " + ("[green]ok[/]" if verdict.ok else "[red]FAIL[/]"),
        *(f"{row.median_us / 1e3:.2f} ms" if row.median_us else row.missing for row in (ours, torch)),
        f"{ours.share_of_peak:.0%}" if ours.share_of_peak else "not known",
    )
    return table


@contextmanager
def step(title: str) -> Iterator[Callable[[str], None]]:
    """Says what is being done, then how long it took; yields a function that adds a detail while it runs."""
    started = time.perf_counter()
    with console.status(f"{title} ...") as status:
        yield lambda detail: status.update(f"{title}: {detail} ...")
    console.print(f"[green]✓[/] {title} [dim]({time.perf_counter() - started:.1f} s)[/]", highlight=False)


def say(text: str) -> None:
    console.print(Padding(Text(text, "dim"), (0, 0, 0, 2)))


if __name__ == "__main__":
    sys.exit(main())
