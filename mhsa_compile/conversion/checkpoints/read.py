"""A path -> the checkpoint that lies there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from mhsa_compile.conversion.checkpoints import gguf_file, safetensors_files
from mhsa_compile.conversion.checkpoints.checkpoint import Checkpoint
from mhsa_compile.errors import InputError
from mhsa_compile.files.foreign_errors import entry_point

_KINDS = "a .gguf file, a .safetensors file with its config.json beside it, or the folder of both"


@entry_point
def read_checkpoint(path: str | Path, *, activations: Literal["int8", "float"] = "int8") -> Checkpoint:
    """A checkpoint of GPTQ (AutoGPTQ, GPTQModel), AWQ (AutoAWQ) or GGUF (llama.cpp); its numbers stay as they are.

    path         a .gguf file, a .safetensors file with its config.json beside it, or the folder of both
    activations  what products take: "int8" rounds them to eight bits by the blocks of the weights, "float" does not

    GPTQ   4 and 8 bits, checkpoint formats "gptq" (zero points less one) and "gptq_v2"; no activation order
    AWQ    4 bits, version "gemm"
    GGUF   Q8_0, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K and Q6_K, by the package gguf; other types are in `unread`. Zero
           points of those with offsets are floats, rounded once, and their activations are never rounded

    Groups of 16, 32, 64, 128 and 256 terms are blocks of ours, longer ones and whole columns several of one scale.
    Raises InputError, ModelError for what is damaged or means something else, InstallationError without gguf.

    >>> import json, torch
    >>> from safetensors.torch import save_file
    >>> words = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    >>> _ = Path("config.json").write_text(json.dumps({"quantization_config": words}))
    >>> parts = {"qweight": torch.zeros(64, 4).int(), "qzeros": torch.zeros(2, 4).int(), "scales": torch.ones(2, 32)}
    >>> save_file({f"up.{name}": part for name, part in parts.items()}, "model.safetensors")
    >>> checkpoint = read_checkpoint("model.safetensors")
    >>> checkpoint, checkpoint.word
    (AWQ checkpoint 'model.safetensors': 1 linears, 'int4:block=32,zeros')
    """
    place = Path(path)
    if activations not in ("int8", "float"):
        raise InputError("activations", '"int8" or "float"', repr(activations))
    if place.suffix == ".gguf":
        checkpoint = gguf_file.read(place)
    elif place.is_dir() or place.suffix == ".safetensors":
        checkpoint = safetensors_files.read(place)
    else:
        raise InputError("path", _KINDS, repr(str(path)))
    return replace(checkpoint, rounds_x=activations == "int8")
