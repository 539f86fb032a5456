"""What an artifact cannot take part in: it reads numbers from memory, and gives back numbers alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad


def why_not_a_call() -> str:
    """What around a call asks for more than numbers; "" if nothing does."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "vmap, or a derivative of torch.func"
    if forward_ad._current_level >= 0:
        return "a forward derivative"
    return ""


def why_not_numbers(*tensors: Tensor | None) -> str:
    """Why PyTorch is to compute a call with these inputs; "" where they are plain numbers in memory."""
    if why := why_not_a_call():
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
