"""The flags that state a spec: one for each field of AttentionSpec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import typer

from mhsa_compile.cli.common.option_groups import OPTION
from mhsa_compile.errors import SpecError
from mhsa_compile.spec.mask_patterns import parse_pattern
from mhsa_compile.spec.outputs import split_words
from mhsa_compile.spec.position_encoding import parse_rope

_PARSE = "parse"


def _flag(help: str, *names: str, parse: Callable[[str], Any] | None = None) -> Any:
    """The field of a flag, which is named after it, a bool with its --no- form, unless it has names of its own.

    parse  how its text becomes what AttentionSpec takes, where that is not the text
    """
    option = typer.Option(None, *names, help=help, rich_help_panel="The spec, instead of SOURCE", show_default=False)
    return field(default=None, metadata={OPTION: option, _PARSE: parse})


def _causal(text: str) -> str | bool:
    return True if text == "true" else text


def _window(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise SpecError("--window", "LEFT,RIGHT, such as 256,0", repr(text)) from None


_ROPE = "Rotary positions: default, or such as theta=500000,scaling=llama3,factor=8,original_max_length=8192."
_OUTPUTS = (
    "What a call returns, such as y,lse,entropy,top_k:5,weights:heads=0,3,rows=0,-1; y if not given. Of an .onnx "
    "SOURCE beside its own outputs: of every layer (weights), or of one (weights@3)."
)


@dataclass(frozen=True, kw_only=True)
class SpecFlags:
    """The fields of AttentionSpec as a command line states them, in the order of `--help`; None was not stated."""

    embed_dim: int | None = _flag("D, the width of the activations.")
    num_heads: int | None = _flag("H, query heads.")
    num_kv_heads: int | None = _flag("G, key and value heads; H if not given.")
    head_dim: int | None = _flag("E, the width of a query or key head; D / H if not given.")
    v_head_dim: int | None = _flag("F, the width of a value head; E if not given.")
    kv_embed_dim: int | None = _flag("Cross-attention: the width of the second input.")
    v_embed_dim: int | None = _flag("The width of a third input, of values; the second is then of keys alone.")
    bias: bool | None = _flag("Biases of the four projections.")
    causal: Literal["true", "top_left", "bottom_right"] | None = _flag("Which keys a query sees.", parse=_causal)
    window: str | None = _flag(
        "LEFT,RIGHT: the keys a query sees on each side of itself; -1 is unbounded.", parse=_window
    )
    static_mask: str | None = _flag(
        "A constant mask, such as longformer:window=256,global_tokens=1.", parse=parse_pattern
    )
    mask: Literal["bool", "additive", "key_padding"] | None = _flag("The mask a call takes.")
    scale: float | None = _flag("Factor of the scores; 1 / sqrt(E) if not given.")
    softcap: float | None = _flag("c: scores become c * tanh(score / c).")
    rope: str | None = _flag(_ROPE, parse=parse_rope)
    alibi: bool | None = _flag("A bias that falls with the distance, a slope for each head.", "--alibi")
    sinks: bool | None = _flag("One more learned score for each head, of no value.", "--sinks")
    kv_cache: bool | None = _flag("Keys and values go into a cache; needs --causal true.", "--kv-cache")
    outputs: str | None = _flag(_OUTPUTS, parse=split_words)
    dtype: Literal["float32", "bfloat16", "float16"] | None = _flag("Of activations and weights.")

    def stated(self) -> dict[str, Any]:
        """What AttentionSpec takes of the flags that were stated. Raises SpecError.

        An empty text stays one, for the spec to refuse.
        """
        stated = {}
        for flag in fields(self):
            value, parse = getattr(self, flag.name), flag.metadata[_PARSE]
            if value is not None:
                stated[flag.name] = parse(value) if parse and value else value
        return stated
