"""Random small graphs of standard operators, compiled and held against onnx's reference evaluator.

python -m fuzz.graphs [--graphs 5000] [--seed 0] [--workers 2]      # exit code 1 on a wrong value or a raw error

A graph is right, refused by an error of ours, not judged (no evaluator takes it), wrong, or raw: another library's
error, a "defect of ours", a crash of its process. What is wrong or raw is printed with its seed; `--seed N --graphs 1`
is it alone, and prints the graph.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import mhsa_compile as mhsa
from mhsa_compile.errors import BuildError, MhsaError, MismatchError

CODES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "int64": TensorProto.INT64,
         "int32": TensorProto.INT32, "bool": TensorProto.BOOL}  # fmt: skip
OPSETS = (13, 17, 18, 20, 21)
UNARY = ("Abs", "Ceil", "Cos", "Erf", "Exp", "Floor", "Identity", "Neg", "Relu", "Round", "Sigmoid", "Sign", "Sin",
         "Softplus", "Softsign", "Tanh")  # fmt: skip
BATCHES = 7  # the size of the free dim while a graph is drawn; it is free where nothing says otherwise


@dataclass(frozen=True)
class Value:
    """A value of the graph: axis 0 is the free one, where `free`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    free: bool


class Drawing:
    """One graph as it is drawn: values so far, nodes, constants."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.opset = int(self.rng.choice(OPSETS))
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.values: list[Value] = []

    def one_of(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def perhaps(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def constant(self, array: np.ndarray) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(self, op: str, inputs: list[str], dtype: str, shape: tuple[int, ...], free: bool, **said: Any) -> None:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=f"n{len(self.nodes)}", **said))
        self.values.append(Value(name, dtype, shape, free))

    def value(self, *dtypes: str, rank: int = 0) -> Value | None:
        fit = [v for v in self.values if v.dtype in dtypes and len(v.shape) >= rank]
        return fit[-1 - min(len(fit) - 1, int(self.rng.geometric(0.4)) - 1)] if fit else None

    def axis(self, value: Value, least: int = 0) -> int:
        axis = int(self.rng.integers(least, len(value.shape)))
        return axis - len(value.shape) if self.perhaps(0.5) else axis


Maker = Callable[[Drawing], None]
"""Adds a node, or nothing where no value fits."""
FLOATS = ("float32", "float16")


def unary(d: Drawing) -> None:
    if v := d.value(*FLOATS):
        d.node(d.one_of(*UNARY), [v.name], v.dtype, v.shape, v.free)


def activation(d: Drawing) -> None:
    if v := d.value(*FLOATS):
        op, said = d.one_of(("LeakyRelu", {"alpha": 0.3}), ("Elu", {"alpha": 0.7}), ("Selu", {"gamma": 1.3}),
                            ("HardSigmoid", {"alpha": 0.4, "beta": 0.3}), ("ThresholdedRelu", {"alpha": 0.4}),
                            ("Celu", {"alpha": 0.8}), ("LeakyRelu", {}), ("HardSigmoid", {}))  # fmt: skip
        d.node(op, [v.name], v.dtype, v.shape, v.free, **said)


def binary(d: Drawing) -> None:
    if v := d.value("float32", "float16", "int64", "int32"):
        other = v.name
        if d.perhaps(0.7):
            shape = [1 if i == 0 or d.perhaps(0.4) else n for i, n in enumerate(v.shape)]
            array = d.rng.integers(1, 5, shape[d.one_of(0, 1) :]) if v.dtype[0] == "i" else d.rng.standard_normal(shape)
            other = d.constant(array.astype(v.dtype))
        names = [v.name, other]
        op = d.one_of("Add", "Sub", "Mul", "Max", "Min", "Div" if v.dtype[0] == "f" else "Add")
        d.node(op, names if d.perhaps(0.7) or op == "Div" else names[::-1], v.dtype, v.shape, v.free)


def compared(d: Drawing) -> None:
    if v := d.value(*FLOATS):
        edge = d.constant(np.asarray(d.rng.standard_normal(), v.dtype))
        d.node(d.one_of("Less", "Greater", "LessOrEqual", "GreaterOrEqual"), [v.name, edge], "bool", v.shape, v.free)


def where(d: Drawing) -> None:
    if (v := d.value(*FLOATS)) and (seen := d.value("bool")) and seen.shape == v.shape:
        d.node(
            "Where", [seen.name, v.name, d.constant(np.asarray(d.one_of(0, 2.5), v.dtype))], v.dtype, v.shape, v.free
        )


def cast(d: Drawing) -> None:
    if v := d.value(*CODES):
        to = d.one_of("float32", "int64", "int32", "bool") if v.dtype != "bool" else d.one_of("float32", "int64")
        d.node("Cast", [v.name], to, v.shape, v.free, to=CODES[to])


def clip(d: Drawing) -> None:
    if v := d.value(*FLOATS):
        low, high = (d.constant(np.asarray(x, v.dtype)) for x in (-0.6, 0.8))
        d.node("Clip", d.one_of([v.name, low, high], [v.name, "", high], [v.name, low]), v.dtype, v.shape, v.free)


def reduced(d: Drawing) -> None:
    if v := d.value("float32", rank=2):
        op = d.one_of("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare")
        axis, keep = d.axis(v, 1), d.one_of(0, 1)
        place = axis % len(v.shape)
        shape = tuple(1 if i == place else n for i, n in enumerate(v.shape) if keep or i != place)
        if op == "ReduceSum" or d.opset >= 18:
            d.node(op, [v.name, d.constant(np.array([axis]))], v.dtype, shape, v.free, keepdims=keep)
        else:
            d.node(op, [v.name], v.dtype, shape, v.free, keepdims=keep, axes=[axis])


def softmax(d: Drawing) -> None:
    if v := d.value("float32", rank=2):
        d.node(d.one_of("Softmax", "LogSoftmax", "Softmax"), [v.name], v.dtype, v.shape, v.free,
               **({"axis": d.axis(v, 1)} if d.perhaps(0.8) else {}))  # fmt: skip


def product(d: Drawing) -> None:
    if v := d.value("float32", rank=2):
        width = d.one_of(3, 8, 11)
        weight = d.constant((d.rng.standard_normal((v.shape[-1], width)) * 0.4).astype("f4"))
        if len(v.shape) == 2 and d.perhaps(0.5):
            turned = d.constant((d.rng.standard_normal((width, v.shape[-1])) * 0.4).astype("f4"))
            bias = d.constant(d.rng.standard_normal(width).astype("f4"))
            said = {"transB": 1, "alpha": d.one_of(1.0, 0.5), "beta": d.one_of(1.0, 2.0)}
            d.node("Gemm", [v.name, turned, bias], v.dtype, (*v.shape[:-1], width), v.free, **said)
        else:
            d.node("MatMul", [v.name, weight], v.dtype, (*v.shape[:-1], width), v.free)


def moved(d: Drawing) -> None:
    if v := d.value(*CODES, rank=3):
        order = [0, *(1 + d.rng.permutation(len(v.shape) - 1)).tolist()]
        d.node("Transpose", [v.name], v.dtype, tuple(v.shape[i] for i in order), v.free, perm=order)


def sliced(d: Drawing) -> None:
    if v := d.value("float32", "int64", rank=2):
        axis = d.axis(v, 1)
        size, step = v.shape[axis], d.one_of(1, 2, -1, -2)
        begin, end = (1, size + 5) if step > 0 else (d.one_of(-1, size + 3), -size - 2)
        count = len(range(size)[begin:end:step]) if step > 0 else len(range(size)[::step])
        if count:
            bounds = [d.constant(np.array([n])) for n in (begin, end, axis, step)]
            shape = tuple(count if i == axis % len(v.shape) else n for i, n in enumerate(v.shape))
            d.node("Slice", [v.name, *bounds], v.dtype, shape, v.free)


def gathered(d: Drawing) -> None:
    if v := d.value("float32", "int64", rank=2):
        axis = d.axis(v, 1)
        size, place = v.shape[axis], axis % len(v.shape)
        rows = d.rng.integers(-size, size, d.one_of((), (2,), (2, 3)))
        shape = (*v.shape[:place], *rows.shape, *v.shape[place + 1 :])
        d.node("Gather", [v.name, d.constant(rows)], v.dtype, shape, v.free, axis=axis)


def padded(d: Drawing) -> None:
    if v := d.value("float32", rank=2):
        widths = np.zeros((2, len(v.shape)), np.int64)
        widths[:, -1] = d.rng.integers(0, 2, 2)
        mode, fill = d.one_of("constant", "reflect", "edge"), [d.constant(np.float32(1.5))]
        if mode == "reflect" and v.shape[-1] < 2:
            return
        shape = (*v.shape[:-1], int(v.shape[-1] + widths.sum()))
        inputs = [v.name, d.constant(widths.ravel()), *(fill if mode == "constant" else [])]
        d.node("Pad", inputs, v.dtype, shape, v.free, mode=mode)


def joined(d: Drawing) -> None:
    if v := d.value("float32", "int64", rank=2):
        axis = d.axis(v, 1)
        shape = tuple(2 * n if i == axis % len(v.shape) else n for i, n in enumerate(v.shape))
        d.node("Concat", [v.name, v.name], v.dtype, shape, v.free, axis=axis)


def summed_up(d: Drawing) -> None:
    if v := d.value("float32", rank=2):
        said = {"exclusive": d.one_of(0, 1), "reverse": d.one_of(0, 1)}
        d.node("CumSum", [v.name, d.constant(np.asarray(d.axis(v, 1)))], v.dtype, v.shape, v.free, **said)


def largest(d: Drawing) -> None:
    if v := d.value("float32", rank=2):
        said = {"axis": (axis := d.axis(v, 1)), "keepdims": 1, "select_last_index": d.one_of(0, 1)}
        shape = tuple(1 if i == axis % len(v.shape) else n for i, n in enumerate(v.shape))
        d.node(d.one_of("ArgMax", "ArgMin"), [v.name], "int64", shape, v.free, **said)


def normalised(d: Drawing) -> None:
    if d.opset >= 17 and (v := d.value("float32", rank=2)):
        scale, bias = (d.constant(d.rng.standard_normal(v.shape[-1]).astype("f4")) for _ in range(2))
        said = {"epsilon": d.one_of(1e-5, 0.1), **({"axis": -1} if d.perhaps(0.5) else {})}
        d.node("LayerNormalization", [v.name, scale, bias], v.dtype, v.shape, v.free, **said)


def reshaped(d: Drawing) -> None:
    if v := d.value(*CODES, rank=2):
        rest = int(np.prod(v.shape[1:]))
        if rest % 2 == 0:
            d.node("Reshape", [v.name, d.constant(np.array([0, 2, -1]))], v.dtype, (v.shape[0], 2, rest // 2), v.free)
        else:
            d.node("Flatten", [v.name], v.dtype, (v.shape[0], rest), v.free)


def attention(d: Drawing) -> None:
    if (v := d.value("float32", rank=3)) and len(v.shape) == 3 and v.shape[-1] <= 32:
        turned = f"t{len(d.nodes)}"
        d.nodes.append(helper.make_node("Transpose", [v.name], [turned], perm=[0, 2, 1]))
        d.node("MatMul", [v.name, turned], "float32", (v.shape[0], v.shape[1], v.shape[1]), v.free)
        d.node("Softmax", [d.values[-1].name], "float32", d.values[-1].shape, v.free, axis=-1)
        d.node("MatMul", [d.values[-1].name, v.name], "float32", v.shape, v.free)


def vendors(d: Drawing) -> None:
    """An operator of nobody's domain under a standard name: to be refused."""
    if (v := d.value("float32", rank=2)) and d.perhaps(0.15):
        d.node(d.one_of("Softmax", "Gelu", "Relu"), [v.name], v.dtype, v.shape, v.free, domain="org.example")


MAKERS: tuple[Maker, ...] = (unary, activation, binary, binary, compared, where, cast, clip, reduced, softmax, product,
                             product, moved, sliced, gathered, padded, joined, summed_up, largest, normalised,
                             reshaped, attention, vendors)  # fmt: skip


def drawn(seed: int) -> onnx.ModelProto:
    """The graph of a seed."""
    d = Drawing(seed)
    free = d.perhaps(0.7)
    rank, dtype = d.one_of(2, 3, 3, 4), d.one_of("float32", "float32", "float32", "float16", "int64")
    d.values.append(Value("x", dtype, (BATCHES, *(d.one_of(1, 2, 5, 6, 8) for _ in range(rank - 1))), free))
    d.values.append(Value("w", "float32", (BATCHES, d.one_of(3, 6), 8), free))
    inputs = [_info(value, "N") for value in d.values]
    for _ in range(int(d.rng.integers(2, 9))):
        d.one_of(*MAKERS)(d)
    read = {name for node in d.nodes for name in node.input}
    made = [value for value in d.values[2:] if value.name not in read] or d.values[-1:]
    if not d.nodes:
        unary(d)
        d.nodes = d.nodes or [helper.make_node("Identity", ["x"], ["v0"])]
        made = [Value("v0", d.values[0].dtype, d.values[0].shape, free)]
    nodes, functions = d.nodes, []
    imports = [helper.make_opsetid("", d.opset)]
    if any(node.domain == "org.example" for node in nodes):
        imports.append(helper.make_opsetid("org.example", 1))
    elif d.perhaps(0.2):  # one node becomes a call of a function that has it, under the name of another operator
        place = int(d.rng.integers(len(nodes)))
        nodes, functions = _with_function(nodes, place, imports)
    graph = helper.make_graph(nodes, "g", inputs, [_info(value, "M") for value in made], d.constants)
    return helper.make_model(graph, opset_imports=imports, ir_version=8, functions=functions)


def _with_function(
    nodes: list[onnx.NodeProto], place: int, imports: list[onnx.OperatorSetIdProto]
) -> tuple[list[onnx.NodeProto], list[onnx.FunctionProto]]:
    node = nodes[place]
    names = [f"i{i}" if name else "" for i, name in enumerate(node.input)]
    body = onnx.NodeProto()
    body.CopyFrom(node)
    del body.input[:], body.output[:]
    body.input.extend(names)
    body.output.append("result")
    function = helper.make_function("local", "Softmax", [n or "none" for n in names], ["result"], [body], imports[:1])
    call = helper.make_node("Softmax", list(node.input), list(node.output), domain="local", name=node.name)
    imports.append(helper.make_opsetid("local", 1))
    return [*nodes[:place], call, *nodes[place + 1 :]], [function]


def _info(value: Value, symbol: str) -> onnx.ValueInfoProto:
    first: int | str | None = (symbol if symbol == "N" else None) if value.free else value.shape[0]
    return helper.make_tensor_value_info(value.name, CODES[value.dtype], [first, *value.shape[1:]])


def outcome(seed: int) -> tuple[int, str, str]:
    """(seed, what became of its graph, why)."""
    model = drawn(seed)
    try:
        check = mhsa.compile(model, check=True, cache=False, without_attention="accept").manifest.check
    except MismatchError as error:
        return seed, "wrong", str(error)
    except BuildError as error:
        return seed, "raw", str(error)
    except MhsaError as error:
        return seed, "refused", str(error)
    except Exception as error:  # what this program looks for
        return seed, "raw", f"{type(error).__name__}: {error}"
    if check is None or not check.against:
        return seed, "not judged", "" if check is None else check.note
    return seed, "right", ""


def outcomes(seeds: range, workers: int) -> Iterator[tuple[int, str, str]]:
    """Those of all seeds, in processes that a crash may end: its seeds are then run one by one."""
    block = 40
    for first in range(seeds.start, seeds.stop, block):
        part = range(first, min(first + block, seeds.stop))
        try:
            with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
                yield from list(pool.map(outcome, part))
        except BrokenProcessPool:
            for seed in part:
                try:
                    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                        yield pool.submit(outcome, seed).result()
                except BrokenProcessPool:
                    yield seed, "raw", "its process ended"


def main() -> int:
    parser = argparse.ArgumentParser(description="Random small graphs against onnx's reference evaluator.")
    parser.add_argument("--graphs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for seed, kind, why in outcomes(range(options.seed, options.seed + options.graphs), options.workers):
        counts[kind] += 1
        if kind in ("wrong", "raw") or options.graphs == 1:
            print(f"seed {seed}: {kind}: {' '.join(why.split())[:400]}", flush=True)
    if options.graphs == 1:
        print(onnx.printer.to_text(drawn(options.seed)))
    kinds = ("right", "refused", "not judged", "wrong", "raw")
    summary = ", ".join(f"{counts[kind]} {kind}" for kind in kinds)
    print(f"{options.graphs} graphs from seed {options.seed} on: {summary}")
    return int(counts["wrong"] + counts["raw"] > 0)


if __name__ == "__main__":
    sys.exit(main())
