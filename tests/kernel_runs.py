"""Runs one kernel by itself, through TVM's JIT, against a float64 NumPy reference."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import tvm

from mhsa_compile.build import pass_context
from mhsa_compile.kernels.base import AttentionOp, Emitted
from mhsa_compile.profile import Hardware, Link, TargetProfile, TvmTarget


def vector_machine(bits: int, registers: int, mcpu: str = "x86-64-v3", features: tuple[str, ...] = ()) -> TargetProfile:
    """A made-up machine: LLVM splits vectors that the real one does not have, so any width runs anywhere."""
    hardware = Hardware(vector_bits=bits, vector_registers=registers, features=features)
    target = TvmTarget(kind="llvm", mtriple="x86_64-linux-gnu", mcpu=mcpu)
    return TargetProfile(
        name="made-up", family="cpu", tvm=target, hardware=hardware, link=Link(triple="x86_64-linux-gnu")
    )


def compiled(emitted: Emitted, profile: TargetProfile) -> Any:
    functions = {"run": emitted.run, "pack": emitted.pack}
    module = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items() if f is not None})
    return _build(module, profile)


def assembly(emitted: Emitted, profile: TargetProfile) -> str:
    module = tvm.IRModule({"run": emitted.run.with_attr("global_symbol", "run")})
    return _build(module, profile).mod.inspect_source("asm")


def _build(module: tvm.IRModule, profile: TargetProfile) -> Any:
    with pass_context():
        return tvm.compile(module, target=tvm.target.Target(profile.tvm_config()))


def inner_loops(code: str, instruction: str) -> list[list[str]]:
    """The bodies of the matrix products' innermost loops, from a label to the jump back to it: those with more than six
    of the instruction."""
    lines = code.splitlines()
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if re.match(r"\.L\w+:", line)}
    loops = []
    for i, line in enumerate(lines):
        jump = re.match(r"\s+j\w+\s+(\.L\w+)", line)
        if jump and labels.get(jump[1], i) < i:
            body = lines[labels[jump[1]] + 1 : i + 1]
            innermost = not any(re.match(r"\.LBB\w+:", other) for other in body)
            if innermost and sum(instruction in other for other in body) > 6:
                loops.append(body)
    return loops


def stack_stores(body: list[str]) -> list[str]:
    """Vectors that a loop spills."""
    return [line for line in body if re.search(r"vmov\w+\s+%[xyz]mm\d+, .*\(%r[sb]p\)", line)]


def call(function: Any, *arrays: np.ndarray) -> np.ndarray:
    """Calls a destination-passing function; the last array is the output."""
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    function(*tensors)
    return tensors[-1].numpy()


def heads(rows: np.ndarray, count: int) -> np.ndarray:
    """(B, L, count * E) -> (B, count, L, E)."""
    B, L, width = rows.shape
    return rows.reshape(B, L, count, width // count).transpose(0, 2, 1, 3)


def attention(op: AttentionOp, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """The operator in float64, heads first: q (B, H, L, E), k (B, G, S, E), v (B, G, S, F) -> (B, L, H * F)."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    repeats = op.num_heads // op.num_kv_heads
    k, v = k.repeat(repeats, axis=1), v.repeat(repeats, axis=1)
    scores = q @ k.swapaxes(-1, -2) * op.scale
    L, S = scores.shape[-2:]
    visible = np.ones_like(scores, dtype=bool)
    if op.band is not None:
        place = np.arange(L)[:, None] + (S - L if op.band.alignment == "bottom_right" else 0)
        distance = place - np.arange(S)
        visible &= True if op.band.left is None else distance <= op.band.left
        visible &= True if op.band.right is None else -distance <= op.band.right
    if op.static_mask is not None:
        visible &= op.static_mask.visible
    if mask is not None and mask.dtype == bool:
        visible &= mask
    elif mask is not None:
        scores, visible = scores + np.where(np.isneginf(mask), 0, mask), visible & ~np.isneginf(mask)
    scores = np.where(visible, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(top), 0, top))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    terms = np.where(visible[..., None], weights[..., None] * v[:, :, None], 0)
    y = terms.sum(axis=-2)
    return y.transpose(0, 2, 1, 3).reshape(y.shape[0], L, -1)
