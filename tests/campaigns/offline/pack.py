"""What a machine with a GPU and without a network lacks, as a folder that may travel: about 60 MB.

    python -m campaigns.offline.pack FOLDER [--python 3.12] [--runtime]      # where there is a network; minutes
    . FOLDER/unpack [SITE]       # there, in the checkout: PYTHONPATH for this library and its tests; what is missing

Of the machine it takes Linux on x86-64, a PyTorch for CUDA, nvcc with a C compiler, and the packages that check.py
asks for. In the pack are TVM without what only building it needs, the packages of tuning, and `ziglang` in name: in its
place the system's compiler links (ziglang/__main__.py). With --runtime TVM has no compiler, for artifacts and bundles
that were compiled before: 4 MB.
"""

from __future__ import annotations

import argparse
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
RUN = ("apache-tvm", "apache-tvm-ffi", "msgspec")
COMPILE = ("optuna", "SQLAlchemy", "alembic", "Mako", "colorlog")
GLIBC = ("2_28", "2_27", "2_24", "2_17", "2014")
LEFT_OUT = re.compile(
    r"tvm/(src|3rdparty|licenses|cmake|include|web)/.*|tvm/relax/frontend/(tflite|stablehlo|torch)/.*"
    r"|tvm_ffi/(3rdparty|include|src|cython|share)/.*|sqlalchemy/testing/.*"
    r"|sqlalchemy/.*\.so"  # it is whole without
    r"|.*\.(pyx|pyi|pxd|c|cc|h|hpp)|.*/tests?/.*|.*/RECORD"
)
COMPILER, SITE = "compiler.so.xz", "site.tar.xz"
_LIBRARY = "tvm/lib/libtvm_compiler.so"
UNPACK = """\
# In bash:  . unpack [SITE]     SITE is made; by default ~/mhsa-site
_pack=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd); _site=${1:-$HOME/mhsa-site}
mkdir -p "$_site" && tar -C "$_site" -xJf "$_pack/site.tar.xz" &&
    { [ ! -e "$_pack/compiler.so.xz" ] || xz -dc "$_pack/compiler.so.xz" > "$_site/tvm/lib/libtvm_compiler.so"; }
export PYTHONPATH="$PWD:$_site${PYTHONPATH:+:$PYTHONPATH}" MHSA_KEEP_ARTIFACTS="$_site/artifacts"
python3 "$_site/offline_check.py"
"""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", metavar="3.N", help="that machine's (default: 3.12)")
    parser.add_argument("--runtime", action="store_true", help="without TVM's compiler")
    options = parser.parse_args(words)
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mhsa-pack-") as work:
        site = Path(work, "site")
        for wheel in downloaded(Path(work, "wheels"), options.python, RUN if options.runtime else (*RUN, *COMPILE)):
            zipfile.ZipFile(wheel).extractall(site)
        library = site / _LIBRARY
        if not options.runtime:
            subprocess.run(["strip", "-s", library], check=True)
            with library.open("rb") as source, compressed(options.folder / COMPILER, 192) as packed:
                shutil.copyfileobj(source, packed, 1 << 24)
        library.unlink()
        write_site(site, options.folder / SITE)
    (options.folder / "unpack").write_text(UNPACK, encoding="utf-8")
    files = sorted(file for file in options.folder.iterdir() if file.name in (COMPILER, SITE, "unpack"))
    print(*(f"{file.stat().st_size:>11,} {file.name}" for file in files), sep="\n")
    print(f"{sum(file.stat().st_size for file in files):>11,} together")
    return 0


def downloaded(folder: Path, python: str, names: Sequence[str]) -> list[Path]:
    """Wheels for that Python, in the versions of constraints.txt."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, "--dest", str(folder)]
    command += [f"--platform=manylinux{'' if '_' not in version else '_'}{version}_x86_64" for version in GLIBC]
    subprocess.run([*command, *(f"{name}=={pins[name]}" for name in names)], check=True)
    return sorted(folder.glob("*.whl"))


def write_site(site: Path, packed: Path) -> None:
    """Packs all that Python asks for there, without what only building TVM does."""
    shutil.copytree(HERE / "ziglang", site / "ziglang", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HERE / "check.py", site / "offline_check.py")
    with compressed(packed, 32) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for file in sorted(site.rglob("*")):
            name = file.relative_to(site).as_posix()
            if file.is_file() and not LEFT_OUT.fullmatch(name):
                tar.add(file, name)


def compressed(path: Path, window: int) -> lzma.LZMAFile:
    """A file that is written with xz's filter for x86 and a window of so many MiB: one as large as the compiler makes
    58 MB of 260."""
    smallest = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": window << 20}
    return lzma.open(path, "wb", filters=[{"id": lzma.FILTER_X86}, smallest])


if __name__ == "__main__":
    sys.exit(main())
