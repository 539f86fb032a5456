"""Older opsets are raised to the first one that has Attention, so that one dialect is left to be read."""

from __future__ import annotations

import onnx
from onnx import numpy_helper, version_converter

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.onnx_graph import all_nodes, attributes, branches, is_standard, node_error, opset_of
from mhsa_compile.frontend.reading.contradictions import InferenceError, contradiction

LEAST = 23  # Attention, RotaryEmbedding, RMSNormalization
SOFTMAX_OF_ONE_AXIS = 13  # before, it runs over all axes from one on
BOUNDS_AS_INPUTS = 10  # before, those of a Slice are attributes, which the steps after this one do not read
_COORDINATES = 11  # from here on Resize says how it counts pixels
_SCALES_OF_CHANNELS = 21


def raised(model: onnx.ModelProto, least: int = LEAST) -> onnx.ModelProto:
    """The model at an opset of `least` or later, by onnx's own converter. Raises ModelError where it cannot."""
    now = opset_of(model)
    if now >= least:
        return model
    _refuse_what_changes(model, now, least)
    try:  # with shapes: only where it knows a Softmax of opset 11 to be one of the last axis, it leaves it one node
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
        converted = version_converter.convert_version(inferred, least)
        onnx.shape_inference.infer_shapes(converted, strict_mode=True)
    except InferenceError as error:
        raise contradiction(model, error) from error
    except Exception as error:  # the converter's own kinds, of C++
        hint = "Export the model again with a newer opset."
        got = f"opset {now}, which onnx cannot convert: {str(error).strip().splitlines()[0][:200]}"
        raise ModelError("model", f"opset {least}, or one that can be raised to it", got, hint) from error
    del converted.graph.value_info[:]
    for node in all_nodes(converted.graph):
        for branch in branches(node):
            del branch.value_info[:]
    if now < _COORDINATES <= least:
        _state_coordinates(converted)
    converted.ir_version = max(converted.ir_version, onnx.helper.find_min_ir_version_for(converted.opset_import, True))
    converted.metadata_props.extend(model.metadata_props)
    return converted


def _refuse_what_changes(model: onnx.ModelProto, now: int, least: int) -> None:
    """Refuses operators that onnx's converter takes over as they are, though they mean something else from an opset
    on. Raises ModelError."""
    hint = "Export the model again with a newer opset."
    for node in all_nodes(model.graph):
        if is_standard(node, "Hardmax") and now < SOFTMAX_OF_ONE_AXIS <= least:
            values = (*model.graph.input, *model.graph.value_info)
            ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in values}
            rank, axis = ranks.get(node.input[0], 0), attributes(node).get("axis", 1)
            if axis not in (-1, rank - 1):
                got = f"axis={axis} of opset {now}, which stands for all axes from there on"
                raise node_error(node, "a Hardmax of the last axis, or of opset 13", got, hint)
        nearest = is_standard(node, "Resize") and attributes(node).get("mode", "nearest") == "nearest"
        if nearest and now < _COORDINATES <= least:
            scales = next((t for t in model.graph.initializer if t.name == node.input[1]), None)
            if scales is None or (numpy_helper.to_array(scales) < 1).any():
                got = f"a Resize of opset {now}, which leaves open which of several pixels is the nearest"
                raise node_error(node, "constant scales of 1 or more, or an opset of 11 or later", got, hint)
        if is_standard(node, "GroupNormalization") and now < _SCALES_OF_CHANNELS <= least:
            expected = f"a GroupNormalization of opset {_SCALES_OF_CHANNELS}, whose scales are those of channels"
            raise node_error(node, expected, f"one of opset {now}, whose scales are those of groups", hint)


def _state_coordinates(model: onnx.ModelProto) -> None:
    """Says how Upsample and the first Resize counted pixels: from the corner, rounded down. The converter does not."""
    for node in all_nodes(model.graph):
        if is_standard(node, "Resize"):
            modes = [attribute for attribute in node.attribute if attribute.name == "mode"]
            del node.attribute[:]
            node.attribute.extend(modes)
            node.attribute.append(onnx.helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
            node.attribute.append(onnx.helper.make_attribute("nearest_mode", "floor"))
