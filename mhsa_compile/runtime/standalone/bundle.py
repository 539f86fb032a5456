"""A bundle: an artifact with all that a device needs to run it, and a C++ program that does.

    bundle(Artifact.open("attention.mhsa"), "attention-arm")

    artifact/       as it was
    lib/            TVM's runtime for the artifact's target
    main.cpp        loads the artifact, calls it, prints times and sums; with its headers, made to be copied
    include/        the headers of tvm_ffi that it includes
    Makefile, README.md

An artifact for WebAssembly becomes a module of JavaScript instead (`javascript_bundle`).

Not to be mixed up with `tuning/measure/work_bundle`, work that a device measures for a tuner.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mhsa_compile.errors import InputError, OutputError
from mhsa_compile.files import places
from mhsa_compile.files.atomic_write import atomic_folder, check_place
from mhsa_compile.hardware import zig
from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.artifact.manifest import FORMAT_VERSION, MANIFEST
from mhsa_compile.runtime.standalone import javascript_bundle, runtimes, templates
from mhsa_compile.runtime.standalone.templates import MAIN

_ARTIFACT = "artifact"
_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]((?:tvm|dlpack)/[^>"]+)[>"]', re.MULTILINE)
_LICENSES = ("LICENSE", "NOTICE")


@dataclass(frozen=True)
class Bundle:
    """What was written: bytes of each part, where its runtime comes from, and the command that compiles its program; in
    a bundle of JavaScript there is nothing to compile."""

    path: Path
    sizes: dict[str, int]
    runtime: str
    command: str

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())


def check_folder(folder: Path, force: bool) -> None:
    """Checks, before the work, that a bundle may be written to a folder. Raises OutputError."""
    check_place(folder, force, _manifest_in(folder))


def _manifest_in(folder: Path) -> str:
    """Where a bundle that is there has its manifest: one of JavaScript's has it beside its code."""
    return MANIFEST if (folder / javascript_bundle.CODE).is_file() else f"{_ARTIFACT}/{MANIFEST}"


def bundle(
    artifact: Artifact,
    path: str | os.PathLike[str],
    *,
    runtime: str | Path | None = None,
    build: bool = False,
    force: bool = False,
    progress: Callable[[str], None] = lambda stage: None,
) -> Bundle:
    """Writes the bundle of an artifact, whole or not at all; `force` replaces the bundle that is there.

    runtime   where TVM's runtime comes from; see `runtimes.find`
    build     also compiles the program, with Zig, for the artifact's target

    Raises OutputError, InputError, InstallationError and BuildError.
    """
    folder = places.resolve(path, OutputError, "output folder")
    check_folder(folder, force)
    if not isinstance(artifact.manifest.target, CpuProfile):
        family = artifact.manifest.target.family
        raise InputError("artifact", "one for a CPU: bundles are for those so far", f"one for {family}")
    if artifact.manifest.format_version != FORMAT_VERSION:
        got = f"format version {artifact.manifest.format_version}"
        raise InputError(
            "artifact", f"one of format version {FORMAT_VERSION}, which programs read", got, "Compile it again."
        )
    if artifact.manifest.target.is_webassembly:
        if runtime is not None or build:
            got = "--build" if build else f"--runtime {runtime}"
            raise InputError("artifact", "one for a CPU, beside --runtime or --build", f"one for WebAssembly and {got}")
        return _javascript(artifact, folder, force)
    runtime_libraries = runtimes.find(artifact.manifest, runtime, progress)
    headers = runtimes.package_folder("tvm_ffi") / "include"
    triple = artifact.manifest.target.link.triple
    with atomic_folder(folder, force, _manifest_in(folder)) as staged:
        (staged / _ARTIFACT).mkdir()
        artifact.copy(staged / _ARTIFACT)
        shutil.copytree(runtimes.PROGRAM_FILES, staged, dirs_exist_ok=True)
        _copy_headers(headers, staged)
        (staged / "lib").mkdir()
        for name, data in runtime_libraries.libraries.items():
            (staged / templates.place(name)).write_bytes(data)
        for name in _LICENSES:
            shutil.copyfile(runtimes.package_folder("tvm") / name, staged / "lib" / name)
        words = templates.compiler_words(runtime_libraries.libraries, artifact.manifest.target.system)
        (staged / "Makefile").write_text(templates.makefile(words, triple), encoding="utf-8")
        (staged / "README.md").write_text(
            templates.readme(artifact.manifest, runtime_libraries, words), encoding="utf-8"
        )
        if build:
            progress(f"compile the program for {triple}")
            zig.run("c++", triple, words, "a program", folder=staged)
        sizes = _sizes(staged)
    return Bundle(folder, sizes, runtime_libraries.origin, templates.zig_command(words, triple))


def _javascript(artifact: Artifact, folder: Path, force: bool) -> Bundle:
    javascript_bundle.check(artifact.manifest)
    with atomic_folder(folder, force, _manifest_in(folder)) as staged:
        javascript_bundle.write(artifact, staged)
        return Bundle(folder, _sizes(staged), "its own files", "")


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of everything in a folder, by name."""
    return {entry.name: _size(entry) for entry in sorted(folder.iterdir())}


def _copy_headers(include: Path, folder: Path) -> None:
    """Copies the headers that the program includes, and those that they include."""
    waiting = [*folder.glob("*.h"), folder / MAIN]
    names: set[str] = set()
    while waiting:
        for name in _INCLUDE.findall(waiting.pop().read_text(encoding="utf-8")):
            if name not in names and (include / name).is_file():
                names.add(name)
                target = folder / "include" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(include / name, target)
                waiting.append(target)


def _size(path: Path) -> int:
    files = [part for part in path.rglob("*") if part.is_file()] if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)
