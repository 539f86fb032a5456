"""cuda_arguments.py: what a call on a GPU may bring, with tensors that say they lie there. No GPU is needed."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.cuda.made_up_gpus import OnTheOther, on_gpu

from mhsa_compile.errors import InputError
from mhsa_compile.runtime.artifact.manifest import TensorInfo
from mhsa_compile.runtime.call_arguments import Signature
from mhsa_compile.runtime.cuda_arguments import DeviceArgument, DeviceWeight
from mhsa_compile.runtime.cuda_devices import Gpu

GPU = Gpu(1, "made up", (9, 0), 132, 227)
X = TensorInfo("x", "bfloat16", ("B", "L", 64))
MASK = TensorInfo("mask", "bool", ("mask_B", "mask_L"), broadcast=("B", "L"))
CACHE = TensorInfo("past_key", "bfloat16", ("B", "L", 64))


def signature(*infos: TensorInfo, in_place: dict[str, str] | None = None) -> Signature:
    return Signature(infos, [CACHE] if in_place else [], in_place=in_place, make=partial(DeviceArgument, GPU))


def test_what_lies_there_is_taken_as_it_is() -> None:
    x, mask = on_gpu(torch.zeros(2, 5, 64, dtype=torch.bfloat16)), on_gpu(torch.ones(2, 5, dtype=torch.bool))
    (taken, seen), sizes = signature(X, MASK).arrays((x, mask), {})
    assert taken is x and seen is mask
    assert sizes["B"] == 2 and sizes["L"] == 5


def test_what_begins_within_another_tensor_is_taken_where_a_kernel_can_read_it() -> None:
    x = on_gpu(block(2 * 5 * 64 + 8)[8:].view(2, 5, 64))
    assert x.data_ptr() % 64 == 16
    (taken,), _ = signature(X).arrays((x,), {})
    assert taken is x


def test_gradients_are_refused_and_left_behind_where_none_is_wanted() -> None:
    x = on_gpu(torch.zeros(2, 5, 64, dtype=torch.bfloat16, requires_grad=True))
    with pytest.raises(InputError, match=r"input 'x': .*got one that requires grad\. Call under torch\.no_grad\(\)"):
        signature(X).arrays((x,), {})
    with torch.no_grad():
        (taken,), _ = signature(X).arrays((x,), {})
    assert not taken.requires_grad and taken.data_ptr() == x.data_ptr()


def test_a_mask_may_broadcast() -> None:
    x, mask = on_gpu(torch.zeros(2, 5, 64, dtype=torch.bfloat16)), on_gpu(torch.ones(5, dtype=torch.bool))
    (_, seen), _ = signature(X, MASK).arrays((x, mask), {})
    assert tuple(seen.shape) == (1, 5) and seen.data_ptr() == mask.data_ptr()
    (_, seen), _ = signature(X, MASK).arrays((x, mask[:1]), {})
    assert tuple(seen.shape) == (1, 5) and seen.is_contiguous()


@pytest.mark.parametrize("dtype", [pytest.param("int64", marks=pytest.mark.thorough), "int32", "int8", "uint8"])
def test_integers_0_and_1_are_a_mask(dtype: str) -> None:
    x, seen = on_gpu(torch.zeros(2, 5, 64, dtype=torch.bfloat16)), torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 1, 1]])
    for shape in ((2, 5), (1, 5)):
        given = seen[: shape[0]].to(getattr(torch, dtype))
        for _ in range(3):
            (_, taken), _ = signature(X, MASK).arrays((x, on_gpu(given)), {})
            assert taken.dtype == torch.bool and taken.is_contiguous() and tuple(taken.shape) == shape
            assert torch.equal(taken.as_subclass(torch.Tensor), given != 0)
    with pytest.raises(InputError, match="input 'mask': expected bool, or integers 0 and 1, got values from 0 to 3"):
        signature(X, MASK).arrays((x, on_gpu(3 * seen.to(getattr(torch, dtype)))), {})
    with pytest.raises(InputError, match=rf"input 'mask': .*got {dtype} of shape \(3, 5\)|got bool of shape \(3, 5\)"):
        signature(X, MASK).arrays((x, on_gpu(torch.ones(3, 5, dtype=getattr(torch, dtype)))), {})
    with pytest.raises(InputError, match=r"input 'mask': expected bool .*, got float32"):
        signature(X, MASK).arrays((x, on_gpu(seen.float())), {})


def test_integers_are_refused_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at integers would end the capture, and what is replayed could not be looked at."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    x, mask = on_gpu(torch.zeros(2, 5, 64, dtype=torch.bfloat16)), on_gpu(torch.ones(2, 5, dtype=torch.int64))
    with pytest.raises(InputError, match=r"input 'mask': expected bool, while a graph is being captured, got .*int64"):
        signature(X, MASK).arrays((x, mask), {})
    (_, taken), _ = signature(X, MASK).arrays((x, mask.bool()), {})
    assert taken.dtype == torch.bool


class Elsewhere:
    """A producer of DLPack on another kind of device."""

    def __init__(self, kind: int, index: int) -> None:
        self.place = (kind, index)

    def __dlpack__(self, **_: Any) -> object:
        raise AssertionError("asked before its place was checked")

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place


def block(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


REFUSED: dict[str, tuple[Any, str]] = {
    "of the host": (block(2, 5, 64), r"memory of cuda:1, got one on cpu\. Move it: x\.to\('cuda:1'\)"),
    "of another GPU": (on_gpu(block(2, 5, 64), OnTheOther), "memory of cuda:1, got one on cuda:0"),
    "of NumPy": (np.zeros((2, 5, 64), np.float32), r"got a NumPy array\. Move it: torch\.from_numpy"),
    "DLPack of another GPU": (Elsewhere(2, 0), "memory of cuda:1, got one on cuda:0"),
    "DLPack of the host": (Elsewhere(1, 0), "memory of cuda:1, got one elsewhere"),
    "with gaps": (on_gpu(block(2, 64, 5).mT), r"contiguous memory, got a tensor with gaps\. .*x\.contiguous\(\)"),
    "unaligned": (on_gpu(block(2 * 5 * 64 + 4)[4:].view(2, 5, 64)), "multiple of 16 bytes, got memory 8 bytes behind"),
    "of another dtype": (on_gpu(torch.zeros(2, 5, 64)), r"expected bfloat16 of shape \(B, L, 64\), got float32"),
    "of another rank": (on_gpu(block(5, 64)), r"got bfloat16 of shape \(5, 64\)"),
    "nothing": (None, "from PyTorch or DLPack, got nothing"),
    "a list": ([1.0], "from PyTorch or DLPack, got list"),
}


@pytest.mark.parametrize(("value", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_taken_is_named(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"input 'x': .*{message}"):
        signature(X).arrays((value,), {})


def test_what_is_written_must_be_the_callers() -> None:
    cache = on_gpu(block(2, 5, 64).requires_grad_())
    with pytest.raises(InputError, match=r"input 'past_key': .*requires grad"):
        signature(CACHE, in_place={"past_key": "past_key"}).arrays((cache,), {})


def test_weights_come_from_either_side() -> None:
    weight = DeviceWeight(GPU, TensorInfo("w", "float32", (8, 8)), "weight", {})
    there = on_gpu(torch.zeros(8, 8))
    assert weight.ready(there, {}) is there
    here = np.zeros((8, 8), np.float32)
    assert weight.ready(here, {}) is here
    with pytest.raises(InputError, match=r"weight 'w': .*one on cuda:0"):
        weight.ready(on_gpu(torch.zeros(8, 8), OnTheOther), {})
