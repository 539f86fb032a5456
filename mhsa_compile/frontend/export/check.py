"""Does an exported graph mean what its module does, and is symbolic what was to be?

Notation: B batch, L query length, S key length.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.export.module_calls import Called
from mhsa_compile.nn.functional import to_numpy, to_torch
from mhsa_compile.verification.error_budget import budget, max_error
from mhsa_compile.verification.oracle.evaluate import (
    Array,
    Arrays,
    eager,
    oracle,
)
from mhsa_compile.verification.random_inputs import largest_sizes, random_inputs

Shape = tuple[int | str, ...]

UNSEEN = ({"B": 2, "L": 5, "S": 9, "C": 11}, {"B": 1, "L": 11, "S": 7, "C": 13})
"""Sizes for the check after the export: L stands on both sides of S, and no two of a symbol have a divisor."""
STATIC_MASK = "static_mask"
"""The initializer that holds a constant mask."""


def check_declared(model: onnx.ModelProto, requested: Mapping[str, Shape]) -> None:
    """Whether the graph's inputs have the dims that were asked for. Raises ModelError."""
    declared = {value.name: _dims(value) for value in model.graph.input}
    for name, shape in requested.items():
        if declared.get(name) != shape:
            hint = "The module fixes this size: fix it in dims, or name another symbol in dynamic_shapes."
            raise ModelError(name, f"dims {shape} after the export", str(declared.get(name)), hint)


def check_symbols(model: onnx.ModelProto, module: nn.Module, requested: Mapping[str, Shape]) -> None:
    """Shows that no dim was specialised: by the declared inputs, and by two runs at lengths the export never saw.

    In each run the graph's outputs must equal the module's, both in float64, up to the module's own budget.
    `requested` is input name -> dims. Raises ModelError.
    """
    check_declared(model, requested)
    symbols = {dim for shape in requested.values() for dim in shape if isinstance(dim, str)}
    wide, most = copy.deepcopy(module).double(), largest_sizes(model)
    for seed, unseen in enumerate(UNSEEN if symbols else UNSEEN[:1]):
        sizes = _unseen_sizes(module, sorted(symbols), unseen)
        sizes = {symbol: min(size, most.get(symbol, size)) for symbol, size in sizes.items()}
        inputs = random_inputs(model, sizes, seed)
        at = ", ".join(f"{symbol}={size}" for symbol, size in sizes.items())
        try:
            actual = _outputs(module, inputs)
        except Exception as error:  # it is the user's code
            said = next(iter(str(error).splitlines()), type(error).__name__)
            hint = "Fix in dims what has one size only, or leave it out of dynamic_shapes."
            raise ModelError("module", f"a forward that takes {at or 'its examples'}", said, hint) from error
        expected = oracle(model, inputs)
        try:
            exact = _outputs(wide, {name: _widened(array) for name, array in inputs.items()})
        except RuntimeError:
            exact = []
        if len(exact) == len(actual) and all(map(_equally_finite, exact, actual)):
            pairs = zip(exact, expected, actual, strict=True)
        else:  # a forward that says float32 itself: its result is held against the graph's at that dtype
            pairs = zip(expected, actual, eager(model, inputs), strict=True)
        for truth, claim, yardstick in pairs:
            allowed = budget(truth, yardstick, str(yardstick.dtype))
            if not (off := max_error(truth, claim)) <= allowed:
                raise ModelError("module", f"the exported graph to agree within {allowed:.1e} at {at}", f"{off:.1e}")


def _outputs(module: nn.Module, inputs: Arrays) -> list[Array]:
    tensors = {name: to_torch(array) for name, array in inputs.items()}
    with torch.no_grad():
        results = module(tensors) if isinstance(module, Called) else module(**tensors)
    return [to_numpy(result) for result in ([results] if isinstance(results, Tensor) else results)]


def _equally_finite(one: Array, other: Array) -> bool:
    """False where a forward makes float32 of float64's lowest number, with which it masks: rows become NaN."""
    return np.array_equal(np.isfinite(one), np.isfinite(other))


def check_equal_but_for_sizes(model: onnx.ModelProto, other: onnx.ModelProto) -> None:
    """Shows that two exports of one module differ in nothing but the sizes that were fixed and what is of that size.

    Raises ModelError.
    """
    (one, weights), (two, other_weights) = _sizeless(model), _sizeless(other)
    different = next((a for a, b in zip(one, two, strict=False) if a != b), None)
    if different is not None or len(one) != len(two) or weights != other_weights:
        got = (
            "weights or the number of nodes that differ"
            if different is None
            else f"{different.op_type} nodes that differ"
        )
        raise ModelError("module", "a graph that is the same at every length", got)


def _sizeless(model: onnx.ModelProto) -> tuple[list[Any], dict[str, bytes]]:
    weights = {t.name: t.SerializeToString() for t in model.graph.initializer if t.name != STATIC_MASK}
    return list(model.graph.node), weights


def _dims(value: onnx.ValueInfoProto) -> Shape:
    return tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)


def _unseen_sizes(module: nn.Module, symbols: list[str], unseen: Mapping[str, int]) -> dict[str, int]:
    """A size for each symbol; in the second run (B = 1) a mask is full, in the first its heads are broadcast."""
    sizes = {symbol: unseen.get(symbol, 4 + i) for i, symbol in enumerate(symbols) if not symbol.startswith("mask_")}
    if unseen["B"] == 1 and "mask_H" in symbols:
        sizes["mask_H"] = module.spec.num_heads  # type: ignore[union-attr, assignment]
    return sizes


def _widened(array: Array) -> Array:
    return array if array.dtype.kind in "biu" else array.astype(np.float64)
