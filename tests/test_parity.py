"""The whole flow against the float64 oracle: every spec of the matrix, at each of its shapes."""

from __future__ import annotations

import pytest
import torch
from cases import PARITY

import mhsa_compile as mhsa


@pytest.mark.parametrize("case", PARITY, ids=lambda case: case.name)
def test_parity(case):
    torch.manual_seed(7)
    module = mhsa.MultiHeadAttention(case.spec).eval()
    for fixed, cases in case.builds:
        verdict = mhsa.verify(mhsa.compile(module, dims=fixed, weights=case.weights), cases=cases, threads=1)
        worst = verdict.worst
        assert verdict.ok, f"error {worst.error:.3g}, budget {worst.budget:.3g} at {worst.dims}"


def test_the_matrix_is_as_large_as_promised():
    assert sum(len(case.shapes) for case in PARITY) >= 200
