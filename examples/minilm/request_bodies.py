"""Bodies of HTTP requests, of which no more is read than allowed, and for no longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator


class BodyRefused(Exception):
    """A body that is too large, or that does not come: an HTTP status, and why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


async def body_within(stream: AsyncIterator[bytes], most: int, seconds: float) -> bytes:
    """The whole body, at most `most` bytes, if it comes within `seconds`. Raises BodyRefused."""
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in stream:
                body += chunk
                if len(body) > most:
                    raise BodyRefused(413, f"is larger than {most:,} bytes")
    except TimeoutError:
        raise BodyRefused(408, f"did not come within {seconds:g} seconds") from None
    return bytes(body)


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8: JSON allows half of a surrogate pair, which is no character."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
