"""The deployment: each replica loads the artifact from disk and embeds batches of whoever asks at the time."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
from minilm.encoder import SentenceEncoder, compiled_folder
from minilm.ragged import of_about_one_length
from minilm.request_bodies import BodyRefused, body_within, is_text
from ray import serve
from ray.serve import Application
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

LONGEST_TEXT = 2_000
"""The most characters of a text."""
LARGEST_BODY, SLOWEST_BODY = 65_536, 10.0
"""The most bytes of a request, each of whose characters may be an escape of twelve, and the most seconds it takes."""
MOST_TOKENS = 512


@serve.deployment(max_ongoing_requests=64)
class Embedder:
    """POST {"text": "..."} -> {"vector": [...]}, of length 1; {"message": "..."} for what is no text."""

    def __init__(self, model: str, threads: int) -> None:
        self._encoder = SentenceEncoder(Path(model), threads)

    async def __call__(self, request: Request) -> JSONResponse:
        try:
            text = json.loads(await body_within(request.stream(), LARGEST_BODY, SLOWEST_BODY))["text"].strip()
        except (BodyRefused, ClientDisconnect) as refusal:
            if isinstance(refusal, ClientDisconnect):
                return _refused("The request did not come whole.")
            return _refused(f"The request {refusal.reason}.", refusal.status)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return _refused('Send {"text": "..."} as JSON.')
        if not is_text(text):
            return _refused("A text consists of characters; this one has half of one.")
        if not text or len(text) > LONGEST_TEXT:
            return _refused(f"A text has 1 to {LONGEST_TEXT:,} characters; this one has {len(text):,}.")
        row = self._encoder.row(text)
        if len(row) > MOST_TOKENS:
            return _refused(f"A text has at most {MOST_TOKENS} tokens; this one has {len(row)}.")
        return JSONResponse({"vector": (await self._embed(row)).tolist()})

    @serve.batch(max_batch_size=16, batch_wait_timeout_s=0.002)
    async def _embed(self, rows: list[list[int]]) -> list[np.ndarray]:
        """The rows of several requests, in a thread: the next requests are read meanwhile."""
        return await asyncio.to_thread(self._vectors, rows)

    def _vectors(self, rows: list[list[int]]) -> list[np.ndarray]:
        vectors: list[Any] = [None] * len(rows)
        for places in of_about_one_length([len(row) for row in rows]):
            for i, vector in zip(places, self._encoder.of_rows([rows[i] for i in places]), strict=True):
                vectors[i] = vector
        return vectors


def _refused(message: str, status: int = 400) -> JSONResponse:
    return JSONResponse({"message": message}, status)


def app(arguments: dict[str, Any]) -> Application:
    """What `serve run serve_ray.deployment:app` and config.yaml name. Arguments, all optional:

    model      the compiled model's folder, on every machine of the cluster; made here where it is not there
    replicas   how many
    threads    of each replica's calls, and the CPUs that Ray sets aside for it
    """
    model = compiled_folder(Path(arguments.get("model", "build/minilm"))).resolve()
    replicas, threads = int(arguments.get("replicas", 1)), int(arguments.get("threads", 1))
    options = Embedder.options(num_replicas=replicas, ray_actor_options={"num_cpus": threads})
    return options.bind(str(model), threads)
