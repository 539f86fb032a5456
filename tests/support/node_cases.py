"""The node tests that onnx itself holds its backends to, for operators with kernels here (`node_sweep` has all)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx.backend.test.case import node
from onnx.backend.test.case.node import attention, rotaryembedding, tensorscatter
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.runner import Runner

import mhsa_compile as mhsa
from mhsa_compile.verification.error_budget import budget, max_error
from mhsa_compile.verification.oracle.evaluate import Reference

OPERATORS = {"Attention": attention, "RotaryEmbedding": rotaryembedding, "TensorScatter": tensorscatter}


def cases() -> dict[str, TestCase]:
    """The tests of one node, by name. (Others spell a node out as a function of other operators.)

    The modules register their cases when they are imported. The public `collect_testcases` would import those of all
    operators: six seconds.
    """
    nodes = {case.name: case.model.graph.node for case in node._NodeTestCases}
    alone = {name for name, members in nodes.items() if len(members) == 1 and members[0].op_type in OPERATORS}
    return {case.name: case for case in node._NodeTestCases if case.name in alone}


def check(case: TestCase) -> None:
    """Compiles, loads and calls it, and compares as the backend suite does, to its tolerances."""
    compiled = mhsa.load(mhsa.compile(case.model))

    def run(inputs: tuple[np.ndarray, ...]) -> Sequence[np.ndarray]:
        results = compiled(*inputs)
        return results if isinstance(results, tuple) else (results,)

    compare(case, run)


def compare(case: TestCase, run: Callable[[tuple[np.ndarray, ...]], Sequence[np.ndarray]]) -> None:
    """`run` takes the case's inputs, and returns the outputs.

    What is expected of 16-bit types was rounded by the operations of one evaluator, and is off by a unit and more
    itself: tensor cores, which round elsewhere, may be nearer to the truth and yet beyond the tolerance. So
    outputs of such types that are beyond it are held against float64, within this project's budget.
    """
    for inputs, expected in case.data_sets:
        outputs = run(tuple(map(np.asarray, inputs)))
        try:
            Runner.assert_similar_outputs(expected, outputs, case.rtol, case.atol)
        except AssertionError:
            if any(np.asarray(array).dtype.itemsize != 2 for array in expected):
                raise
            _hold_against_float64(case.model, inputs, outputs)


def _hold_against_float64(model: onnx.ModelProto, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
    """Raises AssertionError for an output whose error is beyond its budget."""
    arrays = {info.name: np.asarray(array) for info, array in zip(model.graph.input, inputs, strict=True)}
    reference = Reference(model)
    for truth, eager, output in zip(reference.oracle(arrays), reference.eager(arrays), outputs, strict=True):
        error, allowed = max_error(truth, output), budget(truth, eager, str(output.dtype))
        assert error <= allowed, f"error {error:.3g}, budget {allowed:.3g}"
