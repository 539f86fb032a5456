"""What a call on a GPU brings and gets back: tensors that lie there already, checked, neither copied nor waited for.

An array is a torch tensor here, or TVM's tensor over the memory of any other producer of DLPack.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from mhsa_compile.errors import InputError
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.runtime import tvm_runtime
from mhsa_compile.runtime.array_memory import as_tvm_strides, is_torch
from mhsa_compile.runtime.artifact.manifest import Dims, Manifest, TensorInfo
from mhsa_compile.runtime.call_arguments import Argument, Signature, Sizes, fits, is_integer
from mhsa_compile.runtime.cuda_devices import Gpu

KINDS = (2, 13)
"""DLPack's device types: CUDA's memory, and that which it shares with the host."""
_ALIGNMENT = 16  # bytes: what a thread of a kernel reads at once, and where a tensor of the copy engine may begin
_LEGACY = 1  # DLPack's word for CUDA's default stream


class DeviceArgument(Argument):
    """One input in a GPU's memory. The numbers in it are not looked at, since that would wait for the GPU, but those of
    a mask of integers."""

    def __init__(self, gpu: Gpu, *words: Any) -> None:
        super().__init__(*words)
        self._gpu = gpu

    @property
    def is_checked_by_shape(self) -> bool:
        return False

    def ready(self, value: Any, sizes: Sizes) -> Any:
        array = self._adopt(value)
        if array.dtype not in self._right_dtypes:
            array = self._truths(array) if self.info.dtype == "bool" else array
            self._check_dtype(array)
        if self.info.broadcast is not None:
            original, array = array, self._broadcast(array, self.info.broadcast, sizes)
            if array is not original and original.is_contiguous():  # an axis that had to be repeated is not, any more
                array = array.contiguous()
        elif array.ndim != len(self.info.dims) or not fits(self.info.dims, array.shape, sizes):
            raise self._wrong_shape(array, sizes)
        self._check_memory(array)
        if not is_torch(array):
            return array
        array = array.detach() if array.requires_grad else array
        return as_tvm_strides(array) if 0 in array.shape else array

    def _adopt(self, value: Any) -> Any:
        if is_torch(value):
            if value.device.type != "cuda" or value.device.index != self._gpu.index:
                raise self._elsewhere(f"one on {value.device}", f"x.to({str(self._gpu)!r})")
            if self._written:
                self._check_writable(value)
            self._check_no_gradient(value)
            return self._with_its_sign(value)
        if isinstance(value, np.ndarray):
            move = f"torch.from_numpy(x).to({str(self._gpu)!r}), or have it copied there and back: .from_host(x)"
            raise self._elsewhere("a NumPy array", move)
        with reading(InputError, self.label, "DLPack memory of a GPU"):
            return self._from_dlpack(value)

    def _from_dlpack(self, value: Any) -> Any:
        if not hasattr(value, "__dlpack__"):
            got = "nothing" if value is None else type(value).__name__
            raise InputError(self.label, f"{self._requirement()}, from PyTorch or DLPack", got)
        kind, index = value.__dlpack_device__()
        if kind not in KINDS or int(index) != self._gpu.index:
            raise self._elsewhere(f"one on cuda:{index}" if kind in KINDS else "one elsewhere", "copy it there")
        if (torch := torch_of_cuda()) is not None:
            return torch.from_dlpack(value)  # in time for the stream of its own on which the call runs
        ffi = tvm_runtime.start().ffi
        return ffi.from_dlpack(value.__dlpack__(stream=ffi.get_raw_stream(ffi.device(str(self._gpu))) or _LEGACY))

    def _elsewhere(self, got: str, move: str) -> InputError:
        return InputError(self.label, f"a tensor in the memory of {self._gpu}", got, f"Move it: {move}.")

    def _truths(self, array: Any) -> Any:
        """Integers 0 and 1 as bool, on the stream of the call. Whether they are 0 and 1 the GPU must say: this waits.

        Raises InputError, also while a graph is being captured: what it replays could not be looked at.
        """
        if not is_integer(array.dtype):
            return array
        torch = torch_of_cuda()
        if torch is not None and torch.cuda.is_current_stream_capturing():
            hint = "Make it bool before the capture: mask.bool()."
            raise InputError(self.label, "bool, while a graph is being captured", f"{array.dtype}", hint)
        if is_torch(array):
            return super()._truths(array)
        if 0 in array.shape:
            return empty(array.shape, "bool", self._gpu, of_torch=False)
        runtime = tvm_runtime.start_cuda()  # TVM's tensors have no arithmetic
        runtime.wait(self._gpu.index, runtime.ffi.get_raw_stream(runtime.ffi.device(str(self._gpu))))
        truths = super()._truths(np.from_dlpack(runtime.to_host(array)))
        return runtime.on_gpu([truths], self._gpu.index)[0]

    def _broadcast(self, array: Any, full: Dims, sizes: Sizes) -> Any:
        if not is_torch(array) and (array.ndim != len(self.info.dims) or array.shape[-1] == 1):
            raise self._wrong_shape(array, sizes)  # TVM's tensors have no views
        return super()._broadcast(array, full, sizes)

    def _check_memory(self, array: Any) -> None:
        if not array.is_contiguous():
            raise InputError(self.label, "contiguous memory", "a tensor with gaps", "Make a copy: x.contiguous().")
        if rest := array.data_ptr() % _ALIGNMENT:
            expected = f"memory that begins at a multiple of {_ALIGNMENT} bytes"
            raise InputError(
                self.label, expected, f"memory {rest} bytes behind such a place", "Make a copy: x.clone()."
            )


class DeviceWeight(DeviceArgument):
    """A weight: from the host, whose memory is copied once, or in the GPU's, which is then used as it is."""

    def ready(self, value: Any, sizes: Sizes) -> Any:
        if is_torch(value) and value.device.type == "cuda":
            return super().ready(value, sizes)
        return Argument(self.info, "weight", {}).ready(value, sizes)


class DeviceSignature(Signature):
    """The inputs and outputs of a function on a GPU. What `results` is given are the arrays that a call filled; `host`
    is the same function for who has all of it copied there and back."""

    def __init__(self, manifest: Manifest, gpu: Gpu) -> None:
        super().__init__(
            manifest.inputs,
            manifest.outputs,
            in_place=manifest.in_place,
            limits=manifest.limits,
            weights=[info.name for info in manifest.weights],
            make=partial(DeviceArgument, gpu),
        )
        self._gpu, self.device = gpu, str(gpu)
        self.host = Signature(
            manifest.inputs, manifest.outputs, limits=manifest.limits, weights=[info.name for info in manifest.weights]
        )

    def results(self, arrays: Any, values: Sequence[Any]) -> Any:
        outputs = iter(arrays)
        own = {i: values[j] for i, j in self.in_place.items()}
        results = [own[i] if i in own else next(outputs) for i in range(len(self._outputs))]
        return results[0] if len(results) == 1 else self._together(results)

    def made(self) -> Iterator[TensorInfo]:
        """The outputs that a call makes, and does not write into an input."""
        return (info for i, info in enumerate(self._outputs) if i not in self.in_place)

    def _empty(self, shape: Sequence[int], dtype: str, of_torch: bool) -> Any:
        return empty(shape, dtype, self._gpu, of_torch)


def empty(shape: Sequence[int], dtype: str, gpu: Gpu, of_torch: bool) -> Any:
    """An array that nobody has written: from PyTorch's allocator, which knows its streams and graphs, or CUDA's own."""
    if of_torch:
        torch = sys.modules["torch"]
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=str(gpu))
    return tvm_runtime.start().empty(shape, dtype, gpu.index)


def torch_of_cuda() -> Any:
    """PyTorch, where it is loaded and made for CUDA; else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.version.cuda is not None else None
