"""Other machines' control groups: files of /proc and /sys, and how many of 8 CPUs they grant."""

from __future__ import annotations

from pathlib import Path


def machine(root: Path, files: dict[str, str]) -> Path:
    """A root of a file system with these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1, V2 = "sys/fs/cgroup/cpu", "sys/fs/cgroup"


def v1(folder: str, quota: int, period: int = 100_000) -> dict[str, str]:
    """The files of a group of version 1."""
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}


QUOTAS = {
    "none": ({}, 8),
    "v2, unlimited": ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "max 100000\n"}, 8),
    "v2": ({"proc/self/cgroup": "0::/app\n", f"{V2}/app/cpu.max": "250000 100000\n"}, 2),
    "v2, in a parent": (
        {"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/cpu.max": "300000 100000\n", f"{V2}/a/b/cpu.max": "max 100000\n"},
        3,
    ),
    "v2, path of the host": ({"proc/self/cgroup": "0::/../gone\n", f"{V2}/cpu.max": "400000 100000\n"}, 4),
    "v2, under one CPU": ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "50000 100000\n"}, 1),
    "v1": ({"proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/job\n0::/\n", **v1(f"{V1},cpuacct/job", 600_000)}, 6),
    "v1, unlimited": ({"proc/self/cgroup": "4:cpu:/\n", **v1(V1, -1)}, 8),
    "v1, in a parent, controllers in another order": (
        {
            "proc/self/cgroup": "11:cpuacct,cpu:/a/b/c\n",
            **v1(f"{V1}/a", 250_000, 50_000),
            **v1(f"{V1}acct,cpu/a/b", 700_000),
        },
        5,
    ),
    "v1 and v2": (
        {
            "proc/self/cgroup": "3:cpuset:/x\n1:name=systemd:/x\n2:cpu:/x\n0::/x\n",
            **v1(V1, 600_000),
            f"{V2}/unified/x/cpu.max": "380000 100000\n",
        },
        3,
    ),
    "the mount alone": ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "200000 100000\n"}, 2),
    "v2, a colon in the name": ({"proc/self/cgroup": "0::/a:b\n", f"{V2}/a:b/cpu.max": "200000 100000\n"}, 2),
    "of another controller": ({"proc/self/cgroup": "4:cpuset,cpuacct:/\n", f"{V2}/cpu.max": "100000 100000\n"}, 8),
    "v2, no /proc": ({f"{V2}/cpu.max": "300000 100000\n"}, 3),
    "v1, no /proc": (v1(f"{V1},cpuacct", 200_000), 2),
    "no period": ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "100000\n"}, 8),
    "a period of 0": ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "100000 0\n"}, 8),
    "no numbers": ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "lots -5\n"}, 8),
}
