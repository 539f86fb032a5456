"""The words CPU kernels are written in: vectors, register tiles, transposition.

Everything here runs while a kernel is being emitted, inside a TVMScript builder, and is a pure function of its
arguments. The vector width and the number of registers are arguments too, so one template serves every vector machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import DTYPE_BYTES

Chunk = tuple[int, int]  # (offset, lanes) of one vector in a row


def chunks(width: int, lanes: int) -> list[Chunk]:
    """Cuts a row of `width` elements into full vectors, then into ever smaller powers of two: 40 -> 16, 16, 8."""
    cut: list[Chunk] = []
    offset = 0
    size = lanes
    while offset < width:
        if size <= width - offset:
            cut.append((offset, size))
            offset += size
        else:
            size //= 2
    return cut


def each_vector(width: int, lanes: int, body: Callable[[Expr, int], None]) -> None:
    """body(first, lanes) for a row of `width`: a loop over its full vectors, then the ever smaller rest."""
    whole = width // lanes
    if whole:
        with T.serial(T.int64(whole)) as i:
            body(materialize(i * lanes), lanes)
    for offset, size in chunks(width - whole * lanes, lanes):
        body(T.int64(whole * lanes + offset), size)


UNROLLED = 48
"""About so many multiply-adds stand in the body of an inner loop. With twelve, as many as the registers of AVX2 hold
sums, every eighth instruction was the loop's own."""


def runs_at_once(multiply_adds: int) -> int:
    """How many runs of so many multiply-adds each an inner loop makes in one turn: a power of two."""
    return 1 << max(1, UNROLLED // multiply_adds).bit_length() - 1


def each_run(first: Expr, end: Expr, size: int, body: Callable[[Expr, int], None], *, at_once: int = 1) -> None:
    """body(begin, size) for the numbers first .. end in runs of `size`, `at_once` of them in one turn of the loop, then
    body(number, 1) for each of the rest."""
    rest = first
    if at_once > 1:
        rest = _each_turn(rest, end, size, body, at_once)
    if size > 1:
        rest = _each_turn(rest, end, size, body, 1)
    with T.serial(rest, end) as i:
        body(i, 1)


def _each_turn(first: Expr, end: Expr, size: int, body: Callable[[Expr, int], None], runs: int) -> Expr:
    """The runs of `size` numbers from `first` on, so many a turn; the first number that is left."""
    turns = materialize(T.truncdiv(end - first, T.int64(runs * size)))
    with T.serial(turns) as i:
        for run in range(runs):
            body(materialize(first + i * (runs * size) + run * size), size)
    return materialize(first + turns * (runs * size))


WORTH_SHARING = 1 << 14  # elements that one thread copies or turns in a few microseconds, as long as it takes to share


def each_task(count: Expr, size: Expr | int, body: Callable[[Expr], None]) -> None:
    """body(task) for `count` tasks of `size` elements each: in parallel, unless there is little to do."""
    with T.If(count * size > WORTH_SHARING):
        with T.Then(), T.parallel(count) as task:
            body(task)
        with T.Else(), T.serial(count) as task:
            body(task)


def register_tile(registers: int, rows: Iterable[int], columns: Iterable[int]) -> tuple[int, int]:
    """(rows, columns) of the accumulators with the fewest loads a product.

    Rows scalars and columns vectors are loaded for rows * columns products; the accumulators, one row of vectors and
    one scalar must fit the registers.
    """
    fitting = [(r, c) for r, c in itertools.product(rows, columns) if r * c + c + 1 <= registers]
    return max(fitting, key=lambda tile: tile[0] * tile[1] / (tile[0] + tile[1]))


def tile_registers(registers: int) -> int:
    """The registers a tile may use inside a larger kernel: with all of them LLVM spills in the inner loop."""
    return registers * 3 // 4


def vector_type(dtype: str, lanes: int) -> str:
    """TVM's name of a vector of `lanes` elements; of the element itself where that is one."""
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def halved(values: list[Expr], combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """All of so many values as a power of two, combined in halves: no chain is longer than their number's logarithm."""
    while len(values) > 1:
        half = len(values) // 2
        values = [combine(values[i], values[i + half]) for i in range(half)]
    return values[0]


def splat(value: Expr, lanes: int) -> Expr:
    """A vector of `lanes` copies; a plain scalar where one lane is asked for."""
    return value if lanes == 1 else T.Broadcast(value, lanes)


def constant(value: float, lanes: int) -> Expr:
    return splat(T.float32(value), lanes)


def zero_if_finite(value: Expr, lanes: int) -> Expr:
    """0 * value: 0, NaN where it is NaN or infinite. Of one lane by its bits: the simplifier takes 0 * x to be 0."""
    if lanes > 1:
        return value * constant(0.0, lanes)
    infinite = T.int32(0x7F800000)
    is_finite = (T.reinterpret("int32", value) & infinite) != infinite
    return T.Select(is_finite, T.float32(0), T.reinterpret("float32", T.int32(0x7FC00000)))


def load(buffer: Expr, index: Sequence[Expr], lanes: int) -> Expr:
    """`lanes` neighbours in the last axis, from `index` on."""
    return buffer[tuple(index)] if lanes == 1 else buffer[(*index[:-1], T.Ramp(index[-1], 1, lanes))]


def store(buffer: Expr, index: Sequence[Expr], value: Expr, lanes: int) -> None:
    T.buffer_store(buffer, value, list(index) if lanes == 1 else [*index[:-1], T.Ramp(index[-1], 1, lanes)])


def prefetch(buffer: Expr, index: Sequence[Expr], *, soon: bool = True, write: bool = False) -> None:
    """Asks for the cache line of an element, into the first level or, if not `soon`, the second, and for the right to
    `write` there; an address outside of the buffer does no harm."""
    address = T.address_of(buffer[tuple(index)])
    words = (int(write), 3 if soon else 2, 1)  # llvm.prefetch's: read or write, locality, data
    T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch", address, *map(T.int32, words)))


def in_turn(number: Expr, runs: int, length: Expr | int) -> Expr:
    """The place that comes as number `number` where so many runs of `length` places take turns."""
    return T.truncmod(number, T.int64(runs)) * length + T.truncdiv(number, T.int64(runs))


REGISTER_BYTES = 1024
"""Up to this size TVM puts a buffer on the stack, where LLVM may turn it into registers."""


def scratch(shape: Sequence[int], dtype: str = "float32") -> Expr:
    """A buffer that stays in memory: what lives through an inner loop in registers takes them from it."""
    # As many rows as make it larger than what TVM puts on the stack.
    rest = math.prod(shape[1:]) * DTYPE_BYTES[dtype]
    return T.alloc_buffer((max(shape[0], REGISTER_BYTES // rest + 1), *shape[1:]), dtype)


def seen_whole(shape: Sequence[int], dtype: str = "float32") -> Expr:
    """Memory of a task's own, seen through a second buffer: TVM shrinks a buffer to what it can prove is used, and then
    loses its own proof."""
    return T.decl_buffer(tuple(shape), dtype, data=T.alloc_buffer(tuple(shape), dtype).data)


def side_by_side(shapes: Sequence[tuple[int, int]]) -> list[Expr]:
    """Several arrays in one scratch, so that one pointer leads to all of them: in a large kernel each takes a register,
    or is fetched from the stack in an inner loop."""
    ends = list(itertools.accumulate(rows * columns for rows, columns in shapes))
    data = scratch((1, ends[-1])).data
    return [
        T.decl_buffer(shape, "float32", data=data, elem_offset=T.int64(first))
        for shape, first in zip(shapes, (0, *ends), strict=False)
    ]


class RegisterTile:
    """`rows` x `columns` of vectors that stay in registers.

    LLVM promotes a buffer to registers only if it lies on the stack and every index into it is constant. TVM puts a
    buffer there up to REGISTER_BYTES, and only if its scope is "global": a "local" one comes from the heap at every
    iteration. So each row is a buffer of its own, and rows and columns are Python integers.
    """

    def __init__(self, rows: int, columns: Sequence[Chunk], dtype: str = "float32") -> None:
        self.columns = tuple(columns)
        width = sum(lanes for _, lanes in self.columns)
        self._starts = [sum(lanes for _, lanes in self.columns[:c]) for c in range(len(self.columns))]
        self._rows = [T.alloc_buffer((width,), dtype) for _ in range(rows)]

    @property
    def rows(self) -> int:
        return len(self._rows)

    def get(self, row: int, column: int) -> Expr:
        return load(self._rows[row], [self._starts[column]], self.columns[column][1])

    def set(self, row: int, column: int, value: Expr) -> None:
        store(self._rows[row], [self._starts[column]], value, self.columns[column][1])

    def fill(self, value: float) -> None:
        self.each(lambda row, column: constant(value, self.columns[column][1]))

    def each(self, value: Callable[[int, int], Expr]) -> None:
        """Sets every vector to `value(row, column)`."""
        for row in range(self.rows):
            for column in range(len(self.columns)):
                self.set(row, column, value(row, column))

    def outer_product(
        self,
        scalars: Callable[[int], Expr],
        vectors: Callable[[int], Expr],
        multiply_add: Callable[[Expr, Expr, Expr], Expr] | None = None,
    ) -> None:
        """tile[r, c] += scalars(r) * vectors(c): the inner loop of every matrix product here. Where an instruction does
        more than that it is `multiply_add(tile[r, c], scalars(r), vectors(c))`."""
        # All vectors, then one scalar at a time: so many registers `register_tile` counts.
        operands = [let(vectors(column)) for column in range(len(self.columns))]
        for row in range(self.rows):
            scalar = let(scalars(row))
            for column, (_, lanes) in enumerate(self.columns):
                total, operand = self.get(row, column), operands[column]
                if multiply_add is None:
                    self.set(row, column, total + splat(scalar, lanes) * operand)
                else:
                    self.set(row, column, multiply_add(total, scalar, operand))


def let(value: Expr) -> Expr:
    """Gives an expression a name, so that it is computed once."""
    return T.Bind(value)


def materialize(value: Expr, dtype: str = "int64", lanes: int = 1) -> Expr:
    """Computes a number or a vector here and now.

    TVM's simplifier copies a bound expression into every use and reasons about each copy, which took a minute on a
    causal kernel. It does not look through memory; LLVM does, and leaves none.
    """
    cell = T.alloc_buffer((lanes,), dtype)
    store(cell, [T.int64(0)], value, lanes)
    return let(load(cell, [T.int64(0)], lanes))


def any_lane(condition: Expr, lanes: int) -> Expr:
    """Whether a vector of conditions holds in any lane."""
    return condition if lanes == 1 else T.call_llvm_pure_intrin("bool", "llvm.vector.reduce.or", condition)


def transpose(rows: Sequence[Expr]) -> list[Expr]:
    """Transposes a square of vectors in log2(n) rounds of interleaving halves (a perfect shuffle each round)."""
    lanes = len(rows)
    half = lanes // 2
    low = [T.int32(i // 2 + lanes * (i % 2)) for i in range(lanes)]
    high = [T.int32(half + i // 2 + lanes * (i % 2)) for i in range(lanes)]
    for _ in range(lanes.bit_length() - 1):
        pairs = [(rows[i], rows[i + half]) for i in range(half)]
        rows = [let(T.Shuffle([a, b], side)) for a, b in pairs for side in (low, high)]
    return list(rows)


def sums(values: Sequence[Expr], lanes: int) -> list[Expr]:
    """The sum of all lanes of each vector. Halves of two are added at a time, which leaves both in one vector."""
    if len(values) > lanes:
        return [*sums(values[:lanes], lanes), *sums(values[lanes:], lanes)]
    count = 1 << (len(values) - 1).bit_length()
    vectors_, part_lanes = [*values, *[values[-1]] * (count - len(values))], lanes  # lanes of one value in a vector
    while part_lanes > 1:
        half, is_single = part_lanes // 2, len(vectors_) == 1
        pairs = [(vectors_[0],)] if is_single else list(zip(vectors_[::2], vectors_[1::2], strict=True))
        width = len(pairs[0]) * (lanes if not is_single else count * part_lanes)
        low = [T.int32(i) for i in range(width) if i % part_lanes < half]
        high = [T.int32(i) for i in range(width) if i % part_lanes >= half]
        vectors_ = [let(T.Shuffle(list(pair), low) + T.Shuffle(list(pair), high)) for pair in pairs]
        part_lanes = half
    return elements(vectors_[0], count)[: len(values)]


def pack_transposed(
    packed: Expr,
    count: int,
    width: int,
    lanes: int,
    rows: Callable[[Expr, int], list[Expr]],
    read: Callable[[Expr, Expr, int], Expr],
) -> None:
    """packed[e, i] = element e, of `width`, of row i, of `count`: a square of lanes x lanes at a time. rows(first, n)
    are the numbers of so many rows, read(row, e, n) are n elements of one."""

    def pack(first: Expr, size: int) -> None:
        numbers, squares = rows(first, size), width // size
        with T.serial(T.int64(squares)) as square:
            read_rows = [let(read(row, square * size, size)) for row in numbers]
            for e, column in enumerate(transpose(read_rows)):
                store(packed, [square * size + e, first], column, size)
        if squares * size == width:
            return
        with T.serial(T.int64(squares * size), T.int64(width)) as e:
            for i, row in enumerate(numbers):
                store(packed, [e, first + i], read(row, e, 1), 1)

    each_vector(count, lanes, pack)


def elements(vector: Expr, count: int) -> list[Expr]:
    """The `count` elements of a vector as scalars, each of which a machine may multiply by in place."""
    if count == 1:
        return [vector]
    vector = let(vector)
    return [let(T.Shuffle([vector], [T.int32(i)])) for i in range(count)]


def part(vector: Expr, first: int, size: int, lanes: int) -> Expr:
    """Lanes first .. first + size of a vector."""
    if size == lanes:
        return vector
    lanes_of_part = [T.int32(first + i) for i in range(size)]
    return T.Shuffle([vector], lanes_of_part)
