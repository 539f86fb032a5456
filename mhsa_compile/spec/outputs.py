"""What an attention returns: the words of `AttentionSpec.outputs`, and what each of them means.

    word                             arrays                         contents
    y                                y                              the result
    heads                            heads          (B, H, L, F)    the result of each head, before the projection
    lse                              lse            (B, H, L)       float32: ln of the softmax's denominator
    entropy                          entropy        (B, H, L)       float32: of each row of weights, in nats
    top_k:5                          top_k_weights  (B, H, L, 5)    float32: the largest weights, the largest first
                                     top_k_keys     (B, H, L, 5)    int64: whose they are; of equals the first key first
    weights                          weights        (B, H, L, S)    all of them, in the spec's dtype
    weights:heads=0,3,rows=0,-1      weights        (B, 2, 2, S)    of these heads, of these queries; -1 is the last

A query that sees no key has an lse of -inf, an entropy of 0 and weights of 0. Where fewer than k keys are seen, the
rest of top_k has the weight 0 and the key -1. A query that a call does not have (`rows=5` of 3) has weights of 0.
Beside a cache S is its capacity C: `weights` have a column for each place of it, 0 where a sequence has no key.

Of somebody else's graph the same words are of its attentions, the layers, which are counted from 0 in the graph's
order: `entropy` is of every layer, `entropy@3` of the fourth, `entropy@-1` of the last. The arrays have the layer
before their names, `layer3_entropy`, and come behind the graph's own outputs, which `y` stands for and which are
always there.

Notation: B batch, L query length, S key length, H heads, F value head dim.
"""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mhsa_compile.errors import SpecError, did_you_mean, did_you_mean_value

_KINDS = ("y", "heads", "lse", "entropy", "top_k", "weights")
_OF_LAYERS = '"weights", "entropy@3", "top_k:5@-1", "weights:heads=0,3,rows=0,-1@0"'
_EXAMPLES = '"y", "lse", "entropy", "top_k:5", "weights", "weights:heads=0,3,rows=0,-1", "heads"'


@dataclass(frozen=True)
class SoftmaxOutputs:
    """What is wanted of a softmax's rows, beside the sum over the values. `heads` and `rows` are of `weights`: None
    means all."""

    lse: bool = False
    entropy: bool = False
    top_k: int = 0
    weights: bool = False
    heads: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays, in the order in which the operator and the kernels give them."""
        flags = {
            "lse": self.lse,
            "entropy": self.entropy,
            "top_k_weights": self.top_k > 0,
            "top_k_keys": self.top_k > 0,
            "weights": self.weights,
        }
        return tuple(name for name, flag in flags.items() if flag)


@dataclass(frozen=True)
class LayerWord:
    """A word about layers of a graph, in its one spelling; `layer` None is every one, -1 the last."""

    word: str
    layer: int | None

    def __str__(self) -> str:
        return self.word if self.layer is None else f"{self.word}@{self.layer}"


def checked_outputs(words: object, num_heads: int) -> tuple[str, ...]:
    """The words, each in its one spelling. Raises SpecError: none, an unknown one, the same kind twice, no y."""
    texts = _texts(words, _EXAMPLES)
    kinds = [word.partition(":")[0] for word in texts]
    for kind in kinds:
        _check_kind(kind, _EXAMPLES)
        if kinds.count(kind) > 1:
            raise SpecError("outputs", "each output once", f"{kind!r} {kinds.count(kind)} times")
    if "y" not in kinds:
        raise SpecError("outputs", '"y" and what else is wanted', ", ".join(texts), 'Add "y".')
    return tuple(_spelling(word, num_heads) for word in texts)


def layer_words(words: object) -> tuple[LayerWord, ...]:
    """The words about layers; y, the graph's own outputs, is none. Raises SpecError for what no graph could have."""
    result = []
    for text in _texts(words, f'"y", {_OF_LAYERS}'):
        word, at, layer = text.partition("@")
        kind = word.partition(":")[0]
        _check_kind(kind, f'"y", {_OF_LAYERS}')
        if at and not re.fullmatch(r"-?\d+", layer):
            raise SpecError("outputs", "the number of a layer behind @, such as 'entropy@3'", repr(text))
        if kind == "y" and at:
            raise SpecError("outputs", "y alone, the graph's own outputs", repr(text), f"Of a layer: heads@{layer}.")
        layer_word = LayerWord(_spelling(word, None), int(layer) if at else None)
        if kind != "y":
            result.append(layer_word)
    return tuple(result)


def _texts(words: object, examples: str) -> list[str] | tuple[str, ...]:
    texts = words if isinstance(words, list | tuple) else ()
    if not texts or not all(isinstance(word, str) for word in texts):
        raise SpecError("outputs", f"a tuple of some of {examples}", repr(words), _as_tuple(words))
    return texts


def _as_tuple(words: object) -> str:
    """A next step for a text in place of a tuple of texts: the tuple that its words are, beside y."""
    if not isinstance(words, str) or not words:
        return ""
    others = [word for word in split_words(words) if word != "y"]
    return did_you_mean_value(words, {words: ("y", *others)})


def _check_kind(kind: str, examples: str) -> None:
    if kind not in _KINDS:
        raise SpecError("outputs", f"some of {examples}", repr(kind), did_you_mean(kind, _KINDS))


def _spelling(word: str, num_heads: int | None) -> str:
    """A word in its one spelling. Raises SpecError. `num_heads` is None where it is not known yet."""
    kind, colon, detail = word.partition(":")
    if kind == "top_k":
        if not re.fullmatch(r"[1-9]\d*", detail):
            raise SpecError("outputs", "top_k with the number of keys, such as 'top_k:5'", repr(word))
        return f"top_k:{int(detail)}"
    if kind == "weights" and colon:
        indices = _indices(word, detail)
        for head in indices.get("heads", ()):
            if num_heads is not None and not 0 <= head < num_heads:
                raise SpecError("outputs", f"heads from 0 to {num_heads - 1}", f"{head} in {word!r}")
        return "weights:" + ",".join(f"{axis}={','.join(map(str, numbers))}" for axis, numbers in indices.items())
    if colon:
        raise SpecError("outputs", f"{kind!r} alone", repr(word))
    return kind


def _indices(word: str, detail: str) -> dict[str, tuple[int, ...]]:
    """heads=0,3,rows=0,-1 -> {"heads": (0, 3), "rows": (0, -1)}: heads first, whichever came first."""
    number = r"-?\d+"
    matches = re.findall(rf"(heads|rows)=({number}(?:,{number})*)", detail)
    indices = {axis: tuple(map(int, numbers.split(","))) for axis, numbers in matches}
    if len(indices) != len(matches) or ",".join(f"{axis}={numbers}" for axis, numbers in matches) != detail:
        raise SpecError("outputs", "weights of chosen heads or rows, such as 'weights:heads=0,3,rows=0,-1'", repr(word))
    for axis, numbers in indices.items():
        if len(set(numbers)) < len(numbers):
            raise SpecError("outputs", f"each of {axis} once", repr(word))
    return {axis: indices[axis] for axis in ("heads", "rows") if axis in indices}


def split_words(text: str) -> list[str]:
    """A comma-separated list, as a command line has it: "y,top_k:5,weights:heads=0,3,rows=0,-1" is three words."""
    return re.split(r",\s*(?=[a-z_]+(?:[,:@]|$))", text)


def inside_of(words: Sequence[str]) -> SoftmaxOutputs:
    """What words, as `checked_outputs` returns them, ask of the softmax's rows."""
    details = dict(word.partition(":")[::2] for word in words)
    indices = _indices("weights", details["weights"]) if details.get("weights") else {}
    return SoftmaxOutputs(
        lse="lse" in details,
        entropy="entropy" in details,
        top_k=int(details.get("top_k", 0)),
        weights="weights" in details,
        heads=indices.get("heads"),
        rows=indices.get("rows"),
    )


def array_names(words: Sequence[str]) -> tuple[str, ...]:
    """The arrays that a call returns, in order."""
    kinds = (word.partition(":")[0] for word in words)
    return tuple(name for kind in kinds for name in (("top_k_weights", "top_k_keys") if kind == "top_k" else (kind,)))


def together(names: Iterable[str]) -> Callable[[Iterable[Any]], tuple[Any, ...]]:
    """Makes a named tuple of what a call returns; a name that is no identifier is a place of it only."""
    make: Callable[[Iterable[Any]], tuple[Any, ...]] = _outputs_type(tuple(names))._make
    return make


@cache
def _outputs_type(names: tuple[str, ...]) -> Any:
    """The type of outputs of these names: one in a process, made again where its values are unpickled."""
    kind: Any = namedtuple("Outputs", names, rename=True)  # type: ignore[misc]  # the names are data

    def reduce(outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return _put_together, (names, tuple(outputs))

    return type("Outputs", (kind,), {"__slots__": (), "__reduce__": reduce, "__module__": __name__})


def _put_together(names: tuple[str, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
    return together(names)(values)
