"""GPTQ and AWQ in safetensors: words of 32 bits, of which each has several numbers.

The tensors of a linear of K inputs, N outputs and G groups:

           qweight                    qzeros          scales
GPTQ   (K bits / 32, N)          (G, N bits / 32)     (G, N)     a word has neighbouring inputs, or zeros of outputs
AWQ    (K, N bits / 32)          (G, N bits / 32)     (G, N)     a word has neighbouring outputs, in an order of its own

Sources: AutoGPTQ 0.7.1 nn_modules/qlinear, GPTQModel 7.7.0 utils/model.py, AutoAWQ 0.2.9 modules/linear/gemm.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mhsa_compile.conversion.checkpoints.checkpoint import Checkpoint
from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.files import input_files
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.nn.weight_blocks import WeightBlocks, middle, together
from mhsa_compile.spec.weight_words import BLOCKS

_WORD = 32
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where a word has each of eight neighbouring outputs."""
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_WIDEST = 128  # of the blocks that a longer group is cut into: what activations in eight bits still bear


@dataclass(frozen=True)
class _Format:
    """How the words of a checkpoint are read. `group` is None where a whole column has one scale."""

    tool: Literal["GPTQ", "AWQ"]
    bits: Literal[4, 8]
    group: int | None
    zeros_less_one: bool = False
    wraps_by_words: bool = False

    @property
    def numbers(self) -> int:
        """How many numbers a word of 32 bits packs."""
        return _WORD // self.bits


def read(place: Path) -> Checkpoint:
    """A folder, or a file beside its config. Raises InputError and ModelError."""
    folder = place if place.is_dir() else place.parent
    form = _format(_config(folder))
    tensors = _tensors(sorted(place.glob("*.safetensors")) if place.is_dir() else [place])
    names = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    if not names:
        raise ModelError(str(place), "linears with a qweight", f"tensors such as {', '.join(sorted(tensors)[:3])}")
    if twice := [name for name in names if f"{name}.weight" in tensors]:
        raise ModelError(twice[0], "one weight", "a weight beside its qweight")
    parts = {name: {part: tensors.pop(f"{name}.{part}", None) for part in _PARTS} for name in names}
    linears = {name: _linear(name, parts[name], form) for name in names}
    if all(_is_middle(blocks) for blocks in linears.values()):
        linears = {name: blocks._replace(zeros=None) for name, blocks in linears.items()}
    return Checkpoint(str(place), form.tool, linears, tensors)


def _is_middle(blocks: WeightBlocks) -> bool:
    """Whether all zero points are what stands for 0 where none are stored."""
    return bool((blocks.points() == middle(blocks.bits)).all())


def _tensors(files: list[Path]) -> dict[str, Tensor]:
    from safetensors.torch import load

    tensors: dict[str, Tensor] = {}
    for file in files:
        raw = input_files.read(file, InputError, "path", "a safetensors file")
        with reading(ModelError, str(file), "a safetensors file"):
            more = load(raw)
        if twice := sorted(name for name in more.keys() & tensors if not torch.equal(more[name], tensors[name])):
            hint = "Name the file that is meant, or remove the others."
            raise ModelError(str(file), "each tensor in one file", f"another {twice[0]} than a file before it", hint)
        tensors |= more
    return tensors


# ---- The config


def _config(folder: Path) -> Mapping[str, Any]:
    """What the tool says of the file: `quantization_config` of config.json, or a file of its own."""
    for name in ("config.json", "quantize_config.json", "quant_config.json"):
        if (folder / name).exists():
            text = input_files.read_text(folder / name, InputError, name, "a readable file")
            default = {"quant_method": "awq" if name == "quant_config.json" else "gptq"}
            with reading(ModelError, str(folder / name), "a JSON object"):
                values = json.loads(text)
                words = values.get("quantization_config") if name == "config.json" else values
                if words is not None:
                    return default | dict(words)
    hint = "Zero points of GPTQ mean two things; only the config says which."
    raise InputError("path", "a config.json with quantization_config beside the tensors", f"none in {folder}", hint)


def _format(words: Mapping[str, Any]) -> _Format:
    method = str(words.get("quant_method", "")).lower()
    bits, group = words.get("bits", words.get("w_bit")), words.get("group_size", words.get("q_group_size"))
    if method not in ("gptq", "awq"):
        raise ModelError("quant_method", '"gptq" or "awq"', repr(method))
    if words.get("dynamic"):
        raise ModelError("quantization_config", "one form for all layers", f"dynamic {words['dynamic']!r}")
    if isinstance(bits, float) or bits not in ((4, 8) if method == "gptq" else (4,)):
        raise ModelError("bits", "4 or 8" if method == "gptq" else "4, as AutoAWQ packs", repr(bits))
    if not isinstance(group, int) or (group != -1 and group < BLOCKS[0]):
        raise ModelError("group_size", f"{BLOCKS[0]} terms or more, or -1 for a whole column", repr(group))
    width = None if group == -1 else group
    if method == "awq":
        version = str(words.get("version", words.get("checkpoint_format", "gemm"))).lower()
        if version != "gemm":
            raise ModelError("version", '"gemm", whose words are known', repr(version))
        return _Format("AWQ", bits, width)
    kind = str(words.get("checkpoint_format", words.get("format", "gptq"))).lower()
    if kind not in ("gptq", "gptq_v2") or words.get("is_marlin_format"):
        raise ModelError("checkpoint_format", '"gptq" or "gptq_v2"', repr(kind))
    meta = words.get("meta")
    by = str(meta.get("quantizer", "")).lower() if isinstance(meta, Mapping) else ""
    return _Format("GPTQ", bits, width, kind == "gptq", "gptqmodel" in by)


# ---- A linear


def _linear(name: str, parts: Mapping[str, Tensor | None], form: _Format) -> WeightBlocks:
    qweight, qzeros, scales = (_matrix(name, parts, part) for part in _PARTS[:3])
    turned = form.tool == "GPTQ"
    K = qweight.shape[0] * form.numbers if turned else qweight.shape[0]
    N = qweight.shape[1] if turned else qweight.shape[1] * form.numbers
    group = form.group or K
    if N % form.numbers:
        raise ModelError(f"{name}.qweight", f"a multiple of {form.numbers} outputs, as zero points are packed", f"{N}")
    if K % group:
        raise ModelError(f"{name}.qweight", f"groups of {group} that divide its inputs", f"{K} of them")
    for part, value, width in (("scales", scales, N), ("qzeros", qzeros, N // form.numbers)):
        shape = [K // group, width]
        if list(value.shape) != shape:
            raise ModelError(f"{name}.{part}", f"{shape}, of {K} inputs by {group}", f"{list(value.shape)}")
    _check_order(name, parts["g_idx"], K, group)
    numbers = _apart(qweight, form, along=0 if turned else 1).T
    return _blocks(name, numbers.contiguous(), scales.float().T, _zeros(name, qzeros, form).T, form.bits, group)


def _matrix(name: str, parts: Mapping[str, Tensor | None], part: str) -> Tensor:
    """A part of a linear: a matrix of its type, and of scales that are some, with finite weights."""
    if (value := parts[part]) is None:
        raise ModelError(name, "qweight, qzeros and scales", f"no {part}")
    dtypes = _FLOATS if part == "scales" else (torch.int32,)
    if value.dtype not in dtypes or value.ndim != 2 or not value.numel():
        expected = f"a matrix of {' or '.join(map(str, dtypes))}, not empty"
        raise ModelError(f"{name}.{part}", expected, f"{value.dtype} {list(value.shape)}")
    if part == "scales" and (bad := value[~((value > 0) & torch.isfinite(value.float() * 255))]).numel():
        raise ModelError(f"{name}.scales", "positive, finite numbers", f"{float(bad[0])}")
    return value


def _check_order(name: str, places: Tensor | None, K: int, group: int) -> None:
    """Raises ModelError where inputs belong to other groups than those that they lie in."""
    if places is None:
        return
    if tuple(places.shape) != (K,) or not torch.equal(places.long(), torch.arange(K) // group):
        hint = "Quantise with desc_act=False, or with act_group_aware=True of GPTQModel."
        raise ModelError(f"{name}.g_idx", f"groups of {group} neighbouring inputs", "activation order (desc_act)", hint)


def _apart(words: Tensor, form: _Format, along: int) -> Tensor:
    """The numbers of words, uint8, as many times longer along that axis."""
    shifts = torch.arange(0, _WORD, form.bits, dtype=torch.int32)
    mask = (1 << form.bits) - 1
    if along == 0:
        return ((words[:, None, :] >> shifts[None, :, None]) & mask).to(torch.uint8).flatten(0, 1)
    numbers = ((words[:, :, None] >> shifts) & mask).to(torch.uint8)
    return (numbers[..., _AWQ_ORDER] if form.tool == "AWQ" else numbers).flatten(1)


def _zeros(name: str, words: Tensor, form: _Format) -> Tensor:
    """The zero points (G, N), uint8. The format "gptq" has them less one: a zero of 0 borrows from its neighbours where
    GPTQModel wrote it, and not where AutoGPTQ did."""
    if not form.zeros_less_one:
        return _apart(words, form, along=1)
    ones = sum(1 << shift for shift in range(0, _WORD, form.bits))
    by_numbers = (_apart(words, form, along=1) + 1) & ((1 << form.bits) - 1)
    sums = (words.long() + ones) & 0xFFFFFFFF
    by_words = _apart(torch.where(sums > 0x7FFFFFFF, sums - (1 << _WORD), sums).int(), form, along=1)
    if form.wraps_by_words or torch.equal(by_numbers, by_words):
        return by_words
    hint = 'Save it in the format "gptq_v2", or with meta.quantizer in its config.'
    raise ModelError(f"{name}.qzeros", "zero points of 1 or more", "one of 0, which tools read differently", hint)


def _blocks(name: str, numbers: Tensor, scales: Tensor, zeros: Tensor, bits: Literal[4, 8], group: int) -> WeightBlocks:
    """numbers (N, K), scales and zeros (N, G), as blocks of which a group has one or several."""
    fits = [block for block in BLOCKS if group % block == 0 and (block <= _WIDEST or block == group)]
    if not fits:
        raise ModelError(f"{name}.qweight", f"groups of a multiple of {BLOCKS[0]} terms", str(group))
    block = fits[-1]
    times = group // block
    packed = together(numbers, bits).view(len(numbers), -1, block * bits // 8)
    points = together(zeros.repeat_interleave(times, 1), bits).contiguous()
    return WeightBlocks(packed, scales.repeat_interleave(times, 1).contiguous(), points, bits)
