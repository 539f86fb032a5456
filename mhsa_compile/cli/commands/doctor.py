"""`mhsa doctor`: what is wrong with this machine, and what to do about it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from mhsa_compile.cli.common import options, output
from mhsa_compile.errors import InstallationError, MhsaError
from mhsa_compile.files import proc, user_folders
from mhsa_compile.files.room import size_limit, without_room
from mhsa_compile.hardware import data_paths, environment, host, tile_permission, zig

if TYPE_CHECKING:
    from mhsa_compile.hardware.profile import CpuProfile

_LOAD = "import sys, tvm.base; sys.exit('the runtime loads, the compiler does not' if tvm.base._RUNTIME_ONLY else 0)"
_COMPILE_PACKAGES = ("torch", "onnx", "onnxscript", "ziglang")
_CACHE_BYTES = 500 * 2**20  # what Zig's cache grows to over a few targets, with room
_PROBE_BYTES = 16 * 2**20  # what a compilation writes: more than a quota or a limit leaves where one is in the way


@dataclass(frozen=True)
class Finding:
    """What a check came to, and what to do about it."""

    check: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


def doctor(*, json: options.Json = False) -> None:
    """Check this machine and this installation; exit 1 if something must be repaired."""
    findings: list[Finding] = []
    with output.stages() as stage:
        for name, check in _CHECKS.items():
            stage(name)
            findings += check()
    if json:
        output.print_json(findings)
    else:
        from rich.text import Text

        colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
        rows = ((f.check, Text(f.status, colours[f.status]), f.found, f.advice) for f in findings)
        output.print_table("This machine", ("check", "", "found", "what to do"), rows)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


def _python() -> Iterator[Finding]:
    yield Finding("Python", "ok", f"{sys.version.split()[0]} at {sys.executable}")


def _tvm() -> Iterator[Finding]:
    try:
        environment.check_tvm_pair()
    except InstallationError as error:
        yield Finding("TVM pair", "fail", error.got, error.next_step)
        return  # importing such a pair may end in a segmentation fault
    versions = (f"{name} {environment.installed_version(name)}" for name in ("apache-tvm", "apache-tvm-ffi"))
    yield Finding("TVM pair", "ok", " with ".join(versions))
    user_folders.let_tvm_load()
    # In a process of its own: a broken library may take its process down.
    try:
        child = subprocess.run([sys.executable, "-P", "-c", _LOAD], capture_output=True, text=True, check=False)
    except OSError as error:
        advice = "Artifacts load without processes of their own; compiling needs them."
        yield Finding("TVM loads", "fail", f"{sys.executable} cannot be started: {error.strerror}", advice)
        return
    if child.returncode == 0:
        yield Finding("TVM loads", "ok", "yes")
    else:
        last = (child.stderr.strip().splitlines() or [f"it ended with {child.returncode}"])[-1]
        yield Finding("TVM loads", "fail", last, "Reinstall: pip install --force-reinstall --no-deps apache-tvm")


def _packages() -> Iterator[Finding]:
    extras = {**dict.fromkeys(_COMPILE_PACKAGES, "compile"), "onnxruntime": "bench"}
    needs = {"compile": "mhsa compile, verify and bench need it", "bench": "mhsa bench compares with it"}
    for package, extra in extras.items():
        version = environment.installed_version(package)
        advice = "" if version else f"pip install 'mhsa-compile[{extra}]' ({needs[extra]})"
        yield Finding(package, "ok" if version else "warn", version or "not installed", advice)
    if environment.installed_version("mhsa-runtime") is not None:
        yield _beside_the_light_runtime()


def _beside_the_light_runtime() -> Finding:
    """Whether mhsa-compile is the wheel that adds to mhsa-runtime, or has all of its files, too, which pip then takes
    away with whichever of the two it removes."""
    shared = "mhsa_compile/errors.py" in map(str, metadata.files("mhsa-compile") or ())
    if not shared:
        return Finding("mhsa-runtime", "ok", "mhsa-compile adds to it")
    advice = "Run: pip uninstall --yes mhsa-runtime, and install mhsa-compile again with --force-reinstall --no-deps"
    return Finding("mhsa-runtime", "warn", "its files belong to mhsa-compile, too, which has them all", advice)


def _cpu() -> Iterator[Finding]:
    from mhsa_compile.hardware.profile import detect

    native = detect()
    hardware = native.hardware
    untold = hardware.microarchitecture == host.UNKNOWN
    name = "of no known microarchitecture" if untold else f"microarchitecture {hardware.microarchitecture}"
    advice = "Nobody tells which CPU this is: only records that were tuned here serve it." if untold else ""
    yield Finding("CPU", "warn" if untold else "ok", f"{host.cpu_model()} ({host.architecture()}), {name}", advice)
    yield _features(native)
    yield _matrix_unit(native)
    yield Finding("caches", "ok", f"L1d {hardware.l1d_kib} KiB, L2 {hardware.l2_kib} KiB")
    cpus, present = host.allowed_cpus(), os.cpu_count() or 1
    yield Finding("CPUs", "ok", f"{cpus} allowed of {present}: the threads a call gets by default")
    beside = "on PyTorch's OpenMP where its workers are awake" if environment.installed_version("torch") else ""
    runs = "their own pool, one for the process" + (f"; {beside} in a program that imports it" if beside else "")
    yield Finding("threads of calls", "ok", runs)


def _features(native: CpuProfile) -> Finding:
    hardware, source = native.hardware, host.features_from()
    vectors = f"{hardware.vector_bits}-bit vectors, {hardware.vector_registers} registers"
    summary = f"{native.tvm.mcpu or native.tvm.mtriple}: {vectors}; {source} says so"
    asks = host.architecture() in ("x86_64", "aarch64")
    if source == "nobody" and asks:
        advice = "Mount /proc, or let processes map code: artifacts that need a feature are refused until then."
        return Finding(
            "CPU features", "fail", "nobody tells: the CPU could not be asked, and there is no /proc", advice
        )
    if source == f"/{host.CPUINFO}" and asks:
        return Finding("CPU features", "warn", summary, "The CPU could not be asked itself: processes may map no code.")
    if host.architecture() == "x86_64" and hardware.vector_bits < 256:
        advice = "No AVX2: it works, slowly. In a virtual machine, ask for the host's CPU model."
        return Finding("CPU features", "warn", summary, advice)
    return Finding("CPU features", "ok", summary)


def _matrix_unit(native: CpuProfile) -> Finding:
    """Which products of tiles there are, whether this process may use them, and what `native` makes of that. To have
    none is no fault."""
    present = sorted(host.tiles(host.cpu_features()))
    if not present:
        return Finding("matrix unit", "ok", "none: no tiles (AMX)")
    if reason := tile_permission.refusal():
        advice = f"Until then --target native is compiled without tiles, as {tile_permission.WITHOUT_TILES} is."
        return Finding("matrix unit", "warn", f"{' '.join(present)}, refused to this process: {reason}", advice)
    chosen = sorted(host.tiles(frozenset(native.hardware.features)))
    uses = f"native has {'all' if chosen == present else ' '.join(chosen) or 'none'} of them"
    return Finding("matrix unit", "ok", f"{' '.join(present)}; the permission is granted; {uses}")


def _gpus() -> Iterator[Finding]:
    """Findings on the NVIDIA driver and each GPU. To have none is no fault: most artifacts are for CPUs."""
    from mhsa_compile.errors import DeviceError
    from mhsa_compile.hardware.profile import profile_of_gpu
    from mhsa_compile.runtime import cuda_devices

    try:
        driver = cuda_devices.driver()
        gpus = [driver.gpu(index) for index in range(driver.count)]
    except (InstallationError, DeviceError) as error:
        yield Finding("GPU", "ok", f"none: {error.got}")
        return
    old = driver.cuda[0] < cuda_devices.OLDEST_CUDA
    advice = f"Artifacts for GPUs need a driver for CUDA {cuda_devices.OLDEST_CUDA}.0 or later." if old else ""
    runs = f"CUDA {driver.cuda[0]}.{driver.cuda[1]}"
    yield Finding("NVIDIA driver", "warn" if old else "ok", runs, advice)
    for gpu in gpus:
        target = profile_of_gpu(gpu.capability)
        runs = "no target is for it" if target is None else f"compile with --target {target.name}"
        capability = f"compute capability {gpu.capability[0]}.{gpu.capability[1]}"
        yield Finding(str(gpu), "ok", f"{gpu.name}, {capability}: {runs}")


def _cuda_compiler() -> Iterator[Finding]:
    """A finding on what compiles kernels for NVIDIA's GPUs, which needs no GPU. To have nothing is no fault."""
    from mhsa_compile.compiler.codegen import cuda_compiler

    try:
        name, version = cuda_compiler.compiler()
    except InstallationError as error:
        need = "Only --target cuda-... needs one."
        yield Finding("CUDA compiler", "ok", f"{error.got}: {error.expected}", f"{need} {error.next_step}")
        return
    except (MhsaError, OSError) as error:
        advice = "Repair it, or take it off the path and run: pip install 'mhsa-compile[cuda]'"
        yield Finding("CUDA compiler", "warn", str(error), advice)
        return
    place = f"at {shutil.which(name)}" if name == "nvcc" else "of NVIDIA's packages"
    yield Finding("CUDA compiler", "ok", f"{name} {version} {place}: compiles for --target cuda-...")


def _proc() -> Iterator[Finding]:
    """A finding on /proc: artifacts run without it, compiling does not."""
    if proc.is_mounted():
        yield Finding("/proc", "ok", "mounted")
        return
    advice = "Mount it to compile, profile and bench. Artifacts load: their code goes through a temporary file."
    yield Finding("/proc", "warn", "not mounted", advice)


def _folders() -> Iterator[Finding]:
    """Findings on the folders into which something is written: temporary files, without which nothing can be compiled;
    Zig's cache, which has a second place; artifacts that were compiled before; the user's own records."""
    if not user_folders.has_home():
        where = "HOME is unset, and this user has none: caches and records go to the temporary files"
        yield Finding("home", "warn", where, "Set HOME, or XDG_CACHE_HOME and XDG_DATA_HOME, to folders that last.")
    if (limit := size_limit()) is not None and limit < _CACHE_BYTES:
        yield Finding("file sizes", "warn", f"at most {limit} bytes (ulimit -f)", "ulimit -f unlimited, to compile.")
    try:
        temporary = user_folders.temporary_place()
        yield _folder("temporary files", temporary, "Nothing can be compiled: point TMPDIR to another folder.", "fail")
        yield _linker_cache()
        artifacts = data_paths.artifact_cache()
        advice = "Each artifact is compiled anew. Set XDG_CACHE_HOME to a folder that can be written."
        yield _folder("artifact cache", artifacts, advice, "warn")
        records = data_paths.own_records(data_paths.NATIVE).parent
        yield _folder("own records", records, "mhsa tune needs --records FILE, or XDG_DATA_HOME.", "warn")
    except (MhsaError, OSError) as error:
        yield Finding("temporary files", "fail", str(error), "Point TMPDIR to a folder that can be written.")


def _own_records() -> Iterator[Finding]:
    """A finding on the records that this user tuned for this machine, where there are any."""
    from mhsa_compile.records import record_files
    from mhsa_compile.records.record import does_not_tell

    try:
        path = data_paths.own_records(data_paths.NATIVE)
        if not path.is_file():
            return
        records = record_files.read(path).records
    except (MhsaError, OSError) as error:
        advice = "Until it can be read, compile with --records /dev/null."
        yield Finding("records", "warn", str(error), advice)
        return
    untold = sum(map(does_not_tell, records))
    note, advice = "", ""
    if untold:
        note = f", {untold} of which do not tell the microarchitecture, and do not count"
        advice = f"Say where they were tuned: mhsa records measured-on {path} NAME."
    yield Finding("records", "warn" if untold else "ok", f"{len(records)} of your own{note}", advice)


def _linker_cache() -> Finding:
    """Into which Zig links: nothing can be compiled without it."""
    first_choice, folder = zig.first_cache(), zig.cache_folder()
    if folder != first_choice:
        advice = "Set ZIG_GLOBAL_CACHE_DIR to a folder that can be written, and lasts."
        return Finding("cache folder", "warn", f"{first_choice} cannot be written, {folder} takes its place", advice)
    free = shutil.disk_usage(_existing(folder)).free
    advice = "Free some space, or set ZIG_GLOBAL_CACHE_DIR to another disk."
    if free < _CACHE_BYTES:
        return Finding("cache folder", "warn", f"{folder}, {free // 2**20} MiB free", advice)
    return _folder("cache folder", folder, advice, "warn")


def _folder(check: str, folder: Path, advice: str, status: Literal["warn", "fail"]) -> Finding:
    """What keeps a file of _PROBE_BYTES out of a folder: permissions, a file system for reading, a disk, a quota."""
    place = _existing(folder)
    reason = without_room(place, _PROBE_BYTES) if place.is_dir() else f"{place} is no folder"
    if reason is None:
        return Finding(check, "ok", f"{folder}, {shutil.disk_usage(place).free // 2**30} GiB free")
    return Finding(check, status, f"{folder}: {reason}", advice)


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


_CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "Python": _python,
    "TVM": _tvm,
    "packages": _packages,
    "CPU": _cpu,
    "GPU": _gpus,
    "CUDA compiler": _cuda_compiler,
    "/proc": _proc,
    "folders": _folders,
    "records": _own_records,
}
