"""Calls on an NVIDIA GPU: memory, streams, graphs, threads, several devices. `make test-gpu`.

Without a GPU all of it is skipped, and says why. What is computed: test_on_gpu_parity.py."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from support.cuda import gpu_machine
from support.cuda.gpu_machine import back, there, two_gpus

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError
from mhsa_compile.runtime.artifact.artifact import Artifact

pytestmark = gpu_machine.marks

SPEC = mhsa.AttentionSpec(embed_dim=128, num_heads=4, num_kv_heads=2, causal=True)


def compiled(spec: mhsa.AttentionSpec, **dims: int) -> Artifact:
    torch.manual_seed(0)
    return gpu_machine.compiled(mhsa.MultiHeadAttention(spec).eval(), **dims)


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    return compiled(SPEC)


@pytest.fixture(scope="module")
def attention(artifact: Artifact) -> Any:
    return mhsa.load(artifact)


def test_arrays_of_the_host_are_copied_where_that_is_asked_for(attention: Any) -> None:
    x = np.random.default_rng(0).standard_normal((2, 37, 128), np.float32)
    y = attention.from_host(x)
    assert isinstance(y, np.ndarray)
    np.testing.assert_array_equal(y, back(attention(there(x))))


def test_tensors_stay_on_the_gpu(attention: Any) -> None:
    x = torch.randn(2, 37, 128, device="cuda")
    y = attention(x)
    assert isinstance(y, torch.Tensor) and y.device == x.device and y.shape == x.shape
    torch.testing.assert_close(attention(x), y, rtol=0, atol=0)


def test_other_producers_of_dlpack(attention: Any) -> None:
    class Foreign:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.streams = tensor, []

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.tensor.__dlpack_device__()

        def __dlpack__(self, *, stream: Any = None, **words: Any) -> object:
            self.streams.append(stream)
            return self.tensor.__dlpack__(stream=stream, **words)

    x = torch.randn(2, 37, 128, device="cuda")
    foreign = Foreign(x)
    torch.testing.assert_close(torch.from_dlpack(attention(foreign)), attention(x), rtol=0, atol=0)
    assert foreign.streams != [None]


def test_nothing_goes_by_way_of_the_host(attention: Any) -> None:
    from torch.profiler import ProfilerActivity, profile

    x = torch.randn(2, 37, 128, device="cuda")
    attention(x)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:  # without, some versions warn
        torch.from_dlpack(attention(x))
        torch.cuda.synchronize()
    names = [event.name for event in seen.events()]
    assert any("kernel" in name for name in names), names  # TVM's names end so: the profiler sees them
    assert not [name for name in names if "HtoD" in name or "DtoH" in name]


def test_calls_run_on_the_current_stream_and_wait_for_nothing(attention: Any) -> None:
    x = torch.randn(1, 64, 128, device="cuda")
    wanted = attention(x).clone()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(x)
        attention(late)  # a stream's first memory comes from the driver, which may wait
        torch.cuda._sleep(200_000_000)  # about 0.1 s, before x is written
        late.copy_(x)
        y = attention(late)
        assert not stream.query()  # the call has returned, the stream is at it
    stream.synchronize()
    torch.testing.assert_close(y, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("as_handle", [False, True])
def test_a_stream_may_be_named(attention: Any, as_handle: bool) -> None:
    x = torch.randn(1, 64, 128, device="cuda")
    wanted = attention(x).clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    y = attention(x, stream=stream.cuda_stream if as_handle else stream)
    stream.synchronize()
    torch.testing.assert_close(y, wanted, rtol=0, atol=0)


def test_streams_side_by_side(attention: Any) -> None:
    """Two streams at once must not meet in one workspace."""
    xs = [torch.randn(2, 128, 128, device="cuda") for _ in range(8)]
    wanted = [attention(x).clone() for x in xs]
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for i, x in enumerate(xs):
            with torch.cuda.stream(streams[i % 4]):
                found.append((attention(x), wanted[i]))
    torch.cuda.synchronize()
    for y, right in found:
        torch.testing.assert_close(y, right, rtol=0, atol=0)


def test_threads_side_by_side(attention: Any) -> None:
    xs = [torch.randn(2, length, 128, device="cuda") for length in (17, 64, 131)]
    wanted = [attention(x).clone() for x in xs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                if not torch.equal(attention(xs[i]), wanted[i]):
                    wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_a_call_can_be_captured(attention: Any) -> None:
    x = torch.randn(2, 64, 128, device="cuda")
    attention(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = attention(x)
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn(2, 64, 128))
        other = attention(torch.randn(3, 200, 128, device="cuda"))  # takes memory that the graph must not share
        graph.replay()
        torch.testing.assert_close(y, attention(x), rtol=0, atol=0)
        assert other.isfinite().all()


ends_in_an_error = pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
"""A capture ends when the error passes through it, and PyTorch then warns that it has nothing."""

CACHED = mhsa.AttentionSpec(embed_dim=128, num_heads=4, num_kv_heads=2, causal=True, kv_cache=True, dtype="bfloat16")


def test_a_cache_on_the_gpu_counts_as_a_caller_would() -> None:
    """A prompt and steps, with a cache and with its parts; what is computed is in the parity matrix."""
    prefill, step = (mhsa.load(compiled(CACHED, **dims)) for dims in ({}, {"L": 1}))
    pieces = [torch.randn(2, length, 128, device="cuda", dtype=torch.bfloat16) for length in (17, 1, 1, 1)]
    cache = prefill.new_cache(batch=2, capacity=32)
    past = {name: torch.zeros_like(tensor) for name, tensor in cache.inputs().items()}
    for piece in pieces:
        attention = step if piece.shape[1] == 1 else prefill
        found = attention(piece, cache=cache)
        expected = attention(piece, **past)[0]
        past["length"] += piece.shape[1]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert cache.length.tolist() == cache.inputs()["length"].tolist() == [20, 20]
    cache.truncate([18, 17])
    assert cache.inputs()["length"].tolist() == [18, 17]


@ends_in_an_error
def test_a_step_can_be_captured_with_the_cache_of_the_caller() -> None:
    step = mhsa.load(compiled(CACHED, L=1))
    xs = torch.randn(5, 2, 1, 128, device="cuda", dtype=torch.bfloat16)
    cache = step.new_cache(batch=2, capacity=16)
    expected = [step(x, cache=cache).clone() for x in xs]
    past = {name: torch.zeros_like(tensor) for name, tensor in cache.inputs().items()}
    x = xs[0].clone()
    step(x, **past)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step(x, **past)
        past["length"] += 1
    past["length"].zero_()
    for source, right in zip(xs, expected, strict=True):
        x.copy_(source)
        graph.replay()
        torch.testing.assert_close(y[0], right, rtol=0, atol=0)
    with pytest.raises(InputError, match=r"cache: .*not captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        step(x, cache=cache)


@ends_in_an_error
def test_a_first_call_is_not_captured(artifact: Artifact) -> None:
    fresh = mhsa.load(artifact)
    x = torch.randn(2, 64, 128, device="cuda")
    torch.cuda.synchronize()
    with pytest.raises(InputError, match="Call it once before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        fresh(x)


@pytest.mark.parametrize("dims", [(0, 5), (3, 0)])
def test_a_call_of_nobody(attention: Any, dims: tuple[int, int]) -> None:
    y = attention(torch.randn(*dims, 128, device="cuda"))
    assert y.shape == (*dims, 128) and y.device.type == "cuda"


def test_nobody_to_look_at_gives_the_output_of_zeros() -> None:
    """Kernels whose grid has no blocks are left out, the rest of the call is not."""
    attention = mhsa.load(compiled(mhsa.AttentionSpec(embed_dim=128, num_heads=4, kv_embed_dim=64)))
    bias = torch.from_numpy(attention_bias(attention))
    y = attention(torch.randn(2, 7, 128, device="cuda"), torch.randn(2, 0, 64, device="cuda"))
    torch.testing.assert_close(y.cpu(), bias.expand(2, 7, 128))


def attention_bias(attention: Any) -> np.ndarray:
    """The bias of the output projection, from the model whose weights `compiled` draws."""
    torch.manual_seed(0)
    module = mhsa.MultiHeadAttention(attention.manifest.spec)
    return module.state_dict()["out_proj.bias"].numpy()


def test_what_begins_within_another_tensor(attention: Any) -> None:
    x = torch.randn(2, 37, 128, device="cuda")
    wider = torch.empty(x.numel() + 4, device="cuda")
    shifted = wider[4:].view_as(x).copy_(x)
    assert shifted.data_ptr() % 64 == 16
    torch.testing.assert_close(attention(shifted), attention(x), rtol=0, atol=0)


def test_memory_comes_from_pytorch(attention: Any) -> None:
    x = torch.randn(4, 256, 128, device="cuda")
    attention(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        attention(x)
    assert torch.cuda.memory_allocated() == before


def test_weights_on_the_gpu_are_used_where_they_lie(artifact: Artifact, attention: Any) -> None:
    torch.manual_seed(0)
    state = {name: value.detach().cuda() for name, value in mhsa.MultiHeadAttention(SPEC).state_dict().items()}
    x = torch.randn(2, 37, 128, device="cuda")
    torch.testing.assert_close(mhsa.load(artifact, weights=state)(x), attention(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda x: x.cpu(), "got one on cpu"), (lambda x: x.cpu().numpy(), "got a NumPy array"),
     (lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), "a tensor with gaps"),
     (lambda x: x.double(), "got float64")],
)  # fmt: skip
def test_what_cannot_be_taken_is_named_before_any_launch(attention: Any, change: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"input 'x': .*{message}"):
        attention(change(torch.randn(2, 37, 128, device="cuda")))


@two_gpus
def test_a_second_gpu(artifact: Artifact, attention: Any) -> None:
    other = mhsa.load(artifact, device="cuda:1")
    x = torch.randn(2, 37, 128, device="cuda:0")
    y = other(x.to("cuda:1"))
    assert y.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0  # as it was
    torch.testing.assert_close(y.to("cuda:0"), attention(x))
    with pytest.raises(InputError, match="memory of cuda:1, got one on cuda:0"):
        other(x)
    with pytest.raises(InputError, match=r"stream: expected one of cuda:1.*got one of cuda:0"):
        other(x.to("cuda:1"), stream=torch.cuda.Stream("cuda:0"))


def test_a_gpu_that_is_not_there(artifact: Artifact) -> None:
    with pytest.raises(InputError, match=r"device: expected cuda:0.*got cuda:99"):
        mhsa.load(artifact, device="cuda:99")
