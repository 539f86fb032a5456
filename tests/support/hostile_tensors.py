"""Files that say they are safetensors: what is wrong with each is its name. `SOUND` is what they were made from."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

DATA = bytes(range(1, 25))  # of x, (2, 1, 2) float32, and of y, (2, 1) float32
ENTRIES: dict[str, Any] = {
    "x": {"dtype": "F32", "shape": [2, 1, 2], "data_offsets": [0, 16]},
    "y": {"dtype": "F32", "shape": [2, 1], "data_offsets": [16, 24]},
}
HUGE = (2**31, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 16, 2**64, 2**100, 10**30)


def file(header: str | bytes, data: bytes = DATA, length: int | None = None) -> bytes:
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


SOUND = file(json.dumps(ENTRIES))


def _changed(change: Callable[[dict[str, Any]], object], data: bytes = DATA) -> bytes:
    entries = json.loads(json.dumps(ENTRIES))
    change(entries)
    return file(json.dumps(entries), data)


def _hostile() -> dict[str, bytes]:
    text = json.dumps(ENTRIES)
    files = {
        f"cut at {size}": SOUND[:size] for size in (0, 1, 7, 8, 9, 40, len(SOUND) - 25, len(SOUND) - 24, len(SOUND) - 1)
    }
    files["a byte too many"] = SOUND + b"\0"
    for length in (
        0,
        1,
        len(text) - 1,
        len(text) + 1,
        len(text) + 24,
        len(text) + 25,
        2**31,
        2**63 - 1,
        2**63,
        2**64 - 1,
    ):
        files[f"a header of {length}"] = file(text, length=length)
    for place in ("shape", "data_offsets"):
        for value in (*HUGE, -1, -(2**63), -(2**64), 1.5, 1e300, "2", None, True, [], {}):
            for index in range(2):
                files[f"{place}[{index}] of {value!r}"] = _changed(
                    lambda e, p=place, i=index, v=value: e["x"][p].__setitem__(i, v)
                )
    for offsets in (
        [8, 24],
        [0, 24],
        [4, 20],
        [16, 0],
        [0, 0],
        [16, 32],
        [-16, 0],
        [0],
        [0, 16, 16],
        "0:16",
        {"0": 16},
    ):
        files[f"x at {offsets}"] = _changed(lambda e, o=offsets: e["x"].update(data_offsets=o))
    files["both at one place"] = _changed(lambda e: e["y"].update(data_offsets=[0, 8]))
    files["a gap"] = _changed(lambda e: e["y"].update(data_offsets=[20, 28]), DATA + bytes(4))
    files["a gap in front"] = _changed(
        lambda e: [e["x"].update(data_offsets=[4, 20]), e["y"].update(data_offsets=[20, 28])], DATA + bytes(4)
    )
    files["sizes whose product wraps"] = _changed(lambda e: e["x"].update(shape=[2**62, 4, 1], data_offsets=[0, 0]))
    files["sizes whose product wraps to the right one"] = _changed(lambda e: e["x"].update(shape=[2**63 + 2, 2, 1]))
    files["a size of 0 beside a huge one"] = _changed(lambda e: e["x"].update(shape=[0, 2**70]))
    files["a thousand axes"] = _changed(lambda e: e["x"].update(shape=[1] * 1000 + [4]))
    for dtype in ("F7", "F32x4", "../../x", "f32", "float32", "", "F32\0", None, 3, ["F32"]):
        files[f"dtype {dtype!r}"] = _changed(lambda e, d=dtype: e["x"].update(dtype=d))
    files["a dtype of another width"] = _changed(lambda e: e["x"].update(dtype="F64"))
    files["truths of 2"] = _changed(lambda e: e["x"].update(dtype="BOOL", shape=[16]))
    for member in ("dtype", "shape", "data_offsets"):
        files[f"no {member}"] = _changed(lambda e, m=member: e["x"].pop(m))
    for entry in (None, [], "F32", 4, {}):
        files[f"an entry of {entry!r}"] = _changed(lambda e, v=entry: e.update(x=v))
    x, y = json.dumps(ENTRIES["x"]), json.dumps(ENTRIES["y"])
    for twice in (f'{{"x":{x},"x":{x},"y":{y}}}', f'{{"x":{x},"\\u0078":{y}}}', f'{{"x":{x},"y":{y},"y":{y}}}'):
        files[f"two of one name, {twice[:30]}"] = file(twice)
    files["two dtypes"] = file(text.replace('"F32"', '"F64","dtype":"F32"', 1))
    files["brackets"] = file("[" * 100_000)
    files["deep brackets"] = file('{"x":' * 5000 + "1" + "}" * 5000)
    for header in ("", "[]", "null", "x", '{"x"', "{}", '{"x":}', "{'x':1}", text + text, text[1:], "\ufeff" + text):
        files[f"header {header[:8]!r} of {len(header)}"] = file(header)
    files["no UTF-8"] = file(text.encode().replace(b'"x"', b'"\xff"'))
    return files


HOSTILE = _hostile()
