"""A whole layer of PyTorch's transformers as one artifact: attention, linears, norms, activation and sums.

PyTorch has one operator for an encoder's layer at inference, which an attention that is replaced alone would not beat.
A call is one artifact's where the layer is as its class makes it and that is the fastest way; else its parts are
called, of which attention and linears may be replaced each, or PyTorch's own layer.

Notation: B batch, L query length, S key length, D embed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from mhsa_compile.conversion.from_torch import join_masks
from mhsa_compile.integrations import torch_attention
from mhsa_compile.integrations.call_context import check_inference, why_not_numbers
from mhsa_compile.integrations.copies import fields_of_its_own
from mhsa_compile.integrations.layers.graph import ATTENTIONS, MASKS, MaskKind, WholeLayerKind
from mhsa_compile.integrations.layers.measured import MeasuredForward
from mhsa_compile.integrations.layers.ways import LayerWay
from mhsa_compile.integrations.weight_state import ReplacedForward

_LINEARS = {"linear1": nn.Linear, "linear2": nn.Linear, "dropout": nn.Dropout, "dropout1": nn.Dropout,
            "dropout2": nn.Dropout, "norm1": nn.LayerNorm, "norm2": nn.LayerNorm}  # fmt: skip
_PARTS: dict[type[nn.Module], dict[str, type[nn.Module]]] = {
    nn.TransformerEncoderLayer: {"self_attn": nn.MultiheadAttention, **_LINEARS},
    nn.TransformerDecoderLayer: {
        **dict.fromkeys(ATTENTIONS, nn.MultiheadAttention), **_LINEARS, "dropout3": nn.Dropout, "norm3": nn.LayerNorm,
    },
}  # fmt: skip


class Attended(NamedTuple):
    """What one attention of a call sees: `attn_mask`, `padding` and `is_causal` as PyTorch's layers take them."""

    attn_mask: Tensor | None = None
    padding: Tensor | None = None
    is_causal: bool = False

    @property
    def is_causal_alone(self) -> bool:
        """Whether a hint says all there is: PyTorch takes its word, too."""
        return self.is_causal and self.padding is None

    @property
    def is_masked(self) -> bool:
        return not self.is_causal_alone and (self.attn_mask is not None or self.padding is not None)


class WholeCall(NamedTuple):
    """A call of a layer: all arguments, the inputs among them, x and perhaps a memory, and what its attentions see."""

    arguments: tuple[Any, ...]
    inputs: tuple[Tensor, ...]
    attended: tuple[Attended, ...]

    @property
    def is_masked(self) -> bool:
        return any(one.is_masked for one in self.attended)

    @property
    def adds_mask(self) -> bool:
        """Whether a mask is of floats, which are added to the scores."""
        masks = (mask for one in self.attended if one.is_masked for mask in (one.attn_mask, one.padding))
        return any(mask is not None and mask.is_floating_point() for mask in masks)

    @property
    def form(self) -> Hashable:
        sizes = tuple(size for x in self.inputs for size in x.shape[:2])
        masks = tuple(mask for one in self.attended for mask in (one.attn_mask, one.padding))
        kinds = tuple(None if mask is None else (mask.shape, mask.dtype) for mask in masks)
        return sizes, kinds, tuple(one.is_causal for one in self.attended)


def why_parts(layer: nn.Module) -> str:
    """Why a layer is no single artifact as it is now; "" if it can be one. Asked in each call."""
    if (parts := _PARTS.get(type(layer))) is None:
        return f"it is a {type(layer).__name__}, which may compute something else"
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "hooks of all modules, which would not run"
    modules: dict[str, Any] = layer._modules
    for name, kind in parts.items():
        part = modules.get(name)
        if type(part) is not kind:
            return f"its {name} is a {type(part).__name__}"
        fields = vars(part)
        if fields["_forward_hooks"] or fields["_forward_pre_hooks"]:
            return f"its {name} has hooks, which would not run"
        if fields["training"]:
            return f"its {name} is in training mode"
        if "forward" in fields and not isinstance(fields["forward"], ReplacedForward):
            return f"its {name} has a forward of its own"
    return _why_attention(modules) or ("" if _activation(layer) else "an activation other than ReLU and GELU")


def _why_attention(modules: Mapping[str, Any]) -> str:
    """Why an artifact of a layer cannot have its attentions; "" if it can."""
    attentions = [modules[name] for name in ATTENTIONS if name in modules]
    first = attentions[0]
    for name, attention in zip(ATTENTIONS, attentions, strict=False):
        own = attention._parameters
        if own.get("in_proj_weight") is None or own.get("bias_k") is not None or attention.add_zero_attn:
            return f"its {name} has another form than the layer made it with"
        if (attention.num_heads, attention.batch_first) != (first.num_heads, first.batch_first):
            return f"its {name} has other heads, or another order of axes"
    return ""


def _activation(layer: nn.Module) -> Literal["relu", "gelu"] | None:
    function: Any = layer.activation
    if isinstance(function, nn.Module) and (function._forward_hooks or function._forward_pre_hooks):
        return None
    if function in (F.relu, torch.relu) or type(function) is nn.ReLU:
        return "relu"
    exact = type(function) is nn.GELU and function.approximate == "none"
    return "gelu" if function is F.gelu or exact else None


class WholeLayerForward(MeasuredForward[WholeLayerKind, Tensor, WholeCall]):
    """The forward of one of PyTorch's layers. A subclass knows the arguments, and what calls its parts."""

    def _by_parts(self, *arguments: Any) -> Tensor:
        """What the layer's parts give, attention replaced among them."""
        return self._by_pytorch(*arguments)

    def _alone(self, *arguments: Any) -> Tensor:
        """What PyTorch's own layer gives, with nothing replaced in it."""
        forward: Callable[..., Tensor] = self._class.forward
        return forward(_bare(self._layer), *arguments)

    def _why_not(self, call: WholeCall) -> str:
        if why := self._why_changed() or why_parts(self._layer) or _why_not_call(call):
            return why
        check_inference(self._layer, "src", *call.inputs, *(self._weights() if torch.is_grad_enabled() else ()))
        return ""

    def _may_go_unasked(self, call: WholeCall) -> bool:
        same = type(self._layer) is self._class
        return same and not (torch.is_grad_enabled() or self._layer.training or call.inputs[0].is_nested)

    def _sizes(self, call: WholeCall) -> tuple[int, int]:
        B, L = call.inputs[0].shape[:2]
        return (B, L) if self._layer.self_attn.batch_first else (L, B)

    def _why_wrong(self, call: WholeCall, kind: WholeLayerKind, result: Tensor) -> str:
        B, L = self._sizes(call)
        return self._first_calls.check((kind, B == 1, L == 1), [result], lambda: [self._alone(*call.arguments)])

    def _others(self, call: WholeCall) -> dict[LayerWay, Callable[[], Tensor]]:
        """PyTorch's own layer; the parts where its operator would take a mask of floats for a boolean one."""
        if call.adds_mask and isinstance(self._layer, nn.TransformerEncoderLayer):
            return {"parts": lambda: self._by_parts(*call.arguments)}
        if call.is_masked:
            return {"pytorch": lambda: self._alone_but_for_nan(call)}
        return {"pytorch": lambda: self._alone(*call.arguments)}

    def _alone_but_for_nan(self, call: WholeCall) -> Tensor:
        """What PyTorch's own layer gives; an artifact's result where that has NaN, as of queries that see no key."""
        y = self._alone(*call.arguments)
        with torch.no_grad():
            if not y.sum().isnan() or self._why_not(call):
                return y
            result = self._by_artifact(call)
        return y if isinstance(result, str) else result[0]

    def _by_artifact(self, call: WholeCall) -> tuple[Tensor, WholeLayerKind] | str:
        inputs = self._batch_first(call)
        masks = self._masks(call, inputs)
        kind = self._kind(tuple(mask for mask, _ in masks))
        compiled = self._compiled(kind)
        if isinstance(compiled, str):
            return compiled
        named = {"x": inputs[0]} | dict(zip(("memory",), inputs[1:], strict=False))
        named |= {name: mask for name, (_, mask) in zip(MASKS, masks, strict=False) if mask is not None}
        y: Tensor = compiled(**named)
        return y if self._layer.self_attn.batch_first else y.transpose(0, 1), kind

    def _batch_first(self, call: WholeCall) -> tuple[Tensor, ...]:
        if self._layer.self_attn.batch_first:
            return call.inputs
        return tuple(x.transpose(0, 1) for x in call.inputs)

    def _masks(self, call: WholeCall, inputs: tuple[Tensor, ...]) -> list[tuple[MaskKind, Tensor | None]]:
        """How the mask of each attention comes, and the mask. Raises InputError for one of another shape."""
        x, masks = inputs[0], list[tuple[MaskKind, Tensor | None]]()
        for number, one in enumerate(call.attended):
            if one.is_causal_alone:
                masks.append(("causal", None))
                continue
            full = (x.shape[0], self._layer.self_attn.num_heads, x.shape[1], inputs[number].shape[1])
            mask = join_masks(one.attn_mask, one.padding, full, x.dtype)
            masks.append(("none" if mask is None else "bool" if mask.dtype == torch.bool else "additive", mask))
        return masks

    def _kind(self, masks: tuple[MaskKind, ...]) -> WholeLayerKind:
        layer, attention = self._layer, self._layer.self_attn
        norms = [layer._modules[f"norm{number + 1}"] for number in range(len(masks) + 1)]
        return WholeLayerKind(
            D=attention.embed_dim,
            H=attention.num_heads,
            F=layer.linear1.out_features,
            activation=_activation(layer) or "relu",
            norm_first=bool(layer.norm_first),
            epsilons=tuple(norm.eps for norm in norms),
            weights=frozenset(name for name, weight in self._named_weights() if weight is not None),
            masks=masks,
        )

    def _weights(self) -> tuple[Tensor | None, ...]:
        return tuple(weight for _, weight in self._named_weights())

    def _named_weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Each weight that a layer of this class may have, and it as it is now; None where the layer lacks it."""
        modules: dict[str, Any] = self._layer._modules
        for name, part, inner, weight in _PLACES[self._class]:
            module = modules[part]._modules[inner] if inner else modules[part]
            yield name, getattr(module, "_parameters", {}).get(weight)

    def _why_unbound(self) -> str:
        """Why an artifact cannot have the layer's weights as they are now; "" if it can."""
        attentions = [part for part in self._layer._modules.values() if type(part) is nn.MultiheadAttention]
        for attention in attentions:
            if why := torch_attention.why_not_weights(attention):
                return why
        weights = dict(self._named_weights())
        unmasked: list[MaskKind] = ["none" for _ in attentions]
        for name, shape in self._kind(tuple(unmasked)).shapes().items():
            weight = weights[name]
            if type(weight) is not nn.Parameter or weight.dtype != torch.float32 or not weight.is_cpu:
                return f"its {name} is no parameter of float32 in CPU memory"
            if tuple(weight.shape) != shape:
                return f"its {name} is {tuple(weight.shape)}, not {shape}"
        lacking = [name for name, weight in weights.items() if weight is None and name.endswith("weight")]
        return f"it has no {lacking[0]}" if lacking else ""

    def _source(self, kind: WholeLayerKind) -> tuple[WholeLayerKind, dict[str, Tensor]]:
        return kind, {name: weight.detach() for name, weight in self._named_weights() if weight is not None}


def _why_not_call(call: WholeCall) -> str:
    """Why no artifact takes a call with these inputs; "" if one does."""
    masks = [mask for one in call.attended for mask in (one.attn_mask, one.padding)]
    if why := why_not_numbers(*call.inputs, *masks):
        return why
    if any(x.ndim != 3 or x.dtype != torch.float32 or not x.is_cpu or not x.numel() for x in call.inputs):
        return "inputs that are not sequences of float32, with a batch, in CPU memory"
    for attn_mask, padding, is_causal in call.attended:
        if is_causal and attn_mask is None:
            return "a hint that a mask is causal, without one"
        if any(
            mask is not None and mask.dtype != torch.bool and not mask.is_floating_point()
            for mask in (attn_mask, padding)
        ):
            return "a mask that is neither boolean nor of floats"
    return ""


def _places(parts: Mapping[str, type[nn.Module]]) -> tuple[tuple[str, str, str, str], ...]:
    """(name, part, module inside of it or "", weight there) of each weight that a layer of these parts may have."""
    places: list[tuple[str, str, str, str]] = []
    for part, kind in parts.items():
        if kind is nn.MultiheadAttention:
            places += [(f"{part}.{weight}", part, "", weight) for weight in ("in_proj_weight", "in_proj_bias")]
            places += [(f"{part}.out_proj.{weight}", part, "out_proj", weight) for weight in ("weight", "bias")]
        elif kind is not nn.Dropout:
            places += [(f"{part}.{weight}", part, "", weight) for weight in ("weight", "bias")]
    return tuple(places)


_PLACES = {kind: _places(parts) for kind, parts in _PARTS.items()}


def _bare(layer: nn.Module) -> nn.Module:
    """A look at a layer, and at its parts, without what replaces their forwards."""
    look = object.__new__(type(layer))
    fields = fields_of_its_own(layer)
    modules: dict[str, Any] = layer._modules
    is_ours = {name: isinstance(vars(part).get("forward"), ReplacedForward) for name, part in modules.items() if part}
    fields["_modules"] = {name: _bare(part) if is_ours.get(name) else part for name, part in modules.items()}
    vars(look).update(fields)
    return look
