"""What ONNX Runtime's tools make of small models and graphs, against ONNX Runtime: right, refused, wrong, raw.

python -m campaigns.quantised_files [--models bert,vit,graphs,Add] [--forms dynamic,static] [--slice 1/4]

It exits with 1 on wrong or raw. A file is right where our outputs are ONNX Runtime's, with its optimisations or
without, to five digits (float16: three); near where they are off by no more than its own two answers are from each
other, or than its quantisation is from the model before; of float16 also where ours is as near to that as theirs. Root
mean squares. Of a graph of an operator or two no more
than a twentieth of the elements may differ at all, or twice as many as of its own two, but where an attention was
recognised, which is computed in floats between what is rounded. What takes over three times
ONNX Runtime's time, one thread each, is said to be slow.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

import mhsa_compile as mhsa
from campaigns import exported_models, small_graphs
from campaigns.exported_models import EXPORTS, KINDS, Feeds, export
from campaigns.tools_of_onnxruntime import FORMS, Calibration, session
from mhsa_compile.errors import BuildError, MhsaError

Draw = Callable[[np.random.Generator, int, int], Feeds]


@dataclass(frozen=True)
class Source:
    """A model or a graph: `write` makes its file, as one of `ways` says."""

    name: str
    write: Callable[[Path, str], None]
    draw: Draw
    ways: tuple[str, ...]
    kind: str = ""
    """What ONNX Runtime's optimiser calls it; "" for a graph."""


def sources(names: list[str]) -> list[Source]:
    """Those of these names, or all; "graphs" are all graphs."""
    chosen: list[Source] = []
    for name, (model, draw) in exported_models.models().items():
        feeds = draw(np.random.default_rng(0), 2, 7)
        write = partial(lambda model, feeds, path, how: export(model, feeds, path, how), model, feeds)
        chosen.append(Source(name, write, draw, EXPORTS, KINDS.get(name, name.split()[0])))
    for name in small_graphs.ROWS | small_graphs.PICTURES:
        write = partial(lambda name, path, how: small_graphs.write(name, path, int(how)), name)
        chosen.append(Source(name, write, partial(small_graphs.feeds, name), ("18", "21", "17")))
    return [one for one in chosen if not names or one.name in names or (not one.kind and "graphs" in names)]


def difference(some: list[np.ndarray], others: list[np.ndarray]) -> float:
    """The largest root mean square of a difference by that of the others."""
    pairs = [(np.float64(a), np.float64(b)) for a, b in zip(some, others, strict=True)]
    return max(float(np.sqrt(((a - b) ** 2).mean() / ((b**2).mean() + 1e-30))) for a, b in pairs)


def share(some: list[np.ndarray], others: list[np.ndarray], digits: float) -> float:
    """The largest share of elements that differ by more than so much of the largest one."""
    pairs = [(np.float64(a), np.float64(b)) for a, b in zip(some, others, strict=True)]
    return max(float((np.abs(a - b) > digits * (np.abs(b).max() + 1e-30)).mean()) for a, b in pairs)


def fitted(feeds: Feeds, file: Path) -> Feeds:
    """The arrays in the dtypes that a file has its inputs in."""
    kinds = {i.name: helper.tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type) for i in onnx.load(file).graph.input}
    return {name: array.astype(kinds[name]) for name, array in feeds.items()}


def seconds(call: Callable[[], object]) -> float:
    """The least of some calls."""
    call()
    times = []
    for _ in range(15):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def verdict(source: Path, file: Path, calls: list[Feeds], *, is_graph: bool) -> tuple[str, str]:
    """(what became of a file, why); of `calls` the last is timed."""
    own_calls = [fitted(feeds, file) for feeds in calls]
    try:
        sessions = [session(*one) for one in ((file, "ORT_ENABLE_ALL"), (file, "ORT_DISABLE_ALL"))]
        for one in sessions:
            one.run(None, own_calls[0])
    except Exception as error:  # ONNX Runtime's own tool wrote what it does not take
        return "not run by ONNX Runtime", str(error)
    try:
        artifact = mhsa.compile(file, without_attention="accept", check=False)
        call = mhsa.load(artifact, threads=1)
    except BuildError as error:
        return "raw", str(error)
    except MhsaError as error:
        return "refused", str(error)
    except Exception as error:  # what this program looks for
        return "raw", f"{type(error).__name__}: {error}"
    original = session(source, "ORT_ENABLE_ALL")
    halves = any(tensor.data_type == TensorProto.FLOAT16 for tensor in onnx.load(file).graph.initializer)
    digits = 3e-3 if halves else 1e-5
    word, why = "right", ""
    for feeds, plain in zip(own_calls, calls, strict=True):
        try:
            result = call(**feeds)
        except Exception as error:
            return "raw", f"in a call: {type(error).__name__}: {error}"
        ours = list(result) if isinstance(result, (list, tuple)) else [result]
        optimised, exact = (one.run(None, feeds) for one in sessions)
        model = original.run(None, plain)
        error = min(difference(ours, optimised), difference(ours, exact))
        own, lost = difference(optimised, exact), difference(exact, model)
        apart = min(share(ours, optimised, 10 * digits), share(ours, exact, 10 * digits))
        has_attention = any(block.fused for block in artifact.manifest.attention)
        many = is_graph and not has_attention and apart > max(0.05, 2 * share(optimised, exact, 10 * digits))
        if not error <= digits:  # or NaN
            nearer = halves and difference(ours, model) <= lost  # where ours rounds less often
            is_wrong = not (error <= max(2 * own, lost) or nearer) or many
            word = "wrong" if is_wrong or word == "wrong" else "near"
            why = f"off by {error:.2g}, ONNX Runtime's two answers by {own:.2g}, the model before by {lost:.2g}"
            why += f"; {apart:.1%} of the elements"
    own_time, their_time = (
        seconds(one) for one in (lambda: call(**own_calls[-1]), lambda: sessions[0].run(None, own_calls[-1]))
    )
    if own_time > 3 * their_time and own_time > 2e-4:
        why += f" SLOW: {own_time * 1e3:.2f} ms, {own_time / their_time:.1f} times ONNX Runtime's"
    return word, why


def files(
    chosen: list[Source], beginnings: tuple[str, ...], part: int, parts: int
) -> Iterator[tuple[Source, str, str]]:
    """(source, form, way to write it): every so many, from a part on."""
    number = 0
    for i, source in enumerate(chosen):
        forms = [form for form in FORMS if form.startswith(beginnings) and (source.kind or "fused" not in form)]
        for k, form in enumerate(forms):
            if (number := number + 1) % parts == part % parts:
                yield source, form, source.ways[(i + k) % len(source.ways)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Files of ONNX Runtime's tools against ONNX Runtime.")
    parser.add_argument("--models", default="", help='names, a comma between two, or "graphs"; else all')
    parser.add_argument("--forms", default="", help="beginnings of their names, a semicolon between two")
    parser.add_argument("--slice", default="1/1", help="K/N: every N-th file, from the K-th on")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    counts: Counter[str] = Counter()
    chosen = sources(options.models.split(",") if options.models else [])
    part, parts = map(int, options.slice.split("/"))
    for source, form, how in files(chosen, tuple(options.forms.split(";")), part, parts):
        rng = np.random.default_rng(0)
        calls = [source.draw(rng, batch, length) for batch, length in ((2, 7), (1, 3), (3, 13), (2, 48))]
        with tempfile.TemporaryDirectory() as folder:
            before, after = Path(folder) / "float.onnx", Path(folder) / "small.onnx"
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    source.write(before, how)
                    FORMS[form](before, after, Calibration([source.draw(rng, 2, 7) for _ in range(3)], source.kind))
            except Exception as error:  # the tool's own
                word, why = "not made", f"{type(error).__name__}: {error}"
            else:
                word, why = verdict(before, after, calls, is_graph=not source.kind)
        counts[word] += 1
        counts["slow"] += "SLOW" in why
        print(f"{source.name}, {how}, {form}: {word} {' '.join(why.split())[:400]}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return int(counts["wrong"] + counts["raw"] > 0)


if __name__ == "__main__":
    sys.exit(main())
