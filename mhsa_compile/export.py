"""nn.Module -> ONNX whose attention is the standard operator, checked: what was to be symbolic is symbolic.

The graph keeps PyTorch's parameter names and layouts, holds no paths, stack traces or times, and the same module gives
the same bytes. Notation: B batch, L query length, S key length, D embed, H heads, G key/value heads, E head dim,
F value head dim.
"""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.model import MultiHeadAttention, ScaledDotProductAttention, is_offset_causal
from mhsa_compile.reference import Array, Arrays, eager, oracle
from mhsa_compile.spec import SPEC_KEY
from mhsa_compile.verify import budget, max_error, random_inputs

Shape = tuple[int | str, ...]
Signature = dict[str, tuple[Shape, torch.dtype]]
"""Input name -> (dims, dtype); a dim is a size or the name of a symbol."""

UNSEEN = ({"B": 2, "L": 4, "S": 9}, {"B": 1, "L": 10, "S": 6})
"""Sizes for the check after the export: none was seen in it, and L stands on both sides of S."""


def export(
    module: nn.Module,
    *,
    dims: Mapping[str, int | None] | None = None,
    example_inputs: Sequence[Tensor] | Mapping[str, Tensor] | None = None,
    dynamic_shapes: Mapping[str, Mapping[int, str]] | None = None,
) -> onnx.ModelProto:
    """The checked ONNX model of `module` at inference.

    MultiHeadAttention: x (B, L, D), context (B, S, kv_embed_dim), mask -> y (B, L, D).
    ScaledDotProductAttention: q (B, H, L, E), k (B, G, S, E), v (B, G, S, F), mask -> y (B, H, L, F).
    A mask of kind bool or additive has axes of its own, (mask_B, mask_H, mask_L, mask_S): each is 1 or the full size.

    dims            symbol -> size fixes it; None and absent ones stay symbolic
    example_inputs  any other module needs them, in the order of forward, or by name
    dynamic_shapes  input -> {axis: symbol} for such a module. By default an input of rank 3 is (B, L, ...), or
                    (B, S, ...) if its length differs from the first one's; other ranks are fixed

    Raises ModelError where the export fails or a symbol did not survive it, InputError for wrong arguments.
    """
    if isinstance(module, MultiHeadAttention | ScaledDotProductAttention):
        signature = _own_signature(module)
    else:
        signature = _signature_of_examples(module, example_inputs, dynamic_shapes)
    signature = _with_fixed_dims(signature, dict(dims or {}))
    was_training = module.training
    try:
        model = _run_exporter(module.eval(), signature)
        _strip(model)
        if isinstance(module, MultiHeadAttention | ScaledDotProductAttention):
            metadata = {SPEC_KEY: module.spec.to_json(), "mhsa.module": type(module).__name__}
            onnx.helper.set_model_props(model, metadata)
        onnx.checker.check_model(model)
        check_symbols(model, module, {name: shape for name, (shape, _) in signature.items()})
    finally:
        module.train(was_training)
    return model


def check_symbols(model: onnx.ModelProto, module: nn.Module, requested: Mapping[str, Shape]) -> None:
    """Shows that no dim was specialised: by the declared inputs, and by two runs at lengths the export never saw.

    In each run the graph's outputs must equal the module's, both in float64, up to the module's own budget.
    `requested` is input name -> dims. Raises ModelError.
    """
    declared = {value.name: _dims(value) for value in model.graph.input}
    for name, shape in requested.items():
        if declared.get(name) != shape:
            hint = "The module fixes this size: fix it in dims, or name another symbol in dynamic_shapes."
            raise ModelError(name, f"dims {shape} after the export", str(declared.get(name)), hint)
    symbols = {dim for shape in requested.values() for dim in shape if isinstance(dim, str)}
    wide = copy.deepcopy(module).double()
    for seed, unseen in enumerate(UNSEEN if symbols else UNSEEN[:1]):
        sizes = _unseen_sizes(module, sorted(symbols), unseen)
        inputs = random_inputs(model, sizes, seed)
        expected, actual = oracle(model, inputs), _outputs(module, inputs)
        try:
            exact = _outputs(wide, {name: _widened(array) for name, array in inputs.items()})
            pairs = zip(exact, expected, actual, strict=True)
        except RuntimeError:  # a forward that says float32 itself: its result is held against the graph's at that dtype
            pairs = zip(expected, actual, eager(model, inputs), strict=True)
        for truth, claim, yardstick in pairs:
            allowed = budget(truth, yardstick, str(yardstick.dtype))
            if not (error := max_error(truth, claim)) <= allowed:
                at = ", ".join(f"{symbol}={size}" for symbol, size in sizes.items())
                raise ModelError("module", f"the exported graph to agree within {allowed:.1e} at {at}", f"{error:.1e}")


def _outputs(module: nn.Module, inputs: Arrays) -> list[Array]:
    with torch.no_grad():
        results = module(**{name: torch.from_numpy(array) for name, array in inputs.items()})
    return [result.numpy() for result in ([results] if isinstance(results, Tensor) else results)]


def _own_signature(module: MultiHeadAttention | ScaledDotProductAttention) -> Signature:
    spec = module.spec
    dtype = getattr(torch, spec.dtype)
    source_length = "S"
    if isinstance(module, MultiHeadAttention):
        shapes: dict[str, Shape] = {"x": ("B", "L", spec.embed_dim)}
        if spec.kv_embed_dim is not None:
            shapes["context"] = ("B", "S", spec.kv_embed_dim)
        else:
            source_length = "L"
    else:
        G = spec.num_kv_heads
        shapes = {"q": ("B", spec.num_heads, "L", spec.head_dim)}
        shapes |= {"k": ("B", G, "S", spec.head_dim), "v": ("B", G, "S", spec.v_head_dim)}
    signature: Signature = {name: (shape, dtype) for name, shape in shapes.items()}
    if spec.mask == "key_padding":
        signature["mask"] = (("B", source_length), torch.bool)
    elif spec.mask is not None:
        axes = ("mask_B", "mask_H" if spec.num_heads > 1 else 1, "mask_L", "mask_S")
        signature["mask"] = (axes, torch.bool if spec.mask == "bool" else dtype)
    return signature


def _signature_of_examples(
    module: nn.Module,
    examples: Sequence[Tensor] | Mapping[str, Tensor] | None,
    dynamic_shapes: Mapping[str, Mapping[int, str]] | None,
) -> Signature:
    if not examples:
        hint = "Pass the tensors that its forward takes; only their names, shapes and dtypes matter."
        raise InputError("example_inputs", f"example inputs for {type(module).__name__}", "none", hint)
    if not isinstance(examples, Mapping):
        parameters = list(inspect.signature(module.forward).parameters)
        if len(examples) > len(parameters):
            raise InputError("example_inputs", f"at most {len(parameters)} tensors", str(len(examples)))
        examples = dict(zip(parameters, examples, strict=False))
    for name, value in examples.items():
        if not isinstance(value, Tensor):
            raise InputError("example_inputs", f"a tensor for {name!r}", type(value).__name__)
    if dynamic_shapes is None:
        dynamic_shapes = _guessed_symbols(examples)
    for name in dynamic_shapes:
        if name not in examples:
            raise InputError("dynamic_shapes", f"inputs among {', '.join(examples)}", repr(name))
    return {
        name: (
            tuple(dynamic_shapes.get(name, {}).get(axis, size) for axis, size in enumerate(value.shape)),
            value.dtype,
        )
        for name, value in examples.items()
    }


def _guessed_symbols(examples: Mapping[str, Tensor]) -> dict[str, dict[int, str]]:
    sequences = {name: value.shape[1] for name, value in examples.items() if value.ndim == 3}
    first = next(iter(sequences.values()), None)
    return {name: {0: "B", 1: "L" if length == first else "S"} for name, length in sequences.items()}


def _with_fixed_dims(signature: Signature, dims: dict[str, int | None]) -> Signature:
    symbols = {dim for shape, _ in signature.values() for dim in shape if isinstance(dim, str)}
    for name, size in dims.items():
        self_attention_length = name == "S" and size == dims.get("L")
        if name not in symbols and size is not None and not self_attention_length:
            raise InputError("dims", f"symbols among {', '.join(sorted(symbols))}", repr(name))
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise InputError("dims", f"a positive integer or None for {name!r}", repr(size))
    for axis in ("B", "L"):  # what is 1 leaves nothing to broadcast
        if dims.get(axis) == 1:
            dims.setdefault(f"mask_{axis}", 1)
    # The operator pads a mask that is short in its last axis instead of broadcasting it: there it is whole, always.
    dims.setdefault("mask_S", dims.get("S" if "S" in symbols else "L"))
    fixed = {name: size for name, size in dims.items() if size is not None}

    def resolved(dim: int | str) -> int | str:
        return fixed.get(dim, dim) if isinstance(dim, str) else dim

    return {name: (tuple(map(resolved, shape)), dtype) for name, (shape, dtype) in signature.items()}


def _run_exporter(module: nn.Module, signature: Signature) -> onnx.ModelProto:
    symbols = list(dict.fromkeys(dim for shape, _ in signature.values() for dim in shape if isinstance(dim, str)))
    sizes = {symbol: 3 + 2 * i for i, symbol in enumerate(symbols)}  # torch.export specialises 1, and may equate twins
    axes = {symbol: torch.export.Dim(symbol) for symbol in symbols}
    examples = {
        name: torch.zeros([sizes[dim] if isinstance(dim, str) else dim for dim in shape], dtype=dtype)
        for name, (shape, dtype) in signature.items()
    }
    dynamic = {
        name: {axis: axes[dim] for axis, dim in enumerate(shape) if isinstance(dim, str)}
        for name, (shape, _) in signature.items()
    }
    own = isinstance(module, MultiHeadAttention | ScaledDotProductAttention)
    try:
        with _quiet():
            program = torch.onnx.export(
                module,
                kwargs=examples,
                dynamic_shapes=dynamic,
                input_names=list(signature),
                output_names=["y"] if own else None,
                opset_version=24 if is_offset_causal(module) else 23,
                dynamo=True,
                optimize=False,  # it would fold transposes into the weights, and with them their names and layouts
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        cause = str(error.__cause__ or error).strip().splitlines()
        hint = "If it speaks of constraints, name the symbolic axes in dynamic_shapes, or fix them in dims."
        raise ModelError("module", "one that torch.onnx.export can export", cause[0] if cause else "", hint) from error
    assert program is not None
    return program.model_proto


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences what the exporter says about itself, and nothing else."""

    def relevant(record: logging.LogRecord) -> bool:
        return "torchvision is not installed" not in record.msg

    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    registration.addFilter(relevant)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.* is deprecated", FutureWarning)
            warnings.filterwarnings("ignore", "# The axis name: .* will not be used", UserWarning)
            yield
    finally:
        registration.removeFilter(relevant)


def _strip(model: onnx.ModelProto) -> None:
    """Removes what differs between machines and runs (traces, paths, notes), and nodes whose result nobody reads."""
    graph = model.graph
    needed = {value.name for value in graph.output}
    for node in reversed(list(graph.node)):
        if needed.intersection(node.output):
            needed.update(_reads(node))
        else:
            graph.node.remove(node)
    weights = {initializer.name for initializer in graph.initializer}
    for value in list(graph.value_info):
        if value.name not in needed or value.name in weights:
            graph.value_info.remove(value)
    _forget(model)


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """What a node reads, the bodies of its subgraphs included."""
    yield from node.input
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from _reads(inner)


def _forget(message: Any) -> None:
    for field in ("metadata_props", "doc_string"):
        if field in message.DESCRIPTOR.fields_by_name:
            message.ClearField(field)
    for field, value in message.ListFields():
        if field.message_type is not None:
            for item in [value] if hasattr(value, "DESCRIPTOR") else value:
                _forget(item)


def _dims(value: onnx.ValueInfoProto) -> Shape:
    return tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)


def _unseen_sizes(module: nn.Module, symbols: list[str], unseen: Mapping[str, int]) -> dict[str, int]:
    """A size for each symbol; in the second run (B = 1) a mask is full, in the first its heads are broadcast."""
    sizes = {symbol: unseen.get(symbol, 4 + i) for i, symbol in enumerate(symbols) if not symbol.startswith("mask_")}
    if unseen["B"] == 1 and "mask_H" in symbols:
        sizes["mask_H"] = module.spec.num_heads  # type: ignore[union-attr, assignment]
    return sizes


def _widened(array: Array) -> Array:
    return array if array.dtype.kind in "biu" else array.astype(np.float64)
