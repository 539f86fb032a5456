"""Kinds of files from outside: a good one of each, and what reads it. A seed and a number draw a case."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import tomllib
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from support.records_made import DEVICE, made
from support.this_cpu import ANYWHERE

import mhsa_compile as mhsa
from fuzz import mutations
from mhsa_compile.cli.common import arrays
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.records import record_files
from mhsa_compile.records.record import Isa, RecordSet, encoded, merge_best, why_doubtful, why_not_on
from mhsa_compile.runtime.array_memory import aligned_zeros
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.tuning.measure import work_bundle, work_results
from mhsa_compile.tuning.measure.job import Candidate, MeasureJob, Timing
from mhsa_compile.tuning.measure.work_bundle import BundleTask, WorkBundle, WorkOrder
from mhsa_compile.tuning.measure.work_results import Measurement, Results

Case = Callable[[], object]
LARGEST_CALL = 1 << 16
"""Elements of an input with which a loaded artifact is called."""
SPECS = {
    "block.mhsa": AttentionSpec(embed_dim=16, num_heads=2, causal=True, mask="bool", rope=True),
    "cached.mhsa": AttentionSpec(embed_dim=16, num_heads=2, causal=True, kv_cache=True, static_mask=None),
}
OF_ARTIFACTS = ("artifact", "resealed manifest")
"""The kinds that damage all artifacts; the others have enough of the first."""
USES = ("opened", "loaded")
WHOLE = 400
"""One ONNX model in so many is compiled to the end; the others go as far as the import."""


def make(folder: Path, artifacts: Iterable[str] = SPECS) -> None:
    """The good files, once for all processes."""
    for name in artifacts:
        mhsa.compile(SPECS[name], ANYWHERE).save(folder / name)
    onnx.save(decomposed(), folder / "decomposed.onnx")
    onnx.save(standard(), folder / "standard.onnx")


class Files:
    """What one process damages: good files, read once, and a folder of its own to write to."""

    def __init__(self, good: Path, own: Path) -> None:
        self.own = own
        names = [name for name in SPECS if (good / name).exists()]
        self.artifacts, self.loaded = ({own / use / n: read_folder(good / n) for n in names} for use in USES)
        for use in USES:  # what is loaded is mapped: nothing may write to it, as nothing may to any library in use
            for name in names:
                shutil.copytree(good / name, own / use / name)
        self.block = Artifact.open(own / "loaded" / "block.mhsa")
        self.models = [onnx.load(good / name) for name in ("decomposed.onnx", "standard.onnx")]
        self.models.append(onnx.load(good / "block.mhsa" / "model.onnx"))
        self.bundle = bundle(own / "good.zip")
        self.records = b"".join(encoded(made(key={"rows": rows})) + b"\n" for rows in (1, 64, 128))
        self.results = work_bundle.encoded(result())
        self.profile = load_profile("native")

    def put(self, name: str, data: bytes) -> Path:
        path = self.own / name
        path.write_bytes(data)
        return path


def read_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def artifact(files: Files, draw: random.Random) -> Case:
    """Bytes of any file of an artifact; hashes and seal stay as they were."""
    folder, contents = draw.choice(list(files.artifacts.items()))
    name = draw.choice(list(contents))
    damaged = mutations.of_bytes(draw, contents[name])

    def run() -> None:
        (folder / name).write_bytes(damaged)
        try:
            Artifact.open(folder)
        finally:
            (folder / name).write_bytes(contents[name])

    return run


def resealed(files: Files, draw: random.Random) -> Case:
    """A manifest of another structure, or weights of other bytes, under a seal that fits; loaded, and called."""
    folder, contents = draw.choice(list(files.loaded.items()))
    manifest = json.loads(contents["manifest.json"])
    changed = dict(contents)
    if draw.random() < 0.15:
        changed["weights.safetensors"] = mutations.of_bytes(draw, contents["weights.safetensors"])
        manifest["files"]["weights.safetensors"] = hashlib.sha256(changed["weights.safetensors"]).hexdigest()
    else:
        manifest = mutations.of_values(draw, manifest)
    changed["manifest.json"] = seal(manifest)

    def run() -> None:
        for name in ("manifest.json", "weights.safetensors"):
            (folder / name).write_bytes(changed[name])
        try:
            loaded = mhsa.load(folder, threads=1)
            call(loaded)
        finally:
            for name in ("manifest.json", "weights.safetensors"):
                (folder / name).write_bytes(contents[name])

    return run


def call(loaded: Any) -> None:
    """Calls a loaded artifact with arrays as it states them: every free dim is 3."""
    shapes = [[dim if isinstance(dim, int) else 3 for dim in info.dims] for info in loaded.inputs]
    if all(np.prod(shape, dtype=float) <= LARGEST_CALL for shape in shapes):
        loaded(*(aligned_zeros(tuple(s), i.dtype) for s, i in zip(shapes, loaded.inputs, strict=True)))
    if loaded.manifest.spec is not None and loaded.manifest.spec.kv_cache:
        loaded.new_cache(batch=1, capacity=3)


def seal(manifest: Any) -> bytes:
    """The text with its own sha256 in it, where it has a place for one."""
    if not isinstance(manifest, dict):
        return json.dumps(manifest).encode("utf-8", "replace")
    raw = json.dumps({**manifest, "sha256": "0" * 64}).encode("utf-8", "replace")
    return raw.replace(b"0" * 64, hashlib.sha256(raw).hexdigest().encode(), 1)


def safetensors(files: Files, draw: random.Random) -> Case:
    """Weights that `load` is to bind."""
    good = files.loaded[files.block.path]["weights.safetensors"]
    path = files.put("weights.safetensors", header_changed(draw, good))
    return lambda: mhsa.load(files.block, weights=path, threads=1)


def header_changed(draw: random.Random, data: bytes) -> bytes:
    if draw.random() < 0.5:
        return mutations.of_bytes(draw, data)
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(mutations.of_values(draw, json.loads(data[8 : 8 + size]))).encode("utf-8", "replace")
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def npy(files: Files, draw: random.Random) -> Case:
    """An input of `mhsa run`."""
    shape = draw.choice(((), (3,), (2, 5), (1, 4, 16)))
    dtype = draw.choice(("float32", "bool", "int64", "float16", "complex64", "U3", ">f8", "S2"))
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(shape, dtype), allow_pickle=False)
    path = files.put("x.npy", mutations.of_bytes(draw, buffer.getvalue()))
    return lambda: read_input(files, path)


def read_input(files: Files, path: Path) -> None:
    given = arrays.read([f"x={path}"])
    arrays.complete(given, files.block.manifest.inputs[:1], {"B": 1, "L": 3}, seed=0)


def archive(files: Files, draw: random.Random) -> Case:
    """A bundle of work, its manifest, or an .npz where an .npy is wanted."""
    match draw.randrange(4):
        case 0:
            buffer = io.BytesIO()
            np.savez_compressed(buffer, x=np.zeros((1, 4, 16), np.float32))
            path = files.put("x.npz", mutations.of_bytes(draw, buffer.getvalue()))
            return lambda: read_input(files, path)
        case 1:
            path = files.put("work.zip", mutations.of_bytes(draw, files.bundle))
        case _:
            path = files.put("work.zip", bundle_resealed(draw, files.bundle))
    return lambda: unpack(path)


def bundle_resealed(draw: random.Random, data: bytes) -> bytes:
    """A bundle with a manifest of another structure, or with a damaged file under the hash that it has now."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        held = {name: old.read(name) for name in old.namelist()}
        manifest = json.loads(held.pop("manifest.json"))
        if draw.random() < 0.5:
            name = draw.choice([name for name in held if name.endswith(".safetensors")])
            held[name] = header_changed(draw, held[name])
            manifest["files"][name] = hashlib.sha256(held[name]).hexdigest()
        else:
            manifest = mutations.of_values(draw, manifest)
        held["manifest.json"] = json.dumps(manifest).encode("utf-8", "replace")
        for name, raw in held.items():
            new.writestr(name, raw)
    return buffer.getvalue()


def unpack(path: Path) -> None:
    with WorkBundle.opened(path) as work:
        for number, task in enumerate(work.tasks[:4]):
            work.job(number)
            for which in range(len(task.candidates[:4])):
                work.candidate(number, which)


def measured(files: Files, draw: random.Random) -> Case:
    """What a device sent back."""
    raw = files.results
    if draw.random() < 0.5:
        raw = mutations.of_bytes(draw, raw)
    else:
        raw = json.dumps(mutations.of_values(draw, json.loads(raw))).encode("utf-8", "replace")
    path = files.put("results.json", raw)
    return lambda: work_results.summary(work_results.read(path))


def records(files: Files, draw: random.Random) -> Case:
    """Tuned records: damaged bytes, or lines of another structure."""
    if draw.random() < 0.5:
        raw = mutations.of_bytes(draw, files.records)
    else:
        lines = [json.dumps(mutations.of_values(draw, json.loads(line))) for line in files.records.splitlines()]
        raw = "\n".join(lines).encode("utf-8", "replace")
    path = files.put("records.jsonl", raw)
    return lambda: read_records(files, path)


def read_records(files: Files, path: Path) -> None:
    found, flaws = record_files.examine(path)
    best = merge_best(found)
    for record in best:
        why_not_on(record, files.profile)
        why_doubtful(record)
        RecordSet(best, files.profile).candidates(record.op, record.key)
    if error := next((flaw.error for flaw in flaws if flaw.error is not None), None):
        raise error


_SPEC = AttentionSpec(
    embed_dim=16, num_heads=2, causal=True, rope={"theta": 500.0, "scaling": "llama3", "factor": 8.0,
    "original_max_length": 64}, static_mask={"kind": "longformer", "window": 4}, outputs=("y", "top_k:2"),
)  # fmt: skip


def spec(files: Files, draw: random.Random) -> Case:
    """A spec, as TOML or as JSON."""
    if draw.random() < 0.4:
        fields = mutations.of_values(draw, _SPEC.to_dict())
        text = json.dumps(fields)
        return lambda: AttentionSpec.from_json(text)
    text = mutations.of_bytes(draw, _SPEC.to_toml().encode()).decode("utf-8", "replace")
    return lambda: AttentionSpec.from_toml(text)


def target(files: Files, draw: random.Random) -> Case:
    """A target's TOML."""
    good = load_profile(draw.choice(("native", "cuda-sm90a"))).to_toml()
    if draw.random() < 0.5:
        text = mutations.of_bytes(draw, good.encode())
    else:
        text = as_toml(mutations.of_values(draw, tomllib.loads(good))).encode("utf-8", "replace")
    path = files.put("machine.toml", text)
    return lambda: load_profile(path)


def as_toml(tables: Any) -> str:
    """The tables as TOML, near enough: what has no form in TOML is refused as such."""
    if not isinstance(tables, dict):
        return json.dumps(tables)
    lines = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in tables.items() if not isinstance(value, dict)]
    for name, table in tables.items():
        if isinstance(table, dict):
            lines += [f"[{json.dumps(name)}]", *(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in table.items())]
    return "\n".join(lines)


def model(files: Files, draw: random.Random) -> Case:
    """An ONNX model: damaged bytes, or fields of its messages changed; read and imported, a few compiled."""
    found = onnx.ModelProto()
    found.CopyFrom(draw.choice(files.models))
    if draw.random() < 0.3:
        raw = mutations.of_bytes(draw, found.SerializeToString())
    else:
        mutations.of_message(draw, draw.choice((found, found.graph, found.graph, found.graph)))
        raw = found.SerializePartialToString()
    path = files.put("model.onnx", raw)
    shutil.copyfile(files.block.path / "weights.safetensors", files.own / "weights.safetensors")
    work = mhsa.compile if draw.randrange(WHOLE) == 0 else imported
    return lambda: work(path)


def imported(path: Path) -> object:
    from mhsa_compile.compiler import pipeline

    return pipeline.import_source(path)


KINDS: dict[str, tuple[Callable[[Files, random.Random], Case], int]] = {
    "artifact": (artifact, 15),
    "resealed manifest": (resealed, 12),
    "safetensors": (safetensors, 12),
    "npy": (npy, 15),
    "zip": (archive, 10),
    "results": (measured, 5),
    "records": (records, 12),
    "spec": (spec, 8),
    "target": (target, 7),
    "onnx": (model, 4),
}
"""The kinds of inputs, each with the function that draws one, and how many of a hundred inputs are of that kind."""


def bundle(path: Path) -> bytes:
    isa = Isa(architecture="x86_64", vector_bits=256, vector_registers=16)
    order = WorkOrder(study="s", target="native", isa=isa, threads=1, seconds=0.1)
    x = np.ones((3, 4), np.float32)
    job = MeasureJob((x,), (x.astype("bfloat16"),), ((3, 4), "float32"), np.arange(12), np.zeros(12), 1e-6, 24, 1)
    candidates = (Candidate(b"\x7fELF" * 9, (((4, 4), "float32"),), (x,)), Candidate(b"\x7fELF" * 8))
    with work_bundle.create(path, order) as add:
        add(BundleTask("linear", job, candidates, ("{}", "[1]")))
    return path.read_bytes()


def result() -> Results:
    isa = Isa(architecture="x86_64", vector_bits=256, vector_registers=16)
    order = WorkOrder(study="s", target="native", isa=isa, threads=1, seconds=0.1)
    timing = Timing((1.0, 2.0), 0.5)
    one = Measurement(task="linear", label="{}", outcome=timing, incumbent=timing)
    return Results(work="0" * 64, order=order, device=DEVICE, versions={"a": "1"}, total=2, measured=(one, one))


def standard() -> onnx.ModelProto:
    """The standard operator with linears around it, a mask and free dims."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((16, 16), np.float32) for name in ("wq", "wk", "wv")}
    nodes = [helper.make_node("MatMul", ["x", name], [name[1:]]) for name in weights]
    nodes.append(helper.make_node("Attention", ["q", "k", "v", "m"], ["y"], q_num_heads=2, kv_num_heads=2, name="att"))
    inputs = [("x", TensorProto.FLOAT, ["B", "L", 16]), ("m", TensorProto.BOOL, ["L", "L"])]
    return a_model(nodes, inputs, ("y", TensorProto.FLOAT, ["B", "L", 16]), weights, 23)


def decomposed() -> onnx.ModelProto:
    """Products and a softmax, as exporters write them."""
    shape = np.array([0, 0, 2, 8], np.int64)
    constants = {"shape": shape, "scale": np.float32(0.35), "back": np.array([0, 0, 16], np.int64)}
    nodes = []
    for name in "qkv":
        nodes.append(helper.make_node("Reshape", [name, "shape"], [f"{name}4"]))
        perm = [0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]
        nodes.append(helper.make_node("Transpose", [f"{name}4"], [f"{name}t"], perm=perm))
    nodes += [
        helper.make_node("MatMul", ["qt", "kt"], ["s"]), helper.make_node("Mul", ["s", "scale"], ["ss"]),
        helper.make_node("Softmax", ["ss"], ["p"], axis=-1), helper.make_node("MatMul", ["p", "vt"], ["yt"]),
        helper.make_node("Transpose", ["yt"], ["y4"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["y4", "back"], ["y"]),
    ]  # fmt: skip
    inputs = [(name, TensorProto.FLOAT, ["B", "L", 16]) for name in "qkv"]
    return a_model(nodes, inputs, ("y", TensorProto.FLOAT, ["B", "L", 16]), constants, 17)


def a_model(nodes: list[Any], inputs: list[Any], output: Any, constants: dict[str, Any], opset: int) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes, "graph", [helper.make_tensor_value_info(*given) for given in inputs],
        [helper.make_tensor_value_info(*output)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def drawn(files: Files, kind: str, seed: int, number: int) -> Case:
    return KINDS[kind][0](files, random.Random(f"{seed} {kind} {number}"))


def keep(files: Files, to: Path) -> None:
    """What a case left in its folder, for whoever looks into it."""
    shutil.copytree(files.own, to, dirs_exist_ok=True)


def own_folder(work: Path) -> Path:
    folder = work / f"process-{os.getpid()}"
    folder.mkdir()
    return folder
