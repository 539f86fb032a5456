"""What is written for people and compilers into a bundle: its Makefile, its README."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.runtime.artifact.manifest import Manifest, TensorInfo
from mhsa_compile.runtime.standalone.runtimes import WINDOWS_MEMORY, RuntimeLibraries

PROGRAM, MAIN = "attention", "main.cpp"
_STACK = 8 << 20
"""Bytes, as other systems give a program's first thread; Windows gives 1 MiB."""


_MAPPING = {
    "linux": "Where `/proc` is not mounted the system's linker does not know where this folder is: "
    "`LD_LIBRARY_PATH=lib`. Code is then\nmapped from a file in `$TMPDIR` or `/dev/shm`, which is gone when it is.",
    "macos": "Code is mapped from a file in `$TMPDIR`, which is gone when it is. What came over a network may be in "
    "quarantine:\n`xattr -dr com.apple.quarantine .` releases this folder.",
    "windows": "Code is mapped from `artifact/` itself, which nobody else can write while the program runs.",
}
"""Where the checked code is mapped from."""


def program_name(system: str) -> str:
    """What the compiled program is called."""
    return f"{PROGRAM}.exe" if system == "windows" else PROGRAM


def place(library: str) -> str:
    """Where in the bundle a library lies: Windows looks for its own only beside the program."""
    return library if library.endswith(".dll") else f"lib/{library}"


def compiler_words(libraries: Iterable[str], system: str) -> list[str]:
    """What a C++ compiler is given, in the bundle's folder. Nobody refers to the runtime by a symbol, so it is asked
    for. Types are hidden, those of TVM's headers too: Zig's C++ library describes them otherwise than the runtime's,
    which would take the program's description of its error, and crash as it catches one."""
    files = [place(name) for name in sorted(libraries) if not name.endswith(".dll")]
    linking = {
        "linux": ["-Wl,--no-as-needed", *files, "-Wl,--allow-shlib-undefined", "-Wl,-rpath,$ORIGIN/lib", "-lm"],
        "macos": [*files, "-Wl,-rpath,@executable_path/lib"],
        "windows": ["-include", WINDOWS_MEMORY, *files, f"-Wl,--stack,{_STACK}"],
    }[system]
    visibility = ["-fvisibility=hidden", "-DTVM_FFI_DLL=", "-DTVM_FFI_DLL_EXPORT="]
    return ["-std=c++17", "-O2", "-s", *visibility, "-Iinclude", MAIN, *linking, "-o", program_name(system)]


def zig_command(words: Sequence[str], triple: str) -> str:
    """The command that compiles the program, for a shell of any machine with Python and the package ziglang."""
    return f"python3 -m ziglang c++ -target {triple} {shlex.join(words)}"


def makefile(words: Sequence[str], triple: str) -> str:
    """A Makefile that compiles the program with the device's own compiler, or with Zig's."""
    line = shlex.join(words).replace("$", "$$")
    return f"""\
# make        a C++17 compiler of the device, or CXX=... for it
# make zig    from any machine: pip install ziglang

{PROGRAM}: {MAIN} $(wildcard *.h)
\t$(CXX) {line}

zig:
\tpython3 -m ziglang c++ -target {triple} {line}

.PHONY: zig
"""


def readme(manifest: Manifest, runtime: RuntimeLibraries, words: Sequence[str]) -> str:
    """The README: what the bundle is, how it is built and run, and what it takes and gives."""
    target = manifest.target
    assert isinstance(target, CpuProfile)  # bundles are for CPUs
    features = " ".join(target.hardware.features) or "nothing beyond its architecture"
    on_windows = target.system == "windows"
    library = " and ".join(f"`{place(name)}`" for name in sorted(runtime.libraries)) if on_windows else "`lib/`"
    program = program_name(target.system) if on_windows else f"./{PROGRAM}"
    who = "Any" if on_windows else "`make` compiles the program on the device; any other"
    mapping = _MAPPING[target.system]
    return f"""\
# A compiled attention for {target.name}

- `artifact/` was compiled by mhsa-compile {manifest.mhsa_version} for {target.tvm.mtriple}. Its code needs a CPU
  with {features}.
- {library} is TVM's runtime, from {runtime.origin}. It needs {runtime.needs}.

{who} machine with Python compiles it by this (`pip install ziglang`; the first time takes a minute):

```sh
{zig_command(words, target.link.triple)}
```

Copy this folder to the device and run it; `include/`, the sources and the texts may be left behind:

```sh
{program}                                     # random inputs; --help has the options
{program} --inputs in.safetensors --outputs out.safetensors --threads 1
```

It takes

{table(manifest.inputs)}
and gives

{table(manifest.outputs)}
A dim in letters is any size, the same wherever it occurs: `--dim L=197`. Inputs, outputs and weights are safetensors
(in Python: `safetensors.numpy.save_file`), by these names.

The program checks every byte against the manifest's hashes before it maps any code, maps what it checked, and holds a
call against the manifest. What it refuses it refuses in one message, with exit code 2, and writes nothing.

{mapping}

In a program of your own: `attention.h` with the headers beside it is all there is to copy. Its first lines show a call.
"""


def table(infos: Iterable[TensorInfo]) -> str:
    """Inputs or outputs as a table of Markdown."""
    rows = "".join(f"| `{info.name}` | {info.dtype} | {', '.join(map(str, info.dims))} |\n" for info in infos)
    return f"| name | dtype | dims |\n|---|---|---|\n{rows}"
