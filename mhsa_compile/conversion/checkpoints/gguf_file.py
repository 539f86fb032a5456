"""GGUF of llama.cpp, read by the package gguf: a block of a row is some bytes, in an order of each type.

type    terms of a block   bytes   holds
Q8_0     32                34      a float16 scale d, numbers of 8 bits with a sign
Q4_0     32                18      d, numbers of 4 bits around 8: terms i and i + 16 in a byte
Q4_1     32                20      d and a float16 offset m, numbers as in Q4_0
Q5_0     32                22      d, a fifth bit of each number, numbers as in Q4_0, around 16
Q5_1     32                24      d, m, the rest as in Q5_0
Q4_K    256               144      float16 d, dmin; of each 32 terms 6 bits of a scale and an offset; 4-bit numbers
Q5_K    256               176      the same, and a fifth bit of each number
Q6_K    256               210      4 bits and 2 bits of each number, an 8-bit scale for each 16 terms, float16 d

W = (q - zero) scale holds all of Q8_0, Q4_0, Q5_0 and Q6_K exactly: scales are products of at most 19 bits, numbers
of 5 and 6 bits take 8. The others are scale q + offset. Their scales are exact in float32, their zeros, -offset /
scale, are rounded, so that weights differ from llama.cpp's by two roundings of float32. Source: gguf-
py/gguf/quants.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from mhsa_compile.conversion.checkpoints.checkpoint import Checkpoint
from mhsa_compile.errors import InputError, InstallationError, ModelError
from mhsa_compile.files import input_files
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.nn.weight_blocks import WeightBlocks, together


def read(place: Path) -> Checkpoint:
    """A .gguf file. Raises InputError, ModelError and InstallationError."""
    try:
        import gguf
    except ImportError as error:
        hint = "Install it: pip install 'mhsa-compile[gguf]'."
        raise InstallationError("path", "the package gguf, which reads such files", "none installed", hint) from error
    input_files.open_file(place, InputError, "path", "a .gguf file").close()
    with reading(ModelError, str(place), "a GGUF file"):
        reader = gguf.GGUFReader(place)
        if reader.byte_order == "S":
            raise ModelError(str(place), "bytes in this machine's order", "those of the other, which scales are in")
        linears, unread = dict[str, WeightBlocks](), dict[str, str]()
        for tensor in reader.tensors:
            name, kind = tensor.name.removesuffix(".weight"), tensor.tensor_type.name
            if len(tensor.shape) < 2 or kind in ("F32", "F16", "BF16", "F64"):
                continue
            if name in linears:
                raise ModelError(str(place), "each weight once", f"{name!r} and '{name}.weight'")
            if len(tensor.shape) > 2:
                unread[name] = f"{kind} of {len(tensor.shape)} axes"
            elif kind not in _TYPES:
                unread[name] = f"{kind}, which is not read: {', '.join(_TYPES)} are"
            else:
                linears[name] = _blocks(tensor.name, kind, np.array(tensor.data))
        aliases, heads = _aliases(gguf, reader), _heads(reader, linears)
    if not linears:
        types = sorted({tensor.tensor_type.name for tensor in reader.tensors})
        raise ModelError(str(place), f"linears of {', '.join(_TYPES)}", f"tensors of {', '.join(types)}")
    return Checkpoint(str(place), "GGUF", linears, unread=unread, aliases=aliases, heads=heads)


def _field(reader: Any, name: str) -> Any:
    """A value of the file's metadata; None where there is none."""
    field = reader.fields.get(name)
    return None if field is None else field.contents()


def _aliases(gguf: Any, reader: Any) -> Mapping[str, str]:
    """Name of a layer in transformers -> the one in the file, as the package maps them for this architecture."""
    name = _field(reader, "general.architecture")
    kinds = [kind for kind, word in gguf.MODEL_ARCH_NAMES.items() if word == name]
    if not kinds:
        return {}
    layers = min(int(_field(reader, f"{name}.block_count") or 0), len(reader.tensors))  # a file may state any number
    return {alias: place for alias, (_, place) in gguf.get_tensor_name_map(kinds[0], layers).mapping.items()}


def _heads(reader: Any, linears: Mapping[str, WeightBlocks]) -> Mapping[str, int]:
    """Projection -> its heads, of those whose rows may lie in llama.cpp's order for rotary embeddings."""
    name = _field(reader, "general.architecture")
    queries = _field(reader, f"{name}.attention.head_count")
    keys = _field(reader, f"{name}.attention.head_count_kv") or queries
    counts = {".attn_q": queries, ".attn_k": keys}
    return {
        linear: count
        for linear in linears
        for part, count in counts.items()
        if linear.endswith(part) and isinstance(count, int) and count > 0
    }


# ---- Blocks: bytes (N, n, bytes of one) -> numbers (N, n, parts, terms), scales (N, n, parts), and zeros


def _blocks(name: str, kind: str, rows: np.ndarray) -> WeightBlocks:
    """The weight of rows of bytes (N, bytes). Raises ModelError for scales that are not finite."""
    read, bits, size = _TYPES[kind]
    numbers, scales, zeros = read(rows.reshape(len(rows), -1, size))
    if not np.isfinite(scales).all() or (zeros is not None and not np.isfinite(zeros).all()):
        raise ModelError(name, f"finite scales of {kind}", "NaN or infinity")
    packed = together(torch.from_numpy(np.ascontiguousarray(numbers)).flatten(1, 2), bits)
    points = None if zeros is None else torch.from_numpy(zeros.reshape(len(rows), -1))
    return WeightBlocks(packed, torch.from_numpy(scales.reshape(len(rows), -1)), points, bits)


_BlockParts = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def _half(bytes: np.ndarray) -> np.ndarray:
    """(..., 2 m) bytes -> (..., m) float16, as float32."""
    return np.ascontiguousarray(bytes).view("<f2").astype(np.float32)


def _nibbles(bytes: np.ndarray) -> np.ndarray:
    """(..., m) -> (..., 2, m): lower and upper halves of bytes."""
    return np.stack([bytes & 15, bytes >> 4], -2)


def _q8_0(blocks: np.ndarray) -> _BlockParts:
    return blocks[:, :, None, 2:] ^ 0x80, _half(blocks[..., :2]), None


def _q4_0(blocks: np.ndarray) -> _BlockParts:
    return _nibbles(blocks[:, :, None, 2:]).reshape(*blocks.shape[:2], 1, 32), _half(blocks[..., :2]), None


def _q4_1(blocks: np.ndarray) -> _BlockParts:
    numbers = _nibbles(blocks[:, :, None, 4:]).reshape(*blocks.shape[:2], 1, 32)
    return _with_offsets(numbers, _half(blocks[..., :2]), _half(blocks[..., 2:4]))


def _q5_0(blocks: np.ndarray) -> _BlockParts:
    return _of_five_bits(blocks[..., 2:]) + np.uint8(112), _half(blocks[..., :2]), None  # around 128, not 16


def _q5_1(blocks: np.ndarray) -> _BlockParts:
    return _with_offsets(_of_five_bits(blocks[..., 4:]), _half(blocks[..., :2]), _half(blocks[..., 2:4]))


def _of_five_bits(blocks: np.ndarray) -> np.ndarray:
    """Four bytes of fifth bits, a term each, then bytes of nibbles."""
    fifths = np.unpackbits(blocks[..., :4], axis=-1, bitorder="little")
    numbers: np.ndarray = _nibbles(blocks[..., 4:]).reshape(fifths.shape) | fifths << 4
    return numbers[:, :, None]


def _q4_k(blocks: np.ndarray) -> _BlockParts:
    return _with_offsets(_nibbles_of_k(blocks[..., 16:]), *_scales_of_k(blocks))


def _q5_k(blocks: np.ndarray) -> _BlockParts:
    fifths = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _with_offsets(_nibbles_of_k(blocks[..., 48:]) | fifths << 4, *_scales_of_k(blocks))


def _nibbles_of_k(bytes: np.ndarray) -> np.ndarray:
    """Parts of 32 terms, two of them in 32 bytes."""
    return _nibbles(bytes.reshape(*bytes.shape[:2], 4, 32)).reshape(*bytes.shape[:2], 8, 32)


def _scales_of_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(scales, offsets) of the eight parts of a block, the offsets as they are added."""
    d, dmin = _half(blocks[..., :2]), _half(blocks[..., 2:4])
    low, middle, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 2 & 48)], -1).astype(np.float32)
    offsets = np.concatenate([middle & 63, (high >> 4) | (middle >> 2 & 48)], -1).astype(np.float32)
    return d * scales, -dmin * offsets


def _with_offsets(numbers: np.ndarray, scales: np.ndarray, offsets: np.ndarray) -> _BlockParts:
    """W = scale q + offset. Where the scale is 0 all weights are the offset: (1 - 0) offset."""
    constant = scales == 0
    zeros = np.where(constant, np.float32(0), -offsets / np.where(constant, np.float32(1), scales))
    numbers = np.where(constant[..., None], np.uint8(1), numbers)
    return numbers, np.where(constant, offsets, scales), zeros.astype(np.float32)


def _q6_k(blocks: np.ndarray) -> _BlockParts:
    fours = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64)).reshape(*blocks.shape[:2], 8, 32)
    twos = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    numbers = (fours | twos.reshape(*blocks.shape[:2], 8, 32) << 4) + np.uint8(96)  # around 128, not 32
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32) * _half(blocks[..., 208:])
    return numbers.reshape(*blocks.shape[:2], 16, 16), scales, None


_TYPES: dict[str, tuple[Callable[[np.ndarray], _BlockParts], Literal[4, 8], int]] = {
    "Q4_0": (_q4_0, 4, 18),
    "Q4_1": (_q4_1, 4, 20),
    "Q4_K": (_q4_k, 4, 144),
    "Q5_0": (_q5_0, 8, 22),
    "Q5_1": (_q5_1, 8, 24),
    "Q5_K": (_q5_k, 8, 176),
    "Q6_K": (_q6_k, 8, 210),
    "Q8_0": (_q8_0, 8, 34),
}
"""Type -> how it is read, bits of a number here, bytes of a block."""
