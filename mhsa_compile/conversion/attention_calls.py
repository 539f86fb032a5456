"""What layers of transformers hand to attention while they run, whatever they call their weights.

A layer of transformers projects its input to queries, keys and values, turns them by their places, and then asks for
attention by a name in its config. Here that name leads to a function that notes all it is given and computes what the
layer's own file calls eager attention.

Notation: B batch, L query length, S key length, D embed, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mhsa_compile.conversion.visible_keys import bool_where_it_hides
from mhsa_compile.errors import InstallationError, ModelError

NAME = "mhsa_noted"
"""The attn_implementation under which calls are noted. It may hold neither "sdpa" nor "flash", which mean something."""
_WATCH = "_mhsa_watch"  # of a module that is watched, in its __dict__
_LOWEST = torch.finfo(torch.float32).min
"""What hides a key from eager attention; in float64, too: many a softmax is of float32 there."""
_SILENT = frozenset({
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "dropout", "encoder_hidden_states",
    "is_causal", "max_length_k", "max_length_q", "output_hidden_states", "position_bias", "position_ids", "return_dict",
    "s_aux", "scaling", "sinks", "sliding_window", "softcap", "use_cache",
})  # fmt: skip
"""Keywords that are read here, or that say nothing to attention over whole sequences."""


@dataclass(eq=False)
class LayerCall:
    """One call of attention by `module`, and what became of its result.

    x, context    what the module was called with, (B, L, D) and, in cross-attention, (B, S, kv_embed_dim)
    arguments     all it was called with, by the names of its forward
    q, k, v       what it handed to attention: (B, H, L, E), (B, G, S, E), (B, G, S, F)
    mask          bool (B or 1, H or 1, L, S), True takes part, or what is added; None: all keys are seen
    keywords      the others of the call
    weights       (B, H, L, S), by eager attention of the module's own file; heads, (B, L, H, F), their values
    projection    the module that took the heads' values, joined, and nothing else; y, (B, L, D), is its result
    """

    module: Any
    x: Tensor
    context: Tensor | None
    arguments: dict[str, Any]
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    keywords: dict[str, Any] = field(repr=False)
    weights: Tensor
    heads: Tensor
    projection: Any = None
    y: Tensor | None = None

    @property
    def is_causal(self) -> bool:
        """Whether the module calls itself causal."""
        return _says_causal(self.module, self.keywords)

    @property
    def window(self) -> int | None:
        """How many keys a query sees back, itself among them, by the word of the call; None is all."""
        window = self.keywords.get("sliding_window")
        return int(window) if isinstance(window, int) and window > 0 else None

    @property
    def scale(self) -> float:
        scaling = self.keywords.get("scaling")
        return float(self.q.shape[-1] ** -0.5 if scaling is None else scaling)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Parameters of the attention itself, by their names in a MultiHeadAttention."""
        logits = self.keywords.get("s_aux")
        logits = self.keywords.get("sinks") if logits is None else logits
        return {} if logits is None else {"sinks": logits.detach().reshape(-1)}

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of an AttentionSpec that keywords state."""
        cap = self.keywords.get("softcap")
        return {"softcap": None if cap is None else float(cap), "sinks": "sinks" in self.parameters}

    @property
    def unknown(self) -> list[str]:
        """Keywords that may change what attention means."""
        names = {name for name, value in self.keywords.items() if value is not None and value is not False}
        return sorted(names - _SILENT)


@contextmanager
def attention_calls(root: nn.Module) -> Iterator[list[LayerCall]]:
    """While it lasts, the calls of attention in `root`, in their order. Its config says another attention meanwhile.

    Raises InstallationError without transformers, version 5 or later.
    """
    _register()
    watch = _Watch()
    with ExitStack() as undo:
        for module in root.modules():
            vars(module)[_WATCH] = watch
            undo.callback(vars(module).pop, _WATCH, None)
            before = module.register_forward_pre_hook(watch.begins, with_kwargs=True)
            undo.callback(before.remove)
            undo.callback(module.register_forward_hook(watch.ends, with_kwargs=True, always_call=True).remove)
        for config in _configs(root):
            undo.callback(setattr, config, "_attn_implementation_internal", config._attn_implementation_internal)
            config._attn_implementation_internal = NAME
        yield watch.calls


class _Watch:
    """What is under way in one model: which module was called with what, and which result is on its way."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []
        self._arguments: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def begins(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._arguments[module] = args, keywords

    def ends(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        """The last module to end that was given the heads' values alone is the output projection: what wraps it ends
        after it, and a dropout in front of it before."""
        self._arguments.pop(module, None)
        call = self.calls[-1] if self.calls else None
        if call is None or keywords or len(args) != 1 or not all(isinstance(one, Tensor) for one in (*args, result)):
            return
        flat = call.heads.flatten(2)
        if args[0].shape == flat.shape and torch.equal(args[0], flat):
            call.projection, call.y = module, result.detach()

    def notes(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, words: Any) -> Any:
        if module not in self._arguments:
            raise refusal(module, "its forward was called in a way that no hook sees")
        args, keywords = self._arguments[module]
        arguments = bound(module, args, keywords)
        x = next(iter(arguments.values()), None)
        context = next((arguments[n] for n in CONTEXTS if isinstance(arguments.get(n), Tensor)), None)
        if not isinstance(x, Tensor) or x.ndim != 3:
            raise refusal(module, "the first that it is called with is no tensor (B, L, D)")
        if mask is None and _says_causal(module, words) and q.shape[2] > 1:  # as "sdpa" understands it
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
        mask = None if mask is None else mask[..., : k.shape[2]]
        heads, weights = _eager(module)(module, q, k, v, _bias_of(mask, q), **words)
        self.calls.append(
            LayerCall(
                module, x.detach(), None if context is None else context.detach(), arguments, q.detach(), k.detach(),
                v.detach(), bool_where_it_hides(mask), dict(words), weights.detach(), heads.detach(),
            )
        )  # fmt: skip
        return heads, weights


CONTEXTS = ("encoder_hidden_states", "key_value_states")
"""What modules call the second sequence of cross-attention."""


def refusal(module: nn.Module, why: str, argument: str = "layer") -> ModelError:
    """The error for a layer that means something else than an AttentionSpec can say."""
    hint = "mhsa.compile takes any nn.Module, with example_inputs; its heads are not looked into then."
    return ModelError(argument, "attention that an AttentionSpec can say", f"a {type(module).__name__}: {why}", hint)


def bound(module: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the module's forward."""
    parameters = inspect.signature(module.forward).parameters.values()
    arguments = inspect.signature(module.forward).bind(*args, **keywords).arguments
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(parameter.name, {})
    return arguments


def _register() -> None:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise InstallationError("transformers", "version 5 or later", str(error), "pip install transformers") from error
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, partial(_whole_mask, sdpa_mask))


def _whole_mask(mask: Any, *args: Any, **keywords: Any) -> Any:
    """The mask, bool, also where it hides nothing or is causal alone: a mask of None may mean either."""
    return mask(*args, **(keywords | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}))


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> Any:
    """What modules call: query (B, H, L, E), key (B, G, S, E), value (B, G, S, F)."""
    watch = vars(module).get(_WATCH)
    if not isinstance(watch, _Watch):
        why = f'its config says attn_implementation="{NAME}", which nothing outside of this process has'
        raise refusal(module, why)
    return watch.notes(module, query, key, value, attention_mask, options)


def _eager(module: nn.Module) -> Any:
    """Eager attention of the file that defines the module's class, or a class that it derives from."""
    for kind in type(module).__mro__:
        if function := getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None):
            return function
    raise refusal(module, "the file of its class has no eager_attention_forward, to hold ours against")


def _bias_of(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask as eager attention takes it."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, max(torch.finfo(like.dtype).min, _LOWEST))


def _says_causal(module: Any, options: Mapping[str, Any]) -> bool:
    causal = options.get("is_causal")
    return bool(getattr(module, "is_causal", False) if causal is None else causal)


def _configs(root: nn.Module) -> list[Any]:
    """Every config in the model, with those in them, once."""
    configs: dict[int, Any] = {}
    waiting = [getattr(module, "config", None) for module in root.modules()]
    while waiting:
        config = waiting.pop()
        if hasattr(config, "_attn_implementation_internal") and id(config) not in configs:
            configs[id(config)] = config
            waiting += [getattr(config, key, None) for key in getattr(config, "sub_configs", ())]
    return list(configs.values())
