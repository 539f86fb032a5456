"""Whether an exported program computes the same at every call. An artifact does, so one that draws random numbers, as
dropout in training does, or that writes into its own tensors, as a batch norm in training does, would be another."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from mhsa_compile.errors import ModelError

_EXPECTED = "one that computes the same at every call, as an artifact does"
_EVAL = "Let dropout and norms follow self.training, and call model.eval()."


def check_repeatable(program: torch.export.ExportedProgram) -> None:
    """Raises ModelError for a program that draws random numbers, or that writes into tensors which the module holds."""
    signature = program.graph_signature
    module_tensors = {
        **signature.inputs_to_buffers,
        **signature.inputs_to_parameters,
        **signature.inputs_to_lifted_tensor_constants,
    }
    for graph in (part.graph for part in program.graph_module.modules() if isinstance(part, fx.GraphModule)):
        for node in graph.nodes:
            if not isinstance(node.target, OpOverload):
                continue
            if is_random(node):
                raise ModelError("module", _EXPECTED, f"random numbers, by {_title(node)}", _EVAL)
            for name in _write_targets(node):
                if name in module_tensors:
                    got = f"one that writes into {_own_name(module_tensors[name])!r}, by {_title(node)}"
                    raise ModelError("module", _EXPECTED, got, _EVAL)


def is_random(node: fx.Node) -> bool:
    """Whether what an operator of PyTorch's gives differs from call to call, with the arguments that it has here."""
    operator: Any = node.target
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    arguments = _arguments(node)
    never = [arguments.get(name) == 0.0 for name in ("p", "dropout_p") if name in arguments]
    off = [arguments[name] is False for name in ("train", "training") if name in arguments]
    return not any(never + off)


def _write_targets(node: fx.Node) -> list[str]:
    """The inputs of the program that an operator writes into."""
    arguments = _arguments(node)
    operator: Any = node.target
    places = [arg.name for arg in operator._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    if arguments.get("training") is True:  # norms write into these, though their schema does not say it
        places += ["running_mean", "running_var"]
    return [_base(arguments[place]).name for place in places if isinstance(arguments.get(place), fx.Node)]


def _base(node: fx.Node) -> fx.Node:
    """What a node is a view of, through as many views as there are."""
    while node.op == "call_function" and isinstance(node.target, OpOverload) and node.args:
        first, results = node.args[0], node.target._schema.returns
        if not isinstance(first, fx.Node) or all(result.alias_info is None for result in results):
            break
        node = first
    return node


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a node by name, with the defaults."""
    operator: Any = node.target
    defaults = {arg.name: arg.default_value for arg in operator._schema.arguments if arg.has_default_value()}
    names = [arg.name for arg in operator._schema.arguments]
    return {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def _title(node: fx.Node) -> str:
    operator: Any = node.target
    arguments, names = _arguments(node), ("p", "dropout_p", "train", "training")
    text = ", ".join(f"{name}={value}" for name, value in arguments.items() if name in names)
    return f"{operator.overloadpacket.__name__}({text})" if text else operator.overloadpacket.__name__


def _own_name(name: str) -> str:
    return name.removeprefix("module.")
