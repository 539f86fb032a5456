"""The files that name a feature of scores stay few."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns import feature_files


@pytest.mark.parametrize("feature", feature_files.FEATURES)
def test_a_feature_is_named_in_few_files(feature: str) -> None:
    paths = list(filter(feature_files.on_the_way, feature_files.named_in(feature)))
    assert "mhsa_compile/kernels/scores/order.py" in paths
    assert len(paths) <= 6, paths


def test_names_and_strings_count_and_sentences_do_not(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text('"""sinks"""\nraise ValueError("no slopes here", spec.alibi, roles["sinks"])\n')
    words = feature_files.words(path)
    assert {"alibi", "sinks", "roles"} <= words and "slopes" not in words
