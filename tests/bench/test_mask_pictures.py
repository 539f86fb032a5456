"""docs/masks.md: its pictures are those of the masks, its densities are theirs, its snippets run."""

from __future__ import annotations

import re
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from mhsa_compile import masks
from mhsa_compile.spec import mask_patterns

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "masks.md"
TEXT = PAGE.read_text(encoding="utf-8")
CALLS = re.findall(r"^`(masks\..*)`, density ([\d.]+)%$", TEXT, re.MULTILINE)


@pytest.fixture(scope="module")
def drawing():
    pytest.importorskip("matplotlib")
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import mask_pictures

        return mask_pictures
    finally:
        sys.path.remove(str(ROOT / "docs"))


def test_every_pattern_has_its_section_and_its_picture() -> None:
    named = {call.split("(")[0].removeprefix("masks.") for call, _ in CALLS}
    assert named == {
        "causal",
        "window",
        "key_padding",
        *(kind.__name__ for kind in mask_patterns.KINDS.values() if kind is not mask_patterns.ArrayMask),
    }  # an array looks like nothing in particular
    pictures = re.findall(r"!\[.*\]\((masks/.*\.svg)\)", TEXT)
    assert len(pictures) == len(CALLS) == len(list((ROOT / "docs" / "masks").iterdir()))
    assert all((PAGE.parent / picture).is_file() for picture in pictures)


@pytest.mark.thorough_only("masks.Longformer(window=512, global_tokens=1)-12.2", "masks.Strided(stride=64)-4.6")
@pytest.mark.parametrize(("call", "density"), CALLS)
def test_densities(call: str, density: str) -> None:
    mask = eval(call, {"masks": masks})
    array = mask if isinstance(mask, np.ndarray) else mask.array(4096, 4096)
    assert f"{array.mean():.1%}" == f"{density}%"


@pytest.mark.thorough
def test_the_pictures_are_those_of_the_masks(drawing, tmp_path: Path) -> None:
    pinned = re.search(r"^matplotlib==(.*)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    assert pinned is not None
    if version("matplotlib") != pinned[1]:
        pytest.skip("another matplotlib draws other bytes")
    drawing.draw(tmp_path)
    for path in sorted((ROOT / "docs" / "masks").iterdir()):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), f"{path.name}: run `make pictures`"


def test_reasons_make_up_the_mask(drawing) -> None:
    pictures = drawing._pictures()
    for name, pattern in {
        "longformer": masks.Longformer(window=6, global_tokens=2),
        "bigbird": masks.BigBird(block=2, random_blocks=2),
        "strided": masks.Strided(stride=6),
        "documents": masks.Documents(lengths=(7, 12, 9)),
    }.items():
        whole = pattern.array(drawing.N, drawing.N)
        plain, causal = (np.logical_or.reduce(list(panel.reasons.values())) for panel in pictures[name])
        assert np.array_equal(plain, whole) and np.array_equal(causal, np.tril(whole))


@pytest.mark.thorough
def test_the_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line says the same as the Python above it, which is run."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    (python,), (shell,) = (
        re.findall(rf"^```{kind}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL) for kind in ("python", "sh")
    )
    exec(compile(python, str(PAGE), "exec"), names)
    assert names["y"].shape == (1, 300, 64)
    words = shlex.split(shell)
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert words[:2] == ["mhsa", "compile"]
    assert masks.parse_pattern(options["--static-mask"]) == names["pattern"]
    assert (options["--embed-dim"], options["--num-heads"], options["--length"]) == ("64", "4", "300")
