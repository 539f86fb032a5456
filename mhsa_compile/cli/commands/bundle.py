"""`mhsa bundle`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mhsa_compile.cli.common import options, output
from mhsa_compile.errors import OutputError
from mhsa_compile.files import places


def bundle(
    artifact: options.ArtifactFolder,
    *,
    out: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="The bundle's folder.")],
    runtime: Annotated[
        str | None,
        typer.Option(
            metavar="build|PATH",
            help="TVM's runtime for the target: built here with Zig, or in a wheel, or in a folder of wheels or "
            "libraries. By default what is installed, and for another architecture: build.",
        ),
    ] = None,
    build: Annotated[bool, typer.Option("--build", help="Compile the program, too, with Zig.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the bundle if it exists.")] = False,
    json: options.Json = False,
) -> None:
    """Gather an artifact, TVM's runtime for its target and a C++ program that runs it, for a device without Python."""
    from mhsa_compile.runtime.artifact.artifact import Artifact
    from mhsa_compile.runtime.standalone import bundle as standalone
    from mhsa_compile.runtime.standalone import templates

    standalone.check_folder(places.resolve(out, OutputError, "-o"), force)
    opened = Artifact.open(artifact)
    with output.stages() as stage:
        result = standalone.bundle(opened, out, runtime=runtime, build=build, force=force, progress=stage)
    if json:
        output.print_json({"bundle": out, "bytes": result.bytes, "sizes": result.sizes, "runtime": result.runtime})
        return
    rows = ((name, f"{size / 1e6:.2f}") for name, size in result.sizes.items())
    title = f"{out} for {opened.manifest.target.name}: {result.bytes / 1e6:.1f} MB, the runtime from {result.runtime}"
    output.print_table(title, ("part", "MB>"), rows)
    output.line(
        f"On the device: ./{templates.PROGRAM}" if build else f"Compile its program: cd {out} && {result.command}"
    )
