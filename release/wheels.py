"""The wheels of a release: for each platform a light one that loads and runs artifacts, and one that adds the rest.

    python release/wheels.py                        # mhsa_runtime of each platform, mhsa_compile
    python release/wheels.py --platform aarch64     # of this one alone

    mhsa_runtime-V-py3-none-manylinux_..._x86_64.whl     the run side of the package, TVM's runtime without its compiler
    mhsa_runtime-V-py3-none-manylinux_..._aarch64.whl
    mhsa_compile-V-py3-none-any.whl                      all other files of the package; it requires mhsa-runtime==V

Both are parts of the wheel that `pip install .` builds: each of its files is in one of them, none in both, so that the
second can be added to the first and removed again. TVM's library comes out of the wheel of apache-tvm that
constraints.txt names, the installed one or pip's download of another platform's, and the light wheel has that wheel's
tags: nothing else in it needs a C library.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import platform
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesParser
from email.policy import compat32
from importlib import metadata
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PLATFORMS = ("x86_64", "aarch64")
PACKAGE = "mhsa_compile/"
RUN_SIDE = (
    "__init__.py", "errors.py", "version.py", "py.typed", "files/", "spec/", "hardware/", "runtime/", "_data/targets/",
)  # fmt: skip
COMPILE_SIDE = ("runtime/standalone/",)  # within the run side: bundles are compiled
LIBRARIES = "_data/tvm/"  # as hardware/environment.py knows it
LIBRARY = "libtvm_runtime.so"
BILL = "sboms/mhsa-runtime.cdx.json"
REQUIRED = ("apache-tvm-ffi", "ml-dtypes", "msgspec", "numpy")  # by the run side
COPIED = (
    "Metadata-Version", "Version", "License-Expression", "License-File", "Keywords", "Classifier", "Requires-Python",
)  # fmt: skip
SUMMARY = "Loads and runs what mhsa-compile compiled: TVM's runtime without its compiler, no PyTorch, no ONNX."
WORDS = """\
The run side of mhsa-compile: `mhsa_compile.load`, and what it needs. The wheel mhsa-compile adds the rest to the same
package. `_data/tvm` holds the runtime library of Apache TVM, as its wheel apache-tvm has it; its licence and its notice
are beside this one's.
"""
_GLIBC = [f"manylinux_2_{minor}" for minor in (27, 28)]
_BEGINNING = (1980, 1, 1, 0, 0, 0)  # of times in a zip file: the same bytes for the same content

Files = dict[str, bytes]


@dataclass(frozen=True)
class Tvm:
    """What the runtime wheel takes out of one of apache-tvm: the library, what must go with it, and the tags."""

    version: str
    library: bytes
    licences: Files
    tags: tuple[str, ...]


@dataclass(frozen=True)
class Whole:
    """The wheel that holds all of the package."""

    version: str
    files: Files
    metadata: bytes
    entry_points: bytes
    licences: Files

    @classmethod
    def built(cls, folder: Path) -> Whole:
        """Built by the project's own backend, without a network."""
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
        with zipfile.ZipFile(next(folder.glob("mhsa_compile-*.whl"))) as wheel:
            contents = {name: wheel.read(name) for name in sorted(wheel.namelist())}
        notes = next(name.partition("/")[0] for name in contents if name.endswith(".dist-info/METADATA")) + "/"
        about = {name.removeprefix(notes): data for name, data in contents.items() if name.startswith(notes)}
        licences = {name: data for name, data in about.items() if name.startswith("licenses/")}
        files = {name: data for name, data in contents.items() if not name.startswith(notes)}
        version = notes.removeprefix("mhsa_compile-").removesuffix(".dist-info/")
        return cls(version, files, about["METADATA"], about["entry_points.txt"], licences)

    def run_side(self) -> Files:
        return {name: data for name, data in self.files.items() if is_run_side(name)}

    def compile_side(self) -> Files:
        return {name: data for name, data in self.files.items() if not is_run_side(name)}


def is_run_side(name: str) -> bool:
    """Whether a file of the whole wheel is needed to load and run artifacts."""
    inner = name.removeprefix(PACKAGE)
    return name.startswith(PACKAGE) and inner.startswith(RUN_SIDE) and not inner.startswith(COMPILE_SIDE)


def tvm_of(machine: str, version: str) -> Tvm:
    """TVM of the platform: the installed one where that is this machine's, else its wheel from the index."""
    if machine == platform.machine():
        installed = metadata.distribution("apache-tvm")
        if installed.version == version:
            root = Path(str(installed.locate_file("")))
            return _tvm(version, root)
    with tempfile.TemporaryDirectory() as folder:
        words = [word for glibc in _GLIBC for word in ("--platform", f"{glibc}_{machine}")]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        command = [*pip, "--only-binary", ":all:", *words, "--dest", folder, f"apache-tvm=={version}"]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if "libtvm_compiler" not in name])
        return _tvm(version, Path(folder))


def _tvm(version: str, root: Path) -> Tvm:
    package, notes = root / "tvm", root / f"apache_tvm-{version}.dist-info"
    texts = [package / "LICENSE", package / "NOTICE", *sorted((package / "licenses").iterdir())]
    tags = BytesParser().parsebytes((notes / "WHEEL").read_bytes()).get_all("Tag", [])
    licences = {f"licenses/apache-tvm/{path.name}": path.read_bytes() for path in texts}
    return Tvm(version, (package / "lib" / LIBRARY).read_bytes(), licences, tuple(map(str, tags)))


def runtime_wheel(whole: Whole, tvm: Tvm, folder: Path) -> Path:
    """The run side and TVM's runtime. Its notes are those of the whole, as far as they are about that."""
    original, fields = BytesParser().parsebytes(whole.metadata), Message(compat32.clone(max_line_length=0))
    for name in COPIED:
        for value in original.get_all(name, []):
            fields[name] = value
    fields["Name"], fields["Summary"] = "mhsa-runtime", SUMMARY
    for name in tvm.licences:
        fields["License-File"] = name.removeprefix("licenses/")
    lines = [line for line in original.get_all("Requires-Dist", []) if "extra ==" not in line]
    for name in REQUIRED:
        fields["Requires-Dist"] = next(line for line in lines if line.startswith(name) and line[len(name)] in "<=>~!")
    fields["Description-Content-Type"] = "text/markdown"
    fields.set_payload(WORDS)
    files = {**whole.run_side(), f"{PACKAGE}{LIBRARIES}{LIBRARY}": tvm.library}
    notes = {**whole.licences, **tvm.licences, BILL: _bill(whole.version, tvm), "METADATA": fields.as_bytes()}
    return _write(folder, "mhsa_runtime", whole.version, files, notes, tvm.tags)


def _bill(version: str, tvm: Tvm) -> bytes:
    """What the wheel holds that is another project's, as CycloneDX 1.6 says it, where PEP 770 has it."""

    def component(kind: str, name: str, version: str) -> dict[str, object]:
        purl = f"pkg:pypi/{name}@{version}"
        licence = [{"license": {"id": "Apache-2.0"}}]
        return {"type": kind, "name": name, "version": version, "purl": purl, "bom-ref": purl, "licenses": licence}

    digest = hashlib.sha256(tvm.library).hexdigest()
    library = {
        "type": "file",
        "name": f"{PACKAGE}{LIBRARIES}{LIBRARY}",
        "hashes": [{"alg": "SHA-256", "content": digest}],
    }
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component("library", "mhsa-runtime", version)},
        "components": [{**component("library", "apache-tvm", tvm.version), "components": [library]}],
    }
    return (json.dumps(bill, indent=2) + "\n").encode()


def compile_wheel(whole: Whole, folder: Path) -> Path:
    """All else; it asks for the run side of the same version."""
    requirement = f"\nRequires-Dist: mhsa-runtime=={whole.version}\nVersion: ".encode()
    about = whole.metadata.replace(b"\nVersion: ", requirement, 1)
    notes = {**whole.licences, "METADATA": about, "entry_points.txt": whole.entry_points}
    return _write(folder, "mhsa_compile", whole.version, whole.compile_side(), notes, ("py3-none-any",))


def _write(
    folder: Path, name: str, version: str, files: Files, notes: Mapping[str, bytes], tags: tuple[str, ...]
) -> Path:
    """A wheel; the same bytes for the same contents."""
    label = f"{name}-{version}"
    pure = "false" if any("manylinux" in tag for tag in tags) else "true"
    lines = ["Wheel-Version: 1.0", "Generator: release/wheels.py", f"Root-Is-Purelib: {pure}"]
    lines += [f"Tag: {tag}" for tag in tags]
    about = {"WHEEL": "".join(f"{line}\n" for line in lines).encode(), **notes}
    contents = {**files, **{f"{label}.dist-info/{note}": data for note, data in sorted(about.items())}}
    contents[f"{label}.dist-info/RECORD"] = _record(contents, f"{label}.dist-info/RECORD")
    platforms = ".".join(tag.rpartition("-")[2] for tag in tags)
    path = folder / f"{label}-py3-none-{platforms}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for entry, data in contents.items():
            info = zipfile.ZipInfo(entry, _BEGINNING)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (0o755 if entry.endswith(".so") else 0o644) << 16
            wheel.writestr(info, data)
    return path


def _record(contents: Files, own: str) -> bytes:
    def row(name: str, data: bytes) -> str:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        return f"{name},sha256={digest},{len(data)}\n"

    return ("".join(row(name, data) for name, data in contents.items()) + f"{own},,\n").encode()


def write(folder: Path, platforms: Iterable[str]) -> list[Path]:
    """The wheels of a release. Raises CalledProcessError where pip cannot bring another platform's TVM."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        whole = Whole.built(Path(scratch))
    pins = (line.partition("==") for line in (REPOSITORY / "constraints.txt").read_text().splitlines())
    version = next(version for name, _, version in pins if name == "apache-tvm")
    runtimes = [runtime_wheel(whole, tvm_of(machine, version), folder) for machine in platforms]
    return [*runtimes, compile_wheel(whole, folder)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--platform", choices=PLATFORMS, action="append", help="by default each of them")
    parser.add_argument("--into", type=Path, default=REPOSITORY / "dist", metavar="FOLDER")
    options = parser.parse_args()
    for path in write(options.into, options.platform or PLATFORMS):
        print(f"{path.stat().st_size / 2**20:6.2f} MB  {path}")


if __name__ == "__main__":
    main()
