"""Work bundles, sound as zip files, whose manifest says what no bundle of ours says."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.hostile_tensors import HOSTILE, SOUND

from mhsa_compile.errors import BundleError
from mhsa_compile.hardware.profile import detect
from mhsa_compile.records.record import isa_of
from mhsa_compile.tuning.measure import work_bundle
from mhsa_compile.tuning.measure.job import Candidate, MeasureJob
from mhsa_compile.tuning.measure.work_bundle import BundleTask, WorkBundle, WorkOrder

ORDER = WorkOrder(study="3f5a", target="native", isa=isa_of(detect()), threads=1, seconds=0.01)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("odd") / "work.zip"
    one = np.ones(2, np.float32)
    job = MeasureJob((one,), (one,), ((2,), "float32"), one, one, budget=0.5, flops=1, sets=1)
    with work_bundle.create(path, ORDER) as add:
        add(BundleTask("linear", job, (Candidate(b"code", packed=(((2, 2), "bfloat16"),)),), ("default",)))
    with zipfile.ZipFile(path) as bundle:
        return {name: bundle.read(name) for name in bundle.namelist()}


def _open(path: Path, files: dict[str, bytes], manifest: bytes) -> WorkBundle:
    with zipfile.ZipFile(path, "w") as bundle:
        for name, data in {**files, "manifest.json": manifest}.items():
            bundle.writestr(name, data)
    with WorkBundle.opened(path) as work:
        return work


CANDIDATE = ("tasks", 0, "candidates", 0)
EDITS = [
    *(
        (("tasks", 0, "output", 1), dtype)
        for dtype in ("float7", "../../x", "float32x99999", "", "handle", "Float32", 4)
    ),
    *(((*CANDIDATE, "packed", 0, 1), dtype) for dtype in ("float7", "float32x4", "float32\n", None)),
    *(((*CANDIDATE, "packed", 0, 0), shape) for shape in ([-1], [2**31], [2**31 - 1] * 3, [1.5], "2")),
    ((*CANDIDATE, "workspace"), [2**31 - 1] * 9),
    (("tasks", 0, "output", 0), [2**30] * 2),
    (("tasks", 0, "budget"), -1.0),
    (("tasks", 0, "sets"), 0),
    (("tasks", 0, "flops"), -5),
    (("tasks", 0, "candidates"), []),
    (("order", "threads"), 0),
    (("order", "seconds"), -1),
    (("order", "seconds"), 1e300),
]


@pytest.mark.parametrize(("place", "value"), EDITS, ids=range(len(EDITS)))
def test_a_field_that_is_none(tmp_path: Path, files: dict[str, bytes], place: tuple[Any, ...], value: Any) -> None:
    manifest = json.loads(files["manifest.json"])
    assert _open(tmp_path / "sound.zip", files, json.dumps(manifest).encode()).tasks
    holder = manifest
    for step in place[:-1]:
        holder = holder[step]
    holder[place[-1]] = value
    with pytest.raises(BundleError, match=r"odd\.zip"):
        _open(tmp_path / "odd.zip", files, json.dumps(manifest).encode())


@pytest.mark.parametrize("raw", [*HOSTILE.values(), SOUND], ids=[*HOSTILE, "other arrays"])
def test_arrays_that_are_none_under_the_right_hash(tmp_path: Path, files: dict[str, bytes], raw: bytes) -> None:
    manifest = json.loads(files["manifest.json"])
    manifest["files"]["jobs/0.safetensors"] = hashlib.sha256(raw).hexdigest()
    with zipfile.ZipFile(tmp_path / "odd.zip", "w") as bundle:
        for name, data in {**files, "jobs/0.safetensors": raw, "manifest.json": json.dumps(manifest).encode()}.items():
            bundle.writestr(name, data)
    message = "an array 'input0'" if raw == SOUND else r"jobs/0\.safetensors: expected safetensors"
    with WorkBundle.opened(tmp_path / "odd.zip") as work, pytest.raises(BundleError, match=message):
        work.job(0)


def test_one_field_twice(tmp_path: Path, files: dict[str, bytes]) -> None:
    twice = files["manifest.json"].replace(b'"order":', b'"order":null,"order":', 1)
    assert twice != files["manifest.json"]
    with pytest.raises(BundleError, match="two entries of one name, 'order'"):
        _open(tmp_path / "odd.zip", files, twice)
