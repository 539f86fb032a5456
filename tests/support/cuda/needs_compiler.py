"""The mark of tests that need a compiler for CUDA."""

from __future__ import annotations

import pytest

needs_compiler = pytest.mark.usefixtures("cuda_compiler")
