"""The graph, defined once in PyTorch. Eager calls and the exported ONNX operator mean the same, exactly:

- a masked score is selected away, never multiplied by zero or pushed down by a finite number: NaN and Inf in a masked
  key or value reach no output, in a visible one they do;
- a query that sees no key gets zeros;
- an additive mask of -inf masks.

Notation: B batch, L query length, S key length, D embed, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from mhsa_compile.errors import InputError, SpecError
from mhsa_compile.files.room import require_memory
from mhsa_compile.nn import onnx_symbolic
from mhsa_compile.nn.functional import attention, dequantised_rows, quantised_rows, rotate, to_numpy, written
from mhsa_compile.nn.score_features import FEATURES, FeatureTensors
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.outputs import array_names
from mhsa_compile.spec.picture import picture_of
from mhsa_compile.spec.position_encoding import Rope

_OutputTensors = dict[str, Tensor]  # by the names of `outputs.array_names`
_Result = tuple[Tensor, _OutputTensors, tuple[Tensor, ...]]
"""y, what else is wanted, and the caches as they are now."""


@dataclass(frozen=True)
class _Past:
    """What a call with a cache is given: keys and values, with scales for their rows where these are int8; how many of
    them are valid."""

    arrays: tuple[Tensor, ...]
    length: Tensor

    def written(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Keys and values with those of a call behind them, as attention reads them, and the cache as it is then."""
        if len(self.arrays) == 2:
            present = [written(past, rows, self.length) for past, rows in zip(self.arrays, (k, v), strict=True)]
            return present[0].to(k.dtype), present[1].to(v.dtype), tuple(present)
        (key, key_steps), (value, value_steps) = quantised_rows(k), quantised_rows(v)
        past = [*self.arrays[:2], *(steps.unsqueeze(-1) for steps in self.arrays[2:])]
        new = key, value, key_steps.unsqueeze(-1), value_steps.unsqueeze(-1)
        key, value, *steps = (written(one, rows, self.length) for one, rows in zip(past, new, strict=True))
        key_steps, value_steps = (one.squeeze(-1) for one in steps)
        wide = dequantised_rows(key, key_steps, k.dtype), dequantised_rows(value, value_steps, v.dtype)
        return *wide, (key, value, key_steps, value_steps)

    def written_in_operators(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """What `written` does, as operators of ONNX in a graph that is traced."""
        rows = (k, v)
        if len(self.arrays) == 2:
            pairs = zip(self.arrays, rows, strict=True)
            present = [
                onnx_symbolic.scatter_node(past, onnx_symbolic.cast(new, past.dtype), self.length)
                for past, new in pairs
            ]
            wide = [onnx_symbolic.cast(one, k.dtype) for one in present]
            return wide[0], wide[1], tuple(present)
        quantised = [onnx_symbolic.quantised_rows(new) for new in rows]
        new_arrays = (*(q for q, _ in quantised), *(steps for _, steps in quantised))
        pairs = zip(self.arrays, new_arrays, strict=True)
        key, value, *steps = (onnx_symbolic.scatter_node(past, new, self.length) for past, new in pairs)
        wide = [onnx_symbolic.dequantised_rows(q, own, k.dtype) for q, own in zip((key, value), steps, strict=True)]
        return wide[0], wide[1], (key, value, *steps)


class _AttentionModule(nn.Module):
    """What both modules hold beside projections: tables that follow from the spec, and what features of scores need."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, spec: AttentionSpec, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.spec = spec
        self.dropout = _probability(dropout)
        dtype = getattr(torch, spec.dtype)
        if spec.rope is not None:
            for name, table in zip(("rope_cos", "rope_sin"), spec.rope.tables(), strict=True):
                self.register_buffer(name, torch.from_numpy(table).to(dtype), persistent=False)
        self._feature_names: list[str] = []
        for feature in FEATURES:
            self.spec, tensors = feature.resolve(self.spec)
            self._feature_names += tensors
            for name, tensor in tensors.items():
                if tensor is None or isinstance(tensor, nn.Parameter):
                    self.register_parameter(name, tensor)
                else:
                    self.register_buffer(name, tensor, persistent=False)

    def with_outputs(self, *words: str) -> Self:
        """A module with the same weights, not copies of them, that returns `words`: see AttentionSpec's `outputs`.

        Whether it trains (`train()`, `eval()`) is its own from then on.

        Raises SpecError.

        >>> layer = MultiHeadAttention(AttentionSpec(embed_dim=8, num_heads=2))
        >>> result, heads = layer.with_outputs("y", "heads")(torch.zeros(1, 5, 8))
        >>> heads.shape
        torch.Size([1, 2, 5, 4])
        """
        spec = msgspec.structs.replace(self.spec, outputs=words)
        with torch.device("meta"):  # no memory for what is replaced at once
            same = type(self)(spec, dropout=self.dropout)
        for name, child in self.named_children():
            setattr(same, name, child)
        for name, parameter in self.named_parameters(recurse=False):
            setattr(same, name, parameter)
        for name, buffer in self.named_buffers(recurse=False):
            setattr(same, name, buffer)
        same.training = self.training
        return same

    def _repr_html_(self) -> str:
        """Shows the module in a notebook, as a drawing and a table."""
        training = [("dropout", f"{self.dropout:g}, in training")] if self.dropout else []
        projections = isinstance(self, MultiHeadAttention)
        return picture_of(type(self).__name__, self.spec, projections=projections, more=training)

    @property
    def feature_tensors(self) -> FeatureTensors:
        """What features of scores need."""
        return {name: getattr(self, name) for name in self._feature_names}

    @property
    def _dropout_now(self) -> float:
        return self.dropout if self.training else 0.0


class MultiHeadAttention(_AttentionModule):
    """Projections, attention, output projection: x (B, L, D), context (B, S, kv_embed_dim) -> y (B, L, D).

    With `spec.v_embed_dim`: x, key (B, S, kv_embed_dim), value (B, S, v_embed_dim) -> y.

    Weights carry PyTorch's names and layouts: q_proj.weight (H*E, D), k_proj.weight (G*E, kv_embed_dim),
    v_proj.weight (G*F, kv_embed_dim or v_embed_dim), out_proj.weight (D, H*F), and their biases; with `spec.sinks`,
    sinks (H,).

    dropout    of the attention weights, while the module is in training; what is compiled is the module at inference

    >>> attention = MultiHeadAttention(AttentionSpec(embed_dim=64, num_heads=4))
    >>> attention(torch.zeros(2, 7, 64)).shape
    torch.Size([2, 7, 64])
    >>> attention = MultiHeadAttention(AttentionSpec(embed_dim=64, num_heads=4, kv_embed_dim=48, v_embed_dim=32))
    >>> attention(torch.zeros(2, 7, 64), torch.zeros(2, 9, 48), torch.zeros(2, 9, 32)).shape
    torch.Size([2, 7, 64])
    """

    def __new__(cls, spec: AttentionSpec | None = None, **_: Any) -> Self:
        """Makes a QueryKeyValueAttention where keys and values are inputs of their own: its `forward` takes them."""
        apart = cls is MultiHeadAttention and isinstance(spec, AttentionSpec) and spec.v_embed_dim is not None
        return super().__new__(QueryKeyValueAttention if apart else cls)  # type: ignore[return-value]

    def __init__(self, spec: AttentionSpec, *, dropout: float = 0.0) -> None:
        super().__init__(spec, dropout=dropout)
        if (spec.v_embed_dim is not None) != isinstance(self, QueryKeyValueAttention):
            expected = "set for a QueryKeyValueAttention, and for no other subclass of MultiHeadAttention"
            raise SpecError("v_embed_dim", expected, f"{spec.v_embed_dim} for {type(self).__name__}")
        dtype = getattr(torch, spec.dtype)
        query, width = spec.num_heads * spec.head_dim, spec.embed_dim
        key, value = spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.v_head_dim
        sources = spec.source_dim * key + spec.v_source_dim * value
        elements = width * query + sources + spec.num_heads * spec.v_head_dim * width
        require_memory("embed_dim and heads", elements * dtype.itemsize)
        self.q_proj = nn.Linear(spec.embed_dim, query, bias=spec.bias, dtype=dtype)
        self.k_proj = nn.Linear(spec.source_dim, key, bias=spec.bias, dtype=dtype)
        self.v_proj = nn.Linear(spec.v_source_dim, value, bias=spec.bias, dtype=dtype)
        self.out_proj = nn.Linear(spec.num_heads * spec.v_head_dim, spec.embed_dim, bias=spec.bias, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        past_key: Tensor | None = None,
        past_value: Tensor | None = None,
        length: Tensor | None = None,
        past_key_scale: Tensor | None = None,
        past_value_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """`context` goes with cross-attention, `mask` with `spec.mask`. Raises InputError.

        With more `spec.outputs` than "y" a tuple of their arrays, in that order.

        With `spec.kv_cache`: past_key (B, G, C, E) and past_value (B, G, C, F), whose first `length` positions, int64
        (B,), are valid -> y (and other outputs), present_key, present_value, which hold the keys and values of x
        behind them. In a cache of int8 each row has a step: past_key_scale and past_value_scale (B, G, C) float32 ->
        present_key_scale, present_value_scale.
        """
        source = _source(self.spec, x, context)
        past = {"past_key": past_key, "past_value": past_value}
        past |= {"past_key_scale": past_key_scale, "past_value_scale": past_value_scale}
        cache = _checked_cache(self.spec, x, past, length)
        return self._attend(x, source, source, mask, cache)

    def _attend(
        self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, cache: _Past | None
    ) -> Tensor | tuple[Tensor, ...]:
        """What queries of x (B, L, D) get from keys and values of (B, S, ...), after all checks of them."""
        q, k, v = self.q_proj(x), self.k_proj(keys), self.v_proj(values)
        exporting = torch.onnx.is_in_onnx_export()
        result = self._in_operators(x, q, k, v, mask, cache) if exporting else self._eagerly(q, k, v, mask, cache)
        y, arrays, present = result
        return _results(self.spec, {**arrays, "y": self.out_proj(y)}, present)

    def _eagerly(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cache: _Past | None) -> _Result:
        spec = self.spec
        q = _heads(q, spec.num_heads, spec.head_dim)
        k = _heads(k, spec.num_kv_heads, spec.head_dim)
        v = _heads(v, spec.num_kv_heads, spec.v_head_dim)
        L = q.shape[2]
        if spec.rope is not None:
            positions = torch.arange(L, device=q.device)
            if cache is not None:
                positions = cache.length.unsqueeze(1) + positions
            _check_positions(spec.rope, positions)
            cos, sin = (table[positions].unsqueeze(-3) for table in (self.rope_cos, self.rope_sin))
            q, k = (rotate(rows, cos, sin, spec.rope.interleaved) for rows in (q, k))
        lengths: Tensor | None = None
        present: tuple[Tensor, ...] = ()
        if cache is not None:
            k, v, present = cache.written(k, v)
            lengths = cache.length + L
        y, arrays = attention(spec, q, k, v, mask, self.feature_tensors, lengths=lengths, dropout=self._dropout_now)
        return y.transpose(1, 2).flatten(2), {**arrays, "heads": y}, present

    def _in_operators(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cache: _Past | None
    ) -> _Result:
        """The attention as ONNX operators; `x` is what the sizes are read from."""
        spec = self.spec
        if cache is not None or spec.rope is not None:
            positions, lengths = onnx_symbolic.places(x, None if cache is None else cache.length)
        if spec.rope is not None:
            tables = self.rope_cos, self.rope_sin
            q = onnx_symbolic.rotary_node(spec.rope, q, spec.num_heads, *tables, positions)
            k = onnx_symbolic.rotary_node(spec.rope, k, spec.num_kv_heads, *tables, positions)
        if cache is None:
            tensors, free = self.feature_tensors, spec.is_cross
            y, arrays = onnx_symbolic.attention_node(spec, q, k, v, mask, tensors, free_lengths=free)
            if "heads" in spec.outputs:
                arrays["heads"] = onnx_symbolic.split_heads(y, spec.num_heads)
            return y, arrays, ()
        k, v = (onnx_symbolic.split_heads(rows, spec.num_kv_heads) for rows in (k, v))
        k, v, present = cache.written_in_operators(k, v)
        q = onnx_symbolic.split_heads(q, spec.num_heads)
        y, arrays = onnx_symbolic.attention_node(spec, q, k, v, None, self.feature_tensors, lengths=lengths)
        return onnx_symbolic.join_heads(y), {**arrays, "heads": y}, present


class QueryKeyValueAttention(MultiHeadAttention):
    """What `MultiHeadAttention(spec)` is for a spec with v_embed_dim: queries, keys and values of three inputs."""

    def forward(  # type: ignore[override]  # the inputs are others
        self, x: Tensor, key: Tensor | None = None, value: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """x (B, L, D), key (B, S, kv_embed_dim), value (B, S, v_embed_dim) -> y; the rest is as in
        MultiHeadAttention. Raises InputError."""
        spec = self.spec
        _check_rows("x", "L", spec.embed_dim, x)
        widths = {"key": spec.source_dim, "value": spec.v_source_dim}
        if key is None or value is None:
            name = "key" if key is None else "value"
            raise InputError(name, f"shape (B, S, {widths[name]}): v_embed_dim is set", "None")
        _check_rows("key", "S", widths["key"], key)
        _check_rows("value", "S", widths["value"], value)
        if value.shape[:2] != key.shape[:2]:
            expected = f"shape (B, S, {widths['value']}), (B, S) = {tuple(key.shape[:2])} as in key"
            raise InputError("value", expected, str(tuple(value.shape)), "Each key has one value.")
        return self._attend(x, key, value, mask, None)


class ScaledDotProductAttention(_AttentionModule):
    """The core alone, without projections: q (B, H, L, E), k (B, G, S, E), v (B, G, S, F) -> y (B, H, L, F).

    L and S are free here, also for a spec without kv_embed_dim: its `causal=True` was resolved to "top_left". Raises
    SpecError for `rope` and `kv_cache`, which belong to the block, and for the output "heads", which is y. `dropout` is
    as in MultiHeadAttention.

    >>> attention = ScaledDotProductAttention(AttentionSpec(embed_dim=64, num_heads=4, num_kv_heads=2))
    >>> attention(torch.zeros(1, 4, 7, 16), torch.zeros(1, 2, 9, 16), torch.zeros(1, 2, 9, 16)).shape
    torch.Size([1, 4, 7, 16])
    """

    def __init__(self, spec: AttentionSpec, *, dropout: float = 0.0) -> None:
        for name in ("rope", "kv_cache"):
            if getattr(spec, name):
                raise SpecError(name, "none in ScaledDotProductAttention", repr(getattr(spec, name)), "Use the block.")
        if "heads" in spec.outputs:
            expected, hint = 'no "heads" in ScaledDotProductAttention', "Its y holds each head's result."
            raise SpecError("outputs", expected, ", ".join(spec.outputs), hint)
        super().__init__(spec, dropout=dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        """`mask` goes with `spec.mask`. A tuple, if `spec.outputs` has more than "y". Raises InputError."""
        spec = self.spec
        widths = {
            "q": (spec.num_heads, spec.head_dim),
            "k": (spec.num_kv_heads, spec.head_dim),
            "v": (spec.num_kv_heads, spec.v_head_dim),
        }
        for (name, (heads, width)), value in zip(widths.items(), (q, k, v), strict=True):
            if value.ndim != 4 or (value.shape[1], value.shape[3]) != (heads, width):
                raise InputError(name, f"shape (B, {heads}, length, {width})", str(tuple(value.shape)))
        if torch.onnx.is_in_onnx_export():
            y, arrays = onnx_symbolic.attention_node(spec, q, k, v, mask, self.feature_tensors, free_lengths=True)
        else:
            y, arrays = attention(spec, q, k, v, mask, self.feature_tensors, dropout=self._dropout_now)
        return _results(spec, {**arrays, "y": y}, ())


def _results(spec: AttentionSpec, arrays: _OutputTensors, present: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """What `spec.outputs` asks for, then the caches; a single one by itself."""
    results = (*(arrays[name] for name in array_names(spec.outputs)), *present)
    return results[0] if len(results) == 1 else results


def weights(module: nn.Module) -> dict[str, np.ndarray]:
    """The parameters by their PyTorch names, in PyTorch's layouts.

    >>> arrays = weights(MultiHeadAttention(AttentionSpec(embed_dim=8, num_heads=2, bias=False)))
    >>> {name: array.shape for name, array in arrays.items()}
    {'q_proj.weight': (8, 8), 'k_proj.weight': (8, 8), 'v_proj.weight': (8, 8), 'out_proj.weight': (8, 8)}
    """
    return {name: to_numpy(parameter) for name, parameter in module.named_parameters()}


def opset(module: nn.Module) -> int:
    """The first opset that has the words for what `module` does."""
    if not isinstance(module, MultiHeadAttention | ScaledDotProductAttention):
        return 23
    free_lengths = module.spec.is_cross or isinstance(module, ScaledDotProductAttention)
    return onnx_symbolic.attention_opset(module.spec, free_lengths=free_lengths)


def _source(spec: AttentionSpec, x: Tensor, context: Tensor | None) -> Tensor:
    """What keys and values are projected from, after the checks of both inputs."""
    _check_rows("x", "L", spec.embed_dim, x)
    if context is None:
        if spec.is_cross:
            raise InputError("context", f"shape (B, S, {spec.kv_embed_dim}): kv_embed_dim is set", "None")
        return x
    if not spec.is_cross:
        raise InputError("context", "None: this is self-attention", "a tensor", "Set kv_embed_dim in the spec.")
    _check_rows("context", "S", spec.source_dim, context)
    return context


def _check_rows(name: str, length: str, width: int, rows: Tensor) -> None:
    if rows.ndim != 3 or rows.shape[-1] != width:
        raise InputError(name, f"shape (B, {length}, {width})", str(tuple(rows.shape)))


def _checked_cache(
    spec: AttentionSpec, x: Tensor, past: dict[str, Tensor | None], length: Tensor | None
) -> _Past | None:
    names = [f"past_{name}" for name in spec.cache_arrays]
    for name, value in past.items() | {"length": length}.items():
        if value is not None and name not in (*names, "length" if names else ""):
            hint = 'It belongs to kv_cache={"dtype": "int8"}.' if names else "Set kv_cache=True in the spec."
            raise InputError(name, "None", "a tensor", hint)
    if not names:
        return None
    arrays = {name: tensor for name in names if (tensor := past[name]) is not None}
    if length is None or len(arrays) < len(names):
        name = next((name for name in names if name not in arrays), "length")
        raise InputError(name, "a tensor: the spec has kv_cache", "None")
    B, G, C = x.shape[0], spec.num_kv_heads, arrays["past_key"].shape[2:3]
    for name, cache in arrays.items():
        widths = () if name.endswith("scale") else (spec.head_dim if "key" in name else spec.v_head_dim,)
        dtype = "float32" if name.endswith("scale") else spec.cache_dtype
        if cache.shape != (B, G, *C, *widths):
            shape = ", ".join(map(str, ("B", "G", "C", *widths)))
            raise InputError(name, f"shape ({shape}), B = {B} and G = {G}", str(tuple(cache.shape)))
        if cache.dtype != getattr(torch, dtype) and x.dtype != torch.float64:
            raise InputError(name, dtype, str(cache.dtype).removeprefix("torch."))
    if length.shape != (B,) or length.dtype != torch.int64:
        raise InputError("length", f"int64 of shape (B,) = ({B},)", f"{length.dtype} of {tuple(length.shape)}")
    return _Past(tuple(arrays.values()), length)


def _probability(dropout: object) -> float:
    number = isinstance(dropout, int | float) and not isinstance(dropout, bool)
    if not number or not 0 <= dropout < 1:  # type: ignore[operator]
        raise SpecError("dropout", "a probability from 0 to below 1", repr(dropout))
    return float(dropout)  # type: ignore[arg-type]


def _heads(rows: Tensor, heads: int, width: int) -> Tensor:
    """(B, L, heads * width) -> (B, heads, L, width)."""
    return rows.view(*rows.shape[:2], heads, width).transpose(1, 2)


def _check_positions(rope: Rope, positions: Tensor) -> None:
    if positions.numel() and (last := int(positions.max())) >= rope.max_length:
        expected = f"positions below the spec's rope.max_length = {rope.max_length}"
        raise InputError("x", expected, f"one at position {last}", "Raise max_length.")
