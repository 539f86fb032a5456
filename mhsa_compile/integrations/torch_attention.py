"""nn.MultiheadAttention on compiled artifacts: the layer stays, its forward is another.

Notation: B batch, L query length, S key length, D embed, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from mhsa_compile.conversion.from_torch import from_torch, join_masks
from mhsa_compile.errors import ModelError
from mhsa_compile.integrations.call_context import check_inference, why_not_numbers
from mhsa_compile.integrations.weight_state import ReplacedForward
from mhsa_compile.nn.modules import MultiHeadAttention, weights


class CallKind(NamedTuple):
    """What of a call, and of its layer, decides on its artifact. `inputs`: 1 where query, key and value are one tensor,
    2 where the last two are, else 3."""

    heads: int
    inputs: int
    mask: str | None
    causal: bool
    need_weights: bool


_OWN = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v")
"""The parameters that a layer may have, beside those of its out_proj."""


def why_not(layer: nn.MultiheadAttention) -> str:
    """Why a layer cannot be replaced; "" if it can."""
    if type(layer) is not nn.MultiheadAttention:
        return "it is a subclass of nn.MultiheadAttention, which may compute something else"
    if "forward" in vars(layer):
        return "it has a forward of its own"
    if hooks := [
        name
        for name, registered_hooks in vars(layer).items()
        if name.endswith("_hooks") and "state" not in name and registered_hooks
    ]:
        return f"it has hooks ({hooks[0].strip('_')})"
    if vars(layer.out_proj)["_forward_pre_hooks"] or vars(layer.out_proj)["_forward_hooks"]:
        return "its out_proj has hooks, which would not run"
    return why_not_weights(layer)


def why_not_weights(layer: nn.MultiheadAttention) -> str:
    """Why no artifact can have a layer's weights as they are now; "" if one can."""
    if type(layer.out_proj) is not nn.modules.linear.NonDynamicallyQuantizableLinear:
        return f"its out_proj is a {type(layer.out_proj).__name__}: it is quantised, or was replaced"
    parameters = dict(layer.named_parameters())
    for name, parameter in parameters.items():
        if type(parameter) is not nn.Parameter:
            return f"{name} is a {type(parameter).__name__}"
        if parameter.is_meta:
            return "it has no weights yet: they are on the meta device"
        if parameter.device.type != "cpu":
            return f"{name} is on {parameter.device}: artifacts for a CPU read its memory"
    if names := [
        name for name, shape in _shapes(layer).items() if getattr(parameters.get(name), "shape", None) != shape
    ]:
        return f"{names[0]} is no whole parameter of its own: it is sharded, or computed elsewhere"
    try:
        from_torch(layer)
    except ModelError as error:
        return f"expected {error.expected}, got {error.got}"
    return ""


def _shapes(layer: nn.MultiheadAttention) -> dict[str, tuple[int, ...]]:
    """The shapes of its matrices, as it made them."""
    D, separate = layer.embed_dim, {"q": layer.embed_dim, "k": layer.kdim, "v": layer.vdim}
    if layer._qkv_same_embed_dim:
        return {"in_proj_weight": (3 * D, D), "out_proj.weight": (D, D)}
    return {f"{name}_proj_weight": (D, size) for name, size in separate.items()} | {"out_proj.weight": (D, D)}


class LayerForward(ReplacedForward[CallKind, tuple[Tensor, Tensor | None]]):
    """The forward of one layer."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes what `nn.MultiheadAttention.forward` does, but that a query which sees no key gets zeros before the
        output projection, not NaN. Raises InputError in training and where a gradient is wanted."""
        arguments = (query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        if self._is_pytorchs():  # what PyTorch does is as right
            return self._by_pytorch(*arguments)
        why = self._why_not(*arguments)
        if not why:
            check_inference(self._layer, "query", query, key, value, attn_mask, *self._weights())
            result = self._compute(*arguments)
            why = result if isinstance(result, str) else self._why_not_result(result, arguments)
            if not why and not isinstance(result, str):
                return result
        return self._by_pytorch(*arguments, why=why)

    def _why_not_result(self, result: tuple[Tensor, Tensor | None], arguments: tuple[Any, ...]) -> str:
        """Why a result is not to be had; "" if it may, as far as the first call of its kind tells."""
        query, key, value, padding, _, mask, *_ = arguments
        single = [size == 1 for x in (query, key) for size in x.shape[:-1]]
        kind = (key is query, value is key, padding is None, mask is None, *arguments[4:8:3], *single)
        ours = [tensor for tensor in result if tensor is not None]

        def theirs() -> list[Tensor]:
            return [tensor for tensor in self._by_pytorch(*arguments) if tensor is not None]

        return self._first_calls.check(kind, ours, theirs)

    def _weights(self) -> tuple[Tensor | None, ...]:
        own, projection = self._layer._parameters, self._layer._modules["out_proj"]
        outer = {} if projection is None else projection._parameters
        return (*map(own.get, _OWN), *map(outer.get, ("weight", "bias")))

    def _why_unbound(self) -> str:
        """Why an artifact cannot have the layer's weights as they are now; "" if it can."""
        why = why_not_weights(self._layer)
        return why and f"weights that it has no form for: {why}"

    def _why_not(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        _: bool,
        mask: Tensor | None,
        *rest: bool,
    ) -> str:
        if why := self._why_changed():
            return why
        if self._layer.add_zero_attn:
            return "add_zero_attn, which became true"
        if why := why_not_numbers(query, key, value, padding, mask):
            return why
        if (query.ndim, key.ndim, value.ndim) not in ((3, 3, 3), (2, 2, 2)):
            return "a rank that it refuses"
        dtype = getattr(self._weights()[-2], "dtype", None)
        for x in (query, key, value):
            if x.dtype != dtype or not x.is_cpu:
                return f"inputs that are not {dtype} in CPU memory"
        if rest[-1] and mask is None:
            return "is_causal without attn_mask, which it refuses"
        for m in (padding, mask):
            if m is not None and m.dtype != torch.bool and not m.is_floating_point():
                return "a mask that it refuses"
        return ""

    def _compute(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None] | str:
        """The results; or why no artifact can have the layer's weights."""
        layer = self._layer
        apart = key is not value or layer.kdim != layer.vdim
        inputs = [query, key, value] if apart else [query, key] if query is not key else [query]
        batched = query.ndim == 3
        if not batched:
            inputs = [x.unsqueeze(0) for x in inputs]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not layer.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        causal = is_causal and key_padding_mask is None and not need_weights  # then PyTorch takes the hint's word, too
        keys = inputs[1] if len(inputs) > 1 else inputs[0]
        full = (inputs[0].shape[0], layer.num_heads, inputs[0].shape[1], keys.shape[1])
        mask = join_masks(None if causal else attn_mask, key_padding_mask, full, query.dtype)
        kind = None if mask is None else "bool" if mask.dtype == torch.bool else "additive"
        compiled = self._compiled(CallKind(layer.num_heads, len(inputs), kind, causal, need_weights))
        if isinstance(compiled, str):
            return compiled
        results: Any = compiled(*inputs, *([] if mask is None else [mask]))
        y: Tensor = results.y if need_weights else results
        weights: Tensor | None = results.weights if need_weights else None
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y if layer.batch_first else y.transpose(0, 1), weights

    def _source(self, kind: CallKind) -> tuple[MultiHeadAttention, Mapping[str, Any]]:
        module = self._module(kind)
        return module, weights(module)

    def _module(self, kind: CallKind) -> MultiHeadAttention:
        causal = "top_left" if kind.causal else None
        cross, apart = kind.inputs > 1, kind.inputs == 3
        plain = from_torch(self._layer, cross=cross, separate_values=apart, mask=kind.mask, causal=causal)
        if not kind.need_weights:
            return plain
        module = MultiHeadAttention(msgspec.structs.replace(plain.spec, outputs=("y", "weights"))).eval()
        module.load_state_dict(plain.state_dict())
        return module
