"""A checkpoint in few bits, as another tool wrote it: the numbers, scales and zero points of its linears, unchanged.

checkpoint = mhsa.read_checkpoint("Llama-GPTQ")      # a folder, a .safetensors beside its config.json, or a .gguf
mhsa.accelerate(model, linears=checkpoint)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from mhsa_compile.errors import InputError
from mhsa_compile.nn.weight_blocks import WeightBlocks, stands_for


@dataclass(frozen=True)
class Checkpoint:
    """path     the file or folder
    tool        "GPTQ", "AWQ" or "GGUF"
    linears     name of a linear in the file -> its weight (N, K), whose blocks are whole
    tensors     the other ones of a safetensors file, by name, as they are; none of a GGUF file
    unread      name -> why a weight in few bits is none of `linears`
    aliases     name of a layer in PyTorch -> the one in the file, where these differ
    heads       projection of a GGUF file -> its heads, of those whose rows may lie in llama.cpp's order
    rounds_x    whether products take activations in eight bits where the zero points are whole numbers
    """

    path: str
    tool: Literal["GPTQ", "AWQ", "GGUF"]
    linears: Mapping[str, WeightBlocks]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[str, int] = field(default_factory=dict)
    rounds_x: bool = True

    def __repr__(self) -> str:
        unread = f", {len(self.unread)} unread" if self.unread else ""
        return f"{self.tool} checkpoint {self.path!r}: {len(self.linears)} linears{unread}"

    @property
    def word(self) -> str:
        """The word of `compile(weights=...)` whose artifacts take these linears at `load`. Raises InputError where
        they are of several forms."""
        words = {str(blocks.form(rounds_x=self.rounds_x)) for blocks in self.linears.values()}
        if len(words) != 1:
            raise InputError("checkpoint", "linears of one form", f"{self.path!r} with {sorted(words) or 'none'}")
        return words.pop()

    def state_dict(self) -> dict[str, Tensor]:
        """What `load_state_dict` of a float32 model takes: the numbers that the bits stand for, and all other tensors.

        Raises InputError for a GGUF file, whose names and orders are llama.cpp's: `from_pretrained(gguf_file=...)` of
        transformers makes a model of it.
        """
        if self.tool == "GGUF":
            hint = "AutoModelForCausalLM.from_pretrained(folder, gguf_file=name) makes a model of it."
            raise InputError("checkpoint", "one in safetensors", f"{self.path!r}, with names of llama.cpp's", hint)
        floats = {f"{name}.weight": blocks.floats() for name, blocks in self.linears.items()}
        others = {name: value.float() if value.is_floating_point() else value for name, value in self.tensors.items()}
        return others | floats

    def of_layer(self, name: str, weight: Tensor) -> WeightBlocks | str:
        """What the file has for a layer of this name, rows in its order; or why that is nothing. It has to stand for
        the weight (N, K) that the layer has: names and orders of files are not to be trusted alone."""
        names = [alias for one in (name, f"model.{name}") for alias in (one, self.aliases.get(one, one))]
        names += ["token_embd"] if "output" in names else []  # a head that shares the embedding's weight
        place = next((one for one in names if one in self.linears), None)
        if place is None:
            return next((self.unread[one] for one in names if one in self.unread), "no few bits of it in the file")
        for blocks in self._orders(place):
            if stands_for(blocks, weight):
                return blocks
        return "weights other than the file's: load these first"

    def _orders(self, place: str) -> Iterator[WeightBlocks]:
        """A linear, in the orders that its rows may have. llama.cpp puts each row of the first half of a head beside
        that of the second; transformers has halves."""
        stored = self.linears[place]
        yield stored
        N = len(stored.numbers)
        if (heads := self.heads.get(place, 0)) and N % (2 * heads) == 0:
            yield stored.of_rows(torch.arange(N).view(heads, -1, 2).transpose(1, 2).flatten())
