"""Calls a compiled artifact, or a model in ONNX Runtime, so many times: what `arm_instructions.py` runs under QEMU.

python arm_calls.py artifact|onnxruntime PATH INPUTS.npz CALLS
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np


def opened(runtime: str, path: str, inputs: dict[str, np.ndarray]) -> Callable[[], object]:
    if runtime == "artifact":
        import mhsa_compile as mhsa

        attention = mhsa.load(path, threads=1)
        return lambda: attention(**inputs)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, inputs)


if __name__ == "__main__":
    runtime, path, inputs, calls = sys.argv[1:]
    call = opened(runtime, path, dict(np.load(inputs)))
    for _ in range(int(calls)):
        call()
