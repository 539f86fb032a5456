"""Attention of Hugging Face's transformers on compiled artifacts: `attn_implementation="mhsa"`.

    from mhsa_compile.integrations import transformers as mhsa_transformers

    mhsa_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="mhsa")   # or
    model.set_attn_implementation("mhsa")

Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mhsa_compile.errors import InputError, InstallationError
from mhsa_compile.hardware.profile import TargetProfile, load_profile
from mhsa_compile.integrations import attention_operator
from mhsa_compile.integrations.call_context import (
    is_recorded,
    is_traced,
    no_gradient,
    wants_gradient,
    why_not_a_call,
    why_watched,
)
from mhsa_compile.integrations.call_table import IMPLEMENTATION, TABLES, CallTable
from mhsa_compile.integrations.layers.state import CAPTURES
from mhsa_compile.spec.float32_products import Float32Request, float32_request

HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",  # of another library's kernel: ours is
        "encoder_attention_mask",
        "encoder_hidden_states",
        "input_ids",
        "inputs_embeds",
        "labels",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "token_type_ids",
        "use_cache",
    }
)
"""Keywords that models hand down to attention and that say nothing to it."""


def register(
    target: str | TargetProfile = "native", *, check: bool = True, float32_products: Float32Request = "auto"
) -> None:
    """Makes "mhsa" an attention implementation of transformers, in this process.

    target   what to compile for: a name, a path of a profile, or a TargetProfile
    check    whether the first call of a kind is held against PyTorch's arithmetic: where it differs by more than
             rounding, PyTorch computes such calls from then on, and a warning says so
    float32_products  how attention of float32 multiplies, as in `compile`

    The first call of a kind (heads, head dims, dtype, scale, mask or none, ...) compiles it, which takes seconds; no
    batch and no length compiles anything. Raises TargetError, InputError, and InstallationError without transformers.
    """
    _register(IMPLEMENTATION, load_profile(target), check, float32_request(float32_products))


def _register(name: str, profile: TargetProfile, check: bool, word: Float32Request) -> None:
    """Makes `name` an attention implementation. Raises InstallationError without transformers."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise InstallationError("transformers", "version 5 or later", str(error), "pip install transformers") from error
    TABLES.setdefault(name, CallTable()).use(profile, check=check, float32_products=word)
    attention_operator.define()
    AttentionInterface.register(name, partial(attention_forward, implementation=name))
    AttentionMaskInterface.register(name, sdpa_mask)  # bool (B, 1, L, S), or None where `attention_forward` knows


class Registration:
    """An attention implementation of its own for what one model asked, which `register` and other models leave as it
    is: a copy that is unpickled in another process finds it there, by the same name."""

    def __init__(self, target: TargetProfile, check: bool, float32_products: Float32Request) -> None:
        self._arguments = target, check, float32_products
        words = "\n".join((target.to_toml(), str(check), float32_products))
        self.name = f"{IMPLEMENTATION}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"
        _register(self.name, *self._arguments)

    @property
    def table(self) -> CallTable:
        return TABLES[self.name]

    def __reduce__(self) -> Any:
        return type(self), self._arguments


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    implementation: str = IMPLEMENTATION,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers' attention layers call: query (B, H, L, E), key (B, G, S, E), value (B, G, S, F) ->
    (y (B, L, H, F), None).

    attention_mask  bool (True takes part) or added to the scores, broadcastable to (B, H, L, S); None: `module` or
                    `is_causal` says whether query i sees key j only if j <= i
    position_bias   added to the scores, broadcastable to (B, H, L, S)
    s_aux           (H,): for each head one more score of the softmax, of no value
    implementation  the name that is registered

    Under torch.autocast queries, keys and values become its dtype, as for PyTorch's attention. Calls of other dtypes,
    under vmap, for derivatives of torch.func or forward ones, and under modes that watch PyTorch's operators are
    PyTorch's, with a warning. Raises InputError for what compiled attention has no meaning for: dropout, gradients,
    attention weights, paged caches, and keywords that are not known.
    """
    s_aux = others.pop("sinks", None) if s_aux is None else s_aux
    _check_keywords(others, dropout)
    query, key, value = _as_autocast_has_them(query, key, value)
    why = "" if is_recorded() else _why_pytorch(query)
    if why:
        warnings.warn(f'attention "{IMPLEMENTATION}": PyTorch computes calls with {why}', stacklevel=2)
        rest = (softcap, s_aux, position_bias, sliding_window if attention_mask is None else None)
        if all(value is None for value in rest):
            return _by_pytorch(module, query, key, value, attention_mask, scaling, is_causal)
    traced = is_traced(query)
    _check_query(query, why, traced=traced)
    exported = traced and torch.compiler.is_exporting()
    if not exported and wants_gradient(query, key, value, s_aux, position_bias):
        raise no_gradient("query")
    is_causal_here = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if attention_mask is None:
        _check_unmasked(is_causal_here, sliding_window, query, key)
    causal = bool(is_causal_here) and attention_mask is None
    mask = _join(attention_mask, position_bias, query)
    sinks = None if s_aux is None else s_aux.detach().reshape(-1).to(query.dtype)
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    operands = attention_operator.Operands(query, key, value, mask, sinks, scale, float(softcap or 0.0), causal)
    if why:
        return attention_operator.by_pytorch(operands), None
    call = torch.ops.mhsa.attention if traced else attention_operator.attend
    kind = (bool(is_causal_here), sliding_window is not None)
    return call(*operands, *kind, IMPLEMENTATION if exported else implementation), None


def _check_query(query: Tensor, why: str, *, traced: bool) -> None:
    """Raises InputError for no plain numbers where PyTorch's own attention has no word for what is asked (`why` says
    what PyTorch is to compute), and for a tensor of which this process has a part."""
    if why and why_not_a_call():
        hint = 'Set attn_implementation="eager" for such calls.'
        raise InputError("query", "plain numbers, where there are softcaps, sinks, biases or windows", why, hint)
    if traced and not torch.compiler.is_compiling() and hasattr(query, "full_tensor"):
        hint = 'Let each process have its own heads as plain tensors, or set attn_implementation="sdpa".'
        raise InputError("query", "a tensor in this process's memory", f"a {type(query).__name__}, sharded", hint)


def _as_autocast_has_them(*operands: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values as torch.autocast hands them to PyTorch's attention, where it is on: float64 stays."""
    kind = operands[0].device.type
    if kind != "cpu" or not torch.is_autocast_enabled(kind):
        return operands
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in operands)


def _why_pytorch(query: Tensor) -> str:
    """Why PyTorch is to compute a call; "" if an artifact can."""
    if why := why_not_a_call():
        return why
    if query.dtype not in _DTYPES:
        return f"queries of {query.dtype}"
    if not query.is_cpu:
        return f"queries on {query.device}"
    return "" if is_traced(query) else why_watched()


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _by_pytorch(module: nn.Module, *arguments: Any) -> tuple[Tensor, None]:
    """A call as attn_implementation="sdpa" has it."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    query, key, value, mask, scaling, is_causal = arguments
    result: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, mask, scaling=scaling, is_causal=is_causal
    )
    return result


def _no_weights() -> InputError:
    hint = 'Set attn_implementation="eager" to look at them.'
    return InputError("output_attentions", "False: the weights are never held", "True", hint)


def _collects_weights() -> bool:
    """Whether transformers collects weights of attention by hooks, of which models such as OPT tell it nothing."""
    library: Any = sys.modules.get(CAPTURES)
    collected = None if library is None or is_recorded() else library._active_collector.get()
    return any(name.endswith("attentions") for name in collected or ())


def _check_keywords(others: dict[str, Any], dropout: float) -> None:
    """Raises InputError for a keyword that is not known to say nothing."""
    if _collects_weights():
        raise _no_weights()
    if dropout:
        other = f'model.set_attn_implementation("sdpa"), not "{IMPLEMENTATION}"'
        hint = f"Call model.eval(), or train with another attention: {other}."
        raise InputError("dropout", "0: compiled attention is for inference", str(dropout), hint)
    for name, value in others.items():
        if name in HARMLESS or value is None or value is False:
            continue
        if name == "output_attentions":
            raise _no_weights()
        if name == "cache":
            hint = 'Set attn_implementation="sdpa" for continuous batching.'
            raise InputError(name, "none: keys and values in tensors", type(value).__name__, hint)
        hint = 'It may change what attention means. Set attn_implementation="sdpa" or "eager" for this model.'
        raise InputError(f"keyword {name!r}", "keywords that mhsa knows", type(value).__name__, hint)


def _check_unmasked(causal: bool | None, window: Any, query: Tensor, key: Tensor) -> None:
    """Raises InputError for a call without a mask: of several queries, where nobody says whether they are causal; of
    any, where a window hides a key."""
    if causal is None and query.shape[2] > 1:
        hint = 'Set attn_implementation="eager": nothing tells causal attention from full attention here.'
        raise InputError("is_causal", "it in the call or in the module, where there is no mask", "neither", hint)
    if isinstance(window, int) and window > 0 and key.shape[2] > window:
        expected = f"a mask, as {key.shape[2]} keys are more than the window of {window}"
        raise InputError("attention_mask", expected, "None", "Let the model make its masks: pass none with four axes.")


def _join(mask: Tensor | None, bias: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask and a bias as one mask. Raises InputError for a mask of whole numbers."""
    if mask is not None and mask.dtype != torch.bool:
        if not mask.is_floating_point():
            hint = "Convert it: mask.bool()."
            raise InputError("attention_mask", "bool, or floating point that is added", str(mask.dtype), hint)
        mask = mask.to(query.dtype)  # what is too large for it becomes -inf, and hides as it did
    if bias is None:
        return mask
    bias = bias.to(query.dtype)
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, -torch.inf)
    return bias + mask
