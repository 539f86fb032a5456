"""Artifacts compute layers of encoders on little here, as tests have them, and not PyTorch's operator."""

import pytest

from mhsa_compile.integrations.layers import encoder


@pytest.fixture(autouse=True)
def small_calls_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "SMALL", 0)
