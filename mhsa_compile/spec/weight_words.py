"""How linears store their weights and what they multiply: the words of `weights`.

word                      what is stored, and computed
int8                      weights as they are; eight bits, a scale for each output, made when they are bound, times
                          activations of eight bits, a scale for each row
int4                      four bits, a scale for each block of 32 terms, times activations of eight bits, a scale
                          for each block
int4:block=128            other blocks: 16, 32, 64, 128 or 256 terms
int4:zeros                a zero point for each block, too: nearer to weights that lie on one side of 0
int4:activations=float    activations as they are: exact in what is stored, and slower
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mhsa_compile.errors import InputError

BLOCKS = (16, 32, 64, 128, 256)
_EXAMPLES = 'None, "int8", "int4", or "int4:block=64,zeros,activations=float"'


@dataclass(frozen=True)
class Int4Weights:
    """Weights of four bits by blocks, with zero points or the middle, times x in eight bits or as it is."""

    block: int = 32
    zeros: bool = False
    rounds_x: bool = True

    def __str__(self) -> str:
        """The word for it."""
        options = [f"block={self.block}", *["zeros"] * self.zeros, *["activations=float"] * (not self.rounds_x)]
        return f"int4:{','.join(options)}"


def is_int8(word: str | None) -> bool:
    """Whether a word asks for eight bits. Raises InputError for one that is none."""
    return word is not None and _kind(word) == "int8"


def int4_weights(word: str | None) -> Int4Weights | None:
    """What a word asks for, if it is four bits. Raises InputError for one that is none."""
    if word is None or _kind(word) != "int4":
        return None
    block, zeros, rounds_x = 32, False, True
    options = word.partition(":")[2]
    for option in options.split(",") if options else ():
        if match := re.fullmatch(r"block=(\d+)", option):
            block = int(match[1])
        elif option == "zeros":
            zeros = True
        elif option in ("activations=float", "activations=int8"):
            rounds_x = option.endswith("int8")
        else:
            raise InputError("weights", "block=32, zeros or activations=float behind int4:", repr(word))
    if block not in BLOCKS:
        raise InputError("weights", f"blocks of {', '.join(map(str, BLOCKS))} terms", repr(word))
    return Int4Weights(block, zeros, rounds_x)


def _kind(word: object) -> str:
    kind = word.partition(":")[0] if isinstance(word, str) else ""
    if kind != "int4" and word != "int8":
        raise InputError("weights", _EXAMPLES, repr(word))
    return kind
