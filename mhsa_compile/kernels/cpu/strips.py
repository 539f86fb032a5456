"""A parallel loop cut into strips, each of which one thread goes through from its first iteration to its last: for a
kernel that carries something from one to the next.

Results do not depend on where strips begin.
"""

from __future__ import annotations

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.simd.vectors import materialize

FEWEST, MOST = 4, 16
"""Strips of each thread: what one is late another makes up for."""
LONG = 8
"""Iterations of a strip from which on more strips are better than longer ones."""
TEXT = """
@mhsa_loop_threads = weak hidden global ptr null
define i32 @mhsa_strip_threads() alwaysinline nounwind {
  %function = load ptr, ptr @mhsa_loop_threads
  %is_missing = icmp eq ptr %function, null
  br i1 %is_missing, label %missing, label %there
missing:
  ret i32 2
there:
  %threads = call i32 %function()
  ret i32 %threads
}
"""
"""Asks the pool (runtime/threads/threads.c), where it is linked, as in every library that is saved."""


def strip_count(iterations: Expr) -> Expr:
    """How many strips a loop is cut into: one where one thread runs it."""
    threads = materialize(T.cast(T.call_extern("int32", "mhsa_strip_threads"), "int64"))
    count = T.max(threads * FEWEST, T.min(threads * MOST, T.truncdiv(iterations, T.int64(LONG))))
    return materialize(T.Select(threads > 1, T.min(iterations, count), T.int64(1)))


def strip(iterations: Expr, number: Expr, count: Expr) -> tuple[Expr, Expr]:
    """(first, end) of a strip's iterations."""
    first, end = (T.truncdiv(iterations * turn, count) for turn in (number, number + 1))
    return materialize(first), materialize(end)
