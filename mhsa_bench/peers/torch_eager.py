"""PyTorch without compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from mhsa_bench.peers.peer import Opened, Problem
from mhsa_compile.errors import ModelError
from mhsa_compile.hardware import environment
from mhsa_compile.nn.functional import to_numpy, to_torch
from mhsa_compile.verification.random_inputs import Arrays

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mhsa_compile.spec.attention_spec import AttentionSpec


class TorchEager:
    """Fused projections and one way to write the core, in inference mode.

    Not our module, which pays for its NaN semantics. One product projects everything that reads the same input, which
    was 7 % faster on tiny blocks than three of nn.Linear and the same on large ones. Masks are made ready (broadcast,
    and joined with causality, which the function does not take together) outside the timed call.
    """

    def __init__(self, name: str, write: Callable[[Problem, Arrays], Callable[..., Tensor]]) -> None:
        self.name = name
        self.write = write

    @contextmanager
    def open(self, problem: Problem, threads: int) -> Iterator[Opened]:
        _ = problem.spec
        with torch_threads(threads):
            import torch

            with torch.inference_mode():  # entered once: it costs a microsecond
                forms = [self.write(problem, arrays) for arrays in problem.inputs]
                calls = [
                    partial(getattr(form, "forward", form), *tensors(arrays))  # a module's own call does more
                    for form, arrays in zip(forms, problem.inputs, strict=True)
                ]
                yield Opened(calls, lambda result: [to_numpy(result)])


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """PyTorch is there, with so many threads."""
    environment.require("torch", extra="bench")
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tensors(arrays: Arrays) -> list[Tensor]:
    """The inputs but for the mask, which is made ready once: q, k and v; x; x and context; or x, key and value."""
    return [to_torch(array) for name, array in arrays.items() if name != "mask"]


def sdpa_form(problem: Problem, arrays: Arrays) -> Callable[..., Tensor]:
    """The whole computation around F.scaled_dot_product_attention, whose own causality is top-left."""
    from torch.nn.functional import scaled_dot_product_attention

    spec, (L, S) = problem.spec, (problem.sizes["L"], problem.sizes["S"])
    is_causal = spec.is_causal_alone and (spec.causal == "top_left" or L == S)
    mask = None if is_causal else problem.joined_mask(arrays)
    core = partial(
        scaled_dot_product_attention,
        attn_mask=None if mask is None else to_torch(mask),
        is_causal=is_causal,
        scale=spec.scale,
        enable_gqa=spec.num_kv_heads != spec.num_heads,
    )
    return with_projections(problem, core)


def folded_form(problem: Problem, arrays: Arrays) -> Callable[..., Tensor]:
    """Attention for decoding that reads keys and values once: its queries are the query heads of a key/value head."""
    spec = problem.spec
    if spec.num_kv_heads == spec.num_heads or problem.sizes["L"] != 1 or problem.spec.hides_keys:
        raise ModelError("peer", "one query, several heads on one key/value head, no mask", "something else")

    return with_projections(problem, partial(folded_core, spec))


def folded_core(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.functional import scaled_dot_product_attention

    rows = q.reshape(q.shape[0], spec.num_kv_heads, -1, spec.head_dim)
    return scaled_dot_product_attention(rows, k, v, scale=spec.scale).reshape(*q.shape[:3], -1)


def with_projections(problem: Problem, core: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`core` of q, k and v by itself, or between its projections."""
    if problem.is_core:
        return core
    from torch import nn

    spec = problem.spec
    query, key, value = (
        (spec.num_heads, spec.head_dim),
        (spec.num_kv_heads, spec.head_dim),
        (spec.num_kv_heads, spec.v_head_dim),
    )

    class EagerBlock(nn.Module):
        """A block whose parameters Inductor freezes; eagerly, its `forward` is called by itself."""

        def __init__(self) -> None:
            super().__init__()
            self.of_x = _linear(problem, "q" if spec.is_cross else "qkv")
            self.of_context = _linear(problem, "kv") if spec.is_cross and spec.v_embed_dim is None else None
            self.of_key, self.of_value = (None if spec.v_embed_dim is None else _linear(problem, n) for n in "kv")
            self.out = _linear(problem, ("out",))

        def forward(self, x: Tensor, context: Tensor | None = None, values: Tensor | None = None) -> Tensor:
            if self.of_key is not None and self.of_value is not None:  # `context` is what keys are made of
                pairs = (self.of_x(x), query), (self.of_key(context), key), (self.of_value(values), value)
                q, k, v = (_heads(rows, shape)[0] for rows, shape in pairs)
            elif self.of_context is None:
                q, k, v = _heads(self.of_x(x), query, key, value)
            else:
                (q,), (k, v) = _heads(self.of_x(x), query), _heads(self.of_context(context), key, value)
            return self.out(core(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    return EagerBlock().eval()


def _linear(problem: Problem, names: Iterable[str]) -> nn.Linear:
    """The projections of these names side by side, as one product."""
    import torch

    weight = torch.cat([to_torch(problem.weights[f"{name}_proj.weight"]) for name in names])
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=problem.spec.bias, dtype=weight.dtype)
    state = {"weight": weight}
    if problem.spec.bias:
        state["bias"] = torch.cat([to_torch(problem.weights[f"{name}_proj.bias"]) for name in names])
    layer.load_state_dict(state)
    return layer


def _heads(rows: Tensor, *shapes: tuple[int, int]) -> list[Tensor]:
    """(B, length, columns) -> for each (heads, width): (B, heads, length, width)."""
    import torch

    columns = torch.split(rows, [heads * width for heads, width in shapes], dim=-1)
    return [torch.unflatten(part, -1, shape).transpose(1, 2) for part, shape in zip(columns, shapes, strict=True)]


FORMS = (TorchEager("SDPA", sdpa_form), TorchEager("SDPA, heads folded", folded_form))
