"""TIR's expressions as closures over the threads of a run."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from support.simt import ptx
from support.simt.memory import numpy_dtype
from support.simt.threads import Threads, Thunk, key_of


class Expressions(Threads):
    """Translates expressions: each kind of node has a method of its name."""

    def expression(self, node: Any) -> Thunk:
        """A closure that gives an expression's value for the active lanes."""
        name = type(node).__name__
        if name in _BINARY:
            a, b, apply = self.expression(node.a), self.expression(node.b), _BINARY[name]
            return lambda: apply(a(), b())
        return getattr(self, f"_{name}")(node)  # type: ignore[no-any-return]

    def _IntImm(self, node: Any) -> Thunk:
        value = numpy_dtype(_scalar(node)[0]).type(int(node.value))
        return lambda: value

    def _FloatImm(self, node: Any) -> Thunk:
        value = numpy_dtype(_scalar(node)[0]).type(float(node.value))
        return lambda: value

    def _StringImm(self, node: Any) -> Thunk:
        value = str(node.value)
        return lambda: value

    def _Var(self, node: Any) -> Thunk:
        key = key_of(node)
        return lambda: self.values[key]

    def _Cast(self, node: Any) -> Thunk:
        dtype, value = numpy_dtype(_scalar(node)[0]), self.expression(node.value)
        return lambda: value().astype(dtype)

    def _Not(self, node: Any) -> Thunk:
        value = self.expression(node.a)
        return lambda: np.logical_not(value())

    def _And(self, node: Any) -> Thunk:
        return self._lazily(node, lambda a: a, np.logical_and)

    def _Or(self, node: Any) -> Thunk:
        return self._lazily(node, np.logical_not, np.logical_or)

    def _lazily(self, node: Any, needs: Callable[[Any], Any], join: Callable[[Any, Any], Any]) -> Thunk:
        """The second operand is evaluated only where it matters, as in C."""
        a, b = self.expression(node.a), self.expression(node.b)

        def evaluate() -> Any:
            left = a()
            with self.only(needs(left)) as some:
                right = b() if some else np.False_
            return join(left, right)

        return evaluate

    def _Select(self, node: Any) -> Thunk:
        parts = [self.expression(part) for part in (node.condition, node.true_value, node.false_value)]

        def evaluate() -> Any:
            condition, yes, no = (part() for part in parts)
            return np.where(condition, yes, no)[()]

        return evaluate

    def _Ramp(self, node: Any) -> Thunk:
        base, stride, lanes = self.expression(node.base), self.expression(node.stride), np.arange(int(node.lanes))
        return lambda: np.reshape(base(), (-1, 1)) + stride() * lanes

    def _Broadcast(self, node: Any) -> Thunk:
        value, lanes = self.expression(node.value), int(node.lanes)
        return lambda: np.repeat(np.reshape(value(), (-1, 1)), lanes, axis=1)

    def _Shuffle(self, node: Any) -> Thunk:
        vectors = [self.expression(vector) for vector in node.vectors]
        order = [int(index) for index in node.indices]

        def evaluate() -> Any:
            pairs = zip(vectors, node.vectors, strict=True)
            parts = [np.reshape(vector(), (-1, _scalar(part)[1])) for vector, part in pairs]
            rows = max(part.shape[0] for part in parts)
            row = np.concatenate([np.broadcast_to(part, (rows, part.shape[1])) for part in parts], axis=1)
            return row[:, order[0]] if len(order) == 1 else row[:, order]

        return evaluate

    def _TensorLoad(self, node: Any) -> Thunk:
        key, indices = key_of(node.source), [self.expression(index) for index in node.indices]
        return lambda: self.load(self.views[key], [index() for index in indices])

    def _Call(self, node: Any) -> Thunk:
        name = str(node.op.name).removeprefix("tirx.").removeprefix("prim.")
        if name == "address_of":
            key, indices = key_of(node.args[0].source), [self.expression(index) for index in node.args[0].indices]
            return lambda: self.address(self.views[key], [index() for index in indices])
        if name == "if_then_else":
            return self._lazy_choice(node)
        if name in ptx.INSTRUCTIONS:
            return ptx.INSTRUCTIONS[name](self, node)
        arguments = [self.expression(argument) for argument in node.args]
        if name == "reinterpret":
            dtype = numpy_dtype(_scalar(node)[0])
            return lambda: np.asarray(arguments[-1]()).copy().view(dtype)[()]
        if name == "call_pure_extern":  # a function of CUDA's: the name, then its operands
            name, arguments = arguments[0](), arguments[1:]
        apply = _FUNCTIONS[name]
        return lambda: apply(*(argument() for argument in arguments))

    def _lazy_choice(self, node: Any) -> Thunk:
        condition, yes, no = (self.expression(part) for part in node.args)
        dtype = numpy_dtype(_scalar(node)[0])

        def evaluate() -> Any:
            holds, nothing = condition(), dtype.type(0)
            with self.only(holds) as some:
                first = yes() if some else nothing
            with self.only(np.logical_not(holds)) as some:
                second = no() if some else nothing
            return np.where(holds, first, second)[()]

        return evaluate


def _scalar(node: Any) -> tuple[str, int]:
    """(element type, lanes) of an expression: float32x4 is of four float32."""
    element, _, lanes = str(node.ty.dtype).partition("x")
    return element, int(lanes or 1)


def _truncated_quotient(a: Any, b: Any) -> Any:
    if np.asarray(a).dtype.kind == "f" or np.asarray(a).dtype.name == "bfloat16":
        return a / b
    quotient = np.floor_divide(a, b)
    return quotient + np.asarray((quotient < 0) & (quotient * b != a), np.asarray(quotient).dtype)


def _truncated_rest(a: Any, b: Any) -> Any:
    return a - _truncated_quotient(a, b) * b


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": _truncated_quotient,
    "Mod": _truncated_rest,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "Min": np.fmin,
    "Max": np.fmax,
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
    "LShift": np.left_shift,
    "RShift": np.right_shift,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log2": np.log2,
    "log": np.log,
    "logf": np.log,
    "tanh": np.tanh,
    "fabs": np.abs,
    "sqrt": np.sqrt,
    "isnan": np.isnan,
    "fma": lambda a, b, c: a * b + c,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "bitwise_not": np.bitwise_not,
    "shift_left": np.left_shift,
    "shift_right": np.right_shift,
}
