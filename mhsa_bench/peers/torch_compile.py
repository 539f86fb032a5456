"""PyTorch through torch.compile: Inductor with frozen weights, in the forms that its users would try.

Fixed shapes are the plain way. Symbolic ones are another form, not for what they are good for, but because Inductor
then packs float32 weights for oneDNN instead of MKL, which keeps to 256-bit vectors on CPUs of AMD: twice as fast
there (PyTorch 2.13). max-autotune was tried and left out: with its C++ products base128 took 3.6 ms instead of 1.5, and
every form 3 to 10 s more to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from mhsa_bench.peers.peer import Opened, Problem
from mhsa_bench.peers.torch_eager import folded_form, sdpa_form, tensors, torch_threads, with_projections
from mhsa_compile.errors import ModelError
from mhsa_compile.nn.functional import to_numpy, to_torch
from mhsa_compile.spec.window import WindowSpec
from mhsa_compile.verification.random_inputs import Arrays

if TYPE_CHECKING:
    from torch import Tensor


class Inductor:
    """One form: how the core is written, and whether shapes are symbolic."""

    def __init__(self, name: str, write: Callable[[Problem, Arrays], Callable[..., Any]], *, dynamic: bool) -> None:
        self.name = name
        self.write = write
        self.dynamic = dynamic

    @contextmanager
    def open(self, problem: Problem, threads: int) -> Iterator[Opened]:
        _ = problem.spec
        with torch_threads(threads):
            import torch
            from torch._inductor import config

            torch._dynamo.reset()  # what it keeps of other workloads would be guarded against
            # Equal sizes would share a symbol, and a length that equals a width would be fixed with it.
            symbols = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
            with torch.inference_mode(), config.patch(freezing=True), symbols:
                form = self.write(problem, problem.inputs[0])
                compiled = torch.compile(form, dynamic=self.dynamic, fullgraph=True)
                calls = [partial(compiled, *tensors(arrays)) for arrays in problem.inputs]
                yield Opened(calls, lambda result: [to_numpy(result)])


def products_form(problem: Problem, arrays: Arrays) -> Callable[..., Tensor]:
    """Two products and a softmax, which Inductor fuses with the masks, or takes for attention again."""
    problem.check_scores_fit()
    spec, bias = problem.spec, problem.additive_mask(arrays)
    mask = None if bias is None else to_torch(bias)
    scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, L, _ = q.shape
        rows = (q * scale).reshape(B, spec.num_kv_heads, -1, spec.head_dim)  # no key or value is repeated
        scores = (rows @ k.transpose(-1, -2)).reshape(B, H, L, -1)
        weights = (scores if mask is None else scores + mask).softmax(dim=-1)
        return (weights.reshape(*rows.shape[:3], -1) @ v).reshape(B, H, L, -1)

    return with_projections(problem, core)


def flex_form(problem: Problem, arrays: Arrays) -> Callable[..., Tensor]:
    """FlexAttention with a block mask, made before: it skips what nobody sees."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    spec, (L, S) = problem.spec, (problem.sizes["L"], problem.sizes["S"])
    if problem.visible is None or spec.mask is not None:
        raise ModelError("peer", "a constant mask: FlexAttention is for those", "none, or one of the call")
    pairs = to_torch(problem.visible) if spec.needs_lengths else None
    blocks = create_block_mask(flex_rule(spec.band, L, S, pairs), None, None, L, S, device="cpu")
    is_grouped = spec.num_kv_heads != spec.num_heads
    core = partial(flex_attention, block_mask=blocks, scale=spec.scale, enable_gqa=is_grouped)
    return with_projections(problem, core)


def flex_rule(band: WindowSpec | None, L: int, S: int, pairs: Tensor | None) -> Callable[..., Tensor]:
    """What is seen, by FlexAttention's way to ask: `pairs` (L, S), where a constant mask says it, else the band."""
    if pairs is not None:
        return lambda b, h, i, j: pairs[i, j]
    assert band is not None
    offset = S - L if band.alignment == "bottom_right" else 0
    before, after = (S if size is None else size for size in (band.left, band.right))
    return lambda b, h, i, j: (j <= i + offset + after) & (j >= i + offset - before)


FORMS = (
    Inductor("SDPA, symbolic", sdpa_form, dynamic=True),
    Inductor("SDPA", sdpa_form, dynamic=False),
    Inductor("products, symbolic", products_form, dynamic=True),
    Inductor("products", products_form, dynamic=False),
    Inductor("SDPA, heads folded", folded_form, dynamic=False),
    Inductor("FlexAttention", flex_form, dynamic=False),
)
