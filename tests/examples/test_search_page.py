"""The search app's page in headless Chromium: by mouse, by keyboard, on a phone, and with what it cannot take."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="not installed: fastapi (extra `apps`)")
pytest.importorskip("tokenizers")

import uvicorn
from minilm.encoder import PairEncoder
from search_app.server import Search, create_app
from support import browser

pytestmark = pytest.mark.thorough

TEXT = """\
The cat sleeps on a sofa, the cat sleeps on the sofa, and a cat sleeps on.

Rates rise, the rates rise on, and on, and on the rates rise, as rates do.
"""
expect = browser.playwright().expect
QUERY = "a cat on the sofa?"
DROP = """([name, text]) => {
    const held = new DataTransfer();
    held.items.add(new File([text], name));
    for (const kind of ["dragover", "drop"])
        document.body.dispatchEvent(new DragEvent(kind, {dataTransfer: held, bubbles: true, cancelable: true}));
}"""
ALPHA = """canvas => [...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data]
    .filter((_, i) => i % 4 === 3)"""
PATIENCE = 120_000  # milliseconds; a busy machine takes seconds to show a page


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser.opened() as found:
        yield found


@pytest.fixture
def address(model: Path) -> Iterator[str]:
    """The address at which a server of this process answers."""
    app = create_app(Search.of(model, threads=1, most=8))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    server.should_exit = True
    thread.join()


@pytest.fixture(params=[1280, 390], ids=["desktop", "phone"])
def page(request: pytest.FixtureRequest, chromium: Any, address: str) -> Iterator[Any]:
    context = chromium.new_context(viewport={"width": request.param, "height": 844})
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("requestfailed", lambda failed: wrong.append(failed.url))
    page.goto(address)
    yield page
    assert page.evaluate("document.documentElement.scrollWidth") <= request.param  # nothing sticks out
    context.close()
    assert not wrong


def drop(page: Any, name: str, text: str) -> None:
    page.evaluate(DROP, [name, text])


def searched(page: Any) -> None:
    drop(page, "animals.md", TEXT)
    page.locator("#names li").wait_for()
    page.fill("#query", QUERY)
    page.keyboard.press("Enter")
    page.locator(".result").first.wait_for()


def refused(page: Any, message: str) -> None:
    expect(page.locator("#message")).to_have_text(message)


def test_by_mouse_each_square_is_what_a_head_attends_to(page: Any, model: Path) -> None:
    searched(page)
    assert "passages" in page.locator("#status").inner_text()
    first = page.locator(".result").first
    text = first.locator(".text").inner_text()
    assert text in TEXT
    first.locator(".open").click()
    first.locator(".token.from").wait_for()
    tokens, weights = PairEncoder(model)(QUERY, text)
    assert first.locator(".token").all_inner_texts() == [token.text.removeprefix("##") for token in tokens]
    for layer in (0, 1):
        first.locator(".layers label").nth(layer).click()
        expected = np.round(np.sqrt(weights[layer]) * 255)
        expect(first.locator(".attention")).to_have_attribute("data-layer", str(layer))
        for head in range(4):
            drawn = first.locator(".heads canvas").nth(head).evaluate(ALPHA)
            assert np.abs(np.array(drawn).reshape(len(tokens), -1) - expected[head]).max() <= 1, (layer, head)
    first.locator(".heads label").nth(2).click()
    at = int(np.argmax([token.text == "sofa" for token in tokens]))
    first.locator(".token").nth(at).click()
    best = int(weights[1, 2, at].argmax())
    assert f"{round(weights[1, 2, at, best] * 100)} %" in first.locator(".reading").inner_text()
    first.locator(".open").click()
    assert page.locator(".token").count() == 0


def test_by_keyboard_alone(page: Any) -> None:
    drop(page, "animals.md", TEXT)
    page.locator("#names li").wait_for()
    expect(page.locator("#query")).to_be_focused()
    page.keyboard.type(QUERY)
    page.keyboard.press("Enter")
    page.locator(".result").first.wait_for()
    while not page.evaluate("document.activeElement.classList.contains('open')"):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator(".token.from").wait_for()
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowLeft")  # another layer
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")  # the next head
    checked = page.locator(".heads input:checked")
    assert checked.evaluate("(input) => input === document.activeElement")
    page.keyboard.press("Tab")
    page.keyboard.press("Home")
    seen = set()
    for _ in range(6):
        assert page.evaluate("document.activeElement.classList.contains('from')")
        seen.add(page.locator(".reading").inner_text())
        page.keyboard.press("ArrowRight")
    assert len(seen) == 6


LATE = """
const plain = fetch;
window.fetch = async (path, options) => {
  const answer = await plain(path, options);
  if (path === "/api/files") await new Promise((done) => setTimeout(done, 500));
  return answer;
};
"""


def test_a_list_that_comes_late_does_not_hide_what_was_added_meanwhile(page: Any) -> None:
    page.add_init_script(LATE)
    page.wait_for_load_state("networkidle")  # so that nothing is cut off
    page.reload()
    drop(page, "animals.md", TEXT)
    page.locator("#names li").wait_for()
    page.wait_for_timeout(1000)
    assert page.locator("#names li").count() == 1


def test_what_it_cannot_take_is_one_message_each(page: Any) -> None:
    page.click("#search button")
    refused(page, "Type what you look for.")
    page.fill("#query", "cat")
    page.keyboard.press("Enter")
    refused(page, "There is nothing to search yet. Add a text file first.")
    drop(page, "picture.png", "not a picture")
    refused(page, "picture.png is not a text file. Files end in .txt or .md.")
    drop(page, "binary.txt", "a\0b")
    refused(page, "binary.txt is a binary file, not a text.")
    drop(page, "large.md", "x" * 1_000_001)
    refused(page, "large.md is larger than 1 MB. Split it.")
    assert page.locator("#names li").count() == 0
    searched(page)  # and it goes on
    assert page.locator("#message").is_hidden()


def test_files_come_and_go(page: Any, tmp_path: Path) -> None:
    page.click("#examples")
    page.locator("#names li").first.wait_for()
    assert page.locator("#names li").count() == 3
    name = "<b>50% & more?.txt"  # shown as it is, and sent as it is
    (tmp_path / name).write_text(TEXT)
    page.set_input_files("#choose", tmp_path / name)
    page.locator("#names li").nth(3).wait_for()
    assert page.locator("#names .name").all_inner_texts() == ["garden.md", "kitchen.md", "night-sky.txt", name]
    for left in (3, 2, 1, 0):
        page.locator("#names button").last.click()
        expect(page.locator("#names li")).to_have_count(left)
    assert page.locator("#examples").is_visible()
