"""Whether this CPU runs code that is compiled for another, and why it does not.

LLVM says what such code may use, `mhsa_compile.hardware.host` what is here: no list of CPUs to forget one in. `root` is
the root of the file system, as it is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mhsa_compile.hardware import host, profile
from mhsa_compile.hardware.profile import detect

TESTS = Path(__file__).parents[1]
ANYWHERE = "x86-64-v3"
"""A target whose code runs wherever the suite does. Attention for AVX-512 and tiles takes twice as long to compile, so
what no vectors decide, such as what a graph means, a cache or a process, is compiled for this."""


VECTORS_DECIDE_NOTHING = (
    *("analysis/", "compiler/", "conversion/", "examples/", "flow/", "frontend/", "integrations/", "runtime/"),
    *("verification/", "kernels/cpu/test_recurrence.py", "spec/test_picture.py"),
    *(f"cli/test_cli{name}.py" for name in ("", "_heads")),
    *(f"bench/test_{name}.py" for name in ("bench", "own_file")),
)
VECTORS_DECIDE = (
    *(f"compiler/test_{name}.py" for name in ("data_races", "exact_arithmetic", "fallback_schedule", "running_sums")),
    *(f"frontend/test_{name}.py" for name in ("convolutions", "float32_sums", "quantised_linear")),
    *(f"runtime/test_{name}" for name in ("compiled_attention", "pretended_gpu", "standalone")),
    *(f"runtime/test_{name}.py" for name in ("tensor_file", "tiles_beside_others", "weight_binding")),
    *(f"verification/test_{name}.py" for name in ("float32_terms", "self_checks")),
    "flow/test_parity.py",
)
"""Of `make test`, what is in the first and not in the second finds ANYWHERE's profile as "native", as on a CPU that has
no more, and code of it that LLVM has not optimised, which is most of a compilation."""


@contextmanager
def native_of(test: Path, config: pytest.Config) -> Iterator[None]:
    """What "native" is for a file of tests; a fixture of the session asks for itself, as it comes before any file."""
    name = test.as_posix().removeprefix(f"{TESTS.as_posix()}/")
    decided = not name.startswith(VECTORS_DECIDE_NOTHING) or name.startswith(VECTORS_DECIDE)
    if decided or "not thorough" not in config.getoption("markexpr"):
        yield
        return
    plain = msgspec.structs.replace(profile.load_profile(ANYWHERE), name=profile.NATIVE)
    tvm_config = profile.CpuProfile.tvm_config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "detect", lambda: plain)
        unoptimised = {plain.tvm: {"opt-level": 0}}
        patch.setattr(profile.CpuProfile, "tvm_config", lambda self: tvm_config(self) | unoptimised.get(self.tvm, {}))
        yield


# LLVM's features of arithmetic and vectors, where /proc/cpuinfo names them otherwise; the rest keep their name.
CPUINFO = {
    "amx-bf16": "amx_bf16", "amx-fp16": "amx_fp16", "amx-int8": "amx_int8", "amx-tile": "amx_tile",
    "avx512bf16": "avx512_bf16", "avx512bitalg": "avx512_bitalg", "avx512fp16": "avx512_fp16",
    "avx512vbmi2": "avx512_vbmi2", "avx512vnni": "avx512_vnni", "avx512vpopcntdq": "avx512_vpopcntdq",
    "avxvnni": "avx_vnni", "bmi": "bmi1", "lzcnt": "abm", "sse3": "pni", "sse4.1": "sse4_1", "sse4.2": "sse4_2",
    "bf16": "bf16", "dotprod": "asimddp",
    "fp16fml": "asimdfhm", "fullfp16": "asimdhp", "i8mm": "i8mm", "lse": "atomics", "neon": "asimd", "rdm": "asimdrdm",
    "fp-armv8": "fp", "sve": "sve", "sve2": "sve2", "sha3": "sha3", "jsconv": "jscvt", "complxnum": "fcma",
    "rcpc": "lrcpc", "rcpc-immo": "ilrcpc", "lse2": "uscat", "crc": "crc32", "flagm": "flagm",
} | {same: same for same in ("avx", "avx2", "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512ifma", "avx512vbmi",
     "avx512vl", "bmi2", "cx16", "f16c", "fma", "gfni", "movbe", "popcnt", "sse4a", "ssse3", "xsave")}  # fmt: skip
_LLVM = {name: feature for feature, name in CPUINFO.items()}

TILES = frozenset({"amx_bf16", "amx_fp16", "amx_int8", "amx_tile"})
EMULATED = TILES if os.environ.get("MHSA_EMULATED_TILES") == "1" else frozenset[str]()
"""What `support.tiles.emulator` does in this run."""

with_tiles = pytest.mark.skipif(
    "amx_tile" not in host.usable_features(), reason="this CPU has no matrix tiles, or the system grants none"
)


def attributes(features: tuple[str, ...]) -> tuple[str, ...]:
    """LLVM's `mattr` of features that /proc/cpuinfo names: what code may use beyond its CPU."""
    return tuple(f"+{_LLVM[feature]}" for feature in features)


def lacking(config: Mapping[str, Any], root: Path = host.ROOT, *, beside: frozenset[str] = EMULATED) -> str | None:
    """Why this CPU cannot run code for a target (the argument of `tvm.target.Target`, with its `mtriple`); None where
    it can. `beside`: features that an emulator adds."""
    from tvm.target import Target, codegen

    architecture = config["mtriple"].partition("-")[0]
    if architecture != host.architecture():
        return f"this CPU is no {architecture}"
    with Target(dict(config)) as target:
        features = {
            CPUINFO[feature] for feature in map(str, codegen.llvm_get_cpu_features(target)) if feature in CPUINFO
        }
    missing = features - beside - host.usable_features(root)
    return f"this CPU lacks {' '.join(sorted(missing))}" if missing else None


def require(config: Mapping[str, Any]) -> None:
    """Skips a test that runs code for a target which this CPU cannot run."""
    if (why := lacking(config)) is not None:
        pytest.skip(why)


def level(mcpu: str, root: Path = host.ROOT) -> str:
    """LLVM's CPU of that name, or this one's level where it lacks something of that: LLVM splits the vectors that it
    does not have, so what a kernel computes at that width is checked all the same."""
    here = lacking({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu}, root) is None
    return mcpu if here else detect(root).tvm.mcpu
