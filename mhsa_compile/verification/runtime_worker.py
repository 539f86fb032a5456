"""A program: ONNX Runtime on one model, for `runtime_process`. It imports nothing of this library, so as to start soon.

Frames on stdin and stdout, each behind its length in eight bytes. In: the model, its bytes or its path, beside the
names of its outputs and inputs as JSON; then the inputs of each call as an .npz, in that order. Out: a letter and the
outputs of each call as an .npz, or a letter and why there are none.
"""

from __future__ import annotations

import io
import json
import os
import struct
import sys
from typing import IO, Any

LENGTH = struct.Struct("<Q")
RESULT, REFUSAL = b"r", b"e"


def send(file: IO[bytes], *parts: bytes | memoryview) -> None:
    """Writes a frame. Raises OSError where nobody reads."""
    file.write(LENGTH.pack(sum(len(part) for part in parts)))
    for part in parts:
        file.write(part)
    file.flush()


def receive(file: IO[bytes]) -> bytes:
    """Reads a frame. Raises EOFError where the other side has ended."""
    header = file.read(LENGTH.size)
    size = LENGTH.unpack(header)[0] if len(header) == LENGTH.size else 0
    frame = file.read(size)
    if len(header) < LENGTH.size or len(frame) < size:
        raise EOFError
    return frame


def packed(arrays: Any) -> memoryview:
    """Arrays as an .npz, in order."""
    import numpy as np

    file = io.BytesIO()
    np.savez(file, *arrays)
    return file.getbuffer()


def unpacked(frame: bytes | memoryview) -> list[Any]:
    """The arrays of an .npz, in order."""
    import numpy as np

    with np.load(io.BytesIO(frame), allow_pickle=False) as archive:
        return [archive[f"arr_{i}"] for i in range(len(archive.files))]


def main() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no frame
    session: Any = None
    try:
        names = json.loads(receive(requests))
        model = receive(requests)
        while True:
            arrays = receive(requests)
            try:
                if session is None:
                    session = _session(names["path"] or model)
                results = session.run(names["outputs"], dict(zip(names["inputs"], unpacked(arrays), strict=True)))
                send(answers, RESULT, packed(results))
            except Exception as error:  # whatever it trips over
                send(answers, REFUSAL, (str(error) or type(error).__name__).encode(errors="replace"))
    except (EOFError, OSError, KeyboardInterrupt):
        return


def _session(model: str | bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # the same sums in the same order each time
    options.log_severity_level = 4  # what fails is raised, too
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


if __name__ == "__main__":
    main()
