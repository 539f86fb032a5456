"""Functions of a score and of where it stands, in FlexAttention's form: read into steps.

`score_mod(score, b, h, q_idx, kv_idx)` and `mask_mod(b, h, q_idx, kv_idx)` are traced once, as
torch.nn.attention.flex_attention does it. Source: https://pytorch.org/blog/flexattention
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from mhsa_compile.errors import SpecError
from mhsa_compile.spec.checks import value_text
from mhsa_compile.spec.score_functions import (
    LEAVES,
    PLACES,
    WHOLE,
    Kind,
    ScoreFunction,
    Step,
    TensorKind,
    constant_value,
    leaves_of,
    wrapped,
)

UserFunction = Callable[..., Any]
ASKED = "an expression of its arguments and of captured tensors, without branches on their values"
WHITELIST = (
    "It may use + - * / // %, comparisons, & | ^ ~ << >>, where, minimum, maximum, clamp, abs, exp, exp2, log, tanh,"
    " sigmoid, sqrt, casts, and captured tensors by whole numbers."
)
FLOATS = ("float32", "float64", "bfloat16", "float16")
DTYPES = ("bool", "int32", "int64", "float32", "bfloat16", "float16")
"""The dtypes of captured tensors."""


def trace(name: str, function: UserFunction, *, keep: bool = False) -> tuple[ScoreFunction, tuple[Tensor, ...]]:
    """The function that the field `name` of a spec was given, and the tensors that it captures: copies, or `keep` them
    as they are. Raises SpecError."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.fx.experimental.proxy_tensor import make_fx

    scores = [torch.zeros(())] if "score" in leaves_of(name) else []
    places = [torch.zeros((), dtype=torch.int64) for _ in PLACES]  # what flex_attention itself hands over
    readings: list[tuple[ScoreFunction, list[Any]]] = []
    for _ in range(2):
        try:
            with torch.no_grad(), TransformGetItemToIndex():
                module = make_fx(with_named_arguments(name, function))(*scores, *places)
        except Exception as error:  # whatever the function trips over
            first = str(error).strip().partition(" - erroring out")[0].partition("\n")[0]
            raise SpecError(name, ASKED, f"{type(error).__name__}: {first}", WHITELIST) from error
        reader = GraphReader(name, leaves_of(name))
        readings.append((reader.read(module, ()), reader.tensors))
    (steps, tensors), (again, _) = readings
    if steps != again:
        hint = "It is read once, so it must not depend on anything that changes from call to call."
        raise SpecError(name, "a function that says the same each time", "two that differ", hint)
    return steps, tuple(tensors if keep else (_module_tensor(name, tensor) for tensor in tensors))


def with_named_arguments(name: str, function: UserFunction) -> UserFunction:
    """The function with its arguments and no others, whatever it calls them and whatever more it could take."""
    if "score" in leaves_of(name):
        return lambda score, b, h, q_idx, kv_idx: function(score, b, h, q_idx, kv_idx)
    return lambda b, h, q_idx, kv_idx: function(b, h, q_idx, kv_idx)


def _module_tensor(name: str, tensor: Tensor) -> Tensor:
    """A captured tensor as a module keeps it: a copy, of one axis at least, with the dtype that kernels read."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else str(tensor.layout)
        raise SpecError(name, "captured tensors that are dense, and have values", f"a {kind} one", "Use t.to_dense().")
    if tensor.dtype == torch.float64 and bool((tensor.to(torch.float32).isinf() & ~tensor.isinf()).any()):
        raise SpecError(name, "captured numbers that float32 holds", f"{float(tensor.abs().max()):g}")
    tensor = as_kernels_read(tensor)
    if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
        raise SpecError(name, f"captured tensors of {', '.join(DTYPES)}", str(tensor.dtype))
    return tensor.clone(memory_format=torch.contiguous_format)


def as_kernels_read(tensor: Tensor) -> Tensor:
    """A captured tensor of one axis at least, of a dtype that kernels read."""
    if tensor.dtype == torch.float64:
        tensor = tensor.to(torch.float32)
    elif tensor.dtype in (torch.int8, torch.int16, torch.uint8):
        tensor = tensor.to(torch.int32)
    return tensor.reshape(1) if tensor.ndim == 0 else tensor


class _Row:
    """A captured tensor by some of its axes: what an index of fewer axes than it has gives."""

    def __init__(self, tensor: int, indices: tuple[int, ...], axes: int) -> None:
        self.tensor, self.indices, self.axes = tensor, indices, axes


class GraphReader:
    """Reads one traced graph. `tensors` are those that it captures, in the order in which it first does."""

    def __init__(self, name: str, leaves: Sequence[str]) -> None:
        self.name, self.leaves = name, leaves
        self.tensors: list[Any] = []
        self._steps: list[Step] = []
        self._numbers: dict[Step, int] = {}

    def read(self, module: fx.GraphModule, captured: Sequence[Any]) -> ScoreFunction:
        """`captured` are what stands behind the leaves among the graph's inputs: tensors, or nodes that stand for some.

        Raises SpecError for an operator that nobody here knows.
        """
        values: dict[fx.Node, Any] = {}
        inputs = iter([*self.leaves, *captured])
        for node in module.graph.nodes:
            if node.op == "placeholder":
                source = next(inputs)
                values[node] = self._leaf(source) if isinstance(source, str) else self._capture(source)
            elif node.op == "get_attr":
                values[node] = self._capture(operator.attrgetter(node.target)(module))
            elif node.op == "output":
                (result,) = node.args
                if not isinstance(result, fx.Node):
                    hint = "torch.where makes one of numbers."
                    raise SpecError(self.name, "a function whose result is one tensor", value_text(result), hint)
                return self._function(values[result])
            else:
                values[node] = self._call(node, values)
        raise SpecError(self.name, "a result", "none")

    def _function(self, result: Any) -> ScoreFunction:
        result_kind: Kind = "float" if self.leaves == LEAVES else "bool"
        number = self._number(result)
        if result_kind == "bool" and self._kind(number) != "bool":
            raise SpecError(self.name, "a function whose result is bool, True takes part", self._kind(number))
        number = self._as(number, result_kind)
        live = _live_steps(self._steps, number)
        again = {old: new for new, old in enumerate(live)}
        steps = [self._steps[old] for old in live]
        loaded = sorted({int(step.value) for step in steps if step.op == "load"})
        self.tensors = [self.tensors[i] for i in loaded]
        new_steps = tuple(
            Step(step.op, step.kind, tuple(again[arg] for arg in step.args),
                 loaded.index(step.value) if step.op == "load" else step.value)  # type: ignore[arg-type]
            for step in steps
        )  # fmt: skip
        return ScoreFunction(new_steps, tuple(_tensor_kind(tensor) for tensor in self.tensors))

    # Steps, by their numbers.

    def _add(self, op: str, kind: Kind, args: tuple[int, ...] = (), value: Any = "") -> int:
        step = Step(op, kind, args, value)
        if step not in self._numbers:
            self._numbers[step] = len(self._steps)
            self._steps.append(step)
        return self._numbers[step]

    def _leaf(self, name: str) -> int:
        return self._add(name, "float" if name == "score" else "int")

    def _constant(self, value: Any) -> int:
        if isinstance(value, bool):
            return self._add("constant", "bool", (), value)
        return self._add("constant", "int", (), value) if isinstance(value, int) else self._float(value)

    def _float(self, value: Any) -> int:
        return self._add("constant", "float", (), repr(float(value)))

    def _kind(self, number: int) -> Kind:
        return self._steps[number].kind

    def _as(self, number: int, kind: Kind) -> int:
        """The number of a step that holds the value of step `number` as `kind`."""
        step = self._steps[number]
        if step.kind == kind:
            return number
        if step.op == "constant":
            value = constant_value(step)
            if kind == "float":
                return self._float(value)
            return self._constant(bool(value) if kind == "bool" else int(value))
        return self._add("cast", kind, (number,))

    def _narrow(self, number: int, dtype: torch.dtype) -> int:
        """A whole number as one of this dtype, which wraps."""
        name = str(dtype).removeprefix("torch.")
        if dtype == torch.int64 or self._kind(number) != "int" or self._fits(number, name):
            return number
        step = self._steps[number]
        if step.op == "constant":
            return self._constant(wrapped(int(constant_value(step)), name))
        return self._add("cast", "int", (number,), name)

    def _fits(self, number: int, dtype: str) -> bool:
        """Whether a step shows by itself that its value is one of this dtype."""
        step, (low, high) = self._steps[number], WHOLE[dtype]
        if step.op == "constant":
            return low <= int(constant_value(step)) <= high
        if step.op == "cast":
            least, most = (0, 1) if self._kind(step.args[0]) == "bool" else WHOLE[str(step.value) or "int64"]
            return low <= least and most <= high
        if step.op == "load":
            least, most = WHOLE[str(_tensor_of(self.tensors[int(step.value)]).dtype).removeprefix("torch.")]
            return low <= least and most <= high
        return step.op in ("min", "max", "where", "mod", "and", "or", "xor") and all(
            self._kind(arg) == "bool" or self._fits(arg, dtype) for arg in step.args
        )

    def _to(self, number: int, dtype: torch.dtype) -> int:
        """A step's value as one of this dtype: a float, a bool, or a whole number."""
        kind, step = self._kind_of(dtype), self._steps[number]
        if kind == "int" and step.kind == "float":
            name = str(dtype).removeprefix("torch.")
            return self._add("cast", kind, (number,), "" if dtype == torch.int64 else name)
        return self._narrow(self._as(number, kind), dtype)

    def _kind_of(self, dtype: torch.dtype) -> Kind:
        """Raises SpecError for a dtype that nobody here computes with."""
        name = str(dtype).removeprefix("torch.")
        if dtype == torch.bool:
            return "bool"
        if name in WHOLE:
            return "int"
        if name in FLOATS:
            return "float"
        raise SpecError(self.name, f"values of bool, {', '.join((*WHOLE, *FLOATS))}", name)

    def _capture(self, tensor: Any) -> Any:
        """A captured tensor, which waits for its indices; one without axes is its only element."""
        value = _tensor_of(tensor)
        if not isinstance(value, Tensor):
            raise SpecError(self.name, "captured tensors", type(value).__name__)
        self._kind_of(value.dtype)
        number = next((i for i, other in enumerate(self.tensors) if other is tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        row = _Row(number, (), value.ndim)
        return row if value.ndim else self._load(row, (self._constant(0),))

    def _load(self, row: _Row, indices: tuple[int, ...]) -> int:
        kind = self._kind_of(_tensor_of(self.tensors[row.tensor]).dtype)
        return self._add("load", kind, (*row.indices, *indices), row.tensor)

    def _number(self, value: Any) -> int:
        """An argument as a step."""
        if isinstance(value, _Row):
            expected = "a captured tensor with an index for each of its axes"
            raise SpecError(self.name, expected, f"{value.axes} left over")
        if isinstance(value, int):
            return value
        raise SpecError(self.name, ASKED, type(value).__name__, WHITELIST)

    # Calls.

    def _call(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """A node's value: the number of a step, or a captured tensor by some of its axes."""
        value, result = node.meta["val"], self._value(node, values)
        if isinstance(result, _Row):
            return result
        if value.ndim:
            raise SpecError(self.name, "one number for each pair", f"a tensor of sizes {list(value.shape)}", WHITELIST)
        return self._narrow(result, value.dtype)

    def _value(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        target = getattr(node.target, "overloadpacket", node.target)
        name = getattr(target, "__name__", str(target))
        args = [self._argument(arg, values) for arg in node.args]
        if name == "index":
            return self._index(values[node.args[0]], node.args[1], values)  # type: ignore[index]
        if name in _SAME and isinstance(values.get(node.args[0]), _Row):  # type: ignore[arg-type]
            return values[node.args[0]]  # type: ignore[index]
        kwargs = dict(node.kwargs)
        dtype = node.meta["val"].dtype
        kind = self._kind_of(dtype)
        if name in _FILLED:
            return self._to(self._constant(_FILLED[name](node.args)), dtype)
        if name in _CASTS or name in _SAME:
            return self._to(self._number(args[0]), dtype)
        if kind == "int" and name in _OF_ONE_DTYPE:
            args = [self._to(arg, dtype) if isinstance(arg, int) else arg for arg in args]
        if name in _BINARY:
            return self._binary(name, args, kwargs, kind)
        if name in _COMPARED:
            return self._compare(_COMPARED[name], args, torch.result_type(*map(_tensor_of, node.args[:2])))
        if name in _LOGICAL:
            return self._logical(name, args, kind)
        if name in _PLAIN:
            return self._add(_PLAIN[name], kind, (self._as(self._number(args[0]), kind),))
        if name in _SPECIAL:
            return _SPECIAL[name](self, args, kwargs, kind)
        if name == "where":
            condition = self._as(self._number(args[0]), "bool")
            one, other = (self._as(self._number(arg), kind) for arg in args[1:])
            return self._add("where", kind, (condition, one, other))
        raise SpecError(self.name, ASKED, f"the operator {name}", WHITELIST)

    def _argument(self, arg: Any, values: Mapping[fx.Node, Any]) -> Any:
        """An argument of a call: a step's number from a node, a constant's from a number; others as they are."""
        if isinstance(arg, fx.Node):
            return values[arg]
        return self._constant(arg) if isinstance(arg, bool | int | float) else arg

    def _index(self, row: Any, indices: Any, values: Mapping[fx.Node, Any]) -> Any:
        if not isinstance(row, _Row):
            raise SpecError(self.name, ASKED, "an index of what is no captured tensor", WHITELIST)
        numbers = []
        for index in indices:
            number = self._argument(index, values)
            if not isinstance(number, int) or self._kind(number) != "int":
                raise SpecError(self.name, "captured tensors by whole numbers", str(index))
            if isinstance(index, fx.Node) and index.meta["val"].dtype == torch.uint8:
                hint = "PyTorch takes one of uint8 as a mask: cast it to int64."
                raise SpecError(self.name, "an index of int32 or int64", "one of uint8", hint)
            numbers.append(number)
        if len(numbers) < row.axes:
            return _Row(row.tensor, (*row.indices, *numbers), row.axes - len(numbers))
        return self._load(row, tuple(numbers))

    def _binary(self, name: str, args: list[Any], kwargs: Mapping[str, Any], kind: Kind) -> int:
        one, other = (self._as(self._number(arg), kind) for arg in args[:2])
        factor = kwargs.get("alpha", 1)
        if factor != 1:
            scaled = self._as(self._constant(factor), kind)
            if name == "rsub":
                one = self._add("mul", kind, (one, scaled))
            else:
                other = self._add("mul", kind, (other, scaled))
        if name == "rsub":
            one, other = other, one
        if name == "div" and kwargs.get("rounding_mode") == "floor":
            name = "floor_divide"
        elif kwargs.get("rounding_mode") is not None:
            raise SpecError(self.name, "divisions that are exact or round down", f"rounding_mode={kwargs}", WHITELIST)
        op = _BINARY[name]
        if kind == "bool" and op in ("add", "mul", "min", "max"):
            return self._add("or" if op in ("add", "max") else "and", "bool", (one, other))
        if kind == "float" and op in ("floor_div", "mod"):
            raise SpecError(self.name, "// and % of whole numbers", "of floats", WHITELIST)
        return self._add(op, kind, (one, other))

    def _compare(self, op: str, args: list[Any], dtype: torch.dtype) -> int:
        """`dtype` is the one that both are compared in."""
        one, other = map(self._number, args[:2])
        if op in ("eq", "ne") and one == other and self._kind(one) == "float":
            raise SpecError(self.name, "no question whether a value is NaN", f"{op} of a value and itself", WHITELIST)
        if dtype == torch.bool:
            dtype = torch.int64
        return self._add(op, "bool", (self._to(one, dtype), self._to(other, dtype)))

    def _logical(self, name: str, args: list[Any], kind: Kind) -> int:
        inner: Kind = "bool" if name.startswith("logical") else kind
        op = _LOGICAL[name]
        return self._add(op, inner, tuple(self._as(self._number(arg), inner) for arg in args))

    def _clamp(self, args: list[Any], kwargs: Mapping[str, Any], kind: Kind) -> int:
        bounds = dict(zip(("min", "max"), args[1:], strict=False)) | {
            name: self._constant(value) if isinstance(value, bool | int | float) else value
            for name, value in kwargs.items()
        }
        value = self._as(self._number(args[0]), kind)
        for name, op in (("min", "max"), ("max", "min")):
            if bounds.get(name) is not None:
                value = self._add(op, kind, (value, self._as(self._number(bounds[name]), kind)))
        return value

    def _power(self, args: list[Any], kwargs: Mapping[str, Any], kind: Kind) -> int:
        step, base_step = (self._steps[self._number(arg)] for arg in args[1::-1])
        exponent = constant_value(step) if step.op == "constant" else None
        if exponent is None and kind == "float" and base_step.op == "constant" and constant_value(base_step) > 0:
            power = self._as(self._number(args[1]), kind)
            factor = self._float(math.log2(constant_value(base_step)))
            return self._add("exp2", kind, (self._add("mul", kind, (power, factor)),))
        base = self._as(self._number(args[0]), kind)
        if exponent == 0.5 and kind == "float":
            return self._add("sqrt", kind, (base,))
        if exponent not in (1, 2, 3, 4):
            raise SpecError(self.name, "powers of 1, 2, 3, 4 or 0.5, or of a constant", str(exponent), WHITELIST)
        result = base
        for _ in range(int(exponent) - 1):
            result = self._add("mul", kind, (result, base))
        return result

    def _one_over(self, args: list[Any], kwargs: Mapping[str, Any], kind: Kind, root: bool = False) -> int:
        value = self._as(self._number(args[0]), kind)
        value = self._add("sqrt", kind, (value,)) if root else value
        return self._add("div", kind, (self._float(1.0), value))

    def _log2(self, args: list[Any], kwargs: Mapping[str, Any], kind: Kind) -> int:
        natural = self._add("log", kind, (self._as(self._number(args[0]), kind),))
        return self._add("mul", kind, (natural, self._float(1.4426950408889634)))

    def _shift(self, args: list[Any], kwargs: Mapping[str, Any], kind: Kind, *, op: str) -> int:
        """A shift to the right rounds down, as a division by a power of two."""
        step = self._steps[self._number(args[1])]
        places = constant_value(step) if step.op == "constant" else -1
        if kind != "int" or not 0 <= places < 63:
            raise SpecError(self.name, "shifts of whole numbers by a constant", str(places), WHITELIST)
        return self._add(op, kind, (self._as(self._number(args[0]), kind), self._constant(1 << int(places))))


_SAME = ("clone", "detach", "alias", "lift_fresh_copy", "lift_fresh", "contiguous")
_CASTS = ("_to_copy", "to", "convert_element_type")
_FILLED: Mapping[str, Callable[[Any], Any]] = {
    "scalar_tensor": lambda args: args[0],
    "full": lambda args: args[1],
    "new_full": lambda args: args[2],
    "full_like": lambda args: args[1],
    **dict.fromkeys(("ones", "new_ones", "ones_like"), lambda args: 1),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like"), lambda args: 0),
}
_BINARY = {
    "add": "add", "sub": "sub", "rsub": "sub", "mul": "mul", "div": "div", "floor_divide": "floor_div",
    "remainder": "mod", "minimum": "min", "maximum": "max",
}  # fmt: skip
_OF_ONE_DTYPE = ("floor_divide", "div", "remainder", "minimum", "maximum", "clamp", "clamp_min", "clamp_max")
"""Operations of whole numbers for which it matters that a number beside a narrow tensor becomes one of its dtype first;
sums, products and bits wrap to the same result."""
_COMPARED = {name: name for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_LOGICAL = {
    "logical_and": "and", "logical_or": "or", "logical_xor": "xor", "logical_not": "not",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "bitwise_not": "not",
    "__and__": "and", "__or__": "or", "__xor__": "xor",
}  # fmt: skip
_PLAIN = {name: name for name in ("neg", "abs", "exp", "exp2", "log", "tanh", "sigmoid", "sqrt")}
_SPECIAL: Mapping[str, Callable[..., int]] = {
    "clamp": GraphReader._clamp,
    "clamp_min": GraphReader._clamp,
    "clamp_max": lambda reader, args, kwargs, kind: reader._clamp([args[0], None, args[1]], kwargs, kind),
    "pow": GraphReader._power,
    **dict.fromkeys(("bitwise_left_shift", "__lshift__"), partial(GraphReader._shift, op="mul")),
    **dict.fromkeys(("bitwise_right_shift", "__rshift__"), partial(GraphReader._shift, op="floor_div")),
    "square": lambda reader, args, kwargs, kind: reader._power([args[0], reader._constant(2)], kwargs, kind),
    "reciprocal": GraphReader._one_over,
    "rsqrt": lambda reader, args, kwargs, kind: reader._one_over(args, kwargs, kind, root=True),
    "log2": GraphReader._log2,
}


def _live_steps(steps: Sequence[Step], last: int) -> list[int]:
    """The steps that the last one needs, in their order."""
    live = {last}
    for number in range(last, -1, -1):
        if number in live:
            live.update(steps[number].args)
    return sorted(live)


def _tensor_of(value: Any) -> Any:
    """The tensor that a node stands for; other values as they are."""
    return value.meta["val"] if isinstance(value, fx.Node) else value


def _tensor_kind(tensor: Any) -> TensorKind:
    value = tensor.meta["val"] if isinstance(tensor, fx.Node) else _module_tensor("a score function", tensor)
    shape = tuple(size if isinstance(size, int) else -1 for size in value.shape) or (1,)
    return TensorKind(str(value.dtype).removeprefix("torch."), shape)
