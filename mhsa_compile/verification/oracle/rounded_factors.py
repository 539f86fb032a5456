"""Evaluations whose products have factors that keep what a word of `float32_products` keeps: the yardstick of code that
is less exact than float32 by its user's choice.

Sums stay float32 or wider, so a yardstick errs by both, as a kernel by terms does: by what its factors lose, and by
what its sums lose. Products of lower terms that "bf16x3" leaves out add 8 % to that, which the budget's doubling holds.
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
from mhsa_compile.verification.oracle.float32_terms import factor_of_terms

_PRODUCTS = (torch.matmul, torch.mm, torch.bmm, torch.nn.functional.linear)
_FACTORS: dict[str, Sequence[int] | None] = {
    "Conv": (0, 1), "DFT": (0,), "Einsum": None, "GRU": (0, 1), "LSTM": (0, 1), "MatMulNBits": (0,), "RNN": (0, 1),
    "STFT": (0, 2),
}  # fmt: skip
"""Operators that NumPy evaluates and whose products kernels compute, and the places of their factors: None is all."""


def rounded_factors(word: Float32Products) -> AbstractContextManager[object]:
    """Within it, PyTorch's products of float32 round their factors so; of a word as exact as float32 nothing."""
    return _RoundedFactors(word) if is_coarse(word) else nullcontext()


class _RoundedFactors(TorchFunctionMode):
    def __init__(self, word: Float32Products) -> None:
        super().__init__()
        self._word = word

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS or getattr(func, "__name__", "") in ("matmul", "__matmul__", "__rmatmul__"):
            args = (*(self._kept(factor) for factor in args[:2]), *args[2:])
        return func(*args, **(kwargs or {}))

    def _kept(self, factor: Tensor) -> Tensor:
        if factor.dtype != torch.float32:
            return factor
        return to_torch(factor_of_terms(to_numpy(factor), self._word))


def operators_with_rounded_factors(
    model: onnx.ModelProto, operators: Sequence[type[OpRun]], word: Float32Products
) -> list[type[OpRun]]:
    """These operators and onnx's own, those of _FACTORS with factors that are rounded so."""
    if not is_coarse(word):
        return list(operators)
    opsets = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    known = {operator.__name__ for operator in operators}
    others = [name for name in _FACTORS if name not in known and any(node.op_type == name for node in model.graph.node)]
    own = [load_op("", name, opsets.get("ai.onnx")) for name in others]
    names = [*(operator.__name__ for operator in operators), *others]
    pairs = zip(names, [*operators, *own], strict=True)
    return [_with_rounded_factors(name, operator, word) if name in _FACTORS else operator for name, operator in pairs]


def _with_rounded_factors(name: str, operator: type[OpRun], word: Float32Products) -> type[OpRun]:
    places, run = _FACTORS[name], operator._run

    def _run(self: OpRun, *inputs: Any, **attributes: Any) -> Any:
        kept = (
            factor_of_terms(x, word) if isinstance(x, np.ndarray) and (places is None or i in places) else x
            for i, x in enumerate(inputs)
        )
        return run(self, *kept, **attributes)

    return type(name, (operator,), {"_run": _run})
