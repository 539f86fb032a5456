"""What iterations of a parallel loop write: each its own places, or no code is made.

TVM shares a loop's iterations among threads without a look at what they write. An array that is allocated outside of
the loop and written at the same places by every iteration is scratch that threads take from each other: results are
wrong in some calls, and right with one thread. A pass of TVM's can bring that about from code that is right, since it
moves an allocation to where all readers see it. So what is looked at is the last form before LLVM's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tvm
from tvm import tirx

from mhsa_compile.errors import BuildError

Statement = Any  # TVM has no type stubs
Variable = Any  # a number, a pointer or an array

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
    loops = (_Iteration(loop) for loop in _parallel_loops(function.body))
    return list(dict.fromkeys(name for loop in loops for name in loop.shared))


def _parallel_loops(statement: Statement) -> Iterator[Statement]:
    if isinstance(statement, tirx.For) and statement.kind == tirx.ForKind.PARALLEL:
        yield statement
    for part in _parts(statement):
        yield from _parallel_loops(part)


def _parts(statement: Statement) -> list[Statement]:
    """The statements right inside of one."""
    if isinstance(statement, tirx.SeqStmt):
        return list(statement.seq)
    if isinstance(statement, tirx.IfThenElse):
        return [part for part in (statement.then_case, statement.else_case) if part is not None]
    return [statement.body] if hasattr(statement, "body") else []


class _Iteration:
    """One iteration of a parallel loop: which of its values follow from the loop's variable, and what it writes where
    none of these has a say.

    `following` are those variables, and the arrays that hold such values; `home` is for each array that the iteration
    allocates, and each view of one, the memory it lies in. What an inner loop's end stores its beginning reads, so the
    statements are gone through until nothing more follows.
    """

    def __init__(self, loop: Statement) -> None:
        self.following: set[Variable] = {loop.loop_var}
        self.home: dict[Variable, Variable] = {}
        count = 0
        while count != len(self.following):
            count, self.shared = len(self.following), list[str]()
            self._visit(loop.body)

    def _visit(self, statement: Statement) -> None:
        if isinstance(statement, tirx.BufferStore):
            self._store(statement)
        elif isinstance(statement, tirx.Bind):
            self._define(statement.var, statement.value)
        elif isinstance(statement, tirx.AllocBuffer):
            self.home[statement.buffer] = statement.buffer
        elif isinstance(statement, tirx.DeclBuffer):
            self._view(statement)
        elif isinstance(statement, tirx.Evaluate):
            self._call(statement.value)
        elif isinstance(statement, tirx.For):  # where it ends is no place: what begins at 0 is shared from there on
            self._define(statement.loop_var, statement.min)
        for part in _parts(statement):
            self._visit(part)

    def _store(self, statement: Statement) -> None:
        home = self.home.get(statement.buffer)
        if home is None:
            if not self._follows(*statement.indices):
                self.shared.append(str(statement.buffer.name))
        elif home not in self.following and self._follows(statement.value, *statement.indices):
            self.following.add(home)

    def _define(self, variable: Variable, value: Any) -> None:
        if self._follows(value):
            self.following.add(variable)

    def _view(self, statement: Statement) -> None:
        """Notes an array over memory that is there: it is the iteration's own, if that memory is."""
        if homes := [self.home[one] for one in _variables_in(statement.data) if one in self.home]:
            self.home[statement.buffer] = homes[0]

    def _call(self, call: Any) -> None:
        """A call is taken to write into every array that it is told of, but for a prefetch."""
        arrays = [one for one in _variables_in(call) if tirx.is_buffer_var(one) and one not in self.home]
        if arrays and not self._follows(call) and "llvm.prefetch" not in str(call):
            self.shared += [str(one.name) for one in arrays]

    def _follows(self, *values: Any) -> bool:
        variables = (self.home.get(one, one) for value in values for one in _variables_in(value))
        return any(one in self.following for one in variables)


def _variables_in(value: Any) -> Iterable[Variable]:
    """The variables in an expression, pointers and arrays among them."""
    variables: Iterable[Variable] = tirx.analysis.undefined_vars(tirx.Evaluate(value))
    return variables
