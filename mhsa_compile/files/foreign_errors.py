"""Where what is raised becomes an error of ours. Standard library only.

Two boundaries around what others raise: `reading` around a reader of bytes from outside, whose author lists no
exceptions; and `entry_point` around the entry points of this library, for what any line within may run out of. What our
own code raises by mistake is neither: `place_of_slip` tells it from theirs, and `defect` is its error.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

from mhsa_compile.errors import DefectError, InputError, MhsaError, OutputError, ResourceError
from mhsa_compile.files.room import NO_ROOM, number_of

P = ParamSpec("P")
T = TypeVar("T")

_UNWRITABLE = NO_ROOM | {errno.EACCES, errno.EPERM}
_NO_PATH = {errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EISDIR}
_NO_MEMORY = ("can't allocate memory", "std::bad_alloc", "Unable to allocate", "vector::_M_default_append")
"""How PyTorch and TVM, which raise RuntimeError, say that there is no memory."""
_NO_THREAD = "can't start new thread"  # Python's RuntimeError
_TERSE = (LookupError, AttributeError, AssertionError, ArithmeticError)  # whose words alone say little
_LONGEST = 300  # characters of what somebody else says
_SLIPS = (AssertionError, AttributeError, LookupError, NameError, NotImplementedError, TypeError)
"""What Python raises where a program is wrong. Numbers that do not fit each other, a file's too, are ValueErrors."""
_PACKAGE = Path(__file__).parents[1]


@contextmanager
def reading(kind: type[MhsaError], argument: str, expected: str, next_step: str = "") -> Iterator[None]:
    """Whatever a reader of foreign bytes raises in this block becomes a `kind`, or a ResourceError where the bytes ask
    for more memory than there is. Errors of ours pass. What is also
    written, and finds no room, gives an OutputError."""
    try:
        yield
    except MhsaError:
        raise
    except Exception as error:
        if number_of(error) in NO_ROOM:
            raise _unwritable(error) from error
        if (shortage := _shortage(argument, error)) is not None and not isinstance(error, RecursionError):
            raise shortage from error
        got = "values nested too deeply" if isinstance(error, RecursionError) else _words(error)
        raise kind(argument, expected, got, next_step) from error


def entry_point(function: Callable[P, T]) -> Callable[P, T]:
    """An entry point: what its work runs out of is said by one of our errors. Defects stay what they are."""

    @functools.wraps(function)
    def entry(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if (refusal := refusal_of(error)) is None:
                raise
            raise refusal from error

    return entry


def refusal_of(error: Exception) -> MhsaError | None:
    """What this machine or its file system could not give, as an error of ours; None for everything else."""
    if isinstance(error, MhsaError):
        return None
    if number_of(error) in (_UNWRITABLE if isinstance(error, OSError) else NO_ROOM):
        return _unwritable(error)
    if isinstance(error, OSError) and error.errno in _NO_PATH and error.filename:
        got = f"{str(error.filename)[:_LONGEST]!r} ({error.strerror})"
        return InputError("path", "one that this file system can have", got)
    if isinstance(error, ValueError) and str(error).startswith("embedded null"):
        return InputError("path", "one without a NUL", str(error))
    return _shortage("memory", error)


def place_of_slip(error: BaseException) -> str | None:
    """The file and line of this library at which it fell over itself; None for what code of others raises, and for
    errors that have a class of ours."""
    if not isinstance(error, _SLIPS) or type(error).__module__ != "builtins":
        return None
    places = _places(error)
    return places[-1] if places else None


def defect(argument: str, expected: str, error: BaseException, way_out: str = "") -> DefectError:
    """The error for what our own code, or what it asked of TVM, raised where the source was found valid."""
    kind, words = type(error).__name__, _words(error)
    words = words if words.startswith(kind) else f"{kind}: {words}"
    next_step = "This is a defect of ours: report it, with the source and this message."
    return DefectError(
        argument, expected, f"{words}, at {[*filter(None, _places(error))][-1]}", f"{next_step} {way_out}".rstrip()
    )


def _places(error: BaseException) -> list[str | None]:
    """The lines that an error passed, the one that raised it last; None for those of others."""
    lines = [(Path(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    root = _PACKAGE.parent
    return [f"{f.relative_to(root).as_posix()}:{line}" if f.is_relative_to(_PACKAGE) else None for f, line in lines]


def _unwritable(error: Exception) -> OutputError:
    name = getattr(error, "filename", None)
    temporary = getattr(sys.modules.get("tempfile"), "tempdir", None) or os.environ.get("TMPDIR", "/tmp")
    place = repr(str(name)) if name else f"file system (temporary files are in {temporary!r})"
    next_step = "Free some space, lift the limit on sizes of files, or choose another place with -o or TMPDIR."
    return OutputError(place, "room for it, and permission", os.strerror(number_of(error) or 0), next_step)


def first_line(error: BaseException) -> str:
    """What an error says, in so many words as a message has room for; of a mistake of ours, that it is one."""
    place = place_of_slip(error)
    return _words(error) if place is None else f"{_words(error)}, at {place}, a defect of ours"


def _words(error: BaseException) -> str:
    lines = [line.strip().removesuffix(".") for line in str(error).splitlines() if line.strip()]
    kind = type(error).__name__
    if not lines:
        return kind
    return f"{kind}: {lines[0][:_LONGEST]}" if isinstance(error, _TERSE) else lines[0][:_LONGEST]


def _shortage(argument: str, error: Exception) -> ResourceError | None:
    if isinstance(error, RecursionError):
        return ResourceError(argument, "values nested less deeply", "more levels than Python's stack has room for")
    if isinstance(error, BlockingIOError) or str(error).startswith(_NO_THREAD):
        hint = "Raise the limit: `ulimit -u`, or the container's limit on pids."
        return ResourceError("process", "threads and processes that it may start", first_line(error), hint)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(w in str(error) for w in _NO_MEMORY)):
        return ResourceError(argument, "what fits this machine's memory", first_line(error), "Ask for smaller sizes.")
    return None
