"""A layer of transformers as a MultiHeadAttention, from the calls of attention that it was noted to make; what is
linear in it is read off as a matrix and a bias.

Notation: B batch, L query length, S key length, D embed, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from mhsa_compile.conversion.attention_calls import CONTEXTS, LayerCall, attention_calls, refusal
from mhsa_compile.conversion.from_torch import loaded
from mhsa_compile.conversion.rotary import Tables, check_tables, half_tables, rope_of
from mhsa_compile.conversion.visible_keys import VisibleBand, VisibleKeys, constant_band, gives, mask_kind
from mhsa_compile.errors import MhsaError
from mhsa_compile.files.foreign_errors import first_line
from mhsa_compile.nn.functional import rotate
from mhsa_compile.nn.modules import MultiHeadAttention
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.position_encoding import Rope
from mhsa_compile.verification.error_budget import agrees

_TRIED = 5  # random rows on which a map has to be linear


_ROWS = 1024  # of an identity that are given at once


def visible_keys_of(call: LayerCall) -> VisibleKeys:
    """What a call hides, and what it adds by distance."""
    L, S = call.weights.shape[2:]
    mask, bias = call.mask, call.keywords.get("position_bias")
    if bias is not None:
        sum_of_masks = bias.detach()[..., :S]
        if mask is not None:
            hides = mask.dtype == torch.bool
            sum_of_masks = sum_of_masks.masked_fill(~mask, -torch.inf) if hides else sum_of_masks + mask
        mask = sum_of_masks
    return VisibleKeys(mask, L, S, call.window)


class LayerCalls:
    """What `calls`, all of one module, say about it. `dtype` is of its weights.

    Raises ModelError: what an AttentionSpec has no words for, and calls whose result is not what it would be.
    """

    def __init__(self, calls: Sequence[LayerCall], dtype: str) -> None:
        self.module: nn.Module = calls[0].module
        for call in calls:
            if call.unknown:
                raise refusal(self.module, f"it hands {', '.join(call.unknown)} to attention")
            if call.projection is None:
                raise refusal(self.module, "its heads go through more than one projection, or through none")
            if call.q.shape[2] != call.x.shape[1] or (call.context is None and call.k.shape[2] != call.x.shape[1]):
                raise refusal(self.module, "it sees keys of calls before, or other rows than it was given")
        self.dtype = dtype
        self._exact: nn.Module = copy.deepcopy(self.module).double().eval()
        self._out: nn.Module = copy.deepcopy(calls[0].projection).double().eval()
        self.calls = [call if call.q.dtype == torch.float64 else self._in_float64(call) for call in calls]
        self.longest = max(self.calls, key=lambda call: call.q.shape[2])  # which shows most

    @torch.no_grad()
    def attention(
        self, *, max_length: int | None = None, window: tuple[int, ...] | None = None, states_mask: bool = False
    ) -> MultiHeadAttention:
        """The same attention, after it gave the result of each call.

        max_length    positions of rotary tables
        window        of a layer that does not say it
        states_mask   whether the calls were made without masks, and the layer's own word says what is seen
        """
        try:
            maps = self._maps()
        except MhsaError:
            raise
        except Exception as error:  # of anybody's forward
            raise refusal(self.module, f"it cannot be run on numbers of our choice: {first_line(error)}") from error
        tables = half_tables(self.module, self.longest.arguments.get("position_embeddings"))
        rope = self._rope(maps, tables, max_length)
        masks = [visible_keys_of(call) for call in self.calls]
        band = self._stated_band(window) if states_mask else constant_band(masks)
        call = self.longest
        heads, width = call.q.shape[1], call.q.shape[3]
        spec = AttentionSpec(
            embed_dim=call.x.shape[2],
            num_heads=heads,
            num_kv_heads=call.k.shape[1],
            head_dim=width,
            v_head_dim=call.v.shape[3],
            kv_embed_dim=None if call.context is None else call.context.shape[2],
            bias=self._has_bias(maps),
            dtype=self.dtype,
            causal=band.causal if band else None,
            window=band.window if band else None,
            mask=None if band else mask_kind(masks),
            scale=None if call.scale == width**-0.5 else call.scale,
            rope=rope,
            **call.fields,
        )
        for one in self.calls:
            self._check(spec, maps, one)
        return self._loaded(spec, maps)

    @torch.no_grad()
    def _in_float64(self, call: LayerCall) -> LayerCall:
        """The same call again, without rounding. Raises ModelError unless the call's own result is that, rounded."""
        pair = []
        for module, out, dtype in (
            (self._exact, self._out, torch.float64),
            (self.module, call.projection, call.q.dtype),
        ):
            try:
                with attention_calls(module) as calls:
                    module(**{name: _convert(value, dtype) for name, value in call.arguments.items()})
                calls[-1].y = out(calls[-1].heads.flatten(2))
            except Exception as error:  # of anybody's forward
                raise refusal(self.module, f"it cannot be called again: {first_line(error)}") from error
            pair.append(calls[-1])
        exact, again = pair
        assert exact.y is not None and again.y is not None and call.y is not None
        sees = visible_keys_of(call).rows(len(call.x))
        if not agrees(exact.y[sees], again.y[sees], call.y[sees]):
            raise refusal(self.module, "called again with the same, without a cache, it gives another result")
        return exact

    def _maps(self) -> dict[str, LinearMap]:
        """The linear maps from x to queries, from x or the context to keys and values, and from the heads to y. Raises
        ModelError where one is not linear."""
        call = self.longest
        D, S = call.x.shape[2], call.x.shape[2] if call.context is None else call.context.shape[2]

        def handed(x: Tensor, context: Tensor) -> tuple[Tensor, ...]:
            with attention_calls(self._exact) as calls:
                self._exact(**self._neutral(x, context))
            return tuple(one[:, :, 0].flatten(1) for one in (calls[-1].q, calls[-1].k, calls[-1].v))

        def from_x(x: Tensor) -> tuple[Tensor, ...]:
            results = handed(x, x.new_zeros(len(x), S))
            return results if call.context is None else results[:1]

        def from_context(context: Tensor) -> tuple[Tensor, ...]:
            return handed(context.new_zeros(len(context), D), context)[1:]

        def from_heads(heads: Tensor) -> tuple[Tensor, ...]:
            return (self._out(heads[:, None])[:, 0],)

        width_of_heads = call.heads.shape[2] * call.heads.shape[3]
        by_name: dict[str, LinearMap] = {}
        sources = [("qkv", from_x, D)] if call.context is None else [("q", from_x, D), ("kv", from_context, S)]
        for names, function, width in (*sources, (("out",), from_heads, width_of_heads)):
            maps = read_maps(function, width)
            sample = torch.randn(_TRIED, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            for name, one, result in zip(names, maps, function(sample), strict=True):
                if not is_linear(one, sample, result):
                    raise refusal(self.module, self._why_not_linear(name))
                by_name[name] = one
        return by_name

    def _neutral(self, x: Tensor, context: Tensor) -> dict[str, Any]:
        """The arguments of a call for rows x (n, D), each a sequence of its own at a place that turns nothing."""
        own = self.longest.arguments
        arguments: dict[str, Any] = {n: v for n, v in own.items() if v is None or isinstance(v, bool | int | str)}
        first, *_ = self.longest.arguments
        arguments[first] = x[:, None]
        for name, value in self.longest.arguments.items():
            if name in CONTEXTS and isinstance(value, Tensor):
                arguments[name] = context[:, None]
            elif name == "position_embeddings" and value is not None:
                cos, sin = (one[..., :1, :].double() for one in value)
                arguments[name] = torch.ones_like(cos[:1]), torch.zeros_like(sin[:1])
        for name in ("attention_mask", "mask"):
            if name in self.longest.arguments:
                arguments[name] = None
        return arguments

    def _why_not_linear(self, name: str) -> str:
        whole = {"q": "queries are", "k": "keys are", "v": "values are", "out": "result is"}[name]
        kinds = {name: type(module).__name__ for name, module in self.module.named_modules()}
        norms = [f"{name} ({kind})" for name, kind in kinds.items() if "norm" in kind.lower()]
        return f"its {whole} no linear function of what is projected" + (f"; it has {', '.join(norms)}" * bool(norms))

    def _has_bias(self, maps: Mapping[str, LinearMap]) -> bool:
        names = [n for part in (self._exact, self._out) for n, _ in part.named_parameters()]
        return any(n.endswith("bias") for n in names) or any(bool(one.bias.any()) for one in maps.values())

    def _loaded(self, spec: AttentionSpec, maps: Mapping[str, LinearMap]) -> MultiHeadAttention:
        dtype = getattr(torch, spec.dtype)
        state = {f"{name}_proj.weight": one.weight.to(dtype) for name, one in maps.items()}
        if spec.bias:
            state |= {f"{name}_proj.bias": one.bias.to(dtype) for name, one in maps.items()}
        state |= {name: value.to(dtype) for name, value in self.longest.parameters.items()}
        return loaded(spec, state)

    def _rope(self, maps: Mapping[str, LinearMap], tables: Tables | None, max_length: int | None) -> Rope | None:
        """How queries and keys are turned, by what was handed on. Raises ModelError."""
        call = self.longest
        ways: list[bool | None] = [None] if tables is None else [None, False, True]  # not, in halves, in pairs
        for way in ways:
            if all(self._is_turned(maps[name], way, tables, name) for name in "qk"):
                break
        else:
            how = "turned neither in halves nor in pairs" if tables else "changed between projection and attention"
            raise refusal(self.module, f"its queries and keys are {how}")
        if way is None:
            return None
        config: Any = getattr(self.module, "config", None)
        rope = rope_of(self.module, config, call.q.shape[-1], max_length)
        rope = msgspec.structs.replace(rope, interleaved=way)
        assert tables is not None
        for one in self.calls:
            theirs = half_tables(self.module, one.arguments.get("position_embeddings"))
            assert theirs is not None
            check_tables(self.module, rope.resolved(call.q.shape[-1]), theirs)
        return rope

    def _is_turned(self, one: LinearMap, interleaved: bool | None, tables: Tables | None, name: str) -> bool:
        """Whether the first call's queries or keys are the map of x, turned so."""
        call = self.longest
        actual = call.q if name == "q" else call.k
        source = call.x if name == "q" or call.context is None else call.context

        def made(dtype: torch.dtype) -> Tensor:
            rows = one(source.to(dtype)).view(*source.shape[:2], actual.shape[1], actual.shape[3]).transpose(1, 2)
            if interleaved is None or tables is None:
                return rows
            if 2 * tables[0].shape[1] > actual.shape[3]:
                return torch.full_like(rows, torch.inf)
            return rotate(rows, tables[0].to(dtype), tables[1].to(dtype), interleaved)

        return agrees(made(torch.float64), made(torch.float32), actual)

    def _stated_band(self, window: tuple[int, ...] | None) -> VisibleBand:
        """What the module itself says of causality and a window."""
        call = self.longest
        causal = "top_left" if call.is_causal else None
        if window is not None:
            if call.window is not None and causal and tuple(window) != (call.window - 1, 0):
                why = f"its window is {(call.window - 1, 0)}, and window={tuple(window)} is another"
                raise refusal(self.module, why)
            return VisibleBand(causal, (window[0], window[1]))
        if call.window is None:
            in_config = getattr(getattr(self.module, "config", None), "sliding_window", None)
            if in_config and "sliding_window" not in call.keywords and "layer_types" not in vars(self.module.config):
                why = f"its config has a window of {in_config}, of which it says nothing: give window="
                raise refusal(self.module, why)
            return VisibleBand(causal)
        if causal is None:
            raise refusal(self.module, f"it says a window of {call.window}, and not to which side: give window=")
        return VisibleBand(causal, (call.window - 1, 0))

    def _check(self, spec: AttentionSpec, maps: Mapping[str, LinearMap], call: LayerCall) -> None:
        """Raises ModelError unless this spec, with all that is masked as a mask, gives the call's own result where a
        query sees a key."""
        spec = msgspec.structs.replace(spec, causal=None, window=None, mask=mask_kind([visible_keys_of(call)]))
        if spec.rope is not None:  # no longer than it has to be
            spec = msgspec.structs.replace(spec, rope=msgspec.structs.replace(spec.rope, max_length=call.x.shape[1]))
        module = self._loaded(spec, maps)
        if spec.rope is not None:
            theirs = half_tables(self.module, call.arguments.get("position_embeddings"))
            assert theirs is not None
            module.rope_cos, module.rope_sin = theirs
        assert call.y is not None
        if not gives(module, (call.x, call.context), visible_keys_of(call), call.y):
            raise refusal(self.module, "its own result is another than that of its projections, masks and scale")


def _convert(value: Any, dtype: torch.dtype) -> Any:
    """An argument of a call for another dtype; None for what is no tensor, number or word, such as a cache."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return tuple(_convert(one, dtype) for one in value)
    return value if isinstance(value, bool | int | float | str) else None


@dataclass(frozen=True, eq=False)
class LinearMap:
    """y = x W^T + b in float64: weight (out, in), bias (out,)."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


def read_maps(function: Callable[[Tensor], tuple[Tensor, ...]], width: int) -> list[LinearMap]:
    """The map of each result (n, out) of `function(x)`, x (n, width) in float64.

    The columns of W are what unit vectors give, less what zeros give. Where the weights are of a shorter dtype, that
    is exact but for what float64 rounds, and so the very weights once rounded to their dtype.
    """
    zeros = torch.zeros(1, width, dtype=torch.float64)
    biases = [result[0].double() for result in function(zeros)]
    parts: list[list[Tensor]] = [[] for _ in biases]
    for begin in range(0, width, _ROWS):
        rows = min(_ROWS, width - begin)
        units = torch.zeros(rows, width, dtype=torch.float64)
        units[torch.arange(rows), begin + torch.arange(rows)] = 1
        for columns, bias, result in zip(parts, biases, function(units), strict=True):
            columns.append(result.double() - bias)
    return [LinearMap(torch.cat(columns).T.contiguous(), bias) for columns, bias in zip(parts, biases, strict=True)]


def is_linear(linear_map: LinearMap, x: Tensor, result: Tensor) -> bool:
    """Whether the map gives `result` for x (n, in), as closely as float32 computes it."""
    return agrees(linear_map(x), linear_map(x.float()), result)
