"""Every node test of onnx for the operators compiled here, through compile and load, to onnx's own tolerances."""

import pytest
from support.node_cases import OPERATORS, cases, check

CASES = cases()


def test_all_are_there() -> None:
    """There are as many node tests as onnx 1.23 has."""
    found = [case.model.graph.node[0].op_type for case in CASES.values()]
    assert {operator: found.count(operator) for operator in OPERATORS} == {
        "Attention": 93,
        "RotaryEmbedding": 8,
        "TensorScatter": 3,
    }


@pytest.mark.parametrize("name", CASES)
def test_node(name: str) -> None:
    check(CASES[name])
