"""LLVM's machine code analyzer: how many cycles a loop takes on a CPU that need not be here, by LLVM's model of it.

It knows the CPU's units, latencies and buffers. It knows no caches, no branches and no memory dependences: every load
hits the first level. Source: https://llvm.org/docs/CommandGuide/llvm-mca.html
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache

from mhsa_bench.static.assembly_loops import Loop
from mhsa_compile.errors import InstallationError, TargetError
from mhsa_compile.hardware.profile import CpuProfile

PROGRAM, OLDEST, NEWEST = "llvm-mca", 17, 40
"""LLVM 17 is the first that has models of all of Neoverse N1, V1 and V2. Debian calls its versions llvm-mca-19, ..."""
ITERATIONS = 200


@dataclass(frozen=True)
class Analyzer:
    """One installed llvm-mca, for one target."""

    program: str
    version: str
    triple: str
    cpu: str
    attributes: str
    registers: int

    def cycles(self, lines: tuple[str, ...]) -> float:
        """How many cycles an iteration takes in the steady state. Raises TargetError where LLVM does not know the code
        or the CPU."""
        match = re.search(r"Total Cycles:\s+(\d+)", _output(self, lines))
        assert match is not None, "llvm-mca reports it"
        return int(match[1]) / ITERATIONS

    def model(self) -> str:
        """What LLVM's model calls itself, by the names of the units (V1UnitV0: V1); else the CPU's name."""
        units = _output(self, ("nop",)).partition("Resources:")[2]
        match = re.search(r"^\[[\d.]+\]\s+- (\w+?)(?:Unit|Port)", units, re.M)
        return match[1] if match else self.cpu

    def peak(self, loop: Loop) -> float:
        """Multiplications of the loop's kind in a cycle, if nothing else is asked of the CPU."""
        count = self.registers * 3 // 4
        sample = next(line for line in loop.multiplies if line.startswith(loop.instruction))
        return count / self.cycles(tuple(_register_only(sample, i, self.registers) for i in range(count)))


@cache
def _output(analyzer: Analyzer, lines: tuple[str, ...]) -> str:
    attributes = [f"-mattr={analyzer.attributes}"] if analyzer.attributes else []
    cpu = [f"-mcpu={analyzer.cpu}"] if analyzer.cpu else []
    command = [analyzer.program, f"-mtriple={analyzer.triple}", *cpu, *attributes, f"-iterations={ITERATIONS}"]
    text = "\n".join(re.sub(r"\.L\w+", "0", line) for line in lines)
    process = subprocess.run(command, input=text, capture_output=True, text=True)
    if process.returncode or "not a recognized" in process.stderr:
        lines_of_error = process.stderr.strip().splitlines()
        expected = f"a CPU and instructions that LLVM {analyzer.version} has a model of"
        raise TargetError(
            "target", expected, lines_of_error[0] if lines_of_error else "no answer", "Try a newer llvm-mca."
        )
    return process.stdout


def find(profile: CpuProfile) -> Analyzer:
    """The newest llvm-mca on the path. Raises InstallationError."""
    names = (PROGRAM, *(f"{PROGRAM}-{version}" for version in range(OLDEST, NEWEST)))
    programs = [(_version(path), path) for path in map(shutil.which, names) if path]
    version, program = max(programs, default=((0,), ""))
    if version < (OLDEST,):
        got = f"version {'.'.join(map(str, version))}" if program else "none on the path"
        hint = "On Debian: apt-get install llvm-19. Elsewhere: the LLVM tools of your system."
        raise InstallationError(PROGRAM, f"that of LLVM {OLDEST} or later, whose models a prediction needs", got, hint)
    tvm, registers = profile.tvm, profile.hardware.vector_registers
    cpu, attributes = profile.hardware.modelled_as or tvm.mcpu, ",".join(tvm.mattr)
    return Analyzer(program, ".".join(map(str, version)), tvm.mtriple, cpu, attributes, registers)


def _version(program: str) -> tuple[int, ...]:
    text = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"version (\d+(?:\.\d+)*)", text)
    return tuple(map(int, match[1].split("."))) if match else (0,)


def _register_only(multiply: str, total: int, registers: int) -> str:
    """The instruction with other registers: it adds to register `total` the product of two that nobody writes."""
    mnemonic = multiply.split()[0]
    if "%" in multiply:
        size = max(re.findall(r"%([xyz])mm", multiply))
        return f"{mnemonic} %{size}mm{registers - 1}, %{size}mm{registers - 2}, %{size}mm{total}"
    names = iter((f"v{total + 2}", "v0", "v1"))  # an element of 16 bits must be of the lower registers
    return re.sub(r"\bv\d+", lambda _: next(names), multiply)
