"""ONNX models of one Attention node, as another tool might write them, with inputs to call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

KINDS = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
H, G, E, F = 6, 2, 7, 5
Dims = Sequence[int | str]


def model(
    attributes: Mapping[str, Any] | None = None,
    *,
    dtype: str = "float32",
    axes: int = 4,
    L: int | str = 5,
    S: int | str = "S",
    mask: tuple[str, Dims] | None = None,
    past: int | str | None = None,
    lengths: bool = False,
    outputs: Sequence[str] = ("y",),
    opset: int = 25,
) -> onnx.ModelProto:
    """q (B, H, L, E), k (B, G, S, E), v (B, G, S, F), or their heads side by side; `mask` is a dtype and dims.

    A few queries, a number known beforehand, compile four times as fast as any number of them.
    """

    def dims(heads: int, length: int | str, size: int) -> Dims:
        return ["B", heads, length, size] if axes == 4 else ["B", length, heads * size]

    kind = KINDS[dtype]
    inputs: dict[str, tuple[int, Dims]] = {
        "q": (kind, dims(H, L, E)),
        "k": (kind, dims(G, S, E)),
        "v": (kind, dims(G, S, F)),
    }
    if mask is not None:
        inputs["mask"] = (TensorProto.BOOL if mask[0] == "bool" else KINDS[mask[0]], mask[1])
    if past is not None:
        inputs |= {"past_key": (kind, ["B", G, past, E]), "past_value": (kind, ["B", G, past, F])}
    if lengths:
        inputs["lengths"] = (TensorProto.INT64, ["B"])
    roles = ("q", "k", "v", "mask", "past_key", "past_value", "lengths")
    names = [role if role in inputs else "" for role in roles]
    while not names[-1]:  # opset 23 has no place for the last
        names.pop()
    words = {**(attributes or {}), **({} if axes == 4 else {"q_num_heads": H, "kv_num_heads": G})}
    node = helper.make_node("Attention", names, list(outputs), name="attention", **words)
    values = [helper.make_tensor_value_info(name, *what) for name, what in inputs.items()]
    results = [helper.make_tensor_value_info(name, kind, None) for name in outputs if name]
    graph = helper.make_graph([node], "graph", values, results)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)


def draw(source: onnx.ModelProto, sizes: Mapping[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Normal floats; masks that hide a quarter and every fifth row whole; lengths from none of the keys to all."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for value in source.graph.input:
        tensor = value.type.tensor_type
        shape = [sizes[dim.dim_param] if dim.dim_param else dim.dim_value for dim in tensor.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if value.name == "lengths":
            arrays[value.name] = np.linspace(0, sizes["S"], shape[0]).astype(np.int64)
            continue
        array = rng.standard_normal(shape).astype(np.float32).astype(dtype)
        if value.name == "mask":
            visible = rng.random(shape) < 0.75
            visible.reshape(-1, shape[-1])[4::5] = False
            array = visible if dtype == np.bool_ else np.where(visible, array, np.array(-np.inf, dtype))
        arrays[value.name] = array
    return arrays
