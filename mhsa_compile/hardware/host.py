"""What this machine is, and how much of it this process may use. The standard library only.

The CPU itself is asked what it is and has; files of the system's are the last resort. `root` is the root of the file
system: a test points it at another machine's /proc and /sys, and then these are all there is. Whatever they lack is
answered with nothing (an empty set, None, "unknown"), so that callers can fall back on their own defaults.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from numbers import Integral
from pathlib import Path, PurePosixPath

from mhsa_compile.errors import InputError
from mhsa_compile.files import system as system_calls
from mhsa_compile.files.input_files import text_or_nothing
from mhsa_compile.hardware import arm_cpu, cpuid, mac_cpu, microarchitecture, tile_permission
from mhsa_compile.hardware.arm_cpu import Core
from mhsa_compile.hardware.cpuid import CpuId

ROOT, UNKNOWN = Path("/"), "unknown"
CPUINFO = "proc/cpuinfo"
_MOST_THREADS_PER_CPU = 16
"""More threads than CPUs only wait for one another. A few may be asked for on purpose, to see that results do not
depend on their number; beyond this it is a slip, and starting them would look like a hang."""
_SPELLINGS = {"arm64": "aarch64", "amd64": "x86_64"}
_EMULATOR = "qemu-"  # how the names of QEMU's user-mode programs begin
_EMULATING_HYPERVISOR = "TCGTCGTCGTCG"  # what QEMU says where no hardware runs the code
_OWN_GROUP = ("0::/", "1:cpu,cpuacct:/")
"""The control groups of a process for which there is no /proc: those that are mounted, as containers see their own."""


def architecture() -> str:
    """The instruction set as LLVM's triples spell it: x86_64, aarch64, riscv64, ..."""
    machine = platform.machine().lower()
    return _SPELLINGS.get(machine, machine)


def system() -> str:
    """The operating system as Zig's triples spell it: linux, macos, windows."""
    return {"win32": "windows", "darwin": "macos"}.get(sys.platform, sys.platform)


def cpu_features(root: Path = ROOT) -> frozenset[str]:
    """Features as /proc/cpuinfo names them: avx2, avx512f, fma (x86); asimd, asimddp (ARM); v, zvfh (RISC-V).
    None where nobody tells."""
    return _features_of_proc(root)[0]


def usable_features(root: Path = ROOT) -> frozenset[str]:
    """The features that code of this process may use: those of the CPU, without tiles (AMX) where the system refuses
    them to it. Where `root` is this machine's, it is asked for the permission."""
    present = cpu_features(root)
    if tile_permission.TILES in present and (root != ROOT or not tile_permission.refusal()):
        return present
    return present - tiles(present)


def tiles(features: frozenset[str]) -> frozenset[str]:
    """The features that are of matrix tiles, among a CPU's."""
    return frozenset(feature for feature in features if feature.startswith("amx"))


def features_from(root: Path = ROOT) -> str:
    """Who tells the features: "CPUID", "the auxiliary vector", "sysctl", "/proc/cpuinfo", or "nobody"."""
    return _features_of_proc(root)[1]


def microarchitecture_name(root: Path = ROOT) -> str:
    """The microarchitecture, such as zen5 or neoverse-n1: what is tuned serves one. UNKNOWN where nobody tells."""
    if _is_mac(root) and architecture() == "aarch64":
        return mac_cpu.microarchitecture() or UNKNOWN
    if architecture() == "aarch64":
        return microarchitecture.of_arm(_cores(root)) or UNKNOWN
    if architecture() != "x86_64":
        return next(_cpuinfo(root), {}).get("uarch") or UNKNOWN  # of RISC-V
    if (cpu := _cpuid(root)) is not None:
        return microarchitecture.of_x86(cpu.vendor, cpu.family, cpu.model, cpu.stepping)
    fields = next(_cpuinfo(root), {})
    numbers = [fields.get(key, "") for key in ("cpu family", "model", "stepping")]
    if "vendor_id" not in fields or not all(number.isdigit() for number in numbers):
        return UNKNOWN
    family, model, stepping = map(int, numbers)
    return microarchitecture.of_x86(fields["vendor_id"], family, model, stepping)


def is_emulated(root: Path = ROOT) -> bool:
    """Whether QEMU runs this process without hardware's help, as far as it shows: by what its CPU says, by the name
    that the kernel has for the process, or by a /proc/cpuinfo of another architecture."""
    if (cpu := _cpuid(root)) is not None and cpu.hypervisor == _EMULATING_HYPERVISOR:
        return True
    foreign = {"x86_64": "Features", "aarch64": "flags"}.get(architecture())
    return foreign in next(_cpuinfo(root), {}) or text_or_nothing(root / "proc/self/comm").startswith(_EMULATOR)


def cpu_model(root: Path = ROOT) -> str:
    """The marketing name on x86; implementer and part number on ARM, which has no name there."""
    if is_emulated(root):
        return f"an emulated {architecture()} CPU"
    if (cpu := _cpuid(root)) is not None and cpu.brand:
        return cpu.brand
    if _is_mac(root) and (name := mac_cpu.brand()):
        return name
    if name := next(_cpuinfo(root), {}).get("model name"):
        return name
    for core in _cores(root):
        return f"implementer {core.implementer:#04x} part {core.part:#05x}"
    return UNKNOWN


def cache_kib(level: int, root: Path = ROOT) -> int | None:
    """KiB of the first CPU's data (or unified) cache of that level."""
    if _is_mac(root):
        return mac_cpu.cache_kib(level)
    for cache in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if text_or_nothing(cache / "level") == str(level) and text_or_nothing(cache / "type") in ("Data", "Unified"):
            size = text_or_nothing(cache / "size")
            unit = {"K": 1, "M": 1024}.get(size[-1:])
            return int(size[:-1]) * unit if unit and size[:-1].isdigit() else None
    return None if (cpu := _cpuid(root)) is None else cpu.cache_kib(level)


def allowed_cpus(root: Path = ROOT) -> int:
    """CPUs that this process can keep busy: its affinity, capped by the CPU quotas of its control groups; at least 1.

    A quota of 2.5 CPUs counts as 2: a third spinning thread would only get the other two throttled.
    """
    return max(1, min([len(system_calls.cpus()), *(int(quota) for quota in _cpu_quotas(root))]))


def thread_count(threads: int | None) -> int:
    """The threads of a call: those that are asked for, or those that the CPUs of this process can keep busy. Raises
    InputError."""
    if threads is None:
        return allowed_cpus()
    if not isinstance(threads, Integral) or isinstance(threads, bool) or threads < 1:
        raise InputError("threads", "an integer from 1 on", repr(threads))
    most = _MOST_THREADS_PER_CPU * (os.cpu_count() or 1)
    if threads > most:
        expected = f"at most {most}, {_MOST_THREADS_PER_CPU} for each CPU of this machine"
        raise InputError(
            "threads", expected, str(threads), f"Its calls are fastest with {allowed_cpus()}, the default."
        )
    return int(threads)


def threads_per_core(root: Path = ROOT) -> int:
    """Hardware threads that share the first CPU's core; 1 where nobody says."""
    spans = text_or_nothing(root / "sys/devices/system/cpu/cpu0/topology/thread_siblings_list").split(",")
    bounds = (span.partition("-") for span in spans if span)
    return sum(int(last or first) - int(first) + 1 for first, _, last in bounds) or 1


def _cpu_quotas(root: Path) -> Iterator[float]:
    """CPUs granted by every control group above this process, of version 2 ("0::/a/b") and 1 ("4:cpu,cpuacct:/a/b")."""
    for line in text_or_nothing(root / "proc/self/cgroup").splitlines() or _OWN_GROUP:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            mounts = ["", "unified"]
        elif "cpu" in controllers.split(","):
            mounts = list({controllers, "cpu"})
        else:
            continue
        # Inside a container the path may be the host's: what is not there grants nothing, and the mount itself counts.
        folders = (PurePosixPath(group), *PurePosixPath(group).parents)
        for mount in mounts:
            for folder in folders:
                yield from _quota(root / "sys/fs/cgroup" / mount / folder.relative_to("/"))


def _quota(folder: Path) -> Iterator[float]:
    quota, _, period = text_or_nothing(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = text_or_nothing(folder / "cpu.cfs_quota_us"), text_or_nothing(folder / "cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit() and int(period) > 0:  # unlimited is "max" in version 2, "-1" in version 1
        yield int(quota) / int(period)


def _cpuid(root: Path) -> CpuId | None:
    """What an x86 CPU says itself, where `root` is this machine's."""
    return cpuid.read() if root == ROOT and architecture() == "x86_64" else None


def _is_mac(root: Path) -> bool:
    """Whether this machine is one, and `root` its own."""
    return root == ROOT and system() == "macos"


def _features_of_proc(root: Path) -> tuple[frozenset[str], str]:
    if (cpu := _cpuid(root)) is not None:
        return cpu.features, "CPUID"
    if _is_mac(root):
        return mac_cpu.features(), "sysctl"
    if root == ROOT and architecture() == "aarch64" and (has := arm_cpu.features(arm_cpu.auxiliary_vector())):
        return has, "the auxiliary vector"
    fields = next(_cpuinfo(root), {})
    features = frozenset((fields.get("flags") or fields.get("Features") or "").split())
    features |= _extensions(fields.get("isa", ""))
    return features, f"/{CPUINFO}" if features else "nobody"


def _extensions(isa: str) -> frozenset[str]:
    """RISC-V's extensions: rv64imafdcv_zicsr are i, m, a, f, d, c, v and zicsr."""
    base, *names = isa.lower().split("_")
    return frozenset([*base.removeprefix("rv64"), *names]) if base.startswith("rv64") else frozenset()


def _cores(root: Path) -> list[Core]:
    """ARM's cores that this process may run on, by what each says of itself; one of each kind at least."""
    files = (root / f"sys/devices/system/cpu/cpu{cpu}/regs/identification/midr_el1" for cpu in system_calls.cpus())
    cores = [Core.of(int(text, 16)) for file in files if (text := text_or_nothing(file))]
    running = None
    if root == ROOT and architecture() == "aarch64":
        running = arm_cpu.running_core(arm_cpu.auxiliary_vector())
    if running is not None and running not in cores:  # an emulator shows the files of what it runs on
        return [running]
    if cores:
        return cores
    blocks = [block for block in _cpuinfo(root) if "CPU part" in block]
    return [Core(int(block.get("CPU implementer", "0"), 16), int(block["CPU part"], 16)) for block in blocks]


def _cpuinfo(root: Path) -> Iterator[dict[str, str]]:
    """The blocks of /proc/cpuinfo, one a CPU. On x86 they differ in their features only where Linux hides it."""
    for block in text_or_nothing(root / CPUINFO).split("\n\n"):
        fields = (line.partition(":") for line in block.splitlines())
        yield {key.strip(): value.strip() for key, _, value in fields}
