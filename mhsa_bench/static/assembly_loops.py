"""The innermost loops of matrix products, read from LLVM's assembly of x86-64 and aarch64."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

FEWEST = 7  # multiplications in a loop that is a matrix product

_MULTIPLIES = re.compile(r"(fmla|fmlal2?|bfmmla|bfdot|smmla|sdot|vfmadd\d+ps|vdpbf16ps|vpdpbusd)\b.*[vzy]")
_JUMP = re.compile(r"(?:j\w+|b\.\w+|b|cbn?z\s+\w+,|tbn?z\s+\w+,\s*#?\w+,)\s+(\.L\w+)")
_LABEL = re.compile(r"(\.LBB\w+):")
_EXPONENTIAL = re.compile(r"(shl|vpslld)\b.*[#$]23\b")  # moves an exponent into its place: exp2, not a product
_ZEROING = re.compile(r"movi\b|v?p?xor")
_REGISTER = re.compile(r"\b[vqdsh](\d+)\b|%[xyz]mm(\d+)")
_STACK = re.compile(r"\[sp\b|\(%r[sb]p\b")

# What one load brings, in bytes: of aarch64 by the register's letter, or by the elements of a vector.
_ARM_BYTES = {"q": 16, "d": 8, "s": 4, "h": 2, "b": 1}
_ARM_LOAD = re.compile(r"(ldp|ldnp|ldr|ldur)\s+([qdshb])\d")
_ARM_ELEMENTS = re.compile(r"ld1(r?)\s+\{([^}]*)\}(\[)?")
_X86_BYTES = {"z": 64, "y": 32, "x": 16}


@dataclass(frozen=True)
class Loop:
    """The body of a loop, jump included, without comments and directives."""

    lines: tuple[str, ...]

    @property
    def instruction(self) -> str:
        """The name of the multiplication that the loop is made of."""
        return Counter(line.split()[0] for line in self.multiplies).most_common(1)[0][0]

    @property
    def multiplies(self) -> list[str]:
        return [line for line in self.lines if _MULTIPLIES.match(line)]

    @property
    def sums(self) -> int:
        """Registers that are added to: a tile's size."""
        return len({total for total, *_ in map(_operands, self.multiplies)})

    @property
    def is_by_a_constant(self) -> bool:
        """Whether all is multiplied by one vector that the loop does not load: a search for NaN, say, by zero."""
        factors = [factors for _, *factors in map(_operands, self.multiplies)]
        others = [line for line in self.lines if line not in self.multiplies and not _ZEROING.match(line)]
        return bool(set.intersection(*map(set, factors)).difference(*map(_registers, others)))

    @property
    def spills(self) -> int:
        """Accesses to the stack."""
        return sum(bool(_STACK.search(line)) for line in self.lines)

    @property
    def loaded_bytes(self) -> int:
        return sum(map(_loaded, self.lines))


def inner_loops(assembly: str) -> list[Loop]:
    """All innermost loops that are matrix products, in order."""
    return [loop for loop in map(Loop, _innermost(assembly)) if _is_product(loop)]


def _is_product(loop: Loop) -> bool:
    if len(loop.multiplies) < FEWEST or any(map(_EXPONENTIAL.match, loop.lines)):
        return False
    return not loop.is_by_a_constant


def _registers(line: str) -> list[str]:
    """The numbers of the vector registers of an instruction, in its order."""
    return [first or second for first, second in _REGISTER.findall(line)]


def _operands(multiply: str) -> list[str]:
    """The register that is added to, then those of the factors. AT&T's order, with its %, has the sum last."""
    registers = _registers(multiply)
    return registers[::-1] if "%" in multiply else registers


def _innermost(assembly: str) -> Iterator[tuple[str, ...]]:
    """Yields the lines of each innermost loop: from a label to the jump back to it, with no other label between."""
    lines = [re.sub(r"\s+(//|#\s).*", "", line).strip() for line in assembly.splitlines()]
    label, begin = "", 0
    for number, line in enumerate(lines):
        if match := _LABEL.match(line):
            label, begin = match[1], number + 1
        elif (jump := _JUMP.match(line)) and jump[1] == label:
            yield tuple(text for text in lines[begin : number + 1] if text and not text.startswith((".", "//", "#")))
            label = ""


def _loaded(line: str) -> int:
    if match := _ARM_LOAD.match(line):
        return _ARM_BYTES[match[2]] * (2 if match[1].startswith(("ldp", "ldnp")) else 1)
    if match := _ARM_ELEMENTS.match(line):
        registers = re.findall(r"v\d+\.(\d*)([bhsd])", match[2])
        one = _ARM_BYTES[registers[0][1]]
        return one if match[1] or match[3] else sum(int(count) * _ARM_BYTES[size] for count, size in registers)
    return _loaded_by_x86(line)


def _loaded_by_x86(line: str) -> int:
    """The bytes that an instruction of x86 loads: in AT&T's order a memory operand that is not the last one is read."""
    operands = re.sub(r"\([^)]*\)", "()", line).split(",")
    if not line.startswith("v") or not any("()" in operand for operand in operands[:-1]):
        return 0
    if "{1to" in line or re.match(r"v\w*(broadcastss|broadcastd|movss|movd)\b", line):
        return 4
    widest = max(_X86_BYTES[letter] for letter in re.findall(r"%([xyz])mm", line))
    return widest // 2 if re.match(r"vpmov[sz]x(bw|wd|dq)|vcvtph2ps", line) else widest
