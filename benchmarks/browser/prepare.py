"""Blocks and a sentence encoder as bundles of JavaScript, and as files for ONNX Runtime Web, with inputs and the right
outputs: what turns.mjs beside it times.

    python benchmarks/browser/prepare.py FOLDER [--targets wasm32 wasm32-relaxed] [--only base128 ...]

ONNX Runtime gets each block in three forms (plain operators, MultiHeadAttention, GroupQueryAttention where they can be
one): the fastest of them is its time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx.external_data_helper import load_external_data_for_model

import mhsa_compile as mhsa
from mhsa_bench.peers import onnx_graph
from mhsa_bench.peers.peer import Problem
from mhsa_compile.bench.workloads import WORKLOADS, Workload
from mhsa_compile.errors import MhsaError
from mhsa_compile.nn.modules import MultiHeadAttention
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.artifact.manifest import SOURCE
from mhsa_compile.runtime.standalone.bundle import bundle
from mhsa_compile.verification.oracle.evaluate import oracle
from mhsa_compile.verification.random_inputs import random_inputs
from mhsa_compile.verification.stored_model import stored_model

BLOCKS = ("tiny", "base128", "bert384", "vit197", "gpt1024c", "cross64x512")
LENGTHS = (128, 512)
FORMS: dict[str, Callable[[Problem], onnx.ModelProto]] = {
    "plain": onnx_graph.standard,
    "multi-head": onnx_graph.fused_multi_head,
    "grouped": onnx_graph.fused_grouped,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--targets", nargs="*", default=["wasm32", "wasm32-relaxed"])
    parser.add_argument("--only", nargs="*", default=[*BLOCKS, "minilm"])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for workload in WORKLOADS:
        if workload.name in options.only:
            write_block(workload, options.targets, options.folder / workload.name)
    if "minilm" in options.only:
        write_encoder(options.targets, options.folder)


def write_block(workload: Workload, targets: Sequence[str], folder: Path) -> None:
    model = MultiHeadAttention(workload.spec)
    artifacts = {target: mhsa.compile(model, target) for target in targets}
    artifact = artifacts[targets[0]]
    inputs = random_inputs(stored_model(artifact), workload.dims)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for target, made in artifacts.items():
        bundle(made, folder / target)
    problem, forms, feeds = Problem(artifact, [inputs]), [], dict(inputs)
    for name, form in FORMS.items():
        try:
            graph = form(problem)
        except MhsaError as error:
            print(f"{workload.name}: no {name}: {error}")
            continue
        onnx.save(graph, folder / f"{name}.onnx")
        forms.append(name)
        feeds |= onnx_graph.inputs(problem, inputs, [value.name for value in graph.graph.input])
    write_case(folder, artifact, inputs, forms, targets, feeds)


def write_encoder(targets: Sequence[str], folder: Path) -> None:
    """all-MiniLM-L6-v2, whole, as PyTorch exports it."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    from minilm.compile_model import compile_sentences
    from minilm.trained import load_reference, model_folder

    artifacts = {target: compile_sentences(load_reference(model_folder()), target) for target in targets}
    artifact = artifacts[targets[0]]
    model = onnx.load(artifact.path / SOURCE, load_external_data=False)
    load_external_data_for_model(model, str(artifact.path))
    for length in LENGTHS:
        place = folder / f"minilm{length}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for target, made in artifacts.items():
            bundle(made, place / target)
        onnx.save(model, place / "plain.onnx")
        rng = np.random.default_rng(length)
        inputs = {"ids": rng.integers(1000, 30000, (1, length)), "valid": np.ones((1, length), np.int64)}
        write_case(place, artifact, inputs, ["plain"], targets)


def write_case(
    folder: Path,
    artifact: Artifact,
    inputs: Mapping[str, np.ndarray],
    forms: list[str],
    targets: Sequence[str],
    feeds: Mapping[str, np.ndarray] | None = None,
) -> None:
    """The inputs, with what else forms are fed, and what comes of them in float64, as files that JavaScript reads."""
    names = (info.name for info in artifact.manifest.outputs)
    expected = dict(zip(names, oracle(stored_model(artifact), dict(inputs)), strict=True))
    arrays = {f"in_{name}": array for name, array in (inputs if feeds is None else feeds).items()}
    arrays |= {f"out_{name}": np.asarray(array, np.float64) for name, array in expected.items()}
    for name, array in arrays.items():
        (folder / f"{name}.bin").write_bytes(np.ascontiguousarray(array).tobytes())
    described = {name: {"dtype": str(array.dtype), "dims": list(array.shape)} for name, array in arrays.items()}
    (folder / "case.json").write_text(json.dumps({"arrays": described, "forms": forms, "targets": list(targets)}))


if __name__ == "__main__":
    main()
