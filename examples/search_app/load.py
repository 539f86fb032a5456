"""The search app under load: `make bench-search-app`. Clients that ask one search after the other, for a minute.

The server is a process of its own, with a book's worth of passages. Each client keeps its connection; one request in
fifty asks for a pair's attention. Printed: p50 and p99 of each, requests a second, errors, and the server's memory.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from minilm.encoder import EXAMPLES, compiled_folder

from search_app.__main__ import MODEL

HOST = "127.0.0.1"
ATTENTION = 50
"""One request in so many asks for a pair's attention."""
WARM_UP = 3.0
"""Seconds before anything counts."""
PASSAGES = 2_000
QUARTERS = 4


@dataclass(frozen=True)
class Answer:
    path: str
    seconds: float
    status: int


@dataclass(frozen=True)
class Figures:
    """How many requests of one kind there were, and their milliseconds."""

    requests: int
    p50: float
    p99: float
    slowest: float

    @classmethod
    def of(cls, seconds: list[float]) -> Figures:
        p50, p99, slowest = (np.percentile(seconds, [50, 99, 100]) * 1e3).round(2).tolist()
        return cls(len(seconds), p50, p99, slowest)


@contextmanager
def started(*options: str) -> Iterator[tuple[int, int]]:
    """The server in a process of its own: its id and port."""
    command = [sys.executable, "-m", "search_app", "--port", "0", *options]
    with subprocess.Popen(command, env=_environment(), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = next((line for line in server.stdout if "http://" in line), "")
            if not line:
                sys.exit("The server did not start.")
            yield server.pid, int(re.findall(r":(\d+)", line)[-1])
        finally:
            server.terminate()


def _environment() -> dict[str, str]:
    paths = filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH")])
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def resident_mb(process: int) -> float:
    """What a process holds of the machine's memory."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024


def asked(connection: HTTPConnection, method: str, path: str, body: str | bytes) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"}
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def corpus(sentences: list[str]) -> Iterator[str]:
    """Passages of two to four sentences, in an order of their own."""
    draw = random.Random(0)
    for _ in range(PASSAGES):
        yield " ".join(draw.sample(sentences, draw.randint(2, 4)))


def client(number: int, port: int, sentences: list[str], end: float, answers: list[Answer]) -> None:
    """Searches of one to twenty-odd words, each as soon as the last is answered."""
    draw = random.Random(number)
    with closing(HTTPConnection(HOST, port, timeout=60)) as connection:
        passages = [0]
        while time.perf_counter() < end:
            words = draw.choice(sentences).split()
            body: dict[str, object] = {"query": " ".join(words[: draw.randint(1, len(words))])}
            path = "/api/search"
            if draw.randrange(ATTENTION) == 0:
                path, body = "/api/attention", body | {"passage": draw.choice(passages), "layer": draw.randrange(6)}
            begin = time.perf_counter()
            try:
                status, answer = asked(connection, "POST", path, json.dumps(body))
            except OSError:
                status, answer = 0, {}
                connection.close()
            answers.append(Answer(path, time.perf_counter() - begin, status))
            passages = [result["id"] for result in answer.get("results", ())] or passages


def loaded(port: int, clients: int, seconds: float, sentences: list[str]) -> list[Answer]:
    """What `clients` clients were answered in so many seconds."""
    answers: list[Answer] = []
    end = time.perf_counter() + seconds
    threads = [threading.Thread(target=client, args=(i, port, sentences, end, answers)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def main(
    clients: Annotated[int, typer.Option(min=1)] = 16,
    seconds: Annotated[float, typer.Option(min=0.1)] = 60.0,
    batch: Annotated[int, typer.Option(min=1, help="As of the app: queries that may share a batch.")] = 8,
    model: Annotated[Path, typer.Option(help="As of the app.")] = MODEL,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the figures go, too.")] = None,
) -> None:
    """Loads the search app and prints p50, p99, requests a second, errors and memory."""
    sentences = (EXAMPLES / "sentences.txt").read_text(encoding="utf-8").splitlines()
    folder = compiled_folder(model).resolve()
    with started("--model", str(folder), "--batch", str(batch)) as (process, port):
        with closing(HTTPConnection(HOST, port, timeout=600)) as connection:
            begin = time.perf_counter()
            status, answer = asked(connection, "PUT", "/api/files/book.txt", "\n\n".join(corpus(sentences)).encode())
            if status != 200:
                sys.exit(answer["message"])
            size = answer["files"][0]["passages"]
            print(f"{size} passages were read in {time.perf_counter() - begin:.0f} s")
        loaded(port, clients, WARM_UP, sentences)
        memory, answers = [resident_mb(process)], []
        begin = time.perf_counter()
        for _ in range(QUARTERS):
            answers += loaded(port, clients, seconds / QUARTERS, sentences)
            memory.append(resident_mb(process))
        took = time.perf_counter() - begin
    errors = Counter(answer.status for answer in answers if answer.status != 200)
    kinds = {
        path.rpartition("/")[2]: Figures.of([answer.seconds for answer in answers if answer.path == path])
        for path in sorted({answer.path for answer in answers})
    }
    for name, figures in kinds.items():
        print(f"{name:9}  {figures.requests} requests, p50 {figures.p50:.1f} ms, p99 {figures.p99:.1f} ms, ", end="")
        print(f"slowest {figures.slowest:.1f} ms")
    rate = len(answers) / took
    print(f"{clients} clients, {took:.0f} s: {rate:.0f} requests/s, {errors.total()} errors {dict(errors) or ''}")
    quarters = ", ".join(f"{size:.0f}" for size in memory[1:])
    print(f"memory     {memory[0]:.0f} MB at the start, {quarters} MB after each quarter")
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        summary = {"clients": clients, "seconds": took, "batch": batch, "passages": size, "requests_per_second": rate}
        kind_figures = {name: asdict(figures) for name, figures in kinds.items()}
        json_file.write_text(
            json.dumps(summary | {"errors": errors.total(), "rss_mb": memory} | kind_figures, indent=2) + "\n"
        )
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    typer.run(main)
