"""What tests compile kernels for GPUs with: nvcc where it is on the path, else NVRTC of the extra `cuda`."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from mhsa_compile.compiler.codegen import cuda_compiler
from mhsa_compile.errors import InstallationError

REQUIRED = "MHSA_REQUIRE_SYSTEM"
"""The environment variable that is 1 where a missing compiler is a failure, as in .ci/run and `make test-cuda`."""


def require() -> None:
    """Skips the test where there is no compiler, and fails it where there has to be one."""
    _need(cuda_compiler.compiler)


def require_nvrtc() -> None:
    """Skips the test where there is no NVRTC, and fails it where there has to be one, whether there is nvcc or not."""
    _need(cuda_compiler._Nvrtc)


def _need(ask: Callable[[], object]) -> None:
    try:
        ask()
    except InstallationError as error:
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))


needs_compiler = pytest.mark.usefixtures("cuda_compiler")
"""The mark of tests that need one."""
