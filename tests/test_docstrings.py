"""Each public name has an example that runs: in its docstring, or, where it has none of its own, on docs/api.md; and
that page has each name once."""

from __future__ import annotations

import doctest
import inspect
import re
import sys
from pathlib import Path

import pytest
from support.page_blocks import blocks, run_page

import mhsa_compile as mhsa
from mhsa_compile.hardware.profile import load_profile

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
PUBLIC = {name: getattr(mhsa, name) for name in mhsa.__all__} | {"load_profile": load_profile}
PUBLIC |= {f"masks.{name}": getattr(mhsa.masks, name) for name in mhsa.masks.__all__}
PUBLIC |= {f"analysis.{name}": getattr(mhsa.analysis, name) for name in mhsa.analysis.__all__}
KINDS = (inspect.isfunction, inspect.isclass, inspect.ismodule)
OBJECTS = {name: found for name, found in PUBLIC.items() if any(is_kind(found) for is_kind in KINDS)}
REFERENCES = [block for block in blocks(PAGE) if block.language == "{eval-rst}"]
EXAMPLES = [block for block in blocks(PAGE) if block.language == "python"]


def examples(name: str) -> doctest.DocTest:
    found = OBJECTS[name]
    module = found if inspect.ismodule(found) else sys.modules[found.__module__]
    text = inspect.getdoc(found) or ""
    return doctest.DocTestParser().get_doctest(text, dict(vars(module)), name, inspect.getsourcefile(found), None)


@pytest.mark.thorough_only("Artifact", "accelerate", "compile", "from_bert", "load", "verify")
@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    test = examples(name)
    assert test.examples, "no example"
    printed: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert runner.run(test, out=printed.append).failed == 0, "".join(printed)


def test_values_have_an_example_on_the_page() -> None:
    code = "".join(block.code for block in EXAMPLES)
    values = sorted(PUBLIC.keys() - OBJECTS.keys())
    assert values == ["TargetProfile", "__version__", "masks.HIDES"]
    assert [name for name in values if not re.search(rf"\bmhsa\.{re.escape(name)}\b", code)] == []


@pytest.mark.thorough
def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_page(EXAMPLES)
    assert names["artifact"].manifest.mhsa_version == mhsa.__version__ and names["profile"].family == "cpu"


def test_the_page_has_each_name_once() -> None:
    """Modules with their members, as the reference generates them."""
    named = re.findall(r"^\.\. auto\w+:: ([\w.]+)$", "".join(block.code for block in REFERENCES), re.MULTILINE)
    whole = [name.split(".")[-1] for name in named if not name.endswith("CompiledAttention")]
    expected = [name for name in OBJECTS if "." not in name]
    assert sorted(whole) == sorted(expected)
