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
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import onnx
from onnx import helper

import mhsa_compile as mhsa
from fuzz.graph_drawing import BATCHES, CODES, Drawing, Value
from fuzz.graph_makers import MAKERS
from mhsa_compile.errors import BuildError, MhsaError, MismatchError


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
    if not d.nodes:
        d.node("Identity", ["x"], dtype, d.values[0].shape, free)
    read = {name for node in d.nodes for name in node.input}
    made = [value for value in d.values[2:] if value.name not in read] or d.values[-1:]
    nodes, functions = d.nodes, []
    imports = [helper.make_opsetid("", d.opset)]
    if any(node.domain == "org.example" for node in nodes):
        imports.append(helper.make_opsetid("org.example", 1))
    elif d.perhaps(0.2):  # one node becomes a call of a function that has it, under the name of another operator
        plain = [i for i, node in enumerate(nodes) if len(node.output) == 1 and node.op_type != "If"]
        if plain:
            nodes, functions = _with_function(nodes, d.one_of(*plain), imports)
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
