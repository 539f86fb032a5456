"""Runs one kernel by itself, through TVM's JIT, against a reference in float64."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
import tvm
import tvm_ffi

from mhsa_compile.compiler.codegen.build import pass_context
from mhsa_compile.hardware.profile import CpuProfile, Hardware, Link, TvmTarget
from mhsa_compile.kernels.interface.kernel import Emitted
from mhsa_compile.kernels.interface.ops import AttentionOp
from mhsa_compile.nn.functional import to_torch
from support import this_cpu
from support.attention_ops import features


def vector_machine(bits: int, registers: int, mcpu: str = "x86-64-v3", features: tuple[str, ...] = ()) -> CpuProfile:
    """A made-up machine: LLVM splits vectors that the real one does not have, so any width runs anywhere; what `mcpu`
    and `features` have beyond this CPU does not (`support.this_cpu`)."""
    hardware = Hardware(vector_bits=bits, vector_registers=registers, features=features)
    target = TvmTarget(kind="llvm", mtriple="x86_64-linux-gnu", mcpu=mcpu, mattr=this_cpu.attributes(features))
    return CpuProfile(name="made-up", tvm=target, hardware=hardware, link=Link(triple="x86_64-linux-gnu"))


def compiled(emitted: Emitted, profile: CpuProfile) -> Any:
    """What was emitted, compiled to be run here. Raises AssertionError for a machine whose code would kill this
    process."""
    why = this_cpu.lacking(profile.tvm_config())
    assert why is None, why
    return built(emitted, profile)


def built(emitted: Emitted, profile: CpuProfile) -> Any:
    """What was emitted, compiled for any machine; whoever calls it knows that this one runs it."""
    functions = {"run": emitted.run, "pack": emitted.pack}
    module = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items() if f is not None})
    return _build(module, profile)


def tensor_at(array: np.ndarray, first_byte: int) -> Any:
    """A tensor whose first element lies so many bytes behind a multiple of 64, as NumPy's own begin 16 behind one."""
    memory = np.zeros(array.nbytes + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + first_byte
    place = memory[begin : begin + array.nbytes]
    place[:] = array.view(np.uint8).reshape(-1)
    bits = tvm_ffi.from_dlpack(place.view(f"uint{8 * array.itemsize}"))
    view = tvm.get_global_func("runtime.TVMTensorCreateView")
    return view(bits, tvm_ffi.Shape(array.shape), tvm_ffi.dtype(str(array.dtype)), 0)


def assembly(emitted: Emitted, profile: CpuProfile) -> str:
    """The assembly of what was emitted, to be read; the machine may be any."""
    module = tvm.IRModule({"run": emitted.run.with_attr("global_symbol", "run")})
    return _build(module, profile).mod.inspect_source("asm")


def _build(module: tvm.IRModule, profile: CpuProfile) -> Any:
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
    """Vectors that a loop spills. A frame's places are below its %rbp, which otherwise is a pointer as any other."""
    place = r"(?:.*\(%rsp\)|-\d+\(%rbp\))"
    return [line for line in body if re.search(rf"vmov\w+\s+%[xyz]mm\d+, {place}", line)]


def call(function: Any, *arrays: np.ndarray) -> np.ndarray:
    """Calls a destination-passing function; the last array is the output."""
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    function(*tensors)
    return tensors[-1].numpy()


def heads(rows: np.ndarray, count: int) -> np.ndarray:
    """(B, L, count * E) -> (B, count, L, E)."""
    B, L, width = rows.shape
    return rows.reshape(B, L, count, width // count).transpose(0, 2, 1, 3)


def attention(
    op: AttentionOp,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray | None,
    lengths: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    slopes: np.ndarray | None = None,
    dtype: torch.dtype = torch.float64,
) -> np.ndarray:
    """The operator in PyTorch's eager arithmetic, at any dtype, as float64: q (B, H, L, E), k (B, G, S, E),
    v (B, G, S, F), the rest as in AttentionOp -> (B, L, H * F)."""
    B, H, L, _ = q.shape
    scores, visible = masked_scores(op, q, k, mask, lengths, slopes, dtype)
    v = to_torch(v).to(dtype).repeat_interleave(H // v.shape[1], dim=1)
    sink = torch.full((H,), -torch.inf) if sinks is None else to_torch(sinks)
    scores = torch.cat((scores, sink.to(dtype)[:, None, None].expand(B, H, L, 1)), dim=-1)
    blind = scores.isneginf().all(dim=-1, keepdim=True)
    weights = scores.masked_fill(blind, 0).softmax(dim=-1)[..., :-1].masked_fill(~visible | blind, 0)
    y = weights @ v.where(v.isfinite(), 0)
    if not v.isfinite().all():  # not by way of the product, which has weights of 0 for keys that are hidden
        others = v.where(~v.isfinite(), 0)[:, :, None]
        y = y + torch.where(visible[..., None], weights[..., None] * others, 0).sum(dim=-2)
    return y.transpose(1, 2).reshape(B, L, -1).to(torch.float64).numpy()


def masked_scores(
    op: AttentionOp,
    q: np.ndarray,
    k: np.ndarray,
    mask: np.ndarray | None,
    lengths: np.ndarray | None,
    slopes: np.ndarray | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the scores (B, H, L, S) as the softmax takes them, -inf where hidden; what is visible, of that shape)."""
    (B, H, L, _), S = q.shape, k.shape[2]
    q, k = (to_torch(array).to(dtype) for array in (q, k))
    counts = np.full(B, S) if lengths is None else lengths.clip(0, S)
    place = np.arange(L) + np.zeros((B, 1, 1), np.int64)
    if op.window is not None and op.window.alignment == "bottom_right":
        place += counts[:, None, None] - L
    distance = torch.from_numpy(np.arange(S) - place[..., None])
    scores = q @ k.repeat_interleave(H // k.shape[1], dim=1).swapaxes(-1, -2) * op.scale
    if features(op).softcap:
        scores = torch.tanh(scores / features(op).softcap) * features(op).softcap
    if clamp := features(op).softclamp:
        scores = clamp * (scores / (clamp + scores.abs()))
    if slopes is not None:  # a place has more bits than a 16-bit float, as in `functional`
        scores = scores + (to_torch(slopes).double()[:, None, None] * distance).to(dtype)
    visible = torch.from_numpy(_visible(op, distance.numpy(), counts, mask)).expand(scores.shape)
    if mask is not None and mask.dtype != bool:
        scores = scores + to_torch(mask).to(dtype)
    return scores.masked_fill(~visible, -torch.inf), visible


def _visible(op: AttentionOp, distance: np.ndarray, counts: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """bool (B or 1, H or 1, L, S)"""
    visible = np.arange(distance.shape[-1]) < counts[:, None, None, None]
    if op.window is not None:
        visible = visible & (True if op.window.left is None else -distance <= op.window.left)
        visible = visible & (True if op.window.right is None else distance <= op.window.right)
    if op.pairs is not None:
        visible = visible & op.pairs
    if mask is not None:
        visible = visible & (mask if mask.dtype == bool else ~np.isneginf(mask))
    return visible
