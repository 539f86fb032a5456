"""The server: one page, its files, and what it asks for. Every refusal is one message, `{"message": ...}`."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from minilm.encoder import PairEncoder, SentenceEncoder, Tokens
from minilm.request_bodies import BodyRefused, body_within, is_text
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect

from search_app.gather import Gatherer
from search_app.index import Index
from search_app.passages import passages

PAGE = Path(__file__).with_name("page")
TEXTS = Path(__file__).with_name("texts")
KINDS = (".txt", ".md")
LARGEST_FILE = 1_000_000
"""The most bytes of a file: some thousand passages, which take seconds."""
MOST_PASSAGES = 20_000
LONGEST_QUERY = 300
"""The most characters of a query: each may be a token, and the model reads 512, a passage among them."""
LARGEST_QUESTION = 16_384
"""The most bytes of a search's JSON: each character of a query may be an escape of twelve."""
SLOWEST = {LARGEST_FILE: 60.0, LARGEST_QUESTION: 10.0}
"""In so many seconds the body of a request has to be here."""
HITS = 8
NEAR = 0.25
"""The similarity from which on a passage fits a query: docs/apps.md has the queries that it was measured on."""
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Refused(Exception):
    """What a person asked for and cannot have: an HTTP status, and a message that says what to do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class SearchRequest(BaseModel):
    query: str


class AttentionRequest(BaseModel):
    query: str
    passage: int
    layer: int | None = None


Question = TypeVar("Question", SearchRequest, AttentionRequest)


@dataclass
class Search:
    """What the routes work with: the compiled model, called by any thread, and the index."""

    tokens: Tokens
    encoder: SentenceEncoder
    gatherer: Gatherer
    pairs: PairEncoder
    index: Index
    reader: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "reads pairs"))
    """One thread for pairs: each thread that calls keeps memory for its calls, and the server has forty."""

    @classmethod
    def of(cls, folder: Path, threads: int | None, most: int) -> Search:
        """Loads the model from a folder that `minilm.compile_model` wrote; at most `most` queries share a batch."""
        encoder = SentenceEncoder(folder, threads)
        dim = encoder(["How wide is a vector?"]).shape[1]
        gatherer = Gatherer(encoder.of_rows, most, workers=encoder.threads)
        return cls(Tokens(folder), encoder, gatherer, PairEncoder(folder, threads), Index(dim))

    def add(self, name: str, raw: bytes) -> None:
        """Puts a file into the index, instead of one of that name. Raises Refused."""
        parts = passages(_text(name, raw), self.tokens.spans)
        if not parts:
            raise Refused(400, f"{name} has no words in it.")
        full = Refused(409, f"{name} would make more than {MOST_PASSAGES:,} passages. Remove a file first.")
        if len(parts) > MOST_PASSAGES:
            raise full
        vectors = self.gatherer.passages([self.encoder.row(passage) for passage in parts])
        if not self.index.put(name, parts, vectors, MOST_PASSAGES):
            raise full

    def files(self) -> dict[str, object]:
        return {"files": [{"name": name, "passages": size} for name, size in self.index.files().items()]}

    def search(self, query: str) -> dict[str, object]:
        query = _query(query)
        if not len(self.index):
            raise Refused(409, "There is nothing to search yet. Add a text file first.")
        hits = self.index.search(self.gatherer.query(self.encoder.row(query)), HITS)
        if not hits:  # the last file was removed since
            return {"query": query, "best": "Nothing here fits.", "results": []}
        best = f"The best has a similarity of {hits[0].score:.2f}: 1 says the same, near 0 is about something else."
        if hits[0].score < NEAR:
            best = f"Nothing here fits. {best}"
        return {"query": query, "best": best, "results": [asdict(hit.passage) | {"score": hit.score} for hit in hits]}

    def attention(self, query: str, id: int, layer: int | None) -> dict[str, object]:
        """The tokens of a pair and one layer's weights, heads x tokens x tokens, as 16-bit fractions in base64.

        None is a layer in the middle: the first ones look at neighbours, the last ones at [SEP].
        """
        passage = self.index.passage(id)
        if passage is None:
            raise Refused(404, "That passage is no longer here. Search again.")
        tokens, weights = self.reader.submit(self.pairs, _query(query), passage.text).result()
        if layer is None:
            layer = (len(weights) - 1) // 2
        if not 0 <= layer < len(weights):
            raise Refused(400, f"The model has layers 0 to {len(weights) - 1}, not {layer}.")
        fractions = np.round(weights[layer] * 65535).astype("<u2")
        return {
            "tokens": [asdict(token) for token in tokens],
            "layer": layer,
            "layers": len(weights),
            "heads": len(fractions),
            "weights": base64.b64encode(fractions.tobytes()).decode("ascii"),
        }


def create_app(search: Search, names: Sequence[str] = ("*",)) -> FastAPI:
    """The application; it closes the gatherer when it ends.

    `names` are those that the server answers to: a page elsewhere cannot reach it under a name of its own.
    """

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(search.gatherer.close)
        search.reader.shutdown()

    app = FastAPI(title="Search by meaning", docs_url=None, redoc_url=None, openapi_url=None, lifespan=life)
    _add_messages(app)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(names))

    @app.middleware("http")
    async def headers(request: Request, call_next: Callable) -> Response:
        response = await call_next(request)
        response.headers.update(HEADERS)
        return response

    @app.get("/")
    def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    @app.get("/api/files")
    def files() -> dict[str, object]:
        return search.files()

    @app.put("/api/files/{name:path}")
    async def put_file(name: str, request: Request) -> dict[str, object]:
        """The file itself is the body."""
        name = _name(name)
        raw = await _body(name, request, LARGEST_FILE)
        await run_in_threadpool(search.add, name, raw)
        return search.files()

    @app.delete("/api/files/{name:path}")
    def delete_file(name: str) -> dict[str, object]:
        search.index.remove(_name(name))
        return search.files()

    @app.post("/api/examples")
    def add_examples() -> dict[str, object]:
        for path in sorted(TEXTS.iterdir()):
            search.add(path.name, path.read_bytes())
        return search.files()

    @app.post("/api/search")
    async def find(request: Request) -> dict[str, object]:
        asked = await _asked(SearchRequest, request)
        return await run_in_threadpool(search.search, asked.query)

    @app.post("/api/attention")
    async def attention(request: Request) -> dict[str, object]:
        asked = await _asked(AttentionRequest, request)
        return await run_in_threadpool(search.attention, asked.query, asked.passage, asked.layer)

    app.mount("/", StaticFiles(directory=PAGE))
    return app


def _add_messages(app: FastAPI) -> None:
    """Makes the application answer every error with one message."""

    @app.exception_handler(Refused)
    def refused(_: Request, error: Refused) -> JSONResponse:
        return JSONResponse({"message": error.message}, error.status)

    @app.exception_handler(HTTPException)
    def not_there(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"message": f"{error.detail}."}, error.status_code)

    @app.exception_handler(RequestValidationError)
    def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body") or "the request"
        return JSONResponse({"message": f"{where}: {first['msg']}."}, 400)

    @app.exception_handler(Exception)
    def broken(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"message": "Something broke here. The server's terminal says what."}, 500)


def _query(query: str) -> str:
    if not is_text(query):
        raise Refused(400, "A query is text; this one has half of a character.")
    query = " ".join(query.split())
    if not query:
        raise Refused(400, "Type what you look for.")
    if len(query) > LONGEST_QUERY:
        raise Refused(400, f"A query has at most {LONGEST_QUERY} characters; this one has {len(query):,}.")
    return query


def _name(name: str) -> str:
    """A file's name is a label here: nothing is read or written by it."""
    name = name.rpartition("/")[2][-120:]
    if not is_text(name):
        raise Refused(400, "A file's name is text; this one has half of a character.")
    if not name.lower().endswith(KINDS):
        raise Refused(415, f"{name} is not a text file. Files end in {' or '.join(KINDS)}.")
    return name


async def _body(name: str, request: Request, most: int) -> bytes:
    """The body of a request, of which no more is read than allowed."""
    try:
        return await body_within(request.stream(), most, SLOWEST[most])
    except BodyRefused as refusal:
        is_file = refusal.status == 413 and most == LARGEST_FILE
        reason = f"is larger than {most // 1_000_000} MB. Split it" if is_file else refusal.reason
        raise Refused(refusal.status, f"{name} {reason}.") from None
    except ClientDisconnect:
        raise Refused(400, f"{name} did not come whole.") from None


async def _asked(kind: type[Question], request: Request) -> Question:
    """What the JSON of a request asks for: by pydantic, which reads no deeper than it should."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "The request is no JSON: send it as application/json.")
    raw = await _body("The request", request, LARGEST_QUESTION)
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_input=False, include_url=False)) from None


def _text(name: str, raw: bytes) -> str:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Refused(415, f"{name} is not text in UTF-8.") from None
    if "\0" in text:
        raise Refused(415, f"{name} is a binary file, not a text.")
    return text
