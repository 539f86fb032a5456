"""The search app without a browser: passages, the index, gathered batches, and every answer of the server."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi", reason="not installed: fastapi (extra `apps`)")
pytest.importorskip("tokenizers")
pytest.importorskip("transformers")
pytest.importorskip("httpx2", reason="not installed: httpx2, which fastapi's TestClient calls with")

from fastapi.testclient import TestClient
from minilm.encoder import PairEncoder
from minilm.request_bodies import BodyRefused, body_within
from minilm.trained import PACKAGE, embed_batch, load_reference, model_folder
from search_app import server
from search_app.gather import PASSAGES, Asked, Gatherer, fitting
from search_app.index import Hit, Index, Passage
from search_app.passages import LONGEST, passages
from search_app.server import LARGEST_FILE, NEAR, TEXTS, Search, create_app
from search_page.__main__ import PAGE as PAGE_ALONE
from tokenizers import Tokenizer


def words(text: str) -> list[tuple[int, int]]:
    """Where each word of a text begins and ends: each is a token here."""
    found, begin = [], 0
    for word in text.split():
        begin = text.index(word, begin)
        found.append((begin, begin + len(word)))
        begin += len(word)
    return found


def letters(text: str) -> list[tuple[int, int]]:
    return [(i, i + 1) for i, letter in enumerate(text) if not letter.isspace()]


def sentence(size: int) -> str:
    return " ".join(["word"] * (size - 1)) + " end."


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("", []),
        (" \n\n\t\n", []),
        ("one", [1]),
        (sentence(20) + "\n\n" + sentence(13), [20, 13]),
        ("## A heading\n\n" + sentence(20), [22]),
        (sentence(40) + " " + sentence(40) + "\n" + sentence(40), [80, 40]),
        (sentence(LONGEST), [LONGEST]),
        (sentence(2 * LONGEST + 5), [LONGEST, LONGEST, 5]),
    ],
)
def test_passages(text: str, sizes: list[int]) -> None:
    found = passages(text, words)
    assert [len(passage.split()) for passage in found] == sizes
    assert "".join(found).replace(" ", "").replace(":", "") == "".join(text.split()).replace("#", "")


def test_one_long_word_is_cut_between_tokens() -> None:
    assert [len(passage) for passage in passages("x" * (LONGEST + 3), letters)] == [LONGEST, 3]


def test_a_long_sentence_is_cut_between_words() -> None:
    found = passages(" ".join(["abcde"] * 40), letters)
    assert {word for passage in found for word in passage.split()} == {"abcde"}
    assert all(len(letters(passage)) <= LONGEST for passage in found)


def unit(*numbers: float) -> np.ndarray:
    vectors = np.array(numbers, np.float32).reshape(-1, 2)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_the_index_finds_the_nearest_first() -> None:
    index = Index(2)
    assert index.put("a", ["east", "north"], unit(1, 0, 0, 1), most=3)
    assert index.put("b", ["north-east"], unit(1, 1), most=3)
    assert not index.put("c", ["too many"], unit(1, 0), most=3)
    hits = index.search(unit(1, 0.1)[0], most=2)
    assert [hit.passage.text for hit in hits] == ["east", "north-east"]
    assert hits[0].score == pytest.approx(unit(1, 0.1)[0, 0])
    assert index.put("a", ["west"], unit(-1, 0), most=3)  # instead of its two passages
    assert index.files() == {"b": 1, "a": 1}
    assert index.passage(hits[0].passage.id) is None
    index.remove("a")
    assert [hit.passage.text for hit in index.search(unit(1, 0)[0], most=9)] == ["north-east"]


class Noted:
    """Embeds a row as its length and its first id, when it is let; notes the sizes of its batches."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.entered, self.open = threading.Semaphore(0), threading.Event()

    def __call__(self, rows: list[list[int]]) -> np.ndarray:
        self.batches.append(len(rows))
        self.entered.release()
        assert self.open.wait(20)
        if BAD in rows:
            raise ValueError("bad")
        return np.array([[len(row), row[0]] for row in rows], np.float32)


BAD = [-1]


def wait_for(gatherer: Gatherer, queries: int) -> None:
    while len(gatherer._queries) < queries:
        threading.Event().wait(0.005)


def test_queries_that_wait_share_a_batch_and_come_before_passages() -> None:
    embed = Noted()
    gatherer = Gatherer(embed, most=3)
    with ThreadPoolExecutor(16) as pool:
        rows = [[i] * (PASSAGES + 1 - i) for i in range(PASSAGES + 1)]
        passed = pool.submit(gatherer.passages, rows)
        assert embed.entered.acquire(timeout=20)  # the first passages are being embedded
        asked = [pool.submit(gatherer.query, [i] * 9) for i in range(5)]
        wait_for(gatherer, 5)
        embed.open.set()
        assert [future.result(20).tolist() for future in asked] == [[9, i] for i in range(5)]
        assert passed.result(20).tolist() == [[len(row), row[0]] for row in rows]  # in their order again
    gatherer.close()
    assert embed.batches == [PASSAGES, 3, 2, 1]


@pytest.mark.parametrize(
    ("lengths", "most", "batch"),
    [
        ([7], 8, [7]),
        ([8, 8, 8], 2, [8, 8]),
        ([8, 30, 9, 8, 3], 8, [8, 8, 9]),
        ([30, 8, 9, 28, 33], 8, [30, 28, 33]),
        ([3, 30], 8, [3]),
    ],
)
def test_a_batch_is_of_about_one_length_and_has_whoever_waited_longest(
    lengths: list[int], most: int, batch: list[int]
) -> None:
    waiting = [Asked([[0] * length]) for length in lengths]
    chosen = fitting(waiting, most)
    assert chosen[0] is waiting[0]
    assert [asked.longest for asked in chosen] == batch


def test_a_batch_that_fails_fails_those_who_asked_and_nobody_else() -> None:
    embed = Noted()
    embed.open.set()
    gatherer = Gatherer(embed, most=1, workers=2)
    with pytest.raises(ValueError, match="bad"):
        gatherer.query(BAD)
    assert gatherer.query([5, 6]).tolist() == [2, 5]
    assert gatherer.passages([[7]]).tolist() == [[1, 7]]
    with ThreadPoolExecutor(8) as pool:
        rows = [[i] * (1 + i % 5) for i in range(300)]
        assert [found.tolist() for found in pool.map(gatherer.query, rows)] == [[len(row), row[0]] for row in rows]
    gatherer.close()
    with pytest.raises(RuntimeError, match="closing"):
        gatherer.query([1])


TEXT = """\
The cat sleeps on a sofa, the cat sleeps on the sofa, and a cat sleeps on.

Rates rise, the rates rise on, and on, and on the rates rise, as rates do.
"""


@pytest.fixture
def client(model: Path) -> Iterator[TestClient]:
    with TestClient(create_app(Search.of(model, threads=1, most=8))) as client:
        yield client


def put(client: TestClient, name: str, body: bytes | str) -> object:
    return client.put(f"/api/files/{name}", content=body)


def search(client: TestClient, query: str) -> list[dict]:
    answer = client.post("/api/search", json={"query": query})
    assert answer.status_code == 200, answer.text
    return answer.json()["results"]


def test_a_passage_finds_itself(client: TestClient) -> None:
    assert client.get("/api/files").json() == {"files": []}
    assert put(client, "animals.md", TEXT).json() == {"files": [{"name": "animals.md", "passages": 2}]}
    put(client, "a%20b%2Fc.TXT", "a sofa? " * 9)  # a path is no path here
    for passage in TEXT.strip().split("\n\n"):
        first = search(client, f"  {passage}\n")[0]
        assert (first["text"], first["file"]) == (passage, "animals.md")
        assert first["score"] == pytest.approx(1, abs=1e-6)
    put(client, "animals.md", "a sofa on a sofa on a sofa on a sofa on a sofa on a sofa.")  # instead of the first
    files = [{"name": "c.TXT", "passages": 1}, {"name": "animals.md", "passages": 1}]
    assert client.get("/api/files").json() == {"files": files}
    assert client.delete("/api/files/c.TXT").json() == {"files": files[1:]}


def test_an_answer_says_how_near_its_best_passage_is(client: TestClient) -> None:
    put(client, "animals.md", TEXT)
    for query in (TEXT.strip().split("\n\n")[0], "sofa cat"):
        answer = client.post("/api/search", json={"query": query}).json()
        assert answer["best"].startswith(f"The best has a similarity of {answer['results'][0]['score']:.2f}: 1 says")


class Fixed:
    """Stands for an index whose best passage has a similarity."""

    def __init__(self, score: float) -> None:
        self.score = score

    def __len__(self) -> int:
        return 1

    def search(self, query: object, most: int) -> list[Hit]:
        return [Hit(Passage(1, "animals.md", "the cat"), self.score)]


@pytest.mark.parametrize(("score", "fits"), [(NEAR, True), (NEAR - 0.01, False), (-0.1, False)])
def test_an_answer_says_when_nothing_fits(score: float, fits: bool) -> None:
    app: Any = SimpleNamespace(index=Fixed(score), encoder=MagicMock(), gatherer=MagicMock())
    best = str(Search.search(app, "the cat?")["best"])
    assert best.startswith("Nothing here fits. ") != fits and f"similarity of {score:.2f}" in best


def test_an_index_that_was_emptied_during_a_search() -> None:
    app: Any = SimpleNamespace(index=MagicMock(), encoder=MagicMock(), gatherer=MagicMock())
    app.index.__len__.return_value, app.index.search.return_value = 1, []
    assert Search.search(app, "the cat?") == {"query": "the cat?", "best": "Nothing here fits.", "results": []}


def test_the_page_alone_says_so_from_the_same_similarity_on() -> None:
    assert re.findall(r"NEAR = (.+?);", (PAGE_ALONE / "page.js").read_text()) == [str(NEAR)]


FITTING = """which vegetables need protection against cold nights
stop pests from eating my salad
making earth out of waste
leaves with a white fungus
when is the best hour for watering
a loaf without much work
too salty
blunt kitchen knives
yesterday's rice for dinner
how to soften onions
what is the bright steady point next to the moon
see better in the night
the back of the moon
burning dust from comets
most distant thing that people can see""".splitlines()
OTHER = """how do I renew my passport
the rules of cricket
a lawyer for my contract
install updates on Windows
who painted the Mona Lisa
vaccination against measles
the price of gold
repair a flat bicycle tyre
best films of the nineties
learn Spanish verbs
parental leave
population of Brazil
quadratic equations
bus timetable
a song by the Beatles""".splitlines()


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason=f"not installed: {PACKAGE}")
def test_queries_with_and_without_an_answer_are_told_apart() -> None:
    """Queries that the bound was not chosen by, over the app's own texts."""
    bert, tokenizer = load_reference(model_folder()), Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    tokenizer.no_padding()

    def embedded(texts: list[str]) -> np.ndarray:
        rows = [torch.tensor([tokenizer.encode(text).ids]) for text in texts]
        return np.concatenate([embed_batch(bert, ids, torch.ones_like(ids, dtype=torch.bool)).numpy() for ids in rows])

    parts = [part for file in sorted(TEXTS.iterdir()) for part in file.read_text().split("\n\n")]
    passages = embedded([part for part in parts if not part.startswith("#")])
    fitting, other = ((embedded(queries) @ passages.T).max(1) for queries in (FITTING, OTHER))
    assert (fitting >= NEAR).mean() >= 0.9 and (other < NEAR).mean() >= 0.9, (fitting, other)
    assert (other >= 0.05).mean() > 0.5, "a bound near 0 would tell few of them"


def test_the_attention_of_a_pair_is_what_the_model_gives(client: TestClient, model: Path) -> None:
    put(client, "animals.md", TEXT)
    hit = search(client, "the cat?")[0]
    tokens, weights = PairEncoder(model)("the cat?", hit["text"])
    for layer in range(2):
        asked = {"query": " the  cat?", "passage": hit["id"], "layer": layer}
        answer = client.post("/api/attention", json=asked).json()
        assert [token["text"] for token in answer["tokens"]] == [token.text for token in tokens]
        assert (answer["layers"], answer["heads"]) == (2, 4)
        found = np.frombuffer(base64.b64decode(answer["weights"]), "<u2") / 65535
        np.testing.assert_allclose(found.reshape(4, len(tokens), -1), weights[layer], atol=0.51 / 65535)  # rounded


def test_the_example_texts(client: TestClient) -> None:
    names = [file["name"] for file in client.post("/api/examples").json()["files"]]
    assert names == ["garden.md", "kitchen.md", "night-sky.txt"]


def test_the_page_and_its_headers(client: TestClient) -> None:
    for path in ("/", "/page.js", "/attention.js", "/style.css", "/icon.svg"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'self'")
        assert "http" not in answer.text.replace("http://www.w3.org/2000/svg", "")  # nothing from outside


def test_other_names_of_the_server_are_refused(model: Path) -> None:
    with TestClient(create_app(Search.of(model, threads=1, most=1), ["localhost"])) as client:
        assert client.get("/api/files").status_code == 400  # it calls itself testserver
        assert client.get("/api/files", headers={"Host": "localhost:8000"}).status_code == 200


REFUSED = [
    ("PUT", "files/picture.png", b"\x89PNG", 415, "picture.png is not a text file. Files end in .txt or .md."),
    ("PUT", "files/b.txt", b"\xff\xfe\x00", 415, "b.txt is not text in UTF-8."),
    ("PUT", "files/b.txt", b"abc\0def", 415, "b.txt is a binary file, not a text."),
    ("PUT", "files/b.txt", b" \n\n ", 400, "b.txt has no words in it."),
    ("PUT", "files/b.txt", b"", 400, "b.txt has no words in it."),
    ("PUT", "files/b.txt", b"x" * (LARGEST_FILE + 1), 413, "b.txt is larger than 1 MB. Split it."),
    ("PUT", "files/.md/", b"abc", 415, " is not a text file. Files end in .txt or .md."),
    ("POST", "search", {"query": " \t"}, 400, "Type what you look for."),
    ("POST", "search", {"query": "q" * 301}, 400, "A query has at most 300 characters; this one has 301."),
    ("POST", "search", {}, 400, "query: Field required."),
    ("POST", "search", b"{", 415, "The request is no JSON: send it as application/json."),
    ("POST", "search", {"query": "q" * 20_000}, 413, "The request is larger than 16,384 bytes."),
    ("POST", "attention", {"query": "a", "passage": 99}, 404, "That passage is no longer here. Search again."),
    ("POST", "attention", {"query": "a", "passage": 0, "layer": 2}, 400, "The model has layers 0 to 1, not 2."),
    ("POST", "attention", {"query": "a", "passage": 0, "layer": -1}, 400, "The model has layers 0 to 1, not -1."),
    ("GET", "nothing", b"", 404, "Not Found."),
    ("GET", "../server.py", b"", 404, "Not Found."),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body", "status", "message"), REFUSED)
def test_a_refusal_is_one_message(
    client: TestClient, method: str, path: str, body: object, status: int, message: str
) -> None:
    put(client, "animals.md", TEXT)
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = client.request(method, f"/api/{path}", **content)
    assert (answer.status_code, answer.json()) == (status, {"message": message})
    assert client.get("/api/files").json() == {"files": [{"name": "animals.md", "passages": 2}]}


@pytest.mark.parametrize(
    "body",
    [
        b'{"query": "\\ud83d cut"}',
        b'{"query": "\\udc00"}',
        b'{"query": ' + b"[" * 8_000,
        b'{"query": "\xed\xa0\x80"}',
        b'{"query": "a", "query": 1}',
        b'{"query": 1e999}',
        b"",
        b"null",
        b"[]",
    ],
    ids=range(9),
)
def test_bodies_that_ask_for_nothing(client: TestClient, body: bytes) -> None:
    answer = client.post("/api/search", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert list(answer.json()) == ["message"]


def test_numbers_of_any_size_in_a_body(client: TestClient) -> None:
    for number, status in ((b"9" * 400, 404), (b"1e400", 400), (b"-1", 404), (b'"0"', 404)):
        body = b'{"query": "a", "passage": ' + number + b"}"
        answer = client.post("/api/attention", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (status, 400)


def test_no_more_of_a_body_is_read_than_allowed() -> None:
    async def blocks(count: int, pause: float = 0.0):
        for _ in range(count):
            read.append(1)
            await asyncio.sleep(pause)
            yield b"a" * 1000

    for count, seconds, pause, status, most in ((99, 9.0, 0.0, 413, 6), (99, 0.05, 0.04, 408, 3)):
        read: list[int] = []
        with pytest.raises(BodyRefused) as caught:
            asyncio.run(body_within(blocks(count, pause), 5_000, seconds))
        assert caught.value.status == status
        assert len(read) <= most
    read = []
    assert asyncio.run(body_within(blocks(5), 5_000, 9.0)) == b"a" * 5_000


def test_an_empty_index_says_what_to_do(client: TestClient) -> None:
    answer = client.post("/api/search", json={"query": "cat"})
    assert (answer.status_code, answer.json()["message"]) == (
        409,
        "There is nothing to search yet. Add a text file first.",
    )


def test_an_index_that_is_full(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_PASSAGES", 2)
    assert put(client, "animals.md", TEXT).status_code == 200
    answer = put(client, "more.md", "a cat")
    assert (answer.status_code, answer.json()["message"]) == (
        409,
        "more.md would make more than 2 passages. Remove a file first.",
    )


@pytest.mark.thorough
def test_many_clients_at_once_get_what_one_gets(client: TestClient) -> None:
    """Batches of whoever asks at the time: padded to other lengths, computed in another company."""
    put(client, "animals.md", TEXT)
    queries = [" ".join(["cat", "sofa", "rates", "rise?"][: 1 + i % 4]) + " a" * (i % 7) for i in range(60)]
    alone = [search(client, query) for query in queries]

    def same(found: list[dict], expected: list[dict]) -> bool:
        return all(
            one["id"] == other["id"] and one["score"] == pytest.approx(other["score"], abs=1e-6)
            for one, other in zip(found, expected, strict=True)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(map(same, pool.map(lambda query: search(client, query), queries), alone))
