"""What this machine is, and how much of it this process may use. The standard library only.

`root` is the root of the file system: a test points it at another machine's /proc and /sys. Whatever those lack is
answered with nothing (an empty set, None, "unknown"), so that callers can fall back on their own defaults.
"""

from __future__ import annotations

import os
import platform
import struct
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mhsa_compile.errors import InputError
from mhsa_compile.files.input_files import text_or_nothing

ROOT = Path("/")
_MOST_THREADS_PER_CPU = 16
"""More threads than CPUs only wait for one another. A few may be asked for on purpose, to see that results do not
depend on their number; beyond this it is a slip, and starting them would look like a hang."""
_SPELLINGS = {"arm64": "aarch64", "amd64": "x86_64"}
# Features of aarch64, bit by bit, as the auxiliary vector has them: AT_HWCAP and AT_HWCAP2, named as in /proc/cpuinfo
# (arch/arm64/include/uapi/asm/hwcap.h and kernel/cpuinfo.c of Linux).
_HWCAPS = {
    16: """
        fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 sm3
        sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg
    """,
    26: """
        dcpodp sve2 sveaes svepmull svebitperm svesha3 svesm4 flagm2 frint svei8mm svef32mm svef64mm svebf16 i8mm bf16
        dgh rng bti mte
    """,
}
_EMULATOR = "qemu-"  # how the names of QEMU's user-mode programs begin


def architecture() -> str:
    """The instruction set as LLVM's triples spell it: x86_64, aarch64, riscv64, ..."""
    machine = platform.machine().lower()
    return _SPELLINGS.get(machine, machine)


def cpu_features(root: Path = ROOT) -> frozenset[str]:
    """Features as /proc/cpuinfo names them: avx2, avx512f, fma (x86); asimd, asimddp (ARM).

    On aarch64 they come from the auxiliary vector, from which Linux prints that file: an emulator shows a process the
    right vector, and QEMU before 8.1 the file of the machine that it runs on.
    """
    if architecture() == "aarch64" and (found := _hwcap_features(root)):
        return found
    cpu = _first_cpu(root)
    return frozenset((cpu.get("flags") or cpu.get("Features") or "").split())


def emulated(root: Path = ROOT) -> bool:
    """Whether QEMU's user mode runs this process, as far as it shows: by the name that the kernel has for the process,
    or by a /proc/cpuinfo of another architecture."""
    foreign = {"x86_64": "Features", "aarch64": "flags"}.get(architecture())
    return foreign in _first_cpu(root) or text_or_nothing(root / "proc/self/comm").startswith(_EMULATOR)


def cpu_model(root: Path = ROOT) -> str:
    """The marketing name on x86; implementer and part number on ARM, which has no name there."""
    cpu = _first_cpu(root)
    if emulated(root):
        return f"an emulated {architecture()} CPU"
    if "model name" in cpu:
        return cpu["model name"]
    if "CPU part" in cpu:
        return f"implementer {cpu.get('CPU implementer', 'unknown')} part {cpu['CPU part']}"
    return "unknown"


def cache_kib(level: int, root: Path = ROOT) -> int | None:
    """KiB of the first CPU's data (or unified) cache of that level."""
    for cache in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if text_or_nothing(cache / "level") == str(level) and text_or_nothing(cache / "type") in ("Data", "Unified"):
            size = text_or_nothing(cache / "size")
            unit = {"K": 1, "M": 1024}.get(size[-1:])
            return int(size[:-1]) * unit if unit and size[:-1].isdigit() else None
    return None


def allowed_cpus(root: Path = ROOT) -> int:
    """CPUs that this process can keep busy: its affinity, capped by the CPU quotas of its control groups; at least 1.

    A quota of 2.5 CPUs counts as 2: a third spinning thread would only get the other two throttled.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *(int(quota) for quota in _cpu_quotas(root))]))


def thread_count(given: int | None) -> int:
    """The threads of a call: `given`, or those that the CPUs of this process can keep busy. Raises InputError."""
    if given is None:
        return allowed_cpus()
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise InputError("threads", "an integer from 1 on", repr(given))
    most = _MOST_THREADS_PER_CPU * (os.cpu_count() or 1)
    if given > most:
        expected = f"at most {most}, {_MOST_THREADS_PER_CPU} for each CPU of this machine"
        raise InputError("threads", expected, str(given), f"Its calls are fastest with {allowed_cpus()}, the default.")
    return given


def threads_per_core(root: Path = ROOT) -> int:
    """Hardware threads that share the first CPU's core; 1 where nobody says."""
    spans = text_or_nothing(root / "sys/devices/system/cpu/cpu0/topology/thread_siblings_list").split(",")
    bounds = (span.partition("-") for span in spans if span)
    return sum(int(last or first) - int(first) + 1 for first, _, last in bounds) or 1


def _cpu_quotas(root: Path) -> Iterator[float]:
    """CPUs granted by every control group above this process, of version 2 ("0::/a/b") and 1 ("4:cpu,cpuacct:/a/b")."""
    for line in text_or_nothing(root / "proc/self/cgroup").splitlines():
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


def _hwcap_features(root: Path) -> frozenset[str]:
    try:
        vector = dict(struct.iter_unpack("=QQ", (root / "proc/self/auxv").read_bytes()))
    except (OSError, struct.error):
        return frozenset()
    said = ((vector.get(place, 0), names.split()) for place, names in _HWCAPS.items())
    return frozenset(name for bits, names in said for bit, name in enumerate(names) if bits >> bit & 1)


def _first_cpu(root: Path) -> dict[str, str]:
    """The first block of /proc/cpuinfo. Cores of one machine differ in their features only where Linux hides it."""
    block = text_or_nothing(root / "proc/cpuinfo").split("\n\n", 1)[0]
    fields = (line.partition(":") for line in block.splitlines())
    return {key.strip(): value.strip() for key, _, value in fields}
