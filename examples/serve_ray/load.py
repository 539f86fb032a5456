"""The Ray app under load, with 1 replica and with 2: `make bench-serve-ray`. Ray is started here, and ended."""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import threading
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Annotated

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray starts: nothing is sent anywhere

import numpy as np
import ray
import typer
from minilm.encoder import EXAMPLES, SentenceEncoder, compiled_folder
from ray import serve

from serve_ray.deployment import app

HOST, PORT = "127.0.0.1", 8765
WARM_UP = 3.0
OBJECT_STORE = 100_000_000
"""The bytes of Ray's object store: texts and vectors do not pass through it."""


@dataclass(frozen=True)
class Figures:
    """Milliseconds of a request, and what all clients had together."""

    replicas: int
    clients: int
    requests: int
    errors: int
    per_second: float
    p50: float
    p99: float


def embedded(connection: HTTPConnection, text: str) -> np.ndarray | None:
    """The vector of a text, None where it is refused."""
    connection.request("POST", "/", json.dumps({"text": text}), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    return np.array(answer["vector"], np.float32) if response.status == 200 else None


def client(number: int, sentences: list[str], end: float, times: list[float], errors: list[str]) -> None:
    """Texts of one to some ninety words, each as soon as the last is answered."""
    draw = random.Random(number)
    with closing(HTTPConnection(HOST, PORT, timeout=60)) as connection:
        while time.perf_counter() < end:
            words = " ".join(draw.choices(sentences, k=draw.choice((1, 1, 1, 3)))).split()
            begin = time.perf_counter()
            try:
                if embedded(connection, " ".join(words[: draw.randint(1, len(words))])) is None:
                    errors.append("refused")
            except (OSError, ValueError) as error:
                errors.append(repr(error))
                connection.close()
            times.append(time.perf_counter() - begin)


def loaded(replicas: int, clients: int, seconds: float, sentences: list[str]) -> Figures:
    times: list[float] = []
    errors: list[str] = []
    begin = time.perf_counter()
    arguments = (sentences, begin + seconds, times, errors)
    threads = [threading.Thread(target=client, args=(i, *arguments)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    p50, p99 = (np.percentile(times, [50, 99]) * 1e3).round(2).tolist()
    rate = len(times) / (time.perf_counter() - begin)
    return Figures(replicas, clients, len(times), len(errors), round(rate, 1), p50, p99)


def main(
    clients: Annotated[int, typer.Option(min=1)] = 16,
    seconds: Annotated[float, typer.Option(min=0.1)] = 20.0,
    threads: Annotated[int, typer.Option(min=1, help="Of a replica, and CPUs set aside for it.")] = 1,
    model: Annotated[Path, typer.Option(help="The compiled model; made where it is not there.")] = Path("build/minilm"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the figures go, too.")] = None,
) -> None:
    """Loads the app with 1 and with 2 replicas, and prints p50, p99, texts a second and errors."""
    sentences = (EXAMPLES / "sentences.txt").read_text(encoding="utf-8").splitlines()
    expected = SentenceEncoder(compiled_folder(model), threads)(sentences[:4])
    ray.init(
        num_cpus=2 * threads, include_dashboard=False, object_store_memory=OBJECT_STORE, log_to_driver=False,
        logging_level="error",
    )  # fmt: skip
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    rates = []
    try:
        serve.start(http_options={"host": HOST, "port": PORT})
        for replicas in (1, 2):
            serve.run(app({"model": model, "replicas": replicas, "threads": threads}))
            with closing(HTTPConnection(HOST, PORT, timeout=60)) as connection:
                vectors = [embedded(connection, sentence) for sentence in sentences[:4]]
            if not np.allclose(np.sum(np.stack(vectors) * expected, axis=1), 1, atol=1e-5):
                sys.exit("The replicas embed otherwise than the artifact does.")
            loaded(replicas, clients, WARM_UP, sentences)
            figures = loaded(replicas, clients, seconds, sentences)
            rate = f"{replicas} replica(s), {clients} clients, {seconds:.0f} s: {figures.per_second:.0f} texts/s"
            print(f"{rate}, p50 {figures.p50:.1f} ms, p99 {figures.p99:.1f} ms, {figures.errors} errors", flush=True)
            rates.append(asdict(figures))
    finally:
        ray.shutdown()  # Serve ends with it
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(rates, indent=2) + "\n")
    sys.exit(1 if any(figures["errors"] for figures in rates) else 0)


if __name__ == "__main__":
    typer.run(main)
