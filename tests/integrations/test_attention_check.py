"""First calls of attention in models of transformers are held against PyTorch's arithmetic."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch

from mhsa_compile.errors import OutputError
from mhsa_compile.integrations.attention_graph import AttentionCall
from mhsa_compile.integrations.attention_operator import Operands, attend, by_pytorch, define, why_wrong
from mhsa_compile.integrations.call_table import TABLES, CallTable
from mhsa_compile.integrations.first_calls import difference
from mhsa_compile.integrations.transformers import attention_forward

B, H, G, L, S, E = 3, 4, 2, 7, 11, 16
BOOL = torch.rand(B, 1, L, S) < 0.7
SINKS = torch.randn(H)
CALL = AttentionCall(H=H, G=G, E=E, F=E, dtype="float32", scale=0.25)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> CallTable:
    table = CallTable()
    monkeypatch.setitem(TABLES, "mhsa", table)
    return table


def _tensors(length: int = L, keys: int = S) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(B, H, length, E), torch.randn(B, G, keys, E), torch.randn(B, G, keys, E)


@pytest.mark.thorough_but("*-5.0-*")
@pytest.mark.parametrize(
    ("mask", "sinks", "softcap", "causal"),
    [
        (None, None, 0.0, False),
        (BOOL, SINKS, 5.0, False),
        (torch.randn(1, H, L, S), None, 0.0, False),
        (None, None, 0.0, True),
    ],
)
def test_both_are_one_meaning_in_all_rows_and_in_some(
    table: CallTable, mask: Any, sinks: Any, softcap: float, causal: bool
) -> None:
    q, k, v = _tensors()
    rest = (mask, sinks, 0.25, softcap, causal)
    y = attend(q, k, v, *rest, causal, False)
    operands = Operands(q, k, v, *rest)
    assert difference([y], [by_pytorch(operands)]) == ""
    rows = torch.tensor([0, 2, 6])
    assert difference([y[:, rows]], [by_pytorch(operands, rows)]) == ""
    assert why_wrong(y, operands) == "" and why_wrong(y + 0.1, operands)


def test_a_wrong_kind_is_pytorchs_from_then_on(table: CallTable, monkeypatch: pytest.MonkeyPatch) -> None:
    get, calls = table.get, []

    def with_a_fault(*arguments: Any, **options: Any) -> Any:
        compiled = get(*arguments, **options)

        def run(*inputs: Any) -> torch.Tensor:
            calls.append(len(inputs))
            result: torch.Tensor = compiled(*inputs)
            return result * 1.5

        run.manifest = compiled.manifest
        return run

    monkeypatch.setattr(table, "get", with_a_fault)
    q, k, v = _tensors()
    rest = (None, None, 0.25, 0.0, False)
    expected = by_pytorch(Operands(q, k, v, *rest))
    with pytest.warns(UserWarning, match="attention of 4 heads of 16: a result is off by"):
        assert torch.equal(attend(q, k, v, *rest, False, False), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(attend(q, k, v, *rest, False, False), expected)
    assert len(calls) == 1


@pytest.mark.thorough_but("dtype1")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_makes_operands_of_one_dtype_and_changes_no_check(table: CallTable, dtype: torch.dtype) -> None:
    """Rotary embeddings leave queries and keys of float32 beside narrow values; PyTorch's attention has all narrow.
    A check whose products are narrow would find correct results wrong, and leave their kind to PyTorch for good."""
    q, k, v = _tensors()
    rest = (BOOL, None, 0.25, 0.0, False)
    expected = attend(*(x.to(dtype) for x in (q, k, v)), *rest, False, False)
    exact = by_pytorch(Operands(q, k, v, *rest))
    with warnings.catch_warnings(), torch.autocast("cpu", dtype=dtype), torch.no_grad():
        warnings.simplefilter("error")
        for values in (v, v.to(dtype)):
            y, _ = attention_forward(torch.nn.Identity(), q, k, values, BOOL, scaling=0.25, is_causal=False)
            assert y.dtype == dtype and torch.equal(y, expected)
        assert torch.equal(by_pytorch(Operands(q, k, v, *rest)), exact)
        assert not why_wrong(exact, Operands(q, k, v, *rest))


def test_what_pytorch_computes_lies_in_memory_as_the_operator_says(
    table: CallTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile goes by that: a view of another order of axes fails there."""
    define()
    monkeypatch.setattr(table, "is_left", lambda call: True)
    q, k, v = _tensors()

    def rows(q: torch.Tensor) -> torch.Tensor:
        y, _ = attention_forward(torch.nn.Identity(), q, k, v, BOOL, scaling=0.25, is_causal=False)
        return y.view(B, L, H * E)

    with torch.no_grad():
        expected = by_pytorch(Operands(q, k, v, BOOL, None, 0.25, 0.0, False)).view(B, L, H * E)
        assert torch.equal(torch.compile(rows, backend="aot_eager", fullgraph=True)(q), expected)


def test_without_room_a_kind_is_pytorchs(table: CallTable, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> Any:
        raise OutputError("temporary folder '/tmp'", "room for the artifact", "No space left on device")

    monkeypatch.setattr(table, "get", full)
    q, k, v = _tensors()
    rest = (BOOL, None, 0.25, 0.0, False)
    with pytest.warns(UserWarning, match="no room for what is compiled .*No space left.*PyTorch computes such calls"):
        y = attend(q, k, v, *rest, False, False)
    assert torch.equal(y, by_pytorch(Operands(q, k, v, *rest)))


def test_a_kind_is_looked_at_once_and_not_at_all_where_it_is_switched_off(table: CallTable) -> None:
    q = _tensors()[0]

    def is_looked_at(q: torch.Tensor, mask: torch.Tensor | None) -> bool:
        return table.check(CALL, q, mask, lambda: "off") == "off"

    assert is_looked_at(q, BOOL) and not is_looked_at(q, BOOL)
    assert is_looked_at(q[:, :, :1], BOOL) and is_looked_at(q, BOOL[:1])
    table.use("native", check=False)
    assert not is_looked_at(q, None)


def test_a_kind_counts_as_checked_once_its_check_is_over(table: CallTable) -> None:
    q, wrong_of_others = _tensors()[0], []

    def slow() -> str:
        """A check during which another thread makes its own first call."""
        other = threading.Thread(target=lambda: wrong_of_others.append(table.check(CALL, q, None, lambda: "off")))
        other.start()
        other.join()
        return "off"

    assert table.check(CALL, q, None, slow) == "off" and wrong_of_others == ["off"]

    def cut_short() -> str:
        raise MemoryError

    with pytest.raises(MemoryError):
        table.check(CALL, q, BOOL, cut_short)
    assert table.check(CALL, q, BOOL, lambda: "off") == "off"
