"""Whether a module of ours is as its class makes it, so that its class, its spec and its tensors say all about it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from mhsa_compile.nn.functional import to_numpy
from mhsa_compile.nn.modules import MultiHeadAttention, ScaledDotProductAttention

State = dict[str, np.ndarray]  # by the names of parameters and buffers
_OWN = ("_buffers", "_modules", "_parameters", "dropout", "spec", "training")  # dropout is left out when exporting


def state_of(module: object) -> State | None:
    """The tensors of a module of ours, if nothing about it but their values differs from a new one of its spec: no
    class derived, no layer replaced, no hook, no other shape, dtype or device, no memory shared. Else None, and what
    it computes is known only by exporting it."""
    if type(module) is not MultiHeadAttention and type(module) is not ScaledDotProductAttention:
        return None
    if module.spec.functions:  # what they capture is no part of the spec
        return None
    with torch.device("meta"):
        new = type(module)(module.spec)
    layers, new_layers = dict(module.named_modules()), dict(new.named_modules())
    if layers.keys() != new_layers.keys() or not all(_alike(layers[name], new_layers[name]) for name in layers):
        return None
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    places = {tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.numel()}
    if len(places) != sum(tensor.numel() > 0 for tensor in tensors.values()):
        return None
    return {name: to_numpy(tensor) for name, tensor in tensors.items()}


def _alike(layer: nn.Module, new: nn.Module) -> bool:
    state, expected = vars(layer), vars(new)
    if type(layer) is not type(new) or state.keys() != expected.keys():
        return False
    if any(state[name] != value for name, value in expected.items() if name not in _OWN):
        return False
    tensors, new_tensors = ({**one["_parameters"], **one["_buffers"]} for one in (state, expected))
    same_names = all(state[kind].keys() == expected[kind].keys() for kind in ("_parameters", "_buffers"))
    return same_names and all(_tensor_alike(tensors[name], new_tensors[name]) for name in tensors)


def _tensor_alike(tensor: Tensor | None, new: Tensor | None) -> bool:
    if tensor is None or new is None:
        return tensor is new
    alike = type(tensor) is type(new) and (tensor.shape, tensor.dtype) == (new.shape, new.dtype)
    return alike and tensor.device.type == "cpu" and tensor.is_contiguous()
