"""`mhsa doctor`: what is wrong with this machine, and what to do about it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import typer

from mhsa_compile.cli.commands.findings import places
from mhsa_compile.cli.commands.findings.finding import Finding
from mhsa_compile.cli.common import options, output
from mhsa_compile.errors import InstallationError
from mhsa_compile.files import user_folders
from mhsa_compile.hardware import environment, host

if TYPE_CHECKING:
    from mhsa_compile.hardware.profile import CpuProfile

_LOAD = "import sys, tvm.base; sys.exit('the runtime loads, the compiler does not' if tvm.base._RUNTIME_ONLY else 0)"
_COMPILE_PACKAGES = ("torch", "onnx", "onnxscript", "ziglang")


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
        found = environment.installed_version(package)
        advice = "" if found else f"pip install 'mhsa-compile[{extra}]' ({needs[extra]})"
        yield Finding(package, "ok" if found else "warn", found or "not installed", advice)


def _cpu() -> Iterator[Finding]:
    from mhsa_compile.hardware.profile import detect

    native = detect()
    hardware = native.hardware
    untold = hardware.microarchitecture == host.UNKNOWN
    name = "of no known microarchitecture" if untold else f"microarchitecture {hardware.microarchitecture}"
    advice = "Nobody tells which CPU this is: only records that were tuned here serve it." if untold else ""
    yield Finding("CPU", "warn" if untold else "ok", f"{host.cpu_model()} ({host.architecture()}), {name}", advice)
    yield _features(native)
    yield Finding("caches", "ok", f"L1d {hardware.l1d_kib} KiB, L2 {hardware.l2_kib} KiB")
    allowed, present = host.allowed_cpus(), os.cpu_count() or 1
    yield Finding("CPUs", "ok", f"{allowed} allowed of {present}: the threads a call gets by default")
    beside = "on PyTorch's OpenMP where its workers are awake" if environment.installed_version("torch") else ""
    runs = "their own pool, one for the process" + (f"; {beside} in a program that imports it" if beside else "")
    yield Finding("threads of calls", "ok", runs)


def _features(native: CpuProfile) -> Finding:
    hardware, source = native.hardware, host.features_from()
    vectors = f"{hardware.vector_bits}-bit vectors, {hardware.vector_registers} registers"
    found = f"{native.tvm.mcpu or native.tvm.mtriple}: {vectors}; {source} says so"
    asks = host.architecture() in ("x86_64", "aarch64")
    if source == "nobody" and asks:
        advice = "Mount /proc, or let processes map code: artifacts that need a feature are refused until then."
        return Finding(
            "CPU features", "fail", "nobody tells: the CPU could not be asked, and there is no /proc", advice
        )
    if source == f"/{host.CPUINFO}" and asks:
        return Finding("CPU features", "warn", found, "The CPU could not be asked itself: processes may map no code.")
    if host.architecture() == "x86_64" and hardware.vector_bits < 256:
        advice = "No AVX2: it works, slowly. In a virtual machine, ask for the host's CPU model."
        return Finding("CPU features", "warn", found, advice)
    return Finding("CPU features", "ok", found)


def _gpus() -> Iterator[Finding]:
    """Findings on the NVIDIA driver and each GPU. To have none is no fault: most artifacts are for CPUs."""
    from mhsa_compile.errors import DeviceError
    from mhsa_compile.hardware.profile import profile_of_gpu
    from mhsa_compile.runtime import cuda_devices

    try:
        driver = cuda_devices.driver()
        found = [driver.gpu(index) for index in range(driver.count)]
    except (InstallationError, DeviceError) as error:
        yield Finding("GPU", "ok", f"none: {error.got}")
        return
    old = driver.cuda[0] < cuda_devices.OLDEST_CUDA
    advice = f"Artifacts for GPUs need a driver for CUDA {cuda_devices.OLDEST_CUDA}.0 or later." if old else ""
    runs = f"CUDA {driver.cuda[0]}.{driver.cuda[1]}"
    yield Finding("NVIDIA driver", "warn" if old else "ok", runs, advice)
    for gpu in found:
        target = profile_of_gpu(gpu.capability)
        runs = "no target is for it" if target is None else f"compile with --target {target.name}"
        capability = f"compute capability {gpu.capability[0]}.{gpu.capability[1]}"
        yield Finding(str(gpu), "ok", f"{gpu.name}, {capability}: {runs}")


_CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "Python": _python,
    "TVM": _tvm,
    "packages": _packages,
    "CPU": _cpu,
    "GPU": _gpus,
    "/proc": places.proc_mounted,
    "folders": places.folders,
    "records": places.own_records,
}
