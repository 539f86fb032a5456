"""Every snippet of README.md does what it says: its blocks run in order, in one folder, as a reader would type them."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    line: int
    """Of the first line of code in README.md."""
    code: str


def blocks() -> Iterator[Block]:
    text = README.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        yield Block(match[1], text.count("\n", 0, match.start(2)) + 1, match[2])


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command of a shell block, comments left out."""
    for line in block.code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def shell_commands(program: str) -> list[list[str]]:
    return [words for block in blocks() if block.language == "sh" for words in commands(block) if words[0] == program]


def test_every_block_says_what_it_is() -> None:
    assert {block.language for block in blocks()} == {"python", "sh"}


def test_shell_blocks_hold_only_programs_that_are_checked() -> None:
    programs = {words[0] for block in blocks() if block.language == "sh" for words in commands(block)}
    assert programs == {"make", "mhsa", "pip"}


ON_A_GPU, COMMAND_LINE = "### On an NVIDIA GPU", "## From the command line"
"""The parts that need nothing of those before them: each is run by itself, beside them."""


def parts() -> tuple[list[Block], list[Block], list[Block]]:
    """Blocks up to the GPU's, its own, and the command line's."""
    text = README.read_text(encoding="utf-8")
    gpu, command_line = (text.partition(title)[0].count("\n") for title in (ON_A_GPU, COMMAND_LINE))
    found = list(blocks())
    return (
        [block for block in found if block.line < gpu],
        [block for block in found if gpu < block.line < command_line],
        [block for block in found if block.line > command_line],
    )


@pytest.mark.filterwarnings(
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"
)  # in the reader's export
def test_the_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "readme"}
    for block in parts()[0]:
        if block.language == "python":
            padding = "\n" * (block.line - 1)  # so that a traceback names the line of the README
            exec(compile(padding + block.code, str(README), "exec"), names)
        else:
            run_mhsa(block)
    assert {path.stem for path in tmp_path.glob("*.mhsa")} == {"attention", "model"}
    assert names["verdict"].ok
    assert names["y"].shape == (1, 50, 256)
    assert names["cache"].length.tolist() == [20, 15]


def test_the_command_line_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in parts()[2]:
        assert block.language == "sh"
        run_mhsa(block)
    made = {path.stem for path in tmp_path.glob("*.mhsa")}
    assert made == {"base", "window", "long", "int8", "step", "inside", "arm"}


@pytest.mark.usefixtures("cuda_compiler")
def test_what_is_for_gpus_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (compiling, _) = parts()[1]
    run_mhsa(compiling)
    assert {path.stem for path in tmp_path.glob("*.mhsa")} == {"gpu"}


def test_what_is_for_gpus_runs_here_with_a_cpu_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    import mhsa_compile

    monkeypatch.chdir(tmp_path)
    (compiling, calling) = parts()[1]
    assert calling.code.count("cuda:0") == 3 and compiling.code.count(" --target cuda-sm90a") == 1
    run_mhsa(compiling._replace(code=compiling.code.replace(" --target cuda-sm90a", "")))
    names: dict[str, Any] = {"mhsa": mhsa_compile, "torch": torch}
    exec(calling.code.replace("cuda:0", "cpu"), names)
    assert names["attended"].shape == names["copied"].shape == (2, 1024, 512)


def run_mhsa(block: Block) -> None:
    from mhsa_compile.cli.app import app

    for words in commands(block):
        if words[0] == "mhsa":
            result = CliRunner().invoke(app, words[1:])
            where = f"README.md, block at line {block.line}: {shlex.join(words)}"
            assert result.exit_code == 0, f"{where}\n{result.output}\n{result.exception!r}"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {words[1] for words in shell_commands("make")} | set(
        re.findall(r"`make ([\w-]+)`", README.read_text("utf-8"))
    )
    assert {"demo", "test"} <= named
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in named)


def test_extras_and_files_of_pip_commands_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for words in shell_commands("pip"):
        assert (ROOT / words[words.index("-c") + 1]).is_file()
        asked = re.fullmatch(r"\.(?:\[([\w,]+)\])?", words[-1])
        assert asked is not None
        assert set((asked[1] or "").split(",")) <= {"", *extras}


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "benchmarks/README.md",
        "docs/architecture.md",
        "docs/gpu.md",
        "docs/masks.md",
        "docs/performance.md",
        "docs/tuning.md",
        "schedules/README.md",
    ],
)
def test_links_to_files_lead_somewhere(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_files_that_the_table_names_exist() -> None:
    text = README.read_text(encoding="utf-8")
    named = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert named and all((ROOT / name).exists() for name in named)


def test_the_architecture_names_every_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    package = ROOT / "mhsa_compile"
    rooms = [path.stem for path in package.glob("*.py") if not path.stem.startswith("_")]
    rooms += [f"{path.parent.name}/" for path in package.glob("*/__init__.py")]
    assert [room for room in rooms if f"| `{room}` |" not in text] == []
