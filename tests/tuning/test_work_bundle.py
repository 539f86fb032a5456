"""Bundles: work goes to a device as a zip, and comes back as JSON, whole or with a name for what is wrong."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import pytest
from support import measured

from mhsa_compile.errors import BundleError, DeviceError, OutputError
from mhsa_compile.hardware.profile import detect
from mhsa_compile.records.record import isa_of
from mhsa_compile.tuning.measure import rpc_server, sessions, work_bundle, work_results
from mhsa_compile.tuning.measure.job import CRASH, WRONG, Candidate, Failure, MeasureJob, Timing
from mhsa_compile.tuning.measure.work_bundle import BundleTask, WorkBundle, WorkOrder
from mhsa_compile.tuning.measure.work_results import Results

ORDER = WorkOrder(study="3f5a", target="native", isa=isa_of(detect()), threads=1, seconds=0.01)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks: a kernel beside one that crashes and one that is wrong, and a kernel by itself."""
    path = tmp_path_factory.mktemp("bundle") / "work.zip"
    bad = measured.planted(measured.CRASHES), measured.planted(measured.RIGHT, off_by=1e-3)
    with work_bundle.create(path, ORDER) as add:
        add(BundleTask("linear", measured.job(), (measured.kernel(), *bad), ("default", "a crash", "a tail")))
        add(BundleTask("alone", measured.job(), (measured.kernel(),), ("default",)))
    return path


MEASURE = """
import sys
from mhsa_compile.cli.app import app
app(["measure", *sys.argv[1:], "--json"], standalone_mode=False)
print(*sys.modules, open("/proc/self/maps").read(), file=sys.stderr)
"""


@pytest.mark.thorough
def test_a_bundle_is_measured_where_there_is_only_the_runtime(work: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    done = subprocess.run([sys.executable, "-P", "-c", MEASURE, work, "-o", out], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "libtvm_runtime" in done.stderr and "libtvm_compiler" not in done.stderr
    assert not {"torch", "onnx", "tvm.relax"} & set(done.stderr.split())
    said = json.loads(done.stdout)
    assert (said["trials"], said["failures"]) == (3, 2)
    found = work_results.read(out)
    assert [(m.task, m.label) for m in found.measured] == [
        ("linear", "a crash"),
        ("linear", "a tail"),
        ("alone", "default"),
    ]
    crash, tail, alone = (m.outcome for m in found.measured)
    assert isinstance(crash, Failure) and crash.reason == CRASH
    assert isinstance(tail, Failure) and tail.reason == WRONG
    assert isinstance(alone, Timing) and all(isinstance(m.incumbent, Timing) for m in found.measured)
    assert (found.order, found.device, found.total) == (ORDER, rpc_server.this_device(), 3)
    before = out.read_bytes()
    with no_session():
        work_results.measure(work, out)  # nothing is left to measure
    assert out.read_bytes() == before


@contextmanager
def no_session() -> Iterator[None]:
    """No code of a bundle runs inside."""

    def refuse(*_: object) -> None:
        raise AssertionError("a session was started")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "local", refuse)
        yield


class Scripted:
    """A session whose candidates all take a microsecond."""

    asked = 0

    @contextmanager
    def local(self, threads: int) -> Iterator[Scripted]:
        yield self

    def measure(self, job: MeasureJob, candidates: list[Candidate], seconds: float) -> list[Timing]:
        self.asked += 1
        return [Timing((1.0, 1.0), 0.5)] * len(candidates)


def test_what_was_interrupted_goes_on(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, scripted = tmp_path / "results.json", Scripted()
    monkeypatch.setattr(sessions, "local", scripted.local)

    def interrupt(found: Results) -> None:
        if len(found.measured) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work_results.measure(work, out, interrupt)
    assert len(work_results.read(out).measured) == scripted.asked == 2
    assert len(work_results.measure(work, out).measured) == scripted.asked == 3
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert work_results.summary(work_results.read(out))[0] == work_results.Summary("linear", 2, 0, 1.0, 1.0, 1.0)


def test_the_same_work_is_the_same_bundle(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    inputs = (rng.standard_normal((2, 3), np.float32).astype(ml_dtypes.bfloat16), np.array([[True, False]]))
    job = MeasureJob(
        inputs, (np.arange(3), np.float32(2).reshape(())), ((2,), "bfloat16"), np.array([1]), np.zeros(1), 0.5, sets=4
    )
    constants = (rng.standard_normal(5).astype(ml_dtypes.bfloat16), np.arange(7, dtype=np.int8))
    task = BundleTask("t", job, (Candidate(b"library", (((3, 5), "float32"),), constants),), ("default",))
    for name in ("one", "other"):
        with work_bundle.create(tmp_path / name, ORDER) as add:
            add(task)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    with WorkBundle.opened(tmp_path / "one") as found:
        read, candidate = found.job(0), found.candidate(0, 0)
    for mine, theirs in zip(
        (*inputs, *job.weights, *constants), (*read.inputs, *read.weights, *candidate.constants), strict=True
    ):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape and mine.tobytes() == theirs.tobytes()
    assert (candidate.library, candidate.packed) == (b"library", (((3, 5), "float32"),))
    assert (read.output, read.budget, read.flops, read.sets) == (job.output, job.budget, job.flops, 4)


def test_another_device_is_refused_before_any_code_runs(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, out = rpc_server.this_device(), tmp_path / "results.json"

    def refused(said: str, **changes: object) -> None:
        monkeypatch.setattr(rpc_server, "this_device", lambda gpu: msgspec.structs.replace(own, **changes))
        with no_session(), pytest.raises(DeviceError, match=said):
            work_results.measure(work, out)
        assert not out.exists()

    needed = ORDER.isa.features
    refused(f"expected one of {own.architecture}, got sparc", architecture="sparc")
    refused(f"expected one with {' '.join(needed)}, got one without {needed[0]}", features=needed[1:])
    refused("expected 1 CPUs, one a thread, got 0", cores=0)


def rezipped(work: Path, path: Path, change: Callable[[dict[str, bytes]], object]) -> Path:
    with zipfile.ZipFile(work) as bundle:
        files = {name: bundle.read(name) for name in bundle.namelist()}
    change(files)
    with zipfile.ZipFile(path, "w") as bundle:
        for name, data in files.items():
            bundle.writestr(name, data)
    return path


def restated(**fields: object) -> Callable[[dict[str, bytes]], object]:
    return lambda files: files.update(
        {"manifest.json": json.dumps(json.loads(files["manifest.json"]) | fields).encode()}
    )


DAMAGE = {
    "a changed library": (lambda files: files.update({"candidates/0-1.so": b"x"}), r"0-1.so: expected sha256"),
    "a lost file": (lambda files: files.pop("jobs/1.safetensors"), r"got a difference: jobs/1.safetensors"),
    "a file too many": (lambda files: files.update({"../evil.so": b"x"}), r"got a difference: \.\./evil.so"),
    "a path out of it": (restated(files={"candidates/../../evil.so": "0" * 64}), "what format 1 states"),
    "no manifest": (lambda files: files.pop("manifest.json"), "a zip of `mhsa tune"),
    "a newer format": (restated(format=9), "expected format 1, got format 9"),
    "something else": (restated(order={}), "what format 1 states"),
}


@pytest.mark.parametrize(("change", "said"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_bundle_is_named(
    work: Path, tmp_path: Path, change: Callable[[dict[str, bytes]], object], said: str
) -> None:
    damaged = rezipped(work, tmp_path / "damaged.zip", change)
    with no_session(), pytest.raises(BundleError, match=said) as raised:
        work_results.measure(damaged, tmp_path / "results.json")
    assert "damaged.zip" in str(raised.value)


def test_what_is_no_zip_is_named(work: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.zip"
    cut.write_bytes(work.read_bytes()[:-100])
    with pytest.raises(BundleError, match=r"cut.zip.*not a zip file"):
        work_results.measure(cut, tmp_path / "results.json")
    with pytest.raises(BundleError, match="No such file"):
        work_results.measure(tmp_path / "nowhere.zip", tmp_path / "results.json")
    flipped = bytearray(work.read_bytes())
    flipped[len(flipped) // 2] ^= 0xFF
    cut.write_bytes(flipped)
    with no_session(), pytest.raises(BundleError):
        work_results.measure(cut, tmp_path / "results.json")


def test_results_that_do_not_belong_here_are_left_alone(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "local", Scripted().local)
    out = tmp_path / "results.json"
    found = work_results.measure(work, out)

    def refused(text: bytes, said: str) -> None:
        out.write_bytes(text)
        with no_session(), pytest.raises(BundleError, match=said):
            work_results.measure(work, out)
        assert out.read_bytes() == text

    changed = msgspec.structs.replace
    refused(msgspec.json.encode(changed(found, work="0" * 64)), "got some of other work. Choose another -o")
    another = changed(found.device, cpu="another")
    refused(msgspec.json.encode(changed(found, device=another)), "got some of another device")
    refused(msgspec.json.encode(found)[:-40], "what format 1 states, got .*truncated")
    refused(b"{}", "missing required field")


def test_a_full_disk_is_named_and_nothing_is_half_written(work: Path, tmp_path: Path) -> None:
    """A limit on the sizes of files stands in for it."""

    def refused(name: str, action: Callable[[Path], object]) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
        try:
            with no_session(), pytest.raises(OutputError, match="room for it, and permission, got File too large"):
                action(tmp_path / name)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not list(tmp_path.iterdir())

    def create(path: Path) -> None:
        with work_bundle.create(path, ORDER) as add:
            add(BundleTask("linear", measured.job(), (measured.kernel(),), ("default",)))

    refused("work.zip", create)
    refused("results.json", lambda path: work_results.measure(work, path))
    with pytest.raises(BundleError, match="expected a file"):
        work_results.measure(work, "/dev/full")
    with pytest.raises(OutputError, match="a place for a file"):
        create(Path("/dev/full"))
