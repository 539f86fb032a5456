"""Where files cannot grow, what is said is ours, the program goes on, and nothing is taken for another error."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mhsa_compile.errors import InputError, InstallationError, OutputError, ResourceError
from mhsa_compile.files import room, user_folders
from mhsa_compile.files.foreign_errors import entry_point, reading
from mhsa_compile.files.package_files import beside

COMPILED = """
import resource, sys
import numpy as np, onnx
from onnx import helper, numpy_helper
import mhsa_compile as mhsa
weight = numpy_helper.from_array(np.ones((32, 32), np.float32), "w")  # a linear: whatever it is of, code is what is cut
x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [7, 32]) for name in "xy")
graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
for limit in map(int, sys.argv[1:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        mhsa.compile(model, "x86-64-v3", cache=False, check=False, without_attention="accept")
        print("made")
    except mhsa.errors.OutputError as error:
        print(error)
"""


@pytest.mark.thorough
def test_a_limit_on_sizes_of_files_ends_no_process_that_compiles() -> None:
    limits = ("1000", "60000", str(2**30))
    environment = {name: value for name, value in os.environ.items() if name != "TVM_USE_RUNTIME_LIB"}  # of a test's
    command = [sys.executable, "-c", COMPILED, *limits]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert not done.returncode, done.stderr
    *refused, last = done.stdout.splitlines()
    assert last == "made"  # the control: the same process compiles where there is room
    assert len(refused) == 2 and all("ulimit" in line or "TMPDIR" in line for line in refused)


@pytest.mark.parametrize("number", sorted(room.NO_ROOM))
def test_what_finds_no_room_is_an_output_error_however_a_library_says_it(number: int) -> None:
    for error in (OSError(number, os.strerror(number)), RuntimeError(f"I/O error: full (os error {number})")):
        with pytest.raises(OutputError), reading(InputError, "file", "one"):
            raise error

        @entry_point
        def entry(error: Exception = error) -> None:
            raise error

        with pytest.raises(OutputError):
            entry()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), BlockingIOError(errno.EAGAIN, "fork")])
def test_a_process_that_may_start_no_more_is_told_which_limit(error: Exception) -> None:
    @entry_point
    def entry() -> None:
        raise error

    with pytest.raises(ResourceError, match=r"process: expected threads and processes .* `ulimit -u`"):
        entry()


def test_a_file_of_the_package_that_a_frozen_program_lacks_is_named() -> None:
    with pytest.raises(InstallationError, match=r"package file 'none.toml': .*--collect-data mhsa_compile"):
        beside(__file__, "none.toml")


def test_other_errors_of_files_stay_what_they_are() -> None:
    with pytest.raises(InputError), reading(InputError, "file", "one"):
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    assert room.number_of(RuntimeError("no number")) is None


def test_room_is_found_out_by_asking_for_it(tmp_path: Path) -> None:
    assert room.without_room(tmp_path, 1000) is None and list(tmp_path.iterdir()) == []
    assert room.without_room(tmp_path / "nowhere", 1000) == os.strerror(errno.ENOENT)
    assert room.without_room(tmp_path, 2**62) in (os.strerror(errno.ENOSPC), os.strerror(errno.EFBIG))


def test_a_number_without_a_name_has_a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    spare = tmp_path / f"mhsa_compile-{os.geteuid()}"
    assert user_folders.cache_home() == spare / ".cache" and spare.stat().st_mode & 0o777 == 0o700
    user_folders.let_tvm_load()
    assert os.environ["XDG_CACHE_HOME"] == str(spare / ".cache")
    spare.chmod(0o777)  # somebody may have put code there
    assert user_folders.spare() != spare


def test_a_link_of_somebody_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"mhsa_compile-{os.geteuid()}").symlink_to(tmp_path)
    assert not user_folders.spare().is_symlink()
