"""The inputs of an artifact, known by what their axes mean: drawn, cut, padded and poisoned for its self-checks.

Notation: B batch, L query length, S key length, C capacity of a cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mhsa_compile.runtime.artifact.manifest import Manifest, TensorInfo
from mhsa_compile.runtime.symbolic_dims import is_expression
from mhsa_compile.spec.score_functions import ScoreFunction
from mhsa_compile.verification.random_inputs import Arrays, random_inputs, whole_masks

ENTRIES = 3
LENGTHS = (41, 67)
"""The size of the first free length, and that of the others: one tile of queries or two, whatever the machine."""
LARGE = (2, (331, 331))
"""Entries and lengths with which rows of 32 numbers are more than what one thread computes alone."""
PRIMES = tuple(n for n in range(11, 256) if all(n % d for d in range(2, 16) if d < n) and n not in (*LENGTHS, 197))
"""Lengths that no other check uses, nor the default cases."""
BATCHES = (2, 5, 7)
_OWN_AXES = {
    **{"x": "BL.", "context": "BS.", "key": "BS.", "value": "BS.", "q": "B.L.", "k": "B.S.", "v": "B.S."},
    **{"past_key": "B.C.", "past_value": "B.C.", "length": "B", "present_key": "B.C.", "present_value": "B.C."},
    **{f"{time}_{name}_scale": "B.C" for time in ("past", "present") for name in ("key", "value")},
}
"""The axes of the tensors of this library's modules, a letter each, a dot for one that is neither a batch nor a length:
their lengths are known as such when they are fixed, too."""


class SelfCheckInputs:
    """What is known of an artifact's inputs.

    axes      of each input and output: the names of its axes, "" for one that is neither a batch nor a length
    free      names of axes that may have any size; `lengths` are those but the batch
    batch     the name of the batch axis, "" if there is none
    keys      the name of the axis along which keys are hidden, "" if none is known
    cached    whether a call writes its keys into a cache, behind those that are there
    sizes     of every name in a draw
    """

    def __init__(self, manifest: Manifest, seed: int = 0) -> None:
        self.manifest, self.seed = manifest, seed
        names = {info.name for info in manifest.inputs}
        self.cached = manifest.spec is not None and {"x", "past_key", "past_value", "length"} <= names
        self._own_keys = "C" if self.cached else "S" if names & {"context", "key", "k"} else "L"
        self.axes = {info.name: self._axes_of(info) for info in (*manifest.inputs, *manifest.outputs)}
        symbols = dict.fromkeys(dim for info in manifest.inputs for dim in info.dims if isinstance(dim, str))
        self.free = [symbol for symbol in symbols if not symbol.startswith("mask_")]
        self.batch = self._find_batch()
        self.lengths = [symbol for symbol in self.free if symbol != self.batch]
        self.fixed: dict[str, int] = {}
        for info in manifest.inputs:
            if info.broadcast is None:  # a mask's axes may be 1 where the size is another
                pairs = zip(self.axes[info.name], info.dims, strict=True)
                self.fixed |= {name: dim for name, dim in pairs if name and isinstance(dim, int)}
        self.sizes = self._sizes(ENTRIES, LENGTHS)
        masks = (info for info in manifest.inputs if "mask" in info.name and any(self.axes[info.name][-1:]))
        self.mask = next(masks, None)
        self.keys = self._find_keys()

    def _axes_of(self, info: TensorInfo) -> tuple[str, ...]:
        letters = _OWN_AXES.get(info.name, "") if self.manifest.spec is not None else ""
        if self.manifest.spec is not None and info.name == "mask":
            letters = f"B.L{self._own_keys}" if len(info.dims) == 4 else f"B{self._own_keys}"
        if letters:
            return tuple(letter.strip(".") for letter in letters)
        return tuple(dim if isinstance(dim, str) else "" for dim in info.broadcast or info.dims)

    def _sizes(self, batch: int, lengths: Sequence[int]) -> dict[str, int]:
        """The size of every name: `lengths` are for the first and for the other free ones, as far as they are allowed.
        A cache has room for both."""
        sizes = {symbol: min(self._longest, lengths[min(i, 1)]) for i, symbol in enumerate(self.lengths)}
        if self.cached and "C" in self.free:
            sizes["C"] = min(self._longest, sizes.get("L", self.fixed.get("L", 1)) + lengths[1])
        return {**self.fixed, **sizes, **({self.batch: batch} if self.batch in self.free else {})}

    @property
    def _longest(self) -> int:
        """What the positions of a spec allow, the capacity of its cache, and the tables of a model made elsewhere."""
        spec = self.manifest.spec
        positions = 1 << 30 if spec is None or spec.rope is None else spec.rope.max_length
        tables = min(self.manifest.limits.values(), default=1 << 30)
        return min(positions, self.fixed.get("C", 1 << 30), tables)

    @property
    def longest_prefix(self) -> int:
        return min(max(LENGTHS), self._longest)

    def unseen(self) -> list[dict[str, int]]:
        """Two cases for `parity.check`, of sizes drawn from the seed: primes, unless those are too long."""
        rng = np.random.default_rng(self.seed)
        short = [n for n in PRIMES if n <= (self._longest // 2 if self.cached else self._longest)]
        candidates = short if len(short) > 3 else list(range(1, self._longest + 1))
        batches = rng.choice(BATCHES, 2, replace=False)
        first, others = (rng.choice(candidates, 2, replace=len(candidates) < 2) for _ in range(2))
        cases = [self._sizes(int(batches[i]), (int(first[i]), int(others[i]))) for i in range(2)]
        return [case | self.mask_sizes(case, narrow=i == 1) for i, case in enumerate(cases)]

    def _find_batch(self) -> str:
        """The first axis of the first input that has two or more."""
        return next((axes[0] for axes in self.axes.values() if len(axes) > 1), "")

    def _find_keys(self) -> str:
        if self.manifest.spec is not None:
            return self._own_keys
        if self.mask is not None:
            keys = self.axes[self.mask.name][-1]
            return "" if is_expression(keys) else keys  # of a past and of new ones: no axis has them all
        return self.lengths[-1] if self.lengths else ""

    # Why a check does not apply; "" where it does.

    @property
    def _functions(self) -> list[ScoreFunction]:
        """The functions of scores in the spec."""
        spec = self.manifest.spec
        return [] if spec is None else list(spec.functions.values())

    @property
    def why_no_batch(self) -> str:
        if any(function.depends_on("b") for function in self._functions):
            return "a function of scores asks which entry of the batch it is"
        return self._why_no_entries or ("the batch is fixed at 1" if self.sizes[self.batch] == 1 else "")

    @property
    def _why_no_entries(self) -> str:
        if not self.batch:
            return "no input has a batch axis"
        here = (self.batch, self.sizes[self.batch])
        if any(not info.dims or info.dims[0] not in here for info in self.manifest.outputs):
            return "an output has no batch axis"
        return ""

    @property
    def why_no_padding(self) -> str:
        if self.mask is None and not self.cached:
            return "it takes no mask"
        if self._functions and not self.cached:
            return "a function of scores asks for places, which padding shifts"
        if any(function.depends_on("b") for function in self._functions):
            return "a function of scores asks which entry of the batch it is"
        return self._why_no_entries if self.keys in self.free else "the length is fixed"

    @property
    def why_no_keys(self) -> str:
        if not self.keys:
            return "no axis is known as the keys'"
        return "there is one key" if self.sizes[self.keys] == 1 else ""

    @property
    def why_no_prefixes(self) -> str:
        meanings = self.manifest.semantics
        if not meanings or not all(meaning.hides_later_keys for meaning in meanings):
            return "not causal"
        if self.cached:
            return "" if "L" in self.free else "a length is fixed"
        if {name for info in self.manifest.inputs for name in self.axes[info.name]} - {"", self.batch} != {
            *self.lengths
        }:
            return "a length is fixed"
        if not any(dim in self.lengths for info in self.manifest.outputs for dim in info.dims):
            return "no output has a row for each position"
        return ""

    # Inputs.

    def draw(self, *, same_length: bool = False) -> dict[str, np.ndarray]:
        """Random inputs; `same_length` gives all free lengths one size, and a cache that is empty."""
        sizes = self.sizes | (dict.fromkeys(self.lengths, self.longest_prefix) if same_length else {})
        inputs = random_inputs(self.manifest, sizes | self.mask_sizes(sizes), self.seed)
        if same_length and self.cached:
            inputs["length"][:] = 0
        return inputs

    def draw_large(self) -> dict[str, np.ndarray]:
        """Random inputs of sizes that are shared among threads."""
        return self.draw_at(self._sizes(*LARGE))

    def draw_at(self, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Random inputs at these sizes, by the names of axes."""
        return random_inputs(self.manifest, {**sizes, **self.mask_sizes(sizes)}, self.seed)

    def mask_sizes(self, sizes: Mapping[str, int], *, narrow: bool = False) -> dict[str, int]:
        """Sizes of the axes of a mask that broadcasts: all full but the heads', or `narrow`: 1 but for queries and
        keys."""
        keys = sizes.get(self.keys, 1)
        batch = 1 if narrow else sizes.get(self.batch, 1)
        mask_dims = {"mask_B": batch, "mask_H": 1, "mask_L": sizes.get("L", 1), "mask_S": keys}
        return {**mask_dims, **whole_masks(self.manifest, sizes)}

    def take(self, inputs: Arrays, entries: Sequence[int]) -> dict[str, np.ndarray]:
        """These entries of the batch, in this order; what has no batch axis, or broadcasts along it, stays."""
        return {
            name: array[list(entries)] if self.axes[name][:1] == (self.batch,) and len(array) > 1 else array
            for name, array in inputs.items()
        }

    def alone(self, inputs: Arrays, entry: int) -> dict[str, np.ndarray]:
        """One entry by itself; where the size of a batch is fixed, a batch of nothing else."""
        return self.take(inputs, [entry] * (1 if self.batch in self.free else self.sizes[self.batch]))

    def cut(self, inputs: Arrays, parts: Mapping[str, slice]) -> dict[str, np.ndarray]:
        """Every input cut along the axes of these names. Those of size 1 broadcast, and stay."""
        return {name: self.cut_one(array, name, parts) for name, array in inputs.items()}

    def cut_one(self, array: np.ndarray, name: str, parts: Mapping[str, slice]) -> np.ndarray:
        """Cuts one input or output."""
        whole = slice(None)
        pairs = zip(self.axes[name], array.shape, strict=True)
        cuts = [parts.get(axis, whole) if size > 1 else whole for axis, size in pairs]
        return np.ascontiguousarray(array[tuple(cuts)])

    def padded(self, side: str) -> tuple[dict[str, np.ndarray], list[slice]]:
        """Random inputs whose mask hides all keys of an entry but those of its slice: what is "before", "after" or
        "around" it. Without a mask the slices are of what is to stay clean, and hide nothing. A cache hides what lies
        behind its length and the call."""
        inputs = self.draw()
        if self.cached:
            return inputs, [slice(0, int(length) + inputs["x"].shape[1]) for length in inputs["length"]]
        total, entries = self.sizes[self.keys], self.sizes.get(self.batch, 1)
        rng = np.random.default_rng(self.seed)
        valid = rng.choice(np.arange(1, max(2, total)), entries, replace=entries >= total)
        mask = None if self.mask is None else inputs[self.mask.name]
        if mask is None or len(mask) < entries:
            valid[:] = valid[0]  # one for all entries
        first = {"before": total - valid, "after": 0 * valid, "around": (total - valid + 1) // 2}[side]
        spans = [slice(int(i), int(i + n)) for i, n in zip(first, valid, strict=True)]
        if mask is not None:
            self._hide(mask, spans)
        return inputs, spans

    @staticmethod
    def _hide(mask: np.ndarray, spans: Sequence[slice]) -> None:
        """Masks the keys outside of each entry's slice."""
        if mask.dtype.kind in "iu":
            mask[...] = 1
        for b, span in enumerate(spans):
            padding = np.ones(mask.shape[-1], np.bool_)
            padding[span] = False
            mask[b % len(mask), ..., padding] = 0 if mask.dtype.kind in "biu" else -np.inf

    @property
    def padding(self) -> str:
        """The side on which a batch is padded, "before" or "after" its keys. It is "before" where places are counted
        from the last one; also where attention is causal, since what comes after is hidden by that alone (places count
        among each other only in our own modules).
        """
        meanings = self.manifest.semantics
        causal = self.manifest.spec is not None and any(meaning.hides_later_keys for meaning in meanings)
        from_the_end = any(meaning.from_end for meaning in meanings)
        apart = any(self.keys not in axes for axes in self.axes.values())  # in self-attention queries go with the keys
        return "before" if (from_the_end if apart else causal) else "after"

    def poisoned(self, inputs: Arrays, spans: Sequence[slice], poison: float) -> dict[str, np.ndarray]:
        """A copy whose keys outside of each entry's slice are `poison`, in every floating input but the mask."""
        copies = {name: array.copy() for name, array in inputs.items()}
        for name, array in copies.items():
            is_mask = self.mask is not None and name == self.mask.name
            if array.dtype.kind in "biu" or self.keys not in self.axes[name] or is_mask:
                continue
            rows = np.moveaxis(array, self.axes[name].index(self.keys), 0)  # a view
            padding = np.ones(len(rows), np.bool_)
            for b, span in enumerate(spans):
                padding[:] = True
                padding[span] = False
                if self.axes[name][0] == self.batch:
                    rows[padding, b] = poison
                else:
                    rows[padding] = poison
        return copies
