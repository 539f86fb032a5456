"""Kernels in a shared library: as machine code, in the place of the CUDA C++ that TVM would put there.

TVM's export packs a module's imports into one symbol of the library, read when it is loaded. Of kernels it packs what
it has: on a machine without a GPU that is their source, which the loading machine would have to compile. The form, of
tvm_ffi's src/ffi/extra/library_module.cc (numbers are of 64 bits, little-endian, before each text its length):

    bytes of the rest | import tree: two lists of numbers | kind, content | kind, content | ...

A kind "_lib", the library itself, has no content. The content of a kind "cuda" (TVM's src/backend/cuda/runtime) is: the
format of its code, what TVM knows of its functions, its code.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from mhsa_compile.compiler.codegen import cuda_compiler
from mhsa_compile.errors import BuildError

_FORMAT, _COMPILED = b"cuda", b"cubin"


def with_machine_code(packed: bytes, arch: str) -> bytes:
    """Packed imports with every source of kernels compiled. Raises BuildError and InstallationError."""
    tree, parts = _tree(packed), packed_parts(packed)
    content = tree
    for kind, value in parts:
        content += _text(kind)
        if value is not None:
            content += _text(_compiled(value, arch) if kind == b"cuda" else value)
    return struct.pack("<Q", len(content)) + content


def machine_code(packed: bytes) -> list[bytes]:
    """The cubins among packed imports."""
    images = []
    for kind, value in packed_parts(packed):
        if kind == b"cuda" and value is not None and value.startswith(_text(_COMPILED)):
            images.append(value[value.index(b"\x7fELF") :])
    return images


def _compiled(value: bytes, arch: str) -> bytes:
    """A module of kernels, its source compiled."""
    form, functions_at = _take(value, 0)
    if form != _FORMAT:
        raise BuildError("kernels", "CUDA C++", form.decode(errors="replace"))
    source_at = _last_text(value)
    source = value[source_at + 8 :].decode()
    return _text(_COMPILED) + value[functions_at:source_at] + _text(cuda_compiler.compiled(source, arch))


def _last_text(value: bytes) -> int:
    """Where the last text of `value` begins: the one whose length leads to the end."""
    for at in range(len(value) - 8):
        if struct.unpack_from("<Q", value, at)[0] == len(value) - at - 8:
            return at
    raise BuildError("kernels", "code behind what is known of its functions", "none")


def packed_parts(packed: bytes) -> list[tuple[bytes, bytes | None]]:
    """(kind, content) of each module among packed imports; the library itself has no content."""
    return list(_modules(packed, 8 + len(_tree(packed))))


def _tree(packed: bytes) -> bytes:
    """The import tree as it is."""
    at = 8
    for _ in range(2):
        (count,) = struct.unpack_from("<Q", packed, at)
        at += 8 + 8 * count
    return packed[8:at]


def _modules(packed: bytes, at: int) -> Iterator[tuple[bytes, bytes | None]]:
    while at < len(packed):
        kind, at = _take(packed, at)
        value: bytes | None = None
        if kind != b"_lib":
            value, at = _take(packed, at)
        yield kind, value


def _take(data: bytes, at: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    return data[at + 8 : at + 8 + length], at + 8 + length


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data
