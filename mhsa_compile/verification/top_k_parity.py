"""Outputs that say what the rows of a softmax are like, among those that are held against the oracle.

Keys of top_k are right by their weights: where these are closer than their errors, others may come in their place.

Notation: B batch, L query length, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper

from mhsa_compile.nn import mhsa_operator
from mhsa_compile.spec.attention_spec import DOMAIN
from mhsa_compile.verification.oracle.evaluate import eager, oracle
from mhsa_compile.verification.precision import Precision
from mhsa_compile.verification.random_inputs import Arrays

_INPUT, _OUTPUT = 9, mhsa_operator.FIRST + len(mhsa_operator.NAMES)
"""The number of the input by which the oracle's operators take keys to be weighed, and of the output with their
weights."""
_WEIGHTS, _KEYS = (mhsa_operator.FIRST + mhsa_operator.NAMES.index(f"top_k_{name}") for name in ("weights", "keys"))


def key_outputs(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """The graph's outputs that hold keys of top_k, and the nodes they come from."""
    outputs = {value.name for value in model.graph.output}
    nodes = (node for node in model.graph.node if node.domain == DOMAIN and len(node.output) > _KEYS)
    return {node.output[_KEYS]: node for node in nodes if node.output[_KEYS] in outputs}


def by_weight(
    model: onnx.ModelProto,
    inputs: Arrays,
    results: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
    precision: Precision,
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(The oracle's, the yardstick's, the actual) of each output, with weights in place of keys."""
    names = [value.name for value in model.graph.output]
    keys = {name: results[names.index(name)][2] for name in key_outputs(model)}
    triples = weigh(model, inputs, keys, precision) if keys else {}
    return [triples.get(name, triple) for name, triple in zip(names, results, strict=True)]


def in_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with the largest weights in the places of its outputs that hold keys."""
    nodes = key_outputs(model)
    if not nodes:
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for output in copy.graph.output:
        if output.name in nodes:
            node = next(node for node in copy.graph.node if output.name in node.output)
            node.output[_WEIGHTS] = node.output[_WEIGHTS] or f"{output.name}.largest"
            output.name = node.output[_WEIGHTS]
            output.type.tensor_type.elem_type = TensorProto.FLOAT
    return copy


def weigh(
    model: onnx.ModelProto, inputs: Arrays, keys: Mapping[str, np.ndarray], precision: Precision
) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Returns three arrays for each output that holds keys: the oracle's largest weights, those of PyTorch, and the
    weights that the oracle gives `keys`.

    Each is (B, H, L, k). What cannot be right has the weight NaN: no key, a key twice in a row.
    """
    probing = onnx.ModelProto()
    probing.CopyFrom(model)
    del probing.graph.output[:]
    nodes = key_outputs(model)
    for name in nodes:
        node = next(node for node in probing.graph.node if name in node.output)
        probe, weights = f"{name}.probe", f"{name}.weights"
        node.input.extend([""] * (_INPUT + 1 - len(node.input)))
        node.input[_INPUT] = probe
        node.output.extend([""] * (_OUTPUT - len(node.output)) + [weights])
        probing.graph.input.append(helper.make_tensor_value_info(probe, TensorProto.INT64, [None] * 4))
        for output in (node.output[_WEIGHTS] or f"{name}.largest", weights):
            probing.graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, [None] * 4))
        node.output[_WEIGHTS] = node.output[_WEIGHTS] or f"{name}.largest"
    arrays = {**inputs, **{f"{name}.probe": keys[name] for name in nodes}}
    exact, yardstick = oracle(probing, arrays), eager(probing, arrays, precision)
    return {
        name: (exact[2 * i], yardstick[2 * i], np.where(repetitions(keys[name]), np.nan, exact[2 * i + 1]))
        for i, name in enumerate(nodes)
    }


def repetitions(keys: np.ndarray) -> np.ndarray:
    """Returns a mask of the places at which a row names a key again."""
    order = np.argsort(keys, axis=-1, kind="stable")
    ordered = np.take_along_axis(keys, order, axis=-1)
    again = np.zeros(keys.shape, np.bool_)
    again[..., 1:] = (np.diff(ordered, axis=-1) == 0) & (ordered[..., 1:] >= 0)
    result = np.empty_like(again)
    np.put_along_axis(result, order, again, axis=-1)
    return result
