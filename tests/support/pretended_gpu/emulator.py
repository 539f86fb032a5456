"""Kernels' CUDA C++ as a shared library for the CPU, which the made-up driver calls where a GPU would launch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mhsa_compile.hardware import environment, host, zig

HERE = Path(__file__).parent
_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\(\d+\) )?(\w+)\(([^)]*)\) \{')


class NotEmulable(Exception):
    """Kernels that hold assembly: tensor cores and copies that are under way have no meaning on a CPU."""


def build(sources: Sequence[str], folder: Path) -> list[Path]:
    """A library for each source, in its order. Raises NotEmulable."""
    return [_built(source, folder / f"kernels_{i}") for i, source in enumerate(sources)]


def _built(source: str, path: Path) -> Path:
    text = path.with_suffix(".cpp")
    text.write_text(emulated(source))
    includes = [f"-I{folder / 'include'}" for folder in environment.nvidia_folders()]
    includes += [f"-I{folder / 'include' / 'cccl'}" for folder in environment.nvidia_folders()]
    words = ["-shared", "-fPIC", "-O1", "-std=c++17", "-w", f"-I{HERE}", *includes]
    # A product and a sum are one operation, as they are for nvcc, on CPUs that have it.
    words += ["-ffp-contract=fast", *(["-mfma"] if "fma" in host.cpu_features() else [])]
    library = path.with_suffix(".so")
    zig.run("c++", f"{host.architecture()}-linux-gnu", [*words, "-o", str(library), str(text)], "kernels for the CPU")
    return library


def emulated(source: str) -> str:
    """C++ of the source's kernels, with a function `emulate_NAME(arguments, grid, block)` for each."""
    if re.search(r"\basm\b(?!\s*$)", re.sub(r"#define.*", "", source)) and "asm volatile" in source:
        raise NotEmulable("assembly in the kernels")
    # In C++ it is `alignas(64) static`, and CUDA's own headers must come before the macros.
    text = source.replace("__shared__ alignas(64)", "alignas(64) __shared__")
    calls = [_caller(name, parameters) for name, parameters in _KERNEL.findall(source)]
    return "\n".join(['#include "emulator.h"', text, *calls])


def _caller(name: str, parameters: str) -> str:
    """What unpacks the arguments, each by its address, as cuLaunchKernel takes them."""
    kinds = [re.sub(r"\s*(__restrict__)?\s*\w+$", "", parameter.strip()) for parameter in parameters.split(",")]
    arguments = ", ".join(f"*({kind}*)given[{i}]" for i, kind in enumerate(kinds))
    return (
        f"static void call_{name}(void** given) {{ {name}({arguments}); }}\n"
        f'extern "C" void emulate_{name}(void** given, const unsigned* grid, const unsigned* block) '
        f"{{ emulated::run(call_{name}, given, grid, block); }}"
    )
