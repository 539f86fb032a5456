"""Calls of a layer of transformers, and the ONNX graph of such calls: that of the layer's own forward.

Notation: B batch, L query length, S key length, D embed.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.export.export import export
from mhsa_compile.frontend.export.signatures import Shape
from mhsa_compile.integrations.layers.state import plain_look
from mhsa_compile.runtime.artifact.manifest import Manifest

PREFIX = "layer."
"""What stands before the names of a layer's weights in its graph."""
_EXAMPLE = {"B": 2, "L": 8, "S": 9}
_DTYPES = (torch.float32, torch.bool, torch.int64, torch.int32)


class ExportedKind(NamedTuple):
    """What of a layer, and of a call of it, decides on its artifact.

    structure  `LayerState.structure`
    tensors    (name, dims, dtype) of each
    constants  (name, value) of all other arguments
    """

    structure: str
    tensors: tuple[tuple[str, Shape, torch.dtype], ...]
    constants: tuple[tuple[str, Any], ...]


class ExportedCall(NamedTuple):
    """A call of a layer: its arguments by name, the tensors among them, those in tuples as `name_0`, and the rest."""

    arguments: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    constants: tuple[tuple[str, Any], ...]

    @property
    def form(self) -> Hashable:
        return tuple((name, x.shape, x.dtype) for name, x in self.tensors.items()), self.constants

    @property
    def is_masked(self) -> bool:
        return any("mask" in name for name in self.tensors)

    @property
    def x(self) -> Tensor:
        """The hidden states."""
        return next(iter(self.tensors.values()))

    @property
    def sizes(self) -> tuple[int, int]:
        B, L, _ = self.x.shape
        return B, L

    def kind(self, structure: str) -> ExportedKind:
        B, L = self.sizes
        tensors = ((name, _dims(name, x, B, L), x.dtype) for name, x in self.tensors.items())
        return ExportedKind(structure, tuple(tensors), self.constants)

    def inputs(self) -> dict[str, Tensor]:
        """The tensors as an artifact takes them: those for all entries of a batch alike are laid out for each."""
        B = self.x.shape[0]
        alike = {name: x for name, x in self.tensors.items() if x.ndim > 1 and x.shape[0] == 1 != B}
        return {**self.tensors, **{name: x.expand(B, *x.shape[1:]) for name, x in alike.items()}}


def call_of(names: tuple[str, ...], positional: tuple[Any, ...], named: Mapping[str, Any]) -> ExportedCall | str:
    """A call of a forward whose arguments are called so; or why no artifact takes it."""
    if len(positional) > len(names):
        return "more arguments than its forward has names for"
    arguments: dict[str, Any] = dict(zip(names, positional, strict=False))
    if twice := arguments.keys() & named.keys():
        return f"{min(twice)} is given twice"
    arguments |= named
    tensors: dict[str, Tensor] = {}
    constants: list[tuple[str, Any]] = []
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif value is None or isinstance(value, bool | int | float | str):
            if name.startswith("output_") and value:
                return f"{name} is asked for, which its parts alone have"
            constants.append((name, value))
        elif type(value) in (tuple, list) and value and all(isinstance(one, Tensor) for one in value):
            tensors |= {f"{name}_{i}": one for i, one in enumerate(value)}
            constants.append((name, len(value)))
        elif "Cache" in type(value).__name__:
            return f"{name} is a {type(value).__name__}, which no artifact fills: pass use_cache=False to go without"
        else:
            return f"{name} is a {type(value).__name__}"
    return _checked(ExportedCall(arguments, tensors, tuple(constants)), names)


def _checked(call: ExportedCall, names: tuple[str, ...]) -> ExportedCall | str:
    if next(iter(call.tensors), "") != names[0] or call.x.ndim != 3 or not call.x.numel():
        return f"its {names[0]} are no sequences in a batch"
    B, L = call.sizes
    others: set[int] = set()
    for name, x in call.tensors.items():
        if x.dtype not in _DTYPES or not x.is_cpu or (x.dtype != torch.float32 and x is call.x):
            word = str(x.dtype).removeprefix("torch.")
            return f"{name} is {word} on {x.device}, not float32 in CPU memory"
        if not 1 <= x.ndim <= 4 or (x.ndim > 1 and x.shape[0] not in (1, B)):
            return f"{name} is {tuple(x.shape)}, beside a batch of {B}"
        others |= {size for size, dim in zip(x.shape, _dims(name, x, B, L), strict=True) if dim == "S"}
    return call if len(others) < 2 else f"lengths of {', '.join(map(str, sorted(others)))} beside its own"


def _dims(name: str, x: Tensor, B: int, L: int) -> Shape:
    """Which axes of a tensor are the batch and lengths; others have one size."""
    lengths: Shape = tuple(size if size == 1 else "L" if size == L else "S" for size in x.shape)
    if x.ndim == 1:
        return lengths
    if x.ndim == 3 and x.dtype != torch.bool and "mask" not in name:
        return "B", lengths[1], x.shape[2]
    return ("B", *lengths[1:]) if x.ndim < 4 else ("B", x.shape[1], *lengths[2:])


def parameter_names(layer: nn.Module) -> tuple[str, ...]:
    """What a layer's class calls the arguments of forward."""
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = list(inspect.signature(type(layer).forward).parameters.values())
    return tuple(one.name for one in parameters[1:] if one.kind is named)


class _OfTensors(nn.Module):
    """A layer as a function of tensors by name, with all other arguments as they are. Of a tuple without the tensors
    that the layer was given, and gives back."""

    def __init__(self, layer: nn.Module, kind: ExportedKind) -> None:
        super().__init__()
        self.layer, self.constants = layer, kind.constants
        self.tensors = frozenset(name for name, *_ in kind.tensors)

    def forward(self, **tensors: Tensor) -> Any:
        result = self.layer(**dict(self._arguments(tensors)))
        if type(result) is not tuple:
            return result
        given = {id(x) for x in tensors.values()}
        return tuple(one for one in result if id(one) not in given)

    def _arguments(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
        yield from ((name, x) for name, x in tensors.items() if name not in self._in_tuples())
        for name, value in self.constants:
            yield name, tuple(tensors[one] for one in self._tuples()[name]) if name in self._tuples() else value

    def _tuples(self) -> dict[str, list[str]]:
        """The arguments that are tuples of tensors, and what these are called."""
        of = {name: [f"{name}_{i}" for i in range(n)] for name, n in self.constants if type(n) is int}
        return {name: names for name, names in of.items() if names and self.tensors.issuperset(names)}

    def _in_tuples(self) -> set[str]:
        return {one for names in self._tuples().values() for one in names}


def named_weights(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A layer's parameters and buffers; one that has several names comes by each."""
    yield from layer.named_parameters(remove_duplicate=False)
    yield from layer.named_buffers(remove_duplicate=False)


def graph_of(layer: nn.Module, kind: ExportedKind) -> onnx.ModelProto:
    """The graph of calls of a kind. Weights have the layer's names, and are zeros until they are bound. Raises
    ModelError where torch.export or ONNX has no form for what the layer does."""
    module = _OfTensors(plain_look(layer, "sdpa", has_index=False), kind)
    examples = {name: torch.zeros([_EXAMPLE[dim] if isinstance(dim, str) else dim for dim in dims], dtype=dtype)
                for name, dims, dtype in kind.tensors}  # fmt: skip
    free = {
        name: {axis: dim for axis, dim in enumerate(dims) if isinstance(dim, str)} for name, dims, _ in kind.tensors
    }
    model = export(module, example_inputs=examples, dynamic_shapes=free)
    own = {PREFIX + name for name, _ in named_weights(layer)}
    for tensor in model.graph.initializer:
        if tensor.name in own:
            zeros = np.zeros(tensor.dims, onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
            tensor.CopyFrom(numpy_helper.from_array(zeros, tensor.name))
    return model


def check_bound(model: onnx.ModelProto, manifest: Manifest) -> None:
    """Raises ModelError where an artifact of a layer's graph has numbers of its own, or where one of the layer's
    weights became part of it."""
    in_graph = {tensor.name for tensor in model.graph.initializer if tensor.name.startswith(PREFIX)}
    bound = {info.name for info in manifest.weights}
    if odd := sorted(in_graph ^ bound):
        raise ModelError("layer", "a graph whose numbers are the layer's weights, as they are", repr(odd[0]))
