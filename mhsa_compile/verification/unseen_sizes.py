"""Does an ONNX graph compute what a module of PyTorch does, at sizes that its export never saw?

Notation: B batch, L query length, S key length.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from mhsa_compile.errors import ModelError
from mhsa_compile.files.foreign_errors import first_line
from mhsa_compile.nn.functional import to_numpy, to_torch
from mhsa_compile.runtime.symbolic_dims import is_expression
from mhsa_compile.verification.error_budget import budget, in_float64, max_error
from mhsa_compile.verification.oracle.evaluate import Reference
from mhsa_compile.verification.random_inputs import Arrays, largest_sizes, positions_of_a_call, random_inputs

Forward = Callable[[nn.Module, dict[str, Tensor]], Any]
"""Calls a module with tensors by the names of a graph's inputs."""

UNSEEN = ({"B": 2, "L": 5, "S": 9, "C": 11}, {"B": 1, "L": 11, "S": 7, "C": 13})
"""Sizes of the runs: L stands on both sides of S, and no two of a symbol have a divisor."""
DRAWS = 8
"""Inputs of which PyTorch's error is the largest, where the first one's is not enough: the few numbers of a small
result may by chance lie nearer to the truth than such numbers do."""


def check_unseen_sizes(
    model: onnx.ModelProto,
    module: nn.Module,
    symbols: Iterable[str],
    forward: Forward,
    runs: Sequence[Mapping[str, int]] = UNSEEN,
) -> None:
    """Shows that no symbol was specialised, by runs at these sizes (one where there are no symbols).

    In each run the graph's outputs must equal the module's, both in float64, up to the module's own budget. Raises
    ModelError.
    """
    names = sorted(symbol for symbol in symbols if not is_expression(symbol))
    wide, most = copy.deepcopy(module).double(), largest_sizes(model)
    graph = Reference(model, wide=_weights_of(wide))
    for seed, unseen in enumerate(runs if names else runs[:1]):
        sizes = _unseen_sizes(module, names, unseen)
        sizes = {symbol: min(size, most.get(symbol, size)) for symbol, size in sizes.items()}
        new = positions_of_a_call(model)
        if "C" in sizes and isinstance(new, int):  # as much room behind them as where L is free
            sizes["C"] = new + unseen["C"] - unseen["L"]
        inputs = random_inputs(model, sizes, seed)
        at = ", ".join(f"{symbol}={size}" for symbol, size in sizes.items())
        hint = "Fix in dims what has one size only, or leave it out of dynamic_shapes."
        with _taking(f"a forward that takes {at or 'its examples'}", hint):
            actual = _outputs(module, inputs, forward)
        hint = "Name dims that are always equal alike in dynamic_shapes, or fix them in dims."
        with _taking(f"an exported graph that takes {at or 'its examples'}", hint):
            expected = graph.oracle(inputs)
        try:
            exact = _outputs(wide, {name: in_float64(array) for name, array in inputs.items()}, forward)
        except RuntimeError:
            exact = []
        is_wide = len(exact) == len(actual) and all(map(_equally_finite, exact, actual))
        if is_wide and not _misfit(exact, expected, actual):
            continue
        # A forward that says float32 itself, wholly or somewhere: its result is held against the graph's at that dtype.
        if _misfit(expected, actual, graph.eager(inputs)):
            draws = [random_inputs(model, sizes, DRAWS * (seed + 1) + draw) for draw in range(DRAWS)]
            limits = [
                max(each) for each in zip(*(_budgets(graph.oracle(d), graph.eager(d)) for d in draws), strict=True)
            ]
            errors = map(max_error, expected, actual)
            off, limit = max(zip(errors, limits, strict=True), key=lambda pair: pair[0] - pair[1])
            if off <= limit:
                continue
            raise ModelError("module", f"the exported graph to agree within {limit:.1e} at {at}", f"{off:.1e}")


@contextmanager
def _taking(expected: str, hint: str) -> Iterator[None]:
    """Raises ModelError for whatever is raised inside: the module is not as expected."""
    try:
        yield
    except Exception as error:
        raise ModelError("module", expected, first_line(error), hint) from error


def _misfit(exact: Sequence[np.ndarray], claims: Sequence[np.ndarray], yardsticks: Sequence[np.ndarray]) -> bool:
    """Whether a claim is over its budget."""
    errors = map(max_error, exact, claims)
    return any(not off <= limit for off, limit in zip(errors, _budgets(exact, yardsticks), strict=True))


def _budgets(exact: Sequence[np.ndarray], yardsticks: Sequence[np.ndarray]) -> list[float]:
    return [budget(truth, own, str(own.dtype)) for truth, own in zip(exact, yardsticks, strict=True)]


def _weights_of(module: nn.Module) -> dict[str, np.ndarray]:
    """A module's weights by the names that its export gives them: without that of what only wraps it."""
    return {name.removeprefix("module."): to_numpy(tensor) for name, tensor in module.state_dict().items()}


def _outputs(module: nn.Module, inputs: Arrays, forward: Forward) -> list[np.ndarray]:
    tensors = {name: to_torch(array) for name, array in inputs.items()}
    with torch.no_grad():
        results = forward(module, tensors)
    return [to_numpy(result) for result in ([results] if isinstance(results, Tensor) else results)]


def _equally_finite(one: np.ndarray, other: np.ndarray) -> bool:
    """False where a forward makes float32 of float64's lowest number, with which it masks: rows become NaN."""
    return np.array_equal(np.isfinite(one), np.isfinite(other))


def _unseen_sizes(module: nn.Module, symbols: list[str], unseen: Mapping[str, int]) -> dict[str, int]:
    """A size for each symbol; in the second run (B = 1) a mask is full, in the first its heads are broadcast."""
    sizes = {symbol: unseen.get(symbol, 4 + i) for i, symbol in enumerate(symbols) if not symbol.startswith("mask_")}
    if unseen["B"] == 1 and "mask_H" in symbols:
        sizes["mask_H"] = module.spec.num_heads  # type: ignore[union-attr, assignment]
    return sizes
