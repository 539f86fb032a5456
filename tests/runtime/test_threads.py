"""The pool that artifacts carry: any number of threads and callers, PyTorch's threads, forks, old artifacts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from campaigns.callers import Case, differing, loaded_for
from support.tiny_artifact import draw, make

import mhsa_compile as mhsa
from mhsa_compile.compiler.codegen import build
from mhsa_compile.errors import InputError
from mhsa_compile.hardware import host, zig
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.compiled_attention import load
from mhsa_compile.runtime.threads.call_threads import POOLS

STRESS = Path(__file__).parents[1] / "support" / "pool_stress.c"
SOURCES = Path(mhsa.__file__).parent / "runtime" / "threads"
X = np.random.default_rng(0).standard_normal((2, 67, 96), np.float32)


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    return mhsa.compile(mhsa.AttentionSpec(embed_dim=96, num_heads=3))


@pytest.fixture(scope="module")
def alone(artifact: Artifact) -> np.ndarray:
    return load(artifact, threads=1)(X)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """An artifact as they were before they brought a pool."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "POOL", ())
        return make(tmp_path_factory.mktemp("old") / "old.mhsa")


@pytest.fixture
def team() -> Iterator[None]:
    """PyTorch may use three threads for a while; the suite lets it use one."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def in_a_new_thread(work: object) -> object:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(work).result()


def fresh(code: str, *words: object) -> None:
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough_only("1-auto")
@pytest.mark.usefixtures("team")
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_bits_do_not_depend_on_threads_or_pool(artifact: Artifact, alone: np.ndarray, threads: int, pool: str) -> None:
    attention = load(artifact, threads=threads, pool=pool)
    assert all(np.array_equal(attention(X), alone) for _ in range(100))
    assert attention.threads == threads
    if pool != "auto":
        assert attention.pool == (pool if threads > 1 else "own")


@pytest.mark.thorough_but("auto")
@pytest.mark.parametrize("pool", POOLS)
def test_callers_share_the_pool(artifact: Artifact, alone: np.ndarray, pool: str) -> None:
    attention = load(artifact, threads=3, pool=pool)

    def call(_: int) -> bool:
        torch.set_num_threads(3)  # of this thread
        return all(np.array_equal(attention(X), alone) for _ in range(50))

    with ThreadPoolExecutor(8) as executor:
        assert all(executor.map(call, range(8)))


def test_callers_of_one_artifact_and_of_several_at_once(artifact: Artifact) -> None:
    """A slice of campaigns/callers.py, and its control: a function whose callers share what it works in."""
    narrow = mhsa.compile(mhsa.AttentionSpec(embed_dim=64, num_heads=4, dtype="bfloat16"))
    rows = X[..., :64].astype(ml_dtypes.bfloat16)
    cases = {"float32": Case(artifact, {"x": X}), "bfloat16": Case(narrow, {"x": rows}, shift=2)}
    cases["other rows"] = Case(artifact, {"x": X[::-1]}, shift=4)
    alone = loaded_for(cases, 1)
    expected = {name: case.call(alone[name]) for name, case in cases.items()}
    for threads in (1, 2, 3, 8):
        loaded = loaded_for(cases, threads)
        for plan in (["float32"] * 3, ["bfloat16"] * 8, [*cases, *cases]):
            assert not differing(cases, loaded, expected, plan).total()
    scratch = np.empty_like(X)

    def sharing(x: np.ndarray) -> np.ndarray:
        scratch[...] = x
        time.sleep(0.001)
        result: np.ndarray = alone["float32"](x=scratch.copy())
        return result

    shared = dict.fromkeys(cases, sharing)
    assert not differing(cases, shared, expected, ["float32"]).total(), "right with one caller"
    assert differing(cases, shared, expected, ["float32", "other rows"] * 2).total()


def test_settings_belong_to_the_call(artifact: Artifact, alone: np.ndarray) -> None:
    """One library, loaded with several settings, called in turn."""
    ways = [load(artifact, threads=threads, pool=pool) for threads in (1, 3) for pool in POOLS]
    for _ in range(20):
        for attention in ways:
            assert np.array_equal(attention(X), alone)


@pytest.mark.thorough
def test_one_pool_for_the_process(artifact: Artifact, tmp_path: Path) -> None:
    """Whatever number of artifacts and callers: as many workers as the largest call wants beside its caller."""
    other = tmp_path / "other"
    mhsa.compile(mhsa.AttentionSpec(embed_dim=32, num_heads=2)).save(other)
    fresh(
        """
import sys, os, threading, time
import numpy as np
from mhsa_compile import load

def tasks():
    return len(os.listdir("/proc/self/task"))

before = tasks()
one, two = load(sys.argv[1], threads=3, pool="own"), load(sys.argv[2], threads=3, pool="own")
for _ in range(50):
    one(np.ones((2, 67, 96), np.float32)), two(np.ones((4, 67, 32), np.float32))
assert tasks() == before + 2, tasks() - before
thread = threading.Thread(target=lambda: one(np.ones((2, 67, 96), np.float32)))
thread.start(), thread.join()
end = time.monotonic() + 20  # the kernel may list a thread for a moment after it was joined
while tasks() != before + 2 and time.monotonic() < end:
    time.sleep(0.01)
assert tasks() == before + 2, tasks() - before
""",
        artifact.path,
        other,
    )


@pytest.mark.thorough
def test_pytorch_imported_after_the_load(artifact: Artifact) -> None:
    fresh(
        """
import os, sys
os.environ.pop("OMP_NUM_THREADS")
import numpy as np
from mhsa_compile import load
from mhsa_compile.errors import InputError

x = np.random.default_rng(0).standard_normal((2, 67, 96)).astype("f4")
try:
    load(sys.argv[1], threads=2, pool="openmp")
except InputError as error:
    assert "none in this process. Import PyTorch before" in str(error), error
else:
    sys.exit("not refused")
attention = load(sys.argv[1], threads=2)
y = attention(x)
import torch
torch.set_num_threads(2)
layer, rows = torch.nn.Linear(512, 2048), torch.randn(64, 512)
seen = set()
with torch.inference_mode():
    for _ in range(200):
        layer(rows)
        assert np.array_equal(attention(x), y)
        seen.add(attention.pool)
assert seen <= {"own", "openmp"}, seen
openmp = load(sys.argv[1], threads=2, pool="openmp")
assert np.array_equal(openmp(x), y) and openmp.pool == "openmp", openmp.pool
""",
        artifact.path,
    )


@pytest.mark.thorough
def test_what_pytorch_was_told_bounds_the_default(artifact: Artifact) -> None:
    """A number of threads that was asked for is not bounded."""
    fresh(
        """
import os, sys
os.environ.pop("OMP_NUM_THREADS")
import numpy as np
import torch
from mhsa_compile import load

def tasks():
    return len(os.listdir("/proc/self/task"))

x = np.ones((2, 67, 96), np.float32)
torch.set_num_threads(1)
before = tasks()
attention = load(sys.argv[1])
attention(x), attention(x)
assert tasks() == before
load(sys.argv[1], threads=2)(x)
assert tasks() == before + 1
""",
        artifact.path,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("pool", ["auto", "own"])
def test_a_fork_calls_as_its_parent_does(artifact: Artifact, pool: str) -> None:
    """A child does so, too, where its parent's other threads were in the middle of a call."""
    fresh(
        """
import os, sys, threading
os.environ.pop("OMP_NUM_THREADS")
import numpy as np
import torch
from mhsa_compile import load

x = np.random.default_rng(0).standard_normal((2, 67, 96)).astype("f4")
attention = load(sys.argv[1], threads=3, pool=sys.argv[2])
y, ends = attention(x), threading.Event()

def call():
    while not ends.is_set():
        attention(x)

threads = [threading.Thread(target=call) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(10):
    child = os.fork()
    if child == 0:
        right = all(np.array_equal(attention(x), y) for _ in range(20))
        os._exit(0 if right and len(os.listdir("/proc/self/task")) == 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(attention(x), y)
ends.set()
for thread in threads:
    thread.join()
""",
        artifact.path,
        pool,
    )


def test_threads_that_end_leave_the_pool_whole(artifact: Artifact, alone: np.ndarray) -> None:
    attention = load(artifact, threads=2, pool="own")
    for _ in range(60):
        found: list[bool] = []
        thread = threading.Thread(target=lambda found=found: found.append(np.array_equal(attention(X), alone)))
        thread.start()
        thread.join()
        assert found == [True]


def test_where_no_thread_can_be_made_the_caller_does_it_all(artifact: Artifact) -> None:
    fresh(
        """
import os, resource, sys
import numpy as np
from mhsa_compile import load

attention = load(sys.argv[1], threads=2, pool="own")
x = np.ones((2, 67, 96), np.float32)
load(sys.argv[1], threads=1, pool="own")(x)  # what a call takes beside threads is there already
before = os.listdir("/proc/self/task")
limit = resource.getrlimit(resource.RLIMIT_AS)[1]
grown = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (grown + (7 << 20), limit))  # a stack takes eight
y = attention(x)
assert os.listdir("/proc/self/task") == before
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
assert np.array_equal(attention(x), y)
""",
        artifact.path,
    )


@pytest.mark.skipif(host.allowed_cpus() < 2, reason="needs two CPUs: there are no workers on one")
@pytest.mark.parametrize(("length", "wakes"), [(1024, True), (4, False)])
def test_a_call_after_a_rest_wakes_the_workers_as_it_begins(artifact: Artifact, length: int, wakes: bool) -> None:
    """Unless its last loops were shorter than a worker's way. Of a worker that is called and finds no loop the time on
    a CPU grows: it looks for one for 0.2 ms."""
    fresh(
        """
import os, sys, time
import numpy as np
from mhsa_compile import load

x = np.ones((2, int(sys.argv[2]), 96), np.float32)
load(sys.argv[1], threads=1, pool="own")(x)  # whatever threads there are beside workers are there already
before = set(os.listdir("/proc/self/task"))
attention = load(sys.argv[1], threads=2, pool="own")
attention(x)
(worker,) = set(os.listdir("/proc/self/task")) - before
clock = ~int(worker) << 3 | 6  # of one thread: CPUCLOCK_SCHED
spent = []
for _ in range(20):
    time.sleep(0.02)
    attention(x)
    time.sleep(0.02)
    begin = time.clock_gettime_ns(clock)
    attention._thread._prepare(attention._thread._sizes)
    time.sleep(0.05)  # a busy machine lets it wait
    spent.append(time.clock_gettime_ns(clock) - begin)
woken = sum(nanoseconds > 50_000 for nanoseconds in spent)
# Where others want the CPUs a worker may be late for half of the rounds, and a short loop be interrupted.
assert woken > 3 if sys.argv[3] == "True" else woken < 15, spent
""",
        artifact.path,
        length,
        wakes,
    )


def test_other_words_for_a_pool(artifact: Artifact) -> None:
    with pytest.raises(InputError, match=r'pool: expected "auto" or "own" or "openmp", got \'tbb\''):
        load(artifact, pool="tbb")


def test_an_old_artifact_runs_on_tvms_pool(old: Artifact) -> None:
    import tvm_ffi

    counts = list(range(1, host.allowed_cpus() + 1))
    loaded = {count: load(old, threads=count) for count in counts}

    def work() -> None:
        before = os.sched_getaffinity(0)
        for count in [*counts, *reversed(counts)]:
            loaded[count](*draw())
            assert tvm_ffi.get_global_func("runtime.NumThreads")() == count
            assert loaded[count].pool == "tvm"
        assert os.sched_getaffinity(0) == before

    in_a_new_thread(work)
    with pytest.raises(InputError, match=r"pool: .*none in this process\. Compile it again"):
        load(old, pool="openmp")


def test_an_old_artifact_says_that_tvms_pool_is_too_small(old: Artifact) -> None:
    many = host.allowed_cpus() + 1

    def work() -> None:
        load(old, threads=1)
        with pytest.raises(InputError, match=f"threads: expected at most {many - 1} in this thread.* got {many}"):
            load(old, threads=many)

    in_a_new_thread(work)


def test_a_fork_is_refused_to_an_old_artifact(old: Artifact) -> None:
    fresh(
        """
import os, sys
import numpy as np
from mhsa_compile.errors import InputError
from mhsa_compile import load
x, mask = np.ones((4, 3, 8), np.float32), np.ones((1, 3), bool)
single, several = load(sys.argv[1], threads=1), load(sys.argv[1], threads=2)
y = several(x, mask)
child = os.fork()
if child == 0:
    np.testing.assert_array_equal(single(x, mask), y)
    try:
        several(x, mask)
    except InputError as error:
        os._exit(0 if "a fork" in str(error) else 1)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""",
        old.path,
    )


@pytest.mark.parametrize(
    ("sanitizer", "share"),
    [((), 1), pytest.param(("-fsanitize=thread",), 10, marks=pytest.mark.thorough)],
    ids=["plain", "thread sanitizer"],
)
def test_the_pool_by_itself(sanitizer: tuple[str, ...], share: int, tmp_path: Path) -> None:
    """Every task of every launch has run once, from several callers, with sleeps, failures and loops in tasks; with the
    sanitizer, a hundred times as slow, a tenth of the launches. `make sanitize-threads` makes as many as one likes."""
    program = tmp_path / "pool_stress"
    words = ["-O1", "-g", "-fno-sanitize=undefined", *sanitizer, f"-I{SOURCES}", STRESS, "-o", program]
    zig.run("cc", "x86_64-linux-gnu", words, "a test of the pool")
    for callers, limit, launches, pauses in ((1, 2, 2000, 1), (4, 2, 1000, 1), (8, 8, 400, 0), (64, 3, 20, 1)):
        command = [program, *map(str, (callers, limit, launches // share, pauses))]
        environment = {**os.environ, "TSAN_OPTIONS": "atexit_sleep_ms=0"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith(f"{callers * (launches // share)} launches, 0 wrong, 0 errors left")
