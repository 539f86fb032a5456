"""The tile instructions of compiled functions (x86-64, AT&T's syntax): which tiles live where, blocks with products."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

_DEFINES = re.compile(r"\s+(?:tilezero|tileloaddt?1?)\s.*%tmm(\d)$")
_STORES = re.compile(r"\s+tilestored\s+%tmm(\d),")
_PRODUCT = re.compile(r"\s+tdp\w+\s+%tmm(\d), %tmm(\d), %tmm(\d)$")
_JUMP = re.compile(r"\s+(j\w+)\s+(\.L\w+)$")


@dataclass(frozen=True)
class Block:
    """Lines without a label or a jump between them, and the numbers of the blocks that may follow."""

    lines: tuple[str, ...]
    following: tuple[int, ...]

    @property
    def products(self) -> int:
        return sum(_PRODUCT.match(line) is not None for line in self.lines)

    @property
    def loads(self) -> int:
        return sum(line.lstrip().startswith("tileload") for line in self.lines)

    @property
    def sums(self) -> int:
        """Tiles that it stores and has not set to zero: of sums that were loaded."""
        stores, zeros = (sum(line.split()[:1] == [name] for line in self.lines) for name in ("tilestored", "tilezero"))
        return max(0, stores - zeros)

    @property
    def spills(self) -> list[str]:
        """Vectors that go to the stack, of functions without a pointer to their frame: `TileFunction` looks for one."""
        return [line for line in self.lines if re.search(r"\svmov\w+\s+%[xyz]mm\d+, .*\(%rsp\)", line)]


class TileFunction:
    """A function that has tile instructions."""

    def __init__(self, name: str, lines: list[str]) -> None:
        self.name, starts = name, {0}
        assert not any(re.match(r"\s+movq\s+%rsp, %rbp", line) for line in lines), "what lies at %rbp is the stack, too"
        labels = {}
        for i, line in enumerate(lines):
            if match := re.match(r"(\.L\w+):", line):
                labels[match[1]] = i
                starts.add(i)
            elif re.match(r"\s+(j\w+|ret\w*)\b", line):
                assert "*" not in line, f"a jump to wherever: {line}"
                starts.add(i + 1)
        order = sorted(start for start in starts if start < len(lines))
        numbers = {start: number for number, start in enumerate(order)}
        blocks = []
        for number, start in enumerate(order):
            body = lines[start : order[number + 1] if number + 1 < len(order) else len(lines)]
            last = body[-1]
            jump = _JUMP.match(last)
            following = [numbers[labels[jump[2]]]] if jump else []
            if not re.match(r"\s+(jmp|ret\w*)\b", last) and number + 1 < len(order):
                following.append(number + 1)
            blocks.append(Block(tuple(line for line in body if not line.startswith(".L")), tuple(following)))
        self.blocks = blocks

    @cached_property
    def calls_across_tiles(self) -> list[str]:
        """Calls between what fills a tile and its last use."""
        live_in: list[set[int]] = [set() for _ in self.blocks]
        calls: set[str] = set()
        changed = True
        while changed:
            changed = False
            calls.clear()
            for number in reversed(range(len(self.blocks))):
                block = self.blocks[number]
                live = set[int]().union(*(live_in[after] for after in block.following))
                for line in reversed(block.lines):
                    if match := _PRODUCT.match(line):
                        live |= {int(tile) for tile in match.groups()}
                    elif match := _STORES.match(line):
                        live.add(int(match[1]))
                    elif match := _DEFINES.match(line):
                        live.discard(int(match[1]))
                    elif live and re.match(r"\s+call", line):
                        calls.add(line.strip())
                if live != live_in[number]:
                    live_in[number], changed = live, True
        return sorted(calls)

    @cached_property
    def returns_configured(self) -> int:
        """How many ways out leave the thread's tiles configured."""
        entered: list[set[bool]] = [set() for _ in self.blocks]
        entered[0] = {False}
        todo, returns = [0], set[int]()
        while todo:
            number = todo.pop()
            states = set(entered[number])
            for line in self.blocks[number].lines:
                if "ldtilecfg" in line:
                    states = {True}
                elif "tilerelease" in line:
                    states = {False}
                elif re.match(r"\s+ret", line) and True in states:
                    returns.add(number)
            for after in self.blocks[number].following:
                if not states <= entered[after]:
                    entered[after] |= states
                    todo.append(after)
        return len(returns)


def tile_functions(code: str) -> list[TileFunction]:
    """The functions of a file of assembly that have tile instructions."""
    parts = re.split(r"^([\w.]+):[ \t]*(?:#.*)?$", re.sub(r"[ \t]*#.*", "", code), flags=re.MULTILINE)
    functions: dict[str, list[str]] = {}
    name = ""
    for label, body in zip(parts[1::2], parts[2::2], strict=True):
        if not label.startswith(".L") or label.startswith(".L__"):
            name = label
            functions[name] = []
        else:
            functions[name].append(f"{label}:")
        lines = body.splitlines()
        functions[name] += [line for line in lines if re.match(r"\s+[a-z]", line)]
    return [TileFunction(n, lines) for n, lines in functions.items() if any("tmm" in line for line in lines)]
