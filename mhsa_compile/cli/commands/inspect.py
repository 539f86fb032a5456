"""`mhsa inspect` and `mhsa targets`: what an artifact holds, what can be compiled for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from mhsa_compile.cli.common import options, output
from mhsa_compile.errors import OutputError, TargetError
from mhsa_compile.files import places
from mhsa_compile.files.atomic_write import write
from mhsa_compile.hardware import host
from mhsa_compile.runtime.misfits import shape_text

if TYPE_CHECKING:
    from mhsa_compile.hardware.profile import CpuProfile
    from mhsa_compile.runtime.artifact.artifact import Artifact


def inspect(artifact: options.ArtifactFolder, *, json: options.Json = False) -> None:
    """Show what an artifact holds, after checking every file against its hash."""
    from mhsa_compile.runtime.artifact.artifact import Artifact

    opened = Artifact.open(artifact)  # raises ArtifactError for whatever does not match the manifest
    sizes = {name: (Path(opened.path) / name).stat().st_size for name in opened.manifest.files}
    if json:
        output.print_json({"manifest": opened.manifest, "bytes": sizes, "hashes_ok": True})
        return
    _show(opened, sizes)


def _show(opened: Artifact, sizes: dict[str, int]) -> None:
    manifest = opened.manifest
    tensors = [("input", info) for info in manifest.inputs] + [("output", info) for info in manifest.outputs]
    tensors += [("weight", info) for info in manifest.weights]
    output.print_table(
        f"{opened.path}: format {manifest.format_version}, target {manifest.target.name}",
        ("tensor", "name", "dtype", "dims"),
        ((role, info.name, info.dtype, shape_text(info.dims)) for role, info in tensors),
    )
    if manifest.spec is None and manifest.attention:
        output.print_table(
            "Attention",
            ("layer>", "name", "form", "", "note"),
            (
                (number, block.name, block.form, "fused" if block.fused else "not fused", block.note)
                for number, block in enumerate(manifest.attention)
            ),
        )
    output.print_table(
        "Operations",
        ("name", "kind", "kernel", "config", "config from", "note"),
        ((op.name, op.op, op.kernel, output.assignments(op.config), op.source, op.note) for op in manifest.ops),
    )
    for line in manifest.cost_lines():
        output.line(line)
    tuned = [(op.name, op.source, op.tuning) for op in manifest.ops if op.tuning]
    if tuned:
        output.print_table("Tuning", ("operation", "config from", "record, or why there is none"), tuned)
    facts: list[tuple[str, str, object]] = [
        (f"attention {one.op}", key, value)
        for one in manifest.semantics
        for key, value in _flat(msgspec.to_builtins(one))
    ]
    facts += [] if manifest.check is None else [("check", "outcome", manifest.check.sentence())]
    facts += [("linears", "weights", "int8, rounded when they are bound")] if manifest.int8_weights else []
    facts += [("float32 products", "asked", manifest.float32_products)]
    facts += [("float32 products", "outcome", manifest.float32_outcome() or "ieee everywhere")]
    facts += [
        ("spec", key, value) for key, value in (manifest.spec.to_dict() if manifest.spec is not None else {}).items()
    ]
    facts += [("target", key, value) for key, value in _flat(msgspec.to_builtins(manifest.target))]
    facts += [("version", key, value) for key, value in manifest.versions.items()]
    output.print_table("Facts", ("of", "key", "value"), facts)
    files = ((name, f"{sizes[name]:,}", digest[:12], output.ok_cell(True)) for name, digest in manifest.files.items())
    output.print_table("Files", ("file", "bytes>", "sha256", ""), files)


def targets(
    name: Annotated[str | None, typer.Argument(help="A target, `native`, or a .toml file.")] = None,
    *,
    detect: Annotated[bool, typer.Option("--detect", help="Detect this machine: the target `native`.")] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE.toml", help="Write the target to a new file.")
    ] = None,
    json: options.Json = False,
) -> None:
    """List the targets, or print or write one as the TOML that a file of your own could start from."""
    from mhsa_compile.hardware import profile

    if detect and name is not None:
        raise TargetError("NAME", "a target or --detect", f"{name} and --detect", "Leave one of them out.")
    name = profile.NATIVE if detect else name
    if name is not None:
        target = profile.load_profile(name)
        text = (_findings(profile.detect()) if name == profile.NATIVE else "") + target.to_toml()
        if out is not None:
            _save(text, out)
        output.print_json(target) if json else output.line(text, nl=False)
        return
    if out is not None:
        raise TargetError("NAME", "a target to write to -o, or --detect", "neither", "`mhsa targets` lists them.")
    profiles = [profile.load_profile(each) for each in profile.profile_names()]
    if json:
        output.print_json(profiles)
        return
    columns = (
        "target", "triple", "CPU", "microarchitecture", "vector bits>", "registers>", "L1d KiB>", "L2 KiB>", "cores>",
    )  # fmt: skip
    rows = (
        (p.name, p.tvm.mtriple, p.tvm.mcpu, p.hardware.microarchitecture or "any", p.hardware.vector_bits,
         p.hardware.vector_registers, p.hardware.l1d_kib,
         p.hardware.l2_kib, p.hardware.cores)
        for p in profiles if isinstance(p, profile.CpuProfile)
    )  # fmt: skip
    output.print_table("CPUs", columns, rows)
    gpu_columns = ("target", "host", "architecture", "multiprocessors>", "shared KiB a block>", "threads at once>")
    gpus = (
        (p.name, p.tvm.mtriple, p.tvm.arch, p.hardware.multiprocessors, p.hardware.shared_kib_per_block,
         p.hardware.threads_per_multiprocessor)
        for p in profiles if isinstance(p, profile.CudaProfile)
    )  # fmt: skip
    output.print_table("GPUs", gpu_columns, gpus)


def _save(text: str, out: Path) -> None:
    """Writes a profile to a file that is not there yet."""
    if out.suffix != ".toml":
        raise OutputError("-o", "a file named .toml: its name becomes the target's", repr(str(out)))
    if places.is_there(out):
        raise OutputError("-o", "a file that is not there yet", repr(str(out)), "Choose another name.")
    write(out, text.encode(), "-o")


def _findings(profile: CpuProfile) -> str:
    """What was detected and is no field, as a comment."""
    threads = f"{host.allowed_cpus()} threads for this process, {host.threads_per_core()} a core"
    name = f"{host.cpu_model()} ({profile.hardware.microarchitecture})"
    return f"# {name}: {profile.vector_lanes('float32')} float32 a vector; {threads}.\n"


def _flat(table: dict[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    """{"a": {"b": 1}} -> [("a.b", 1)]"""
    pairs: list[tuple[str, object]] = []
    for key, value in table.items():
        if isinstance(value, dict):
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            text = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
            pairs.append((prefix + key, text))
    return pairs
