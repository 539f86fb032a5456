"""Older opsets are raised to the first one that has Attention, so that one dialect is left to be read."""

from __future__ import annotations

import onnx
from onnx import version_converter

from mhsa_compile.errors import ModelError

LEAST = 23  # Attention, RotaryEmbedding, RMSNormalization
SOFTMAX_OF_ONE_AXIS = 13  # before, it runs over all axes from one on


def raised(model: onnx.ModelProto, least: int = LEAST) -> onnx.ModelProto:
    """The model at an opset of `least` or later, by onnx's own converter. Raises ModelError where it cannot."""
    now = opset_of(model)
    if now >= least:
        return model
    try:  # with shapes: only where it knows a Softmax of opset 11 to be one of the last axis, it leaves it one node
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
        converted = version_converter.convert_version(inferred, least)
        onnx.shape_inference.infer_shapes(converted, strict_mode=True)
    except Exception as error:  # the converter's own kinds, of C++
        hint = "Export the model again with a newer opset."
        got = f"opset {now}, which onnx cannot convert: {str(error).strip().splitlines()[0][:200]}"
        raise ModelError("model", f"opset {least}, or one that can be raised to it", got, hint) from error
    del converted.graph.value_info[:]
    converted.ir_version = max(converted.ir_version, onnx.helper.find_min_ir_version_for(converted.opset_import, True))
    converted.metadata_props.extend(model.metadata_props)
    return converted


def opset_of(model: onnx.ModelProto) -> int:
    """The version of the standard operators."""
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
