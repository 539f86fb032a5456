"""How linears store their weights and what they multiply: the words of `weights`.

word                      what is stored, and computed
int8                      weights as they are; eight bits, a scale for each output, made when they are bound, times
                          activations of eight bits, a scale for each row
int4                      four bits, a scale for each block of 32 terms, times activations of eight bits, a scale
                          for each block
int4:block=128            other blocks: 16, 32, 64, 128 or 256 terms
int4:zeros                a zero point for each block, too: nearer to weights that lie on one side of 0
int4:zeros=float          a zero point that is no whole number, as Q4_K of llama.cpp has; activations as they are
int4:activations=float    activations as they are: exact in what is stored, and slower
int8:block=32             eight bits by blocks, stored as four are; the same words
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from mhsa_compile.errors import InputError, did_you_mean

BLOCKS = (16, 32, 64, 128, 256)
_EXAMPLES = 'None, "int8", "int4", "int8:block=32", or "int4:block=64,zeros,activations=float"'
_OPTIONS = "block=32, zeros, zeros=float or activations=float"
ZeroKind = Literal["", "bytes", "floats"]


@dataclass(frozen=True)
class BlockForm:
    """Weights of `bits` bits by blocks of `block` terms, times x in eight bits or as it is.

    `zeros` of the blocks are whole numbers ("bytes"), "floats", or all the middle (""), 2^(bits - 1).
    """

    bits: Literal[4, 8] = 4
    block: int = 32
    zeros: ZeroKind = ""
    rounds_x: bool = True

    def __str__(self) -> str:
        """The word of `weights` that asks for this form."""
        zeros = {"": [], "bytes": ["zeros"], "floats": ["zeros=float"]}[self.zeros]
        options = [f"block={self.block}", *zeros, *["activations=float"] * (not self.rounds_x)]
        return f"int{self.bits}:{','.join(options)}"


def is_int8(word: str | None) -> bool:
    """Whether a word asks for eight bits by outputs. Raises InputError for one that is none."""
    return word is not None and _kind(word) == "int8"


def block_form(word: str | None) -> BlockForm | None:
    """What a word asks for, if it is weights by blocks. Raises InputError for one that is none."""
    if word is None or _kind(word) == "int8":
        return None
    kind, _, options = word.partition(":")
    block, zeros, activations = 32, "", ""
    for option in options.split(",") if options else ():
        if match := re.fullmatch(r"block=(\d+)", option):
            block = int(match[1])
        elif option in ("zeros", "zeros=float"):
            zeros = "floats" if option.endswith("float") else "bytes"
        elif option in ("activations=float", "activations=int8"):
            activations = option
        else:
            raise InputError("weights", f"{_OPTIONS} behind {kind}:", repr(word))
    if block not in BLOCKS:
        raise InputError("weights", f"blocks of {', '.join(map(str, BLOCKS))} terms", repr(word))
    if zeros == "floats" and activations == "activations=int8":
        raise InputError("weights", "activations=float with zeros=float, as ONNX Runtime has it", repr(word))
    rounds_x = activations != "activations=float" and zeros != "floats"
    return BlockForm(4 if kind == "int4" else 8, block, zeros, rounds_x)  # type: ignore[arg-type]


def _kind(word: object) -> str:
    """ "int8", "int4", or "int8:" of eight bits by blocks."""
    kind, colon, _ = word.partition(":") if isinstance(word, str) else ("", "", "")
    if kind not in ("int4", "int8"):
        raise InputError("weights", _EXAMPLES, repr(word), did_you_mean(kind, ("int4", "int8")))
    return kind + colon * (kind == "int8")
