"""A call of the same arrays again and again: checked once, then only run.

run = attention.bind(x, mask=mask)
for batch in batches:
    x[...] = batch                 # each run reads what is in the arrays then
    y = run()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mhsa_compile.runtime import tvm_runtime
from mhsa_compile.runtime.array_memory import is_torch
from mhsa_compile.runtime.call_arguments import Signature, Sizes

PlainCall = Callable[[Sequence[Any], Sizes, Sequence[Any]], Any]


class BoundCall:
    """A call of arrays that are checked already. Several threads may run one at once. `run(arrays, sizes, values)` is
    the call itself; it wants `lock()` held."""

    def __init__(
        self,
        signature: Signature,
        run: PlainCall,
        lock: Callable[[], Any],
        values: Sequence[Any],
        arrays: Sequence[Any],
        sizes: Sizes,
    ) -> None:
        """`arrays` are `values` as a signature made them ready. Raises InputError for some that would be copied."""
        self._copies = signature.copies(values, arrays)
        self._signature, self._run, self._lock, self._sizes = signature, run, lock, sizes
        self._values, self._arrays = list(values), list(arrays)
        self._bounded, self._empty = signature.has_bounds, 0 in sizes.values()
        adopt = tvm_runtime.start().ffi.from_dlpack
        self._tensors = [array if is_torch(array) or 0 in array.shape else adopt(array) for array in arrays]

    def __call__(self) -> Any:
        """What the attention itself returns. Raises InputError for numbers in the arrays that are out of bounds now."""
        for value, copy in self._copies:
            copy[...] = value
        if self._bounded:
            self._signature.check_values(self._arrays, self._sizes)
        with self._lock():
            if self._empty and (nothing := self._signature.empty_results(self._values, self._sizes)) is not None:
                return nothing
            return self._run(self._tensors, self._sizes, self._values)
