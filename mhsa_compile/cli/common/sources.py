"""Turns a command's arguments into something that `pipeline.compile` takes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from mhsa_compile.cli.common import output
from mhsa_compile.errors import ModelError
from mhsa_compile.files import input_files, places
from mhsa_compile.files.foreign_files import hint_of

if TYPE_CHECKING:
    from mhsa_compile.records.record import Record
    from mhsa_compile.runtime.artifact.artifact import Artifact
    from mhsa_compile.spec.attention_spec import AttentionSpec

SourceArgument = Annotated[
    Path | None,
    typer.Argument(metavar="SOURCE", help="An .onnx file or a spec .toml; else state --embed-dim and --num-heads."),
]


def require_compiler() -> None:
    """Raise InstallationError unless everything that compiling imports is there."""
    from mhsa_compile.hardware import environment

    environment.check_tvm_pair()
    environment.require("torch", "onnx", "onnxscript", "ziglang", extra="compile")


def resolve(source: Path | None, fields: dict[str, Any]) -> Path | AttentionSpec:
    """An .onnx file as it is, or a spec from a .toml file or from flags. Raises ModelError and SpecError."""
    from mhsa_compile.spec.attention_spec import AttentionSpec

    if source is None:
        if not {"embed_dim", "num_heads"} <= fields.keys():
            expected = "an .onnx file, a spec .toml, or --embed-dim and --num-heads"
            raise ModelError("SOURCE", expected, f"only {_flags(fields)}" if fields else "none of them")
        return AttentionSpec(**fields)
    if fields:
        raise ModelError(
            "SOURCE", "a file or the spec's flags", f"{source} and {_flags(fields)}", "Leave one of them out."
        )
    if source.suffix not in (".onnx", ".toml"):
        from mhsa_compile.runtime.artifact.manifest import MODEL

        inner = source / MODEL
        hint = f"It is an artifact, whose model is {str(inner)!r}." if places.is_file(inner) else hint_of(source)
        raise ModelError("SOURCE", "a file named .onnx or .toml", repr(str(source)), hint)
    if source.suffix == ".toml":
        return AttentionSpec.from_toml(input_files.read_text(source, ModelError, "SOURCE", "a spec .toml"))
    input_files.open_file(source, ModelError, "SOURCE", "an .onnx file").close()  # now, not after seconds of imports
    return source


def read_records(paths: Iterable[Path]) -> list[Record]:
    """The records of several files; of a torn last line, one line on stderr. Raises RecordsError."""
    from mhsa_compile.records import record_files

    records, sentences = record_files.gather(paths)
    for sentence in sentences:
        output.line(f"Warning: {sentence}", err=True)
    return records


def compile_with_progress(
    source: Path | None,
    fields: dict[str, Any],
    target: str,
    *,
    dims: dict[str, int],
    seed: int,
    float32_products: str = "auto",
    records: Path | None = None,
    seconds: dict[str, float] | None = None,
    **options: Any,
) -> Artifact:
    """The whole flow, from a command's arguments to an artifact that is not saved yet; weights of a spec are random.

    Of a file only `fields["outputs"]` may be stated: what a call returns. `seconds` is told how long each stage took;
    `options` are others of `compile`.
    """
    from mhsa_compile.hardware.profile import load_profile
    from mhsa_compile.spec.float32_products import float32_request
    from mhsa_compile.spec.outputs import layer_words

    # What is mistyped is answered now, not after the seconds that importing PyTorch takes.
    products = float32_request(float32_products)
    profile = load_profile(target)
    at_hand = read_records(profile.records() if records is None else [records])
    of_spec, outputs = dict(fields), None
    if source is not None:
        outputs = of_spec.pop("outputs", None)
    spec_or_file = resolve(source, of_spec)
    if outputs is not None:
        layer_words(outputs) if isinstance(spec_or_file, Path) else replace(spec_or_file, outputs=outputs)
    require_compiler()
    with output.stages(seconds) as stage:
        if not isinstance(spec_or_file, Path):
            stage("load PyTorch")
            import torch

            torch.manual_seed(seed)
        from mhsa_compile.compiler.pipeline import compile

        return compile(
            spec_or_file,
            profile,
            dims=dims,
            outputs=outputs,
            float32_products=products,
            records=at_hand,
            progress=stage,
            **options,
        )


def _flags(fields: dict[str, Any]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in fields)
