"""Artifacts through TVM's own runtime for CUDA, on two GPUs that are none: their driver notes what is launched.

test_pretended_gpu.py runs this in a process of its own, since a library once loaded stays. What kernels compute is not
seen here: they do nothing."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pretended_gpu.libraries import FOLDER, Pretended

import mhsa_compile as mhsa
from mhsa_compile.errors import DeviceError, InputError
from mhsa_compile.runtime import tvm_runtime
from mhsa_compile.runtime.artifact.artifact import Artifact

SPECS = {
    "causal": mhsa.AttentionSpec(embed_dim=64, num_heads=4, causal=True),
    "heads": mhsa.AttentionSpec(embed_dim=512, num_heads=8, num_kv_heads=2, causal=True, dtype="bfloat16"),
    "cross": mhsa.AttentionSpec(embed_dim=64, num_heads=4, kv_embed_dim=32, dtype="bfloat16"),
    "padded": mhsa.AttentionSpec(embed_dim=64, num_heads=4, kv_embed_dim=32, v_embed_dim=48, mask="key_padding"),
    "cached": mhsa.AttentionSpec(
        embed_dim=512, num_heads=8, num_kv_heads=2, causal=True, kv_cache=True, dtype="bfloat16"
    ),
}
CORES = {"core": mhsa.AttentionSpec(embed_dim=512, num_heads=8, num_kv_heads=2, v_head_dim=128, dtype="bfloat16")}
"""Specs without projections: keys and values are the caller's own."""


@pytest.fixture(scope="session")
def folder() -> Path:
    return Path(os.environ[FOLDER])


@pytest.fixture(scope="session")
def gpu(folder: Path) -> Pretended:
    return Pretended(folder)


@pytest.fixture(scope="session")
def artifact(folder: Path) -> Artifact:
    return Artifact.open(folder / "causal")


@pytest.fixture
def attention(gpu: Pretended, artifact: Artifact) -> Any:
    """The loaded artifact, called once, so that its kernels are loaded."""
    loaded = mhsa.load(artifact)
    loaded(there(1, 2, 64))
    gpu.take()
    return loaded


def there(*shape: int, dtype: str = "float32", index: int = 0) -> Any:
    """TVM's own tensor on a GPU: a producer of DLPack like others."""
    return tvm_runtime.start_cuda().empty(shape, dtype, index)


def launches(lines: list[str]) -> list[str]:
    return [line.split()[1] for line in lines if line.startswith("launch ")]


def test_the_code_is_loaded_to_pack_the_weights_and_every_call_launches_it(gpu: Pretended, artifact: Artifact) -> None:
    loaded = mhsa.load(artifact)
    packing = gpu.take()
    assert "module" in packing and launches(packing) == ["pack_op_0_kernel", "pack_op_2_kernel"]
    x = there(2, 37, 64)
    gpu.take()
    y = loaded(x)
    first = gpu.take()
    assert tuple(y.shape) == (2, 37, 64) and str(y.device) == "cuda:0"
    assert "module" not in first
    assert len(launches(first)) >= 3  # projections, attention, projection
    loaded(x)
    assert launches(gpu.take()) == launches(first)


def test_a_call_waits_for_nothing_and_copies_nothing(gpu: Pretended, attention: Any) -> None:
    x = there(2, 37, 64)
    gpu.take()
    attention(x)
    assert {line.split()[0] for line in gpu.take()} == {"launch", "allocate"}


def test_all_of_a_calls_memory_is_one_workspace_and_its_output(gpu: Pretended, attention: Any) -> None:
    x = there(3, 41, 64)
    gpu.take()
    attention(x)
    allocations = [line for line in gpu.take() if line.startswith("allocate")]
    assert len(allocations) == 2 and f"allocate {3 * 41 * 64 * 4} on cuda:0" in allocations


def test_a_call_runs_on_the_stream_that_it_names(gpu: Pretended, attention: Any) -> None:
    x = there(2, 5, 64)
    gpu.take()
    for words, stream in (({}, 0), ({"stream": 5000}, 5000), ({}, 0)):
        attention(x, **words)
        lines = [line for line in gpu.take() if line.startswith("launch")]
        assert lines and all(line.endswith(f"stream={stream}") for line in lines)


def test_a_stream_of_another_gpu_is_refused_before_any_launch(gpu: Pretended, attention: Any) -> None:
    x = there(2, 5, 64)
    gpu.take()
    with pytest.raises(InputError, match=r"stream: expected one of cuda:0.*got one of cuda:1"):
        attention(x, stream=5001)
    assert gpu.take() == []


def test_a_second_gpu(gpu: Pretended, artifact: Artifact, attention: Any) -> None:
    other = mhsa.load(artifact, device="cuda:1")
    x = there(2, 5, 64, index=1)
    gpu.take()
    y = other(x)
    assert str(y.device) == "cuda:1"
    lines = gpu.take()
    assert launches(lines) and all("cuda:1" in line for line in lines if line.startswith("allocate"))
    with pytest.raises(InputError, match="memory of cuda:0, got one on cuda:1"):
        attention(x)
    assert gpu.take() == []


def test_nobody_is_nothing_to_launch(gpu: Pretended, attention: Any) -> None:
    x = there(0, 5, 64)
    gpu.take()
    assert tuple(attention(x).shape) == (0, 5, 64)
    assert launches(gpu.take()) == []


def test_no_keys_leave_out_their_projections_alone(gpu: Pretended, folder: Path) -> None:
    """The driver refuses a grid without blocks, as CUDA does: none may get there."""
    loaded = mhsa.load(folder / "cross")
    x, some, none = (there(2, length, width, dtype="bfloat16") for length, width in ((5, 64), (7, 32), (0, 32)))
    loaded(x, some)
    gpu.take()
    loaded(x, some)
    usual = launches(gpu.take())
    y = loaded(x, none)
    assert tuple(y.shape) == (2, 5, 64)
    without_keys = launches(gpu.take())
    assert 0 < len(without_keys) < len(usual)


def five_queries(length: int) -> list[Any]:
    """q, k and v of the core, with so many keys."""
    return [there(3, *shape, dtype="bfloat16") for shape in ((8, 5, 64), (2, length, 64), (2, length, 128))]


def test_no_keys_have_no_address_and_the_copy_engine_is_told_of_none(gpu: Pretended, folder: Path) -> None:
    """The driver refuses NULL and sizes of 0. The maps of K and V are of other memory then, as wide as a row."""
    loaded = mhsa.load(folder / "core")
    gpu.take()
    for length, of_keys in ((7, ("64 7 2 3", "128 7 2 3")), (0, ("64 1 1 1", "128 1 1 1"))):
        y = loaded(*five_queries(length))
        assert tuple(y.shape) == (3, 8, 5, 128)
        lines = gpu.take()
        sizes = [line.split("sizes ")[1].split(" strides")[0] for line in lines if line.startswith("tensor map")]
        assert sorted(sizes) == sorted(["64 5 8 3", "128 5 8 3", *of_keys])
        (name,) = launches(lines)
        assert name.startswith("attention")


def test_no_queries_tell_the_copy_engine_nothing(gpu: Pretended, folder: Path) -> None:
    """A cache comes back, so that the call is not left out as a whole."""
    loaded = mhsa.load(folder / "cached")
    past = [there(2, 2, 96, 64, dtype="bfloat16") for _ in range(2)]
    for length in (40, 0):
        gpu.take()
        y, *present = loaded(there(2, length, 512, dtype="bfloat16"), *past, there(2, dtype="int64"))
        assert tuple(y.shape) == (2, length, 512) and all(tuple(p.shape) == (2, 2, 96, 64) for p in present)
        lines = gpu.take()
        assert any(line.startswith("tensor map of 4") for line in lines) == (length > 0)
        assert any(name.startswith("attention") for name in launches(lines)) == (length > 0)
    assert not any(line.startswith("tensor map") for line in lines)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_a_mask_of_integers_is_looked_at_and_copied(gpu: Pretended, folder: Path, dtype: str) -> None:
    """A call with one launches what a call with a bool one does; a wrong one launches nothing."""
    loaded = mhsa.load(folder / "padded")
    inputs = [there(2, length, width) for length, width in ((5, 64), (7, 32), (7, 48))]
    visible = np.arange(7) < np.array([[7], [3]])
    runtime = tvm_runtime.start_cuda()
    usual, integers, wrong = runtime.on_gpu([visible, visible.astype(dtype), 2 * visible.astype(dtype)], 0)
    loaded(*inputs, usual)
    gpu.take()
    assert tuple(loaded(*inputs, mask=usual).shape) == (2, 5, 64)
    expected = launches(gpu.take())
    for words in ({}, {"stream": 5000}):
        assert tuple(loaded(*inputs, mask=integers, **words).shape) == (2, 5, 64)
        lines = gpu.take()
        assert launches(lines) == expected
        copies = [line for line in lines if line.startswith("copy")]
        assert copies == [f"copy {visible.size * np.dtype(dtype).itemsize}", f"copy {visible.size}"]
        assert lines.index(f"wait {words.get('stream', 0)}") < lines.index(copies[0])  # who made it may still write it
    with pytest.raises(InputError, match=r"input 'mask': expected bool, or integers 0 and 1, got values from 0 to 2"):
        loaded(*inputs, mask=wrong)
    assert launches(gpu.take()) == []
    nobody = [there(0, length, width) for length, width in ((5, 64), (7, 32), (7, 48))]
    assert tuple(loaded(*nobody, there(0, 7, dtype=dtype)).shape) == (0, 5, 64)


def test_arrays_of_the_host_go_there_and_back(gpu: Pretended, attention: Any) -> None:
    gpu.take()
    y = attention.from_host(np.ones((2, 5, 64), np.float32))
    assert isinstance(y, np.ndarray) and y.shape == (2, 5, 64)
    assert [line for line in gpu.take() if line.startswith("copy")] == [f"copy {2 * 5 * 64 * 4}"] * 2


def test_a_refused_launch_names_its_kernel_and_its_config(gpu: Pretended, artifact: Artifact, attention: Any) -> None:
    x = there(2, 5, 64)
    gpu.take()
    attention(x)
    kernels = launches(gpu.take())
    for op in artifact.manifest.ops:
        name = f"{op.op}_{op.name}"
        own = [kernel for kernel in kernels if re.fullmatch(rf"{name}_kernel(_\d+)?", kernel)]
        if not own:
            continue  # a fallback of several functions
        gpu.fail(own[0], 701)
        with pytest.raises(DeviceError, match=rf"^kernel {name} \({re.escape(op.kernel)}.*OUT_OF_RESOURCES.*grid="):
            attention(x)
        gpu.fail("", 0)
    gpu.fail("*", 1)
    with pytest.raises(
        DeviceError, match=rf"^kernel {kernels[0].split('_kernel')[0]}.*: expected a launch that cuda:0"
    ):
        attention(x)
    gpu.fail("", 0)
    attention(x)


def test_a_kernel_that_died_is_not_taken_for_the_next(gpu: Pretended, attention: Any) -> None:
    gpu.fail("*", 700)
    with pytest.raises(DeviceError, match=r"^a kernel launched earlier.*ILLEGAL_ADDRESS.*Start the process anew"):
        attention(there(2, 5, 64))
    gpu.fail("", 0)


def test_threads_have_machines_of_their_own(gpu: Pretended, attention: Any) -> None:
    xs = [there(2, length, 64) for length in (3, 5, 7)]
    gpu.take()
    attention(xs[0])
    each = len(launches(gpu.take()))
    shapes: list[Any] = []
    workers = [threading.Thread(target=lambda x=x: shapes.append(tuple(attention(x).shape))) for x in xs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(shapes) == [(2, 3, 64), (2, 5, 64), (2, 7, 64)]
    assert len(launches(gpu.take())) == 3 * each


def test_other_producers_of_dlpack_are_told_the_stream(attention: Any) -> None:
    class Foreign:
        def __init__(self) -> None:
            self.tensor, self.streams = there(2, 5, 64), []

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

        def __dlpack__(self, *, stream: Any = None, **words: Any) -> object:
            self.streams.append(stream)
            return self.tensor.__dlpack__()

    foreign = Foreign()
    attention(foreign)
    attention(foreign, stream=5000)
    assert foreign.streams == [1, 5000]


def test_the_copy_engine_is_told_where_heads_lie(gpu: Pretended, folder: Path) -> None:
    """Heads lie in the rows of a fused projection, each head apart; there is a block for each multiprocessor."""
    loaded = mhsa.load(Artifact.open(folder / "heads"))
    gpu.take()
    loaded(there(3, 1000, 512, dtype="bfloat16"))
    lines = gpu.take()
    matches = [
        re.search(r"sizes 64 (\d) 1000 3 strides 128 (\d+) (\d+) box 64 1 (\d+) 1 swizzle 3", line) for line in lines
    ]
    maps = [tuple(map(int, match.groups())) for match in matches if match]
    assert [heads for heads, *_ in maps] == [8, 8, 2, 2] and maps[1][1] == 1024  # Q, Y, K and V
    assert all(entry == 1000 * row for _, row, entry, _ in maps)
    # Items differ in their keys: first the counter of those that are taken is set to 0.
    reset, launch = [line for line in lines if line.startswith("launch attention")]
    assert "grid=1,1,1" in reset
    assert "grid=132,1,1" in launch
    assert f"block={128 + 2 * maps[0][3]},1,1" in launch  # 128 threads copy; for 64 rows of queries, 128 compute


def test_the_copy_engine_is_told_where_matrices_lie(gpu: Pretended, folder: Path) -> None:
    """x, the weights and y of a projection, y by the rows of a warp."""
    loaded = mhsa.load(Artifact.open(folder / "heads"))
    gpu.take()
    loaded(there(3, 1000, 512, dtype="bfloat16"))
    matches = [re.search(r"sizes (\d+) (\d+) strides (\d+) box 64 (\d+) swizzle 3", line) for line in gpu.take()]
    maps = [tuple(map(int, match.groups())) for match in matches if match]
    for (x, weight, y), terms in zip((maps[:3], maps[3:]), (512, 512), strict=True):
        assert x == (terms, 3000, 2 * terms, 128) and weight[::2] == (terms, 2 * terms)
        assert y[:2] == (weight[1], 3000) and y[2] >= 2 * y[0] and y[3] == 16
