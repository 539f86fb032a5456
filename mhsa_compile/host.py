"""What this machine is, and how much of it this process may use. Standard library only.

`root` is the root of the file system: a test points it at another machine's /proc and /sys. Whatever those lack is
answered with nothing (an empty set, None, "unknown"), so that callers can fall back on their own defaults.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
_SPELLINGS = {"arm64": "aarch64", "amd64": "x86_64"}


def architecture() -> str:
    """The instruction set as LLVM's triples spell it: x86_64, aarch64, riscv64, ..."""
    machine = platform.machine().lower()
    return _SPELLINGS.get(machine, machine)


def cpu_features(root: Path = ROOT) -> frozenset[str]:
    """Features as /proc/cpuinfo names them: avx2, avx512f, fma (x86); asimd, asimddp (ARM)."""
    cpu = _first_cpu(root)
    return frozenset((cpu.get("flags") or cpu.get("Features") or "").split())


def cpu_model(root: Path = ROOT) -> str:
    """The marketing name on x86; implementer and part number on ARM, which has no name there."""
    cpu = _first_cpu(root)
    if "model name" in cpu:
        return cpu["model name"]
    if "CPU part" in cpu:
        return f"implementer {cpu.get('CPU implementer', 'unknown')} part {cpu['CPU part']}"
    return "unknown"


def cache_kib(level: int, root: Path = ROOT) -> int | None:
    """KiB of the first CPU's data (or unified) cache of that level."""
    for cache in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if _read(cache / "level") == str(level) and _read(cache / "type") in ("Data", "Unified"):
            size = _read(cache / "size")
            unit = {"K": 1, "M": 1024}.get(size[-1:])
            return int(size[:-1]) * unit if unit and size[:-1].isdigit() else None
    return None


def allowed_cpus(root: Path = ROOT) -> int:
    """CPUs that this process can keep busy: its affinity, capped by the CPU quotas of its control groups; at least 1.

    A quota of 2.5 CPUs counts as 2: a third spinning thread would only get the other two throttled.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *(int(quota) for quota in _cpu_quotas(root))]))


def threads_per_core(root: Path = ROOT) -> int:
    """Hardware threads that share the first CPU's core; 1 where nobody says."""
    spans = _read(root / "sys/devices/system/cpu/cpu0/topology/thread_siblings_list").split(",")
    bounds = (span.partition("-") for span in spans if span)
    return sum(int(last or first) - int(first) + 1 for first, _, last in bounds) or 1


def _cpu_quotas(root: Path) -> Iterator[float]:
    """CPUs granted by every control group above this process, of version 2 ("0::/a/b") and 1 ("4:cpu,cpuacct:/a/b")."""
    for line in _read(root / "proc/self/cgroup").splitlines():
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
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit() and int(period) > 0:  # unlimited is "max" in version 2, "-1" in version 1
        yield int(quota) / int(period)


def _first_cpu(root: Path) -> dict[str, str]:
    """The first block of /proc/cpuinfo. Cores of one machine differ in their features only where Linux hides it."""
    block = _read(root / "proc/cpuinfo").split("\n\n", 1)[0]
    fields = (line.partition(":") for line in block.splitlines())
    return {key.strip(): value.strip() for key, _, value in fields}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
