"""Caches that a call may write where they lie: the entry of the model's metadata that says so, found in the graph.

ONNX has no word for it. A cache is one if an operator takes it from an input, writes into it, and gives it out under
the length that it had: a TensorScatter, or a GroupQueryAttention whose past and present share a buffer.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator

import onnx
from onnx import helper

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.onnx_graph import dims_of_type, is_standard, metadata_of, reads
from mhsa_compile.frontend.reading.microsoft import DOMAIN
from mhsa_compile.spec.attention_spec import IN_PLACE_KEY


def with_caches_in_place(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model whose metadata says of each of its caches that a call writes into it. Raises ModelError where
    it has none that a call could."""
    values = (*model.graph.input, *model.graph.output)
    shapes = {value.name: dims_of_type(value.type.tensor_type) for value in values}
    inputs, outputs = ({value.name for value in values} for values in (model.graph.input, model.graph.output))
    readers = Counter(name for node in model.graph.node for name in reads(node))
    pairs = {
        past: present
        for past, present in _caches(model)
        if past in inputs - outputs and present in outputs and readers[past] == 1 and shapes[past] == shapes[present]
    }
    if not pairs:
        expected = "a cache that a call can write into: an input that nobody else reads, and an output of its shape"
        hint = "Give past and present one length in the file: one name, or one number."
        raise ModelError("in_place", expected, "a model without one", hint)
    result = copy.deepcopy(model)
    helper.set_model_props(result, metadata_of(model) | {IN_PLACE_KEY: json.dumps(pairs)})
    return result


def _caches(model: onnx.ModelProto) -> Iterator[tuple[str, str]]:
    """(what an operator takes as a cache, what it gives out as that)"""
    for node in model.graph.node:
        if is_standard(node, "TensorScatter"):
            yield node.input[0], node.output[0]
        elif node.op_type == "GroupQueryAttention" and node.domain == DOMAIN and len(node.input) > 4:
            yield from zip(node.input[3:5], node.output[1:3], strict=False)
