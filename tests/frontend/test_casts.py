"""Cast of floats to whole numbers: what the standard leaves open has one meaning."""

from __future__ import annotations

import math

import numpy as np
import pytest
from onnx import helper
from support.onnx_models import model_of

import mhsa_compile as mhsa

NUMBERS = [0.0, 1.9, -1.9, 255.5, 300.0, -1.0, -129.0, 70000.0, 2147483648.0, -2147483648.0, 1e30]
NUMBERS += map(float, ("nan", "inf", "-inf"))
KINDS = ("int8", "uint8", "int16", "uint16", "int32", "int64")


def _expected(number: float, kind: str) -> int:
    bits = 64 if kind == "int64" else 32
    inside = math.isfinite(number) and -(2 ** (bits - 1)) <= number < 2 ** (bits - 1)
    whole = math.trunc(number) if inside else -(2 ** (bits - 1))
    return int(np.array(whole, f"int{bits}").astype(kind))


@pytest.mark.thorough_but("float16")
@pytest.mark.parametrize("source", ["float32", "float16"])
def test_numbers_that_have_none_become_the_least(source: str) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], [kind], to=helper.np_dtype_to_tensor_dtype(np.dtype(kind))) for kind in KINDS
    ]
    kinds = {kind: kind for kind in KINDS} | {"x": source}
    model = model_of(nodes, {"x": ["N"]}, dict.fromkeys(KINDS, ("N",)), kinds=kinds, opset=20)
    with np.errstate(over="ignore"):
        x = np.array(NUMBERS * 5, source)
    results = mhsa.load(mhsa.compile(model, without_attention="accept", check=False))(x)
    for kind, result in zip(KINDS, results, strict=True):
        assert result.tolist() == [_expected(float(number), kind) for number in x], kind
