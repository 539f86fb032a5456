"""A format of stored numbers: what a row of float32 becomes in memory, and what is read of it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import DTYPE_BYTES
from mhsa_compile.kernels.cpu.simd.vectors import load, store, vector_type


@dataclass(frozen=True)
class Format:
    """What numbers are in memory, and how they get there.

    dtype          of an element
    multiplied_as  what a unit takes that multiplies elements as they are; nothing where they are widened by all
    is_scaled      whether each row has a step of its own, float32, which is kept beside it
    rounds_x       whether what weights of it are multiplied by is brought into it as well
    """

    dtype: str
    multiplied_as: str = ""
    is_scaled: bool = False
    rounds_x: bool = False

    @property
    def bytes(self) -> int:
        """Bytes that an element takes."""
        return DTYPE_BYTES[self.dtype]

    def widened(self, elements: Expr, lanes: int) -> Expr:
        """Elements as float32, without the step of their row."""
        raise NotImplementedError

    def narrowed(self, value: Expr, lanes: int, factor: Expr | None = None) -> Expr:
        """The elements nearest to float32 values of a row, which are multiplied by its factor first."""
        raise NotImplementedError

    def bits(self, value: Expr, lanes: int, factor: Expr | None = None) -> Expr:
        """The bits of the elements of `narrowed`, the lower ones of int32."""
        return self.bits_of(self.narrowed(value, lanes, factor), lanes)

    def bits_of(self, elements: Expr, lanes: int) -> Expr:
        """The bits of elements, the lower ones of int32."""
        unsigned = T.reinterpret(vector_type(f"uint{8 * self.bytes}", lanes), elements)
        return T.cast(unsigned, vector_type("int32", lanes))

    def whole(self, value: Expr, lanes: int, factor: Expr | None = None) -> Expr:
        """`narrowed` of a format of whole numbers, as int32."""
        return T.cast(self.narrowed(value, lanes, factor), vector_type("int32", lanes))

    def rounded(self, value: Expr, lanes: int, factor: Expr | None = None) -> Expr:
        """float32 values as elements, in float32 again."""
        return self.widened(self.narrowed(value, lanes, factor), lanes)

    def scale(self, read: Callable[[Expr, int], Expr], count: int, lanes: int, keep: Callable[[Expr], None]) -> Expr:
        """The factor of a row of `count` numbers, of which read(k, n) are n, up to `lanes`, from k on. `keep` is told
        its step."""
        raise NotImplementedError

    def place(self, index: Sequence[Expr]) -> list[Expr]:
        """Where the element of an index lies in memory."""
        return list(index)

    def load(self, buffer: Expr, index: Sequence[Expr], lanes: int) -> Expr:
        """`lanes` neighbours in the last axis, as float32."""
        return self.widened(load(buffer, index, lanes), lanes)

    def store(self, buffer: Expr, index: Sequence[Expr], value: Expr, lanes: int) -> None:
        """Stores `lanes` float32, each rounded to the nearest."""
        store(buffer, index, self.narrowed(value, lanes), lanes)
