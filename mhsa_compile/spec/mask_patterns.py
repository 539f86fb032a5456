"""Constant masks as patterns: plain values that a spec can hold, laid out as an array when the lengths are known.

True takes part. Query i and key i stand at the same place of the sequence. Notation: L query length, S key length.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from mhsa_compile.errors import InputError, SpecError, did_you_mean
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.spec.checks import LARGEST, value_text

if TYPE_CHECKING:  # what only reads a spec does not load NumPy
    import numpy as np
    from numpy.typing import NDArray

    from mhsa_compile.spec.masks import BoolArray

    Indices = NDArray[np.signedinteger[Any]]


class Pattern(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """What a query sees by its place alone: a constant mask, laid out when the lengths are known.

    >>> isinstance(BlockDiagonal(block=2), Pattern), BlockDiagonal(block=2).visible([2], 3, 3).astype(int)
    (True, array([[0, 0, 1]]))
    """

    def array(self, L: int, S: int) -> BoolArray:
        """(L, S), True takes part. Raises InputError where the pattern does not fit the lengths."""
        return self.visible(range(L), L, S)

    def visible(self, rows: Sequence[int], L: int, S: int) -> BoolArray:
        """Some rows of `array(L, S)`: long masks can be looked at without being made whole."""
        import numpy as np

        return self._sees(np.asarray(rows, np.int64)[:, np.newaxis], np.arange(S), L, S)

    def _sees(self, i: Indices, j: Indices, L: int, S: int) -> BoolArray:
        """Whether queries i (n, 1) see keys j (S,)."""
        raise NotImplementedError


class Longformer(Pattern, frozen=True):
    """A window and a few global tokens (Beltagy et al., 2020, https://arxiv.org/abs/2004.05150, section 3.1).

    window          w: a query sees w / 2 keys on each side of itself; even
    global_tokens   the first ones see everything and are seen by everyone

    >>> Longformer(window=2, global_tokens=1).array(4, 4).astype(int)
    array([[1, 1, 1, 1],
           [1, 1, 1, 0],
           [1, 1, 1, 1],
           [1, 0, 1, 1]])
    """

    window: int
    global_tokens: int = 0

    def __post_init__(self) -> None:
        _check(self, "window", self.window, 0)
        _check(self, "global_tokens", self.global_tokens, 0)
        if self.window % 2:
            raise SpecError("longformer.window", "an even number: half of it lies on each side", str(self.window))

    def _sees(self, i: Indices, j: Indices, L: int, S: int) -> BoolArray:
        near: BoolArray = abs(i - j) <= self.window // 2
        return near | (i < self.global_tokens) | (j < self.global_tokens)


class BigBird(Pattern, frozen=True):
    """Blocks seen near, everywhere and at random (Zaheer et al., 2020, https://arxiv.org/abs/2007.14062, section 2).

    block           positions of a block
    window_blocks   blocks around a query's own, itself among them; odd
    global_blocks   blocks that see everything and are seen by everyone: half at the beginning (one more if odd), half
                    at the end
    random_blocks   further blocks that each query block sees, drawn among those it does not see yet
    seed            of the draw; the same seed gives the same mask on every machine

    >>> BigBird(block=1, window_blocks=1, global_blocks=1, random_blocks=0).array(3, 3).astype(int)
    array([[1, 1, 1],
           [1, 1, 0],
           [1, 0, 1]])
    """

    block: int = 64
    window_blocks: int = 3
    global_blocks: int = 2
    random_blocks: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self, "block", self.block, 1)
        _check(self, "window_blocks", self.window_blocks, 1)
        for name in ("global_blocks", "random_blocks", "seed"):
            _check(self, name, getattr(self, name), 0)
        if self.window_blocks % 2 == 0:
            raise SpecError(
                "bigbird.window_blocks", "an odd number: a query's own block is the middle", str(self.window_blocks)
            )

    def _sees(self, i: Indices, j: Indices, L: int, S: int) -> BoolArray:
        blocks = self._blocks(-(-L // self.block), -(-S // self.block))
        visible: BoolArray = blocks[i // self.block, j // self.block]
        return visible

    def _blocks(self, queries: int, keys: int) -> BoolArray:
        """(query blocks, key blocks)"""
        import numpy as np

        i, j = np.arange(queries)[:, np.newaxis], np.arange(keys)
        head, tail = (self.global_blocks + 1) // 2, self.global_blocks // 2
        visible: BoolArray = abs(i - j) <= self.window_blocks // 2
        visible |= (i < head) | (j < head) | (i >= queries - tail) | (j >= keys - tail)
        # Words straight from the bit generator: their stream is fixed for good, other draws may change with NumPy.
        words = np.random.PCG64(self.seed).random_raw(queries * keys).reshape(queries, keys)
        words[visible] = np.iinfo(np.uint64).max
        random_keys = words.argsort(axis=1, kind="stable")[:, : self.random_blocks]
        np.put_along_axis(visible, random_keys, True, axis=1)
        return visible


class Strided(Pattern, frozen=True):
    """The nearest `stride` keys and every `stride`-th one (Child et al., 2019, https://arxiv.org/abs/1904.10509).

    On both sides of a query; with `causal` in the spec, it is the strided attention of the paper's section 4.3.

    >>> Strided(stride=2).array(1, 6).astype(int)
    array([[1, 1, 1, 0, 1, 0]])
    """

    stride: int

    def __post_init__(self) -> None:
        _check(self, "stride", self.stride, 1)

    def _sees(self, i: Indices, j: Indices, L: int, S: int) -> BoolArray:
        distance = abs(i - j)
        visible: BoolArray = (distance < self.stride) | (distance % self.stride == 0)
        return visible


class BlockDiagonal(Pattern, frozen=True):
    """Blocks of `block` positions that see themselves only.

    >>> BlockDiagonal(block=2).array(3, 3).astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [0, 0, 1]])
    """

    block: int

    def __post_init__(self) -> None:
        _check(self, "block", self.block, 1)

    def _sees(self, i: Indices, j: Indices, L: int, S: int) -> BoolArray:
        visible: BoolArray = i // self.block == j // self.block
        return visible


class Documents(Pattern, frozen=True):
    """Several documents one after the other, each of which sees itself only; what follows the last one is padding.

    >>> Documents((2, 1)).array(3, 4).astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 0, 0],
           [0, 0, 1, 0]])
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = tuple(self.lengths) if isinstance(self.lengths, list | tuple) else ()
        if not lengths:
            raise SpecError("documents.lengths", "the length of each document", repr(self.lengths))
        for length in lengths:
            _check(self, "lengths", length, 1)
        msgspec.structs.force_setattr(self, "lengths", lengths)

    def _sees(self, i: Indices, j: Indices, L: int, S: int) -> BoolArray:
        import numpy as np

        if sum(self.lengths) > max(L, S):
            raise InputError(
                "documents.lengths", f"a sum of at most {max(L, S)}, the length", f"{sum(self.lengths)} positions"
            )
        ends = np.cumsum(self.lengths)
        document = np.searchsorted(ends, j, side="right")
        visible: BoolArray = (np.searchsorted(ends, i, side="right") == document) & (document < len(ends))
        return visible


class ArrayMask(Pattern, frozen=True):
    """A mask of your own, bool (L, S): `static_mask=array` makes one.

    shape   its (L, S); it fits no other lengths
    bits    row after row, eight to a byte, compressed by zlib, as base64: a spec is text

    >>> import numpy as np
    >>> ArrayMask.of(np.eye(2, 3, dtype=np.bool_)).array(2, 3).astype(int)
    array([[1, 0, 0],
           [0, 1, 0]])
    """

    shape: tuple[int, int]
    bits: str

    @classmethod
    def of(cls, array: BoolArray) -> ArrayMask:
        """The mask that an array holds. Raises SpecError unless the array is bool of two axes."""
        import numpy as np

        if array.dtype != np.bool_ or array.ndim != 2:
            got = f"{array.dtype} of shape {array.shape}"
            raise SpecError("static_mask", "a bool array (L, S), True takes part", got, _OTHER_MASKS)
        packed = zlib.compress(np.packbits(array).tobytes(), 6)
        return cls(shape=(array.shape[0], array.shape[1]), bits=base64.b64encode(packed).decode())

    def __post_init__(self) -> None:
        shape = tuple(self.shape) if isinstance(self.shape, list | tuple) else ()
        if len(shape) != 2:
            raise SpecError("arraymask.shape", "(L, S)", repr(self.shape))
        for size in shape:
            _check(self, "shape", size, 0)
        msgspec.structs.force_setattr(self, "shape", shape)

    def visible(self, rows: Sequence[int], L: int, S: int) -> BoolArray:
        """Some rows. Raises InputError for other lengths, SpecError for bits that are not as many."""
        import numpy as np

        if self.shape != (L, S):
            raise InputError("dims", f"the lengths of the mask's array, {self.shape}", f"L, S = {L}, {S}")
        with reading(SpecError, "arraymask.bits", "base64 of zlib's bytes"):
            packed = np.frombuffer(zlib.decompress(base64.b64decode(self.bits)), np.uint8)
            visible = np.unpackbits(packed, count=L * S).reshape(L, S).astype(np.bool_)
        return np.asarray(visible[np.asarray(rows, np.int64)])


AnyPattern = Longformer | BigBird | Strided | BlockDiagonal | Documents | ArrayMask
_OTHER_MASKS = 'A mask that differs from head to head is a mask_mod; one that differs from call to call is mask="bool".'

KINDS: dict[str, type[Pattern]] = {
    "longformer": Longformer,
    "bigbird": BigBird,
    "strided": Strided,
    "blockdiagonal": BlockDiagonal,
    "documents": Documents,
    "arraymask": ArrayMask,
}


def checked_static_mask(value: object) -> Pattern | None:
    """A pattern of KINDS, or None, from one, from plain values or from an array. Raises SpecError."""
    mask = pattern(value) if isinstance(value, Mapping) else value
    if mask is None or type(mask) in KINDS.values():
        return mask  # type: ignore[return-value]
    if isinstance(mask, Pattern):
        names = ", ".join(kind.__name__ for kind in KINDS.values())
        hint = "An artifact stores a pattern by its fields, and no code: give yours as an array, pattern.array(L, S)."
        raise SpecError("static_mask", f"one of {names}", f"{type(mask).__name__}, a class of your own", hint)
    if hasattr(mask, "__array__"):
        import numpy as np

        return ArrayMask.of(np.asarray(mask))
    raise SpecError("static_mask", "a pattern of mhsa_compile.masks, or a bool array (L, S)", type(mask).__name__)


def pattern(fields: Mapping[str, Any]) -> Pattern:
    """A pattern from plain values, as JSON and TOML have them. Raises SpecError.

    >>> pattern({"kind": "longformer", "window": 256, "global_tokens": 1})
    Longformer(window=256, global_tokens=1)
    """
    values = dict(fields)
    name = values.pop("kind", None)
    if not isinstance(name, str) or name not in KINDS:
        hint = did_you_mean(str(name), KINDS)
        raise SpecError("static_mask", f"a kind among {', '.join(KINDS)}", repr(name), hint)
    kind = KINDS[name]
    names = kind.__struct_fields__
    if unknown := [field for field in values if field not in names]:
        hint = did_you_mean(str(unknown[0]), names)
        raise SpecError(name, f"fields among {', '.join(names)}", f"the unknown {unknown[0]!r}", hint)
    required = names[: len(names) - len(kind.__struct_defaults__)]
    if missing := [field for field in required if field not in values]:
        raise SpecError(name, f"the field {missing[0]!r}", "none")
    return kind(**values)


def parse_pattern(text: str) -> Pattern:
    """A pattern as a command line states it. Raises SpecError.

    >>> parse_pattern("longformer:window=256,global_tokens=1")
    Longformer(window=256, global_tokens=1)
    >>> parse_pattern("documents:lengths=90+107")
    Documents(lengths=(90, 107))
    """
    name, _, rest = text.partition(":")
    fields: dict[str, Any] = {"kind": name}
    for assignment in filter(None, rest.split(",")):
        field, separator, value = assignment.partition("=")
        try:
            numbers = [int(number) for number in value.split("+")]
        except ValueError:
            numbers = []
        if not separator or not numbers:
            raise SpecError("static_mask", "KIND:FIELD=NUMBER,..., such as longformer:window=256", repr(text))
        fields[field] = numbers if field == "lengths" or len(numbers) > 1 else numbers[0]
    return pattern(fields)


def _check(owner: Pattern, field: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
        too_large = isinstance(value, int) and value > LARGEST
        expected = f"at most {LARGEST}" if too_large else f"an integer of at least {least}"
        raise SpecError(f"{type(owner).__name__.lower()}.{field}", expected, value_text(value))
