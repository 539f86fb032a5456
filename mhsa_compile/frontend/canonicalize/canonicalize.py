"""ONNX -> ONNX: whatever dialect a graph's attention is written in, the standard operator Attention says it after this.

Twenty steps, each from a whole model to a whole model: weights become initializers, values of eight-bit floats
float32, blocks whose columns are in another order those in order, weights in blocks or of four bits floats that are
made of bytes, other numbers of so few bits bytes, loops their steps, the opset is raised, operators that ONNX defines
by others are written out where nothing reads them as they are, Einsum becomes MatMul, ends of tables get the length
of the sequence, windows of a MaxPool go axis by axis, blocks of values get what each element has, norms and GELUs
that are written out become one operator each, convolutions of one pixel linears and sequences the parts of a Split,
what is known of shapes becomes constants, Microsoft's operators become standard ones, roundings to bytes that change
nothing disappear, tables that are a product's weight turned are read by columns, and decomposed attention becomes one
node.
Then outputs are added that say what attentions do inside, where they are asked for.
A model of this library's own is left alone. Every attention found is reported, with the reason where it stayed as it
was.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend import branch_graphs
from mhsa_compile.frontend.canonicalize import stored_blocks
from mhsa_compile.frontend.canonicalize.decomposed import rewrite as decomposed
from mhsa_compile.frontend.canonicalize.layer_outputs import in_order, is_attention, name_of, with_outputs
from mhsa_compile.frontend.canonicalize.microsoft import rewrite as microsoft
from mhsa_compile.frontend.canonicalize.passes import (
    einsum,
    few_bit_values,
    float8_values,
    gather,
    gelus,
    loops,
    max_pools,
    norms,
    opset,
    ordered_blocks,
    packed_weights,
    pointwise_conv,
    rounded_values,
    schema_functions,
    sequences,
    tied_tables,
    trailing_inputs,
    value_blocks,
    weight_constants,
)
from mhsa_compile.frontend.canonicalize.passes.remove_identities import without_aliases
from mhsa_compile.frontend.canonicalize.rewriting.shape_propagation import propagate_shapes
from mhsa_compile.frontend.detach_weights import Tensors, light, whole
from mhsa_compile.frontend.onnx_graph import all_nodes, metadata_of, opset_of
from mhsa_compile.runtime.artifact.manifest import AttentionCoverage
from mhsa_compile.spec.attention_spec import LIMITS_KEY, ROWS_KEY, SPEC_KEY
from mhsa_compile.spec.outputs import LayerWord

_OTHERS = ("RotaryEmbedding", "TensorScatter")  # what attention is made of, too


@dataclass(frozen=True)
class Canonical:
    """A model whose attention is the standard operator, and what became of each attention it had, in the graph's order.

    `limits`: symbols and their largest size, that of a table (of positions, say) which the graph takes a part of, or
    that up to which a module was exported. `instead`: the operators of a model that holds no attention; else empty.
    """

    model: onnx.ModelProto
    blocks: tuple[AttentionCoverage, ...]
    limits: dict[str, int]
    instead: str = ""


def canonicalize(model: onnx.ModelProto, outputs: Sequence[LayerWord] = ()) -> Canonical:
    """The model with its attentions as the standard operator; `outputs` are added to the model's own.

    Raises ModelError where an operator of Microsoft's has no standard form, or an output is asked for that there cannot
    be.
    """
    if SPEC_KEY in metadata_of(model):
        if outputs:
            got = f"{', '.join(map(str, outputs))} of a file that was exported from a spec"
            raise ModelError("outputs", "a spec with them, or somebody else's model", got, "Compile the spec instead.")
        return Canonical(model, _standard(model), _size_limits(model))
    limits = _size_limits(model)
    outside = weight_constants.rewrite(branch_graphs.with_weights_outside(model))
    stored = packed_weights.rewrite(ordered_blocks.rewrite(float8_values.rewrite(outside)))
    plain, products = stored_blocks.hidden(few_bit_values.rewrite(stored))
    small, tensors = light(plain)
    small = loops.rewrite(small, limits)  # before the opset is raised: that of a Scan's batch is one of its own
    if opset_of(small) < opset.BOUNDS_AS_INPUTS:
        small = opset.raised(small, opset.SOFTMAX_OF_ONE_AXIS - 1)
    if opset_of(small) < opset.SOFTMAX_OF_ONE_AXIS:  # the converter must know the rank of what a Softmax gets
        small = propagate_shapes(small, limits)
    small = schema_functions.rewrite(opset.raised(small, max(opset.LEAST, microsoft.least_opset(small))))
    small, blocks, inner = _in_standard_words(small, tensors, limits)
    instead = ""
    if not (blocks or inner) and not any(node.op_type in _OTHERS for node in all_nodes(small.graph)):
        instead = ", ".join(sorted({node.op_type for node in model.graph.node}))
    layers = in_order(small, blocks)
    small = with_outputs(small, layers, outputs)
    result = whole(stored_blocks.restored(small, products, tensors), tensors)
    facts = {LIMITS_KEY: limits, ROWS_KEY: _table_rows(small)}
    entries = {key: json.dumps(sizes) for key, sizes in facts.items() if sizes}
    helper.set_model_props(result, metadata_of(result) | entries)
    return Canonical(result, (*(layer.block for layer in layers), *inner), limits, instead)


def _in_standard_words(
    small: onnx.ModelProto, tensors: Tensors, limits: dict[str, int]
) -> tuple[onnx.ModelProto, list[AttentionCoverage], list[AttentionCoverage]]:
    """(a model of this opset with its attentions as the standard operator, one entry for each of them, one for each in
    the branches of its Ifs)."""
    small = loops.rewrite(small, limits)
    loops.refuse(small)
    standard = _standard(small)
    small = propagate_shapes(trailing_inputs.rewrite(without_aliases(einsum.rewrite(small)), limits), limits)
    plain = norms.rewrite(gelus.rewrite(without_aliases(max_pools.rewrite(value_blocks.rewrite(small)))))
    if (plain := sequences.rewrite(pointwise_conv.rewrite(plain))) is not small:
        small = propagate_shapes(without_aliases(plain), limits)
    small, theirs = microsoft.rewrite(small, tensors, limits)
    if (plain := rounded_values.rewrite(small, tensors)) is not small:
        small = propagate_shapes(without_aliases(plain), limits)
    small, blocks = decomposed.rewrite(without_aliases(tied_tables.rewrite(gather.rewrite(small))))
    inner: list[AttentionCoverage] = []

    def branch_in_standard_words(branch: onnx.ModelProto) -> onnx.ModelProto:
        branch, own, nested = _in_standard_words(branch, tensors, limits)
        inner.extend((*own, *nested))
        return branch

    return branch_graphs.rewritten(small, branch_in_standard_words), [*standard, *theirs, *blocks], inner


def _size_limits(model: onnx.ModelProto) -> dict[str, int]:
    """The largest sizes of the symbols of inputs, as the export found them or was told."""
    symbols = {dim.dim_param for value in model.graph.input for dim in value.type.tensor_type.shape.dim}
    limits = json.loads(metadata_of(model).get(LIMITS_KEY, "{}"))
    return {symbol: most for symbol, most in limits.items() if symbol in symbols}


def _table_rows(model: onnx.ModelProto) -> dict[str, int]:
    """Input -> the number of rows (or columns) of the table that it picks from; of several tables, the smallest."""
    tables = {tensor.name: tensor.dims for tensor in model.graph.initializer if tensor.dims}
    sources = {value.name: value.name for value in model.graph.input if value.name not in tables}
    limits: dict[str, int] = {}
    for node in model.graph.node:  # in the order of computation
        if node.op_type in _SAME_NUMBERS and node.input[0] in sources:
            sources[node.output[0]] = sources[node.input[0]]
        if node.op_type == "Gather" and node.input[0] in tables and node.input[1] in sources:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
            name, rows = sources[node.input[1]], tables[node.input[0]][axis]
            limits[name] = min(rows, limits.get(name, rows))
    return limits


_SAME_NUMBERS = ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
"""Operators between ids and the table that they pick from, which leave ids what they are."""


def _standard(model: onnx.ModelProto) -> tuple[AttentionCoverage, ...]:
    return tuple(AttentionCoverage(name_of(node), "Attention", True) for node in model.graph.node if is_attention(node))
