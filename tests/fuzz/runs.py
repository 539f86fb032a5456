"""Runs a case of `fuzz.cases`, and writes the program that shows one that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

from fuzz.cases import (
    AttentionCase,
    BytesCase,
    Case,
    DecodeCase,
    FlowCase,
    InsideCase,
    LinearCase,
    Outcome,
    ProductCase,
)
from fuzz.flows import decode_outcome, flow_outcome
from fuzz.kernels import attention_outcome, inside_outcome, linear_outcome
from fuzz.products import bytes_outcome, product_outcome

RUNS: dict[type, Callable[[Any], Outcome]] = {
    AttentionCase: attention_outcome,
    InsideCase: inside_outcome,
    LinearCase: linear_outcome,
    ProductCase: product_outcome,
    BytesCase: bytes_outcome,
    FlowCase: flow_outcome,
    DecodeCase: decode_outcome,
}


class OverBudget(AssertionError):
    """A case whose error is over its budget; the text says what was found, and has a program that shows it again."""

    def __init__(self, case: Case, found: str) -> None:
        super().__init__(f"{found}\n\n{program(case)}")
        self.case, self.found = case, found


def run(case: Case) -> Outcome:
    """Runs a case. Raises OverBudget, with a program that shows it again, also where the case does not even run."""
    try:
        outcome = RUNS[type(case)](case)
    except Exception as error:
        raise OverBudget(case, f"{type(error).__name__}: {error}") from error
    if not outcome.share <= 1:
        raise OverBudget(case, f"error {outcome.share:.3g} of the budget")
    return outcome


def program(case: Case) -> str:
    """A Python program that runs the case; but for a FlowCase it wants the folder tests/ in PYTHONPATH."""
    if isinstance(case, FlowCase):
        return FLOW_PROGRAM.format(**{name: getattr(case, name) for name in case.__dataclass_fields__})
    parts = (getattr(case, name) for name in case.__dataclass_fields__)
    names = sorted({type(value).__name__ for value in (case, *parts) if is_dataclass(value)})
    return f"from fuzz.cases import {', '.join(names)}\nfrom fuzz.runs import run\n\nprint(run({case!r}))\n"


FLOW_PROGRAM = """\
import torch
import mhsa_compile as mhsa

torch.manual_seed({seed})
module = mhsa.{module}(mhsa.AttentionSpec(**{spec})).eval()
artifact = mhsa.compile(module, {target!r}, dims={dims}, weights={weights!r})
verdict = mhsa.verify(artifact, cases={calls}, seed={seed}, threads=1)
print(verdict.worst, *verdict.checks, sep="\\n")
assert verdict.ok
"""
