"""What each way in gains over the same PyTorch without it: each candidate in a process of its own, taking turns.

    python benchmarks/ways.py [--size 256 MiniLM BERT] [--way accelerate backend ...] [--json FILE]

Three sizes, each of two layers, one sequence of 128 tokens, float32, random weights. What a way is held against is the
plain model that its user would have: PyTorch's layers with their fast path, a model of transformers with SDPA. What a
candidate returned is held against that model's result before it is timed.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import numpy as np
from figures import TurnFigures, command_line, show, write
from processes import Times, Turn, answer_turns, check_result, one_caller, rounds, started, why_unprepared
from rich.table import Table

TOKENS, LAYERS, WORDS = 128, 2, 1000
SETS = 4
"""How many sets of inputs calls take in turn."""
WRONG = 1e-3
"""A share of the largest value: who is farther from the plain model computes something else, and is not timed."""
FIRST_RESULT, ARTIFACT, MODEL, PROGRAM, NOTE = "first.npy", "model.mhsa", "model.onnx", "program", "accelerate.txt"


class Size(NamedTuple):
    """D embed, H heads, F features between the linears."""

    D: int
    H: int
    F: int


SIZES = {"256": Size(256, 4, 512), "MiniLM": Size(384, 12, 1536), "BERT": Size(768, 12, 3072)}


class Way(NamedTuple):
    """A way in: the plain model that it is held against, and what gives calls, from that model, inputs and a folder."""

    plain: str
    calls: Callable[[Any, list[Any], Path, int], list[Callable[[], Any]]]


@dataclass
class Figures(TurnFigures):
    """By size and candidate; `notes` is what reports of ours said, of a plain model and a size."""

    notes: dict[str, str] = field(default_factory=dict, kw_only=True)


# The plain models


def attention_of(size: Size) -> Any:
    import torch

    class Attention(torch.nn.Module):
        """PyTorch's attention of one sequence with itself."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.MultiheadAttention(size.D, size.H, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(x, x, x, need_weights=False)[0]
            return result

    return Attention()


def encoder_of(size: Size) -> Any:
    import torch

    layer = torch.nn.TransformerEncoderLayer(size.D, size.H, size.F, batch_first=True)
    return torch.nn.TransformerEncoder(layer, LAYERS)


def bert_of(size: Size) -> Any:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": size.D, "num_attention_heads": size.H, "intermediate_size": size.F}
    config = BertConfig(**sizes, num_hidden_layers=LAYERS, vocab_size=WORDS, attn_implementation="sdpa")
    model = BertModel(config, add_pooling_layer=False)
    model.config.return_dict = False
    return model


PLAIN: dict[str, Callable[[Size], Any]] = {"attention": attention_of, "encoder": encoder_of, "bert": bert_of}


def plain_model(name: str, size: Size) -> tuple[Any, list[Any]]:
    """A plain model with weights at random, the same in every process, and sets of inputs."""
    import torch

    torch.manual_seed(0)
    model = PLAIN[name](size).eval()
    if name == "bert":
        return model, [torch.randint(0, WORDS, (1, TOKENS)) for _ in range(SETS)]
    return model, [torch.randn(1, TOKENS, size.D) for _ in range(SETS)]


# The ways


def by_pytorch(model: Any, sets: list[Any], folder: Path, threads: int) -> list[Callable[[], Any]]:
    import torch

    def call(x: Any) -> Any:
        with torch.inference_mode():
            result = model(x)
        return result[0] if isinstance(result, tuple) else result

    return [lambda x=x: call(x) for x in sets]


def by_artifact(model: Any, sets: list[Any], folder: Path, threads: int) -> list[Callable[[], Any]]:
    import mhsa_compile as mhsa

    compiled = mhsa.load(folder / ARTIFACT, threads=threads)
    return [lambda array=array: compiled(array) for array in map(np.asarray, sets)]


def accelerated(model: Any, sets: list[Any], folder: Path, threads: int) -> list[Callable[[], Any]]:
    import mhsa_compile as mhsa

    report = mhsa.accelerate(model)
    calls = by_pytorch(model, sets, folder, threads)
    calls[0]()
    (folder / NOTE).write_text(report.layers[0].outcome())
    return calls


def accelerated_linears(model: Any, sets: list[Any], folder: Path, threads: int) -> list[Callable[[], Any]]:
    import mhsa_compile as mhsa

    mhsa.accelerate(model, linears=True, layers="parts")
    return by_pytorch(model, sets, folder, threads)


def by_interface(model: Any, sets: list[Any], folder: Path, threads: int) -> list[Callable[[], Any]]:
    from mhsa_compile.integrations import transformers

    transformers.register()
    model.set_attn_implementation("mhsa")
    return by_pytorch(model, sets, folder, threads)


def by_backend(model: Any, sets: list[Any], folder: Path, threads: int) -> list[Callable[[], Any]]:
    import torch

    compiled = torch.compile(model, backend="mhsa", options={"threads": threads})
    return by_pytorch(compiled, sets, folder, threads)


PLAIN_WAY = "plain"
WAYS = {
    "spec": Way("attention", by_artifact),
    "accelerate": Way("encoder", accelerated),
    "accelerate, transformers": Way("bert", accelerated),
    'accelerate, linears, layers="parts"': Way("bert", accelerated_linears),
    'attn_implementation="mhsa"': Way("bert", by_interface),
    'torch.compile(backend="mhsa")': Way("bert", by_backend),
    "ONNX file": Way("bert", by_artifact),
    "C++ bundle": Way("encoder", by_artifact),
}
"""The bundle is a program that times its own calls; its artifact's result is what is held against the plain model's."""


# The process of one candidate


@contextmanager
def opened(candidate: str, plain: str, size: str, folder: Path, threads: int) -> Iterator[Sequence[Callable[[], Any]]]:
    """A call for each of several sets of inputs. Raises ValueError where the first result is not the plain model's."""
    import torch

    torch.set_num_threads(threads)
    model, sets = plain_model(plain, SIZES[size])
    calls = (by_pytorch if candidate == PLAIN_WAY else WAYS[candidate].calls)(model, sets, folder, threads)
    check_result(calls[0](), folder / FIRST_RESULT, WRONG)
    yield calls


def program_turn(turn: Turn, folder: Path, threads: int) -> Times:
    """A turn of the bundle's program, which says how long the median of its calls took."""
    words = [str(folder / PROGRAM / "attention"), "--threads", str(threads), "--dim", "B=1", "--dim", f"L={TOKENS}"]
    ended = subprocess.run([*words, "--repeat", "50"], capture_output=True, text=True, check=True, cwd=folder / PROGRAM)
    seconds = float(ended.stdout.partition(" ms a call")[0].split()[-1]) / 1e3
    return Times([seconds], 1 / seconds)


def serve(candidate: str, plain: str, size: str, folder: Path, threads: int) -> None:
    with opened(candidate, plain, size, folder, threads) as calls:
        if candidate == "C++ bundle":
            answer_turns(nullcontext(folder), lambda turn, place: program_turn(turn, place, threads))
        else:
            answer_turns(nullcontext(calls), lambda turn, ready: one_caller(turn.seconds, ready))


# The process that asks


def prepare(plain: str, size: str, folder: Path, candidates: Sequence[str]) -> None:
    """Writes the plain model's result and the artifacts of the candidates, in a process of its own."""
    import torch

    import mhsa_compile as mhsa

    model, sets = plain_model(plain, SIZES[size])
    np.save(folder / FIRST_RESULT, by_pytorch(model, sets, folder, 1)[0]().numpy())
    if "spec" in candidates:
        mhsa.compile(mhsa.from_torch(model.layer)).save(folder / ARTIFACT)
    if "ONNX file" in candidates:
        dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=512)}
        program = torch.onnx.export(model, (sets[0],), dynamic_shapes=(dims,), dynamo=True, verbose=False)
        assert program is not None
        program.save(folder / MODEL)
        mhsa.compile(folder / MODEL).save(folder / ARTIFACT)
    if "C++ bundle" in candidates:
        artifact = mhsa.compile(model, example_inputs={"src": sets[0]})
        artifact.save(folder / ARTIFACT)
        words = [sys.executable, "-m", "mhsa_compile", "bundle", str(folder / ARTIFACT), "--build"]
        words += ["-o", str(folder / PROGRAM)]
        subprocess.run(words, check=True, capture_output=True)


def measure(plain: str, size: str, figures: Figures, candidates: Sequence[str], turns: int) -> None:
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        if why := why_unprepared([__file__, "--prepare", plain, size, place, *candidates]):
            figures.missing[f"{plain}, {size}"] = why
            return
        serve = {
            name: [__file__, "--serve", name, plain, size, place, str(figures.threads)]
            for name in (PLAIN_WAY, *candidates)
        }
        ready, missing = started(stack, serve)
        figures.missing |= {f"{name}, {size}": words for name, words in missing.items()}
        row = figures.seconds.setdefault(size, {})
        for name, times in rounds(ready, Turn("alone", 0.2), turns):
            row.setdefault(f"{name}, {plain}" if name == PLAIN_WAY else name, []).append(median(times.calls))
        if (note := Path(place, NOTE)).exists():
            figures.notes[f"{plain}, {size}"] = note.read_text()


def ratio(row: dict[str, list[float]], way: str) -> float:
    """The plain model's time by a way's; NaN where one is missing."""
    plain = f"{PLAIN_WAY}, {WAYS[way].plain}"
    return median(row[plain]) / median(row[way]) if {plain, way} <= row.keys() else math.nan


def table(figures: Figures) -> Table:
    """For each way, at each size: milliseconds of the plain model and of ours, and how many times faster ours is."""
    shown = Table("way", "plain PyTorch", *(f"{size}: plain, ours, ratio" for size in figures.seconds))
    ratios: dict[str, list[float]] = {size: [] for size in figures.seconds}
    for way, (plain, _) in WAYS.items():
        cells = []
        for size, row in figures.seconds.items():
            if math.isnan(times := ratio(row, way)):
                cells.append("-")
                continue
            ratios[size].append(times)
            before, ours = (median(row[name]) * 1e3 for name in (f"{PLAIN_WAY}, {plain}", way))
            cells.append(f"{before:.3g}, {ours:.3g}, {times:.2f}")
        shown.add_row(way, plain, *cells)
    means = [f"{geometric_mean(ratios[size]):.2f}" if ratios[size] else "-" for size in ratios]
    shown.add_row("geometric mean", "", *means)
    return shown


def main() -> int:
    parser = command_line(__doc__, turns=8)
    parser.add_argument("--size", nargs="+", default=list(SIZES), choices=list(SIZES), metavar="NAME")
    parser.add_argument("--way", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="NAME")
    options = parser.parse_args()
    figures = Figures.here(["transformers"], options.threads)
    for size in options.size:
        for plain in PLAIN:
            if candidates := [way for way in options.way if WAYS[way].plain == plain]:
                measure(plain, size, figures, candidates, options.turns)
                print(f"{size}, {plain} is done", file=sys.stderr)
                write(figures, options.json)
    show([table(figures)], figures.missing)
    every = [one for row in figures.seconds.values() for way in WAYS if not math.isnan(one := ratio(row, way))]
    if every:
        print(f"geometric mean of all: {geometric_mean(every):.2f}, the least {min(every):.2f}")
    for model, note in figures.notes.items():
        print(f"accelerate, {model}: {note}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        who, model, which, place, count = sys.argv[2:]
        serve(who, model, which, Path(place), int(count))
    elif sys.argv[1:2] == ["--prepare"]:
        prepare(sys.argv[2], sys.argv[3], Path(sys.argv[4]), sys.argv[5:])
    else:
        sys.exit(main())
