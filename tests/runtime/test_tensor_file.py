"""Safetensors as they are read into memory of their own: what safetensors writes, and what it and we refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import save
from support.hostile_tensors import HOSTILE, SOUND, file

from mhsa_compile.errors import InputError
from mhsa_compile.runtime.artifact.tensor_file import read_tensors
from mhsa_compile.runtime.weight_binding import _read


class Trickle(BytesIO):
    """Gives at most a few bytes at once, as a pipe may."""

    def readinto(self, buffer: Any, /) -> int:
        return super().readinto(memoryview(buffer)[:7])


def read(raw: bytes, **options: Any) -> dict[str, Any]:
    return read_tensors(BytesIO(raw), len(raw), **options)


def test_they_are_what_was_saved() -> None:
    rng = np.random.default_rng(0)
    saved = {
        name: np.asarray(rng.integers(0, 2, shape) if dtype == "?" else 9 * rng.standard_normal(shape)).astype(dtype)
        for name, shape, dtype in [
            ("a", (3, 5), "f4"), ("b", (), "f8"), ("c", (0, 3), "f4"), ("d", (200, 199), "f4"), ("e", (7,), "f2"),
            ("f", (2, 2), "i8"), ("g", (5,), "u1"), ("h", (5,), "?"), ("i", (1,), "i4"), ("j", (130_001,), "i1"),
        ]
    }  # fmt: skip
    raw = save(saved, metadata={"format": "pt"})
    for source in (BytesIO(raw), Trickle(raw)):
        tensors = read_tensors(source, len(raw))
        assert tensors.keys() == saved.keys()
        for name, array in saved.items():
            assert tensors[name].dtype == array.dtype
            np.testing.assert_array_equal(tensors[name], array)
            assert tensors[name].__array_interface__["data"][0] % 64 == 0 or not array.size
    assert read(raw, needs=lambda name: name in "di").keys() == {"d", "i"}
    np.testing.assert_array_equal(read(raw, needs=lambda name: name == "j")["j"], saved["j"])


def test_bfloat16() -> None:
    numbers = np.array([[1.5, -2.0, 3e30]], ml_dtypes.bfloat16)
    raw = file('{"x":{"dtype":"BF16","shape":[1,3],"data_offsets":[0,6]}}', numbers.tobytes())
    np.testing.assert_array_equal(read(raw)["x"], numbers)


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_not_sound_is_refused(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(raw)
    with pytest.raises(InputError, match=r"^weights: expected a \.safetensors file, .*w\.safetensors'"):
        _read(path)


def test_the_sound_one_is_not() -> None:
    assert {name: array.shape for name, array in read(SOUND).items()} == {"x": (2, 1, 2), "y": (2, 1)}


def test_safetensors_refuses_what_we_do() -> None:
    """But for what it was not asked about, such as two entries of one name."""
    more = ("truths", "two of one name", "two dtypes", "a thousand axes", "a size of 0")
    for name in (name for name in HOSTILE if not name.startswith(more)):
        with pytest.raises((safetensors.SafetensorError, ValueError)):
            safetensors.deserialize(HOSTILE[name])


def test_a_file_that_ends_while_it_is_read() -> None:
    with pytest.raises(ValueError, match="ends before"):
        read_tensors(BytesIO(SOUND[:-3]), len(SOUND))


_PEAK = """
import sys
from mhsa_compile.runtime.weight_binding import _read
peak = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
size = sum(array.nbytes for array in _read(sys.argv[1]).values())
print((peak() - before) * 1024 / size)
"""


def test_a_tensor_is_in_memory_once(tmp_path: Path) -> None:
    """A process that reads a file grows by its tensors' size, not by twice as much."""
    size = 96 << 20
    header = file(json.dumps({"x": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}), b"")
    with (tmp_path / "w.safetensors").open("wb") as target:
        target.write(header)
        target.truncate(len(header) + size)
    done = subprocess.run([sys.executable, "-c", _PEAK, target.name], capture_output=True, text=True, check=True)
    assert 0.95 < float(done.stdout) < 1.2
