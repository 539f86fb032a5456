"""Tensors that PyTorch follows through a call: tracing, vmap and derivatives would lose what compiled code makes of
their numbers, and go on with a constant."""

from __future__ import annotations

import sys
from typing import Any


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
