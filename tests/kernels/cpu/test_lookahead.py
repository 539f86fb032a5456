"""Which lines of the packed weights are asked for, and in which order: a run of the code that counts them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import load_cpu_profile
from mhsa_compile.kernels.common.buffers import argument, prim_func
from mhsa_compile.kernels.cpu.decode.query_key import ScoreLayout
from mhsa_compile.kernels.cpu.linear import lookahead
from mhsa_compile.kernels.cpu.linear.kernel import CpuLinearKernel
from mhsa_compile.kernels.cpu.linear.lookahead import PAGE, Lookahead
from mhsa_compile.kernels.interface.ops import LinearOp

PROFILE = load_cpu_profile("sapphirerapids", "a test")
PAGES = PROFILE.hardware.pages_in_turn


def asked(
    monkeypatch: pytest.MonkeyPatch,
    op: LinearOp,
    calls: int,
    body: Callable[[Lookahead, tvm.ir.Expr], None],
    pages: int,
) -> list[int]:
    """The lines that body(lookahead, i), called for i of 0 .. calls - 1, asks for, in order."""
    layout = CpuLinearKernel().layout(op, PROFILE, 4)
    shape, dtype = layout.packed[0]
    with prim_func("run") as builder:
        weights = argument("weights", [T.int64(n) for n in shape], dtype)
        lines = argument("lines", [T.int64(100_000)], "int64")
        count = argument("count", [T.int64(1)], "int64")
        ahead = Lookahead(layout, weights, pages)

        def write(buffer: tvm.ir.Expr, index: list[tvm.ir.Expr], *, soon: bool = True) -> None:
            T.buffer_store(lines, T.truncdiv(index[0], T.int64(ahead.elements)), [count[0]])
            T.buffer_store(count, count[0] + 1, [T.int64(0)])

        monkeypatch.setattr(lookahead.vectors, "prefetch", write)
        with T.serial(T.int64(calls)) as i:
            body(ahead, i)
    run = tvm.compile(tvm.IRModule({"run": builder.get().with_attr("global_symbol", "run")}), target="llvm")["run"]
    results = tvm.runtime.tensor(np.zeros(100_000, np.int64)), tvm.runtime.tensor(np.zeros(1, np.int64))
    run(tvm.runtime.tensor(np.zeros(shape, dtype)), *results)
    return [int(line) for line in results[0].numpy()[: results[1].numpy()[0]]]


@pytest.mark.parametrize("pages", [1, PAGES])
@pytest.mark.parametrize("lines", [1, 2, 4, 8])
def test_all_of_a_panel_is_asked_for_once(monkeypatch: pytest.MonkeyPatch, lines: int, pages: int) -> None:
    op = LinearOp((4,), 96, (256,), (True,), (False,))
    size = 96 * 64 * 4 // 64  # lines of a panel of 64 features
    order = asked(
        monkeypatch, op, size // lines, lambda ahead, i: ahead.ask_for_panel(T.int64(2), i * lines, lines), pages
    )
    assert sorted(order) == list(range(2 * size, 3 * size))
    # The lines after one another are of as many runs of the panel as pages take turns.
    runs = {(line - 2 * size) // (size * 2 // PAGES) for line in order[: PAGES // 2]}
    assert len(runs) == (1 if pages == 1 else PAGES // 2)


@pytest.mark.parametrize("words", [1, 3])
def test_what_comes_is_asked_for_once_as_far_ahead_as_pages_take_turns(
    monkeypatch: pytest.MonkeyPatch, words: int
) -> None:
    op = LinearOp((1,), 768, (256,), (True,), (False,))
    order = asked(monkeypatch, op, 768 // words, lambda ahead, i: ahead.ask_beyond(T.int64(1), i * words, words), PAGES)
    size = 768 * 64 * 4 // 64
    block = PAGES * PAGE
    assert size % block == 0
    if words == 1:  # three words are twelve lines, which do not divide the turns of eight
        assert sorted(order) == list(range(size + block, 2 * size + block))
    assert {line // PAGE for line in order[:PAGES]} == {(size + block) // PAGE + page for page in range(PAGES)}


def test_without_turns_lines_are_asked_for_one_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    op = LinearOp((1,), 768, (256,), (True,), (False,))
    order = asked(monkeypatch, op, 768, lambda ahead, i: ahead.ask_beyond(T.int64(0), i, 1), 1)
    assert order == list(range(3, 768 * 4 + 3))


def test_weights_that_the_second_cache_holds_take_no_turns() -> None:
    kernel = CpuLinearKernel()
    for features, turns in ((256, False), (3072, True)):
        op = LinearOp((1,), 768, (features,), (True,), (False,))
        layout = kernel.layout(op, PROFILE, 4)
        assert (layout.weight_bytes > PROFILE.hardware.l2_kib * 1024 // 2) is turns


@pytest.mark.parametrize("count", [4, 32, 30, 512])
def test_rows_of_a_cache_are_asked_for_once(count: int) -> None:
    layout = ScoreLayout(rows=1, lanes=16, registers=32, runs=PAGES // 2)
    order = [int(tvm.sym.Analyzer().simplify(layout.asked_for(T.int64(i), count))) for i in range(count)]
    assert sorted(order) == list(range(count))
    assert (order == sorted(order)) is (count % (PAGES // 2) != 0 or count == PAGES // 2)
