"""Layers of encoders on little, as tests have them, are computed by artifacts here, which would leave them to PyTorch."""

import pytest

from mhsa_compile.integrations import encoder_layer


@pytest.fixture(autouse=True)
def small_calls_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_layer, "SMALL", 0)
