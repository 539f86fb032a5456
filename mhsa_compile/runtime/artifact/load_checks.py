"""Whether the code of an artifact may run on this machine."""

from __future__ import annotations

from pathlib import Path

from mhsa_compile.errors import ArtifactError
from mhsa_compile.hardware import host, tile_permission
from mhsa_compile.hardware.profile import CpuProfile, shipped_relatives
from mhsa_compile.runtime.artifact.manifest import FORMAT_VERSION, MODEL, Manifest

_LOOPS_CHECKED = 4
"""The first format whose code was looked at for what threads share (`data_races`)."""


def check_loops(manifest: Manifest, path: Path) -> None:
    """Raises ArtifactError for an artifact from before code was looked at for what threads share, if it may need that.

    What no kernel claims of a model was compiled by TVM then, and with two threads its results were wrong at random.
    """
    mine = manifest.spec is not None and not manifest.has_fallbacks
    if manifest.format_version >= _LOOPS_CHECKED or not isinstance(manifest.target, CpuProfile) or mine:
        return
    int8 = " --weights int8" if manifest.int8_weights else ""
    command = f"mhsa compile {path / MODEL} --target {manifest.target.name}{int8} -o NEW.mhsa"
    raise ArtifactError(
        f"artifact {str(path)!r}",
        f"format version {FORMAT_VERSION}, since it holds code of TVM's own",
        f"format version {manifest.format_version}, in whose code threads may disturb each other",
        f"Compile it again: {command}",
    )


def check_cpu(manifest: Manifest) -> None:
    """Raises ArtifactError unless this machine has the architecture and the features that the code was made for."""
    target = manifest.target
    if not isinstance(target, CpuProfile):
        raise ArtifactError("artifact", "one compiled for a CPU", f"one for {target.family}")
    architecture = target.tvm.mtriple.partition("-")[0]
    if architecture != host.architecture():
        raise ArtifactError("artifact", f"a CPU of {architecture}, as it was compiled for one", host.architecture())
    if target.system != host.system():
        expected, again = (
            f"{target.system}, as it was compiled for it",
            "Compile it for this one: --target native here.",
        )
        relative = next((other.name for other in shipped_relatives(target) if other.system == host.system()), None)
        hint = again if relative is None else f"{again} Or elsewhere: --target {relative}."
        raise ArtifactError("artifact", expected, host.system(), hint)
    check_features(set(target.hardware.features))


def check_features(features: set[str]) -> None:
    """Raises ArtifactError unless this CPU has them, and lets this process use them: tiles are asked for."""
    present = host.cpu_features()
    if not (missing := features - present):
        if tile_permission.TILES in features:
            _check_tiles()
        return
    expected = f"a CPU with {' '.join(sorted(features))}, as it was compiled for one"
    if not present:
        raise ArtifactError(
            "artifact",
            expected,
            "one of which nobody tells what it has: it could not be asked itself, and /proc/cpuinfo cannot be read",
            "Mount /proc, or let this process map memory as code, with which it asks. `mhsa doctor` shows the rest.",
        )
    raise ArtifactError(
        "artifact",
        expected,
        f"{host.cpu_model()} without {' '.join(sorted(missing))}, as {host.features_from()} says",
        "Compile it for this machine: --target native here, or elsewhere another of `mhsa targets`.",
    )


def _check_tiles() -> None:
    if reason := tile_permission.refusal():
        raise ArtifactError(
            "artifact",
            f"a process that may use matrix tiles ({tile_permission.TILES}), as it was compiled for them",
            f"one that may not: {reason}",
            f"Or compile it without them: --target {tile_permission.WITHOUT_TILES}, or native, which leaves them out "
            "where they are refused.",
        )
