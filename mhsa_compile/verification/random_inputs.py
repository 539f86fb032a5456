"""Inputs for a model or an artifact, drawn from a seed, and the sizes at which they are drawn by default.

Notation: B batch, L query length, S key length, H heads, C capacity of a cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.runtime.artifact.manifest import Manifest
from mhsa_compile.runtime.symbolic_dims import is_expression, size_of
from mhsa_compile.spec.attention_spec import DOMAIN, LIMITS_KEY, ROWS_KEY, SPEC_KEY, AttentionSpec

Arrays = Mapping[str, np.ndarray]
"""Arrays by the names of inputs."""

if TYPE_CHECKING:  # what an artifact is called with is drawn where no compiler is installed, too
    import onnx


LENGTHS = ((1, 7), (7, 197), (197, 64), (64, 1))
"""(L, S) of the default cases: one, primes, a multiple of every tile, and L on both sides of S."""


def default_cases(model: onnx.ModelProto) -> list[dict[str, int]]:
    """Sizes for every symbolic dim; the axes of a broadcast mask are 1 in every other case."""
    dims_of_inputs = (dim for _, _, dims in _signature(model) for dim in dims if isinstance(dim, str))
    symbols = dict.fromkeys(symbol for symbol in dims_of_inputs if not is_expression(symbol))
    lengths = [symbol for symbol in symbols if symbol not in ("B", "C") and not symbol.startswith("mask_")]
    text = {prop.key: prop.value for prop in model.metadata_props}.get(SPEC_KEY)
    spec = AttentionSpec.from_json(text) if text else None
    heads = spec.num_heads if spec else 1
    longest, most = _longest(model, spec), largest_sizes(model)
    new = positions_of_a_call(model)
    cases = []
    for i, (L, S) in enumerate(LENGTHS):
        full = {"B": 3 if i % 2 else 1, "H": heads}
        full |= {symbol: min(longest, L if j == 0 else S) for j, symbol in enumerate(lengths)}
        full["C"] = min(longest, (new if isinstance(new, int) else full.get(new, L)) + S)
        narrow = i % 2 == 0
        full |= {"mask_B": 1 if narrow else full["B"], "mask_H": 1 if narrow else heads}
        case = {symbol: min(full[symbol], most.get(symbol, full[symbol])) for symbol in symbols if symbol in full}
        cases += [case] if case not in cases else []
    return cases


def positions_of_a_call(model: onnx.ModelProto) -> int | str:
    """How many new positions a call of a module of this library's brings, or the symbol of that."""
    return next((dims[1] for name, _, dims in _signature(model) if name == "x" and len(dims) > 1), "L")


def _longest(model: onnx.ModelProto, spec: AttentionSpec | None) -> int:
    """Positions that fit the tables of a spec's rope, and the cache where its capacity is fixed."""
    capacity = next((dims[2] for name, _, dims in _signature(model) if name == "past_key" and len(dims) == 4), "C")
    limits = [capacity] if isinstance(capacity, int) else []
    limits += [spec.rope.max_length] if spec is not None and spec.rope is not None else []
    if spec is not None:
        limits += [most for symbol, most in largest_sizes(model).items() if symbol in ("L", "S")]
    return min(limits, default=max(map(sum, LENGTHS)))


def largest_sizes(source: Any) -> dict[str, int]:
    """The largest sizes of symbols."""
    return dict(source.limits) if isinstance(source, Manifest) else _stated_sizes(source, LIMITS_KEY)


def table_rows(source: Any) -> dict[str, int]:
    """How many rows the tables have that inputs of ids pick from."""
    if isinstance(source, Manifest):
        return {info.name: info.rows for info in source.inputs if info.rows is not None}
    return _stated_sizes(source, ROWS_KEY)


def _stated_sizes(model: onnx.ModelProto, key: str) -> dict[str, int]:
    text = {prop.key: prop.value for prop in getattr(model, "metadata_props", ())}.get(key)
    with reading(ModelError, f"metadata {key!r}", "a JSON object of sizes"):
        return msgspec.json.decode(text, type=dict[str, int]) if text else {}


def random_inputs(source: Any, dims: Mapping[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs for an onnx.ModelProto or a Manifest at the given sizes of its symbolic dims.

    Floats are standard normal. Boolean masks are True in 80 % of the places, additive masks -inf in 10 %, and every
    seventh row, from the fourth on, is masked whole. Sizes of a mask's own axes default to what they broadcast to,
    heads to 1. A cache has room for the call behind its `length`; there are as many keys at most as the
    keys' axis has. Raises InputError where a dim has no size.
    """
    rng = np.random.default_rng(seed)
    length = dims.get("L", 1)
    all_sizes = {"mask_B": dims.get("B", 1), "mask_H": 1, "mask_L": length, "mask_S": dims.get("S", length), **dims}
    inputs: dict[str, np.ndarray] = {}
    below, signature, keys = table_rows(source), list(_signature(source)), _numbers_of_keys(source)
    shapes = {name: [size_of(dim, all_sizes) for dim in shape] for name, _, shape in signature}
    most = {name: size_of(dim, all_sizes) or 0 for name, dim in keys.items()}
    for name, dtype, shape in signature:
        sizes = [size for size in shapes[name] if size is not None]
        if len(sizes) < len(shape):
            unknown = shape[shapes[name].index(None)]
            raise InputError("dims", f"a size for {unknown!r}, an axis of {name!r}", str(dict(dims)))
        inputs[name] = random_array(rng, name, dtype, sizes, below.get(name))
    for name, size in most.items():
        inputs[name] = np.asarray(rng.integers(0, 1 + size, inputs[name].shape))
    if {"x", "past_key", "length"} <= inputs.keys():
        room = inputs["past_key"].shape[2] - inputs["x"].shape[1]
        if room < 0:
            new, capacity = inputs["x"].shape[1], inputs["past_key"].shape[2]
            raise InputError("dims", f"a cache (C) of at least the {new} positions of a call", str(capacity))
        inputs["length"] = rng.integers(0, room + 1, inputs["length"].shape)
    return inputs


def drawn_elements(source: Any, dims: Mapping[str, int]) -> int:
    """How many numbers `random_inputs` would draw at these sizes; axes without a size count as 1."""
    return sum(math.prod(size_of(dim, dims) or 1 for dim in shape) for _, _, shape in _signature(source))


def whole_masks(manifest: Manifest, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes that a mask made elsewhere has for itself, all of them full."""
    own: dict[str, int] = {}
    for info in manifest.inputs:
        for dim, whole in zip(info.dims, info.broadcast or info.dims, strict=True):
            size = size_of(whole, sizes)
            if isinstance(dim, str) and dim != whole and not dim.startswith("mask_") and size is not None:
                own[dim] = size
    return own


def _numbers_of_keys(source: Any) -> dict[str, int | str]:
    """Returns the dim of the keys for each input that an Attention takes as nonpad_kv_seqlen."""
    if isinstance(source, Manifest):
        return {info.name: info.most for info in source.inputs if info.most is not None}
    shapes = {name: dims for name, _, dims in _signature(source)}
    nodes = [node for node in source.graph.node if node.op_type == "Attention" and len(node.input) > 6]
    nodes = [node for node in nodes if node.domain in ("", "ai.onnx", DOMAIN)]  # Microsoft's has another input there
    return {
        node.input[6]: shapes[node.input[1]][-2] for node in nodes if {node.input[1], node.input[6]} <= shapes.keys()
    }


def random_array(
    rng: np.random.Generator, name: str, dtype: str, sizes: Sequence[int], below: int | None = None
) -> np.ndarray:
    """A random array for one input; `below` is how many rows there are to pick from, for an input of indices.

    An input of rank 0 is a switch, a scale or a count.
    """
    if np.dtype(dtype).kind in "iu" and "mask" in name:
        return np.asarray(rng.random(sizes) < 0.8).astype(dtype)
    if dtype == "int8" and name in ("past_key", "past_value"):  # of a cache
        return np.asarray(rng.integers(-127, 128, sizes)).astype(dtype)
    if name in ("past_key_scale", "past_value_scale"):
        return np.asarray(rng.uniform(0.5, 4, sizes) / 127).astype(dtype)
    if np.dtype(dtype).kind in "iu":
        low, high = (1, 1 + min(sizes, default=1)) if below is None else (0, below)
        return np.asarray(rng.integers(low, high, sizes)).astype(dtype)
    if dtype == "bool":
        array = np.asarray(rng.random(sizes) < 0.8)
    else:
        array = np.asarray(rng.standard_normal(sizes)).astype("f4").astype(dtype)
    if "mask" not in name or not sizes:
        return array
    if dtype != "bool":
        array[rng.random(sizes) < 0.1] = -np.inf
    array.reshape(-1, sizes[-1])[3::7] = False if dtype == "bool" else -np.inf
    return array


def _signature(source: Any) -> Iterator[tuple[str, str, tuple[int | str, ...]]]:
    """(name, dtype, dims) of the inputs of an onnx.ModelProto or a Manifest."""
    if isinstance(source, Manifest):
        yield from ((info.name, info.dtype, tuple(info.dims)) for info in source.inputs)
        return
    import onnx

    constants = {initializer.name for initializer in source.graph.initializer}
    for value in source.graph.input:
        if value.name not in constants:
            tensor = value.type.tensor_type
            dims = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
            yield value.name, str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)), dims
