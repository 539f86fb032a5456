"""MultiHeadAttention from layers of transformers, whatever their family; the weights are copied.

The layer is run, with what it hands to attention noted. From input to queries, keys and values, and from the heads to
the result, it has to be linear, and its matrices are read off; between them it has to do what an AttentionSpec says.
Both are checked on what it computes itself, and where they do not hold the layer is refused.

Notation: B batch, L query length, S key length, D embed, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from mhsa_compile.conversion.attention_calls import CONTEXTS, LayerCall, attention_calls, refusal
from mhsa_compile.conversion.from_torch import dtype_of
from mhsa_compile.conversion.layer_calls import LayerCalls
from mhsa_compile.conversion.rotary import tables_by_its_file
from mhsa_compile.errors import MhsaError, ModelError
from mhsa_compile.files.foreign_errors import first_line
from mhsa_compile.nn.modules import MultiHeadAttention

_LENGTHS = (7, 5)  # of the sequences, and of the context, that a layer is tried on
_BATCH = 2


def from_transformers(
    layer: nn.Module,
    *,
    mask: str | None = None,
    kv_cache: bool | Mapping[str, str] = False,
    max_length: int | None = None,
    window: Sequence[int] | None = None,
    outputs: Sequence[str] = ("y",),
) -> MultiHeadAttention:
    """The attention of a layer of transformers at inference, of any family that asks for its attention by name.

    layer        the attention module of BERT, GPT-2, ViT, T5, Whisper, Llama, Gemma 2, ...: what projects its input,
                 and what comes out of its heads. What follows the output projection (residual, norm) stays outside
    mask         what calls take as `mask=`: see AttentionSpec. T5's bias by distance is such a mask: "additive"
    kv_cache     whether calls write into a cache, or how it stores keys and values, as in AttentionSpec
    max_length   positions of rotary tables; by default the config's max_position_embeddings
    window       (left, right), of a layer that does not say it itself
    outputs      what a call returns: see AttentionSpec

    A layer that calls itself causal becomes causal, one for cross-attention takes `context`. Positions are 0, 1, ...
    (behind the cache's), as in one sequence without padding.

    Raises ModelError for what means something else: norms of queries and keys (Qwen 3), attention that is computed
    without asking (DeBERTa, BLOOM), a bias that the model hands down, and what else its own result shows.

    >>> from transformers.models.gpt2 import modeling_gpt2
    >>> config = modeling_gpt2.GPT2Config(n_embd=64, n_head=4)
    >>> from_transformers(modeling_gpt2.GPT2Attention(config)).spec.causal
    'top_left'
    """
    if not isinstance(layer, nn.Module) or not _files(layer, "transformers."):
        hint = "mhsa.from_torch takes an nn.MultiheadAttention; mhsa.compile any nn.Module, with example_inputs."
        raise ModelError("layer", "an attention module of transformers", type(layer).__name__, hint)
    dtypes = {dtype_of(parameter) for parameter in layer.parameters() if parameter.is_floating_point()}
    if len(dtypes) != 1:
        got = ", ".join(sorted(dtypes)) or "none"
        raise ModelError("layer", "weights of one dtype", got, "Call layer.float() first.")
    if not asks_by_name(layer):
        raise refusal(layer, "it computes attention itself, and asks for none by name")
    call = _trial_call(layer)
    layer_calls = LayerCalls([call], dtypes.pop())
    window = None if window is None else tuple(window)
    attention = layer_calls.attention(max_length=max_length, window=window, states_mask=True)
    _check_mask(call, mask)
    causal = "bottom_right" if kv_cache and attention.spec.causal else attention.spec.causal
    spec = msgspec.structs.replace(attention.spec, causal=causal, mask=mask, kv_cache=kv_cache, outputs=tuple(outputs))
    result = MultiHeadAttention(spec)
    result.load_state_dict(attention.state_dict())
    return result.eval()


def from_bert(
    layer: nn.Module, *, mask: str | None = "key_padding", outputs: Sequence[str] = ("y",)
) -> MultiHeadAttention:
    """`from_transformers` for encoders: calls take a mask of what is padding.

    The result ends with `layer.output.dense`: dropout, residual and LayerNorm stay outside. Raises ModelError, among
    others for a bare BertSelfAttention: the output projection is not in it.

    >>> from transformers.models.bert import modeling_bert
    >>> config = modeling_bert.BertConfig(hidden_size=64, num_attention_heads=4)
    >>> from_bert(modeling_bert.BertAttention(config)).spec.head_dim
    16
    """
    return from_transformers(layer, mask=mask, outputs=outputs)


def from_llama(
    layer: nn.Module,
    *,
    kv_cache: bool | Mapping[str, str] = False,
    max_length: int | None = None,
    window: tuple[int, int] | None = None,
    outputs: Sequence[str] = ("y",),
) -> MultiHeadAttention:
    """`from_transformers` for decoders: calls take no mask, and may write into a cache.

    >>> from transformers.models.llama import modeling_llama
    >>> config = modeling_llama.LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    >>> from_llama(modeling_llama.LlamaAttention(config, layer_idx=0), kv_cache=True).spec.num_kv_heads
    2
    """
    return from_transformers(layer, kv_cache=kv_cache, max_length=max_length, window=window, outputs=outputs)


def asks_by_name(model: nn.Module) -> bool:
    """Whether the file of some module's class knows transformers' table of attentions."""
    return any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in _files(model, ""))


def _files(model: nn.Module, prefix: str) -> list[Any]:
    """The Python modules, of names that begin so, in which the classes of the model's modules are defined."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    names = {kind.__module__ for kind in kinds if kind.__module__.startswith(prefix)}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


def _trial_call(layer: nn.Module) -> LayerCall:
    """The call of attention that a copy of `layer`, in float64, makes on random numbers. Raises ModelError."""
    try:
        with torch.no_grad():
            exact = copy.deepcopy(layer).double().eval()
            with attention_calls(exact) as calls:
                exact(**_arguments(exact))
    except MhsaError:
        raise
    except Exception as error:  # of anybody's forward
        raise refusal(layer, f"it cannot be tried on random numbers: {first_line(error)}") from error
    if len(calls) != 1:
        raise refusal(layer, f"it asks for attention {len(calls)} times in a call")
    if calls[0].projection is None:
        hint = "Pass the module around it, such as BertAttention: the output projection is in that."
        got = f"a {type(layer).__name__}, from which the heads come as they are, or by another way"
        raise ModelError("layer", "an attention module with its output projection", got, hint)
    return calls[0]


def _arguments(layer: Any) -> dict[str, Any]:
    """Random numbers for what its forward asks for. Raises ModelError."""
    parameters = inspect.signature(layer.forward).parameters
    width = _width(layer)
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(_BATCH, _LENGTHS[0], width, generator=numbers, dtype=torch.float64)
    arguments: dict[str, Any] = {next(iter(parameters), "hidden_states"): x}
    if any(getattr(module, "is_cross_attention", False) for module in layer.modules()):
        name = next((one for one in CONTEXTS if one in parameters), None)
        if name is None:
            raise refusal(layer, f"it is for cross-attention, and takes none of {', '.join(CONTEXTS)}")
        source = _width(layer, "k")
        arguments[name] = torch.randn(_BATCH, _LENGTHS[1], source, generator=numbers, dtype=torch.float64)
    if "position_embeddings" in parameters:
        arguments["position_embeddings"] = tables_by_its_file(layer, x)
    for name, parameter in list(parameters.items())[1:]:
        variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and not variadic:
            arguments.setdefault(name, None)
    return arguments


def _width(layer: nn.Module, projection: str = "q") -> int:
    """How wide the input is: that of the first weights with two axes, or of the keys'."""
    for name, module in layer.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2 or isinstance(module, nn.Embedding):
            continue
        if projection == "k" and not name.rpartition(".")[2].startswith(("k", "c_attn")):
            continue
        return weight.shape[0] if type(module).__name__ == "Conv1D" else weight.shape[1]
    raise refusal(layer, "it has no weights with two axes")


def _check_mask(call: LayerCall, mask: str | None) -> None:
    """Raises ModelError where the model adds to the scores, and calls have no way to say it."""
    if call.keywords.get("position_bias") is not None and mask != "additive":
        hint = 'Give mask="additive", and call it with the bias as the mask.'
        got = f"a {type(call.module).__name__}, which adds a bias by distance to the scores, and mask={mask!r}"
        raise ModelError("mask", '"additive"', got, hint)
