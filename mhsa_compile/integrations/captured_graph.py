"""A graph that Dynamo captured, as a module of its tensors alone: weights inside, sizes read off the inputs.

Dynamo's graphs take a model's weights as inputs like any others, and sizes that it holds to be symbolic as numbers.
"""

from __future__ import annotations

import copy
import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from mhsa_compile.runtime.artifact.manifest import Manifest

_STATIC = "_dynamo_static_input_type"
"""What Dynamo writes into the `tensor_dict` of a placeholder that is a parameter or a buffer."""
_WEIGHT = "weight_"
"""What stands before a weight's name in the module."""


@dataclass(frozen=True)
class BoundWeights:
    """Which weights of a graph an artifact takes as they are, place -> its name for it, and the digest of the others,
    which became part of its code."""

    names: Mapping[int, str]
    others: Mapping[int, bytes]

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether the artifact's code is right for the weights among these inputs."""
        return all(_digest(inputs[place]) == digest for place, digest in self.others.items())

    def among(self, inputs: Sequence[Any]) -> dict[str, Tensor]:
        """The weights among these inputs, as `load` takes them."""
        return {name: inputs[place].detach() for place, name in self.names.items()}


@dataclass(frozen=True)
class CapturedGraph:
    """What `module` and a call need to know.

    graph     the graph as Dynamo gave it
    weights   place among the inputs -> name, of the weights
    numbers   place -> name, of floats, which Dynamo passes as tensors of which `item` is asked
    names     the names of the other tensors, in order
    places    the places of these tensors among the inputs
    examples  one value of each of these tensors
    sizes     name of a placeholder that is a number -> the tensor and the dim that it is the size of
    returned  what the graph gives, in order: an output of the module, an input, or a number as it is
    """

    graph: fx.GraphModule
    weights: dict[int, str]
    numbers: dict[int, str]
    names: tuple[str, ...]
    places: tuple[int, ...]
    examples: tuple[Tensor, ...]
    sizes: dict[str, tuple[str, int]]
    returned: tuple[tuple[Literal["output", "input", "constant"], Any], ...]

    @classmethod
    def read(cls, graph: fx.GraphModule, inputs: Sequence[Any]) -> CapturedGraph | str:
        """Reads a graph that Dynamo captured; returns a text where it has to stay with PyTorch, the reason why."""
        placeholders = graph.graph.find_nodes(op="placeholder")
        tensors = {i: value for i, value in enumerate(inputs) if isinstance(value, Tensor)}
        if why := _why_not(graph, list(tensors.values())):
            return why
        weights = {i: placeholders[i].name for i, value in tensors.items() if _is_weight(placeholders[i], value)}
        unused = {i for i in tensors if all(user.op == "output" for user in placeholders[i].users)}
        numbers = {i: placeholders[i].name for i, value in tensors.items() if _is_number(placeholders[i], value)}
        free = {i: value for i, value in tensors.items() if i not in {*weights, *numbers, *unused}}
        if not free:
            return "it has no inputs but weights"
        sizes = {}
        for node, value in zip(placeholders, inputs, strict=True):
            if isinstance(value, Tensor):
                continue
            if (size := _read_off(value, {placeholders[i].name: tensor for i, tensor in free.items()}, node)) is None:
                return f"{node.name} is a {type(value).__name__} that is no size of an input"
            sizes[node.name] = size
        outputs = _outputs_of(graph, placeholders)
        if isinstance(outputs, str):
            return outputs
        names = tuple(placeholders[i].name for i in free)
        return cls(graph, weights, numbers, names, tuple(free), tuple(free.values()), sizes, outputs)

    def module(self, inputs: Sequence[Any]) -> nn.Module:
        """The graph as a module that holds the weights among these inputs."""
        graph = copy.deepcopy(self.graph.graph)
        root = nn.Module()
        for name, value in self.graph.named_modules():
            if name and "." not in name:
                root.add_module(name, value)
        for name, value in vars(self.graph).items():
            if isinstance(value, Tensor):
                root.register_buffer(name, value)
        nodes = {node.name: node for node in graph.find_nodes(op="placeholder")}
        for name, node in nodes.items():
            node.target = name  # what forward calls it
        first = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(first):
            for place, name in self.weights.items():
                root.register_buffer(_WEIGHT + name, inputs[place].detach())
                _replace(graph, nodes[name], graph.get_attr(_WEIGHT + name))
            for place, name in self.numbers.items():
                for item in list(nodes[name].users):
                    item.replace_all_uses_with(inputs[place].item())
                    graph.erase_node(item)
            for name, (tensor, dim) in self.sizes.items():
                size = graph.call_function(torch.ops.aten.sym_size.int, (nodes[tensor], dim))
                _replace(graph, nodes[name], size)
        for name, node in nodes.items():
            if name not in self.names and name in {other.name for other in graph.nodes}:
                graph.erase_node(node)
        output = graph.output_node()
        output.args = (tuple(item for item in _distinct(output.args[0])),)
        graph.lint()
        return fx.GraphModule(root, graph)

    def free_dims(self) -> dict[str, dict[int, str]]:
        """The symbolic dims of the inputs, as Dynamo names them."""
        free: dict[str, dict[int, str]] = {name: {} for name in self.names}
        meta = {node.name: node.meta.get("example_value") for node in self.graph.graph.find_nodes(op="placeholder")}
        for name in self.names:
            shape: Sequence[Any] = () if meta[name] is None else meta[name].shape
            free[name] = {i: symbol for i, size in enumerate(shape) if (symbol := _symbol(size)) is not None}
        return free

    def joined_dims(self, inputs: Sequence[Any]) -> dict[str, dict[int, str]]:
        """The symbolic dims with one name for those that are of one size in these inputs: Dynamo may give the keys'
        length and that of the values, which are always equal, a symbol each."""
        sizes: dict[int, str] = {}
        values = self.arguments(inputs)
        return {
            name: {axis: sizes.setdefault(values[name].shape[axis], symbol) for axis, symbol in dims.items()}
            for name, dims in self.free_dims().items()
        }

    def weights_of(self, inputs: Sequence[Any]) -> list[Tensor]:
        """The weights among these inputs."""
        return [inputs[place] for place in self.weights]

    def bound_weights(self, manifest: Manifest, inputs: Sequence[Any]) -> BoundWeights | None:
        """What an artifact of `module(inputs)` does with the weights; None where it has numbers that are no weight as
        it was, which may have been computed from some, and where one was taken for another of the same numbers."""
        listed = {info.name for info in manifest.weights}
        names = {place: _WEIGHT + name for place, name in self.weights.items() if _WEIGHT + name in listed}
        others = [place for place in self.weights if place not in names]
        if listed != set(names.values()) or any(_alike(inputs[i], inputs[j]) for i in others for j in names):
            return None
        return BoundWeights(names, {place: _digest(inputs[place]) for place in others})

    def numbers_of(self, inputs: Sequence[Any]) -> tuple[float, ...]:
        """The numbers among these inputs."""
        return tuple(inputs[place].item() for place in self.numbers)

    def with_numbers(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs, sizes as those of the tensors: to look at a symbolic one would fix it."""
        tensors = dict(zip(self.names, self.examples, strict=True))
        names = [node.name for node in self.graph.graph.find_nodes(op="placeholder")]
        sizes = {name: tensors[tensor].shape[dim] for name, (tensor, dim) in self.sizes.items()}
        return [sizes.get(name, value) for name, value in zip(names, inputs, strict=True)]

    def arguments(self, inputs: Sequence[Any]) -> dict[str, Tensor]:
        """The inputs that a call of the module takes, by name."""
        return {name: inputs[place] for name, place in zip(self.names, self.places, strict=True)}

    def outputs(self, results: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """The results of the graph, made of those of the module and of the graph's inputs."""
        sources: Mapping[str, Sequence[Any]] = {"output": results, "input": inputs}
        return [value if kind == "constant" else sources[kind][value] for kind, value in self.returned]


def _why_not(graph: fx.GraphModule, tensors: Sequence[Tensor]) -> str:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "gradients are wanted; call it under torch.inference_mode()"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if devices := sorted({str(tensor.device) for tensor in tensors if tensor.device.type != "cpu"}):
        return f"it has tensors on {', '.join(devices)}"
    if kinds := sorted({type(tensor).__name__ for tensor in tensors if type(tensor) not in (Tensor, nn.Parameter)}):
        return f"it has tensors of type {', '.join(kinds)}"
    if layouts := sorted({str(tensor.layout) for tensor in tensors if tensor.layout is not torch.strided}):
        return f"it has tensors that are {', '.join(layouts)}"
    if names := sorted({str(node.target) for node in graph.graph.nodes if _writes(node) and _into_inputs(node)}):
        return f"it writes into tensors ({', '.join(names)})"
    return ""


def _into_inputs(node: fx.Node) -> bool:
    """Whether what a node writes into may lie in the memory of the graph's inputs or weights, which are not its own."""
    targets: list[fx.Node] = []
    fx.map_arg(node.kwargs.get("out") or node.args[:1], targets.append)
    sources = [other for other in node.graph.nodes if other.op in ("placeholder", "get_attr")]
    memory = {_memory(other) for other in sources if _is_tensor(other)}
    return any(not _is_tensor(target) or _memory(target) in memory for target in targets)


def _memory(node: fx.Node) -> int:
    """What all views of one tensor share."""
    return int(node.meta["example_value"].untyped_storage()._cdata)


def _writes(node: fx.Node) -> bool:
    """Whether a node may change a tensor that it is given, as the names of PyTorch's operations say."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.target in vars(operator).values():
        is_augmented = hasattr(operator, f"__{name}__") and hasattr(operator, f"__{name[1:]}__")
        return name == "setitem" or (name.startswith("i") and is_augmented)
    return node.op.startswith("call") and (_ends_in_place(name) or "out" in node.kwargs)


def _ends_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _digest(weight: Tensor) -> bytes:
    numbers = weight.detach().resolve_neg().reshape(-1).contiguous()
    return hashlib.sha256(numbers.view(torch.uint8).numpy().tobytes()).digest()


def _is_weight(node: fx.Node, value: Tensor) -> bool:
    return isinstance(value, nn.Parameter) or _STATIC in (node.meta.get("tensor_dict") or {})


def _is_number(node: fx.Node, value: Tensor) -> bool:
    reads = [user.op == "call_method" and user.target == "item" for user in node.users]
    return value.ndim == 0 and bool(reads) and all(reads)


def _read_off(value: object, tensors: Mapping[str, Tensor], node: fx.Node) -> tuple[str, int] | None:
    """The tensor and the dim that a symbolic size belongs to."""
    if not isinstance(value, torch.SymInt):
        return None
    placeholders = node.graph.find_nodes(op="placeholder")
    for other in placeholders:
        example = other.meta.get("example_value")
        if other.name in tensors and isinstance(example, Tensor):
            for dim, size in enumerate(example.shape):
                if isinstance(size, torch.SymInt) and size.node.expr == value.node.expr:
                    return other.name, dim
    return None


def _symbol(size: object) -> str | None:
    """What a size is called; None of a number, which a symbol may have turned out to be while Dynamo was tracing."""
    return str(size.node.expr) if isinstance(size, torch.SymInt) and size.node.expr.free_symbols else None


def _distinct(items: Any) -> list[fx.Node]:
    """The nodes of the tensors that a graph computes and returns, each once."""
    nodes = [item for item in items if isinstance(item, fx.Node) and item.op != "placeholder" and _is_tensor(item)]
    return list(dict.fromkeys(nodes))


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), Tensor)


def _outputs_of(
    graph: fx.GraphModule, placeholders: Sequence[fx.Node]
) -> tuple[tuple[Literal["output", "input", "constant"], Any], ...] | str:
    items = graph.graph.output_node().args[0]
    if not isinstance(items, tuple | list):
        return "it does not give a list"
    distinct, places = _distinct(items), list[tuple[Literal["output", "input", "constant"], Any]]()
    for item in items:
        if not isinstance(item, fx.Node):
            places.append(("constant", item))
        elif item.op == "placeholder":
            places.append(("input", placeholders.index(item)))
        elif item in distinct:
            places.append(("output", distinct.index(item)))
        else:
            return f"it gives {item.name}, which is no tensor"
    return tuple(places) if distinct else "it computes nothing"


def _replace(graph: fx.Graph, node: fx.Node, other: fx.Node) -> None:
    node.replace_all_uses_with(other)
    graph.erase_node(node)
