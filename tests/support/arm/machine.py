"""An aarch64 machine without one: Debian's Python under qemu-user, with what this library needs to run artifacts.

    python -m support.arm.machine                                  # prepares it, says where it is
    python -m support.arm.machine --cpu cortex-a53 -m mhsa_compile doctor      # runs Python there

It is prepared once, into a folder of the user's cache, from Debian's arm64 packages and the aarch64 wheels of the
run-side dependencies; nothing else of this system changes. It shares the files and the network with this machine.
TVM is there in runtime-only mode: its compiler is deleted.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import urllib.request
from pathlib import Path

import pytest

REQUIRED = "MHSA_REQUIRE_SYSTEM"
"""The environment variable that is 1 where what is missing is a failure, as in .ci/run."""
QEMU = ("qemu-aarch64-static", "qemu-aarch64")
MIRROR, RELEASE = "https://deb.debian.org/debian", "bookworm"
PYTHON = "3.11"  # of that release
PACKAGES = (
    "libbz2-1.0", "libc6", "libexpat1", "libffi8", "libgcc-s1", "liblzma5", "libpython3.11-minimal",
    "libpython3.11-stdlib", "libssl3", "libstdc++6", "libuuid1", "python3.11-minimal", "zlib1g",
)  # fmt: skip
PLATFORMS = [f"manylinux{glibc}_aarch64" for glibc in ("2014", "_2_17", "_2_27", "_2_28")]
REPOSITORY = Path(__file__).resolve().parents[3]
_PATIENCE = 60  # seconds without a byte from the mirror
# qemu reads the prefix and the CPU from the environment, so children have them too. Python takes its first argument as
# sys.executable, so it starts this script again, and not itself, which only qemu can start. -S: no packages of this
# system's.
LAUNCHER = """\
#!/bin/sh
here=$(dirname "$0")
export QEMU_LD_PREFIX="${here%/usr/bin}"
qemu=$(command -v qemu-aarch64-static || command -v qemu-aarch64) || exit 127
exec "$qemu" -0 "$0" "$here/python3.11" -S "$@"
"""


class Missing(Exception):
    """What keeps the machine from being prepared here, and what to do."""


def require() -> Path:
    """The machine's root; the test is skipped where there cannot be one, and fails where there has to be one."""
    try:
        return prepared()
    except Missing as error:
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))


def command(root: Path, *arguments: str | Path) -> list[str]:
    """The command that starts Python on the machine, with arguments."""
    return [str(root / "usr/bin/python"), *map(str, arguments)]


def environment(root: Path, cpu: str = "max") -> dict[str, str]:
    """The environment for `command`; `cpu` is one of `qemu-aarch64 -cpu help`, with its options: "max,sve256=on"."""
    path = os.pathsep.join(map(str, (REPOSITORY, root / "site")))
    return {**os.environ, "PYTHONPATH": path, "QEMU_CPU": cpu, "TVM_USE_RUNTIME_LIB": "1"}


def prepared() -> Path:
    """The machine's root, prepared if it is not yet there. Raises Missing."""
    if not any(map(shutil.which, QEMU)):
        raise Missing("no qemu-aarch64 on this machine: apt-get install qemu-user-static")
    root = cache() / f"aarch64-{_recipe()}"
    with (cache() / "aarch64.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the suite has two processes
        if not root.is_dir():
            staged = Path(tempfile.mkdtemp(prefix=".aarch64-", dir=cache()))
            try:
                _prepare(staged)
                staged.rename(root)
            finally:
                shutil.rmtree(staged, ignore_errors=True)
    return root


def cache() -> Path:
    """The user's folder for what is fetched and built once."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "mhsa_compile")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _requirements() -> list[str]:
    """What running artifacts needs."""
    dependencies: list[str] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    return dependencies


def _recipe() -> str:
    """Another one for another machine: a hash of all that it is made of."""
    parts = [RELEASE, LAUNCHER, *PACKAGES, *_requirements(), (REPOSITORY / "constraints.txt").read_text()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _prepare(root: Path) -> None:
    unpack_debian(root, RELEASE, "arm64", PACKAGES)
    launcher = root / "usr/bin/python"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    install(root / "site", _requirements())
    for compiler in (root / "site/tvm/lib").glob("libtvm_compiler*"):
        compiler.unlink()


def install(folder: Path, requirements: list[str], *options: str) -> None:
    """The aarch64 wheels of what is required, into a folder. Raises Missing."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    kind = ["--python-version", PYTHON, "--implementation", "cp", "--only-binary", ":all:", *platforms]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--target", folder]
    constraints = ["--constraint", REPOSITORY / "constraints.txt"]
    process = subprocess.run([*pip, *kind, *constraints, *options, *requirements], capture_output=True, text=True)
    if process.returncode:
        raise Missing(f"no aarch64 machine: pip did not find its wheels ({process.stderr.strip()[-400:]})")


def unpack_debian(root: Path, release: str, architecture: str, packages: tuple[str, ...]) -> None:
    """The programs and libraries of Debian's packages, into a folder. Raises Missing."""
    try:
        for name, place in _places(release, architecture, packages).items():
            _unpack(_fetched(f"{MIRROR}/{place[0]}", place[1], name), root)
    except OSError as error:
        raise Missing(f"no {architecture} machine: {MIRROR} did not answer ({error})") from error


def _places(release: str, architecture: str, packages: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """(path, sha256) of each package, by the release's index, which comes over TLS."""
    index = lzma.decompress(_fetched(f"{MIRROR}/dists/{release}/main/binary-{architecture}/Packages.xz")).decode()
    places = {}
    for paragraph in index.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and line[0] != " ")
        if fields.get("Package") in packages:
            places[fields["Package"]] = fields["Filename"], fields["SHA256"]
    if absent := set(packages) - places.keys():
        raise Missing(f"no {architecture} machine: Debian {release} has no {' '.join(sorted(absent))}")
    return places


def _fetched(url: str, digest: str | None = None, name: str = "") -> bytes:
    with urllib.request.urlopen(url, timeout=_PATIENCE) as answer:
        data: bytes = answer.read()
    if digest is not None and hashlib.sha256(data).hexdigest() != digest:
        raise Missing(f"{name} from {MIRROR} is not what the index promises")
    return data


def _unpack(package: bytes, root: Path) -> None:
    """The programs and libraries of a .deb: an `ar` archive with a data.tar in it."""
    place = 8
    while place < len(package):
        name, size = package[place : place + 16].decode().strip(), int(package[place + 48 : place + 58])
        if name.startswith("data.tar"):
            with tarfile.open(fileobj=io.BytesIO(package[place + 60 : place + 60 + size])) as data:
                data.extraction_filter = lambda member, path: member
                folders = ("./lib/", "./usr/lib/", "./usr/bin/")
                data.extractall(root, [member for member in data if f"{member.name}/".startswith(folders)])
        place += 60 + size + size % 2


def main(arguments: list[str]) -> int:
    try:
        root = prepared()
    except Missing as error:
        sys.exit(str(error))
    cpu = "max"
    if arguments[:1] == ["--cpu"]:
        cpu, arguments = arguments[1], arguments[2:]
    if not arguments:
        print(root)
        return 0
    return subprocess.run(command(root, *arguments), env=environment(root, cpu)).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
