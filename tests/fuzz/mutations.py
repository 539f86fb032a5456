"""Damage to files, drawn from a generator: what disks, networks, other tools and other people do to them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    63,
    255,
    2**31 - 1,
    2**31,
    2**34,
    2**57,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    -(2**63),
    0.5,
    1e308,
)
TEXTS = (
    *("", "x", "y", "w", "B", "L", "a+b", "c/d", "L//0", "-1", "cache", "self", "../x", "/dev/zero", "a\0b"),
    *("\x1b[31m", "\u202e", "float32", "bfloat16", "float64", "int4", "cpu", "cuda", "nan", "é" * 40, "x" * 5000),
)
TOKENS = (
    *(b"\0", b"\xff", b"{", b"[" * 100_000, b'"', b"'", b"NaN", b"1e999", b"-1", b"9" * 400, b"\n", b"\\u0000"),
    *(b"null", b"true", b"{}", b"[]", b"\xc3\x28", b"descr", b"fortran_order", b"(", b"," * 64, b"0x7fffffffffffffff"),
)


def of_bytes(draw: random.Random, data: bytes) -> bytes:
    """Some bytes flipped, cut off, doubled, moved, or replaced by words that formats give a meaning to."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        at = draw.randrange(len(found) + 1)
        near_the_front = min(at, draw.randrange(256))  # headers lie there
        at = draw.choice((at, near_the_front))
        size = draw.choice((1, 1, 2, 4, 8, 64))
        match draw.randrange(7):
            case 0 if at < len(found):
                found[at] ^= 1 << draw.randrange(8)
            case 1:
                found[at : at + size] = draw.randbytes(size)
            case 2:
                del found[at : at + size]
            case 3:
                del found[at:]
            case 4:
                found[at:at] = found[at : at + size] * draw.choice((1, 3))
            case 5:
                found[at:at] = draw.choice(TOKENS)
            case _:
                found[at : at + 8] = draw.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)).to_bytes(8, "little")
    return bytes(found)


def of_values(draw: random.Random, value: Any) -> Any:
    """One to three places of a tree of JSON's values changed: another value or type there, more, fewer, deeper ones."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        value = _changed(draw, value)
    return value


def _changed(draw: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and draw.random() < 0.92:
        changed = dict(value)
        key = draw.choice(list(changed))
        match draw.randrange(12):
            case 0:
                del changed[key]
            case 1:
                changed[draw.choice(TEXTS)] = changed.pop(key)
            case 2:
                changed[draw.choice(TEXTS)] = _any(draw)
            case _:
                changed[key] = _changed(draw, changed[key])
        return changed
    if isinstance(value, list) and value and draw.random() < 0.92:
        changed = list(value)
        at = draw.randrange(len(changed))
        match draw.randrange(12):
            case 0:
                del changed[at]
            case 1:
                changed.insert(at, changed[at])
            case 2:
                changed.insert(at, _any(draw))
            case 3:
                draw.shuffle(changed)
            case _:
                changed[at] = _changed(draw, changed[at])
        return changed
    return _any(draw)


def _any(draw: random.Random) -> Any:
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: draw.choice(NUMBERS),
        lambda: draw.choice(NUMBERS),
        lambda: draw.choice(TEXTS),
        lambda: draw.choice(TEXTS),
        lambda: draw.choice((None, True, False)),
        lambda: [draw.choice(NUMBERS) for _ in range(draw.randrange(4))],
        lambda: {draw.choice(TEXTS): draw.choice(NUMBERS)},
        lambda: _deep(draw.choice((3, 900))),
    )
    return draw.choice(kinds)()


def _deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def of_message(draw: random.Random, message: Any) -> None:
    """One to four fields of a protobuf message changed in place, at any depth."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        _change_message(draw, message)


def _change_message(draw: random.Random, message: Any) -> None:
    present = [field for field, _ in message.ListFields()]
    fields = present if present and draw.random() < 0.9 else list(message.DESCRIPTOR.fields)
    field = draw.choice(fields)
    held = getattr(message, field.name)
    is_many = field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED
    if is_many:
        _change_repeated(draw, field, held)
    elif field.message_type is not None:
        if draw.random() < 0.9:
            _change_message(draw, held)
        else:
            message.ClearField(field.name)
    elif draw.random() < 0.1:
        message.ClearField(field.name)
    else:
        _set(draw, field, lambda value: setattr(message, field.name, value), held)


def _change_repeated(draw: random.Random, field: Any, held: Any) -> None:
    at = draw.randrange(len(held)) if held else 0
    if field.message_type is not None:
        if not held:
            held.add()
        elif draw.random() < 0.75:
            _change_message(draw, held[at])
        elif draw.random() < 0.5:
            held.add().CopyFrom(held[at])
        else:
            del held[at]
    elif held and draw.random() < 0.2:
        del held[at]
    elif held and draw.random() < 0.8:
        _set(draw, field, lambda value: held.__setitem__(at, value), held[at])
    else:
        _set(draw, field, held.append, held[at] if held else None)


def _set(draw: random.Random, field: Any, put: Callable[[Any], None], old: Any) -> None:
    """A value of the field's type: one that is hard, or the old one damaged."""
    if isinstance(old, bytes) or field.type == field.TYPE_BYTES:
        put(of_bytes(draw, old or b"x")[: 1 << 16])
        return
    choices = [*NUMBERS, *(text for text in TEXTS), *range(-2, 30)]
    for value in draw.sample(choices, len(choices)):
        try:
            put(value)
        except (TypeError, ValueError):
            continue  # not of this type, or beyond its range
        return
