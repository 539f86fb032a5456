"""The peers on a GPU, each called as somebody would who cares for its speed.

Masks are made ready outside the timed calls. SDPA's `is_causal` is top-left, as our workloads are.
Notation: B batch, L query length, S key length, H heads, E head dim.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from gpu_bench.problem import GpuProblem
from mhsa_bench.peers.torch_compile import flex_rule
from mhsa_bench.peers.torch_eager import folded_core
from mhsa_compile.errors import InputError, ModelError

Core = Callable[[Tensor, Tensor, Tensor], Tensor]
Call = Callable[[], Any]


@dataclass(frozen=True)
class GpuPeer:
    """`calls`: one for each set of inputs, ready. Raises whatever says why it cannot. `of` is "core" or "block"."""

    name: str
    of: str
    calls: Callable[[GpuProblem], list[Call]]


def core_calls(problem: GpuProblem, core: Core) -> list[Call]:
    return [partial(core, *(inputs[name] for name in "qkv")) for inputs in problem.sets]


def sdpa(problem: GpuProblem, backend: str | None = None) -> Core:
    """F.scaled_dot_product_attention, by one of its backends or by PyTorch's own choice."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    spec = problem.workload.spec
    mask = None if spec.is_causal_alone else problem.visible
    attend = partial(
        scaled_dot_product_attention,
        attn_mask=mask,
        is_causal=spec.is_causal_alone,
        scale=spec.scale,
        enable_gqa=spec.num_kv_heads != spec.num_heads,
    )
    if backend is None:
        return attend
    choice = getattr(SDPBackend, backend)

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([choice]):
            return attend(q, k, v)

    return core


def folded(problem: GpuProblem) -> Core:
    """Attention for decoding that reads keys and values once: its queries are the query heads of a key/value head."""
    spec = problem.workload.spec
    if problem.workload.L != 1 or spec.num_kv_heads == spec.num_heads or problem.visible is not None:
        raise ModelError("peer", "one query, several heads on one key/value head, no mask", "something else")

    return partial(folded_core, spec)


def flex(problem: GpuProblem, compile: Callable[..., Any] = torch.compile) -> Core:
    """FlexAttention, compiled, with a block mask that skips what nobody sees."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    spec, L, S = problem.workload.spec, problem.workload.L, problem.workload.S
    blocks = None
    pairs = problem.visible if spec.needs_lengths else None
    if pairs is not None or spec.band is not None:
        blocks = create_block_mask(flex_rule(spec.band, L, S, pairs), None, None, L, S, device=problem.device)
    is_grouped = spec.num_kv_heads != spec.num_heads
    compiled: Core = compile(
        partial(flex_attention, block_mask=blocks, scale=spec.scale, enable_gqa=is_grouped), dynamic=False
    )
    return compiled


def flash_package(module: str, problem: GpuProblem) -> list[Call]:
    """A package of FlashAttention's, whose tensors are (B, L, H, E): laid out so before it is timed."""
    try:
        function = importlib.import_module(module).flash_attn_func
    except ImportError as error:
        raise ModelError("peer", f"the package {module.partition('.')[0]}", f"none ({error})") from None
    spec = problem.workload.spec
    if spec.needs_lengths:
        raise ModelError("peer", "causality or a window", "a constant mask, which it has no word for")
    words: dict[str, Any] = {"causal": spec.causal is not None, "softmax_scale": spec.scale}
    if spec.window is not None:
        words["window_size"] = spec.window
    sets = [[inputs[name].transpose(1, 2).contiguous() for name in "qkv"] for inputs in problem.sets]
    return [partial(_turned_back, function, tensors, words) for tensors in sets]


def _turned_back(function: Callable[..., Any], tensors: list[Tensor], words: dict[str, Any]) -> Tensor:
    """A call's output as the other peers return it, (B, H, L, E), a view."""
    result = function(*tensors, **words)
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output.transpose(1, 2)


class SdpaBlock(nn.Module):
    """A whole block with fused projections around SDPA, as PyTorch's users write it; weights by their names."""

    def __init__(self, problem: GpuProblem) -> None:
        super().__init__()
        spec, weights = problem.workload.spec, problem.weights
        self.widths = [spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim,
                       spec.num_kv_heads * spec.v_head_dim]  # fmt: skip
        self.heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self.core = sdpa(problem)
        names = ("q_proj", "k_proj", "v_proj")
        self.into = torch.cat([weights[f"{name}.weight"] for name in names])
        self.into_bias = torch.cat([weights[f"{name}.bias"] for name in names]) if spec.bias else None
        self.out, self.out_bias = weights["out_proj.weight"], weights.get("out_proj.bias")

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.split(linear(x, self.into, self.into_bias), self.widths, dim=-1)
        q, k, v = (
            torch.unflatten(part, -1, (h, -1)).transpose(1, 2) for part, h in zip(parts, self.heads, strict=True)
        )
        return linear(self.core(q, k, v).transpose(1, 2).flatten(2), self.out, self.out_bias)


def block_calls(problem: GpuProblem, compile: Callable[[nn.Module], Callable[..., Any]] | None = None) -> list[Call]:
    block: Callable[..., Any] = SdpaBlock(problem).eval()
    block = block if compile is None else compile(block)  # type: ignore[arg-type]
    return [partial(block, inputs["x"]) for inputs in problem.sets]


def _sdpa_calls(backend: str, problem: GpuProblem) -> list[Call]:
    return core_calls(problem, sdpa(problem, backend))


PEERS: tuple[GpuPeer, ...] = (
    GpuPeer("SDPA flash", "core", partial(_sdpa_calls, "FLASH_ATTENTION")),
    GpuPeer("SDPA cuDNN", "core", partial(_sdpa_calls, "CUDNN_ATTENTION")),
    GpuPeer("SDPA efficient", "core", partial(_sdpa_calls, "EFFICIENT_ATTENTION")),
    GpuPeer("SDPA folded", "core", lambda problem: core_calls(problem, folded(problem))),
    GpuPeer("FlexAttention", "core", lambda problem: core_calls(problem, flex(problem))),
    GpuPeer("FlashAttention 2", "core", partial(flash_package, "flash_attn")),
    GpuPeer("FlashAttention 3", "core", partial(flash_package, "flash_attn_interface")),
    GpuPeer("FlashAttention 4", "core", partial(flash_package, "flash_attn.cute")),
    GpuPeer("PyTorch", "block", block_calls),
    GpuPeer("PyTorch compiled", "block", partial(block_calls, compile=partial(torch.compile, dynamic=False))),
    GpuPeer("PyTorch autotuned", "block",
         partial(block_calls, compile=partial(torch.compile, dynamic=False, mode="max-autotune-no-cudagraphs"))),
)  # fmt: skip


def find(names: Iterable[str], of: str) -> tuple[GpuPeer, ...]:
    """The peers of these names, or of "all", that compute such a problem. Raises InputError for an unknown name."""
    choices = set(names)
    if unknown := sorted(choices - {"all", *(peer.name for peer in PEERS)}):
        raise InputError("against", f"all, or of {', '.join(peer.name for peer in PEERS)}", repr(unknown[0]))
    return tuple(peer for peer in PEERS if peer.of == of and {"all", peer.name} & choices)
