"""What a layer of transformers is made of, and whether it is that still: asked in each call, answered in microseconds.

Its parts, their classes, what these are written with, fields and configs, the forms of weights and which are one, and
the hooks on them. The numbers of its weights: `weight_state`.
"""

from __future__ import annotations

import copy
import operator
import sys
from collections.abc import Hashable, Iterator, Mapping
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from mhsa_compile.integrations.copies import REPLACED, fields_of_its_own
from mhsa_compile.integrations.weight_state import ReplacedForward

ATTENTION = "_attn_implementation_internal"
"""The field of a config that names its model's attention."""
INDEX = "layer_idx"
"""The field that says which layer of a model it is: all that layers of a model differ in beside their weights."""
CAPTURES = "transformers.utils.output_capturing"
"""Where transformers collects what parts return."""
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"} | REPLACED
_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
"""What is called and has no state of its own that decides on the result."""


class LayerState:
    """A layer as it was looked at.

    why        why no artifact can be the layer as it is; "" if one may
    structure  equal for layers whose artifacts may be one
    captures   whether hooks are there by which transformers collects what parts return
    """

    def __init__(self, layer: nn.Module, implementation: str) -> None:
        self._layer, modules = layer, list(layer.modules())
        self._modules, self._kinds = modules, list(map(type, modules))
        configs = {id(config): config for part in modules for config in _configs(vars(part))}
        self._configs = list(configs.values())
        fields = [vars(one) for one in (*modules, *self._configs)]
        others: list[dict[Any, Any]] = []
        for part in modules:
            others += [part._modules, part._forward_hooks, part._forward_pre_hooks]
        self._now, self._then = [*fields, *others], [*map(_copied, fields), *(dict(values) for values in others)]
        self._weights = [values for part in modules for values in (part._parameters, part._buffers)]
        self._forms = list(map(_form, self.weights()))
        self._code = _code(set(self._kinds))
        self.captures = any(map(_is_capture, chain.from_iterable(map(_hooks, modules[1:]))))
        self.why = self._why_not(implementation)
        self.structure = "" if self.why else _number((*_structure(layer), *map(_words, self._code)))

    def holds(self) -> bool:
        """Whether the layer is what it was but for the numbers of its weights."""
        try:
            return (
                list(map(type, self._modules)) == self._kinds
                and all(map(operator.eq, self._now, self._then))
                and list(map(_form, self.weights())) == self._forms
                and all(names.get(name) is value for names, then in self._code for name, value in then.items())
            )
        except (RuntimeError, ValueError):  # two tensors or arrays, which have no one truth
            return False

    def weights(self) -> tuple[Tensor | None, ...]:
        """The parameters and buffers as they are now."""
        return tuple(chain.from_iterable(values.values() for values in self._weights))

    def _why_not(self, implementation: str) -> str:
        names = {part: name for name, part in self._layer.named_modules()}
        for config in self._configs:
            if (attention := getattr(config, ATTENTION)) != implementation:
                return f"its attention became {attention!r}"
        for part in self._modules[1:]:
            if not all(map(_is_capture, _hooks(part))):
                return f"its {names[part]} has hooks, which would not run: remove them"
            if not isinstance(vars(part).get("forward"), ReplacedForward | None):
                return f"its {names[part]} has a forward of its own"
        for part in self._modules:
            if part.training:
                return f"its {names[part] or 'layer'} is in training mode: call model.eval()"
            if odd := [name for name, value in _own_fields(part) if _word(value) is None]:
                return f"its {names[part] or 'layer'} has {odd[0]}, of which an artifact would see no change"
        return _why_not_weights(self._layer)


def _why_not_weights(layer: nn.Module) -> str:
    for name, weight in layer.named_parameters():
        if type(weight) is not nn.Parameter or weight.dtype != torch.float32 or not weight.is_cpu:
            word = f"{str(weight.dtype).removeprefix('torch.')} on {weight.device}"
            return f"its {name} is a {type(weight).__name__} of {word}, not a parameter of float32 in CPU memory"
    for name, value in layer.named_buffers():
        if type(value) is not Tensor or not value.is_cpu:
            return f"its buffer {name} is a {type(value).__name__} on {value.device}, not a tensor in CPU memory"
    return ""


def _form(weight: Tensor | None) -> Hashable:
    """All of a weight that decides on an artifact: which one it is, as two may be the same, and how it is laid out."""
    return None if weight is None else (id(weight), weight.shape, weight.dtype)


def _copied(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields, with containers as they are now: somebody may write into them."""
    return {name: value if name in _OF_MODULES else _copy(value) for name, value in fields.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    if isinstance(value, list):
        return list(map(_copy, value))
    return set(value) if isinstance(value, set) else value


_Names = tuple[Mapping[str, Any], dict[str, Any]]
"""Names of a class or a file of code, and what some of them stood for."""


def _code(kinds: set[type]) -> list[_Names]:
    """What parts' classes are written with: their attributes, and what functions of theirs call by name."""
    classes = {one for kind in kinds for one in kind.__mro__ if issubclass(one, nn.Module) and one is not nn.Module}
    ordered = sorted(classes, key=lambda one: (one.__module__, one.__qualname__))
    own: list[_Names] = [(vars(kind), _shown(vars(kind))) for kind in ordered]
    files: dict[int, _Names] = {}
    waiting = [one for _, names in own for value in names.values() if (one := _function(value))]
    looked: set[FunctionType] = set()
    while waiting:
        if (function := waiting.pop()) in looked:
            continue
        looked.add(function)
        file = function.__globals__
        called = {name: file[name] for name in function.__code__.co_names if name in file}
        files.setdefault(id(file), (file, {}))[1].update(called)
        waiting += [one for one in called.values() if isinstance(one, FunctionType) and one.__globals__ is file]
    return own + sorted(files.values(), key=lambda names: str(names[0].get("__name__")))


def _function(value: Any) -> FunctionType | None:
    """The function that a class's attribute is, or is made of."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value if isinstance(value, FunctionType) else None


def _shown(names: Mapping[str, Any]) -> dict[str, Any]:
    """A class's attributes without what Python notes there itself."""
    return {name: value for name, value in names.items() if not name.startswith("__") or callable(value)}


def _words(code: _Names) -> Hashable:
    return tuple((name, value if isinstance(value, Hashable) else id(value)) for name, value in sorted(code[1].items()))


def _hooks(part: nn.Module) -> Iterator[Any]:
    return chain(part._forward_hooks.values(), part._forward_pre_hooks.values())


def _is_capture(hook: Any) -> bool:
    return getattr(hook, "__module__", "") == CAPTURES


def is_captured() -> bool:
    """Whether transformers collects hidden states or weights of attention from this thread's call."""
    library: Any = sys.modules.get(CAPTURES)
    return library is not None and bool(library._active_collector.get())


def has_global_hooks() -> bool:
    """Whether hooks of all modules are there, which would not run for parts."""
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def _own_fields(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a part's class made it with."""
    return ((name, value) for name, value in vars(part).items() if name not in _OF_MODULES and name != INDEX)


def _configs(fields: Mapping[str, Any]) -> Iterator[Any]:
    """The configs among fields, and those in them."""
    for value in fields.values():
        if hasattr(value, ATTENTION):
            yield value
            yield from _configs(vars(value))


def _structure(layer: nn.Module) -> Iterator[Hashable]:
    """All that an artifact of a layer depends on, but for the numbers of its weights, and the code of its classes."""
    places: dict[int, int] = {}
    for name, part in layer.named_modules(remove_duplicate=False):
        yield name, type(part), tuple((field, _word(value)) for field, value in _own_fields(part))
        for values in (part._parameters, part._buffers):
            forms = ((key, x, places.setdefault(id(x), len(places))) for key, x in values.items())
            yield tuple((key, None if x is None else (place, x.shape, x.dtype)) for key, x, place in forms)


def _word(value: Any) -> Hashable | None:
    """What tells a field's value from another; None where nothing does."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if hasattr(value, ATTENTION):
        return repr(sorted((name, str(field)) for name, field in vars(value).items() if not _is_of_models(name)))
    if isinstance(value, list | tuple | set | frozenset):
        words = tuple(map(_word, value))
        return None if None in words else (type(value), words)
    if isinstance(value, dict):
        return _word(list(value.items()))
    if isinstance(value, partial):
        word = _word([value.func, *value.args, value.keywords])
        return None if word is None else (partial, word)
    return value if isinstance(value, _FUNCTIONS) else None


def _is_of_models(field: str) -> bool:
    """Whether a config's field says what a model returns, which its layers do not ask."""
    return field.lstrip("_").startswith(("output_", "return_dict", "use_cache", "name_or_path"))


_NUMBERS: dict[Hashable, str] = {}


def _number(structure: Hashable) -> str:
    """A short name for a structure, in this process."""
    return _NUMBERS.setdefault(structure, f"structure {len(_NUMBERS) + 1}")


class _NoIndex:
    """Stands for a layer's index while it is exported: a forward that computes with it is no other layer's."""

    def _raise(self, *others: Any) -> Any:
        raise TypeError(f"its forward computes with its {INDEX}")

    __eq__ = __bool__ = __index__ = __int__ = __float__ = __add__ = __radd__ = __sub__ = __mod__ = __lt__ = _raise
    __gt__ = __le__ = __ge__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __str__ = __format__ = _raise
    __hash__ = _raise


def plain_look(layer: nn.Module, implementation: str, *, has_index: bool = True) -> Any:
    """A look at a layer, with its weights, without what replaces its forwards, and with an attention of PyTorch's."""
    looks: dict[int, Any] = {}

    def look(value: Any) -> Any:
        if id(value) in looks:
            return looks[id(value)]
        if hasattr(value, ATTENTION):
            looks[id(value)] = config = copy.copy(value)
            vars(config)[ATTENTION] = implementation
            return config
        looks[id(value)] = module = object.__new__(type(value))
        is_replaced = isinstance(vars(value).get("forward"), ReplacedForward)
        fields = _copied(fields_of_its_own(value) if is_replaced else vars(value))
        fields |= {name: look(field) for name, field in fields.items() if hasattr(field, ATTENTION)}
        fields["_modules"] = {name: None if part is None else look(part) for name, part in value._modules.items()}
        if INDEX in fields and not has_index:
            fields[INDEX] = _NoIndex()
        vars(module).update(fields)
        return module

    return look(layer)
