"""The page that searches in the browser alone: its tokenizer against `tokenizers`, and in headless Chromium with the
trained model, which asks nobody for anything once it is loaded."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from minilm.trained import PACKAGE, model_folder
from search_page.__main__ import PAGE, VOCABULARY, write_page
from search_page.server import server
from support import browser
from support.javascript import node

SENTENCES = (
    "A cat's on the sofa!",
    "Naïve café, ÅNGSTRÖM; 3.14 + 2 = 5.14 (re-entrant)",
    "東京 is 首都\u200b and\tthe\nend",
    "antidisestablishmentarianism " + "x" * 120,
    "",
    "emoji 🙂 and £5, $6, a_b, don\u2019t \u2014 «quote»",
)
TEXT = """Bread dough rises when yeast eats sugar. It wants a warm place.

The moon pulls at the sea, and the tide follows twice a day.

Prune roses in late winter, above a bud that looks outward."""
ENCODE = """
import fs from "node:fs";
const { Tokenizer } = await import(process.argv[1]);
const tokenizer = new Tokenizer(fs.readFileSync(process.argv[2], "utf8"));
console.log(JSON.stringify(JSON.parse(process.argv[3]).map((text) => tokenizer.encode(text))));
"""


@pytest.fixture(autouse=True, scope="module")
def trained() -> Path:
    """The folder of the trained model."""
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip(f"not installed: {PACKAGE}")
    return model_folder()


def test_the_tokenizer_is_the_models(trained: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    module = tmp_path / "tokenizer.mjs"
    module.write_text((PAGE / "tokenizer.js").read_text())
    words = [node.program(), "--input-type=module", "-e", ENCODE, str(module), str(trained / VOCABULARY)]
    done = subprocess.run([*words, json.dumps(SENTENCES)], capture_output=True, text=True, check=True)
    own = tokenizers.Tokenizer.from_file(str(trained / "tokenizer.json"))
    own.no_padding()
    own.enable_truncation(256)
    assert json.loads(done.stdout) == [own.encode(sentence).ids for sentence in SENTENCES]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("page")
    write_page(folder)
    with server(folder, 0) as files:
        threading.Thread(target=files.serve_forever, daemon=True).start()
        yield f"http://localhost:{files.server_address[1]}/"
        files.shutdown()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser.opened() as opened:
        yield opened


@pytest.mark.thorough
@pytest.mark.parametrize("width", [375, 1280])
def test_a_question_finds_its_passage_and_nothing_is_sent(chromium: Any, address: str, width: int) -> None:
    page = chromium.new_page(viewport={"width": width, "height": 800})
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(address)
    page.locator("button:enabled").wait_for(timeout=120_000)
    assert all(url.startswith((address, "data:")) for url in requests)
    requests.clear()
    page.fill("#text", TEXT)
    for question, passage in (("why does the ocean go up and down?", 1), ("baking", 0), ("when to cut flowers", 2)):
        page.fill("#query", question)
        page.click("button")
        page.locator("#status", has_text="3 passages").wait_for(timeout=60_000)
        page.locator("button:enabled").wait_for()
        assert page.locator("#results li").first.inner_text().startswith(" ".join(TEXT.split("\n\n")[passage].split()))
    assert requests == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.close()
