"""What to compute: one frozen, validated description, independent of any framework or target.

Notation: B batch, L query length, S key length, D embed, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from mhsa_compile.errors import SpecError, did_you_mean
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.files.input_files import require_unique_keys
from mhsa_compile.spec.cache_format import CACHE_DTYPES, CacheFormat, checked_kv_cache, resolved_kv_cache
from mhsa_compile.spec.checks import (
    ALIGNMENTS,
    DTYPES,
    check_choice,
    check_dtype,
    check_positive_int,
    checked_window,
    parse_causal,
    parse_window,
    resolve_cached_causal,
    resolve_causal,
)
from mhsa_compile.spec.field_notes import Note, fields_with_notes
from mhsa_compile.spec.mask_patterns import AnyPattern, BlockDiagonal, Pattern, checked_static_mask, parse_pattern
from mhsa_compile.spec.outputs import checked_outputs, split_words
from mhsa_compile.spec.position_encoding import Rope, checked_rope, parse_rope
from mhsa_compile.spec.score_functions import ScoreFunction, checked_function
from mhsa_compile.spec.window import WindowSpec, window_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MASKS = {
    "bool": "bool, True takes part",
    "additive": "added to the scores",
    "key_padding": "which keys are no padding",
}
"""What a call may take as its mask, in words."""
SPEC_KEY = "mhsa.spec"
"""The entry of metadata_props in which an exported ONNX model keeps its spec as JSON."""
LIMITS_KEY = "mhsa.limits"  # JSON, symbol -> its largest size
ROWS_KEY = "mhsa.rows"  # JSON, input of ids -> the rows of the table that they pick from
IN_PLACE_KEY = "mhsa.in_place"
"""The entry of metadata_props that says which inputs a call writes into: JSON, input -> the output that it becomes."""
DOMAIN = "mhsa"
"""The domain of the ONNX operators that are this library's own."""
_ROWS = 512  # of a constant mask that are looked at together
_OUTPUTS = (
    "What a call returns, such as y,lse,entropy,top_k:5,weights:heads=0,3,rows=0,-1; y if not given. Of an .onnx "
    "SOURCE beside its own outputs: of every layer (weights), or of one (weights@3)."
)


def _window_words(window: tuple[int, int]) -> str:
    left, right = ("all" if side < 0 else str(side) for side in window)
    return f"a window of {left} keys to the left, {right} to the right"


def _mask_words(kind: str) -> str:
    return f"what the mask of a call says: {MASKS[kind]}"


def _soft_cap(xp: Any, scores: Any, cap: Any) -> Any:
    return xp.tanh(scores / cap) * cap


def _soft_clamp(xp: Any, scores: Any, clamp: Any) -> Any:
    return scores / (clamp + xp.abs(scores)) * clamp


class _KnownFields(msgspec.StructMeta):
    """The type of AttentionSpec: a call of it with an unknown field, or without one it needs, is answered by name."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        if not args:
            _check_names(fields, cls.__struct_fields__, cls.__name__)
        return super().__call__(*args, **fields)


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True, metaclass=_KnownFields):
    """One attention, by the meaning of the ONNX operator Attention (https://onnx.ai/onnx/operators/onnx__Attention.html).

    Names follow PyTorch and ONNX; every default is resolved at construction, so `spec.num_kv_heads` is always an int.

    embed_dim, num_heads    D and H
    num_kv_heads            G, divides H: 1 is multi-query, H (the default) is plain multi-head attention
    head_dim, v_head_dim    E (default D / H) and F (default E)
    kv_embed_dim            width of `context` in cross-attention; None is self-attention, where S = L
    v_embed_dim             None, or the width of `value`: keys and values are then inputs of their own, `key`
                            (B, S, kv_embed_dim) and `value` (B, S, v_embed_dim), in place of `context`, as in
                            nn.MultiheadAttention(embed_dim, num_heads, kdim=, vdim=). It goes with kv_embed_dim
    bias                    whether the four projections add a bias
    dtype                   of activations and weights: float32, bfloat16 or float16; sums are float32 in each
    causal                  None; "top_left": query i sees key j iff j <= i; "bottom_right": iff j <= i + S - L.
                            True is accepted in self-attention, where L = S and both mean the same
    window                  None, or (left, right): query i sees the keys p - left to p + right, where p = i, or
                            p = i + S - L if causal is "bottom_right"; -1 is unbounded. With `causal` both hold
    static_mask             None, or a pattern of `masks`, such as Longformer(window=256), or a bool array (L, S): a
                            constant mask. Its lengths must be fixed when it is compiled
    mask_mod                None, or a function mask_mod(b, h, q_idx, kv_idx) in FlexAttention's form: whether a query
                            sees a key, beside all else that hides some. q_idx is the query's place p, as for `window`
    score_mod               None, or a function score_mod(score, b, h, q_idx, kv_idx): what a score becomes, after
                            scale, softcap and softclamp, before masks and ALiBi. docs/score-functions.md says what both
                            may use
    mask                    what a call takes as `mask=`: None; "bool" (True takes part) or "additive" (added to the
                            scaled scores), broadcastable to (B, H, L, S); "key_padding": bool (B, S), True takes
                            part. Where it is bool, integers 0 and 1 say the same
    scale                   factor of the scores; None is 1 / sqrt(E)
    softcap                 None, or c: scores become c * tanh(score / c), before any mask
    softclamp               None, or c: scores become c * score / (c + |score|), after softcap and before any mask: they
                            stay between -c and c, too, without a tanh
    rope                    None, or a Rope: queries and keys are turned by their places. True is its defaults
    alibi                   whether slope[h] * (j - p) is added to the scores of query head h, with the slopes of
                            the paper (Press et al., 2021, https://arxiv.org/abs/2108.12409) and p as for `window`
    sinks                   whether each head has one more score, learned, that every query sees, of no value: a
                            parameter `sinks` (H,)
    kv_cache                whether keys and values go into a cache of a fixed capacity, and queries see those of all
                            calls before: query i of a call stands behind the cache's length. Needs causality. True
                            stores them as activations are; {"dtype": "int8"}, a CacheFormat, in fewer bits
    outputs                 what a call returns, in this order: "y", and, as `mhsa_compile.spec.outputs` says, "lse",
                            "entropy", "top_k:5", "weights", "weights:heads=0,3,rows=0,-1", "heads". Only "weights"
                            takes L x S memory

    Raises SpecError.

    >>> spec = AttentionSpec(embed_dim=256, num_heads=8, num_kv_heads=2, causal=True)
    >>> spec.head_dim, spec.v_head_dim, spec.causal
    (32, 32, 'top_left')
    >>> AttentionSpec(embed_dim=100, num_heads=8)
    Traceback (most recent call last):
    mhsa_compile.errors.SpecError: head_dim: expected an explicit value, as num_heads does not divide embed_dim
    """

    # fmt: off
    embed_dim: Annotated[int, Note("D, the width of the activations.")]
    num_heads: Annotated[int, Note("H, query heads.")]
    # None is resolved in __post_init__, for this one and the next two.
    num_kv_heads: Annotated[int, Note("G, key and value heads; H if not given.")] = None  # type: ignore[assignment]
    head_dim: Annotated[int, Note("E, the width of a query or key head; D / H if not given.")] = None  # type: ignore[assignment]
    v_head_dim: Annotated[int, Note("F, the width of a value head; E if not given.")] = None  # type: ignore[assignment]
    kv_embed_dim: Annotated[int | None, Note("Cross-attention: the width of the second input.")] = None
    v_embed_dim: Annotated[
        int | None, Note("The width of a third input, of values; the second is then of keys alone.")
    ] = None
    bias: Annotated[bool, Note("Biases of the four projections.")] = True
    dtype: Annotated[str, Note("Of activations and weights.", choices=DTYPES)] = "float32"
    causal: Annotated[
        str | None,
        Note("Which keys a query sees.", ("true", *ALIGNMENTS), parse_causal,
             row="sees", words="itself and what is before it (causal, {})"),
    ] = None
    window: Annotated[
        tuple[int, int] | None,
        Note("LEFT,RIGHT: the keys a query sees on each side of itself; -1 is unbounded.", parse=parse_window,
             row="sees", words=_window_words),
    ] = None
    static_mask: Annotated[
        AnyPattern | None,
        Note("A constant mask, such as longformer:window=256,global_tokens=1.", parse=parse_pattern,
             row="sees", words="a constant mask, {0.__class__.__name__}"),
    ] = None
    # A function as it was given, or a ScoreFunction: what modules make of it.
    mask_mod: Annotated[
        Any, Note(check=checked_function, row="sees", words="what its mask_mod lets it see", tables=("mask_mod_",))
    ] = None
    score_mod: Annotated[
        Any, Note(check=checked_function, row="scores", words="a score_mod", turn=1, tables=("score_mod_",))
    ] = None
    mask: Annotated[str | None, Note("The mask a call takes.", tuple(MASKS), row="sees", words=_mask_words)] = None
    scale: Annotated[
        float | None,
        Note("Factor of the scores; 1 / sqrt(E) if not given.", otherwise="1 / sqrt(head_dim)",
             row="scores", words="times {:g}"),
    ] = None
    softcap: Annotated[
        float | None,
        Note("c: scores become c * tanh(score / c).", otherwise="no cap",
             row="scores", words="capped at {:g}", formula=_soft_cap),
    ] = None
    softclamp: Annotated[
        float | None,
        Note("c: scores become c * score / (c + |score|).", otherwise="no clamp",
             row="scores", words="softly clamped at {:g}", formula=_soft_clamp),
    ] = None
    rope: Annotated[
        Rope | None,
        Note("Rotary positions: default, or such as theta=500000,scaling=llama3,factor=8,original_max_length=8192.",
             parse=parse_rope, row="positions", words=Rope.in_words, tables=("rope_cos", "rope_sin")),
    ] = None
    alibi: Annotated[
        bool,
        Note("A bias that falls with the distance, a slope for each head.",
             row="positions", words="ALiBi, a slope for each head", tables=("alibi_slopes",)),
    ] = False
    sinks: Annotated[
        bool,
        Note("One more learned score for each head, of no value.",
             row="scores", words="a sink for each head", turn=1, parameters="num_heads"),
    ] = False
    kv_cache: Annotated[
        bool | CacheFormat,
        Note("Keys and values go into a cache; needs --causal true.",
             form=("dtype", CACHE_DTYPES), check=checked_kv_cache),
    ] = False
    outputs: Annotated[tuple[str, ...], Note(_OUTPUTS, parse=split_words)] = ("y",)
    # fmt: on

    if TYPE_CHECKING:  # the fields are typed as resolved; this is what the constructor takes

        def __init__(
            self,
            *,
            embed_dim: int,
            num_heads: int,
            num_kv_heads: int | None = None,
            head_dim: int | None = None,
            v_head_dim: int | None = None,
            kv_embed_dim: int | None = None,
            v_embed_dim: int | None = None,
            bias: bool = True,
            dtype: str = "float32",
            causal: str | bool | None = None,
            window: Sequence[int] | None = None,
            static_mask: Pattern | Mapping[str, Any] | NDArray[np.bool_] | None = None,
            mask_mod: Callable[..., Any] | ScoreFunction | None = None,
            score_mod: Callable[..., Any] | ScoreFunction | None = None,
            mask: str | None = None,
            scale: float | None = None,
            softcap: float | None = None,
            softclamp: float | None = None,
            rope: Rope | Mapping[str, Any] | bool | None = None,
            alibi: bool = False,
            sinks: bool = False,
            kv_cache: bool | CacheFormat | Mapping[str, str] = False,
            outputs: Sequence[str] = ("y",),
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in ("embed_dim", "num_heads"):
            check_positive_int(name, getattr(self, name))
        for name in ("num_kv_heads", "head_dim", "v_head_dim", "kv_embed_dim", "v_embed_dim"):
            if getattr(self, name) is not None:
                check_positive_int(name, getattr(self, name))
        if self.v_embed_dim is not None and self.kv_embed_dim is None:
            hint = f"State the width of the keys' input, too: kv_embed_dim={self.embed_dim} if it is that of x."
            raise SpecError("v_embed_dim", "None without kv_embed_dim", str(self.v_embed_dim), hint)
        for name, field in fields_with_notes(type(self)).items():
            value = getattr(self, name)
            if field.check is not None and not (value is None and field.may_be_none):
                self._set(name, field.check(name, value))
        check_dtype(self.dtype)
        check_choice("mask", self.mask, tuple(MASKS), "Did you mean causal=True?" if self.mask == "causal" else "")
        self._set("kv_cache", resolved_kv_cache(self.kv_cache, self.dtype))
        self._resolve_heads()
        self._set("outputs", checked_outputs(self.outputs, self.num_heads))
        self._resolve_causal()
        self._set("window", checked_window(self.window))
        self._resolve_static_mask()
        self._resolve_rope()

    def _set(self, name: str, value: object) -> None:
        msgspec.structs.force_setattr(self, name, value)

    def _resolve_causal(self) -> None:
        if not self.kv_cache:
            return self._set("causal", resolve_causal(self.causal, same_length=not self.is_cross))
        if self.is_cross:
            got, hint = f"kv_embed_dim={self.kv_embed_dim}", "The keys of a context do not grow from call to call."
            raise SpecError("kv_cache", "self-attention", got, hint)
        for name in ("mask", "static_mask"):
            if getattr(self, name) is not None:
                hint = "Causality and the cache's length say what a query sees; a window goes with them."
                raise SpecError(name, "None with kv_cache", repr(getattr(self, name)), hint)
        return self._set("causal", resolve_cached_causal(self.causal))

    def _resolve_rope(self) -> None:
        rope = checked_rope(self.rope)
        if rope is not None and self.is_cross:
            got, hint = f"kv_embed_dim={self.kv_embed_dim}", "Queries and keys of two sequences share no positions."
            raise SpecError("rope", "self-attention", got, hint)
        self._set("rope", None if rope is None else rope.resolved(self.head_dim))

    def _resolve_static_mask(self) -> None:
        self._set("static_mask", checked_static_mask(self.static_mask))
        if self.static_mask is None:
            return
        if self.mask is not None:
            got, hint = f'static_mask and mask="{self.mask}"', "Combine them in the mask of the call: `array & mask`."
            raise SpecError("mask", "one mask, constant or of the call", got, hint)

    def _resolve_heads(self) -> None:
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        if self.num_heads % kv_heads:
            raise SpecError(
                "num_kv_heads",
                f"a divisor of num_heads = {self.num_heads}",
                str(kv_heads),
                "Every key/value head serves the same number of query heads.",
            )
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise SpecError(
                "embed_dim",
                f"a multiple of num_heads = {self.num_heads}",
                str(self.embed_dim),
                "Change one of them, or give head_dim, which frees the heads from embed_dim.",
            )
        head_dim = self.embed_dim // self.num_heads if self.head_dim is None else self.head_dim
        self._set("num_kv_heads", kv_heads)
        self._set("head_dim", head_dim)
        if self.v_head_dim is None:
            self._set("v_head_dim", head_dim)

    @property
    def cache_dtype(self) -> str:
        """What a cache stores keys and values as."""
        return self.kv_cache.dtype if isinstance(self.kv_cache, CacheFormat) else self.dtype

    @property
    def cache_arrays(self) -> tuple[str, ...]:
        """What a cache consists of, by the names that inputs and outputs begin past_ and present_ with."""
        if not self.kv_cache:
            return ()
        return ("key", "value", "key_scale", "value_scale") if self.cache_dtype == "int8" else ("key", "value")

    @property
    def is_cross(self) -> bool:
        """Whether keys and values come from other inputs than queries: `context`, or `key` and `value`."""
        return self.kv_embed_dim is not None

    @property
    def sources(self) -> tuple[str, str]:
        """The names of the inputs that keys and that values are projected from."""
        if self.v_embed_dim is not None:
            return "key", "value"
        return ("context", "context") if self.is_cross else ("x", "x")

    @property
    def source_dim(self) -> int:
        """Width of what keys are projected from: kv_embed_dim, or D in self-attention."""
        return self.embed_dim if self.kv_embed_dim is None else self.kv_embed_dim

    @property
    def v_source_dim(self) -> int:
        """Width of what values are projected from: v_embed_dim, or that of the keys."""
        return self.source_dim if self.v_embed_dim is None else self.v_embed_dim

    @property
    def functions(self) -> dict[str, ScoreFunction]:
        """The functions of scores that a module has traced, by their fields."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in values.items() if isinstance(value, ScoreFunction)}

    @property
    def masks_keys(self) -> bool:
        """Whether the mask of a call is (B, S), a flag for each key."""
        return self.mask == "key_padding"

    @property
    def adds_mask(self) -> bool:
        """Whether the mask of a call is added to the scores."""
        return self.mask == "additive"

    @property
    def sides(self) -> tuple[int, int]:
        """How many keys places leave to the left and to the right of a query; -1 is all."""
        left, right = self.window or (-1, -1)
        return left, right if self.causal is None else 0  # no window ends before the query itself

    @property
    def needs_lengths(self) -> bool:
        """Whether lengths must be fixed when it is compiled."""
        return self.static_mask is not None

    def for_any_lengths(self) -> AttentionSpec:
        """The same, with a constant mask that fits all lengths in place of one that may not."""
        return msgspec.structs.replace(self, static_mask=BlockDiagonal(block=3)) if self.needs_lengths else self

    @property
    def hides_keys(self) -> bool:
        """Whether some query may not see some key, by its place or by the mask of a call."""
        return any(one is not None for one in (self.band, self.static_mask, self.mask, self.mask_mod))

    @property
    def is_causal_alone(self) -> bool:
        """Whether causality is all that hides keys."""
        others = self.window, self.static_mask, self.mask, self.mask_mod
        return self.causal is not None and all(one is None for one in others)

    def visible(self, rows: Sequence[int], L: int, S: int) -> NDArray[np.bool_] | None:
        """(rows, S) bool: the keys that some of L queries see by their places, by a band and a constant mask together;
        None where these hide none."""
        masks = [one.visible(rows, L, S) for one in (self.band, self.static_mask) if one is not None]
        return masks[0] if len(masks) == 1 else masks[0] & masks[1] if masks else None

    def constant_pairs(self, L: int, S: int) -> NDArray[np.bool_] | None:
        """What is visible whatever the call, (L, S). Raises SpecError for lengths that its mask does not fit."""
        return None if self.static_mask is None else self.static_mask.array(L, S)

    def attention_flops(self, B: int, L: int, S: int) -> int:
        """FLOPs of q k^T and of weights v, 2 per multiply-add; of a causal attention only the visible pairs count."""
        return 2 * B * self.num_heads * self._visible_pairs(L, S) * (self.head_dim + self.v_head_dim)

    def projection_flops(self, B: int, L: int, S: int) -> int:
        """FLOPs of the q, k, v and output projections, 2 per multiply-add."""
        query_and_out = L * self.embed_dim * self.num_heads * (self.head_dim + self.v_head_dim)
        key_and_value = S * (self.source_dim * self.head_dim + self.v_source_dim * self.v_head_dim) * self.num_kv_heads
        return 2 * B * (query_and_out + key_and_value)

    @property
    def band(self) -> WindowSpec | None:
        """`window` and `causal` together; None where neither is set."""
        return window_of(*self.sides, self.causal or "top_left")

    def _visible_pairs(self, L: int, S: int) -> int:
        """Pairs that a band and a constant mask leave, counted without an L x S array."""
        if self.static_mask is None:
            return L * S if self.band is None else self.band.pairs(L, S)
        blocks = (self.visible(range(begin, min(begin + _ROWS, L)), L, S) for begin in range(0, L, _ROWS))
        return sum(int(visible.sum()) for visible in blocks if visible is not None)

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set, resolved, as plain values; None is left out. `from_dict` gives an equal spec.

        Raises SpecError for a function that no module has traced yet.
        """
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if callable(value):
                hint = "A module has it so: MultiHeadAttention(spec).spec."
                raise SpecError(name, "a traced function, to be written down", f"{value!r}", hint)
        return dict(_without_none(msgspec.to_builtins(self)))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> AttentionSpec:
        """A spec from plain values. Raises SpecError for unknown, missing and wrong ones."""
        _check_names(fields, cls.__struct_fields__, "spec")
        return cls(**fields)

    def to_json(self) -> str:
        """JSON text, one object; the same spec gives the same text."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str | bytes) -> AttentionSpec:
        """The inverse of `to_json`. Raises SpecError."""
        with reading(SpecError, "spec", "JSON"):
            require_unique_keys(text)
            fields = json.loads(text)
        if not isinstance(fields, dict):
            raise SpecError("spec", "a JSON object", type(fields).__name__)
        return cls.from_dict(fields)

    def to_toml(self) -> str:
        """TOML text, a line for each field; a pattern is an inline table."""
        return "".join(f"{name} = {_toml(value)}\n" for name, value in self.to_dict().items())

    @classmethod
    def from_toml(cls, text: str) -> AttentionSpec:
        """The inverse of `to_toml`. Raises SpecError."""
        import tomllib

        with reading(SpecError, "spec", "TOML"):
            fields = tomllib.loads(text)
        return cls.from_dict(fields)


def _check_names(fields: Mapping[str, Any], known: Sequence[str], origin: str) -> None:
    for key in fields:
        if key not in known:
            hint = did_you_mean(str(key), known, f"The fields are {', '.join(known)}.")
            raise SpecError(origin, "fields of AttentionSpec", f"the unknown field {key!r}", hint)
    for key in ("embed_dim", "num_heads"):
        if key not in fields:
            raise SpecError(origin, f"the field {key!r}", "none", f"Add it, for example {key} = 8.")


def _without_none(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields without those that are None, which TOML has no word for."""
    values = {name: value for name, value in fields.items() if value is not None}
    return {name: _without_none(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def _toml(value: object) -> str:
    """TOML text of a value: an inline table for a mapping; a scalar or a list is written as in JSON."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {_toml(inner)}" for name, inner in value.items()) + " }"
    return json.dumps(value)
