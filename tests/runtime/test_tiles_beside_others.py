"""An artifact with matrix tiles beside what a process can do to them: other libraries that configure tiles, small
signal stacks, forks, and machines that a program only believes in."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from support.this_cpu import with_tiles

import mhsa_compile as mhsa
from mhsa_compile.runtime.artifact.artifact import Artifact

pytestmark = with_tiles
LENGTH = 70
PROGRAM = """
import ctypes, os, sys, threading
import ml_dtypes
import numpy as np
import mhsa_compile as mhsa

x = np.random.default_rng(0).standard_normal((2, 70, 128), np.float32).astype(ml_dtypes.bfloat16)

class Stack(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

def small_stack():
    memory = ctypes.create_string_buffer(4096)
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 4096)), None)
    return memory, done and ctypes.get_errno()

"""


def attention() -> Artifact:
    spec = mhsa.AttentionSpec(embed_dim=128, num_heads=2, dtype="bfloat16", causal=True)
    return mhsa.compile(mhsa.MultiHeadAttention(spec).eval())


def linear() -> Artifact:
    """A tenth of the time to compile, for the same tiles: as many parts, in threads of the same pool."""
    model, x = torch.nn.Linear(128, 128).bfloat16().eval(), torch.zeros(2, 3, 128, dtype=torch.bfloat16)
    free = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length")},)
    return mhsa.compile(model, example_inputs=(x,), dynamic_shapes=free, without_attention="accept")


MODELS = {"linear": (linear, {"cpu.linear_on_tiles"}),
          "attention": (attention, {"cpu.attention_on_tiles", "cpu.linear_on_tiles"})}  # fmt: skip


@pytest.fixture(scope="module", params=["linear", pytest.param("attention", marks=pytest.mark.thorough)])
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    torch.manual_seed(0)
    compiled, kernels = MODELS[request.param]
    made = compiled()
    assert kernels <= {op.kernel for op in made.manifest.ops}
    made.save(path := tmp_path_factory.mktemp("tiles") / "layer.mhsa")
    return Artifact.open(path)


def drawn() -> np.ndarray:
    import ml_dtypes

    return np.random.default_rng(0).standard_normal((2, LENGTH, 128), np.float32).astype(ml_dtypes.bfloat16)


def fresh(artifact: Artifact, body: str, *before: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, `sys.argv[1]` being the artifact."""
    command = [*before, sys.executable, "-c", PROGRAM + body, str(artifact.path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_onednn_in_the_same_thread_changes_nothing(artifact: Artifact, threads: int) -> None:
    """Its tiles have other shapes, and it keeps them configured from call to call."""
    linear = torch.nn.Linear(96, 80).bfloat16().eval()
    rows = torch.randn(77, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = drawn()
    with torch.inference_mode():
        attention = mhsa.load(artifact, threads=threads)
        ours, theirs = attention(x).tobytes(), linear(rows)
        for _ in range(50):
            assert torch.equal(linear(rows), theirs)
            assert attention(x).tobytes() == ours


def test_callers_beside_onednn(artifact: Artifact) -> None:
    linear = torch.nn.Linear(96, 80).bfloat16().eval()
    rows = torch.randn(77, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    x, wrong = drawn(), []
    attention = mhsa.load(artifact, threads=1)
    with torch.inference_mode():
        ours, theirs = attention(x).tobytes(), linear(rows)

    def work() -> None:
        with torch.inference_mode():
            for _ in range(50):
                if attention(x).tobytes() != ours or not torch.equal(linear(rows), theirs):
                    wrong.append(threading.get_ident())

    callers = [threading.Thread(target=work) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_small_signal_stack_is_refused_with_its_name(artifact: Artifact) -> None:
    done = fresh(
        artifact,
        """
memory, error = small_stack()
assert error == 0
try:
    mhsa.load(sys.argv[1], threads=1)
except mhsa.errors.MhsaError as refusal:
    print(refusal)
""",
    )
    assert done.returncode == 0, done.stderr
    assert "sigaltstack" in done.stdout and "x86-64-v4" in done.stdout


def test_a_thread_gets_no_small_signal_stack_later(artifact: Artifact) -> None:
    """Linux refuses the stack, and calls in that thread are right."""
    done = fresh(
        artifact,
        """
import errno
attention = mhsa.load(sys.argv[1], threads=1)
expected, seen = attention(x).tobytes(), []

def work():
    memory, error = small_stack()
    seen.append((errno.errorcode.get(error), attention(x).tobytes() == expected))

thread = threading.Thread(target=work)
thread.start()
thread.join()
print(*seen)
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "('ENOMEM', True)"


def test_a_forked_child_calls_what_its_parent_loaded(artifact: Artifact) -> None:
    done = fresh(
        artifact,
        """
attention = mhsa.load(sys.argv[1], threads=2)
expected = attention(x).tobytes()
if (child := os.fork()) == 0:
    again = mhsa.load(sys.argv[1], threads=1)
    os._exit(0 if attention(x).tobytes() == again(x).tobytes() == expected else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""",
    )
    assert done.returncode == 0, done.stderr


EMULATORS = {"valgrind": ("valgrind", "--quiet"), "qemu": ("qemu-x86_64",), "qemu, static": ("qemu-x86_64-static",)}


@pytest.mark.thorough
@pytest.mark.parametrize("name", EMULATORS)
def test_an_emulated_cpu_refuses_or_is_right(artifact: Artifact, name: str) -> None:
    """None of these knows tiles: the artifact's features, or the permission, are not there."""
    if shutil.which(EMULATORS[name][0]) is None:
        pytest.skip(f"not installed: {EMULATORS[name][0]}")
    done = fresh(artifact, REFUSED, *EMULATORS[name])
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "refused" in done.stdout


REFUSED = """
try:
    mhsa.load(sys.argv[1], threads=1)(x)
except mhsa.errors.MhsaError as refusal:
    print("refused", refusal)
"""
