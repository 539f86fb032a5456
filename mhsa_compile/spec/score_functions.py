"""A function of a score and of where it stands, in FlexAttention's form, as plain data: what `mask_mod` and `score_mod`
become once they are traced.

A function is a list of steps, each of which uses those before it; the last one is its result. Whoever computes it (the
eager module, the float64 oracle, a kernel) walks over the same list, with arithmetic of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from mhsa_compile.errors import SpecError
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.spec.checks import value_text

Kind = Literal["bool", "int", "float"]
PLACES = ("b", "h", "q_idx", "kv_idx")
"""What every function is given: batch entry, query head, place of the query, number of the key."""
LEAVES = ("score", *PLACES)
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
ARITHMETIC = ("add", "sub", "mul", "div", "floor_div", "mod", "min", "max")
LOGIC = ("and", "or", "xor", "not")
FUNCTIONS = ("neg", "abs", "exp", "exp2", "log", "tanh", "sigmoid", "sqrt")
WHOLE: Mapping[str, tuple[int, int]] = {
    "int64": (-(2**63), 2**63 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int8": (-(2**7), 2**7 - 1),
    "uint16": (0, 2**16 - 1),
    "uint8": (0, 2**8 - 1),
}
"""The dtypes of whole numbers that a cast may name, each with its least and largest."""
OPS = (*LEAVES, "constant", "load", "cast", "where", *COMPARISONS, *ARITHMETIC, *LOGIC, *FUNCTIONS)


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One value of a function.

    op      of OPS. "constant" is `value`; "load" is the element of tensor `value` at the whole numbers `args`, each
            counted from the end where it is negative; "where" chooses by its first argument between the other two;
            "floor_div" and "mod" round down, as Python does; "div" is of floats. "cast" to a whole number is to the
            dtype `value` of WHOLE ("" is int64), and wraps there. Of a float it leaves out what is behind the point;
            one that no number of 32 bits is near (of 64, if the dtype is int64), and NaN, become the least such number
            first. So PyTorch has it on x86
    kind    of the value. Arguments of arithmetic and comparisons are of one kind
    args    the numbers of steps before it
    """

    op: str
    kind: Kind
    args: tuple[int, ...] = ()
    value: bool | int | float | str = ""  # a constant float as Python writes it: JSON has no infinity


class TensorKind(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that a function captures: its dtype, and its sizes where the function was traced."""

    dtype: str
    shape: tuple[int, ...]


class ScoreFunction(msgspec.Struct, frozen=True):
    """A traced function. Its tensors come to a kernel as inputs, in their order.

    A whole number is computed as one of 64 bits, which wraps; narrower ones are casts after each step. A float is
    computed in float32 whatever its dtype was (in float64 by the oracle).
    An index outside of its tensor, and a division of whole numbers by 0, make the score of that pair NaN.
    """

    steps: tuple[Step, ...]
    tensors: tuple[TensorKind, ...] = ()

    def __post_init__(self) -> None:
        """Raises SpecError for steps that nobody here wrote."""
        for number, step in enumerate(self.steps):
            loads = step.op == "load"
            valid = step.op in OPS and (not loads or step.value in range(len(self.tensors)))
            if not valid or any(not 0 <= arg < number for arg in step.args):
                raise SpecError("score function", "steps that use those before them", f"step {number}: {step.op!r}")
            if step.op == "cast" and step.kind == "int" and step.value not in ("", *WHOLE):
                got = f"step {number}: a cast to {value_text(step.value)}"
                raise SpecError("score function", f"casts to {', '.join(WHOLE)}", got)
        if not self.steps:
            raise SpecError("score function", "one step or more", "none")

    @property
    def kind(self) -> Kind:
        return self.steps[-1].kind

    @property
    def may_be_infinite(self) -> bool:
        """Whether it has a way to make -infinity of finite scores that are not enormous."""
        grows = ("log", "div", "exp", "exp2")
        floats = [step for step in self.steps if step.kind == "float"]
        return any(
            step.op in (*grows, "load") or (step.op == "constant" and math.isinf(constant_value(step)))
            for step in floats
        )

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, name: str, text: str | bytes) -> ScoreFunction:
        """Raises SpecError, of the function `name`."""
        with reading(SpecError, name, "the steps of a traced function"):
            return msgspec.json.decode(text, type=ScoreFunction)

    def dependences(self) -> list[frozenset[str]]:
        """Which of LEAVES each step depends on."""
        result: list[frozenset[str]] = []
        for step in self.steps:
            own = frozenset((step.op,)) if step.op in LEAVES else frozenset[str]()
            result.append(own.union(*(result[arg] for arg in step.args)))
        return result

    def depends_on(self, leaf: str) -> bool:
        return leaf in self.dependences()[-1]

    def text(self) -> str:
        """The function as text, such as where(ge(q_idx, kv_idx), score, -inf). What is used twice has a name."""
        uses = [arg for step in self.steps for arg in step.args]
        texts: list[str] = []
        definitions: list[str] = []
        for number, step in enumerate(self.steps):
            text = _text(step, [texts[arg] for arg in step.args])
            if step.args and uses.count(number) > 1:
                definitions.append(f"t{number} = {text}")
                text = f"t{number}"
            texts.append(text)
        return "; ".join([*definitions, texts[-1]])


def _text(step: Step, args: list[str]) -> str:
    inner = ", ".join(args)
    if step.op in LEAVES:
        return step.op
    if step.op == "constant":
        return str(step.value)
    if step.op == "load":
        return f"tensor{step.value}[{inner}]"
    return f"{(step.value or step.kind) if step.op == 'cast' else step.op}({inner})"


def leaves_of(name: str) -> tuple[str, ...]:
    """What the function of this field is of."""
    return LEAVES if name == "score_mod" else PLACES


def checked_function(name: str, value: object) -> object:
    """None, a function, or a ScoreFunction, also from its plain values. Raises SpecError."""
    if value is None or isinstance(value, ScoreFunction) or callable(value):
        return value
    if isinstance(value, Mapping):
        with reading(SpecError, name, "the steps of a traced function"):
            return msgspec.convert(value, ScoreFunction)
    arguments = ", ".join(leaves_of(name))
    raise SpecError(name, f"None, or a function of ({arguments})", value_text(value))


def wrapped(value: int, dtype: str) -> int:
    """A whole number as one of `dtype`, which wraps."""
    low, high = WHOLE[dtype]
    return (value - low) % (high - low + 1) + low


def constant_value(step: Step) -> bool | int | float:
    """The number that a constant step holds."""
    if step.kind == "float":
        return float(step.value)
    return bool(step.value) if step.kind == "bool" else int(step.value)
