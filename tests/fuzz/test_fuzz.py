"""A fast slice of `make fuzz-parity`, and that a fault would be found, shrunk and printed as a program that runs."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace

import numpy as np
import pytest
import torch

from fuzz import attention, flows, runs
from fuzz.campaign import Campaign, Plan, Record, Tally, rounds, spec_of
from fuzz.cases import AttentionCase, BytesCase, DecodeCase, FlowCase, InsideCase, LinearCase, Outcome, ProductCase
from fuzz.narrowing import Narrowing
from fuzz.runs import OverBudget, program, run
from mhsa_compile.verification.oracle.products_by_terms import products_by_terms

LINEAR = LinearCase(
    seed=0, machine="avx2", cores=1, dtype="float32", int8=False, in_features=7, widths=(5,), biased=(True,),
    transposed=(False,), padding=0, fixed=False, calls=((1, 3),),
)  # fmt: skip
ATTENTION = AttentionCase(
    seed=0, machine="avx2", cores=1, dtype="float32", heads=(2, 1), widths=(5, 7), scale=None, layout="rows",
    output="rows", fixed="L", band=(None, 0, "bottom_right"), mask=("bool", (1, 1, "L", "S")), static=None,
    magnitude=1.0, poison=True, extras=("lengths", "sinks", "slopes"), softcap=5.0, calls=((2, 3, 13),),
)  # fmt: skip
INSIDE = InsideCase(ATTENTION, ("lse", "top_k:2"))
PRODUCT = ProductCase(
    seed=0, machine="avx2", cores=1, dtype="float32", result="float32", order="heads", fixed="k",
    calls=((1, 2, 17, 33, 5), (2, 1, 3, 33, 16)), inputs=("normal", "special"),
)  # fmt: skip
BYTES = BytesCase(
    seed=0, machine="native", cores=1, x_dtype="uint8", stored=("int8", "uint8"), in_features=31, widths=(7, 16),
    centred=False, padding=3, fixed=False, calls=((1, 7), (2, 3)),
)  # fmt: skip
DECODE = DecodeCase(
    seed=1, spec={"embed_dim": 96, "num_heads": 2, "head_dim": 5}, target="native", prompts=(3, 5),
    steps=(1, 2), spare=1,
)  # fmt: skip
FLOW = FlowCase(
    seed=1, module="ScaledDotProductAttention", spec={"embed_dim": 8, "num_heads": 2, "mask": "bool"}, target="native",
    dims={}, weights=None, calls=({"B": 1, "L": 3, "S": 5},),
)  # fmt: skip


def slice_of(what: str, count: int, seed: int) -> list[Outcome]:
    found: list[Outcome] = []
    with contextlib.redirect_stderr(io.StringIO()):
        wrong = rounds(what, Plan(count, seed), found.append)
    assert wrong is None, wrong
    return found


@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
def test_some_kernels():
    found = slice_of("kernels", 4, seed=6)
    assert len(found) == 4 and all(outcome.share <= 1 for outcome in found)
    assert len({outcome.kind for outcome in found}) > 1


@pytest.mark.parametrize("case", [LINEAR, ATTENTION, INSIDE], ids=["linear", "attention", "inside"])
def test_a_case_is_within_its_budget_and_more_than_zero(case):
    outcome = run(case)
    assert 0 < outcome.share <= 1 and outcome.calls == 1


@pytest.mark.parametrize(("case", "calls"), [(PRODUCT, 4), (BYTES, 2)], ids=["product", "bytes"])
def test_wrong_results_of_products_are_told(case, calls):
    outcome = run(case)
    assert outcome.share <= 1 and outcome.calls == calls
    assert outcome.controls and all(share > 1 for _, share in outcome.controls)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["normal", pytest.param("special", marks=pytest.mark.thorough)])
def test_wrong_scores_and_values_are_told(kind):
    plain = replace(ATTENTION, band=None, mask=None, extras=(), calls=((2, 31, 47),), fixed="", poison=False)
    outcome = run(replace(plain, inputs=(kind, "small")))
    told = dict(outcome.controls)
    assert outcome.calls == 2 and len(told) == (3 if kind == "normal" else 0) and all(s > 1 for s in told.values())


def test_weights_of_eight_bits_may_be_small():
    """2^-100 times as large as others, which is less than the least row that once had a step."""
    case = replace(LINEAR, int8=True, widths=(33,), biased=(False,), calls=((1, 33),))
    assert run(replace(case, weights="small")).share <= 1


def test_a_stretch_goes_on_where_the_last_one_ended(tmp_path, monkeypatch):
    """Different specs, each once; what is wrong is in the record, and the others go on."""
    tried = []

    def faulty(case):
        tried.append(spec_of(case))
        return Outcome(3.0 if len(tried) == 2 else 0.5, 1, "cpu.linear", "float32", (), (("the next feature", 0.0),))

    monkeypatch.setitem(runs.RUNS, LinearCase, faulty)
    record, narrowing = Record(tmp_path / "cases"), Narrowing(machine="avx2", kind="linear")
    for stop in (3, 7):
        known = Record(record.path)
        plan = Plan(stop, 5, narrowing, known.done(0, "kernels"), seconds=100)
        assert rounds("kernels", plan, lambda result: record.write(0, "kernels", result)) is None
    assert len(tried) == len(set(tried)) == 7
    whole = Campaign(7, 0, record)
    for result in Record(record.path).results():
        whole.add(result)
    assert whole.tally.count("kernels") == 6
    over, *blind = sorted(whole.wrong)
    assert over.startswith("error 3 of the budget") and len(blind) == 6 and "no control was told" in blind[0]
    assert "0 of 6 specs told the next feature, float32" in whole.tally.lines()


def test_specs_differ_in_what_kernels_are_made_for():
    assert spec_of(replace(LINEAR, seed=1, calls=((2, 5),), inputs=("small",))) == spec_of(LINEAR)
    assert spec_of(replace(LINEAR, calls=((2, 5),), fixed=True)) != spec_of(replace(LINEAR, fixed=True))
    assert spec_of(replace(ATTENTION, calls=((2, 3, 14),))) == spec_of(ATTENTION)
    assert spec_of(replace(ATTENTION, calls=((2, 4, 13),))) != spec_of(ATTENTION)
    assert spec_of(replace(PRODUCT, order="in order")) != spec_of(PRODUCT)


@pytest.mark.thorough
def test_steps_of_decoding_that_are_wrong_are_found(monkeypatch):
    """The steps are right; then the second entry's results are taken for those of its positions in another order."""
    of_entry, judge, right = flows._of_entry, flows.judge, []

    def mixed(b, length, calls):
        rows, arrays = of_entry(b, length, calls)
        return (rows[::-1] if b else rows), arrays

    def both(draw, dims):
        right.append(judge(draw, dims).ratio)
        monkeypatch.setattr(flows, "_of_entry", mixed)
        return judge(draw, dims)

    monkeypatch.setattr(flows, "judge", both)
    with pytest.raises(OverBudget, match=r"of the budget\n\nfrom fuzz.cases import DecodeCase"):
        run(DECODE)
    assert 0 < right[0] <= 1


@pytest.mark.thorough
def test_a_flow_is_a_program_of_the_public_names():
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(program(FLOW), names)
    assert names["verdict"].ok and len(names["verdict"].cases) == 1 and names["verdict"].checks


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.thorough), "bfloat16"])
def test_a_kernel_that_is_wrong_is_found(dtype, monkeypatch):
    """A kernel seems to forget its sinks: the truth of the test has them, the compiled operation has none."""
    truth = attention.attention
    case = replace(ATTENTION, dtype=dtype, extras=(), softcap=0.0)

    def with_sinks(op, q, k, v, mask, lengths=None, sinks=None, slopes=None, dtype=None):
        return truth(op, q, k, v, mask, lengths, np.zeros(op.num_heads, np.float32), slopes, dtype)

    assert run(case).share <= 1
    monkeypatch.setattr(attention, "attention", with_sinks)
    with pytest.raises(OverBudget, match="of the budget"):
        run(replace(case, poison=False))


def test_rows_whose_visible_scores_are_all_minus_infinity_are_zeros():
    case = replace(ATTENTION, heads=(1, 1), widths=(2, 3), extras=(), softcap=0.0, mask=None, band=None, fixed="")
    operation = attention.attention_op(case)
    q, k, v = np.float32([[[[np.inf, 0.0], [1, 1]]]]), np.float32([[[[-1, 1], [-2, 1]]]]), np.ones((1, 1, 2, 3), "f4")
    operands = attention.Operands(q, k, v, None, None, None, None)
    rows = attention.evaluated(operation, operands, torch.float64)
    np.testing.assert_allclose(rows[0], [[0, 0, 0], [1, 1, 1]])


def test_other_orders_of_products_by_terms_have_other_terms():
    case = replace(ATTENTION, heads=(1, 1), widths=(32, 32), extras=(), softcap=0.0, magnitude=30.0, seed=304)
    operation = replace(attention.attention_op(case), float32_products="bf16x3")
    operands = attention.draw_operands(np.random.default_rng(7), operation, (1, 3, 64), case.magnitude, 0)
    scores, _ = attention.scores_of(operation, operands, torch.float64)
    errors = []
    for order in range(4):
        with products_by_terms("bf16x3"):
            other, _ = attention.scores_of(operation, attention.reordered(operands, order, "bf16x3"), torch.float32)
        errors.append(np.nan_to_num((other.double() - scores).numpy(), nan=0.0))
    loss = np.abs(errors[0]).max()
    assert all(np.abs(error - errors[0]).max() > loss / 2 for error in errors[1:])
    assert all(np.abs(error).max() < 4 * loss for error in errors[1:])


@pytest.mark.thorough
def test_what_is_over_budget_is_shrunk_and_printed(monkeypatch):
    """A fault of wide linears, planted in the runner: the program names the least of them, and shows it again."""
    tried = []

    def faulty(case):
        tried.append(case)
        wide = isinstance(case, LinearCase) and max(case.widths) > 16
        return Outcome(3.0 if wide else 0.1, 1, "cpu.linear", "float32", ())

    for kind in (LinearCase, AttentionCase, InsideCase):
        monkeypatch.setitem(runs.RUNS, kind, faulty)
    with contextlib.redirect_stderr(io.StringIO()):
        wrong = rounds("kernels", Plan(200, 1), lambda outcome: None)
    assert wrong is not None and wrong.startswith(
        "error 3 of the budget\n\nfrom fuzz.cases import LinearCase\nfrom fuzz.runs import run\n"
    )
    _, _, shown = wrong.partition("\n\n")
    with pytest.raises(OverBudget):
        exec(shown, {})
    assert tried[-1].widths == (31,) and len(tried[-1].calls) == 1


def test_what_does_not_run_is_wrong_too(monkeypatch):
    monkeypatch.setitem(runs.RUNS, LinearCase, lambda case: 1 // 0)
    with pytest.raises(OverBudget, match="ZeroDivisionError"):
        run(LINEAR)


def test_the_figures_of_a_campaign():
    tally = Tally()
    tally.add(Outcome(0.25, 2, "cpu.linear", "float32", ("int8",)))
    tally.add(Outcome(0.5, 3, "flow MultiHeadAttention", "float32", ()))
    assert tally.count("kernels") == tally.count("flows") == 1
    lines = "\n".join(tally.lines()).split("\n")
    assert lines[1].split() == ["all", "flows", "1", "3", "0.50"]
    assert lines[-1].split() == ["feature", "int8", "1", "2", "0.25"]
    assert ["dtype", "float32", "2", "5", "0.50"] in [line.split() for line in lines]
