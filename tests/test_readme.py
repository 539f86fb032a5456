"""Every snippet of README.md and of docs/usage.md, models.md, heads.md and cli.md does what it says: the blocks of a
page run in order, in one folder, as a reader would type them; and what pages name is there."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import numpy as np
import pytest
from support.page_blocks import Block, blocks, commands, prose, run_mhsa, run_page, split_at

ROOT = Path(__file__).parents[1]
README, USAGE, COMMANDS = ROOT / "README.md", ROOT / "docs" / "usage.md", ROOT / "docs" / "cli.md"
MODELS = ROOT / "docs" / "models.md"
HEADS = ROOT / "docs" / "heads.md"
PAGES = (README, USAGE, COMMANDS)


def shell_commands(page: Path) -> list[list[str]]:
    return [words for block in blocks(page) if block.language == "sh" for words in commands(block)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_says_what_it_is(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= {"python", "sh"}


def test_shell_blocks_hold_only_programs_that_are_checked() -> None:
    programs = {page.stem: {words[0] for words in shell_commands(page)} for page in PAGES}
    assert programs == {"README": {"make", "pip"}, "usage": {"mhsa"}, "cli": {"mhsa"}}


ON_A_GPU = "## On an NVIDIA GPU"
"""The part that needs nothing of those before it: it is run by itself, beside them."""


def parts() -> tuple[list[Block], list[Block]]:
    """Blocks of docs/usage.md up to the GPU's, and its own."""
    return split_at(ON_A_GPU, USAGE)


@pytest.mark.thorough
def test_the_snippet_of_the_first_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_page([block for block in blocks(README) if block.language == "python"])
    assert {path.stem for path in tmp_path.glob("*.mhsa")} == {"attention"}
    assert names["y"].shape == (2, 197, 512)
    assert len(names["report"].replaced) == 2 and names["encoded"].shape == (1, 128, 256)
    run_page([block for block in blocks(README) if block.language == "python"][:1])  # who types it twice, in one folder


@pytest.mark.thorough
@pytest.mark.filterwarnings(
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"
)  # in the reader's export
def test_the_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_page(parts()[0])
    assert {path.stem for path in tmp_path.glob("*.mhsa")} == {"attention", "model"}
    assert names["verdict"].ok
    assert names["y"].shape == (1, 50, 256)
    assert names["cache"].length.tolist() == [20, 15]


@pytest.mark.thorough
def test_the_snippets_about_models_run() -> None:
    names = run_page(list(blocks(MODELS)))
    assert names["tokens"].shape == (1, 19) and names["y"].shape == (2, 9, 64)
    assert len(names["report"].replaced) == 2 and names["hidden"].shape == (2, 11, 64)


@pytest.mark.thorough
def test_the_snippets_about_heads_run() -> None:
    names = run_page(list(blocks(HEADS)))
    missed, size = (np.linalg.norm(array) for array in (names["cut"] - names["y"], names["y"]))
    plan = names["plan"]
    assert plan.refit_error < plan.unseen_refit_error and plan.fit.unseen_tokens == 25
    assert 0.5 * plan.refit_error < missed / size < 2 * plan.unseen_refit_error  # on one batch of the two
    assert [heads for heads, _ in names["curve"]] == list(range(1, 8))


@pytest.mark.thorough
def test_the_command_line_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = blocks(COMMANDS)
    run_mhsa(block)
    made = {path.stem for path in tmp_path.glob("*.mhsa")}
    assert made == {"base", "heads", "window", "long", "int8", "int4", "terms", "step", "inside", "arm", "web"}


@pytest.mark.cuda
@pytest.mark.usefixtures("cuda_compiler")
def test_what_is_for_gpus_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (compiling, _) = parts()[1]
    run_mhsa(compiling)
    assert {path.stem for path in tmp_path.glob("*.mhsa")} == {"gpu"}


@pytest.mark.thorough
def test_what_is_for_gpus_runs_here_with_a_cpu_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    import mhsa_compile

    monkeypatch.chdir(tmp_path)
    (compiling, calling) = parts()[1]
    assert calling.code.count("cuda:0") == 3 and compiling.code.count(" --target cuda-sm90a") == 1
    run_mhsa(compiling._replace(code=compiling.code.replace(" --target cuda-sm90a", "")))
    names = run_page([calling._replace(code=calling.code.replace("cuda:0", "cpu"))], mhsa=mhsa_compile, torch=torch)
    assert names["attended"].shape == names["copied"].shape == (2, 1024, 512)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/README.md", "tests/README.md"])
def test_make_targets_exist(page: str) -> None:
    text, makefile = (ROOT / page).read_text("utf-8"), (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {words[1] for words in shell_commands(ROOT / page) if words[0] == "make"}
    named |= set(re.findall(r"`make ([\w-]+)`", text))
    assert "test" in named
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in named)


def test_extras_and_files_of_pip_commands_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for words in (words for words in shell_commands(README) if words[0] == "pip"):
        assert (ROOT / words[words.index("-c") + 1]).is_file()
        asked = re.fullmatch(r"\.(?:\[([\w,]+)\])?", words[-1])
        assert asked is not None
        assert set((asked[1] or "").split(",")) <= {"", *extras}


LINKED = (
    "CONTRIBUTING.md",
    "README.md",
    "docs/**/*.md",
    *(
        f"{folder}/**/README.md"
        for folder in ("benchmarks", "examples", "exercises", "mhsa_compile", "schedules", "targets", "tests")
    ),
)


@pytest.mark.parametrize(
    "page", sorted({path.relative_to(ROOT).as_posix() for pattern in LINKED for path in ROOT.glob(pattern)})
)
def test_links_lead_somewhere(page: str) -> None:
    """Files are there, and so are the headings behind a #."""
    path, lost = ROOT / page, []
    for file, heading in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", prose(path)):
        target = path.parent / file if file else path
        if not target.exists() or (heading and heading not in headings(target)):
            lost.append((file, heading))
    assert lost == []


def headings(page: Path) -> set[str]:
    """The headings of a page, as GitHub names them in links."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_files_that_the_table_names_exist() -> None:
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert named and all((ROOT / name).exists() for name in named)


def test_every_page_is_on_the_list_of_pages() -> None:
    text, docs = (ROOT / "docs" / "README.md").read_text(encoding="utf-8"), ROOT / "docs"
    assert [page.name for page in docs.glob("*.md") if f"({page.name})" not in text and page.name != "README.md"] == []
    days = (docs / "lab" / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in docs.glob("lab/2*.md") if f"({page.name})" not in days] == []


def test_the_picture_is_that_of_the_figures() -> None:
    """docs/figures/blocks.svg; `make pictures` draws it again."""
    drawing = runpy.run_path(str(ROOT / "docs" / "readme_picture.py"))
    assert drawing["PICTURE"].read_text(encoding="utf-8") == drawing["picture"]()


def test_the_flow_chart_is_that_of_the_questions() -> None:
    """docs/figures/ways.svg, and each of its ways has a section; `make pictures` draws it again."""
    drawing = runpy.run_path(str(ROOT / "docs" / "ways_picture.py"))
    assert drawing["PICTURE"].read_text(encoding="utf-8") == drawing["picture"]()
    ways = [way for _, way in drawing["questions"]()]
    sections = re.findall(r"^## (.+)$", drawing["PAGE"].read_text(encoding="utf-8"), re.MULTILINE)
    assert len(ways) == len(sections) == 6
    assert all(any(way.split()[-1] in section for section in sections) for way in ways)


def test_the_architecture_names_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    places = {"mhsa_compile": ROOT / "mhsa_compile", "mhsa_analysis": ROOT, "mhsa_bench": ROOT}
    folders = [
        init.parent.relative_to(place).as_posix()
        for package, place in places.items()
        for init in (ROOT / package).rglob("__init__.py")
    ]
    assert [folder for folder in folders if folder != "." and f"`{folder}/`" not in text] == []
