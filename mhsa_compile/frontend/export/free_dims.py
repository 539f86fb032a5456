"""Which dims of a module's inputs are free: as stated in torch.export's words, or as its examples look; and which of
them the exporter leaves so.

Notation: B batch, L query length, S key length.
"""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch.export import Dim

from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.frontend.export.flex_attention import as_operators
from mhsa_compile.frontend.export.module_calls import TensorModule
from mhsa_compile.frontend.export.repeatable import check_repeatable
from mhsa_compile.frontend.export.signatures import Axis, ModuleSignature, guess_symbols, with_fixed_dims, zeros_of
from mhsa_compile.frontend.export.torch_layers import plain_layers
from mhsa_compile.runtime.symbolic_dims import is_expression, value_of

LEAST = 2
"""The smallest size that the exporter tells from others: it takes 0 and 1 for special."""
_TRIED = 8
"""Up to which bound from below each smaller size is tried: of lengths less one the exporter takes 1 and
2 for special, and the module may not."""


@dataclass(frozen=True)
class Freedom:
    """What an export is asked to leave free.

    signature      the inputs': a symbol stands for each dim that is to be free
    sizes          the sizes of the dims in the examples
    user_symbols   symbols that the user named: they stay as they are, or the export fails. Those of other axes follow
                   from the examples, and what of them the module fixes is fixed, with a warning
    required       axes that must stay free, whatever their symbol
    most           the largest sizes that symbols may have
    """

    signature: ModuleSignature
    sizes: Mapping[Axis, int]
    user_symbols: frozenset[str] = frozenset()
    required: frozenset[Axis] = frozenset()
    most: Mapping[str, int] = field(default_factory=dict)

    @property
    def symbols(self) -> dict[Axis, str]:
        shapes = ((name, shape) for name, (shape, _) in self.signature.items())
        return {(name, i): dim for name, shape in shapes for i, dim in enumerate(shape) if isinstance(dim, str)}

    @property
    def optional(self) -> set[str]:
        """Symbols that may be fixed."""
        symbols = self.symbols
        return {*symbols.values()} - self.user_symbols - {symbols[axis] for axis in self.required if axis in symbols}

    def sizes_to_export_at(self) -> dict[str, int]:
        """The sizes of the examples, as far as no two are equal, which the exporter may take for one, and none is 1."""
        sizes: dict[str, int] = {}
        made_of_others = [(axis, symbol) for axis, symbol in self.symbols.items() if is_expression(symbol)]
        for axis, symbol in self.symbols.items():
            if symbol not in sizes and not is_expression(symbol):
                unavailable = {0, 1, *sizes.values()}
                sizes[symbol] = next(n for n in (self.sizes[axis], *range(3, 99)) if n not in unavailable)
        return sizes | {symbol: value_of(symbol, sizes) or self.sizes[axis] for axis, symbol in made_of_others}

    def replace_symbols(self, symbols: Mapping[Axis, str], most: Mapping[str, int]) -> Freedom:
        """The same freedom with these symbols; axes that have none are fixed at the examples' sizes."""

        def dim_of(axis: Axis, dim: int | str) -> int | str:
            return symbols.get(axis, self.sizes[axis] if isinstance(dim, str) else dim)

        signature: ModuleSignature = {
            name: (tuple(dim_of((name, i), dim) for i, dim in enumerate(shape)), dtype)
            for name, (shape, dtype) in self.signature.items()
        }
        return replace(self, signature=signature, most={s: most[s] for s in symbols.values() if s in most})

    def without(self, fixed: set[str]) -> Freedom:
        symbols = {axis: symbol for axis, symbol in self.symbols.items() if symbol not in fixed}
        return self.replace_symbols(symbols, self.most)


def requested_freedom(
    module: nn.Module,
    examples: Sequence[Tensor] | Mapping[str, Tensor] | None,
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None,
    dims: Mapping[str, int | None],
) -> Freedom:
    """What an export is asked to leave free, by example inputs, by what is stated of their axes, and by the sizes that
    are fixed. Raises InputError."""
    if isinstance(examples, Tensor):
        raise InputError(
            "example_inputs", "tensors, in the order of forward or by name", "a Tensor", "Put it in a list."
        )
    if not examples:
        hint = "Pass the tensors that its forward takes; only their names, shapes and dtypes matter."
        raise InputError("example_inputs", f"example inputs for {type(module).__name__}", "none", hint)
    tensors = _by_name("example_inputs", module, examples, "tensors")
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            hint = 'torch.as_tensor makes one; tokenizers give them with return_tensors="pt".'
            raise InputError("example_inputs", f"a tensor for {name!r}", type(value).__name__, hint)
    weights = (*module.parameters(), *module.buffers())
    guesses = guess_symbols(tensors, frozenset(size for weight in weights for size in weight.shape))
    words = None if dynamic_shapes is None else _by_name("dynamic_shapes", module, dynamic_shapes, "entries")
    statement = _Statement(guesses) if words is None else _statement(words, tensors, guesses)
    signature: ModuleSignature = {
        name: (tuple(statement.symbols.get((name, axis), size) for axis, size in enumerate(value.shape)), value.dtype)
        for name, value in tensors.items()
    }
    sizes = {(name, axis): size for name, value in tensors.items() for axis, size in enumerate(value.shape)}
    fixed = with_fixed_dims(signature, dict(dims))
    return Freedom(fixed, sizes, frozenset(statement.user_symbols), frozenset(statement.required), statement.most)


def _by_name(argument: str, module: nn.Module, values: Any, what: str) -> dict[str, Any]:
    if isinstance(values, Mapping):
        return dict(values)
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise InputError(argument, f"{what}, in the order of forward or by name", type(values).__name__)
    parameters = list(inspect.signature(module.forward).parameters)
    if len(values) > len(parameters):
        raise InputError(argument, f"at most {len(parameters)} {what}", str(len(values)))
    return dict(zip(parameters, values, strict=False))


@dataclass
class _Statement:
    """Symbols of axes; those that the user named; axes that must stay free; the largest sizes of symbols."""

    symbols: dict[Axis, str]
    user_symbols: set[str] = field(default_factory=set)
    required: set[Axis] = field(default_factory=set)
    most: dict[str, int] = field(default_factory=dict)


def _statement(words: Mapping[str, Any], examples: Mapping[str, Tensor], guesses: Mapping[Axis, str]) -> _Statement:
    """What dynamic_shapes says, in torch.export's forms. Raises InputError."""
    statement = _Statement({})
    for name, entries in words.items():
        label = f"dynamic_shapes[{name!r}]"
        if name not in examples:
            raise InputError("dynamic_shapes", f"inputs among {', '.join(examples)}", repr(name))
        rank = examples[name].ndim
        if entries is None:
            continue
        if not isinstance(entries, Mapping | Sequence) or isinstance(entries, str):
            raise InputError(label, "None, {axis: symbol}, or an entry for each axis", repr(entries))
        by_axis = entries if isinstance(entries, Mapping) else dict(enumerate(entries))
        for axis, entry in by_axis.items():
            if not isinstance(axis, int) or not 0 <= axis < rank:
                raise InputError(label, f"axes from 0 to {rank - 1}", repr(axis))
            _state(statement, (name, axis), entry, examples[name].shape[axis], guesses)
    return statement


def _state(statement: _Statement, axis: Axis, entry: Any, size: int, guesses: Mapping[Axis, str]) -> None:
    """States what an axis is to be: a name, a Dim or one of Dim's hints; None and a size fix it."""
    label = f"dynamic_shapes[{axis[0]!r}][{axis[1]}]"
    hint = getattr(entry, "type", None)
    if entry is None or entry == size or hint == Dim.STATIC.type:
        return
    if isinstance(entry, str) and entry:
        statement.symbols[axis] = entry
        statement.user_symbols.add(entry)
        return
    is_named = type(entry) is Dim
    if not is_named and hint not in (Dim.AUTO.type, Dim.DYNAMIC.type):
        expected = f"a name, a Dim, Dim.AUTO, Dim.DYNAMIC, Dim.STATIC, None, or its size {size}"
        raise InputError(label, expected, repr(entry), "Name each axis by itself: what depends on what is found.")
    if (entry.min or 0) > LEAST:
        got = f"one from {entry.min} on"
        raise InputError(label, "a dim without a lower bound", got, "Leave min out: an artifact keeps none.")
    symbol = entry.__name__ if is_named else guesses.get(axis, f"{axis[0]}_{axis[1]}")
    statement.symbols[axis] = symbol
    if is_named:
        statement.user_symbols.add(symbol)
    elif hint == Dim.DYNAMIC.type:
        statement.required.add(axis)
    if isinstance(entry.max, int):
        statement.most[symbol] = min(entry.max, statement.most.get(symbol, entry.max))


def freest_model(
    wrapper: TensorModule, request: Freedom, convert: Callable[[Program], onnx.ModelProto]
) -> onnx.ModelProto:
    """What `convert` makes of the module with all that is wanted free, or else with as much as works.

    What had to be fixed, and why, is a warning. Raises ModelError where nothing less would do.
    """
    failures: list[ModelError] = []
    for freedom in _ever_less(request):
        try:
            program = trace(wrapper, freedom)
            model = convert(program)
        except ModelError as error:
            failures.append(error)
            continue
        free = program.freedom.symbols
        if fixed := {axis: symbol for axis, symbol in request.symbols.items() if axis not in free}:
            warnings.warn(_message(request, fixed, failures), stacklevel=2)
        return model
    raise failures[0]


def _ever_less(request: Freedom) -> list[Freedom]:
    """The freedoms to try, one after the other: all, the batch, the lengths, nothing but what was stated."""
    optional = request.optional
    fewer: list[set[str]] = [set(), optional - {"B"}, optional & {"B"}, optional]
    tries = [request.without(fixed) for fixed in fewer]
    return [freedom for i, freedom in enumerate(tries) if freedom not in tries[:i]]


@dataclass(frozen=True)
class Program:
    """A module as torch.export traced it, what it left free, the symbols that it uses for that, the names of what
    comes out, None for a lone tensor, and the least sizes of symbols of whose smaller ones it does not speak."""

    exported: torch.export.ExportedProgram
    freedom: Freedom
    names: Mapping[str, str]
    outputs: list[str] | None
    least: Mapping[str, int]


def trace(wrapper: TensorModule, request: Freedom) -> Program:
    """The module at the examples' sizes. What may be fixed is free where the module allows, up to the size it allows.

    Raises ModelError.
    """
    examples = zeros_of(request.signature, request.sizes_to_export_at())
    hints: dict[str, dict[int, Any]] = {name: {} for name in request.signature}
    for (name, axis), symbol in request.symbols.items():
        hints[name][axis] = Dim.AUTO if symbol in request.optional else Dim.DYNAMIC
    outputs = wrapper.output_names(examples)
    options: dict[str, Any] = {"kwargs": {"inputs": examples}, "dynamic_shapes": {"inputs": hints}}
    try:
        # With gradients, PyTorch may choose kernels whose strides it cannot trace.
        with quiet(), torch.no_grad(), plain_layers(wrapper), as_operators():
            exported_program = torch.export.export(wrapper, (), strict=False, **options)
    except ModelError:
        raise
    except Exception as error:  # it is the user's code that runs here
        hint = "If it speaks of a dim, leave it out of dynamic_shapes, or fix it in dims."
        raise ModelError("module", "one that torch.export can export", cause(error), hint) from error
    check_repeatable(exported_program)
    freedom, names = _symbols_of(exported_program, request)
    constraints = exported_program.range_constraints.items()
    lowest = {names[str(dim)]: int(bounds.lower) for dim, bounds in constraints if str(dim) in names}
    least = {symbol: lower for symbol, lower in lowest.items() if lower > LEAST}
    return Program(exported_program, freedom, names, outputs, least)


def _symbols_of(exported_program: torch.export.ExportedProgram, request: Freedom) -> tuple[Freedom, dict[str, str]]:
    """What was left free, under our symbols; and what torch.export calls these."""
    _, arguments = exported_program.call_spec.in_spec.children()
    (by_name,), input_nodes = arguments.children(), exported_program.graph_signature.user_inputs
    nodes = {node.name: node for node in exported_program.graph.nodes}
    shapes = {name: nodes[node].meta["val"].shape for name, node in zip(by_name.context, input_nodes, strict=True)}
    theirs = {axis: getattr(getattr(shapes[axis[0]][axis[1]], "node", None), "expr", None) for axis in request.symbols}
    ours: dict[Any, str] = {}
    symbols: dict[Axis, str] = {}
    most = dict(request.most)

    users = request.user_symbols
    for axis, symbol in sorted(
        request.symbols.items(), key=lambda item: (is_expression(item[1]), item[1] not in users)
    ):
        dim = theirs[axis]
        if symbol in request.optional and (expression := _expression(dim, ours)):
            symbols[axis] = expression
            continue
        bounds = exported_program.range_constraints.get(dim)
        if bounds is None or bounds.lower > _TRIED:
            size = dim if dim is not None else shapes[axis[0]][axis[1]]
            got = f"one that takes {size if bounds is None else f'at least {bounds.lower}'} there"
            if symbol not in request.optional or bounds is not None:
                raise ModelError("module", f"one that leaves {symbol!r} free, axis {axis[1]} of {axis[0]!r}", got)
            continue
        symbols[axis] = ours.setdefault(dim, symbol)
        if symbol in request.user_symbols and symbols[axis] != symbol:
            expected = f"dims {symbols[axis]!r} and {symbol!r} that may differ"
            raise ModelError("module", expected, "equal ones, always", "Give them one name.")
        upper = exported_program.range_constraints[dim].upper
        if upper.is_Integer:
            most[symbols[axis]] = min(int(upper), most.get(symbols[axis], int(upper)))
    return request.replace_symbols(symbols, most), {str(dim): symbol for dim, symbol in ours.items()}


def _expression(dim: Any, ours: Mapping[Any, str]) -> str:
    """A sum of torch.export's symbols in ours; "" where it is none, or one of others."""
    symbols: set[Any] = getattr(dim, "free_symbols", set())
    if not symbols or dim in symbols or not symbols <= ours.keys():
        return ""
    return _renamed(str(dim), {str(symbol): ours[symbol] for symbol in symbols})


def _renamed(text: str, names: Mapping[str, str]) -> str:
    pattern = rf"\b({'|'.join(map(re.escape, names))})\b"
    return re.sub(pattern, lambda match: names[match[0]], text) if names else text


def with_names(model: onnx.ModelProto, names: Mapping[str, str]) -> None:
    """Puts our symbols in the places of torch.export's, also where they make up others; what was fixed is a number."""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param.isdigit():
                dim.dim_value = int(dim.dim_param)
            elif dim.dim_param:
                dim.dim_param = _renamed(dim.dim_param, names)


def _message(request: Freedom, fixed: Mapping[Axis, str], failures: Sequence[ModelError]) -> str:
    """One sentence on the dims that were fixed."""
    listed = ", ".join(f"{symbol} (axis {axis} of {name!r}) at {request.sizes[name, axis]}"
                       for (name, axis), symbol in fixed.items())  # fmt: skip
    why = failures[0].got.rstrip(". ") if failures else "it works with no other size, says torch.export"
    hint = "Fix them in dims, or say in dynamic_shapes what is to be free, and no other is tried."
    return f"example_inputs: the module fixes {listed}: {why}. {hint}"


def cause(error: BaseException) -> str:
    """One line of what the exporter says: of constraints that do not hold, the first of them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    violated = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    messages = violated if lines and lines[0].startswith("Constraints violated") else lines
    return messages[0].split(". ")[0] if messages else type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Silences what the exporter says about itself, and nothing else."""

    def relevant(record: logging.LogRecord) -> bool:
        return not any(words in record.msg for words in _SAID_ANYWAY)

    exporter = "torch.onnx._internal.exporter"
    names = (f"{exporter}._registration", f"{exporter}._core", "torch.fx.experimental.symbolic_shapes")
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(relevant)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.* is deprecated", FutureWarning)
            warnings.filterwarnings("ignore", "# The axis name: .* will not be used", UserWarning)
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(relevant)


_SAID_ANYWAY = (
    "torchvision is not installed", "has None output", "Skipping constant argument", "Unable to find user code",
)  # fmt: skip
"""Words of the exporter's messages that are silenced. Of a module that gives None, such as weights that nobody asked
for, the rest is what is exported."""
