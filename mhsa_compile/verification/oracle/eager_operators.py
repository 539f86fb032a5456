"""Operators of an ONNX graph at its own dtype, by PyTorch's arithmetic: the yardstick of the error budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from onnx.reference.op_run import OpRun
from torch import Tensor

from mhsa_compile.nn import score_features
from mhsa_compile.nn.functional import attend, softmax_outputs_of, to_numpy, to_torch
from mhsa_compile.spec.outputs import SoftmaxOutputs
from mhsa_compile.verification.oracle.attention import Arithmetic, attention_operators
from mhsa_compile.verification.oracle.scores import Scoring


def eager_operators(int8_weights: bool) -> list[type[OpRun]]:
    """Attention and products; of weights in eight bits, if `int8_weights`."""
    return [*attention_operators(Arithmetic(_attend, _look)), _Int8MatMul if int8_weights else _MatMul, _Gemm]


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scoring: Scoring) -> np.ndarray:
    return to_numpy(attend(to_torch(q), to_torch(k), to_torch(v), _eager(scoring), scoring.scale))


def _look(q: np.ndarray, k: np.ndarray, scoring: Scoring, request: SoftmaxOutputs) -> dict[str, np.ndarray]:
    tensors = softmax_outputs_of(to_torch(q), to_torch(k), _eager(scoring), scoring.scale, request)
    return {name: to_numpy(tensor) for name, tensor in tensors.items()}


def _eager(scoring: Scoring) -> score_features.EagerScoring:
    """The scoring in PyTorch. Its function is computed in float32 at least, and rounded to the dtype of the scores."""
    bias, no_key = (None if array is None else to_torch(array) for array in (scoring.bias, scoring.no_key))
    function = scoring.score_function
    return score_features.EagerScoring(
        visible=to_torch(scoring.visible),
        bias=bias,
        limits=scoring.limits,
        score_function=None if function is None else lambda scores: to_torch(function(to_numpy(scores))),
        no_key=no_key,
    )


class _MatMul(OpRun):  # type: ignore[misc]
    def _run(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray]:
        return (to_numpy(to_torch(a) @ to_torch(b)),)


class _Int8MatMul(OpRun):  # type: ignore[misc]
    def _run(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray]:
        x, w = to_torch(a), to_torch(b)
        return (to_numpy(product_in_int8(x, w) if w.ndim == 2 else x @ w),)


def product_in_int8(x: Tensor, w: Tensor) -> Tensor:
    """x (..., K) times w (K, N), each in steps of its largest value / 127: of a row of x, and of a column of w."""
    x_steps, w_steps = _steps(x.float(), -1), _steps(w.float(), 0)
    product = torch.round(x.float() / x_steps) @ torch.round(w.float() / w_steps)
    return (product * x_steps * w_steps).to(x.dtype)


def _steps(values: Tensor, dim: int) -> Tensor:
    steps = values.abs().amax(dim, keepdim=True) / 127
    return torch.where(steps > 0, steps, 1.0)


class _Gemm(OpRun):  # type: ignore[misc]
    def _run(self, a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None, **attributes: Any) -> tuple[np.ndarray]:
        left = to_torch(a.T if attributes["transA"] else a)
        right = to_torch(b.T if attributes["transB"] else b)
        product = attributes["alpha"] * (left @ right)
        return (to_numpy(product if c is None else product + attributes["beta"] * to_torch(c)),)


_MatMul.__name__ = _Int8MatMul.__name__ = "MatMul"  # the evaluator goes by these names
_Gemm.__name__ = "Gemm"
