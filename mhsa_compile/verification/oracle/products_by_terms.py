"""Evaluations whose products of float32 are made by bfloat16 terms: the yardstick of code that is less exact than
float32 by its user's choice.

PyTorch's products are those of a word's terms; operators that NumPy evaluates have factors that keep what their terms
hold, which is "bf16" itself, and of "bf16x3" a quarter too exact: the budget's doubling has room for that. Sums stay
float32, so that a yardstick errs by both, as kernels do: by what its factors lose, and by what its sums lose.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import onnx
import torch
from onnx.reference.op_run import OpRun
from onnx.reference.ops import load_op
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mhsa_compile.nn.functional import to_numpy, to_torch
from mhsa_compile.spec.float32_products import Float32Products, is_coarse
from mhsa_compile.verification.oracle.float32_terms import factor_of_terms, term_factors

_PRODUCTS = (Tensor.matmul, torch.matmul, torch.mm, torch.bmm, torch.nn.functional.linear)
_FACTORS: dict[str, Sequence[int] | None] = {
    "Conv": (0, 1), "DFT": (0,), "Einsum": None, "GRU": (0, 1), "LSTM": (0, 1), "MatMulNBits": (0,), "RNN": (0, 1),
    "STFT": (0, 2),
}  # fmt: skip
"""Operators that NumPy evaluates and whose products kernels compute, and the places of their factors: None is all."""


def products_by_terms(word: Float32Products) -> AbstractContextManager[object]:
    """Within it, PyTorch's products of float32 are those of a word; its own, where that is as exact as float32."""
    return _ProductsByTerms(word) if is_coarse(word) else nullcontext()


class _ProductsByTerms(TorchFunctionMode):
    def __init__(self, word: Float32Products) -> None:
        super().__init__()
        self._word = word

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _PRODUCTS or any(factor.dtype != torch.float32 for factor in args[:2]):
            return func(*args, **(kwargs or {}))
        a, b, *bias = args
        (first, *others) = term_factors(to_numpy(a), to_numpy(b), self._word)
        total = func(*map(to_torch, first), *bias, **(kwargs or {}))
        for pair in others:
            total = total + func(*map(to_torch, pair))
        return total


def operators_by_terms(
    model: onnx.ModelProto, operators: Sequence[type[OpRun]], word: Float32Products
) -> list[type[OpRun]]:
    """These operators and onnx's own, those of _FACTORS with factors that keep what their terms hold."""
    if not is_coarse(word):
        return list(operators)
    opsets = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    own_names = {operator.__name__ for operator in operators}
    others = [
        name for name in _FACTORS if name not in own_names and any(node.op_type == name for node in model.graph.node)
    ]
    own = [load_op("", name, opsets.get("ai.onnx")) for name in others]
    names = [*(operator.__name__ for operator in operators), *others]
    pairs = zip(names, [*operators, *own], strict=True)
    return [_with_rounded_factors(name, operator, word) if name in _FACTORS else operator for name, operator in pairs]


def _with_rounded_factors(name: str, operator: type[OpRun], word: Float32Products) -> type[OpRun]:
    places, run = _FACTORS[name], operator._run

    def _run(self: OpRun, *inputs: Any, **attributes: Any) -> Any:
        rounded_inputs = (
            factor_of_terms(x, word) if isinstance(x, np.ndarray) and (places is None or i in places) else x
            for i, x in enumerate(inputs)
        )
        return run(self, *rounded_inputs, **attributes)

    return type(name, (operator,), {"_run": _run})
