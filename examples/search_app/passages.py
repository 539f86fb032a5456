"""A text as passages: paragraphs, or as many sentences of one as the model was trained to read at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

LONGEST = 96
"""Tokens of a passage. The model was trained on up to 128; a page shows fewer better."""
SHORTEST = 12
"""Tokens below which a paragraph, such as a heading, goes with the next one."""
Span = tuple[int, int]
Spans = Callable[[str], list[Span]]

_PARAGRAPH = re.compile(r"\n\s*\n")
_HEADING = re.compile(r"^#+\s+")
_SENTENCE = re.compile(r"(?<=[.!?\u2026])[\"'\u201d\u2019)\]]*\s+")


def passages(text: str, spans: Spans) -> list[str]:
    """The passages of a text, in order; no word is lost. `spans` says where each token of a text begins and ends."""
    parts: list[str] = []
    before = ""
    for paragraph in (" ".join(part.split()) for part in _PARAGRAPH.split(text)):
        joined = _after(before, _HEADING.sub("", paragraph))
        short = len(spans(joined)) < SHORTEST
        before = joined if short else ""
        parts.extend([] if short else _packed(joined, spans))
    return parts + ([before] if spans(before) else [])


def _after(heading: str, paragraph: str) -> str:
    """A short paragraph and the next one, as one line."""
    mark = ":" if paragraph and heading[-1:].isalnum() else ""
    return f"{heading}{mark} {paragraph}".strip()


def _packed(paragraph: str, spans: Spans) -> Iterator[str]:
    """Sentences one after the other, as many as fit."""
    held, tokens = "", 0
    for sentence in _sentences(paragraph):
        for piece in _cut(sentence, spans):
            size = len(spans(piece))
            if held and tokens + size > LONGEST:
                yield held
                held, tokens = "", 0
            held, tokens = f"{held} {piece}".strip(), tokens + size
    if held:
        yield held


def _sentences(paragraph: str) -> Iterator[str]:
    begin = 0
    for end in _SENTENCE.finditer(paragraph):
        yield paragraph[begin : end.end()].strip()
        begin = end.end()
    yield paragraph[begin:].strip()


def _cut(sentence: str, spans: Spans) -> Iterator[str]:
    """A sentence too long for a passage, between words; between tokens where it is one long word."""
    while len(tokens := spans(sentence)) > LONGEST:
        starts = [begin for begin, _ in tokens[1 : LONGEST + 1]]
        at = next((begin for begin in reversed(starts) if sentence[begin - 1].isspace()), starts[-1])
        yield sentence[:at].strip()
        sentence = sentence[at:]
    if sentence:
        yield sentence
