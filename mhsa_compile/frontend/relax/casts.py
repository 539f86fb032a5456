"""Cast of floats to whole numbers, with one meaning for numbers that have none.

ONNX leaves open what NaN, infinities and numbers beyond the dtype become; LLVM makes of them whatever suits the
neighbouring code. Here it is what x86's instructions give, and with them ONNX Runtime and NumPy there, on every target:
the least number of 32 bits, cut to the dtype; of 64 bits for int64 and uint32. uint64 is left to LLVM.
"""

from __future__ import annotations

from typing import Any

from tvm import te, tirx
from tvm.relax.frontend.onnx.onnx_frontend import get_type

_WIDE = {"int8": 32, "uint8": 32, "int16": 32, "uint16": 32, "int32": 32, "int64": 64, "uint32": 64}


def cast_of_floats(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """A Cast to a dtype of whole numbers; None for any other."""
    (x,), kind = inputs, get_type(attributes["to"])
    own = str(getattr(x.ty, "dtype", ""))
    if kind not in _WIDE or not own.startswith(("float16", "float32", "float64", "bfloat16")) or x.ty.shape is None:
        return None
    wide = own if own in ("float32", "float64") else "float32"
    bits = _WIDE[kind]
    edge = 2.0 ** (bits - 1)
    least = tirx.const(-(1 << (bits - 1)), f"int{bits}")

    def number(value: Any) -> Any:
        inside = tirx.all(value >= tirx.const(-edge, wide), value < tirx.const(edge, wide))
        return tirx.Select(inside, value.astype(f"int{bits}"), least).astype(kind)

    def cast(x: Any) -> Any:
        return te.compute(x.shape, lambda *at: number(x[at].astype(wide)), "cast")

    return bb.emit_te(cast, x, primfunc_name_hint="cast")
