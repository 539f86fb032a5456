"""Operators that are computed in float32 where TVM's would be of float16 or bfloat16, and rounded once: those that sum,
those of many steps, and those of which there is no code.

A float16 stops growing at 2,048 ones, and is infinite from 65,520 on, also where only a square on the way is.
"""

from __future__ import annotations

from typing import Any

from tvm import relax

from mhsa_compile.frontend.relax.values import NARROW, dtype_of

_SUMS = frozenset(
    ("AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "CumSum", "Einsum", "GRU", "Gemm",
     "GlobalAveragePool", "GlobalLpPool", "GroupNormalization", "InstanceNormalization", "LRN", "LSTM",
     "LayerNormalization", "LogSoftmax", "LpNormalization", "LpPool", "Mean", "MeanVarianceNormalization",
     "RMSNormalization", "RNN", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceProd",
     "ReduceSum", "ReduceSumSquare", "SimplifiedLayerNormalization", "Softmax", "Sum")
)  # fmt: skip
"""MatMul is not among them: `compiler.own_operations` has its sums."""
_FUNCTIONS = frozenset(
    ("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cosh", "CumProd", "Elu", "IsInf", "IsNaN", "Mish", "ReduceMax",
     "ReduceMin", "Selu", "Sinh", "Softplus", "Tan")
)  # fmt: skip
"""Functions of one element, or of the largest: of narrow floats LLVM has none of them, or loses what they are."""
_WITHOUT_BFLOAT16 = frozenset(("ArgMax", "ArgMin", "Hardmax", "Mod", "Pow"))
"""Operators of which LLVM has no code for bfloat16; float32 holds all of that."""


def widened(bb: Any, op_name: str, inputs: list[Any]) -> tuple[list[Any], str | None]:
    """(the inputs with narrow floats as float32, the dtype of the results), None where nothing is to be widened."""
    kinds = [dtype_of(value) for value in inputs]
    kind = next((kind for kind in kinds if kind in NARROW), None)
    wanted = op_name in _SUMS | _FUNCTIONS or (kind == "bfloat16" and op_name in _WITHOUT_BFLOAT16)
    if kind is None or not wanted:
        return inputs, None
    wide = [
        bb.normalize(relax.op.astype(value, "float32")) if own in NARROW else value
        for value, own in zip(inputs, kinds, strict=True)
    ]
    return wide, kind


def narrowed(bb: Any, op_name: str, result: Any, kind: str) -> Any:
    """An operator's results of float32 rounded to `kind`; but for a layer norm's mean and deviation, which stay."""
    result = bb.normalize(result)
    if isinstance(result.ty, relax.TupleType):
        values = bb.emit(result)
        parts = [bb.emit(relax.TupleGetItem(values, i)) for i in range(len(result.ty.fields))]
        count = 1 if op_name in _WIDE_STATISTICS else len(parts)
        return relax.Tuple([*(narrowed(bb, op_name, part, kind) for part in parts[:count]), *parts[count:]])
    return bb.normalize(relax.op.astype(result, kind)) if dtype_of(result) == "float32" else result


_WIDE_STATISTICS = ("LayerNormalization", "SimplifiedLayerNormalization")
