"""NumKong, for products and attention of bfloat16 on matrix tiles.

Its package multiplies rows by a matrix that was packed before. Its attention is in no package, only in the headers of
its source distribution, which Zig compiles here; keys and values are packed before, which is not timed, as in its own
figures. Neither knows threads: rows, and heads, are handed out.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mhsa_bench.native_threads import together
from mhsa_bench.peers.peer import Opened, Problem
from mhsa_bench.peers.registry import Fastest
from mhsa_compile.errors import ModelError
from mhsa_compile.hardware import environment, host, zig
from mhsa_compile.verification.random_inputs import Arrays

ALIGNMENT = 64
WIDTHS = (32, 64, 96, 128)
"""Of heads: beyond them it writes outside of its own arrays, or of the result."""
KEYS = 32
"""What it packs of values is a multiple of so many keys, which the bytes that it asks for do not count."""
FUNCTIONS = {"tiles": "bf16_amx_bc32", "tiles, packed queries": "bf16_amx_optimized"}
"""Its two attentions on tiles; Zig finds both in the header, `Fastest` keeps to what is right."""
_HEADER = "include/numkong/attention/sapphireamx.h"
_SIZES = ("heads", "kv_heads", "queries", "keys", "width")


class NumKongLinear:
    """`dots_packed`: sums stay float32, and there is no bias, which is added where the result is checked."""

    name = "numkong"

    @contextmanager
    def open(self, problem: Problem, threads: int) -> Iterator[Opened]:
        _require_bfloat16(problem)
        environment.require("numkong", extra="tiles-bench")
        import numkong

        weight, bias = problem.weights["weight"], problem.weights.get("bias")
        packed = numkong.dots_pack(_tensor(numkong, weight), dtype="bfloat16")
        with ExitStack() as stack:
            calls = []
            for arrays in problem.inputs:
                (rows,) = arrays.values()
                matrix = rows.reshape(-1, rows.shape[-1])
                result = np.empty((len(matrix), len(weight)), np.float32)
                parts = [
                    partial(
                        numkong.dots_packed,
                        _tensor(numkong, matrix[first:last]),
                        packed,
                        out=_tensor(numkong, result[first:last], "float32"),
                    )
                    for first, last in _parts(len(matrix), threads)
                ]
                calls.append(partial(_run, stack.enter_context(together(parts)), result))
            yield Opened(calls, lambda result: [result if bias is None else result + bias.astype(np.float32)])


class NumKongAttention:
    """One of its attentions on tiles, out of its sources in `folder`; the result stays float32."""

    def __init__(self, name: str, function: str, folder: Path | None) -> None:
        self.name, self.function, self.folder = name, function, folder

    @contextmanager
    def open(self, problem: Problem, threads: int) -> Iterator[Opened]:
        _require_bfloat16(problem)
        if not problem.is_core or problem.spec.hides_keys:
            raise ModelError("numkong", "attention of q, k and v that sees all keys: it has no other", "something else")
        widths = problem.spec.head_dim, problem.spec.v_head_dim
        if widths[0] != widths[1] or widths[0] not in WIDTHS:
            raise ModelError("numkong", f"heads of {', '.join(map(str, WIDTHS))}, keys and values alike", str(widths))
        with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
            library = _library(self._sources(), self.function, Path(place))
            calls = [self._call(library, problem, arrays, threads, stack) for arrays in problem.inputs]
            yield Opened(calls, lambda result: [result])

    def _sources(self) -> Path:
        if self.folder is None or not (self.folder / _HEADER).exists():
            got = "none" if self.folder is None else repr(str(self.folder))
            hint = "Run: pip download --no-deps --no-binary numkong numkong, unpack it, and name it with --numkong."
            raise ModelError("numkong", f"a folder of its sources, with {_HEADER}", got, hint)
        return self.folder

    def _call(
        self, library: ctypes.CDLL, problem: Problem, arrays: Arrays, threads: int, stack: ExitStack
    ) -> partial[np.ndarray]:
        """The call for one set of inputs: whole heads of keys and values for each thread, of all entries."""
        spec, (B, L, S) = problem.spec, (problem.sizes[symbol] for symbol in "BLS")
        group, scale = spec.num_heads // spec.num_kv_heads, spec.head_dim**-0.5 if spec.scale is None else spec.scale
        q, k, v = (np.ascontiguousarray(arrays[name]) for name in "qkv")
        result = np.empty(q.shape, np.float32)
        parts = []
        for first, last in _parts(spec.num_kv_heads, threads):
            jobs = []
            for entry in range(B):
                sizes = ((last - first) * group, last - first, L, S, spec.head_dim)
                memory = _aligned(library.attention_bytes(last - first, spec.head_dim, -(-S // KEYS) * KEYS))
                keys, values = k[entry, first:last], v[entry, first:last]
                library.attention_pack(keys.ctypes.data, values.ctypes.data, memory.ctypes.data, *sizes)
                heads = slice(first * group, last * group)
                operands = (q[entry, heads], memory, result[entry, heads])
                jobs.append((operands, [array.ctypes.data for array in operands], sizes))
            parts.append(partial(_attend, library, jobs, scale))
        return partial(_run, stack.enter_context(together(parts)), result)


def attention(folder: Path | None) -> Fastest:
    """The faster of its attentions that are right here."""
    return Fastest("numkong", [NumKongAttention(name, function, folder) for name, function in FUNCTIONS.items()])


def _attend(library: ctypes.CDLL, jobs: Sequence[tuple[Any, list[int], tuple[int, ...]]], scale: float) -> None:
    for _, addresses, sizes in jobs:
        library.attention_run(*addresses, *sizes, scale)


def _run(run: Any, result: np.ndarray) -> np.ndarray:
    run()
    return result


def _library(sources: Path, function: str, place: Path) -> ctypes.CDLL:
    """One of the header's attentions, and its packing, as a library."""
    sizes = ", ".join(f"nk_size_t {size}" for size in _SIZES)
    (place / "attention.c").write_text(f"""
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "numkong/numkong.h"
#include "{_HEADER.removeprefix("include/")}"
nk_size_t attention_bytes(nk_size_t kv_heads, nk_size_t width, nk_size_t keys) {{
    return nk_attention_kv_packed_size_sapphireamx(kv_heads, width, keys);
}}
void attention_pack(nk_bf16_t const *k, nk_bf16_t const *v, void *packed, {sizes}) {{
    nk_attention_pack_k_sapphireamx(k, packed, kv_heads, keys, width);
    nk_attention_pack_v_sapphireamx(v, packed, kv_heads, keys, width);
}}
void attention_run(nk_bf16_t const *q, void const *packed, nk_f32_t *result, {sizes}, nk_f32_t scale) {{
    nk_attention_{function}_sapphireamx(q, packed, result, heads, kv_heads, queries, keys, width, scale);
}}
""")
    words = ["-O3", "-mcpu=native", "-shared", "-fPIC", "-w", f"-I{sources / 'include'}"]
    built = place / "attention.so"
    zig.run("cc", f"{host.architecture()}-linux-gnu.2.17", [*words, place / "attention.c", "-o", built], "NumKong")
    library = ctypes.CDLL(str(built))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.attention_bytes.argtypes, library.attention_bytes.restype = [size] * 3, size
    library.attention_pack.argtypes, library.attention_pack.restype = [pointer] * 3 + [size] * len(_SIZES), None
    library.attention_run.argtypes = [pointer] * 3 + [size] * len(_SIZES) + [ctypes.c_float]
    library.attention_run.restype = None
    return library


def _require_bfloat16(problem: Problem) -> None:
    if problem.dtype != ml_dtypes.bfloat16:
        raise ModelError("numkong", "bfloat16, which it has tiles for", problem.float_dtype)


def _tensor(numkong: Any, array: np.ndarray, dtype: str = "bfloat16") -> Any:
    """NumKong's view of an array, which it does not copy."""
    return numkong.from_pointer(array.ctypes.data, array.shape, dtype, owner=array)


def _parts(count: int, threads: int) -> list[tuple[int, int]]:
    """0 .. count, cut into nearly equal parts, one for each thread that has something to do."""
    edges = [count * part // min(threads, count) for part in range(min(threads, count) + 1)]
    return list(pairwise(edges))


def _aligned(count: int) -> np.ndarray:
    """So many bytes, all zero, from a multiple of 64 on."""
    memory = np.zeros(count + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + count]
