"""A compiled module -> one file of WebAssembly: its kernels, the C that they call (webassembly.c), and the program that
calls them, as JSON in a section of its own, for the interpreter of runtime/standalone/javascript/.

What that interpreter lacks is refused here, by name, not where somebody loads the file.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import tvm_ffi

from mhsa_compile.compiler.codegen import vm_program
from mhsa_compile.compiler.codegen.embed_cubin import packed_parts
from mhsa_compile.compiler.codegen.object_files import ObjectFiles, most_bytes_of_code
from mhsa_compile.compiler.codegen.runtime_functions import AbsentFunctions
from mhsa_compile.files import atomic_write
from mhsa_compile.files.package_files import beside
from mhsa_compile.hardware import zig
from mhsa_compile.hardware.profile import CpuProfile

SECTION = "mhsa.program"
BUILTINS = frozenset(
    f"vm.builtin.{name}"
    for name in (
        *("alloc_shape_heap", "alloc_storage", "alloc_tensor", "check_prim_value_info", "check_shape_info"),
        *("check_tensor_info", "check_tuple_info", "copy", "make_prim_value", "make_shape", "make_tuple"),
        *("match_prim_value", "match_shape", "null_value", "read_if_cond", "reshape", "shape_of", "tensor_to_shape"),
        *("tuple_getitem", "tuple_reset_item"),
    )
)
"""What the interpreter has."""
_PROGRAM = b"relax.VMExecutable"
_STACK = 1 << 20
_IMPORTS = 2
"""The number of the section that says them."""
_PREFIX = "__tvm_ffi_"
_FLAGS = ("-mexec-model=reactor", "-O2", "-s", f"-Wl,-z,stack-size={_STACK}")


def export(executable: Any, library: Path, profile: CpuProfile) -> None:
    """Writes the file. Raises BuildError with the linker's words, and AbsentFunctions."""
    pack_imports = tvm_ffi.get_global_func("runtime.ModulePackImportsToTensor")
    parts = dict(packed_parts(pack_imports(executable.mod).numpy().tobytes()))
    program = vm_program.read_program(parts[_PROGRAM] or b"")
    compiled = [part for part in executable.mod.imports if part.kind == "llvm"]
    external = _external(program)
    kernels = [name for name in external if any(part.implements_function(name) for part in compiled)]
    if absent := sorted(set(external) - set(kernels) - BUILTINS):
        raise AbsentFunctions(absent)
    with atomic_write.temporary() as folder, ObjectFiles(folder) as objects:
        paths = [str(folder / f"lib{number}.o") for number in range(len(compiled))]
        for part, path in zip(compiled, paths, strict=True):
            objects.check_room(partial(most_bytes_of_code, part))
            part.write_to_file(path)
        exports = [f"-Wl,--export={_PREFIX}{name}" for name in kernels]
        source = beside(__file__, "webassembly.c")
        words: list[str | Path] = [*_FLAGS, *exports, "-o", library, *objects.on_disk(paths), source]
        zig.run("cc", profile.link.triple, words, "a file of WebAssembly")
    if imports := _imports(library.read_bytes()):
        raise AbsentFunctions(imports)
    with library.open("ab") as file:
        file.write(_section(SECTION, msgspec.json.encode(program)))


def _external(program: vm_program.VmProgram) -> list[str]:
    """The names of all functions that are no part of the program, in their order."""
    return [function.name for function in program.functions if not function.code]


def _imports(code: bytes) -> list[str]:
    """What a file of WebAssembly asks of whoever loads it, by name."""
    at = 8  # behind the mark and the version
    while at < len(code):
        kind, (size, at) = code[at], _read_number(code, at + 1)
        if kind == _IMPORTS:
            count, place = _read_number(code, at)
            return re.findall(r"[A-Za-z_]\w+", code[place : at + size].decode("latin-1")) if count else []
        at += size
    return []


def _read_number(code: bytes, at: int) -> tuple[int, int]:
    """(a number as `_number` writes it, the place behind it)."""
    value = shift = 0
    while True:
        value |= (code[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if code[at - 1] < 0x80:
            return value, at


def _section(name: str, content: bytes) -> bytes:
    """A section of a file of WebAssembly that says nothing to a machine: readers of the file find it by its name."""
    body = _number(len(name)) + name.encode() + content
    return b"\0" + _number(len(body)) + body


def _number(value: int) -> bytes:
    """A number in seven bits a byte, the lowest first, as WebAssembly writes them (LEB128)."""
    rest = value >> 7
    return bytes([value & 0x7F | 0x80]) + _number(rest) if rest else bytes([value])
