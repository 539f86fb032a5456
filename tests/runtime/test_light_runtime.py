"""The wheel mhsa-runtime: what is in it, that it runs alone, and beside which other packages it does what."""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import urllib.error
import urllib.request
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from packaging.utils import canonicalize_name
from support import light_runtime

import mhsa_compile as mhsa
from mhsa_compile.errors import InstallationError
from mhsa_compile.hardware import environment
from mhsa_compile.runtime import tvm_runtime
from release import lock, wheels

MACHINE = platform.machine()
EXAMPLE = light_runtime.REPOSITORY / "examples" / "light_runtime"
MOST = 25 * 2**20  # bytes installed, without NumPy
MOST_SECONDS = 0.15  # of an import, beyond NumPy's
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheels.runtime_wheel(light_runtime.whole(), light_runtime.tvm(MACHINE), tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return light_runtime.unpacked(wheel, tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return light_runtime.linked(tmp_path_factory.mktemp("site") / "packages", light_runtime.DEPENDENCIES)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return light_runtime.small_artifact(tmp_path_factory.mktemp("artifact"))


def absent(files: wheels.Files) -> set[str]:
    """Modules of the package that files of it import, at any place, and that are not among them."""
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files}
    missing = set()
    for name, data in files.items():
        if not name.endswith(".py"):
            continue
        tree = ast.parse(data)
        aside = {id(node) for top in ast.walk(tree) if is_for_type_checkers(top) for node in ast.walk(top)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and id(node) not in aside and str(node.module).startswith("mhsa_"):
                missing |= {str(node.module)} - modules
    return missing


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@pytest.mark.thorough
def test_the_two_wheels_share_the_files_of_the_whole() -> None:
    whole = light_runtime.whole()
    run, rest = whole.run_side(), whole.compile_side()
    assert {**run, **rest} == whole.files and not run.keys() & rest.keys()
    assert absent(run) == set()
    del run["mhsa_compile/hardware/profile.py"]
    assert absent(run) == {"mhsa_compile.hardware.profile"}
    assert "mhsa_compile/cli/app.py" in rest and "mhsa_analysis/__init__.py" in rest


def test_what_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    libraries = [name for name in contents if ".so" in name]
    assert libraries == ["mhsa_compile/_data/tvm/libtvm_runtime.so"]
    assert sum(map(len, contents.values())) < 6 * 2**20
    notes = next(name.partition("/")[0] for name in contents if name.endswith("/METADATA"))
    for text in ("LICENSE", "apache-tvm/LICENSE", "apache-tvm/NOTICE"):
        assert b"Apache" in contents[f"{notes}/licenses/{text}"]
    rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(contents[f"{notes}/RECORD"].decode()))}
    assert rows.keys() == contents.keys()
    for name, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert rows[name] == (["", ""] if name.endswith("/RECORD") else [f"sha256={digest}", str(len(data))])
    required = re.findall(rb"^Requires-Dist: ([\w-]+)", contents[f"{notes}/METADATA"], re.MULTILINE)
    assert required == [b"apache-tvm-ffi", b"ml-dtypes", b"msgspec", b"numpy"]


def test_the_bill_of_materials(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".cdx.json"))
        bill, library = json.loads(archive.read(name)), archive.read("mhsa_compile/_data/tvm/libtvm_runtime.so")
    assert re.fullmatch(r"mhsa_runtime-[\w.]+\.dist-info/sboms/mhsa-runtime\.cdx\.json", name)  # PEP 770
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    own, (tvm,) = bill["metadata"]["component"], bill["components"]
    assert own["purl"] == f"pkg:pypi/mhsa-runtime@{wheel.name.split('-')[1]}"
    assert tvm["purl"] == f"pkg:pypi/apache-tvm@{metadata.version('apache-tvm')}"
    (file,) = tvm["components"]
    assert file["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(library).hexdigest()}]


def test_the_tag_has_the_c_library_that_the_code_asks_for(wheel: Path) -> None:
    minor = min(int(number) for number in re.findall(r"manylinux_2_(\d+)", wheel.name))
    with zipfile.ZipFile(wheel) as archive:
        library = archive.read("mhsa_compile/_data/tvm/libtvm_runtime.so")
    assert max(int(number) for number in re.findall(rb"GLIBC_2\.(\d+)", library)) <= minor


def test_the_same_source_gives_the_same_bytes(wheel: Path, tmp_path: Path) -> None:
    again = wheels.runtime_wheel(light_runtime.whole(), light_runtime.tvm(MACHINE), tmp_path)
    assert again.read_bytes() == wheel.read_bytes()


def run(interpreter: Sequence[str], variables: dict[str, str], artifact: Path, folder: Path) -> list[str]:
    """The lines of `light_runtime.RUN`, whose output has this process's own bits."""
    x = np.random.default_rng(3).standard_normal((2, 17, 24), np.float32)
    np.save(folder / "x.npy", x)
    command = [*interpreter, "-c", light_runtime.RUN, artifact, folder / "y.npy", folder / "x.npy"]
    child = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    expected, y = mhsa.load(artifact, threads=1)(x), np.load(folder / "y.npy")
    assert y.tobytes() == expected.tobytes() and y.any()
    return child.stdout.splitlines()


def test_it_runs_alone(site: Path, packages: Path, artifact: Path, tmp_path: Path) -> None:
    place, imported, library = run(*light_runtime.python(site, packages), artifact, tmp_path)
    assert Path(place).is_relative_to(site) and imported == ""
    assert library == str(site / "mhsa_compile/_data/tvm/libtvm_runtime.so")


def test_beside_apache_tvm_its_library_is_taken(site: Path, packages: Path, artifact: Path, tmp_path: Path) -> None:
    more = light_runtime.linked(tmp_path / "more", ["apache-tvm"])
    _, imported, library = run(*light_runtime.python(site, packages, more), artifact, tmp_path)
    assert imported == "" and Path(library).parts[-3:] == ("tvm", "lib", "libtvm_runtime.so")


@pytest.mark.parametrize("name", ["compile", "MultiHeadAttention", "accelerate", "analysis", "verify"])
def test_the_rest_says_what_to_install(site: Path, packages: Path, tmp_path: Path, name: str) -> None:
    interpreter, variables = light_runtime.python(site, packages)
    command = [*interpreter, "-c", f"import mhsa_compile; mhsa_compile.{name}"]
    child = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True)
    expected = f"InstallationError: mhsa_compile.{name}: expected mhsa-compile, which has it, got mhsa-runtime alone. "
    assert f"{expected}Run: pip install 'mhsa-compile[compile]'" in child.stderr.splitlines()[-1]


def test_names_of_the_run_side_are_there(site: Path, packages: Path, tmp_path: Path) -> None:
    interpreter, variables = light_runtime.python(site, packages)
    names = ["Artifact", "AttentionSpec", "TargetProfile", "errors", "load", "masks", "__version__"]
    code = f"import mhsa_compile; [getattr(mhsa_compile, name) for name in {names}]; mhsa_compile.nothing"
    child = subprocess.run([*interpreter, "-c", code], env=variables, cwd=tmp_path, capture_output=True, text=True)
    assert child.stderr.splitlines()[-1] == "AttributeError: module 'mhsa_compile' has no attribute 'nothing'"


def test_an_artifact_behind_http(site: Path, packages: Path, artifact: Path) -> None:
    """`examples/light_runtime/serve.py`, which its Dockerfile starts."""
    interpreter, variables = light_runtime.python(site, packages)
    command = [*interpreter, EXAMPLE / "serve.py", artifact, "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=variables, text=True, **pipes) as server:
        try:
            url = server.stdout.readline().strip()  # type: ignore[union-attr]
            x, body = np.ones((1, 5, 24), np.float32), io.BytesIO()
            np.save(body, x)
            with urllib.request.urlopen(url, body.getvalue(), timeout=60) as answer:
                y = np.load(io.BytesIO(answer.read()))
            assert y.tobytes() == mhsa.load(artifact)(x).tobytes()
            with pytest.raises(urllib.error.HTTPError, match="400"):
                urllib.request.urlopen(url, b"no array", timeout=60)
        finally:
            server.terminate()


def test_what_the_image_copies_and_removes_is_there(packages: Path) -> None:
    text = (EXAMPLE / "Dockerfile").read_text()
    copied = [word for line in text.splitlines() if line.startswith("COPY ") for word in line.split()[1:-1]]
    ours = [word for word in copied if not word.startswith(("--", "/", "dist/", "layer.mhsa"))]
    assert ours == ["constraints.txt", "examples/light_runtime/serve.py"]
    assert all((light_runtime.REPOSITORY / word).is_file() for word in ours)
    removed = re.findall(r"/app/(tvm_ffi/\w+)", text)
    assert removed and all((packages / folder).is_dir() for folder in removed)


def without_tvm(monkeypatch: pytest.MonkeyPatch, folder: Path, ffi: str | None) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    monkeypatch.setattr(environment, "RUNTIME_LIBRARIES", folder)
    monkeypatch.setattr(environment, "stated_version", {"apache-tvm-ffi": ffi}.get)


def test_which_library_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert environment.tvm_libraries().parts[-2:] == ("tvm", "lib")
    without_tvm(monkeypatch, tmp_path, "0.1.14.post1")
    assert environment.tvm_libraries() == tmp_path
    with pytest.raises(InstallationError, match=r"'apache-tvm==0\.27\.0\.post1', whose libraries are taken then"):
        tvm_runtime._library("libtvm_runtime_cuda.so")
    without_tvm(monkeypatch, tmp_path / "nowhere", "0.1.14.post1")
    with pytest.raises(InstallationError, match=r"got apache-tvm not installed with .*'apache-tvm==0\.27\.0\.post1'"):
        environment.tvm_libraries()


@pytest.mark.parametrize("ffi", ["0.1.15", None])
def test_a_binding_that_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ffi: str | None
) -> None:
    without_tvm(monkeypatch, tmp_path, ffi)
    with pytest.raises(InstallationError, match=r"Run: pip install 'apache-tvm-ffi>=0\.1\.14\.post0,<0\.1\.15'$"):
        environment.tvm_libraries()


def pip(python: Path, *words: str | Path) -> None:
    command = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
    child = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if child.returncode:
        raise OSError(child.stderr)


def bytes_of(distributions: Sequence[str], folder: Path) -> int:
    """What pip's records of these say that they hold, without bytecode."""
    total = 0
    for record in folder.glob("*.dist-info/RECORD"):
        if record.parent.name.partition("-")[0] in distributions:
            total += sum(int(row[2] or 0) for row in csv.reader(record.read_text().splitlines()))
    return total


def seconds(python: Path, code: str, variables: dict[str, str]) -> float:
    """The fastest of some runs, by CPU time: others run on this machine."""
    program = f"import time; begin = time.process_time(); {code}; print(time.process_time() - begin)"
    command = [str(python), "-c", program]
    return min(
        float(subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout)
        for _ in range(9)
    )


def interpreter(name: str) -> str:
    """A Python of this version, of the system's or of pyenv's; skips where there is none that starts."""
    versions = Path.home() / ".pyenv" / "versions"
    for path in filter(None, [shutil.which(name), *map(str, versions.glob(f"*/bin/{name}"))]):
        if subprocess.run([path, "-c", "import venv"], capture_output=True).returncode == 0:
            return path
    pytest.skip(f"not installed: {name}")


@pytest.mark.thorough
@pytest.mark.parametrize("name", PYTHONS)
def test_an_empty_environment(wheel: Path, artifact: Path, tmp_path: Path, name: str) -> None:
    """pip installs it from downloaded wheels alone; what adds the rest can be added and removed again."""
    subprocess.run([interpreter(name), "-m", "venv", tmp_path / "venv"], check=True, capture_output=True)
    python, downloads = tmp_path / "venv/bin/python", tmp_path / "downloads"
    try:
        pip(
            python, "download", "--dest", downloads, "--constraint", light_runtime.REPOSITORY / "constraints.txt", wheel
        )
    except OSError as error:
        pytest.skip(f"needs a network: pip did not bring what {wheel.name} requires ({str(error)[-300:]})")
    offline = ("install", "--no-index", "--find-links", downloads)
    pip(python, *offline, wheel)
    folder = next((tmp_path / "venv/lib").glob("python*")) / "site-packages"
    ours = ("mhsa_runtime", "apache_tvm_ffi", "ml_dtypes", "msgspec", "typing_extensions")
    assert 5 * 2**20 < bytes_of(ours, folder) <= MOST
    assert not list(folder.rglob("libtvm_compiler*"))
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    assert Path(run([str(python)], variables, artifact, tmp_path)[0]).is_relative_to(folder)
    numpy = seconds(python, "import numpy", variables)
    assert seconds(python, "import numpy; from mhsa_compile import load", variables) <= numpy + MOST_SECONDS
    pip(python, *offline, "--no-deps", wheels.compile_wheel(light_runtime.whole(), tmp_path))
    assert (folder / "mhsa_compile/compiler/pipeline.py").is_file()
    pip(python, "uninstall", "--yes", "mhsa-compile")
    assert not (folder / "mhsa_compile/compiler/pipeline.py").exists()
    run([str(python)], variables, artifact, tmp_path)


def test_the_lock_has_a_hash_for_all_that_the_wheel_needs() -> None:
    text = lock.LOCK.read_text()
    pins = dict(line.split("==") for line in re.findall(r"^[^#\s]+==\S+", text, re.MULTILINE))
    hashes = re.split(r"^[^#\s]+==.*$", text, flags=re.MULTILINE)[1:]
    assert pins.keys() == {canonicalize_name(name) for name in light_runtime.DEPENDENCIES}
    constraints = (light_runtime.REPOSITORY / "constraints.txt").read_text().splitlines()
    tested = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in constraints)}
    assert {name: tested[name] for name in pins} == pins
    assert all(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", listed) for listed in hashes)
    assert "://" not in text  # whichever index pip is set up with
