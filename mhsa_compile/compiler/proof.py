"""An artifact against the file that it was compiled from: run once, the outcome for its manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mhsa_compile.errors import BuildError, MhsaError, MismatchError
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.hardware import environment
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.artifact.manifest import SOURCE, Check

if TYPE_CHECKING:
    import onnx

    from mhsa_compile.frontend.export.source import Source
    from mhsa_compile.verification.repeated_runs import Run

SWITCH = "MHSA_CHECK"
OFF = Check(note="it was switched off")
_OURS = Check(note="it is a module of this library; `mhsa verify` holds it against float64")
_REPORT = (
    "This is a defect of ours: report it, with the model. --dump keeps both arrays; --no-check compiles it anyway."
)


def is_on(check: bool | None) -> bool:
    """Whether what is compiled is checked: as asked, else unless MHSA_CHECK=0 is in the environment. Raises
    InputError."""
    return environment.leaves_on(SWITCH) if check is None else check


def check_source(
    origin: Source, artifact: Artifact, compile: Callable[[onnx.ModelProto], Artifact], dump: Path | None
) -> Check:
    """The outcome. `origin` is the source as it became canonical; `compile` compiles a part of it again.

    Raises MismatchError.
    """
    from mhsa_compile.verification import first_difference
    from mhsa_compile.verification.evaluators import Evaluators
    from mhsa_compile.verification.file_check import check_file
    from mhsa_compile.verification.precision import Precision
    from mhsa_compile.verification.stored_model import stored_model

    manifest = artifact.manifest
    if origin.spec is not None:
        return _OURS
    if manifest.target.family != "cpu":
        return Check(note=f"it was compiled for {manifest.target.name}")
    if manifest.in_place:
        return Check(note="a call writes into its caches, which no other evaluator does")
    try:
        run = _runner(artifact)
    except MhsaError as error:
        return Check(note=f"it does not run here ({error})")
    file = artifact.path / SOURCE
    beside = file if file.exists() else None
    evaluators = Evaluators(origin.original, origin.model, beside, Precision.of(manifest))
    with reading(BuildError, "model", "code that takes what the model takes", _REPORT):
        outcome = check_file(evaluators, run, [info.name for info in manifest.outputs])
    if isinstance(outcome, Check):
        return outcome
    if dump is not None:
        first_difference.keep(dump, outcome)

    def again(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Run, Precision]:
        part = compile(model)
        return stored_model(part), _runner(part), Precision.of(part.manifest)

    place = first_difference.first_difference(origin.original, outcome.name, again)
    if place is None:
        name = f"output {outcome.name!r} differs from {' and '.join(outcome.against)}"
        return Check(note=f"{name}; ONNX Runtime, which refuses the whole file, agrees with ours about its parts")
    at = " ".join(f"{name}={size}" for name, size in outcome.sizes.items())
    expected = f"the values of {' and '.join(outcome.against)} within {outcome.budget:.2g}{f' at {at}' if at else ''}"
    got = f"an error of {outcome.error:.2g}; {place}"
    raise MismatchError(f"output {outcome.name!r}", expected, got, _REPORT)


def _runner(artifact: Artifact) -> Run:
    from mhsa_compile.runtime.compiled_attention import load

    compiled = load(artifact, threads=1)  # the same sums in the same order each time
    result_of = compiled.from_host

    def run(inputs: dict[str, object]) -> list[object]:
        arguments = {info.name: inputs[info.name] for info in compiled.inputs}
        result = result_of(**arguments)
        return list(result) if isinstance(result, list | tuple) else [result]

    return run  # type: ignore[return-value]  # arrays, as it was called with
