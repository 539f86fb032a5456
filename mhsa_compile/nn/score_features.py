"""What each feature of scores in a spec is in PyTorch, one class a feature: what a module holds for it, what it means,
and how a node Attention says it. A formula of a spec's field needs no class: its note has the meaning.

Notation: B batch, L query length, S key length, H heads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from mhsa_compile.errors import InputError, SpecError
from mhsa_compile.nn.score_functions import evaluate
from mhsa_compile.nn.score_tracing import trace
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.field_notes import formulas_of
from mhsa_compile.spec.mask_patterns import Pattern
from mhsa_compile.spec.score_functions import ScoreFunction

FORMULAS = formulas_of(AttentionSpec)
FeatureTensors = Mapping[str, Tensor | None]
"""What a module holds for its features, by the names under which it does."""


@dataclass(frozen=True)
class EagerScoring:
    """What becomes of scores before they are weights; None and an empty mapping are nothing.

    visible    bool, broadcastable to (B, H, L, S): what queries see
    bias       of the queries' dtype, broadcastable to (B, H, L, S); -inf hides
    limits     numbers by the names of the formulas of AttentionSpec that they are of
    score_function  what becomes of scores (B, H, L, S) after these; one of -inf hides its key
    no_key     (H,): for each head one more score of the softmax, of no value
    """

    visible: Tensor | None = None
    bias: Tensor | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    score_function: Callable[[Tensor], Tensor] | None = None
    no_key: Tensor | None = None


@dataclass(frozen=True)
class EagerCall:
    """An eager call of (B, H, L, S), for queries of `dtype`. `lengths` int64 (B,) are how many of the S keys are valid;
    the queries are the last of them."""

    spec: AttentionSpec
    sizes: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    tensors: FeatureTensors
    mask: Tensor | None
    lengths: Tensor | None

    @property  # not a cached one, which Dynamo does not trace
    def distance(self) -> Tensor:
        """(1 or B, 1, L, S): how far each key stands behind each query's place; see AttentionSpec."""
        _, _, L, S = self.sizes
        i, j = torch.arange(L, device=self.device).view(1, 1, L, 1), torch.arange(S, device=self.device)
        if self.lengths is not None:
            return j - (i + self.lengths.view(-1, 1, 1, 1) - L)
        return j - (i + S - L) if self.spec.causal == "bottom_right" else j - i

    @property
    def places(self) -> dict[str, Tensor]:
        """What functions are told of a pair, each broadcastable to (B, H, L, S)."""
        B, H, _, S = self.sizes
        keys, distance = torch.arange(S, device=self.device), self.distance
        return {
            "b": torch.arange(B, device=self.device).view(-1, 1, 1, 1),
            "h": torch.arange(H, device=self.device).view(-1, 1, 1),
            "q_idx": (keys - distance)[..., :1] if S else distance,
            "kv_idx": keys,
        }


class Feature:
    """What is here says: the spec does not have it. `role` is the input of a node that it is, beside what functions
    capture."""

    role = ""

    def resolve(self, spec: AttentionSpec) -> tuple[AttentionSpec, FeatureTensors]:
        """The spec as a module of it has it, and what the module holds: parameters, None for one that it has not, and
        buffers."""
        return spec, {}

    def scoring(self, call: EagerCall) -> EagerScoring:
        return EagerScoring()

    def words(self, spec: AttentionSpec) -> dict[str, Any]:
        """The attributes of a node."""
        return {}

    def input(self, spec: AttentionSpec, tensors: FeatureTensors) -> Tensor | None:
        """The node's input of its `role`; `tensors` has the call's "mask" and "lengths", too."""
        return None

    def captures(self, spec: AttentionSpec, tensors: FeatureTensors) -> tuple[Tensor, ...]:
        """The node's inputs behind those that have a place of their own."""
        return ()

    def opset(self, spec: AttentionSpec) -> int:
        """The first opset that has the words for it."""
        return 23


class _CallMask(Feature):
    role = "attn_mask"

    def input(self, spec: AttentionSpec, tensors: FeatureTensors) -> Tensor | None:
        return checked_mask(spec, tensors["mask"])

    def scoring(self, call: EagerCall) -> EagerScoring:
        mask = checked_mask(call.spec, call.mask)
        if mask is not None:
            _check_broadcast(call.spec, mask, call.sizes)
        return EagerScoring(bias=mask) if call.spec.adds_mask else EagerScoring(mask)


class _Band(Feature):
    def scoring(self, call: EagerCall) -> EagerScoring:
        left, right = call.spec.sides
        if left == right == -1:
            return EagerScoring()
        distance = call.distance
        visible = torch.ones_like(distance, dtype=torch.bool) if right < 0 else distance <= right
        return EagerScoring(visible & (-distance <= left) if left >= 0 else visible)

    def words(self, spec: AttentionSpec) -> dict[str, Any]:
        sizes = zip(("left_window_size", "right_window_size"), spec.window or (), strict=False)
        return ({} if spec.causal is None else {"is_causal": 1}) | dict(sizes)

    def opset(self, spec: AttentionSpec) -> int:
        return 23 if spec.window is None else 25


class _Lengths(Feature):
    role = "nonpad_kv_seqlen"

    def input(self, spec: AttentionSpec, tensors: FeatureTensors) -> Tensor | None:
        return tensors["lengths"]

    def scoring(self, call: EagerCall) -> EagerScoring:
        if call.lengths is None:
            return EagerScoring()
        return EagerScoring(torch.arange(call.sizes[3], device=call.device) < call.lengths.view(-1, 1, 1, 1))

    def opset(self, spec: AttentionSpec) -> int:
        return 24 if spec.kv_cache else 23


class _StaticMask(Feature):
    def scoring(self, call: EagerCall) -> EagerScoring:
        if call.spec.static_mask is None:
            return EagerScoring()
        return EagerScoring(_constant_mask(call.spec.static_mask, *call.sizes[2:]).to(call.device))


CONSTANT_MASK = "static_mask"
"""What a file calls the mask that it holds."""


class _Function(Feature):
    """A traced function; what it captures are buffers: `score_mod_0`, `score_mod_1`, ..."""

    def __init__(self, name: str) -> None:
        self.name = name

    def of(self, spec: AttentionSpec) -> ScoreFunction | None:
        function: ScoreFunction | None = getattr(spec, self.name)
        return function

    def resolve(self, spec: AttentionSpec) -> tuple[AttentionSpec, FeatureTensors]:
        function: Any = getattr(spec, self.name)
        values: tuple[Tensor, ...] = ()
        if isinstance(function, ScoreFunction):
            if function.tensors:
                got = f"one of {len(function.tensors)} captured tensors, without their values"
                hint = "A spec that was written down does not hold them."
                raise SpecError(self.name, "the function itself", got, hint)
        elif function is not None:
            function, values = trace(self.name, function)
        tensors = {f"{self.name}_{i}": tensor for i, tensor in enumerate(values)}
        return msgspec.structs.replace(spec, **{self.name: function}), tensors

    def words(self, spec: AttentionSpec) -> dict[str, Any]:
        function = self.of(spec)
        return {} if function is None else {self.name: function.to_json()}

    def captures(self, spec: AttentionSpec, tensors: FeatureTensors) -> tuple[Tensor, ...]:
        function = self.of(spec)
        count = 0 if function is None else len(function.tensors)
        return tuple(tensors[f"{self.name}_{i}"] for i in range(count))  # type: ignore[misc]


class _MaskMod(_Function):
    def scoring(self, call: EagerCall) -> EagerScoring:
        function = self.of(call.spec)
        if function is None:
            return EagerScoring()
        return EagerScoring(evaluate(function, self.captures(call.spec, call.tensors), call.places))


class _ScoreMod(_Function):
    def scoring(self, call: EagerCall) -> EagerScoring:
        """Computed in float32 at least."""
        function, tensors = self.of(call.spec), self.captures(call.spec, call.tensors)
        if function is None:
            return EagerScoring()
        places = call.places

        def modify(scores: Tensor) -> Tensor:
            wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
            changed = evaluate(function, tensors, {**places, "score": wide})
            return changed.to(scores.dtype).expand_as(scores)

        return EagerScoring(score_function=modify)


class _Slopes(Feature):
    role = "slopes"

    def resolve(self, spec: AttentionSpec) -> tuple[AttentionSpec, FeatureTensors]:
        if not spec.alibi:
            return spec, {}
        return spec, {"alibi_slopes": torch.tensor(alibi_slopes(spec.num_heads), dtype=getattr(torch, spec.dtype))}

    def scoring(self, call: EagerCall) -> EagerScoring:
        slopes = self.input(call.spec, call.tensors)
        if slopes is None:
            return EagerScoring()
        wide = slopes.to(torch.promote_types(slopes.dtype, torch.float32))  # more bits than a place in 16-bit floats
        return EagerScoring(bias=(wide.view(-1, 1, 1) * call.distance).to(call.dtype))

    def input(self, spec: AttentionSpec, tensors: FeatureTensors) -> Tensor | None:
        return tensors["alibi_slopes"] if spec.alibi else None


class _Sinks(Feature):
    role = "sinks"

    def resolve(self, spec: AttentionSpec) -> tuple[AttentionSpec, FeatureTensors]:
        dtype = getattr(torch, spec.dtype)
        return spec, {"sinks": nn.Parameter(torch.randn(spec.num_heads, dtype=dtype)) if spec.sinks else None}

    def scoring(self, call: EagerCall) -> EagerScoring:
        return EagerScoring(no_key=call.tensors["sinks"])

    def input(self, spec: AttentionSpec, tensors: FeatureTensors) -> Tensor | None:
        return tensors["sinks"]

    def opset(self, spec: AttentionSpec) -> int:
        return 24 if spec.sinks else 23


FEATURES: tuple[Feature, ...] = (
    _CallMask(),
    _Band(),
    _Lengths(),
    _StaticMask(),
    _ScoreMod("score_mod"),
    _MaskMod("mask_mod"),
    _Slopes(),
    _Sinks(),
)
"""In the order in which a node takes what they capture."""


def scoring_of(call: EagerCall) -> EagerScoring:
    """What all features of a call do to its scores."""
    parts = [feature.scoring(call) for feature in FEATURES]
    masks = [part.visible for part in parts if part.visible is not None]
    biases = [part.bias for part in parts if part.bias is not None]
    return EagerScoring(
        visible=functools.reduce(torch.logical_and, masks) if masks else None,
        bias=functools.reduce(torch.add, biases) if biases else None,
        limits=limits_of(call.spec),
        score_function=next((part.score_function for part in parts if part.score_function is not None), None),
        no_key=next((part.no_key for part in parts if part.no_key is not None), None),
    )


def limits_of(spec: AttentionSpec) -> dict[str, float]:
    """The numbers of the formulas that a spec asks for."""
    values = {name: getattr(spec, name) for name in FORMULAS}
    return {name: value for name, value in values.items() if value is not None}


def _constant_mask(pattern: Pattern, L: int, S: int) -> Tensor:
    return torch.from_numpy(pattern.array(L, S))


# Or torch.compile would trace NumPy code. As torch.compiler.assume_constant_result does, which loads Dynamo: a second.
_constant_mask._dynamo_marked_constant = True  # type: ignore[attr-defined]


def checked_mask(spec: AttentionSpec, mask: Tensor | None) -> Tensor | None:
    """The mask, broadcastable to (B, H, L, S), after the checks that need no sizes."""
    if spec.mask is None:
        if mask is not None:
            raise InputError("mask", "None", "a tensor", 'Set mask="bool", "additive" or "key_padding" in the spec.')
        return None
    if mask is None:
        raise InputError("mask", f'a tensor: the spec has mask="{spec.mask}"', "None")
    if spec.adds_mask and not mask.is_floating_point():
        raise InputError("mask", "floating point: it is additive", str(mask.dtype), 'Or set mask="bool" in the spec.')
    if not spec.adds_mask and mask.dtype != torch.bool:
        mask = _truths(mask)
    if not spec.masks_keys:
        return mask
    if mask.ndim != 2:
        raise InputError("mask", "shape (B, S): it is key_padding", str(tuple(mask.shape)))
    return mask.unsqueeze(1).unsqueeze(1)  # as an index it would export as a dozen operators


def _truths(mask: Tensor) -> Tensor:
    """A mask of integers 0 and 1, as tokenizers give it, as bool."""
    expected = "bool, True takes part, or integers 0 and 1"
    if mask.is_floating_point() or mask.is_complex():
        raise InputError("mask", expected, str(mask.dtype))
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError("mask", expected, f"integers from {int(mask.min())} to {int(mask.max())}")
    return mask != 0


def _check_broadcast(spec: AttentionSpec, mask: Tensor, full: tuple[int, int, int, int]) -> None:
    exact = spec.masks_keys and mask.shape != (full[0], 1, 1, full[3])
    pairs = zip(reversed(mask.shape), reversed(full), strict=False)
    if exact or mask.ndim > 4 or any(size not in (1, whole) for size, whole in pairs):
        expected = f"(B, S) = {(full[0], full[3])}" if spec.masks_keys else f"broadcastable to {full}"
        shape = (mask.shape[0], mask.shape[3]) if spec.masks_keys else tuple(mask.shape)
        raise InputError("mask", expected, str(shape))


def alibi_slopes(num_heads: int) -> list[float]:
    """One slope a head (Press et al., 2021, https://arxiv.org/abs/2108.12409, section 3).

    For H a power of two, 2 ** (-8 h / H) for h = 1 .. H. For another H those of the next lower power of two, then every
    other one of the next higher, as the authors' code has it.
    """
    lower = 1 << num_heads.bit_length() - 1

    def geometric(count: int) -> list[float]:
        return [math.pow(2.0, -8.0 * h / count) for h in range(1, count + 1)]

    return geometric(lower) + geometric(2 * lower)[0::2][: num_heads - lower]
