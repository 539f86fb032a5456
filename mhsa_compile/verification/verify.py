"""What is right: the verdict on an artifact, against the oracle and against itself.

The parts have files of their own: `parity` for one run, `self_checks` for what must hold between runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mhsa_compile.files.foreign_errors import entry_point
from mhsa_compile.verification import self_checks as selfcheck
from mhsa_compile.verification.oracle.evaluate import Reference, eager, oracle
from mhsa_compile.verification.paired_runs import SelfCheck
from mhsa_compile.verification.parity import CaseResult, check
from mhsa_compile.verification.precision import Precision
from mhsa_compile.verification.random_inputs import Arrays, default_cases, whole_masks
from mhsa_compile.verification.repeated_runs import Run
from mhsa_compile.verification.stored_model import stored_model

if TYPE_CHECKING:
    import os

    from mhsa_compile.runtime.artifact.artifact import Artifact

__all__ = [
    "CaseResult",
    "SelfCheck",
    "Verdict",
    "check",
    "eager",
    "oracle",
    "verify",
    "verify_run",
]


@dataclass(frozen=True)
class Verdict:
    """All runs of `verify`, and its self-checks; right if every one is within its budget."""

    cases: tuple[CaseResult, ...]
    checks: tuple[SelfCheck, ...] = ()

    @property
    def ok(self) -> bool:
        return all(case.ok for case in self.cases) and all(check.ok for check in self.checks)

    @property
    def worst(self) -> CaseResult:
        return max(self.cases, key=lambda case: case.ratio)


@entry_point
def verify(
    artifact: Artifact | str | os.PathLike[str],
    *,
    cases: Iterable[Mapping[str, int]] | None = None,
    seed: int = 0,
    threads: int | None = None,
    self_checks: bool = True,
) -> Verdict:
    """Runs a compiled artifact on random inputs, and holds it against the oracle and against itself.

    cases           sizes of the symbolic dims, such as {"B": 3, "L": 7}; by default lengths of 1, 7, 64 and 197
    seed            of all that is random: inputs, and the sizes of the self-checks
    self_checks     whether to run those of `self_checks`, too

    Raises ArtifactError, and InputError for a case that leaves a dim open.

    >>> import mhsa_compile as mhsa
    >>> verdict = verify(mhsa.compile(mhsa.AttentionSpec(embed_dim=32, num_heads=4)), cases=[{"B": 2, "L": 7}])
    >>> verdict.ok, verdict.worst.error < verdict.worst.budget
    (True, True)
    """
    from mhsa_compile.runtime.array_memory import to_list
    from mhsa_compile.runtime.artifact.artifact import Artifact
    from mhsa_compile.runtime.compiled_attention import load

    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)

    def start(threads: int | None) -> Run:
        compiled = load(opened, threads=threads)

        def run(inputs: Arrays) -> list[np.ndarray]:
            return to_list(compiled.from_host(**inputs))

        return run

    on_cpu = opened.manifest.target.family == "cpu"
    verdict = verify_run(opened, start(threads), cases=cases, seed=seed, self_checks=self_checks)
    if not self_checks or not on_cpu:
        return verdict
    return replace(verdict, checks=(*verdict.checks, selfcheck.with_any_threads(opened.manifest, start, seed)))


def verify_run(
    artifact: Artifact,
    run: Callable[[Arrays], list[np.ndarray]],
    *,
    cases: Iterable[Mapping[str, int]] | None = None,
    seed: int = 0,
    self_checks: bool = True,
) -> Verdict:
    """`verify` of an artifact that runs elsewhere: `run` takes inputs by name, and returns all outputs in order."""
    model = stored_model(artifact)
    manifest = artifact.manifest
    sizes = [{**case, **whole_masks(manifest, case)} for case in default_cases(model)] if cases is None else cases
    reference = Reference(model, Precision.of(manifest))
    results = tuple(check(model, run, dims, seed + i, reference=reference) for i, dims in enumerate(sizes))
    return Verdict(results, selfcheck.self_checks(reference, manifest, run, seed) if self_checks else ())
