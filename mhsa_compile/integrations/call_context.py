"""What an artifact cannot take part in: it reads numbers from memory, gives back numbers alone, and has no gradient."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from mhsa_compile.errors import InputError


def why_not_a_call() -> str:
    """What around a call asks for more than numbers; "" if nothing does."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "vmap, or a derivative of torch.func"
    if forward_ad._current_level >= 0:
        return "a forward derivative"
    return ""


def why_watched() -> str:
    """Who watches or changes this thread's operators, of which an artifact's call is none: a counter of them, make_fx,
    a TorchFunctionMode; "" if nobody does. `torch.device` as a context says of new tensors alone where they are."""
    modes = torch._C._len_torch_function_stack()
    if torch._C._len_torch_dispatch_stack():
        return "a mode that watches PyTorch's operators"
    if modes and any(type(torch._C._get_function_stack_at(i)) is not DeviceContext for i in range(modes)):
        return "a mode that watches PyTorch's functions"
    return ""


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which products on a device are of the dtype that their factors have."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def why_not_numbers(*tensors: Tensor | None) -> str:
    """Why PyTorch is to compute a call with these inputs; "" where they are plain numbers in memory."""
    if why := why_not_a_call() or why_watched():
        return why
    if torch.is_autocast_enabled("cpu"):
        return "autocast"
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_nested:
            return f"inputs that are a {'nested tensor' if tensor.is_nested else type(tensor).__name__}"
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return f"inputs that are {'quantised' if tensor.is_quantized else 'sparse'}"
    return ""


_OF_FUNCTIONS = frozenset({"__code__", "__closure__", "__defaults__", "__kwdefaults__", "__wrapped__"})


class NotScriptable(InputError, AttributeError):
    """TorchScript reads the source of what it compiles, and a replaced forward is no function."""


class StandsForFunction:
    """What is called instead of a module's forward, and read as that one by torch.export and inspect."""

    def _function(self) -> Any:
        """The forward that this stands for."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name == "__globals__":
            expected = "one that is not accelerated: TorchScript compiles the source of each forward"
            hint = "Call mhsa.restore(model) before torch.jit.script, or use torch.jit.trace or torch.export."
            raise NotScriptable("model", expected, "an accelerated one", hint)
        if name not in _OF_FUNCTIONS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._function() if name == "__wrapped__" else getattr(self._function(), name)


def no_gradient(argument: str) -> InputError:
    """The error for a call whose gradient is wanted: compiled attention computes none."""
    expected = "a tensor without a gradient to follow: compiled attention computes none"
    hint = "Call under torch.no_grad(), or set another attention to train."
    return InputError(argument, expected, "one that requires grad", hint)


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether a gradient of the result would be asked of one of them."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def is_traced(q: Tensor) -> bool:
    """Whether somebody records the calls: then the operator is called, else `attend` directly."""
    return is_recorded() or type(q) not in (Tensor, torch.nn.Parameter)


def is_recorded() -> bool:
    """Whether this thread's calls become a program: an artifact's would be missing in it, or its result a constant."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]


def check_inference(layer: torch.nn.Module, argument: str, *tensors: Tensor | None) -> None:
    """Raises InputError for a replaced layer in training mode, and where a gradient is wanted of one of `tensors`."""
    if layer.training:
        raise InputError("model", "eval mode: compiled attention is for inference", "training mode", "model.eval()")
    if wants_gradient(*tensors):
        raise no_gradient(argument)
