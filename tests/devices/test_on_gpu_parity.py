"""On an NVIDIA GPU: the parity matrix against float64, and onnx's node tests. `make test-gpu`.

Of the matrix all but eight-bit weights, which no kernel for GPUs computes with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import node_cases, runs_noted
from support.cases import PARITY, ParityCase
from support.cuda import gpu_machine

import mhsa_compile as mhsa
from mhsa_compile.verification.verify import verify_run

pytestmark = gpu_machine.marks

MATRIX = [case for case in PARITY if case.weights is None]
CHECKED_AGAINST_ITSELF = ("h5-e64", "bool-causal", "bottom-right-cross", "bf16-causal", "fp16-key-padding-cross")
"""The cases of the matrix that all self-checks judge, too: batches, padding, unseen sizes, poison where nobody
looks."""
NODES = node_cases.cases()


@pytest.mark.parametrize("case", MATRIX, ids=lambda case: case.name)
def test_parity(case: ParityCase, record_property: Callable[[str, Any], None]) -> None:
    torch.manual_seed(7)
    module = mhsa.MultiHeadAttention(case.spec).eval()
    for fixed, cases in case.builds:
        artifact = gpu_machine.compiled(module, **fixed)
        self_checks = case.name in CHECKED_AGAINST_ITSELF
        run = gpu_machine.through(mhsa.load(artifact))
        verdict = verify_run(artifact, run, cases=cases, self_checks=self_checks)
        runs_noted.note(record_property, case.name, *verdict.cases, machine=torch.cuda.get_device_name())
        worst = verdict.worst
        assert verdict.ok, f"error {worst.error:.3g}, budget {worst.budget:.3g} at {worst.dims}; {verdict.checks}"


@pytest.mark.parametrize("name", NODES)
def test_node(name: str) -> None:
    """The outputs are held to onnx's own tolerances."""
    case = NODES[name]
    attention = mhsa.load(gpu_machine.compiled(case.model))
    node_cases.compare(case, gpu_machine.through(attention))
