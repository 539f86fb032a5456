"""A slice of `make fuzz-graphs`, and a fault that it must find."""

from __future__ import annotations

import onnx
import pytest

from fuzz import graphs
from mhsa_compile.frontend.canonicalize import canonicalize


@pytest.mark.thorough_but("0")
@pytest.mark.parametrize("seed", range(4))
def test_a_random_graph_is_right_or_refused(seed):
    assert graphs.outcome(seed)[1] in ("right", "refused", "not judged")


def test_graphs_are_valid_and_one_seed_is_one_graph():
    for seed in range(60):
        onnx.checker.check_model(graphs.drawn(seed), full_check=True)
    assert graphs.drawn(7) == graphs.drawn(7)


def test_a_planted_fault_is_found(monkeypatch):
    whole = canonicalize.whole
    seed = next(s for s in range(100) if [n.op_type for n in graphs.drawn(s).graph.node][-1:] == ["Softplus"])

    def with_a_fault(model, tensors):
        result = whole(model, tensors)
        for node in result.graph.node:
            node.op_type = "Softsign" if node.op_type == "Softplus" else node.op_type
        return result

    monkeypatch.setattr(canonicalize, "whole", with_a_fault)
    assert graphs.outcome(seed)[1] == "wrong"
