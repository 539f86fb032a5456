"""A call whose sizes do not fit each other inside of the model, as an error that names the node and the shapes.

TVM's words for it are about its own code. What the manifest notes of each node says more: it is gone through only once
a call has failed, so that good calls pay nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from mhsa_compile.errors import InputError
from mhsa_compile.runtime.artifact.manifest import Agreement, Dims, TensorInfo
from mhsa_compile.runtime.symbolic_dims import size_of

_COMPARED = re.compile(r"\((-?\d+) vs\. (-?\d+)\)")
"""How TVM's VM writes two sizes that should be one."""
_LISTED = 3  # so many nodes a message has room for


def misfit(
    agreements: Iterable[Agreement], sizes: Mapping[str, int], shapes: str = "", words: str | None = None
) -> InputError | None:
    """The error for the first node whose operands cannot have the sizes of this call. Where none can be told, one about
    all inputs if there are `words` of TVM's about sizes, else None. `shapes`: see `shapes_of`."""
    for one in agreements:
        if not _fits(one, sizes):
            expected = f"operands whose sizes fit each other, {_together(one.operands)}"
            got = _together([[_size(dim, sizes) for dim in shape] for shape in one.operands])
            return InputError(one.node, expected, got, f"The call brings {shapes}." if shapes else "")
    if words is None:
        return None
    comparison = _COMPARED.search(words)
    which = (
        f", from which a node gets sizes of {comparison[1]} and {comparison[2]} that must be equal"
        if comparison
        else ""
    )
    if undecided := [f"{one.node}, {_together(one.operands)}" for one in agreements if not _tells_sizes(one, sizes)]:
        which += f"; values decide some of the sizes of {'; '.join(undecided[:_LISTED])}"
    hint = "Pass shapes, and values of what holds shapes, for which the model's own arithmetic comes out even."
    return InputError("inputs", "sizes that fit each other inside the model", f"{shapes}{which}", hint)


def shapes_of(infos: Sequence[TensorInfo], arrays: Iterable[Any]) -> str:
    """What a call brings: its inputs' names and shapes."""
    return ", ".join(f"{info.name} {shape_text(array.shape)}" for info, array in zip(infos, arrays, strict=True))


def _fits(one: Agreement, sizes: Mapping[str, int]) -> bool:
    """Whether the sizes agree, as far as the inputs' symbols tell them."""
    pairs = [{size_of(dim, sizes) for dim in pair} - {None} for pair in one.equal]
    columns = [
        {size_of(dim, sizes) for dim in column} - {None, 1}
        for group in one.broadcast
        for column in zip_longest(*map(reversed, group), fillvalue=1)
    ]
    return all(len(distinct) < 2 for distinct in (*pairs, *columns))


def _tells_sizes(one: Agreement, sizes: Mapping[str, int]) -> bool:
    """Whether the inputs' symbols tell all sizes of the operands."""
    return all(size_of(dim, sizes) is not None for shape in one.operands for dim in shape)


def _size(dim: int | str, sizes: Mapping[str, int]) -> int | str:
    size = size_of(dim, sizes)
    return "?" if size is None else size


def _together(shapes: Sequence[Dims | Sequence[int | str]]) -> str:
    *others, last = map(shape_text, shapes)
    return f"{', '.join(others)} and {last}" if others else last


def shape_text(dims: Iterable[object]) -> str:
    """Sizes or dims as an error has them."""
    return f"({', '.join(map(str, dims))})"
