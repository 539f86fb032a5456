"""The model that an artifact stores, from the bytes that were checked.

Its initializers point into weights.safetensors as ONNX external data; onnx itself would read that file by its name,
once more.
"""

from __future__ import annotations

import onnx
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from mhsa_compile.errors import ArtifactError
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.artifact.manifest import MODEL, WEIGHTS


def stored_model(artifact: Artifact) -> onnx.ModelProto:
    """Returns the ONNX model of an artifact, its weights inside. Raises ArtifactError."""
    files = artifact.contents(MODEL, WEIGHTS)
    model = onnx.load_model_from_string(files[MODEL])
    for tensor in filter(uses_external_data, model.graph.initializer):
        place = ExternalDataInfo(tensor)
        begin, size = place.offset or 0, place.length or 0
        if place.location != WEIGHTS or begin + size > len(files[WEIGHTS]):
            argument = f"artifact file {str(artifact.path / MODEL)!r}"
            raise ArtifactError(argument, f"weights inside of {WEIGHTS}", f"{tensor.name!r} in {place.location!r}")
        tensor.raw_data = files[WEIGHTS][begin : begin + size]
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]
    return model
