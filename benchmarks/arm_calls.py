"""Calls a compiled artifact, or a model in another runtime, so many times: what `arm_instructions.py` runs under QEMU.

python arm_calls.py artifact|onnxruntime|litert PATH INPUTS.npz CALLS
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np


def artifact(path: str, inputs: dict[str, np.ndarray]) -> Callable[[], object]:
    import mhsa_compile as mhsa

    attention = mhsa.load(path, threads=1)
    return lambda: attention(**inputs)


def onnxruntime(path: str, inputs: dict[str, np.ndarray]) -> Callable[[], object]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, inputs)


def litert(path: str, inputs: dict[str, np.ndarray]) -> Callable[[], object]:
    """A call of a .tflite file in LiteRT. XNNPACK computes all of it, or this fails."""
    from ai_edge_litert.interpreter import Interpreter

    model = Interpreter(path, num_threads=1)
    model.allocate_tensors()
    assert model._get_ops_details()[-1]["op_name"] == "DELEGATE"
    for entry in model.get_input_details():
        model.set_tensor(entry["index"], inputs[entry["name"]])
    return model.invoke


RUNTIMES = {"artifact": artifact, "onnxruntime": onnxruntime, "litert": litert}

if __name__ == "__main__":
    runtime, path, inputs, calls = sys.argv[1:]
    call = RUNTIMES[runtime](path, dict(np.load(inputs)))
    for _ in range(int(calls)):
        call()
