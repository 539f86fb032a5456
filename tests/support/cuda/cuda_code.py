"""Kernels compiled for GPUs where there is none: CUDA C++ by TVM, machine code by nvcc or NVRTC, and what is in it."""

from __future__ import annotations

import math
import shutil
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi

from mhsa_compile.compiler.codegen import cuda_compiler
from mhsa_compile.kernels.interface.kernel import Emitted

NVCC = shutil.which("nvcc")
OPCODES = {
    **{0x23C: "HMMA", 0x83B: "LDSM", 0xFAE: "LDGSTS", 0x308: "MUFU", 0x983: "LDL", 0x387: "STL", 0xB1D: "BAR"},
    **{0x223: "FFMA"},
    **{0x9F0: "HGMMA", 0xDF0: "HGMMA", 0x9C5: "WARPGROUP.ARRIVE", 0x5B4: "UTMALDG", 0x3B5: "UTMASTG"},
    **{0x9C8: "USETMAXREG"},
}
"""The lowest 12 bits of an instruction, which has 128 of them from sm_70 on; as nvdisasm names them, with which counts
were compared."""
_WAITS = 1 << 47
"""The bit of an instruction WARPGROUP that says: not ARRIVE, but DEPBAR, which waits for products."""
_REGISTERS, _FRAME, _WORDS = 0x2F, 0x11, 4
"""Numbers in the notes of a cubin (.nv.info): the attributes that say what a function needs; and the form of a note
that is of 32-bit words."""
_CODE, _SYMBOL = b".text.", 0xFFFFFF
"""A section of a kernel's code, and the part of its sh_info that is the kernel's symbol."""
_LAUNCH, _DYNAMIC = "tirx.call_ffi_kernel", "tirx.use_dyn_shared_memory"


@dataclass(frozen=True)
class Launch:
    """A kernel's launch by the host's code: `shared` is bytes of dynamic shared memory."""

    kernel: str
    threads: int
    shared: int


@dataclass(frozen=True)
class Lowered:
    """CUDA C++, LLVM's code of the host that launches it, and its launches."""

    text: str
    host: str
    launches: tuple[Launch, ...]


@dataclass(frozen=True)
class MachineCode:
    """The machine code of a source's kernels: the registers of a thread of each, the most bytes of local memory, and
    the instructions of OPCODES by name, in order; and what ptxas said, where nvcc was there to pass it on."""

    registers_of: dict[str, int]
    stack: int
    order: tuple[str, ...]
    said: str

    @property
    def registers(self) -> int:
        """The most registers that a thread of any kernel has."""
        return max(self.registers_of.values())

    @property
    def instructions(self) -> Counter[str]:
        return Counter(self.order)

    @property
    def spilled(self) -> int:
        """Accesses of local memory."""
        return self.instructions["LDL"] + self.instructions["STL"]


def source(emitted: Emitted, arch: str) -> tuple[str, str]:
    """(CUDA C++, LLVM's code of the host that launches it)."""
    code = lowered(emitted, arch)
    return code.text, code.host


def lowered(emitted: Emitted, arch: str) -> Lowered:
    module = tvm.IRModule({"run": emitted.run.with_attr("global_symbol", "run")})
    host, launches = {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}, _Launches()
    options = {"tirx.disable_cse_tir": True}  # as `build.device_executable`
    with tvm.transform.PassContext(config=options, instruments=[launches]):
        executable = tvm.compile(module, target=tvm.target.Target({"kind": "cuda", "arch": arch}, host=host))
    return Lowered(
        executable.mod.imports[0].inspect_source(), executable.mod.inspect_source("ll"), tuple(launches.found)
    )


@tvm.ir.instrument.pass_instrument
class _Launches:
    """Notes the launches of a module when the host's code and the kernels are parted: the sizes are last to be seen
    there as numbers."""

    def __init__(self) -> None:
        self.found: list[Launch] = []

    def run_after_pass(self, module: Any, info: Any) -> None:
        if info.name != "tirx.SplitHostDevice":
            return

        def note(call: Any) -> None:
            if getattr(call.op, "name", "") != _LAUNCH:
                return
            tags = list(call.attrs.launch_params)
            values = dict(zip(tags, call.args[-len(tags) :], strict=True))
            threads = [int(values[tag]) for tag in tags if tag.startswith("threadIdx.")]
            self.found.append(Launch(str(call.args[0].value), math.prod(threads), int(values.get(_DYNAMIC, 0))))

        for _, function in module.functions.items():
            tvm_ffi.structural_walk(function.body, (tvm.ir.Call, note))


def machine_code(text: str, arch: str, folder: Path, *, by_nvrtc: bool = False) -> MachineCode:
    """Compiles CUDA C++, by nvcc where it is unless told otherwise; what is compiled and what comes of it stays in the
    folder. Raises CalledProcessError and, by NVRTC, BuildError."""
    (folder / "kernel.cu").write_text(text)
    messages = ""
    if by_nvrtc:
        (folder / "kernel.cubin").write_bytes(cuda_compiler._Nvrtc().compiled(text, arch))
    elif NVCC is not None:
        words = [NVCC, "-cubin", f"-arch={arch}", "-std=c++17", "-Xptxas", "-v", "-o", "kernel.cubin", "kernel.cu"]
        messages = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True).stderr
    else:
        (folder / "kernel.cubin").write_bytes(cuda_compiler.compiled(text, arch))
    elf = (folder / "kernel.cubin").read_bytes()
    notes = list(_notes(elf))
    codes = [(name, number & _SYMBOL) for name, _, number in _sections(elf) if name.startswith(_CODE)]
    names = {symbol: name.removeprefix(_CODE).decode() for name, symbol in codes}
    return MachineCode(
        registers_of={names[symbol]: value for attribute, symbol, value in notes if attribute == _REGISTERS},
        stack=max(value for attribute, _, value in notes if attribute == _FRAME),
        order=tuple(_instructions(elf)),
        said=messages,
    )


def _instructions(elf: bytes) -> Iterator[str]:
    for section, code, _ in _sections(elf):
        if section.startswith(_CODE):
            for (word,) in struct.iter_unpack("<Q8x", code):
                if name := OPCODES.get(word & 0xFFF):
                    yield "WARPGROUP.DEPBAR" if name == "WARPGROUP.ARRIVE" and word & _WAITS else name


def _notes(elf: bytes) -> Iterator[tuple[int, int, int]]:
    """(attribute, symbol of the function, value)"""
    notes = next(content for name, content, _ in _sections(elf) if name == b".nv.info")
    at = 0
    while at < len(notes):
        form, attribute, size = struct.unpack_from("<BBH", notes, at)
        if form == _WORDS and size == 8:
            yield (attribute, *struct.unpack_from("<II", notes, at + 4))
        at += 4 + (size if form == _WORDS else 0)


def _sections(elf: bytes) -> Iterator[tuple[bytes, bytes, int]]:
    """(name, content, sh_info) of the sections of a 64-bit ELF file."""
    (table,), (size, count, names_at) = struct.unpack_from("<Q", elf, 40), struct.unpack_from("<HHH", elf, 58)
    headers: list[Any] = [struct.unpack_from("<IIQQQQII", elf, table + i * size) for i in range(count)]
    names = headers[names_at][4]
    for name, _, _, _, offset, length, _, number in headers:
        first = names + name
        yield elf[first : elf.index(b"\0", first)], elf[offset : offset + length], number
