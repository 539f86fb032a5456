"""caller_memory.py and cuda_launch.py, on the CPU: code that takes its memory from the caller, and the calls of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from support.bind_functions import Machine
from tvm import relax

from mhsa_compile.compiler.codegen import caller_memory
from mhsa_compile.compiler.codegen.build import _linker, _lowering, _planning, pass_context
from mhsa_compile.compiler.codegen.object_files import ObjectFiles
from mhsa_compile.errors import DeviceError, InputError, ModelError
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.runtime import cuda_launch, tvm_runtime
from mhsa_compile.runtime.array_memory import aligned_copy, aligned_zeros
from mhsa_compile.runtime.artifact.manifest import OpReport
from mhsa_compile.runtime.cuda_devices import Gpu
from mhsa_compile.runtime.tvm_runtime import Vm

GPU = Gpu(0, "made up", (9, 0), 132, 227)
OPS = (OpReport("op_1", "attention", "cuda.attention", {"rows": 128, "stages": 2}, "default"),)


def module() -> Any:
    """main(x (L, 8), p (8,)) -> 3 a + 2, a + p a with a = 2 x + 1: two outputs, and arrays that nobody else sees."""
    from tvm.script import ir as I
    from tvm.script import relax as R
    from tvm.script import tirx as T

    @I.ir_module
    class Module:
        @T.prim_func
        def attention_op_1(x: T.handle, y: T.handle):
            L = T.int64()
            X = T.match_buffer(x, (L, 8), "float32")
            Y = T.match_buffer(y, (L, 8), "float32")
            for i in range(L):
                for j in range(8):
                    Y[i, j] = X[i, j] * T.float32(2) + T.float32(1)

        @T.prim_func
        def times(x: T.handle, p: T.handle, y: T.handle):
            L = T.int64()
            X = T.match_buffer(x, (L, 8), "float32")
            P = T.match_buffer(p, (8,), "float32")
            Y = T.match_buffer(y, (L, 8), "float32")
            for i in range(L):
                for j in range(8):
                    Y[i, j] = X[i, j] * P[j]

        @T.prim_func
        def add(x: T.handle, z: T.handle, y: T.handle):
            L = T.int64()
            X = T.match_buffer(x, (L, 8), "float32")
            Z = T.match_buffer(z, (L, 8), "float32")
            Y = T.match_buffer(y, (L, 8), "float32")
            for i in range(L):
                for j in range(8):
                    Y[i, j] = X[i, j] + Z[i, j]

        @R.function
        def main(x: R.Tensor(("L", 8), "float32"), p: R.Tensor((8,), "float32")):
            L = T.int64()
            cls = Module
            with R.dataflow():
                a = R.call_tir(cls.attention_op_1, (x,), out_ty=R.Tensor((L, 8), dtype="float32"))
                b = R.call_tir(cls.attention_op_1, (a,), out_ty=R.Tensor((L, 8), dtype="float32"))
                y = R.call_tir(cls.add, (a, b), out_ty=R.Tensor((L, 8), dtype="float32"))
                c = R.call_tir(cls.times, (a, p), out_ty=R.Tensor((L, 8), dtype="float32"))
                z = R.call_tir(cls.add, (a, c), out_ty=R.Tensor((L, 8), dtype="float32"))
                R.output(y, z)
            return (y, z)

    return Module


def expected(x: np.ndarray, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    a = 2 * x + 1
    return a + (2 * a + 1), a + a * p


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> tvm_runtime.Library:
    return built(module(), tmp_path_factory.mktemp("library") / "module.so")


def built(given: Any, path: Path) -> tvm_runtime.Library:
    profile = load_profile("native")
    planned = caller_memory.from_caller(tvm.transform.Sequential(_planning())(given), inputs=1)
    lowering = tvm.transform.Sequential(_lowering())
    with pass_context():
        executable = relax.build(planned, tvm.target.Target(profile.tvm_config()), relax_pipeline=lowering)
    with ObjectFiles(path.parent) as objects:
        linker = _linker(profile.link.triple, objects)
        executable.export_library(str(path), fcompile=linker, workspace_dir=str(path.parent))
    code = path.read_bytes()
    return tvm_runtime.start().library(code, sha256(code).hexdigest())


@pytest.mark.parametrize("length", [pytest.param(1, marks=pytest.mark.thorough), 7, 197])
def test_main_computes_in_memory_that_it_is_given(library: tvm_runtime.Library, length: int) -> None:
    rng = np.random.default_rng(length)
    x, p = (aligned_copy(rng.standard_normal(shape, np.float32)) for shape in ((length, 8), (8,)))
    vm = library.new_vm()
    assert vm.plan is not None
    (size,), *shapes = map(tuple, vm.plan(x))
    assert shapes == [(length, 8), (length, 8)]
    one = -(-length * 32 // caller_memory.ALIGNMENT) * caller_memory.ALIGNMENT
    assert size == 2 * one  # a, and b in whose place c comes
    workspace = aligned_zeros((size + 64,), np.uint8)
    made = [aligned_zeros(shape, np.float32) for shape in shapes]
    vm.main(x, p, workspace[:size], *made)
    for found, wanted in zip(made, expected(x, p), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    assert not workspace[size:].any()


def test_a_workspace_of_a_kernel_lies_in_that_of_the_call(tmp_path: Path) -> None:
    """The module calls as a kernel with `Emitted.workspace` is called: two arrays are made, and one of them is asked
    for."""
    from tvm.script import ir as I
    from tvm.script import relax as R
    from tvm.script import tirx as T

    @I.ir_module
    class Module:
        @T.prim_func
        def sum_of_two(x: T.handle, y: T.handle, w: T.handle):
            L = T.int64()
            X = T.match_buffer(x, (L,), "float32")
            Y = T.match_buffer(y, (L,), "float32")
            W = T.match_buffer(w, (3, 100), "float32")
            for i in range(3):
                W[i, 99] = T.float32(i)
            for i in range(L):
                Y[i] = X[i] + W[2, 99]

        @R.function
        def main(x: R.Tensor(("L",), "float32")):
            L = T.int64()
            cls = Module
            with R.dataflow():
                both = R.call_tir(
                    cls.sum_of_two, (x,), out_ty=[R.Tensor((L,), dtype="float32"), R.Tensor((3, 100), dtype="float32")]
                )
                y = both[0]
                R.output(y)
            return y

    vm, x = built(Module, tmp_path / "module.so").new_vm(), aligned_copy(np.arange(7, dtype=np.float32))
    (size,), *shapes = map(tuple, vm.plan(x))
    assert shapes == [(7,)] and size == 5 * caller_memory.ALIGNMENT  # 1,200 bytes
    y = aligned_zeros((7,), np.float32)
    vm.main(x, aligned_zeros((size,), np.uint8), y)
    np.testing.assert_array_equal(y, x + 2)


def test_an_output_that_is_two_is_refused() -> None:
    from tvm.script import ir as I
    from tvm.script import relax as R

    @I.ir_module
    class Twice:
        @R.function
        def main(x: R.Tensor((8,), "float32")):
            with R.dataflow():
                y = R.add(x, x)
                R.output(y)
            return (y, y)

    planned = tvm.transform.Sequential([relax.transform.LegalizeOps(), *_planning()])(Twice)
    with pytest.raises(ModelError, match="outputs: expected arrays of their own"):
        caller_memory.from_caller(planned, inputs=1)


def test_an_output_may_be_one_of_several_results() -> None:
    """The function also has scratch for results: the output is not the tuple, and not in the workspace."""
    from tvm.script import ir as I
    from tvm.script import relax as R
    from tvm.script import tirx as T

    @I.ir_module
    class WithScratch:
        @T.prim_func
        def attention_op_1(x: T.handle, y: T.handle, z: T.handle):
            X = T.match_buffer(x, (8,), "float32")
            Y = T.match_buffer(y, (8,), "float32")
            Z = T.match_buffer(z, (8,), "float64")
            for i in range(8):
                Z[i] = T.cast(X[i], "float64")
            for i in range(8):
                Y[i] = T.cast(Z[i], "float32")

        @R.function
        def main(x: R.Tensor((8,), "float32")):
            cls = WithScratch
            with R.dataflow():
                both = R.call_tir(
                    cls.attention_op_1, (x,), out_ty=[R.Tensor((8,), dtype="float32"), R.Tensor((8,), dtype="float64")]
                )
                y = both[0]
                R.output(y)
            return y

    memory = caller_memory._Memory(tvm.transform.Sequential(_planning())(WithScratch)["main"])
    (output,) = memory.outputs
    assert str(output.ty.dtype) == "float32"
    assert len(memory.places) == 1 and int(memory.total) == caller_memory.ALIGNMENT


@pytest.fixture
def calls(library: tvm_runtime.Library, monkeypatch: pytest.MonkeyPatch) -> cuda_launch.Launches:
    """Launches of the library on the CPU."""
    return made(monkeypatch, lambda gpu: library.new_vm())


def made(monkeypatch: pytest.MonkeyPatch, new_vm: Callable[[Any], Vm]) -> cuda_launch.Launches:
    """Launches of VMs on the CPU."""
    monkeypatch.setattr(tvm_runtime, "start_cuda", tvm_runtime.start)
    monkeypatch.setattr(cuda_launch, "empty", lambda shape, dtype, *_: torch.empty(shape, dtype=getattr(torch, dtype)))
    signature: Any = SimpleNamespace(made=lambda: [SimpleNamespace(dtype="float32")] * 2, in_place={})
    manifest: Any = SimpleNamespace(ops=OPS, outputs=())
    on_cpu: Any = SimpleNamespace(new_vm=new_vm)
    return cuda_launch.Launches(on_cpu, manifest, signature, GPU)


def test_outputs_are_new_tensors_of_pytorch(calls: cuda_launch.Launches) -> None:
    x, p = torch.randn(13, 8), torch.randn(8)
    first = calls.run([x], {"L": 13}, [p])
    again = calls.run([x], {"L": 13}, [p])
    for found, other, wanted in zip(first, again, expected(x.numpy(), p.numpy()), strict=True):
        torch.testing.assert_close(found, torch.from_numpy(wanted), rtol=0, atol=1e-5)
        assert found.data_ptr() != other.data_ptr()


def test_sizes_are_planned_once(calls: cuda_launch.Launches) -> None:
    calls.run([torch.randn(3, 8)], {"L": 3}, [torch.randn(8)])
    planned, calls._vm = calls._vm, Vm(calls._vm.machine, calls._vm.main, None, calls._vm.instrument)
    calls.run([torch.randn(3, 8)], {"L": 3}, [torch.randn(8)])
    assert planned.plan is not None


def failing(message: str, last: str, again: bool) -> Vm:
    """A VM whose call ends with an error of TVM's, as it calls `last`; on the second time as well if `again`."""
    notes: list[Any] = [None]
    ended = []

    def main(*_: Any) -> None:
        if notes[0] is not None:
            for name in ("vm.builtin.match_shape", last):
                notes[0](None, name, True, None)
        if again or not ended:
            ended.append(True)
            raise RuntimeError(message)

    def instrument(note: Any) -> None:
        notes[0] = note

    return Vm(Machine(), main, lambda *_: [(64,), (1, 8), (1, 8)], instrument)


LAUNCH = "InternalError: CUDALaunch Error: CUDA_ERROR_INVALID_VALUE\n grid=(1,1,1),  block=(2048,1,1)\n"


@pytest.mark.parametrize(
    ("last", "again", "named"),
    [("attention_op_1", True, r"kernel attention_op_1 \(cuda\.attention: rows = 128, stages = 2\)"),
     ("fused_add", True, "kernel fused_add"), ("fused_add", False, "a kernel")],
)  # fmt: skip
def test_a_refused_launch_names_the_kernel(calls: cuda_launch.Launches, last: str, again: bool, named: str) -> None:
    calls._vm = failing(LAUNCH, last, again)
    with pytest.raises(DeviceError, match=f"^{named}: expected a launch that cuda:0 takes, got .*INVALID_VALUE"):
        calls.run([torch.randn(1, 8)], {"L": 1}, [])


def test_an_allocation_that_hears_of_a_dead_kernel_is_not_called_too_large(
    calls: cuda_launch.Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(cuda_launch, "empty", told)
    with pytest.raises(DeviceError, match=r"^a kernel launched earlier"):
        calls.run([torch.randn(1, 8)], {"L": 1}, [torch.randn(8)])


@pytest.mark.parametrize("said", ["CUDALaunch Error: CUDA_ERROR_ILLEGAL_ADDRESS\n grid=(1,1,1)",
                                  "CUDAError: cuModuleLoadData failed with error: CUDA_ERROR_LAUNCH_FAILED",
                                  "CUDA Error: an illegal memory access was encountered"])  # fmt: skip
def test_a_kernel_that_died_earlier_is_not_taken_for_the_one_that_hears_of_it(
    calls: cuda_launch.Launches, said: str
) -> None:
    calls._vm = failing(said, "attention_op_1", again=True)
    with pytest.raises(DeviceError, match=r"^a kernel launched earlier.*got CUDA.*Start the process anew"):
        calls.run([torch.randn(1, 8)], {"L": 1}, [])


def test_too_little_memory_is_named(calls: cuda_launch.Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.\nSee documentation")

    monkeypatch.setattr(cuda_launch, "empty", full)
    with pytest.raises(DeviceError, match=r"^device cuda:0: expected .* MiB for the workspace.*got CUDA out of memory"):
        calls.run([torch.randn(1, 8)], {"L": 1}, [torch.randn(8)])


def test_first_calls_of_threads_come_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM shows a kernel to all threads before it has its shared memory. Later calls do not wait for each other."""
    inside, most, together = [], [], threading.Barrier(2)

    def first(*_: Any) -> None:
        inside.append(threading.get_ident())
        most.append(len(inside))
        time.sleep(0.1)
        inside.remove(threading.get_ident())

    def later(*_: Any) -> None:
        together.wait(timeout=60)

    def vm(_: Any) -> Vm:
        calls = iter([first, first])
        return Vm(Machine(), lambda *given: next(calls, later)(*given), lambda *_: [(64,), (1, 8), (1, 8)], None)  # type: ignore[arg-type]

    launched = made(monkeypatch, vm)

    def worker(_: int) -> None:
        together.wait(timeout=60)
        for length in (1, 2, 1, 2):
            launched.run([torch.randn(length, 8)], {"L": length}, [])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(worker, range(2)))
    assert most == [1, 1, 1, 1] and together.n_waiting == 0 and not together.broken


def test_weights_that_pytorch_is_still_making_are_waited_for(calls: cuda_launch.Launches, monkeypatch: Any) -> None:
    """PyTorch's stream is not TVM's, and DLPack's quick way between them orders nothing."""
    done: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: done.append("synchronized"))
    fake = SimpleNamespace(
        cuda=SimpleNamespace(current_stream=lambda index: stream, device=lambda index: nullcontext())
    )
    monkeypatch.setattr(cuda_launch, "torch_of_cuda", lambda: fake)
    machine = Machine(bind_weights_0=[0])
    machine["bind_weights_0"] = lambda *_: done.append("packed") or []
    calls._vm = Vm(machine, calls._vm.main, None, calls._vm.instrument)
    calls._runtime = SimpleNamespace(
        on_gpu=lambda weights, _: weights, wait=lambda _: None, release_memory=lambda: None
    )
    calls.bind([torch.randn(8)])
    assert done == ["synchronized", "packed"]


def test_a_first_call_is_not_captured(calls: cuda_launch.Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = SimpleNamespace(cuda=SimpleNamespace(is_current_stream_capturing=lambda: True))
    monkeypatch.setattr(cuda_launch, "torch_of_cuda", lambda: fake)
    with pytest.raises(InputError, match=r"call: .*captured, got the first one\. Call it once before the capture"):
        calls.run([torch.randn(1, 8)], {"L": 1}, [])
