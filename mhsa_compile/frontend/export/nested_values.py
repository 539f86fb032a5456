"""What a module takes and gives, as tensors by name: its tuples, dicts and ModelOutputs, and transformers' caches.

An argument `encoder_outputs` becomes `encoder_outputs_last_hidden_state`. A pair `position_embeddings`, as transformers
hands around, becomes cos and sin. A cache `past_key_values` is `past_0_key`, `past_0_value`, ... of each layer where it
is taken, and `present_0_key`, ... where it is given; that of an encoder-decoder has `past_0_self_key` and
`past_0_cross_key`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from mhsa_compile.errors import InputError, ModelError

_PAIR, _HALVES = "position_embeddings", ("cos", "sin")
_CACHE, _PAST, _PRESENT = "past_key_values", "past", "present"
_SELF, _CROSS = "self", "cross"

Builder: TypeAlias = Callable[[Mapping[str, Tensor]], Any]
"""Makes an argument of a forward out of the tensors that a call was given."""


@dataclass(frozen=True)
class NestedArguments:
    """What makes the arguments of a forward that are no tensors, by their names, and the inputs that these take."""

    builders: Mapping[str, Builder] = field(default_factory=dict)
    parts: frozenset[str] = frozenset()

    def arguments(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """The arguments of a call, of its inputs."""
        nested = {name: build(inputs) for name, build in self.builders.items()}
        return nested | {name: value for name, value in inputs.items() if name not in self.parts}


def taken_apart(
    module: nn.Module, examples: Sequence[Any] | Mapping[str, Any] | None
) -> tuple[Sequence[Any] | Mapping[str, Any] | None, NestedArguments]:
    """Example inputs whose tuples, dicts and caches are their tensors by name, and what makes these arguments again.
    Raises InputError for a cache that is no list of growing keys and values, and for two inputs of one name."""
    if isinstance(examples, Mapping):
        named = dict(examples)
    else:
        parameters = inspect.signature(module.forward).parameters
        if not isinstance(examples, Sequence) or len(examples) > len(parameters) or not any(map(_is_nested, examples)):
            return examples, NestedArguments()
        named = dict(zip(parameters, examples, strict=False))
    parts: dict[str, Any] = {}
    builders = {name: _take_apart(name, value, parts) for name, value in named.items() if _is_nested(value)}
    plain = {name: value for name, value in named.items() if name not in builders}
    if twice := parts.keys() & plain.keys():
        hint = "Rename the parameter of the forward."
        raise InputError("example_inputs", f"one input called {min(twice)!r}", "two", hint)
    return plain | parts, NestedArguments(builders, frozenset(parts))


def with_pairs_apart(words: Any) -> Any:
    """What is said of the inputs' axes, that of a pair said of its halves."""
    pair = words.get(_PAIR) if isinstance(words, Mapping) else None
    if not isinstance(pair, tuple | list) or len(pair) != len(_HALVES):
        return words
    return {name: value for name, value in words.items() if name != _PAIR} | dict(zip(_HALVES, pair, strict=True))


def tensors_by_name(name: str, value: Any, next_step: Callable[[], str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a result: keys and places joined to names, `hidden_states_0` among them. None is left out.
    Raises ModelError for what is no tensor, with what `next_step` says."""
    if isinstance(value, Tensor):
        yield name, value
    elif (caches := _caches(value)) is not None and all(map(_grows, _layers(caches))):
        for kind, cache in caches.items():
            for number, layer in enumerate(cache.layers):
                if layer.is_initialized:
                    yield from zip(_cache_names(_renamed(name, _PRESENT), number, kind), _rows(layer), strict=True)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_by_name(f"{name}_{key}".lstrip("_"), item, next_step)
    elif isinstance(value, tuple | list):
        fields = getattr(value, "_fields", range(len(value)))
        for key, item in zip(fields, value, strict=True):
            whole = name or "output" if isinstance(key, int) else name
            yield from tensors_by_name(f"{whole}_{key}".lstrip("_"), item, next_step)
    elif value is not None:
        expected = "results that are tensors, or tuples and dicts of them"
        raise ModelError("module", expected, f"{type(value).__name__} {name!r}", next_step())


def _is_nested(value: Any) -> bool:
    """Whether an argument has tensors in it, or is a cache, which has some where it is not empty."""
    if _caches(value) is not None:
        return True
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return any(isinstance(item, Tensor) or _is_nested(item) for item in items)


def _take_apart(name: str, value: Any, tensors: dict[str, Any]) -> Builder:
    """Puts the tensors of an argument among the others. Raises InputError."""
    if isinstance(value, Tensor):
        return _take_tensor(name, value, tensors)
    if (caches := _caches(value)) is not None:
        return _take_cache(name, value, caches, tensors)
    if isinstance(value, Mapping):
        parts = {key: _take_apart(f"{name}_{key}", item, tensors) for key, item in value.items()}
        make: Any = dict if type(value) is dict else lambda items: type(value)(**items)
        return lambda inputs: make({key: part(inputs) for key, part in parts.items()})
    if isinstance(value, tuple | list):
        is_pair = name == _PAIR and len(value) == len(_HALVES)
        names = _HALVES if is_pair else [f"{name}_{key}" for key in getattr(value, "_fields", range(len(value)))]
        items = [_take_apart(each, item, tensors) for each, item in zip(names, value, strict=True)]
        make = getattr(value, "_make", type(value))
        return lambda inputs: make([item(inputs) for item in items])
    return lambda _: value


def _take_tensor(name: str, value: Tensor, tensors: dict[str, Any]) -> Builder:
    tensors[name] = value
    return lambda inputs: inputs[name]


def _take_cache(name: str, value: Any, caches: dict[str, Any], tensors: dict[str, Any]) -> Builder:
    """A cache's rows are inputs; all else about it is as in the example."""
    for layer in _layers(caches):
        if not _grows(layer) or (layer.is_initialized and layer.is_sliding):
            got = f"one with a {type(layer).__name__}"
            hint = "Pass a DynamicCache() that was made without a config: the model's masks hide what a window hides."
            raise InputError(f"example_inputs[{name!r}]", "a cache of growing keys and values", got, hint)
    halves = {kind: _take_layers(_renamed(name, _PAST), kind, cache, tensors) for kind, cache in caches.items()}
    if list(halves) == [""]:
        return halves[""]
    empty = copy.copy(value)

    def build(inputs: Mapping[str, Tensor]) -> Any:
        pair = copy.copy(empty)
        pair.self_attention_cache, pair.cross_attention_cache = (half(inputs) for half in halves.values())
        pair.is_updated = dict(empty.is_updated)
        return pair

    empty.self_attention_cache = empty.cross_attention_cache = None
    return build


def _take_layers(name: str, kind: str, cache: Any, tensors: dict[str, Any]) -> Builder:
    names = [_cache_names(name, number, kind) for number in range(len(cache.layers))]
    empty, layers = copy.copy(cache), [copy.copy(layer) for layer in cache.layers]
    for layer, pair in zip(layers, names, strict=True):
        if layer.is_initialized:
            for each, rows in zip(pair, _rows(layer), strict=True):
                _take_tensor(each, rows, tensors)
            layer.keys = layer.values = None

    def build(inputs: Mapping[str, Tensor]) -> Any:
        made = copy.copy(empty)
        made.layers = [copy.copy(layer) for layer in layers]
        for layer, (key, value) in zip(made.layers, names, strict=True):
            if layer.is_initialized:
                layer.keys, layer.values = inputs[key], inputs[value]
        return made

    empty.layers = []
    return build


def _renamed(name: str, word: str) -> str:
    return word if name == _CACHE else name


def _cache_names(name: str, number: int, kind: str) -> tuple[str, str]:
    place = f"{name}_{number}_{kind}".rstrip("_")
    return f"{place}_key", f"{place}_value"


def _caches(value: Any) -> dict[str, Any] | None:
    """A cache of transformers by the kind of attention that it is of, "" where there is one kind; None of all else."""
    kinds = {base.__name__ for base in type(value).__mro__ if base.__module__ == "transformers.cache_utils"}
    if "EncoderDecoderCache" in kinds:
        return {_SELF: value.self_attention_cache, _CROSS: value.cross_attention_cache}
    return {"": value} if "Cache" in kinds else None


def _layers(caches: Mapping[str, Any]) -> list[Any]:
    return [layer for cache in caches.values() for layer in cache.layers]


def _grows(layer: Any) -> bool:
    """Whether a layer of a cache is nothing but keys and values, to which each call adds its own."""
    return type(layer).__name__ in ("DynamicLayer", "DynamicSlidingWindowLayer")


def _rows(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.keys, layer.values
