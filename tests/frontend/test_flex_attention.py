"""Modules that call torch.nn.attention.flex_attention, compiled as they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
)

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.export.flex_attention import as_operators
from mhsa_compile.verification.error_budget import budget, max_error
from mhsa_compile.verification.verify import verify

# What PyTorch says of each eager call.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")


class Documents(nn.Module):
    """Self-attention within documents, with a learned slope for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.tensor([0.5, 0.25, 0.125, 0.0625]))
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        B, L, _ = x.shape
        q, k, v = (rows.unflatten(-1, (4, 16)).transpose(1, 2) for rows in self.qkv(x).chunk(3, dim=-1))

        def same(b, h, q_idx, kv_idx):
            return document[b, q_idx] == document[b, kv_idx]

        def causal(b, h, q_idx, kv_idx):
            return q_idx >= kv_idx

        def alibi(score, b, h, q_idx, kv_idx):
            return score + self.slopes[h] * (kv_idx - q_idx)

        block_mask = create_block_mask(and_masks(same, causal), B, None, L, L, device=x.device)
        return flex_attention(q, k, v, score_mod=alibi, block_mask=block_mask).transpose(1, 2).flatten(2)


class Calling(nn.Module):
    """`flex_attention` with some arguments."""

    def __init__(self, **said: Any) -> None:
        super().__init__()
        self.said = said

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = flex_attention(q, k, v, **self.said)
        return result


def eagerly(module: nn.Module, *inputs: Tensor) -> Tensor:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return module(*inputs)


def check(module: nn.Module, compiled: Callable[..., Any], *inputs: Tensor) -> None:
    yardstick = eagerly(module, *inputs).numpy()
    exact = eagerly(module.double(), *(x.double() if x.is_floating_point() else x for x in inputs)).numpy()
    module.float()
    assert max_error(exact, compiled(*(x.numpy() for x in inputs))) <= budget(exact, yardstick, "float32")


@pytest.mark.thorough
def test_captured_inputs_and_parameters_with_free_lengths(tmp_path: Path):
    module = Documents().eval()
    example = {"x": torch.randn(3, 37, 64), "document": torch.zeros(3, 37, dtype=torch.int64)}
    before = flex.flex_attention_hop, flex.create_mask
    mhsa.compile(module, example_inputs=example).save(tmp_path / "a.mhsa")
    assert (flex.flex_attention_hop, flex.create_mask) == before
    compiled = mhsa.load(tmp_path / "a.mhsa")
    assert [info.dims[:2] for info in compiled.inputs] == [("B", "L"), ("B", "L")]
    assert {"cpu.linear", "cpu.attention"} <= {op.kernel for op in compiled.manifest.ops}
    for B, L in ((3, 37), (2, 150), (1, 5)):
        check(module, compiled, torch.randn(B, L, 64), torch.randint(0, 3, (B, L)).sort().values)
    verdict = verify(tmp_path / "a.mhsa")
    assert all(case.error <= case.budget for case in verdict.cases)


def heads(L: int = 33) -> dict[str, Tensor]:
    return {name: torch.randn(2, 4, L, 16) for name in "qkv"}


@pytest.mark.thorough
def test_without_functions_it_is_the_standard_operator(tmp_path: Path):
    module = Calling(scale=0.5)
    mhsa.compile(module, example_inputs=heads()).save(tmp_path / "a.mhsa")
    check(module, mhsa.load(tmp_path / "a.mhsa"), *heads(70).values())


def test_a_block_mask_that_was_made_before(tmp_path: Path):
    block_mask = create_block_mask(lambda b, h, q, k: q - k >= 30, None, None, 200, 200, device="cpu", BLOCK_SIZE=32)
    module = Calling(block_mask=block_mask)
    example = heads(200)
    mhsa.compile(module, example_inputs=example, dims={}, dynamic_shapes={name: {} for name in "qkv"}).save(
        tmp_path / "a.mhsa"
    )
    compiled = mhsa.load(tmp_path / "a.mhsa")
    assert compiled.manifest.semantics[0].static_mask is not None
    check(module, compiled, *heads(200).values())


def test_blocks_that_say_something_else_are_refused():
    count, index = torch.tensor([[[1, 1]]], dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    by_hand = BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=32, seq_lengths=(64, 64))
    with pytest.raises(ModelError, match="block_mask: expected a block mask whose blocks hide what its mask_mod hides"):
        mhsa.compile(Calling(block_mask=by_hand), example_inputs=heads(64), dynamic_shapes={name: {} for name in "qkv"})


def _by_distance(score, b, h, q, k):
    return score - 0.1 * (q - k).abs()


class WithLse(nn.Module):
    """Causal or not; the output, and the logarithm of the sum of each row's exponentials."""

    def __init__(self, causal: bool, said: dict[str, Any]) -> None:
        super().__init__()
        self.causal, self.said = causal, said

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        mask = None
        if self.causal:
            lengths = q.shape[-2], k.shape[-2]
            mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, *lengths, device="cpu")
        y, more = flex_attention(q, k, v, block_mask=mask, **self.said)
        return y, more.lse if isinstance(more, AuxOutput) else more


@pytest.mark.thorough_but("said1-True")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "said", [{"return_lse": True}, {"return_aux": AuxRequest(lse=True), "score_mod": _by_distance}]
)
@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
def test_lse_beside_the_output(causal: bool, said: dict[str, Any]):
    compiled = mhsa.load(mhsa.compile(WithLse(causal, said), example_inputs=heads()))
    torch.manual_seed(0)  # PyTorch's own error at few numbers, which is the measure, is chance: of one row, often none
    for L in (1, 33, 130):
        q, k, v = heads(L).values()

        def exact(dtype: torch.dtype, given: tuple[Tensor, ...] = (q, k, v)) -> tuple[Tensor, Tensor]:
            wide_q, wide_k, wide_v = (x.to(dtype) for x in given)
            i = torch.arange(wide_q.shape[-2])
            scores = wide_q @ wide_k.mT / 4
            if "score_mod" in said:
                scores = scores - 0.1 * (i[:, None] - i).abs()
            if causal:
                scores = scores.masked_fill(i[:, None] < i, -torch.inf)
            return scores.softmax(-1) @ wide_v, scores.logsumexp(-1)

        for found, wide, narrow in zip(compiled(q, k, v), exact(torch.float64), exact(torch.float32), strict=True):
            assert max_error(wide.numpy(), found.numpy()) <= budget(wide.numpy(), narrow.numpy(), "float32")


def _branches(score, b, h, q, k):
    return score if q >= k else score * 2


@pytest.mark.thorough_only("said0-Data-dependent branching")
@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"score_mod": _branches}, "Data-dependent branching"),
        ({"score_mod": lambda score, b, h, q, k: torch.sin(score)}, "the operator sin"),
        ({"return_aux": AuxRequest(max_scores=True)}, "max scores is not supported"),
    ],
)
def test_what_cannot_be_compiled_is_one_message_and_the_module_as_it_was(said: dict[str, Any], named: str):
    module = Calling(**said).train()
    names = [name for name in vars(flex) if not name.startswith("__")]  # Dynamo puts some of those there
    before = {name: getattr(flex, name) for name in names}
    with pytest.raises(ModelError, match=named):
        mhsa.compile(module, example_inputs=heads())
    assert module.training and {name: getattr(flex, name) for name in names} == before


def test_another_thread_calls_flex_attention_as_ever():
    from concurrent.futures import ThreadPoolExecutor

    q = torch.randn(1, 2, 5, 8)
    with as_operators(), ThreadPoolExecutor(1) as other:
        y = other.submit(eagerly, Calling(), q, q, q).result()
    assert torch.allclose(y, torch.nn.functional.scaled_dot_product_attention(q, q, q), atol=1e-6)
