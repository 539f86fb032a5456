"""What iterations of a parallel loop write: each its own places, or no code is made.

TVM shares a loop's iterations among threads without a look at what they write. An array that is allocated outside of
the loop and written at the same places by every iteration is scratch that threads take from each other: results are
wrong in some calls, and right with one thread. A pass of TVM's can bring that about from code that is right, since it
moves an allocation to where all readers see it. So what is looked at is the last form before LLVM's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import tvm
from tvm import tirx

from mhsa_compile.errors import BuildError

Statement = Any  # TVM has no type stubs
Variable = Any  # a number, a pointer or an array
Variables = list[Variable]

_LAST = "tirx.LowerTVMBuiltin"
"""The first pass after which loops and arrays are no longer what they were."""


@contextmanager
def race_check() -> Iterator[Any]:
    """What a PassContext takes as an instrument. At the end of the block raises BuildError, if in it code was made of a
    function whose iterations write to shared places."""
    errors: list[BuildError] = []
    yield _Look(errors)
    if errors:
        raise errors[0]


@tvm.instrument.pass_instrument
class _Look:
    """The instrument of `race_check`. It keeps errors, since an exception that passes through TVM comes back as
    another."""

    def __init__(self, errors: list[BuildError]) -> None:
        self.errors = errors

    def run_before_pass(self, module: Any, info: Any) -> None:
        if str(info.name) == _LAST:
            functions = [(str(v.name_hint), f) for v, f in module.functions_items() if isinstance(f, tirx.PrimFunc)]
            self.errors += [_error(name, arrays) for name, f in functions if (arrays := shared_writes(f))]


def _error(function: str, arrays: list[str]) -> BuildError:
    return BuildError(
        f"function {function!r}",
        "parallel loops whose iterations write to places of their own",
        f"one in which all of them write to the same of {', '.join(map(repr, arrays))}",
        "Threads would disturb each other. This is a defect of mhsa-compile: please report it.",
    )


def shared_writes(function: Any) -> list[str]:
    """The arrays, by name, that parallel loops of a lowered PrimFunc write where the loop's variable has no say."""
    loops = [one for one in _statements(function.body) if type(one) is tirx.For and one.kind == tirx.ForKind.PARALLEL]
    return list(dict.fromkeys(name for loop in loops for name in _Iteration(loop).shared))


def _statements(statement: Statement) -> Iterator[Statement]:
    """A statement and all inside of it, in order. Their types are asked for as they are: `isinstance` of a class of
    TVM's goes through Python, and a kernel has tens of thousands of statements."""
    waiting = [statement]
    while waiting:
        statement = waiting.pop()
        yield statement
        kind = type(statement)
        if kind is tirx.SeqStmt:
            waiting += reversed(list(statement.seq))
        elif kind is tirx.IfThenElse:
            waiting += [part for part in (statement.else_case, statement.then_case) if part is not None]
        elif kind not in _LEAVES and hasattr(statement, "body"):
            waiting.append(statement.body)


_LEAVES = frozenset({tirx.BufferStore, tirx.Bind, tirx.AllocBuffer, tirx.DeclBuffer, tirx.Evaluate})


class _Iteration:
    """One iteration of a parallel loop: which of its values follow from the loop's variable, and what it writes where
    none of these has a say.

    `following` are those variables, and the arrays that hold such values; `home` is for each array that the iteration
    allocates, and each view of one, the memory it lies in. What an inner loop's end stores its beginning reads, so the
    statements are gone through until nothing more follows.

    Most stores are of floats into arrays of the iteration's own, and floats hardly ever decide a place. So the
    statements are gone through without those first: what follows from less leaves no less shared.
    """

    def __init__(self, loop: Statement) -> None:
        self.home: dict[Variable, Variable] = {}
        self.shared = self._shared(loop, with_floats=False) and self._shared(loop, with_floats=True)

    def _shared(self, loop: Statement, *, with_floats: bool) -> list[str]:
        """The arrays that are written to shared places; `with_floats`: floats in own arrays are followed, too."""
        self.following: set[Variable] = {loop.loop_var}
        steps = list(self._steps(loop.body, with_floats))
        count, shared = 0, list[str]()
        while count != len(self.following):
            count, shared = len(self.following), [name for step in steps for name in step()]
        return shared

    def _steps(self, body: Statement, with_floats: bool) -> Iterator[Callable[[], list[str]]]:
        """What the statements do that matters here, in order, with the variables in each looked up once. Each returns
        the arrays that it writes to shared places."""
        is_float = cache(lambda array: str(array.dtype).startswith(("float", "bfloat")))
        for one in _statements(body):
            kind = type(one)
            if kind is tirx.BufferStore:
                if (home := self.home.get(one.buffer)) is None:
                    yield partial(self._store, one.buffer, _variables_in(*one.indices))
                elif with_floats or not is_float(home):
                    yield partial(self._define, home, _variables_in(one.value, *one.indices))
            elif kind is tirx.Bind:
                yield partial(self._define, one.var, _variables_in(one.value))
            elif kind is tirx.AllocBuffer:
                self.home[one.buffer] = one.buffer
            elif kind is tirx.DeclBuffer:
                self._view(one.buffer, _variables_in(one.data))
            elif kind is tirx.Evaluate:
                yield partial(self._call, one.value, _variables_in(one.value))
            elif kind is tirx.For:  # where it ends is no place: what begins at 0 is shared from there on
                yield partial(self._define, one.loop_var, _variables_in(one.min))

    def _store(self, buffer: Variable, indices: Variables) -> list[str]:
        return [] if self._follows(indices) else [str(buffer.name)]

    def _define(self, variable: Variable, value: Variables) -> list[str]:
        if self._follows(value):
            self.following.add(variable)
        return []

    def _view(self, buffer: Variable, data: Variables) -> None:
        """Notes an array over memory that is there: it is the iteration's own, if that memory is."""
        if homes := [self.home[one] for one in data if one in self.home]:
            self.home[buffer] = homes[0]

    def _call(self, call: Any, variables: Variables) -> list[str]:
        """A call is taken to write into every array that it is told of, but for a prefetch."""
        arrays = [one for one in variables if one not in self.home and tirx.is_buffer_var(one)]
        if arrays and not self._follows(variables) and "llvm.prefetch" not in str(call):
            return [str(one.name) for one in arrays]
        return []

    def _follows(self, variables: Variables) -> bool:
        return any(self.home.get(one, one) in self.following for one in variables)


def _variables_in(*values: Any) -> Variables:
    """The variables in expressions, pointers and arrays among them."""
    return [one for value in values for one in tirx.analysis.undefined_vars(tirx.Evaluate(value))]
