"""The operators mhsa.QuantizeRows and mhsa.DequantizeRows: what they mean in standard ones, so that any ONNX tool can
run a file with a cache of int8.

QuantizeRows (x) => (q int8, step float32): 127 steps are the largest magnitude of a row, along the last axis.
DequantizeRows (q, step) => (x): q * step, of the dtype that its attribute `to` says.
"""

from __future__ import annotations

from onnx import FunctionProto, parser

from mhsa_compile.nn.functional import SMALLEST_ROW
from mhsa_compile.spec.attention_spec import DOMAIN

QUANTIZE, DEQUANTIZE = "QuantizeRows", "DequantizeRows"
ROW_OPERATORS = (QUANTIZE, DEQUANTIZE)
_BODIES = {
    QUANTIZE: f"""QuantizeRows (x) => (q, step) {{
        last = Constant <value = int64[1] {{-1}}> ()
        levels = Constant <value = float {{127.0}}> ()
        least = Constant <value = float {{{SMALLEST_ROW}}}> ()
        nil = Constant <value = float {{0.0}}> ()
        wide = Cast <to = 1> (x)
        magnitude = Abs (wide)
        largest = ReduceMax (magnitude, last)
        column = Div (largest, levels)
        step = Squeeze (column, last)
        inverse = Div (levels, largest)
        is_small = Less (largest, least)
        factor = Where (is_small, nil, inverse)
        scaled = Mul (wide, factor)
        whole = Round (scaled)
        q = Cast <to = 3> (whole)
    }}""",
    DEQUANTIZE: """DequantizeRows <to> (q, step) => (x) {
        last = Constant <value = int64[1] {-1}> ()
        wide = Cast <to = 1> (q)
        column = Unsqueeze (step, last)
        product = Mul (wide, column)
        x = Cast <to: int = @to> (product)
    }""",
}


def row_function(op_type: str, opset: int) -> FunctionProto:
    """The definition of one of them."""
    return parser.parse_function(f'<domain: "{DOMAIN}", opset_import: ["" : {opset}]> {_BODIES[op_type]}')
