"""nn.Module -> ONNX whose attention is the standard operator, checked: what was to be symbolic is symbolic.

The graph keeps PyTorch's parameter names and layouts, holds no paths, stack traces or times, and the same module gives
the same bytes. Notation: B batch, L query length, S key length, D embed, H heads, G key/value heads, E head dim,
F value head dim.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.frontend.detach_weights import contents_as_inputs
from mhsa_compile.frontend.export import reversed_subtraction
from mhsa_compile.frontend.export.free_dims import Program, cause, freest_model, quiet, requested_freedom, with_names
from mhsa_compile.frontend.export.module_calls import TensorModule, with_own_names
from mhsa_compile.frontend.export.nested_values import taken_apart, with_pairs_apart
from mhsa_compile.frontend.export.signatures import (
    ModuleSignature,
    Shape,
    check_lengths,
    in_place,
    output_names,
    own_signature,
    sizes_within,
    with_fixed_dims,
    zeros_of,
)
from mhsa_compile.frontend.export.torch_layers import slow_path
from mhsa_compile.frontend.export.translations import TRANSLATIONS
from mhsa_compile.frontend.onnx_graph import add_import, opset_of, reads
from mhsa_compile.nn import mhsa_operator
from mhsa_compile.nn.mhsa_operator import attention_function
from mhsa_compile.nn.modules import MultiHeadAttention, ScaledDotProductAttention, opset
from mhsa_compile.nn.row_operators import ROW_OPERATORS, row_function
from mhsa_compile.nn.score_features import CONSTANT_MASK
from mhsa_compile.spec.attention_spec import DOMAIN, IN_PLACE_KEY, LIMITS_KEY, SPEC_KEY, AttentionSpec
from mhsa_compile.spec.outputs import SoftmaxOutputs, inside_of
from mhsa_compile.verification.unseen_sizes import UNSEEN, check_unseen_sizes

_LONGEST_CHECK = 512
_SHORT = {"L": 11, "S": 13}


def export(
    module: nn.Module,
    *,
    dims: Mapping[str, int | None] | None = None,
    example_inputs: Sequence[Tensor] | Mapping[str, Tensor] | None = None,
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None = None,
) -> onnx.ModelProto:
    """The checked ONNX model of `module` at inference.

    MultiHeadAttention: x (B, L, D), context (B, S, kv_embed_dim), mask -> y (B, L, D). With spec.v_embed_dim, key
    (B, S, kv_embed_dim) and value (B, S, v_embed_dim) are in the place of context.
    ScaledDotProductAttention: q (B, H, L, E), k (B, G, S, E), v (B, G, S, F), mask -> y (B, H, L, F).
    With spec.kv_cache: x, past_key (B, G, C, E), past_value (B, G, C, F), length (B,) -> y, present_key, present_value;
    the caches may be written in place, as the metadata "mhsa.in_place" says; of int8 they have scales, (B, G, C) each.
    A mask of kind bool or additive has axes of its own, (mask_B, mask_H, mask_L, mask_S): each is 1 or the full size.

    dims            symbol -> size fixes it; None and absent ones stay symbolic
    example_inputs  any other module needs them, in the order of forward, or by name
    dynamic_shapes  which dims of such a module's inputs are free, in torch.export's forms: input -> {axis: entry}, or
                    an entry for each axis. One is a name or a Dim, which stays free or is an error; Dim.DYNAMIC, the
                    same without a name; Dim.AUTO, free if the module allows; None, fixed. By default what looks like a
                    batch or a length in the examples (`signatures.guess_symbols`) is AUTO; what is then fixed, warns

    What any other module takes and gives is told in `nested_values`: tuples, dicts, ModelOutputs and caches among it.

    Raises ModelError where the export fails or a symbol did not survive it, InputError for wrong arguments.
    """
    with _at_inference(module):
        if isinstance(module, MultiHeadAttention | ScaledDotProductAttention):
            if dynamic_shapes is not None:
                hint = "Its batch and lengths are free as they are; dims fixes them."
                raise InputError("dynamic_shapes", f"None for {type(module).__name__}", "some", hint)
            return _export_own(module, dict(dims or {}))
        _check_weights(module)
        tensors, nested = taken_apart(module, example_inputs)
        request = requested_freedom(module, tensors, with_pairs_apart(dynamic_shapes), dims or {})
        wrapper = TensorModule(module, nested).eval()
        with slow_path():
            return freest_model(wrapper, request, lambda program: _export_any(wrapper, program))


def _check_weights(module: nn.Module) -> None:
    """Raises ModelError for quantised layers, and a parameter or buffer that is not in this process's memory."""
    for name, part in module.named_modules():
        if type(part).__module__.startswith(("torch.ao.nn.quantized", "torch.nn.quantized")):
            got = f"{name or 'it'}, a quantised {type(part).__name__}"
            hint = 'Compile the model as it was before: weights="int8" stores as it is, and computes with eight bits.'
            raise ModelError("module", "layers with weights as they were trained", got, hint)
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        expected = "weights in this process's memory"
        if value.is_meta:
            raise ModelError("module", expected, f"{name!r} on the meta device", "Load the weights first.")
        if hasattr(value, "full_tensor"):
            hint = "Gather the weights into a module that is not sharded: full_tensor() has all of one."
            raise ModelError("module", expected, f"{name!r} sharded, a {type(value).__name__}", hint)


@contextmanager
def _at_inference(module: nn.Module) -> Iterator[None]:
    """Inside, the module is in eval mode; afterwards each part of it is in the mode that it was in, with the buffers
    that it had: its forward runs here, and may write into them."""
    modes = [(part, part.training, dict(part._buffers)) for part in module.modules()]
    values = [(buffer, buffer.clone()) for buffer in module.buffers() if not buffer.is_meta]
    module.eval()
    try:
        yield
    finally:
        for part, mode, buffers in modes:
            part.training = mode
            part._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _export_any(wrapper: TensorModule, program: Program) -> onnx.ModelProto:
    freedom = program.freedom
    version = {"opset_version": opset(wrapper.module), "custom_translation_table": TRANSLATIONS}
    _write_signs_out(program.exported)
    reversed_subtraction.promote(program.exported)
    inputs = list(freedom.signature)
    model = with_own_names(_convert(program.exported, input_names=inputs, **version), inputs, program.outputs)
    with_names(model, program.names)
    for node in model.graph.node:
        if node.domain == DOMAIN and len(node.output) > 1:  # of a flex_attention that was asked for it
            mhsa_operator.put_in_place(node, SoftmaxOutputs(lse=True))
    _import_own_operators(model)
    onnx.checker.check_model(contents_as_inputs(model))
    if freedom.most:
        onnx.helper.set_model_props(model, {LIMITS_KEY: json.dumps(dict(freedom.most))})
    check_symbols(model, wrapper, _shapes(freedom.signature))
    for symbol, least in program.least.items():
        _check_below(model, wrapper, set(freedom.symbols.values()), symbol, least)
    return model


def _check_below(model: onnx.ModelProto, module: nn.Module, symbols: set[str], symbol: str, least: int) -> None:
    """Whether the graph is right at each size below the least that the exporter speaks of: it takes 0 and 1 for
    special, also of a length less one, where the module may not. Raises ModelError."""
    try:
        runs = [UNSEEN[0] | {symbol: size} for size in range(1, least)]
        check_unseen_sizes(model, module, symbols, _forward, runs)
    except ModelError as error:
        got = f"one that takes at least {least} there"
        raise ModelError("module", f"one that leaves {symbol!r} free", got, error.next_step) from error


def _export_own(module: MultiHeadAttention | ScaledDotProductAttention, dims: dict[str, int | None]) -> onnx.ModelProto:
    signature = with_fixed_dims(own_signature(module), dims)
    check_lengths(module.spec, dims)
    mask = _constant_mask(module, signature)
    model = _run_exporter(module, signature)
    if mask is not None:
        _set_mask(model, mask)
    _define_own_operator(model, module.spec)
    metadata = {SPEC_KEY: module.spec.to_json(), "mhsa.module": type(module).__name__}
    if limits := sizes_within(module.spec, _places(module, signature)):
        metadata[LIMITS_KEY] = json.dumps(limits)
    if module.spec.kv_cache:
        metadata[IN_PLACE_KEY] = json.dumps(in_place(module.spec))
    onnx.helper.set_model_props(model, metadata)
    onnx.checker.check_model(contents_as_inputs(model))
    check_declared(model, _shapes(signature))
    long = {name: size for name, size in dims.items() if name in _SHORT and size is not None and size > _LONGEST_CHECK}
    if not long:
        check_symbols(model, module, _shapes(signature))
        return model
    # The check holds whole score matrices in float64. Long lengths are stood in for by short ones, and a pattern that
    # may not fit those by one that does; the graph is the same.
    short = copy.copy(module)
    short.spec = short.spec.for_any_lengths()
    sizes = {name: size for name, size in dims.items() if not name.startswith("mask_")}
    sizes |= {name: _SHORT[name] for name in long}
    if isinstance(module, MultiHeadAttention) and not module.spec.is_cross:
        sizes.pop("S", None)
    check_equal_but_for_sizes(model, _export_own(short, sizes))
    return model


def _shapes(signature: ModuleSignature) -> dict[str, Shape]:
    return {name: shape for name, (shape, _) in signature.items()}


def check_declared(model: onnx.ModelProto, requested: Mapping[str, Shape]) -> None:
    """Whether the graph's inputs have the dims that were asked for. Raises ModelError."""
    declared = {value.name: _dims(value) for value in model.graph.input}
    for name, shape in requested.items():
        if declared.get(name) != shape:
            hint = "The module fixes this size: fix it in dims, or name another symbol in dynamic_shapes."
            raise ModelError(name, f"dims {shape} after the export", str(declared.get(name)), hint)


def check_symbols(model: onnx.ModelProto, module: nn.Module, requested: Mapping[str, Shape]) -> None:
    """Shows that no dim was specialised: by the declared inputs, and by runs at sizes that the export never saw.

    `requested` is input name -> dims. Raises ModelError.
    """
    check_declared(model, requested)
    symbols = {dim for shape in requested.values() for dim in shape if isinstance(dim, str)}
    check_unseen_sizes(model, module, symbols, _forward)


def _forward(module: nn.Module, tensors: dict[str, Tensor]) -> Any:
    return module(tensors) if isinstance(module, TensorModule) else module(**tensors)


def check_equal_but_for_sizes(model: onnx.ModelProto, other: onnx.ModelProto) -> None:
    """Shows that two exports of one module differ in nothing but the sizes that were fixed and what is of that size.

    Raises ModelError.
    """
    (one, weights), (two, other_weights) = _sizeless(model), _sizeless(other)
    different = next((a for a, b in zip(one, two, strict=False) if a != b), None)
    if different is not None or len(one) != len(two) or weights != other_weights:
        what = "weights or the number of nodes" if different is None else f"{different.op_type} nodes"
        raise ModelError("module", "a graph that is the same at every length", f"{what} that differ")


def _sizeless(model: onnx.ModelProto) -> tuple[list[Any], dict[str, bytes]]:
    weights = {t.name: t.SerializeToString() for t in model.graph.initializer if t.name != CONSTANT_MASK}
    return list(model.graph.node), weights


def _dims(value: onnx.ValueInfoProto) -> Shape:
    return tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)


def _constant_mask(
    module: MultiHeadAttention | ScaledDotProductAttention, signature: ModuleSignature
) -> np.ndarray | None:
    """The spec's constant mask, (L, S). Raises InputError unless its lengths are fixed."""
    L, S = _lengths(module, signature)
    if not module.spec.needs_lengths:
        return None
    if isinstance(L, str) or isinstance(S, str):
        symbols = " and ".join(dict.fromkeys(dim for dim in (L, S) if isinstance(dim, str)))
        expected = f"fixed lengths, as the spec's {CONSTANT_MASK} is laid out at compile time"
        hint = "State them: --length 1024, or dims={'L': 1024}."
        raise InputError("dims", expected, f"{symbols} left symbolic", hint)
    return module.spec.constant_pairs(L, S)


def _places(module: MultiHeadAttention | ScaledDotProductAttention, signature: ModuleSignature) -> dict[str, int | str]:
    """The sizes that places of a pair are below, fixed or by name; h has the spec's."""
    L, S = _lengths(module, signature)
    batch = signature["x" if isinstance(module, MultiHeadAttention) else "q"][0][0]
    return {"b": batch, "q_idx": L, "kv_idx": S}


def _lengths(
    module: MultiHeadAttention | ScaledDotProductAttention, signature: ModuleSignature
) -> tuple[int | str, int | str]:
    """L and S, fixed or by name."""
    if isinstance(module, MultiHeadAttention):
        L, S = signature["x"][0][1], signature[module.spec.sources[0]][0][1]
    else:
        L, S = signature["q"][0][2], signature["k"][0][2]
    return L, S


def _define_own_operator(model: onnx.ModelProto, spec: AttentionSpec) -> None:
    """Gives the operators of our domain that the graph has their definitions in standard ones."""
    kinds = {node.op_type for node in model.graph.node if node.domain == DOMAIN}
    model.functions.extend(row_function(kind, opset_of(model)) for kind in ROW_OPERATORS if kind in kinds)
    for node in model.graph.node:
        if node.domain == DOMAIN and node.op_type == "Attention":
            mhsa_operator.put_in_place(node, inside_of(spec.outputs))
            if not mhsa_operator.has_definition(node):
                continue
            model.functions.append(attention_function(node, opset_of(model), bool_mask=not spec.adds_mask))
    _import_own_operators(model)


def _import_own_operators(model: onnx.ModelProto) -> None:
    """States the version of our domain, where the graph has operators of it."""
    if any(node.domain == DOMAIN for node in model.graph.node):
        add_import(model, DOMAIN)


def _set_mask(model: onnx.ModelProto, mask: np.ndarray) -> None:
    model.graph.initializer.append(onnx.numpy_helper.from_array(mask, CONSTANT_MASK))
    (attention,) = (node for node in model.graph.node if node.op_type == "Attention")
    attention.input.extend([""] * (4 - len(attention.input)))
    attention.input[3] = CONSTANT_MASK


def _run_exporter(
    module: MultiHeadAttention | ScaledDotProductAttention, signature: ModuleSignature
) -> onnx.ModelProto:
    symbols = list(dict.fromkeys(dim for shape, _ in signature.values() for dim in shape if isinstance(dim, str)))
    sizes = {symbol: 3 + 2 * i for i, symbol in enumerate(symbols)}  # torch.export specialises 1, and may equate twins
    axes = {symbol: torch.export.Dim(symbol) for symbol in symbols}
    dynamic = {
        name: {axis: axes[dim] for axis, dim in enumerate(shape) if isinstance(dim, str)}
        for name, (shape, _) in signature.items()
    }
    names = {"input_names": list(signature), "output_names": output_names(module)}
    inputs: dict[str, Any] = {"kwargs": zeros_of(signature, sizes), "dynamic_shapes": dynamic}
    return _convert(module, opset_version=opset(module), **inputs, **names)


def _write_signs_out(exported: torch.export.ExportedProgram) -> None:
    """Gives a program's weights memory of their own numbers where PyTorch notes a negation beside it: its exporter to
    ONNX reads the memory alone."""
    for tensors in (exported.state_dict, exported.constants):
        lazy = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor) and value.is_neg()}
        for name, value in lazy.items():
            plain = value.detach().resolve_neg()
            tensors[name] = nn.Parameter(plain, value.requires_grad) if isinstance(value, nn.Parameter) else plain


def _convert(source: nn.Module | torch.export.ExportedProgram, **options: Any) -> onnx.ModelProto:
    """The model that PyTorch's exporter to ONNX makes, with some of its options. Raises ModelError."""
    try:
        with quiet(), torch.no_grad():
            program = torch.onnx.export(
                source,
                dynamo=True,
                optimize=False,  # it would fold transposes into the weights, and with them their names and layouts
                verbose=False,
                **options,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise ModelError("module", "one that torch.onnx.export can export", cause(error.__cause__ or error)) from error
    assert program is not None
    model = program.model_proto
    _strip(model)
    return model


def _strip(model: onnx.ModelProto) -> None:
    """Removes what differs between machines and runs (traces, paths, notes), and nodes whose result nobody reads."""
    graph = model.graph
    needed = {value.name for value in graph.output}
    for node in reversed(list(graph.node)):
        if needed.intersection(node.output):
            needed.update(reads(node))
        else:
            graph.node.remove(node)
    weights = {initializer.name for initializer in graph.initializer}
    for value in list(graph.value_info):
        if value.name not in needed or value.name in weights:
            graph.value_info.remove(value)
    _forget(model)


def _forget(message: Any) -> None:
    for field in ("metadata_props", "doc_string"):
        if field in message.DESCRIPTOR.fields_by_name:
            message.ClearField(field)
    for field, value in message.ListFields():
        if field.message_type is not None:
            for item in [value] if hasattr(value, "DESCRIPTOR") else value:
                _forget(item)
