"""Any nn.Module as a function of tensors by name whose results are tensors, so that it can be exported as it is.

Arguments and results may be tensors, or tuples, dicts, ModelOutputs and caches of them (`nested_values`). An attention
module of transformers gives its y alone: what else it returns, weights or None, depends on the implementation.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial

import onnx
import torch
from torch import Tensor, nn

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.branch_graphs import rename
from mhsa_compile.frontend.export.nested_values import NestedArguments, tensors_by_name

_PREFIX = "module."


class _TracingError(Exception):
    """What a forward raised while it was traced: no RuntimeError, before some of which PyTorch prints the graph."""


class TensorModule(nn.Module):
    """A module as such a function: from a dict of its inputs, the form that torch.export follows, to a tuple.
    `nested` makes the arguments that are no tensors."""

    def __init__(self, module: nn.Module, nested: NestedArguments) -> None:
        super().__init__()
        self.module, self.nested = module, nested

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        try:
            return tuple(self.results(inputs).values())
        except Exception as error:
            if torch.compiler.is_exporting() and not isinstance(error, ModelError):
                raise _TracingError(str(error)) from error
            raise

    def results(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a call gives, by name; a lone tensor has none. Raises ModelError for what is no tensor."""
        arguments = self.nested.arguments(inputs)
        if isinstance(self.module, torch.fx.GraphModule):  # whose own call prints what fails, to whoever expects it
            result = nn.Module.__call__(self.module, **arguments)
        else:
            result = self.module(**arguments)
        if _is_attention_of_transformers(self.module) and isinstance(result, tuple):
            result = result[0]
        return dict(tensors_by_name("", result, partial(_next_step, self.module)))

    def output_names(self, inputs: Mapping[str, Tensor]) -> list[str] | None:
        """The names of the results; None for a lone tensor. Raises ModelError where the module does not take them."""
        for name, value in inputs.items():
            if value.is_complex():
                hint = "Have the module take, and compute with, the real and the imaginary part."
                raise ModelError(name, "real numbers, as ONNX's operators take no others", str(value.dtype), hint)
        try:
            with torch.no_grad():
                names = list(self.results(inputs))
        except ModelError:
            raise
        except Exception as error:  # whatever a forward trips over
            sizes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())
            first = str(error).strip().partition("\n")[0]
            hint = "Where one of these sizes is the module's own, say in dynamic_shapes which axes are free."
            got = f"{type(error).__name__}: {first}"
            raise ModelError("module", f"a forward that takes {sizes}", got, hint) from error
        return None if names == [""] else names


def with_own_names(model: onnx.ModelProto, inputs: Sequence[str], outputs: Sequence[str] | None) -> onnx.ModelProto:
    """The inputs, results and weights of an exported TensorModule under the names that they have in the module itself.
    A result that is called as an input is has a number behind its name."""
    _name_edges(model.graph, inputs, outputs)
    _name_weights(model.graph)
    return model


def _name_edges(graph: onnx.GraphProto, inputs: Sequence[str], outputs: Sequence[str] | None) -> None:
    """Names inputs and results by their places: several may be one value, of which the exporter would keep one name. A
    lone result, without a name, keeps the exporter's."""
    values = [value.name for value in graph.output]
    results = values
    if outputs is not None:
        results = [_unlike(name, {*inputs, *outputs}) if name in inputs else name for name in outputs]
    made = {name for node in graph.node for name in node.output}
    names = {value.name: name for value, name in zip(graph.input, inputs, strict=True)}
    for value, name in zip(values, results, strict=True):
        if value in made:
            names.setdefault(value, name)
    wanted, taken = {*inputs, *results}, {*made, *names, *(tensor.name for tensor in graph.initializer)}
    names |= {name: _unlike(name, taken | wanted) for name in (taken & wanted) - names.keys()}
    rename(graph, names)
    for value in (*graph.input, *graph.initializer, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for output, name in zip(graph.output, results, strict=True):
        if outputs is not None and output.name != name:
            graph.node.append(onnx.helper.make_node("Identity", [output.name], [name], name=f"copy_{name}"))
            output.name = name


def _unlike(name: str, taken: set[str]) -> str:
    """A name that none of these is."""
    return next(other for number in itertools.count(1) if (other := f"{name}_{number}") not in taken)


def _name_weights(graph: onnx.GraphProto) -> None:
    names = {name for node in graph.node for name in node.output} | {value.name for value in graph.input}
    own = {tensor.name: tensor.name.removeprefix(_PREFIX) for tensor in graph.initializer}
    short_names = {name: short for name, short in own.items() if short not in names}
    for value in (*graph.initializer, *graph.value_info):
        value.name = short_names.get(value.name, value.name)
    rename(graph, short_names)


def _is_attention_of_transformers(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__module__.startswith("transformers.models.") and kind.__name__.endswith("Attention")


def _next_step(module: nn.Module) -> str:
    """What to do about a result that is no tensor. Parts may have configs of their own, as T5's decoder has."""
    configs = {name: vars(part).get("config") for name, part in module.named_modules()}
    caching = {id(config): name for name, config in reversed(configs.items()) if getattr(config, "use_cache", False)}
    lines = [f"{name}.config.use_cache = False".removeprefix(".") for name in reversed(caching.values())]
    switch = f" A cache of keys and values is switched off by {' and '.join(lines)}." if lines else ""
    return f"Have the module return tensors.{switch}"
