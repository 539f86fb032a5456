"""The program of TVM's virtual machine, out of the bytes in which TVM keeps it, as data for an interpreter of ours.

The form is that of TVM's src/runtime/vm/executable.cc; all numbers are little-endian, each text and each list comes
behind its length:

    magic, version | functions | memory scopes | constants | where instructions begin | instructions

What comes of it is JSON (`VmProgram`): an instruction is a list of numbers that begins with its kind. Of a call follow
the register for its result, the function, and for each argument its kind and its value.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec

_MAGIC, _TENSOR_MAGIC = 0xD225DE2F4214151E, 0xDD5E40F096B4A13F
_VALUE_BITS = 56  # of the word of an argument; the rest is its kind
_SPECIAL = 1 << 54
"""The register of no value; the next number is that of the machine itself."""
_CALL, _RETURN, _GOTO, _IF = 1, 2, 3, 4
_CODES = {0: "int", 1: "uint", 2: "float", 3: "handle", 4: "bfloat", 6: "bool"}
_INT, _FLOAT, _DTYPE, _TEXT, _SHAPE, _TENSOR = 1, 3, 5, 65, 69, 70
"""Kinds of constants, by tvm_ffi's numbers of types."""


class VmFunction(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function by its name: of the program, where it has instructions, else of compiled code or a builtin."""

    name: str
    parameters: tuple[str, ...] = ()
    registers: int = 0
    code: tuple[tuple[int, ...], ...] = ()


class VmConstant(msgspec.Struct, frozen=True, omit_defaults=True):
    """A value that instructions name by its place: a number, a dtype or a text, a shape, or (with data) an array."""

    kind: str
    value: int | float | str = 0
    dims: tuple[int, ...] = ()
    data: str = ""


class VmProgram(msgspec.Struct, frozen=True):
    """All functions, and the constants that they share."""

    functions: tuple[VmFunction, ...]
    constants: tuple[VmConstant, ...]


def read_program(raw: bytes) -> VmProgram:
    """The program in the bytes of a `relax.VMExecutable`. Raises ValueError for another form."""
    source = _Source(raw)
    if source.number("Q") != _MAGIC:
        raise ValueError("no program of TVM's virtual machine of the form that this library reads")
    source.text()  # the version of the form
    heads = [_head(source) for _ in range(source.number("Q"))]
    if source.number("Q"):
        raise ValueError("a program that asks for memory of several kinds")
    constants = tuple(_constant(source) for _ in range(source.number("Q")))
    begins, words = source.numbers("q", source.number("Q")), source.numbers("q", source.number("Q"))
    code = [_instruction(words[begin:end]) for begin, end in pairwise((*begins, len(words)))]
    functions = tuple(
        VmFunction(name, parameters, registers, tuple(code[first:end]) if kind == 1 else ())
        for kind, name, first, end, registers, parameters in heads
    )
    return VmProgram(functions, constants)


class _Source:
    """Bytes that are read from their beginning on."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0

    def numbers(self, form: str, count: int) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{count}{form}", self.raw, self.at)
        self.at += struct.calcsize(f"<{count}{form}")
        return values

    def number(self, form: str) -> Any:
        return self.numbers(form, 1)[0]

    def bytes(self, count: int) -> bytes:
        self.at += count
        return self.raw[self.at - count : self.at]

    def text(self) -> str:
        return self.bytes(self.number("Q")).decode()


def _head(source: _Source) -> tuple[int, str, int, int, int, tuple[str, ...]]:
    kind, name = source.number("i"), source.text()
    first, end, _, registers = source.numbers("q", 4)
    return kind, name, first, end, registers, tuple(source.text() for _ in range(source.number("Q")))


def _constant(source: _Source) -> VmConstant:
    kind = source.number("i")
    readers: dict[int, Callable[[], VmConstant]] = {
        _INT: lambda: VmConstant("int", source.number("q")),
        _FLOAT: lambda: VmConstant("float", _finite(source.number("d"))),
        _DTYPE: lambda: VmConstant("dtype", _dtype(source)),
        _TEXT: lambda: VmConstant("text", source.text()),
        _SHAPE: lambda: VmConstant("shape", dims=source.numbers("q", source.number("Q"))),
        _TENSOR: lambda: _tensor(source),
    }
    if kind not in readers:
        raise ValueError(f"a constant of kind {kind}")
    return readers[kind]()


def _finite(value: float) -> float:
    """A number that JSON has."""
    if not math.isfinite(value):
        raise ValueError(f"a constant of {value}, which JSON has not")
    return value


def _dtype(source: _Source) -> str:
    code, bits, lanes = source.numbers("BBH", 1)
    if lanes > 1 or code not in _CODES:
        raise ValueError(f"a dtype of code {code} and {lanes} lanes")
    return _CODES[code] if code == 6 else f"{_CODES[code]}{bits}"


def _tensor(source: _Source) -> VmConstant:
    magic, *_ = source.numbers("Q", 2)
    if magic != _TENSOR_MAGIC:
        raise ValueError("a constant array of another form")
    *_, rank = source.numbers("i", 3)
    dtype, dims = _dtype(source), source.numbers("q", rank)
    return VmConstant("tensor", dtype, dims, base64.b64encode(source.bytes(source.number("q"))).decode())


def _instruction(words: Sequence[int]) -> tuple[int, ...]:
    if words[0] == _CALL:
        arguments = (part for word in words[4 : 4 + words[3]] for part in _argument(word))
        return (_CALL, _register(words[1]), words[2], *arguments)
    if words[0] == _IF:
        return tuple(words[:3])
    if words[0] in (_RETURN, _GOTO):
        return tuple(words[:2])
    raise ValueError(f"an instruction of kind {words[0]}")


def _argument(word: int) -> tuple[int, int]:
    """(its kind: a register, a number, a constant or a function; its value)."""
    kind, value = (word >> _VALUE_BITS) & 0xFF, word & ((1 << _VALUE_BITS) - 1)
    if value >> (_VALUE_BITS - 1):
        value -= 1 << _VALUE_BITS
    return kind, _register(value) if kind == 0 else value


def _register(number: int) -> int:
    """A register's number; -1 is no value, -2 the machine itself."""
    return number if number < _SPECIAL else _SPECIAL - number - 1
