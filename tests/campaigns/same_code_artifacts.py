"""Artifacts of every kernel for every kind of target, and a hash of each function in them: one side of
`same_code_campaign.py`, which runs this file with PYTHONPATH at one tree or the other.

    PYTHONPATH=TREE python -m campaigns.same_code_artifacts --json side.json

So it takes no more from mhsa_compile than what trees of different age share: `compile`, the spec, masks. It looks at
object files before they are linked and stripped, where each function has its name, and what lies elsewhere is named and
not yet a number: TVM's `export_library` passes them through here. A function's hash is that of its bytes, and of what
they refer to: functions by their names, constants and texts by their content. So it does not depend on what else is in
the file, nor on where that lies.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import torch
import tvm
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional as F

import mhsa_compile as mhsa
from mhsa_compile import masks

VARIES = ("format_version", "mhsa_version", "versions", "files", "sha256")
"""Keys of a manifest that are no meaning of the artifact. `sha256` and `files` are those of bytes that are compared
here, of the ONNX file, which may say more from one version to the next, and of the weights."""
_TVM, _CUBIN = "__tvm_ffi_", b"\x7fELF"


@dataclass(frozen=True)
class Row:
    name: str
    target: str
    source: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)


# ---- What is compiled

SPECS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (64, 0)},
    "bool mask": {"mask": "bool"},
    "additive mask": {"mask": "additive"},
    "key padding, causal": {"mask": "key_padding", "causal": True},
    "grouped heads, rope": {"num_kv_heads": 2, "rope": True, "causal": True},
    "softcap, ALiBi, sinks": {"softcap": 30.0, "alibi": True, "sinks": True},
    "cross": {"kv_embed_dim": 48, "causal": "bottom_right"},
    "cache": {"kv_cache": True, "causal": True, "rope": True},
    "inside": {"causal": True, "outputs": ("y", "lse", "entropy", "top_k:3", "weights", "heads")},
    "bfloat16": {"dtype": "bfloat16", "causal": True},
    "float16": {"dtype": "float16"},
    "eight bits": {"weights": "int8"},
    "static mask": {"static_mask": masks.Longformer(window=32, global_tokens=1), "dims": {"L": 131}},
    "decode": {"num_kv_heads": 2, "kv_cache": True, "causal": True, "rope": True, "dims": {"L": 1}},
    "decode, bfloat16": {"kv_cache": True, "causal": True, "dtype": "bfloat16", "dims": {"L": 1}},
    "cross, few queries": {"kv_embed_dim": 48, "dims": {"L": 5}},
    "fixed dims": {"causal": True, "dims": {"B": 2, "L": 131}},
}
EVERY = "x86-64-v3"
SOME = {
    "x86-64-v4": ("full", "key padding, causal", "cache", "inside", "eight bits"),
    "sapphirerapids": ("window", "bfloat16", "eight bits", "static mask", "decode, bfloat16"),
    "aarch64-generic": ("full", "causal", "bool mask", "float16", "cache", "inside", "eight bits", "decode"),
    "neoverse-v1": ("additive mask", "softcap, ALiBi, sinks", "bfloat16", "eight bits", "cross, few queries"),
    "cuda-sm80": ("full", "bool mask", "bfloat16", "float16", "cache", "decode", "cross", "static mask"),
    "cuda-sm90a": ("inside", "bfloat16", "decode, bfloat16", "softcap, ALiBi, sinks"),
}
HOPPER: dict[str, Any] = {"embed_dim": 1024, "dtype": "bfloat16", "causal": True, "dims": {"B": 4, "L": 2048}}
"""A layer of a size at which linears are shared among warpgroups."""


class Beside(nn.Module):
    """Attention, and a function of its result that no kernel claims."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (4, -1)).transpose(1, 2)  # type: ignore[no-untyped-call]
        return self.function(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2))


def with_layer_norm(width: int) -> Beside:
    norm = nn.LayerNorm(width)
    return Beside(norm, norm)


def depthwise(width: int) -> Beside:
    return Beside(lambda y: F.conv1d(y.transpose(1, 2), torch.ones(width, 1, 3), padding=1, groups=width))


FALLBACKS: dict[str, Callable[[int], nn.Module]] = {
    "softmax": lambda width: Beside(lambda y: y.softmax(-1)),
    "layer norm": with_layer_norm,
    "gelu": lambda width: Beside(F.gelu),
    "sums": lambda width: Beside(lambda y: y - y.sum(-1, keepdim=True)),
    "sums along another axis": lambda width: Beside(lambda y: y - y.sum(1, keepdim=True)),
    "joined": lambda width: Beside(lambda y: torch.cat([y, y.flip(-1)], -1)),
    "depthwise convolution": depthwise,
    "product of activations": lambda width: Beside(lambda y: y @ y.transpose(1, 2)),
}
FREE = ("softmax", "layer norm")
"""The fallbacks whose lengths are free."""
ELSEWHERE = {"neoverse-v1": ("softmax", "sums"), "cuda-sm80": ("layer norm",)}


def rows() -> Iterator[Row]:
    for target, names in {EVERY: tuple(SPECS), **SOME}.items():
        for name in names:
            yield _of_spec(name, target, {"embed_dim": 64, "num_heads": 4, **SPECS[name]})
    yield _of_spec("large", "cuda-sm90a", {"num_heads": 8, **HOPPER})
    for target in (EVERY, "cuda-sm80"):
        yield Row("present keys", target, present)
    for name, (target, nodes) in FILES.items():
        yield Row(f"file: {name}", target, functools.partial(file_of, nodes), {"without_attention": "accept"})
    for name in FALLBACKS:
        yield Row(f"fallback: {name}", EVERY, functools.partial(exported, name))
    for target, names in ELSEWHERE.items():
        for name in names:
            yield Row(f"fallback: {name}", target, functools.partial(exported, name))


def _of_spec(name: str, target: str, fields: dict[str, Any]) -> Row:
    options: dict[str, Any] = {key: fields.pop(key) for key in ("dims", "weights") if key in fields}
    return Row(name, target, lambda: mhsa.AttentionSpec(**fields), options)


def present() -> onnx.ModelProto:
    """Keys and values of the past in front of the new ones, as outputs, too."""
    value, kind = helper.make_tensor_value_info, TensorProto.FLOAT
    new, past, full = ["B", 3, "L", 16], ["B", 3, "P", 16], ["B", 3, "T", 16]
    inputs = [*(value(name, kind, new) for name in "qkv"), value("past_k", kind, past), value("past_v", kind, past)]
    outputs = [value("y", kind, new), value("present_k", kind, full), value("present_v", kind, full)]
    node = helper.make_node("Attention", ["q", "k", "v", "", "past_k", "past_v"], [o.name for o in outputs])
    graph = helper.make_graph([node], "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def file_of(nodes: Callable[[], tuple[list[onnx.NodeProto], dict[str, np.ndarray]]]) -> onnx.ModelProto:
    """A file x (B, L, 64) -> y of these nodes and weights."""
    made, weights = nodes()
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", "L", 64])
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(made, "g", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def in_bytes() -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    """A product as `quantize_dynamic` of ONNX Runtime writes it."""
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "step", "zero"]),
        helper.make_node("MatMulInteger", ["q", "w", "zero", "w_zero"], ["sums"]),
        helper.make_node("Cast", ["sums"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["step", "w_step"], ["steps"]),
        helper.make_node("Mul", ["floats", "steps"], ["y"]),
    ]
    weight = (np.arange(64 * 48) % 251 - 125).astype(np.int8).reshape(64, 48)
    return nodes, {"w": weight, "w_zero": np.zeros((), np.int8), "w_step": np.full((), 0.02, np.float32)}


def in_blocks() -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    """A product with weights of four bits, with activations in eight."""
    words = {"K": 64, "N": 48, "bits": 4, "block_size": 32, "accuracy_level": 4}
    node = helper.make_node("MatMulNBits", ["x", "w", "scales"], ["y"], domain="com.microsoft", **words)
    weight = (np.arange(48 * 2 * 16) % 256).astype(np.uint8).reshape(48, 2, 16)
    return [node], {"w": weight, "scales": np.full((48, 2), 0.02, np.float32)}


def recurrent() -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    arrays = {"w": np.full((1, 96, 64), 0.1, np.float32), "r": np.full((1, 96, 24), 0.1, np.float32)}
    return [helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=24)], arrays


def skinny() -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    """A row by all of x."""
    nodes = [
        helper.make_node("ReduceMax", ["x", "last"], ["row"], keepdims=1),
        helper.make_node("Transpose", ["x"], ["turned"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["row", "turned"], ["y"]),
    ]
    return nodes, {"last": np.array([1])}


FILES = {
    "eight bits": ("x86-64-v4", in_bytes),
    "four bits": ("sapphirerapids", in_blocks),
    "four bits, elsewhere": ("cuda-sm80", in_blocks),
    "recurrent": (EVERY, recurrent),
    "a row by a matrix": (EVERY, skinny),
}


def exported(name: str, shape: tuple[int, int, int] = (2, 331, 128)) -> onnx.ModelProto:
    """A fallback's model, exported by PyTorch alone, so that both sides compile the same one."""
    free = ({0: "B", 1: "L"},) if name in FREE else None
    module = FALLBACKS[name](shape[-1]).eval()
    program = torch.onnx.export(
        module, (torch.randn(*shape),), dynamo=True, opset_version=23, dynamic_shapes=free, verbose=False
    )
    assert program is not None
    return program.model_proto


# ---- What is in an object file


@dataclass(frozen=True)
class Section:
    name: str
    kind: int
    info: int
    link: int
    item: int  # size of an entry
    content: bytes


@dataclass(frozen=True)
class Symbol:
    name: str
    is_function: bool
    section: int
    at: int
    size: int


@dataclass(frozen=True)
class Object:
    """A 64-bit ELF file that is not linked yet."""

    machine: int
    sections: list[Section]
    symbols: list[Symbol]
    relocations: dict[int, list[tuple[int, int, Symbol, int]]]
    """The relocations of each section, by its number: (place, type, symbol, addend)."""


_SYMTAB, _RELA, _NOBITS, _FUNC = 2, 4, 8, 2
_X86, _AARCH64 = 62, 183


def read(data: bytes) -> Object:
    (machine,), (table,) = struct.unpack_from("<H", data, 18), struct.unpack_from("<Q", data, 40)
    size, count, names_at = struct.unpack_from("<HHH", data, 58)
    headers: list[Any] = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    names = headers[names_at][4]
    sections = [
        Section(_text(data, names + h[0]), h[1], h[7], h[6], h[9], b"" if h[1] == _NOBITS else data[h[4] : h[4] + h[5]])
        for h in headers
    ]
    symbols: list[Symbol] = []
    for table_of in (section for section in sections if section.kind == _SYMTAB):
        texts = sections[table_of.link].content
        for name, info, _, section, at, length in struct.iter_unpack("<IBBHQQ", table_of.content):
            symbols.append(Symbol(_text(texts, name), info & 15 == _FUNC, section, at, length))
    relocations: dict[int, list[tuple[int, int, Symbol, int]]] = {}
    for section in (section for section in sections if section.kind == _RELA):
        for place, info, addend in struct.iter_unpack("<QQq", section.content):
            relocations.setdefault(section.info, []).append((place, info & 0xFFFFFFFF, symbols[info >> 32], addend))
    return Object(machine, sections, symbols, relocations)


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode(errors="replace")


def functions(data: bytes) -> dict[str, str]:
    """The hash of each function."""
    file = read(data)
    places = _places(file)
    return {place.name: _hashed(*_function(file, place, places)) for place in places}


def _places(file: Object) -> list[Symbol]:
    """Every function, by the notes for unwinding. The bodies of parallel loops have no symbols: they are called after
    the function that refers to them, which starts their threads."""
    ranges = set()
    for index, relocations in file.relocations.items():
        if file.sections[index].name == ".eh_frame":
            for place, _, symbol, addend in relocations:
                (size,) = struct.unpack_from("<I", file.sections[index].content, place + 4)
                ranges.add((symbol.section, symbol.at + addend, size))
    named = {(s.section, s.at): s.name.removeprefix(_TVM) for s in file.symbols if s.is_function and s.section}
    assert named.keys() <= {(section, at) for section, at, _ in ranges}, "code without such notes"
    names, todo = dict(named), sorted(ranges)
    while todo:
        known = [place for place in todo if place[:2] in names]
        assert known, "code that nothing refers to"
        todo = [place for place in todo if place[:2] not in names]
        for section, at, size in known:
            bodies = [place[:2] for place in todo if place[:2] in _referred(file, section, at, size)]
            for i, body in enumerate(bodies):
                names.setdefault(body, f"{names[section, at].rstrip('_')}_loop_{i}")
    return [Symbol(names[section, at], True, section, at, size) for section, at, size in sorted(ranges)]


def _referred(file: Object, section: int, at: int, size: int) -> set[tuple[int, int]]:
    """(section, place) of what a function may refer to."""
    code = file.sections[section].content[at : at + size]
    found = {(section, at + target) for _, target in _resolved(file.machine, code)}
    for place, _, symbol, addend in file.relocations.get(section, ()):
        if at <= place < at + size:
            found.add((symbol.section, symbol.at + addend))
    return found


def _function(file: Object, symbol: Symbol, places: list[Symbol]) -> Iterator[bytes]:
    """A function's bytes, with nothing where they refer to other places; then what these places are."""
    first, last = symbol.at, symbol.at + symbol.size
    code = bytearray(file.sections[symbol.section].content[first:last])
    named = []
    starts = {other.at: other.name for other in places if other.section == symbol.section}
    for at, target in _resolved(file.machine, bytes(code)):
        if not 0 <= target < symbol.size and (name := starts.get(first + target)):
            named.append((at, name.encode()))
    for at, _ in named:
        keep = code[at + 3] & 0xFC if file.machine == _AARCH64 else 0  # the operation, beside 26 bits of distance
        code[at : at + 4] = bytes((0, 0, 0, keep))
    for place, kind, target_symbol, addend in file.relocations.get(symbol.section, ()):
        if first <= place < last:
            meaning = _meaning(file, target_symbol, kind, addend, places)
            named.append((place - first, f"{kind} ".encode() + meaning))
    yield bytes(code)
    for at, what in sorted(named):
        yield f" {at} ".encode() + what


def _resolved(machine: int, code: bytes) -> Iterator[tuple[int, int]]:
    """(place, target from the function's start) of what may be a distance to other code of the file."""
    if machine == _AARCH64:
        for at in range(0, len(code) - 3, 4):
            (word,) = struct.unpack_from("<I", code, at)
            if word >> 26 & 0x1F == 0x05:  # b, bl
                yield at, at + 4 * ((word & 0x3FFFFFF ^ 1 << 25) - (1 << 25))
    elif machine == _X86:
        for at in range(2, len(code) - 3):
            one, two = code[at - 2], code[at - 1]
            is_jump = two in (0xE8, 0xE9) or (one == 0x0F and two >> 4 == 8)
            if is_jump or (one == 0x8D and two & 0xC7 == 5):  # or lea, from the instruction pointer on
                yield at, at + 4 + int.from_bytes(code[at : at + 4], "little", signed=True)


def _meaning(file: Object, symbol: Symbol, kind: int, addend: int, places: list[Symbol]) -> bytes:
    """What is referred to: code or variables by name, constants and texts by content."""
    if not 0 < symbol.section < len(file.sections):
        return f"{symbol.name}{addend:+}".encode()
    section = file.sections[symbol.section]
    if section.name.startswith(".rodata.cst"):
        if symbol.name:  # the addend is then only how far the place lies before the instruction's end
            return section.content[symbol.at : symbol.at + section.item] + f" {addend:+}".encode()
        return section.content[addend : addend + section.item]
    if section.name.startswith(".rodata") and symbol.section not in file.relocations:
        at = symbol.at + addend + (4 if file.machine == _X86 and kind in (2, 4) else 0)
        return section.content[at : section.content.index(b"\0", at)]
    if section.name.startswith(".text") and not symbol.is_function:
        inside = (place for place in places if place.section == symbol.section)
        for other in inside:
            if other.at <= symbol.at + addend < other.at + other.size:
                return f"{other.name}{symbol.at + addend - other.at:+}".encode()
    return f"{symbol.name or section.name}{addend if symbol.name else ''}".encode()


def packed(data: bytes) -> dict[str, str]:
    """Hashes of what is in the object that holds a module's imports: the VM's instructions and constants; kernels of a
    GPU."""
    content = b"".join(s.content for s in read(data).sections if s.name.startswith((".rodata", ".lrodata", ".data")))
    at = content.find(_CUBIN)
    if at < 0:
        return {"the VM's instructions": _hashed(content)}
    (length,) = struct.unpack_from("<Q", content, at - 8)
    found = {"the VM's instructions": _hashed(*_without_lengths(content, at, length))}
    for section in read(content[at : at + length]).sections:
        if section.name.startswith(".text."):
            registers = section.info >> 24
            found[section.name.removeprefix(".text.")] = _hashed(f"{registers} ".encode(), section.content)
    return found


def _without_lengths(content: bytes, at: int, length: int) -> Iterator[bytes]:
    """What lies around a cubin, without the numbers of bytes that it is part of."""
    end, before = at + length, bytearray(content[8:at])
    for place in range(len(before) - 7):
        if struct.unpack_from("<Q", content, 8 + place)[0] == end - (8 + place + 8):
            before[place : place + 8] = bytes(8)
    yield bytes(before)
    yield content[end:]


def _hashed(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


# ---- A side


def _compiled(row: Row, models: dict[str, onnx.ModelProto]) -> mhsa.Artifact:
    """A row's artifact; `models` are those of other rows of its name, for other targets: exported once."""
    if row.name in models:
        options = {key: value for key, value in row.options.items() if key != "dims"}  # they are fixed in it
        return mhsa.compile(models[row.name], row.target, **options)
    artifact = mhsa.compile(row.source(), row.target, **row.options)
    models[row.name] = onnx.load(artifact.path / "model.onnx")
    return artifact


def run(row: Row, models: dict[str, onnx.ModelProto]) -> dict[str, Any]:
    """What a row becomes here, or why it does not compile."""
    torch.manual_seed(0)
    seen: dict[str, str] = {}
    began = time.monotonic()
    try:
        with warnings.catch_warnings(), objects(seen):
            warnings.simplefilter("ignore")
            artifact = _compiled(row, models)
    except Exception as error:
        traceback.print_exc()
        return {"name": row.name, "target": row.target, "error": f"{type(error).__name__}: {error}"[:500]}
    manifest = msgspec.to_builtins(artifact.manifest)
    of_kernels = [op for op in manifest["ops"] if op["source"] != "fallback"]
    return {
        "name": row.name,
        "target": row.target,
        "kernels": sorted({op["kernel"] for op in of_kernels}),
        "operations": [op["name"] for op in of_kernels],
        "library": _hashed((artifact.path / "module.so").read_bytes()),
        "functions": seen,
        "manifest": {key: value for key, value in manifest.items() if key not in VARIES},
        "seconds": round(time.monotonic() - began, 1),
    }


class objects:
    """A context in which what TVM hands to a linker is looked at: `seen` gets the hash of each function."""

    def __init__(self, seen: dict[str, str]) -> None:
        self.seen, self.before = seen, tvm.runtime.Module.export_library

    def __enter__(self) -> None:
        before, seen = self.before, self.seen

        def export(module: Any, name: str, *, fcompile: Any, **others: Any) -> Any:
            @functools.wraps(fcompile)
            def link(output: str, files: list[str], *args: Any, **options: Any) -> Any:
                for file in map(Path, files):
                    data = file.read_bytes()
                    seen.update(packed(data) if file.name.endswith("devc.o") else functions(data))
                return fcompile(output, files, *args, **options)

            return before(module, name, fcompile=link, **others)

        tvm.runtime.Module.export_library = export

    def __exit__(self, *error: object) -> None:
        tvm.runtime.Module.export_library = self.before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", default="", help="rows whose name or target holds this")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    models: dict[str, onnx.ModelProto] = {}
    for row in rows():
        if options.only in f"{row.name} {row.target}":
            found.append(run(row, models))
            said = found[-1].get("error") or f"{found[-1]['seconds']:.1f} s"
            print(f"{row.name:32}{row.target:18}{said}", file=sys.stderr, flush=True)
    options.json.write_text(json.dumps({"package": str(Path(mhsa.__file__).parent), "rows": found}, indent=1))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
