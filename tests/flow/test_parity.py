"""The whole flow against the float64 oracle: every spec of the matrix, at each of its shapes.

A case whose features other cases have too, apart or in another dtype, is left to `make test-parity`.
"""

from __future__ import annotations

import pytest
import torch
from support.cases import PARITY

import mhsa_compile as mhsa

LATER = {
    "h1-e40", "h5-e64", "h5-e80-d64", "h12-e40", "h96-e40-d24", "gqa-h12-g4", "mqa-h12-f24", "scale-small",
    "causal-h96", "causal-gqa", "bool-h1", "additive-h1", "key_padding-h1", "bool-cross", "additive-cross",
    "key_padding-cross", "cross-h5", "cross-h12-f24", "window-open-left", "window-own-key",
    "window-wider-than-all", "window-top-left", "window-bottom-right-gqa", "window-key-padding",
    "longformer-causal-gqa", "block-diagonal", "strided-bottom-right", "int8-cross-no-bias", "bf16-h12-e64",
    "bf16-h1-e7-d11", "bf16-gqa-no-bias", "bf16-scale-1", "bf16-additive-causal", "bf16-key-padding-cross",
    "bf16-window", "fp16-h1-e128", "fp16-e128-f40", "fp16-causal", "fp16-bool", "fp16-bottom-right-cross",
    "fp16-longformer",
}  # fmt: skip
CASES = [pytest.param(case, id=case.name, marks=[pytest.mark.parity] if case.name in LATER else []) for case in PARITY]


@pytest.mark.parametrize("case", CASES)
def test_parity(case):
    torch.manual_seed(7)
    module = mhsa.MultiHeadAttention(case.spec).eval()
    for fixed, cases in case.builds:
        verdict = mhsa.verify(mhsa.compile(module, dims=fixed, weights=case.weights), cases=cases, threads=1)
        worst = verdict.worst
        assert verdict.ok, f"error {worst.error:.3g}, budget {worst.budget:.3g} at {worst.dims}"


def test_the_matrix_is_as_large_as_promised():
    names = {case.name for case in PARITY}
    assert names >= LATER and len(names) == len(PARITY)
    assert sum(len(case.shapes) for case in PARITY if case.name not in LATER) >= 300
