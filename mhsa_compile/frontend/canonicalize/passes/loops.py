"""Scan and Loop over a number of steps that is known: the body, once for each step.

    Scan(s, x) of 3 steps, o, t = body(s, x[i])    ->    s1, t0 = body(s, x[0]); s2, t1 = body(s1, x[1]); ...

The body reads what is around it where it stands. What depends on a call's numbers alone, or would come to more nodes
than MOST, stays a loop, which nobody here compiles: `refuse` says so by its name.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import onnx
from onnx import numpy_helper

from mhsa_compile.frontend.branch_graphs import rename
from mhsa_compile.frontend.canonicalize.rewriting.constant_values import KnownGraph
from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.canonicalize.rewriting.shape_propagation import propagate_shapes
from mhsa_compile.frontend.onnx_graph import GraphDim, all_nodes, attributes, constant_value, is_standard, node_error

MOST = 2048
"""Nodes that one loop may come to."""
_DEPTH = 8  # of loops in loops
_LOOPS = ("Scan", "Loop")
_AXES_AS_INPUT = 13  # of Split, Squeeze and Unsqueeze
_CONSTANTS = 4  # the first version of the format in which an initializer need not be an input
_BATCHED = 8  # the only opset in which a Scan has a batch, and may have lengths


def rewrite(model: onnx.ModelProto, limits: dict[str, int]) -> onnx.ModelProto:
    """The model with the loops of its graph written out, and those in their bodies; `limits` as `propagate_shapes` has
    it."""
    for _ in range(_DEPTH):
        if not any(is_standard(node, *_LOOPS) for node in model.graph.node):
            break
        if (written := _once(model)) is model:  # what the graph computes of sizes may tell how many steps there are
            settled = propagate_shapes(model, limits)
            if settled is model or (written := _once(settled)) is settled:
                break
        model = written
    return model


def refuse(model: onnx.ModelProto) -> None:
    """Raises ModelError where a loop is left."""
    for node in all_nodes(model.graph):
        if is_standard(node, *_LOOPS):
            expected = f"a {node.op_type} of steps whose number is known, of at most {MOST} nodes in all"
            hint = "Fix the length that it runs over with dims, or write what it does in operators without a loop."
            raise node_error(node, expected, "one whose steps only a call tells, or too many", hint)


def _once(model: onnx.ModelProto) -> onnx.ModelProto:
    rewriter = Rewriter(model)
    for node in rewriter.graph.nodes:
        if is_standard(node, *_LOOPS):
            write = _write_scan if node.op_type == "Scan" else _write_loop
            if write(rewriter, node):
                rewriter.place(node)
            else:
                rewriter.drop()
    result = rewriter.finished()
    if result is not model:
        result.ir_version = max(result.ir_version, _CONSTANTS)
    return result


def _write_scan(rewriter: Rewriter, node: onnx.NodeProto) -> bool:
    """Writes a Scan's steps; False where their number is not known."""
    attrs, batched = attributes(node), rewriter.graph.opset == _BATCHED
    body, count = attrs["body"], attrs["num_scan_inputs"]
    if batched and node.input[0]:
        return False
    inputs = list(node.input[1:] if batched else node.input)
    states, scanned = inputs[: len(inputs) - count], inputs[len(inputs) - count :]
    axes = attrs.get("scan_input_axes", [0] * count)
    backwards = attrs.get("directions" if batched else "scan_input_directions", [0] * count)
    outputs = len(body.output) - len(states)  # a node may leave its last ones out
    out_axes, out_backwards = (attrs.get(f"scan_output_{word}", [0] * outputs) for word in ("axes", "directions"))
    shapes = [rewriter.graph.shape(name) for name in scanned]
    if any(shape is None for shape in shapes):
        return False
    batch = _size([shape[0] for shape in shapes if shape]) if batched else 1
    if batched:
        shapes = [shape[1:] for shape in shapes if shape is not None]
    length = _size([shape[axis % len(shape)] for shape, axis in zip(shapes, axes, strict=True) if shape])
    if batch is None or length is None or not _is_short(body, length * batch):
        return False
    axes = [axis % len(shape) for shape, axis in zip(shapes, axes, strict=True) if shape]

    def run(states: Sequence[str], scanned: Sequence[str]) -> tuple[list[str], list[str]]:
        steps = _Steps(rewriter, node, body)
        parts = [_parts(rewriter, name, length, axis) for name, axis in zip(scanned, axes, strict=True)]
        for step in range(length):
            own = [rows[length - 1 - step if way else step] for rows, way in zip(parts, backwards, strict=True)]
            states = steps.run([*states, *own], len(states))
        stacked = [
            _stacked(rewriter, rows[::-1] if way else rows, axis)
            for rows, way, axis in zip(steps.rows, out_backwards, out_axes, strict=True)
        ]
        return list(states), stacked

    if not batched:
        last, stacked = run(states, scanned)
    else:
        of_states, of_scanned = ([_parts(rewriter, name, batch, 0) for name in names] for names in (states, scanned))
        runs = [run([rows[b] for rows in of_states], [rows[b] for rows in of_scanned]) for b in range(batch)]
        last, stacked = (
            [_stacked(rewriter, list(rows), 0) for rows in zip(*(one[i] for one in runs), strict=True)] for i in (0, 1)
        )
    _give(rewriter, node, [*last, *stacked])
    return True


def _write_loop(rewriter: Rewriter, node: onnx.NodeProto) -> bool:
    """Writes a Loop's steps; False where their number is not known, or a step may be the last for another reason."""
    graph, body = rewriter.graph, attributes(node)["body"]
    steps, condition, *states = [*node.input, "", ""][: max(2, len(node.input))]
    count = graph.scalar(steps) if steps else None
    if count is None or not (not condition or (graph.scalar(condition) and _goes_on(graph, body))):
        return False
    length = min(int(count), MOST + 1)
    if not _is_short(body, length):
        return False
    loop, true = _Steps(rewriter, node, body), rewriter.constant(True, "bool")
    for step in range(length):
        _, *states = loop.run([rewriter.constant(step, "int64"), true, *states], 1 + len(states))
    _give(rewriter, node, [*states, *(_stacked(rewriter, rows, 0) for rows in loop.rows)])
    return True


def _size(sizes: Sequence[GraphDim]) -> int | None:
    """The number that all of them are; None where they are none, or not one."""
    each = set(sizes)
    size = each.pop() if len(each) == 1 else None
    return size if isinstance(size, int) else None


def _is_short(body: onnx.GraphProto, steps: int) -> bool:
    """Whether there are steps, and not too many: of none, nobody says how large what they stack would be."""
    return 0 < steps * (len(body.node) + len(body.input) + len(body.output)) <= MOST


def _goes_on(graph: KnownGraph, body: onnx.GraphProto) -> bool:
    """Whether the condition that a step gives is the one that it got, or true."""
    makers = {name: node for node in body.node for name in node.output}
    name = body.output[0].name
    while name in makers and makers[name].op_type == "Identity":
        name = makers[name].input[0]
    if name == body.input[1].name:
        return True
    value = constant_value(makers[name]) if name in makers and makers[name].op_type == "Constant" else None
    value = next((numpy_helper.to_array(t) for t in body.initializer if t.name == name), value)
    return bool(graph.scalar(name)) if value is None and name not in makers else bool(value)


class _Steps:
    """The steps of one loop; `rows` are what each of its stacked outputs is stacked from."""

    def __init__(self, rewriter: Rewriter, node: onnx.NodeProto, body: onnx.GraphProto) -> None:
        self._rewriter, self._body, self._title = rewriter, body, node.name or node.output[0]
        self._constants: dict[str, str] = {}
        for tensor in body.initializer:
            self._constants[tensor.name] = rewriter.constant(numpy_helper.to_array(tensor), hint=tensor.name)
        self._count, self.rows = 0, list[list[str]]()

    def run(self, values: Sequence[str], states: int) -> list[str]:
        """Writes a step that gets these values; gives its first `states` outputs."""
        step = copy.deepcopy(self._body)
        prefix = f"{self._title}/{self._count}"
        names = dict(zip((value.name for value in step.input), values, strict=True)) | self._constants
        inner = [name for node in step.node for name in node.output if name]
        names |= {name: self._rewriter.fresh(f"{prefix}/{name}") for name in inner}
        rename(step, names)
        for node in step.node:
            node.name = self._rewriter.fresh(f"{prefix}/{node.name or node.op_type}")
            self._rewriter.append(node)
        outputs = [value.name for value in step.output]
        if not self.rows:
            self.rows = [[] for _ in outputs[states:]]
        for rows, name in zip(self.rows, outputs[states:], strict=True):
            rows.append(name)
        self._count += 1
        return outputs[:states]


def _parts(rewriter: Rewriter, name: str, count: int, axis: int) -> list[str]:
    """The `count` parts of a value along an axis, without it."""
    names = [rewriter.fresh(f"{name}/{i}") for i in range(count)]
    if rewriter.graph.opset < _AXES_AS_INPUT:
        rewriter.nodes("Split", (name,), names, axis=axis, split=[1] * count)
        return [rewriter.node("Squeeze", part, axes=[axis]) for part in names]
    rewriter.nodes("Split", (name, rewriter.constant([1] * count, "int64")), names, axis=axis)
    place = rewriter.constant([axis], "int64")
    return [rewriter.node("Squeeze", part, place) for part in names]


def _stacked(rewriter: Rewriter, rows: Sequence[str], axis: int) -> str:
    """Values as parts along a new axis."""
    if rewriter.graph.opset < _AXES_AS_INPUT:
        wide = [rewriter.node("Unsqueeze", row, axes=[axis]) for row in rows]
    else:
        place = rewriter.constant([axis], "int64")
        wide = [rewriter.node("Unsqueeze", row, place) for row in rows]
    return rewriter.node("Concat", *wide, axis=axis)


def _give(rewriter: Rewriter, node: onnx.NodeProto, values: Sequence[Any]) -> None:
    """The values under the names of a node's outputs."""
    for value, name in zip(values, node.output, strict=False):
        if name:
            rewriter.node("Identity", value, output=name)
