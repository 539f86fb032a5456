"""A cache in a GPU's memory, held by tensors of PyTorch's on the CPU: what it says is what a host's cache says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError, InstallationError
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.runtime import kv_cache
from mhsa_compile.runtime.artifact.manifest import Manifest, TensorInfo
from mhsa_compile.runtime.kv_cache import DeviceKVCache, KVCache, check_call, new_cache

SPEC = mhsa.AttentionSpec(embed_dim=32, num_heads=4, num_kv_heads=2, causal=True, kv_cache=True)


MANIFEST = Manifest(
    mhsa_version=mhsa.__version__,
    inputs=(
        TensorInfo("x", "float32", ("B", "L", 32)),
        TensorInfo("past_key", "float32", ("B", 2, "C", 8)),
        TensorInfo("past_value", "float32", ("B", 2, "C", 8)),
        TensorInfo("length", "int64", ("B",)),
    ),
    outputs=(), weights=(), semantics=(), spec=SPEC, target=load_profile("native"), versions={}, ops=(), files={},
)  # fmt: skip
"""What a cache asks of an artifact of SPEC: the inputs that it states."""
FIELDS = dict(kv_cache.cached_spec(MANIFEST))


class Torch:
    """PyTorch for CUDA whose only device is the CPU; `capturing` is what it says of its stream."""

    def __init__(self) -> None:
        self.capturing = False
        self.cuda = SimpleNamespace(is_current_stream_capturing=lambda: self.capturing)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def of_cuda(monkeypatch: pytest.MonkeyPatch) -> Torch:
    made = Torch()
    monkeypatch.setattr(kv_cache, "torch_of_cuda", lambda: made)
    return made


@pytest.mark.thorough
def test_it_counts_as_the_hosts_does(of_cuda: Torch) -> None:
    torch.manual_seed(0)
    attention = mhsa.load(mhsa.compile(mhsa.MultiHeadAttention(SPEC).eval()), threads=1)
    assert [(i.name, i.dtype, i.dims) for i in attention.inputs] == [(i.name, i.dtype, i.dims) for i in MANIFEST.inputs]
    here = attention.new_cache(batch=2, capacity=16)
    there = DeviceKVCache(FIELDS, 2, 16, "cpu")
    rng = np.random.default_rng(0)
    for length, cut in ((7, [7, 5]), (1, None), (3, [6, 6]), (2, None)):
        x = rng.standard_normal((2, length, 32), np.float32)
        expected = attention(x, cache=here)
        outputs = attention(torch.from_numpy(x), **there.inputs())
        there.advance(length)
        np.testing.assert_array_equal(outputs.y.numpy(), expected)
        for cache in (here, there):
            if cut:
                cache.truncate(cut)
        assert there.inputs()["length"].tolist() == there.length.tolist() == here.length.tolist()
    np.testing.assert_array_equal(there.key.numpy(), here.key)
    there.reset()
    assert there.inputs()["length"].tolist() == there.length.tolist() == [0, 0]


def test_one_made_for_inference_goes_on_outside(of_cuda: Torch) -> None:
    with torch.inference_mode():
        cache = DeviceKVCache(FIELDS, 2, 16, "cpu")
        cache.advance(3)
    cache.advance(4)
    cache.truncate(5)
    assert cache.inputs()["length"].tolist() == [5, 5]


def test_it_is_as_large_as_asked(of_cuda: Torch) -> None:
    found = new_cache(MANIFEST, 2, 16, "cpu:0")
    assert isinstance(found, DeviceKVCache) and (found.batch, found.capacity) == (2, 16)
    assert repr(found) == "<KVCache batch=2, capacity=16, length=[0, 0], float32, cpu:0>"
    assert repr(new_cache(MANIFEST, 2, 16)) == "<KVCache batch=2, capacity=16, length=[0, 0], float32>"


def test_without_a_pytorch_for_cuda_nobody_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "torch_of_cuda", lambda: None)
    with pytest.raises(InstallationError, match="PyTorch: expected one for CUDA"):
        new_cache(MANIFEST, 2, 16, "cuda:0")


@pytest.mark.parametrize(("held", "asked"), [("cpu", "cuda:1"), ("cpu:0", "cpu")])
def test_a_cache_elsewhere_is_refused(of_cuda: Torch, held: str, asked: str) -> None:
    cache = new_cache(MANIFEST, 2, 16, held)
    assert type(cache) is (KVCache if held == "cpu" else DeviceKVCache)
    with pytest.raises(InputError, match=f"cache: expected one on {asked}, .* got one on {held}"):
        check_call(MANIFEST, cache, np.zeros((2, 1, 32), np.float32), asked)


def test_a_captured_call_counts_by_itself(of_cuda: Torch) -> None:
    cache = DeviceKVCache(FIELDS, 2, 16, "cpu")
    of_cuda.capturing = True
    with pytest.raises(InputError, match=r"cache: .*not captured.*pass past_key, past_value and length themselves"):
        cache.inputs()
