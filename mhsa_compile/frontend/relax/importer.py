"""ONNX -> Relax. TVM's importer converts the ordinary operators; what our kernels compute becomes calls of our ops.

Such a call is `call_dps_packed("op_N", inputs)`; `ImportedModule.ops["op_N"]` says what it is. `compiler.lower` puts a
kernel in its place. Floating-point initializers become parameters of `main`, bound at load, and so do many bytes that
stand for floats; other integers are constants of the program.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
import tvm
from onnx import numpy_helper
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

from mhsa_compile.errors import MhsaError, ModelError
from mhsa_compile.files.foreign_errors import defect, place_of_slip
from mhsa_compile.frontend.detach_weights import is_many_bytes
from mhsa_compile.frontend.fusion.fuse import fuse
from mhsa_compile.frontend.fusion.fused_nodes import (
    FusedAttention,
    FusedBlockLinear,
    FusedDepthwise,
    FusedGroupedConvolution,
    FusedLinear,
    FusedPatches,
    FusedPixelShuffle,
    FusedQuantisedLinear,
    FusedQuantiseRows,
    FusedRotary,
    FusedScatter,
)
from mhsa_compile.frontend.fusion.scatter_pattern import declared_in_place
from mhsa_compile.frontend.onnx_graph import all_nodes, metadata_of, node_error, opset_of, reads, title
from mhsa_compile.frontend.reading.check import check_graph
from mhsa_compile.frontend.reading.standard import RANDOM, STANDARD
from mhsa_compile.frontend.relax import float32_sums
from mhsa_compile.frontend.relax.attention import AttentionImport
from mhsa_compile.frontend.relax.block_linear import block_linear
from mhsa_compile.frontend.relax.imported_module import ImportContext, ImportedModule, dim_of
from mhsa_compile.frontend.relax.op_converters import CONVERSIONS
from mhsa_compile.frontend.relax.patches import depthwise, grouped_convolution, patches
from mhsa_compile.frontend.relax.pixel_shuffle import pixel_shuffle
from mhsa_compile.frontend.relax.quantised_linear import quantise, quantised_linear
from mhsa_compile.frontend.relax.recurrent import RecurrentImport
from mhsa_compile.frontend.relax.sizes.agreements import Demand, agreement, demand, hold
from mhsa_compile.frontend.relax.sizes.broadcasting import agreeing, dims_of, of_width
from mhsa_compile.frontend.relax.sizes.call_checks import CallChecks
from mhsa_compile.frontend.relax.sizes.folding import fold_sizes
from mhsa_compile.frontend.relax.sizes.shapes import ShapeOperators
from mhsa_compile.frontend.relax.sizes.size_values import SizeNames, SizeValues, as_tensor, is_known
from mhsa_compile.frontend.relax.values import dims
from mhsa_compile.kernels.interface.ops import (
    GATES,
    Dim,
    DType,
    HeadLayout,
    KvScatterOp,
    LinearOp,
    QuantiseRowsOp,
    RotaryOp,
)
from mhsa_compile.runtime.misfits import misfit
from mhsa_compile.spec.attention_spec import DOMAIN, LIMITS_KEY, ROWS_KEY
from mhsa_compile.spec.checks import DTYPES


def import_onnx(model: onnx.ModelProto, *, int8_weights: bool = False) -> ImportedModule:
    """The model in Relax, with calls of our operations. `int8_weights`: linears round their weights to eight bits when
    they are packed, and activations in each call.

    Raises ModelError: no attention, an operator nobody here can convert, shapes that contradict each other.
    """
    check_graph(model)
    fused = fuse(model)
    metadata = metadata_of(model)
    importer = _Importer(int8_weights, limits=json.loads(metadata.get(LIMITS_KEY, "{}")))
    with contextlib.redirect_stdout(io.StringIO()):  # TVM prints the node it fails at; the error says it again
        try:
            module = importer.from_onnx(fused.graph, opset_of(fused))
        except Exception as error:
            importer.leave_blocks()
            if isinstance(error, MhsaError):
                raise
            what = "model" if importer.node is None else title(importer.node)
            raise _refusal(what, "a node of a form that can be compiled", "one that cannot be", error) from error
    result = importer.context.result
    result.module = module
    result.in_place = {output: source for source, output in declared_in_place(model).items()}
    result.rows = json.loads(metadata.get(ROWS_KEY, "{}"))
    result.outputs = _output_dims(module["main"])
    if int8_weights and not any(type(op) is LinearOp for op in result.ops.values()):
        raise ModelError("weights", 'a model with a linear for "int8"', "one without")
    return result


def _refusal(node: str, expected: str, got: str, error: Exception) -> MhsaError:
    """The error for a node that TVM's converter or ours tripped over."""
    hint = "Fix free sizes with dims, or write what it does in other operators."
    return (
        node_error(node, expected, got, hint) if place_of_slip(error) is None else defect(node, expected, error, hint)
    )


class _Importer(ONNXGraphImporter):  # type: ignore[misc]
    """TVM's importer, with two operators of ours and the weights as parameters."""

    _nodes: dict[str, Any]  # by name, what was converted

    def __init__(self, int8_weights: bool, limits: dict[str, int]) -> None:
        super().__init__(None, None, keep_params_in_input=True)
        self._limits = limits
        self.node: onnx.NodeProto | None = None  # that is being converted
        self.context = ImportContext(self.bb, self._inputs)  # TVM's methods fill these two
        self._int8_weights = int8_weights
        self._ours = {
            FusedLinear.op_type: self._linear,
            FusedAttention.op_type: self._attention,
            FusedBlockLinear.op_type: self._block_linear,
            FusedDepthwise.op_type: self._depthwise,
            FusedGroupedConvolution.op_type: self._grouped_convolution,
            FusedPatches.op_type: self._patches,
            FusedPixelShuffle.op_type: self._pixel_shuffle,
            FusedQuantisedLinear.op_type: self._quantised_linear,
            FusedQuantiseRows.op_type: self._quantise_rows,
            FusedRotary.op_type: self._rotary,
            FusedScatter.op_type: self._scatter,
        }

    def _parse_graph_initializers(self, graph: onnx.GraphProto) -> None:
        names = {name for node in graph.node for name in reads(node)} | {value.name for value in graph.output}
        as_numbers = {name for node in all_nodes(graph) for name in _needs(node)}
        stored = _stored_weights(graph) | _packed_weights(graph)
        for tensor in graph.initializer:
            if tensor.name not in names:
                continue
            array = numpy_helper.to_array(tensor)
            is_float = array.dtype.kind == "f" or str(array.dtype) == "bfloat16"
            if (is_float or tensor.name in stored) and array.ndim and tensor.name not in as_numbers:
                parameter = f"weight_{len(self.context.result.weights)}"
                variable = self._new_var(parameter, shape=array.shape, dtype=str(array.dtype))
                self._nodes[tensor.name] = variable
                self._params[parameter] = (variable, tvm.runtime.tensor(np.empty(0)))  # the value is not needed here
                self.context.result.weights[parameter] = tensor.name
            else:
                try:
                    self._nodes[tensor.name] = _constant(array)
                except Exception as error:  # a dtype that TVM has no constants of
                    if place_of_slip(error) is not None:
                        raise
                    reader = next(node for node in graph.node if tensor.name in reads(node))
                    expected, got = "constants of a dtype that can be compiled", f"{tensor.name!r} of {array.dtype}"
                    raise node_error(reader, expected, got, "Widen them in the file: to int8, say.") from error

    def leave_blocks(self) -> None:
        """Ends what an error left open, of which TVM would write a line to stderr."""
        with contextlib.suppress(Exception):
            while True:
                self.bb._end_block()

    def _parse_value_proto(self, proto: Any) -> str:
        """TVM's name of a value, or of a node: this is where it begins with one."""
        if isinstance(proto, onnx.NodeProto):
            self.node = proto
        return str(super()._parse_value_proto(proto))

    def _sanitize_name(self, name: str) -> str:
        """An input's name as a variable's; TVM's warns of each that it changes, which nobody needs to know."""
        plain = re.sub(r"\W", "_", name, flags=re.ASCII)
        return str(self._name_supply.fresh_name(plain if plain[:1].isalpha() else f"input_{plain}"))

    def _check_for_unsupported_ops(self, graph: onnx.GraphProto) -> None:
        unknown = [node for node in all_nodes(graph) if node.op_type not in STANDARD.keys() | self._ours.keys()]
        if unknown:
            others = ", ".join(sorted({node.op_type for node in unknown}))
            hint = "Write what it does in operators that are understood."
            if unknown[0].op_type in RANDOM:
                hint = "Random numbers are not compiled: pass them as an input of the graph, or export it in eval mode."
            raise node_error(unknown[0], "operators that can be compiled", others, hint)

    def _parse_graph_input(self, graph: onnx.GraphProto) -> None:
        super()._parse_graph_input(graph)
        shapes = [value.ty.shape for value in self._inputs.values() if isinstance(value, relax.Var)]
        sizes = [size for shape in shapes if shape is not None for size in shape.values]
        symbols = {str(v.name): v for size in sizes for v in tvm.tirx.analysis.undefined_vars(size)}
        checks = CallChecks(self.bb, self.context.input_name)
        self._names = SizeNames(self.bb, checks, list(symbols.values()), self._limits)
        self._shapes = ShapeOperators(self.bb, self._names)

    def _construct_nodes(self, graph: Any) -> None:
        for node in graph.node:
            if node.op_type == "If":
                self._if(node)
            else:
                super()._construct_nodes(_Nodes([node]))
        for value in graph.output:
            self._nodes[value.name] = as_tensor(self.bb, self._nodes[value.name])

    def _if(self, node: onnx.NodeProto) -> None:
        """An If: the branch alone that is always taken, where what is known of sizes tells."""
        condition = self._nodes[node.input[0]]
        graphs = {a.name: a.g for a in node.attribute}
        if isinstance(condition, tvm.ir.GenericConst):
            self._inline(node, graphs["then_branch" if condition.value.numpy().item() else "else_branch"])
            return
        condition = as_tensor(self.bb, condition)
        if condition.ty.ndim:
            condition = self.bb.normalize(relax.op.reshape(condition, []))
        condition = self._bound(condition)
        sequences = [self._convert_subgraph(self.bb, graphs[name]) for name in ("then_branch", "else_branch")]
        result = self.bb.emit(relax.If(condition, *sequences))
        several = len(node.output) > 1
        parts = [self.bb.emit(relax.TupleGetItem(result, i)) for i in range(len(node.output))] if several else [result]
        self._nodes |= {name: self._of_known_rank(part) for name, part in zip(node.output, parts, strict=True)}

    def _inline(self, node: onnx.NodeProto, branch: onnx.GraphProto) -> None:
        """A branch in the place of its If."""
        outside = dict(self._nodes)
        self._nodes |= {t.name: _constant(numpy_helper.to_array(t)) for t in branch.initializer}
        self._construct_nodes(branch)
        results = [self._nodes[value.name] for value in branch.output]
        self._nodes = outside | dict(zip(node.output, results, strict=True))

    def _of_known_rank(self, value: Any) -> Any:
        """A value with names for dims that only a call shows."""
        if isinstance(value, relax.Tuple):
            return relax.Tuple([self._of_known_rank(part) for part in value.fields])
        kind = getattr(value, "ty", None)
        if not isinstance(kind, relax.TensorType) or kind.shape is not None or kind.ndim < 0:
            return value
        names = [self._names.variable() for _ in range(kind.ndim)]
        return self.bb.match_cast(self.bb.normalize(value), relax.TensorType(names, kind.dtype))

    def _convert_subgraph(self, bb: Any, graph: onnx.GraphProto) -> Any:
        """A branch of an If as a block of its own: what it holds runs only where it is taken."""
        for name in dict.fromkeys(name for node in graph.node for name in reads(node)):
            if name in self._nodes:  # here, for whoever reads it behind the branch
                self._nodes[name] = self._bound(self._nodes[name])
        outside, scope = dict(self._nodes), self._names.scope()
        bb._begin_binding_block()
        try:
            self._nodes |= {t.name: _constant(numpy_helper.to_array(t)) for t in graph.initializer}
            self._construct_nodes(graph)
            outputs = [self._bound(self._nodes[value.name]) for value in graph.output]
        finally:
            block = bb._end_block()
            self._nodes = outside
            self._names.restore(scope)
        return relax.SeqExpr([block], outputs[0] if len(outputs) == 1 else relax.Tuple(outputs))

    def _convert_operator(self, op_name: str, inputs: list[Any], attrs: dict[str, Any], opset: int) -> Any:
        if op_name in self._ours:
            return self._ours[op_name]([as_tensor(self.bb, value) for value in inputs], attrs)
        self._names.checks.node = title(self.node) if self.node is not None else op_name
        for i, value in enumerate(inputs):
            if isinstance(value, relax.TupleGetItem):  # of a Split, which TVM's arithmetic takes for a constant
                inputs[i] = self.bb.emit(value)
        try:
            sizes = fold_sizes(op_name, inputs, attrs)
            if sizes is not None:
                return as_tensor(self.bb, sizes) if is_known(sizes) else sizes
            computed = self._shapes.convert(op_name, list(inputs), attrs)
            if computed is not None:
                if op_name == "Expand":
                    shapes = [shape for value in (inputs[0], computed) if (shape := dims_of(value)) is not None]
                    self._note(self._names.checks.node, shapes, Demand(broadcast=[shapes]))
                return computed
            inputs[:] = [as_tensor(self.bb, value) for value in inputs]
            self._agree(op_name, inputs, attrs)
            inputs[:] = agreeing(self.bb, self._names, op_name, inputs, attrs)
            inputs[:], narrow = float32_sums.widened(self.bb, op_name, list(inputs))
            if op_name in GATES:
                converted = RecurrentImport(self.context, op_name, list(inputs), attrs).results()
            elif op_name == "DynamicQuantizeLinear":
                converted = quantise(self.context, inputs[0])
            else:
                converted = CONVERSIONS[op_name](self.bb, list(inputs), attrs) if op_name in CONVERSIONS else None
            if converted is None:
                converted = super()._convert_operator(op_name, inputs, attrs, opset)
            else:
                converted = self.bb.normalize(converted)
            if narrow is not None:
                converted = float32_sums.narrowed(self.bb, op_name, converted, narrow)
            return self._of_known_rank(converted)
        except MhsaError:
            raise
        except Exception as error:  # whatever TVM's converter trips over
            got = "; ".join(map(_description, inputs)) or "one without inputs"
            expected = "inputs and attributes of a form that can be compiled"
            raise _refusal(self._names.checks.node, expected, got, error) from error

    def _agree(self, op_name: str, inputs: list[Any], attrs: dict[str, Any]) -> None:
        """Notes what a node asks of the sizes of its operands, and holds calls to what no other code does."""
        shapes = [None if value is None else dims_of(value) for value in inputs]
        self._note(self._names.checks.node, shapes, demand(op_name, shapes, attrs))
        hold(self._names, op_name, shapes, attrs)

    def _note(self, node: str, shapes: Sequence[Any], demand: Demand) -> None:
        row = agreement(self._names, node, shapes, demand)
        if row is None:
            return
        if (refusal := misfit([row], {})) is not None:
            hint = "Correct the model: no call can have other shapes there."
            raise node_error(node, refusal.expected, refusal.got, hint)
        self.context.result.agreements.append(row)

    def _bound(self, value: Any) -> Any:
        """A value that was computed, as a variable."""
        return self.bb.emit(value) if isinstance(value, relax.Call) else value

    def _linear(self, inputs: list[Any], attrs: dict[str, Any]) -> Any:
        fused = FusedLinear.from_attributes(attrs)
        inputs[0] = self._of_width(inputs[0], dims(inputs[1]), fused.transposed[0], attrs)
        rows = dims(inputs[0])
        op = LinearOp(
            rows=tuple(self.context.dim(d) for d in rows[:-1]),
            in_features=int(rows[-1]),
            widths=fused.widths,
            biased=fused.biased,
            transposed=fused.transposed,
            dtype=str(inputs[0].ty.dtype),  # type: ignore[arg-type]
            int8_weights=self._int8_weights,
            padding=fused.padding,
        )
        return self.context.call(op, inputs, [*rows[:-1], op.pitch])

    def _of_width(self, x: Any, weight: Sequence[Any], transposed: bool, attrs: dict[str, Any]) -> Any:
        """x as rows of as many features as a weight of these sizes takes, to which calls are held."""
        in_features = int(weight[0 if transposed else 1])
        self._note(f"linear node {_name(attrs)!r}", [dims(x), weight], Demand([(dims(x)[-1], in_features)]))
        return of_width(self.bb, x, in_features)

    def _quantised_linear(self, inputs: list[Any], attrs: dict[str, Any]) -> Any:
        fused = FusedQuantisedLinear.from_attributes(attrs)
        numbers, weights, *others = fused.parted(inputs)
        numbers[0] = self._of_width(numbers[0], dims(weights[0]), fused.transposed[0], attrs)
        return quantised_linear(self.context, fused, [numbers, weights, *others])

    def _block_linear(self, inputs: list[Any], attrs: dict[str, Any]) -> Any:
        fused = FusedBlockLinear.from_attributes(attrs)
        (x,), *others = fused.parted(inputs)
        x = self._of_width(x, (fused.widths[0], fused.in_features), False, attrs)
        return block_linear(self.context, fused, [[x], *others])

    def _attention(self, inputs: list[Any], attrs: dict[str, Any]) -> Any:
        attention = AttentionImport(self.context, _name(attrs), FusedAttention.from_attributes(attrs), inputs)
        self._note(attention.node, *attention.demand())
        return attention.results()

    def _patches(self, inputs: list[Any], attrs: dict[str, Any]) -> Any:
        return patches(self.bb, FusedPatches.from_attributes(attrs), *inputs)

    def _depthwise(self, inputs: list[Any], attrs: dict[str, Any]) -> Any:
        return depthwise(self.bb, FusedDepthwise.from_attributes(attrs), *inputs)

    def _grouped_convolution(self, inputs: list[Any], attrs: dict[str, Any]) -> Any:
        return grouped_convolution(self.bb, FusedGroupedConvolution.from_attributes(attrs), *inputs)

    def _pixel_shuffle(self, inputs: list[Any], attrs: dict[str, Any]) -> Any:
        fused = FusedPixelShuffle.from_attributes(attrs)
        count = len(fused.phases)
        return pixel_shuffle(self.bb, fused, inputs[:count], *inputs[count:])

    def _rotary(self, inputs: list[Any], attrs: dict[str, Any]) -> Any:
        fused, x = FusedRotary.from_attributes(attrs), dims(inputs[0])
        heads, head_dim = fused.num_heads, fused.head_dim
        length = x[1 if fused.x.layout == "rows" else 2]
        for i in (1, 2):
            table = dims(inputs[i])
            if len(table) == 4:  # (B or 1, 1, L, R), as they are broadcast over the heads, or L first
                inputs[i] = self.bb.emit(relax.op.reshape(inputs[i], relax.ShapeExpr([table[0], length, table[3]])))
        op = RotaryOp(
            batch=self.context.dim(x[0]),
            length=self.context.dim(length),
            num_heads=heads,
            head_dim=head_dim,
            rotary_dim=fused.rotary_dim,
            interleaved=fused.interleaved,
            max_positions=self.context.dim(dims(inputs[1])[0]) if len(inputs) > 3 else None,
            x=fused.x,
            output=HeadLayout(0, fused.output_layout, heads * head_dim),
            dtype=str(inputs[0].ty.dtype),  # type: ignore[arg-type]
            shared_angles=fused.shared_angles,
            whole_angles=fused.whole_angles,
            positions_name=fused.positions_name,
        )
        shape = [x[0], length, heads * head_dim] if fused.output_layout == "rows" else [x[0], heads, length, head_dim]
        return self.context.call(op, inputs, shape)

    def _quantise_rows(self, inputs: list[Any], attrs: dict[str, Any]) -> Any:
        fused, x = FusedQuantiseRows.from_attributes(attrs), dims(inputs[0])
        length = x[1 if fused.x.layout == "rows" else 2]
        rows = [x[0], fused.num_heads, length]
        op = QuantiseRowsOp(
            batch=self.context.dim(x[0]),
            length=self.context.dim(length),
            num_heads=fused.num_heads,
            head_dim=fused.head_dim,
            x=fused.x,
            dtype=str(inputs[0].ty.dtype),  # type: ignore[arg-type]
        )
        types = [relax.TensorType([*rows, fused.head_dim], "int8"), relax.TensorType(rows, "float32")]
        return relax.Tuple(self.context.call_for_several(op, inputs, types))

    def _scatter(self, inputs: list[Any], attrs: dict[str, Any]) -> Any:
        fused = FusedScatter.from_attributes(attrs)
        cache, update = dims(inputs[0]), dims(inputs[1])
        op = KvScatterOp(
            cache=tuple(map(self.context.dim, cache)),
            axis=fused.axis,
            length=self.context.dim(update[fused.axis if fused.update is None else 1]),
            update=fused.update,
            circular=fused.circular,
            indexed=len(inputs) > 2,
            in_place=fused.in_place,
            dtype=str(inputs[0].ty.dtype),
            update_dtype=_float(inputs[1].ty.dtype),
            indices_name=fused.indices_name,
            update_name=fused.update_name,
        )
        return self.context.call(op, inputs, cache)


_SHOWN = 8  # so many elements of a constant a message has room for


class _Nodes(NamedTuple):
    """Some nodes of a graph, as TVM's importer reads them."""

    node: list[onnx.NodeProto]
    output: tuple[()] = ()


def _packed_weights(graph: onnx.GraphProto) -> set[str]:
    """Many bytes that are made floats, or whose rows are taken, and nothing else: weights of few bits."""
    many = {tensor.name for tensor in graph.initializer if is_many_bytes(tensor)}
    others = (name for node in all_nodes(graph) for name in node.input[node.op_type in _UNPACKS :])
    return many - set(others) - {value.name for value in graph.output}


_UNPACKS = ("Cast", "Gather")


def _stored_weights(graph: onnx.GraphProto) -> set[str]:
    """The weights of linears of bytes and of blocks, which are bound as those of floats are, whatever views of them the
    linears take."""
    views = {node.output[0]: node for node in all_nodes(graph) if node.op_type in _VIEWS}
    stored = set[str]()
    for node in all_nodes(graph):
        for name in _weights_of(node):
            while name in views:
                name = views[name].input[0]
            stored.add(name)
    return stored


_VIEWS = ("Reshape", "Split", "Squeeze", "Transpose")


def _weights_of(node: onnx.NodeProto) -> list[str]:
    """The weights of a linear of bytes or of blocks; none of another node."""
    if node.op_type == FusedBlockLinear.op_type:
        _, numbers, _, zeros, _ = FusedBlockLinear.from_node(node).parted(node.input)
        return [*numbers, *zeros]
    if node.op_type != FusedQuantisedLinear.op_type:
        return []
    _, weights, *_ = FusedQuantisedLinear.from_node(node).parted(node.input)
    return weights


def _needs(node: onnx.NodeProto) -> Iterator[str]:
    """The inputs of a node whose values its converter needs."""
    row = STANDARD.get(node.op_type) if node.domain != DOMAIN else None
    yield from (name for place, name in enumerate(node.input) if row is not None and place in row.constants)


def _float(dtype: Any) -> DType | None:
    """A dtype of floats, in which rows may come that a cache stores in another."""
    return str(dtype) if str(dtype) in DTYPES else None  # type: ignore[return-value]


def _name(attrs: dict[str, Any]) -> str:
    """The name of a node, which TVM puts beside its attributes."""
    return str(attrs["tvm_custom"]["name"])


def _description(value: Any) -> str:
    """A node's input in a message: its kind and its dims."""
    if value is None:
        return "none"
    if isinstance(value, SizeValues):
        return f"sizes [{_dims_text(value.entries.reshape(-1))}]"
    kind = value.ty
    if not isinstance(kind, relax.TensorType):
        return "a list of tensors"
    sizes = f"({_dims_text(kind.shape.values)})" if isinstance(kind.shape, relax.ShapeExpr) else "any shape"
    if isinstance(value, tvm.ir.GenericConst):
        array = value.value.numpy()
        if array.dtype.kind in "iub" and array.size <= _SHOWN:
            return f"a constant of {kind.dtype}, {array.tolist()}"
        return f"a constant of {kind.dtype} {sizes}"
    return f"{kind.dtype} {sizes}"


def _dims_text(dims: Any) -> str:
    return ", ".join(str(dim_of(dim)) for dim in dims)


def _constant(array: Any) -> Any:
    return relax.const(array, str(array.dtype))  # else scalars become int32


def _output_dims(main: Any) -> list[tuple[Dim, ...] | None]:
    fields = main.ret_ty.fields if isinstance(main.ret_ty, relax.TupleType) else [main.ret_ty]
    return [None if kind.shape is None else tuple(map(dim_of, kind.shape.values)) for kind in fields]
