"""Which node of a file is the first whose value compiled code gets wrong: by halving, a compilation each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from mhsa_compile.files.atomic_write import atomic_file
from mhsa_compile.verification.evaluators import Evaluators
from mhsa_compile.verification.file_check import Difference, check_file
from mhsa_compile.verification.precision import Precision
from mhsa_compile.verification.repeated_runs import Run

Compile = Callable[[onnx.ModelProto], tuple[onnx.ModelProto, Run, Precision]]
"""A model -> what was read from it, the compiled code of it, and how exact that is."""

_SECONDS = 60.0
_RIGHT, _WRONG, _ACQUITTED = "right", "wrong", "right, says ONNX Runtime"


def first_difference(original: onnx.ModelProto, output: str, compile: Compile) -> str | None:
    """What is known of the first node whose value differs, in words: a node, or among how many it is.

    None where ONNX Runtime refuses the whole file, takes what makes this output, and agrees with the compiled code:
    then the other evaluator is at fault. A part of the graph that ends in a value may be compiled otherwise than the
    whole of it, so that a part which is right proves nothing of the rest.
    """
    nodes = _ancestors(original.graph.node, {output})
    if _differs(original, nodes, compile) is _ACQUITTED:
        return None
    right, wrong = -1, len(nodes) - 1
    begin = time.monotonic()
    unclear: set[int] = set()
    while right + 1 < wrong and time.monotonic() - begin < _SECONDS:
        between = [i for i in range(right + 1, wrong) if i not in unclear]
        if not between:
            break
        middle = between[len(between) // 2]
        verdict = _differs(original, nodes[: middle + 1], compile)
        if verdict is None:
            unclear.add(middle)
        elif verdict is _WRONG:
            wrong = middle
        else:
            right = middle
    last = _title(nodes[wrong])
    if right + 1 == wrong:
        return f"the first node whose value differs is {last}"
    return f"the first node whose value differs is {last} or one of the {wrong - right - 1} before it"


def _ancestors(nodes: Sequence[onnx.NodeProto], names: set[str]) -> list[onnx.NodeProto]:
    """The nodes, of these, that the values of some names depend on, in their order."""
    names, ancestors = set(names), []
    for node in reversed(nodes):
        if names & set(node.output):
            ancestors.append(node)
            names |= _read(node)
    return ancestors[::-1]


def _read(node: onnx.NodeProto) -> set[str]:
    names = set(node.input)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                names |= _read(inner)
            names |= {value.name for value in graph.output}
    return names


def _differs(original: onnx.ModelProto, nodes: list[onnx.NodeProto], compile: Compile) -> str | None:
    """What is known of the value of the last of these nodes; None where nothing is."""
    part = onnx.ModelProto()
    part.CopyFrom(original)
    del part.graph.node[:], part.graph.output[:], part.graph.value_info[:]
    last = nodes[-1]
    part.graph.node.extend(_ancestors(nodes, set(last.output)))
    names = set().union(*map(_read, part.graph.node))
    for field in (part.graph.input, part.graph.initializer):
        entries = [entry for entry in field if entry.name in names]
        del field[:]
        field.extend(entries)
    part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in last.output if name)
    try:
        inferred = onnx.shape_inference.infer_shapes(part)
        part.graph.ClearField("output")
        part.graph.output.extend(inferred.graph.output)
        canonical, run, precision = compile(part)
        evaluators = Evaluators(part, canonical, None, precision)
        outcome = check_file(evaluators, run, [value.name for value in part.graph.output])
    except Exception:  # a part that nobody compiles, or evaluates
        return None
    if isinstance(outcome, Difference):
        return _WRONG
    if not outcome.against:
        return None
    return _ACQUITTED if evaluators.has_runtime else _RIGHT


def _title(node: onnx.NodeProto) -> str:
    kind = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    return f"{(node.name or next(iter(node.output), ''))!r} ({kind})"


def keep(folder: Path, difference: Difference) -> None:
    """Writes what differs to a folder: the inputs, and the output as it came and as it should be. Raises
    OutputError."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays: Mapping[str, np.ndarray] = {
        **{f"input.{name}": array for name, array in difference.inputs.items()},
        "expected": difference.expected,
        "got": difference.actual,
    }
    as_numpy = {n: a.astype(np.float32) if str(a.dtype) == "bfloat16" else a for n, a in arrays.items()}
    with atomic_file(folder / "5_mismatch.npz", "dump") as file:
        np.savez(file, **as_numpy)  # type: ignore[arg-type]  # its stub mistakes the names
