"""The whole flow against the float64 oracle: every spec of the matrix, at each of its shapes."""

from __future__ import annotations

import pytest
import torch
from support.cases import PARITY

import mhsa_compile as mhsa

CASES = [pytest.param(case, id=case.name) for case in PARITY]


@pytest.mark.thorough_but("alibi-both-sides-additive")
@pytest.mark.parametrize("case", CASES)
def test_parity(case):
    torch.manual_seed(7)
    module = mhsa.MultiHeadAttention(case.spec).eval()
    for fixed, cases in case.builds:
        verdict = mhsa.verify(mhsa.compile(module, dims=fixed, weights=case.weights), cases=cases, threads=1)
        worst = verdict.worst
        assert verdict.ok, f"error {worst.error:.3g}, budget {worst.budget:.3g} at {worst.dims}"


def test_the_matrix_is_as_large_as_promised():
    assert len({case.name for case in PARITY}) == len(PARITY)
    assert sum(len(case.shapes) for case in PARITY) >= 560
