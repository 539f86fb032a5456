"""How fast whole models are, against whom: each candidate in a process of its own, taking turns.

    python benchmarks/models.py [--model vit whisper ...] [--json FILE]

The models are those of `whole_models.py`: real sizes, random weights, fixed sizes of inputs, float32. Everybody but
PyTorch reads the same ONNX file. What a candidate returned is held against PyTorch's, in float32, before it is timed.
"""

from __future__ import annotations

import inspect
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from figures import TurnFigures, command_line, show, write
from processes import Turn, answer_turns, check_result, one_caller, rounds, started, why_unprepared
from rich.table import Table

OWN = "mhsa_compile"
IN_PYTORCH = ("mhsa-attention", "mhsa-in-place", "mhsa-backend")
"""Ours inside of PyTorch: `attn_implementation="mhsa"` of transformers, `accelerate(model, linears=True)`, and
`torch.compile(model, backend="mhsa")`."""
PEERS = ("torch", "torch-sdpa", "inductor", "onnxruntime", "onnxruntime-fused", "openvino")
PRODUCTS = {"mhsa-ieee": "ieee", "mhsa-bf16": "bf16"}
"""Ours with another choice of what float32 products are than compile's own."""
ROUNDED = ("mhsa-bf16", "openvino-default")
"""Who may round factors to bfloat16: OpenVINO by itself does so on CPUs that are fast at it."""
BY_CHOICE = (*PRODUCTS, "openvino-default")
"""Candidates that run only where they are named."""
MODEL, FIRST_RESULT = "model.onnx", "first.npy"
SETS = 4
"""How many sets of inputs calls take in turn."""
WRONG, WRONG_ROUNDED = 1e-3, 0.2
"""A share of the largest value: who is farther from PyTorch than that computes something else, and is not timed."""


# The process of one candidate


@contextmanager
def opened(candidate: str, model: str, folder: Path, threads: int) -> Iterator[Sequence[Callable[[], Any]]]:
    """A call for each of several sets of inputs. Raises ValueError where the first result is not PyTorch's."""
    from whole_models import MODELS

    sets = [MODELS[model].inputs(seed) for seed in range(SETS)]
    calls = OPENERS[candidate](model, folder, sets, threads)
    check_result(calls[0](), folder / FIRST_RESULT, WRONG_ROUNDED if candidate in ROUNDED else WRONG)
    yield calls


def products_argument(products: str) -> dict[str, str]:
    """What `compile` is told, for float32 products of this kind. Raises ValueError where it has no choice of them."""
    import mhsa_compile as mhsa

    if "float32_products" not in inspect.signature(mhsa.compile).parameters:
        raise ValueError("compile has no choice of float32_products here")
    return {"float32_products": products}


def _ours(
    model: str, folder: Path, sets: list[Any], threads: int, products: str | None = None
) -> list[Callable[[], Any]]:
    import mhsa_compile as mhsa

    if products is not None:
        products_argument(products)
    compiled = mhsa.load(folder / _artifact(products), threads=threads)
    return [lambda arrays=arrays: compiled(**arrays) for arrays in sets]


def _torch(model: str, folder: Path, sets: list[Any], threads: int, way: str = "eager") -> list[Callable[[], Any]]:
    import torch
    from whole_models import MODELS

    torch.set_num_threads(threads)
    if way == "mhsa":
        from mhsa_compile.integrations import transformers

        transformers.register()
    module: Any = MODELS[model].build(way if way in ("eager", "mhsa") else "sdpa", None)
    if way == "in-place":
        import mhsa_compile as mhsa

        mhsa.accelerate(module.eval(), linears=True)
    if way == "inductor":
        from torch._inductor import config

        config.freezing = True
        module = torch.compile(module)
    if way == "backend":
        module = torch.compile(module, backend="mhsa", options={"threads": threads, "strict": True})
    tensors = [[torch.from_numpy(array) for array in arrays.values()] for arrays in sets]

    def call(inputs: list[Any]) -> Any:
        with torch.inference_mode():
            return module(*inputs)

    return [partial(call, one) for one in tensors]


def _onnxruntime(model: str, folder: Path, sets: list[Any], threads: int, fused: bool = False) -> list[Any]:
    import onnxruntime
    from whole_models import MODELS

    path = folder / MODEL
    if fused:
        from onnxruntime.transformers import optimizer

        if (known := MODELS[model].optimizer) is None:
            raise ValueError("its transformer optimizer has no word for this model")
        kind, heads, width = known
        fused_model = optimizer.optimize_model(str(path), kind, num_heads=heads, hidden_size=width)
        counts = {name: n for name, n in fused_model.get_fused_operator_statistics().items() if n}
        if not counts:
            raise ValueError("its transformer optimizer finds nothing to fuse")
        path = folder / "fused.onnx"
        fused_model.save_model_to_file(str(path), use_external_data_format=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [lambda arrays=arrays: session.run(None, arrays)[0] for arrays in sets]


def _artifact(products: str | None) -> str:
    return "model.mhsa" if products is None else f"model-{products}.mhsa"


def _openvino(
    model: str, folder: Path, sets: list[Any], threads: int, precision: str | None = "f32"
) -> list[Callable[[], Any]]:
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # it would send an event
    import openvino

    settings = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": threads}
    settings |= {"ENABLE_CPU_PINNING": False}
    if precision is not None:
        settings["INFERENCE_PRECISION_HINT"] = precision
    core = openvino.Core()
    request = core.compile_model(core.read_model(folder / MODEL), "CPU", settings).create_infer_request()
    return [lambda arrays=arrays: request.infer(arrays, share_inputs=True, share_outputs=True)[0] for arrays in sets]


OPENERS: dict[str, Callable[..., list[Any]]] = {
    OWN: _ours,
    **{name: partial(_ours, products=products) for name, products in PRODUCTS.items()},
    "mhsa-attention": partial(_torch, way="mhsa"),
    "mhsa-in-place": partial(_torch, way="in-place"),
    "mhsa-backend": partial(_torch, way="backend"),
    "torch": _torch,
    "torch-sdpa": partial(_torch, way="sdpa"),
    "inductor": partial(_torch, way="inductor"),
    "onnxruntime": _onnxruntime,
    "onnxruntime-fused": partial(_onnxruntime, fused=True),
    "openvino": _openvino,
    "openvino-default": partial(_openvino, precision=None),
}


# The process that asks


def prepare(model: str, folder: Path, candidates: Sequence[str]) -> None:
    """Writes the ONNX file, our artifacts, and PyTorch's result. Needs a process of its own, whose memory is given
    back when it ends."""
    import torch
    from whole_models import MODELS, export

    import mhsa_compile as mhsa

    entry = MODELS[model]
    module, inputs = entry.build("sdpa", None), entry.inputs(0)
    with torch.inference_mode():
        np.save(folder / FIRST_RESULT, module(*map(torch.from_numpy, inputs.values())).numpy())
    export(module, inputs, folder / MODEL)
    mhsa.compile(folder / MODEL).save(folder / _artifact(None))
    for candidate in PRODUCTS.keys() & set(candidates):
        with suppress(ValueError):  # its own process says why it is missing
            argument: Any = products_argument(PRODUCTS[candidate])
            mhsa.compile(folder / MODEL, **argument).save(folder / _artifact(PRODUCTS[candidate]))


def measure(model: str, figures: TurnFigures, candidates: Sequence[str], turns: int) -> None:
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        if why := why_unprepared([__file__, "--prepare", model, place, *candidates]):
            figures.missing[model] = why
            return
        serve = {name: [__file__, "--serve", name, model, place, str(figures.threads)] for name in candidates}
        ready, missing = started(stack, serve)
        figures.missing |= {f"{name}, {model}": reason for name, reason in missing.items()}
        row = figures.seconds.setdefault(model, {})
        for name, times in rounds(ready, Turn("alone", 0.3), turns):
            row.setdefault(name, []).append(median(times.calls))


def table(figures: TurnFigures) -> Table:
    """Milliseconds of a call; the best peer's by ours, and SDPA's by ours inside of the same PyTorch."""
    names = list(dict.fromkeys(name for row in figures.seconds.values() for name in row))
    shown = Table(
        "model", *(f"{name}, ms" for name in names), "best peer / ours", *(f"SDPA / {name}" for name in IN_PYTORCH)
    )
    for model, row in figures.seconds.items():
        of = {name: median(seconds) * 1e3 for name, seconds in row.items()}
        best = min((name for name in of if name in PEERS), key=of.__getitem__, default=None)
        sdpa = of.get("torch-sdpa", math.nan)
        inside = [f"{sdpa / of[name]:.2f}" if name in of else "-" for name in IN_PYTORCH]
        ratio = f"{of[best] / of[OWN]:.2f} {best}" if best and OWN in of else "-"
        shown.add_row(model, *(f"{of[name]:.4g}" if name in of else "-" for name in names), ratio, *inside)
    return shown


def main() -> int:
    parser = command_line(__doc__, turns=8)
    parser.add_argument("--model", nargs="+", default=None, metavar="NAME")
    usual = [name for name in OPENERS if name not in BY_CHOICE]
    parser.add_argument("--candidate", nargs="+", default=usual, choices=list(OPENERS), metavar="NAME")
    options = parser.parse_args()
    if options.model is None:
        from whole_models import MODELS

        options.model = list(MODELS)
    figures = TurnFigures.here(["transformers", "onnxruntime", "openvino"], options.threads)
    for model in options.model:
        measure(model, figures, options.candidate, options.turns)
        print(f"{model} is done", file=sys.stderr)
        write(figures, options.json)
    show([table(figures)], figures.missing)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        who, which, place, count = sys.argv[2:]
        answer_turns(opened(who, which, Path(place), int(count)), lambda turn, calls: one_caller(turn.seconds, calls))
    elif sys.argv[1:2] == ["--prepare"]:
        prepare(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    else:
        sys.exit(main())
