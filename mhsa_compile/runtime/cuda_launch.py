"""Calls on a GPU: on the caller's stream, in memory of the caller's allocator, without waiting for anything.

Where PyTorch is loaded, a call runs on its current stream of the GPU, and workspace and outputs are torch tensors: its
allocator hands memory out by stream, and keeps what a captured graph uses. Else it runs on CUDA's default stream, or on
the one that the call names, and memory is CUDA's own.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from mhsa_compile.errors import DeviceError, InputError
from mhsa_compile.runtime import cuda_devices, tvm_runtime
from mhsa_compile.runtime.array_memory import is_torch
from mhsa_compile.runtime.artifact.manifest import Manifest, OpReport
from mhsa_compile.runtime.call_arguments import Sizes
from mhsa_compile.runtime.cuda_arguments import DeviceSignature, empty, torch_of_cuda
from mhsa_compile.runtime.cuda_devices import Gpu
from mhsa_compile.runtime.weight_binding import bound

_KNOWN_SIZES = 1024  # plans that are kept: a few hundred bytes each
_FIRST_CALLS = threading.Lock()
"""The lock that a thread's first call of each sizes holds, which may launch a kernel for the first time: TVM shows a
kernel to all threads before it has asked the driver for its shared memory (`fcache_` in cuda_module.cc), and without
that the driver refuses a launch from another thread."""


class Launches(threading.local):
    """What each calling thread has for itself: a VM on the GPU. Python initialises it anew in each thread."""

    count, pool = 1, "gpu"

    def __init__(self, library: tvm_runtime.Library, manifest: Manifest, signature: DeviceSignature, gpu: Gpu) -> None:
        _refuse_capture()
        self._runtime = tvm_runtime.start_cuda()
        self.lock = self._runtime.calls.lock
        self._device = self._runtime.ffi.device(str(gpu))
        self._ops, self._made, self._gpu = manifest.ops, [info.dtype for info in signature.made()], gpu
        self._in_place = [signature.in_place.get(i) for i in range(len(manifest.outputs))]
        with self.lock, _current_device_guard(gpu):
            self._vm = library.new_vm(gpu.index)
        self._plans: dict[tuple[int, ...], tuple[int, list[tuple[int, ...]]]] = {}
        self._has_run = False

    def bind(self, weights: list[Any], shared: object = None) -> tuple[Any, ...]:
        """Packs the weights on the GPU, and takes them out of their list; all threads share the result. Raises
        DeviceError."""
        with _current_device_guard(self._gpu):
            _wait_for_torch(self._gpu)
            return bound(self._vm.machine, weights, self._bind)

    def _bind(self, function: Callable[..., Any], weights: list[Any]) -> Any:
        try:
            packed = function(*self._runtime.on_gpu(weights, self._gpu.index))
            self._runtime.wait(self._gpu.index)
        except RuntimeError as error:
            raise self._launch_error(error, function, []) from error
        self._runtime.release_memory()
        return packed

    def run(self, arrays: Sequence[Any], sizes: Sizes, packed: Sequence[Any]) -> list[Any]:
        """Launches a call, and returns the outputs that it makes. Raises InputError and DeviceError."""
        of_torch = any(map(is_torch, arrays))
        if not self._has_run:
            _refuse_capture()
        key = tuple(sizes.values())
        plan = self._plans.get(key)
        with _current_device_guard(self._gpu), self._stream(of_torch), _FIRST_CALLS if plan is None else nullcontext():
            size, shapes = plan or self._plan(arrays)
            try:
                outputs = [empty(s, dtype, self._gpu, of_torch) for s, dtype in zip(shapes, self._made, strict=True)]
                workspace = empty((size,), "uint8", self._gpu, of_torch)
            except RuntimeError as error:  # PyTorch's OutOfMemoryError is one
                raise self._no_memory(size, error) from error
            try:
                self._vm.main(*arrays, *packed, workspace, *outputs)
            except RuntimeError as error:
                if tvm_runtime.refusal(error) is not None:
                    raise
                raise self._launch_error(error, self._vm.main, [*arrays, *packed, workspace, *outputs]) from error
        self._has_run = True
        if plan is None:
            self._keep(key, (size, shapes))
        return outputs

    def run_from_host(self, arrays: Sequence[Any], sizes: Sizes, packed: Sequence[Any]) -> list[Any]:
        """A call on arrays of the host, which are copied to the GPU; all outputs, copied back. Errors as `run`."""
        with _current_device_guard(self._gpu):
            there = self._runtime.on_gpu(arrays, self._gpu.index)
            results = iter(self.run(there, sizes, packed))
            outputs = [next(results) if source is None else there[source] for source in self._in_place]
            return [self._runtime.to_host(output) for output in outputs]

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Calls in the block run on this stream. Raises InputError for one of another GPU."""
        handle = cuda_devices.handle_of(stream, self._gpu)
        torch = torch_of_cuda()
        with self._runtime.ffi.use_raw_stream(self._device, handle):
            if torch is None:
                yield
                return
            own = (
                stream if isinstance(stream, torch.cuda.Stream) else torch.cuda.ExternalStream(handle, self._gpu.index)
            )
            with torch.cuda.stream(own):
                yield

    def _stream(self, of_torch: bool) -> AbstractContextManager[Any]:
        """Inside, TVM launches on PyTorch's current stream, if `of_torch`; it is told one for each thread and GPU."""
        torch, same = torch_of_cuda(), nullcontext()
        if not of_torch or torch is None:
            return same
        stream = torch.cuda.current_stream(self._gpu.index).cuda_stream
        context: AbstractContextManager[Any] = self._runtime.ffi.use_raw_stream(self._device, stream)
        return context

    def _plan(self, arrays: Sequence[Any]) -> tuple[int, list[tuple[int, ...]]]:
        """Bytes of the workspace, and the shapes of what the call makes, which follow from its sizes."""
        assert self._vm.plan is not None  # compiled for a GPU
        (size,), *shapes = map(tuple, self._vm.plan(*arrays))
        return max(size, 1), shapes

    def _keep(self, key: tuple[int, ...], plan: tuple[int, list[tuple[int, ...]]]) -> None:
        """Keeps the plan of a call that has launched all its kernels."""
        if len(self._plans) >= _KNOWN_SIZES:
            self._plans.clear()
        self._plans[key] = plan

    def _no_memory(self, size: int, error: RuntimeError) -> DeviceError:
        message = str(error).split("\n", 1)[0]
        if _LATE.search(message):
            return self._late(message)
        expected = f"{size / 2**20:,.1f} MiB for the workspace, and room for the outputs"
        return DeviceError(f"device {self._gpu}", expected, message, "Free some, or call with less.")

    def _late(self, message: str) -> DeviceError:
        expected = f"one that {self._gpu} runs to its end"
        return DeviceError("a kernel launched earlier, of this process", expected, message, _LATE_ADVICE)

    def _launch_error(self, error: RuntimeError, function: Callable[..., Any], arguments: list[Any]) -> DeviceError:
        """The error for what the GPU refused, with the kernel that it refused."""
        match = re.search(r"CUDA\w* ?Error: .*(\n *grid=.*)?", str(error))
        message = " ".join((str(error) if match is None else match[0]).split())[:300]
        if _LATE.search(message):
            return self._late(message)
        name = self._last_function(function, arguments) if arguments else None
        op = next((op for op in self._ops if name == f"{op.op}_{op.name}"), None)
        return DeviceError(_kernel(name, op), f"a launch that {self._gpu} takes", message, _ADVICE)

    def _last_function(self, function: Callable[..., Any], arguments: list[Any]) -> str | None:
        """The function at which a call ends, if it ends again: TVM's error does not say it."""
        names: list[str] = []

        def note(_: Any, name: str, before: bool, *__: Any) -> int:
            if before:
                names.append(name)
            return 0

        self._vm.instrument(note)
        try:
            function(*arguments)
        except RuntimeError:
            return next((name for name in reversed(names) if not name.startswith("vm.")), None)
        finally:
            self._vm.instrument(None)
        return None


_LATE = re.compile(
    "ILLEGAL_ADDRESS|MISALIGNED_ADDRESS|ILLEGAL_INSTRUCTION|LAUNCH_FAILED|LAUNCH_TIMEOUT|ASSERT|HARDWARE_STACK|INVALID_PC"
    "|INVALID_ADDRESS_SPACE|UNCORRECTABLE|illegal memory access|misaligned address|unspecified launch failure"
)
"""What CUDA says of a kernel that died while it ran, to whoever asks next: the launch that hears of it is not to blame,
and each later one in the process fails alike."""
_LATE_ADVICE = "Start the process anew, with CUDA_LAUNCH_BLOCKING=1: the error then names its kernel."
_ADVICE = "With CUDA_LAUNCH_BLOCKING=1 an error shows where it arises; `mhsa doctor` shows the driver."


def _kernel(name: str | None, op: OpReport | None) -> str:
    if name is None:
        return "a kernel"
    if op is None:
        return f"kernel {name}"
    config = ", ".join(f"{knob} = {value}" for knob, value in op.config.items())
    return f"kernel {name} ({op.kernel}{': ' + config if config else ''})"


def _refuse_capture() -> None:
    """Refuses, while a graph is captured, what loads code or copies from the host, which would end the capture. Raises
    InputError."""
    torch = torch_of_cuda()
    if torch is not None and torch.cuda.is_current_stream_capturing():
        expected = "one that this thread has made before, since a graph is being captured"
        raise InputError("call", expected, "the first one", "Call it once before the capture: that loads its kernels.")


def _wait_for_torch(gpu: Gpu) -> None:
    """Waits for what PyTorch's current stream is still making, for which TVM's stream does not wait."""
    torch = torch_of_cuda()
    if torch is not None:
        torch.cuda.current_stream(gpu.index).synchronize()


def _current_device_guard(gpu: Gpu) -> AbstractContextManager[Any]:
    """Inside, TVM may make its GPU the current one of the thread; afterwards PyTorch goes on with the one it had."""
    torch = torch_of_cuda()
    context: AbstractContextManager[Any] = nullcontext() if torch is None else torch.cuda.device(gpu.index)
    return context
