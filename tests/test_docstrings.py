"""Examples in the docstrings of public names run, and each public function and class has one."""

from __future__ import annotations

import doctest
import inspect
import sys
from pathlib import Path

import pytest

import mhsa_compile as mhsa
from mhsa_compile.hardware.profile import load_profile

PUBLIC = {name: getattr(mhsa, name) for name in mhsa.__all__} | {"load_profile": load_profile}
PUBLIC |= {f"masks.{name}": getattr(mhsa.masks, name) for name in mhsa.masks.__all__}
PUBLIC |= {f"analysis.{name}": getattr(mhsa.analysis, name) for name in mhsa.analysis.__all__}
OBJECTS = {name: found for name, found in PUBLIC.items() if inspect.isfunction(found) or inspect.isclass(found)}
WITHOUT = {"masks.Pattern", "masks.parse_pattern", "masks.pattern"}  # what the patterns share, and their text forms
WITHOUT |= {"analysis.HeadReport", "analysis.PruningPlan"}  # what HeadStatistics.report and HeadReport.prune return


@pytest.mark.thorough_only("accelerate", "compile", "load", "verify")
@pytest.mark.parametrize("name", sorted(OBJECTS.keys() - WITHOUT))
def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = OBJECTS[name]
    names, text = vars(sys.modules[found.__module__]), inspect.getdoc(found) or ""
    test = doctest.DocTestParser().get_doctest(text, dict(names), name, inspect.getsourcefile(found), None)
    assert test.examples, "no example"
    printed: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert runner.run(test, out=printed.append).failed == 0, "".join(printed)
