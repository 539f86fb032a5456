"""Arrays as memory: where they begin, what TVM reads in place, and the way back.

An array is a NumPy array or a torch tensor here (PyTorch is looked up where it is loaded, never imported).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from mhsa_compile.runtime import tvm_runtime

ALIGNMENT = 64
"""A cache line, in bytes: where TVM's own code took arrays to begin, in artifacts of formats before 5."""


def is_torch(value: object) -> bool:
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def is_plain_tensor(value: Any) -> bool:
    """Whether a value is a contiguous tensor of PyTorch's in CPU memory, of no subclass, that wants no gradient."""
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.is_cpu
        and value.is_contiguous()
        and not (value.requires_grad or value.is_neg() or value.is_nested)
    )


def any_torch(values: Iterable[object]) -> bool:
    """Whether one of the values is a tensor of PyTorch's; quick where all are NumPy's."""
    return any(type(value) is not np.ndarray and is_torch(value) for value in values)


def address(array: Any) -> int:
    """The address at which an array of NumPy's, PyTorch's or TVM's begins in memory."""
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    return int(array.data_ptr())


def overlap(one: Any, other: Any) -> bool:
    """Whether two contiguous arrays share a byte."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.may_share_memory(one, other)  # exact for contiguous ones, and quicker than their addresses
    (begin, end), (first, last) = extent(one), extent(other)
    return begin < last and first < end


def extent(array: Any) -> tuple[int, int]:
    """The addresses from which to which a contiguous array lies in memory."""
    itemsize = array.element_size() if is_torch(array) else np.dtype(str(array.dtype)).itemsize
    begin = address(array)
    return begin, begin + math.prod(array.shape) * itemsize


def as_tvm_strides(array: Any) -> Any:
    """An array of nothing with the strides that TVM's code asks for, where a size of 0 counts as 0."""
    strides = [int(np.prod(array.shape[axis + 1 :])) for axis in range(array.ndim)]
    if not isinstance(array, np.ndarray):
        return array.detach().as_strided(array.shape, strides)
    return np.lib.stride_tricks.as_strided(array, strides=[array.itemsize * step for step in strides])


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Zeros that begin with a cache line."""
    return _on_a_cache_line(np.zeros(_bytes(shape, dtype) + ALIGNMENT, np.uint8), shape, dtype)


def aligned_copy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    memory = np.empty(_bytes(array.shape, array.dtype) + ALIGNMENT, np.uint8)
    copy = _on_a_cache_line(memory, array.shape, array.dtype)
    copy[...] = array
    return copy


def _bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * int(np.dtype(dtype).itemsize)


def _on_a_cache_line(memory: np.ndarray[Any, Any], shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    first = -memory.__array_interface__["data"][0] % ALIGNMENT
    array: np.ndarray[Any, Any] = memory[first : first + _bytes(shape, dtype)].view(dtype).reshape(shape)
    return array


def exportable(array: np.ndarray[Any, Any]) -> Any:
    """A contiguous array that DLPack can hand over: a copy on a cache line, unless it is only read-only."""
    if array.flags.carray:
        return array
    if array.flags.c_contiguous and array.flags.aligned:
        try:
            capsule = array.__dlpack__(max_version=(1, 0))  # since this version DLPack can say read-only
        except TypeError:  # NumPy before 2.1
            return aligned_copy(array)
        import tvm_ffi

        return tvm_ffi.from_dlpack(capsule)
    return aligned_copy(array)


def to_list(result: Any) -> list[Any]:
    """What a call returned, one array or several, as a list."""
    return list(result) if isinstance(result, list | tuple) else [result]


def to_torch(tensor: Any) -> Any:
    return tensor if is_torch(tensor) else sys.modules["torch"].from_dlpack(tensor)


def bfloat16_to_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    return np.from_dlpack(tvm_runtime.start().reinterpreted(tensor, "uint16")).view(ml_dtypes.bfloat16)


def may_be_followed() -> bool:
    """Whether something follows tensors now; quick, and only to be asked where PyTorch is loaded."""
    torch = sys.modules["torch"]
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def follower(tensor: Any) -> str:
    """What follows this tensor of PyTorch's; "" if nothing does."""
    torch = sys.modules["torch"]
    if torch._C._get_tracing_state() is not None:
        return "TorchScript's tracing"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "torch.vmap, or a derivative of torch.func"
    forward_ad = torch.autograd.forward_ad
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        return "a forward derivative"
    return ""
