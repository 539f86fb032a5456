"""The tensors of a safetensors file that is in memory already. `safetensors.numpy.load` knows no bfloat16."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from mhsa_compile.files.unique_json import require_unique_tensors

_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def parsed(data: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors by name, each in memory of its own. Raises SafetensorError and ValueError."""
    require_unique_tensors(data)
    found = {}
    for name, tensor in safetensors.deserialize(data):  # type: ignore[no-untyped-call]
        if tensor["dtype"] not in _DTYPES:
            raise safetensors.SafetensorError(f"{name!r} is of {tensor['dtype']}, which no weight is")
        found[name] = np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    return found
