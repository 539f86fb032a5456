"""The words CUDA kernels are written in: registers, barriers, shuffles, and the fragments of mma.sync.m16n8k16.

A warp multiplies (16, 16) by (16, 8) into (16, 8). Its lane 4 g + q holds, of every 8 x 8 matrix of 16-bit elements,
row g and the pair of columns 2 q, 2 q + 1 in one word (PTX ISA, "Matrix Fragments for mma.m16n8k16"):

    A  4 words: rows g and g + 8 of the left half, then of the right half
    B  2 words: of its transpose (8, 16) row g of the left half, of the right half
    C  4 floats: row g, columns 2 q and 2 q + 1; row g + 8, the same columns

So two neighbouring C tiles, rounded to 16 bits and packed in pairs, are one A tile without any exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, TypeAlias, TypeVar

from tvm import tirx
from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CudaProfile

WARP = 32
MOST_REGISTERS = 255  # of a thread, on every GPU
ROWS, DEPTH, COLUMNS = 16, 16, 8
"""The sizes of one product: rows of A and C, columns of A and rows of B, columns of B and C."""
SPARE = 16
"""Registers that a thread must have to spare where `min_blocks_per_sm` is told anything: with fewer ptxas spills when
it is told, and does not when it is not."""
_EVERY_LANE = 0xFFFFFFFF
PTX_WORDS = {"bfloat16": "bf16", "float16": "f16"}
_AS_BITS = {"bool": "u8", "bfloat16": "u16", "float16": "u16", "float32": "b32"}


def registers(count: int, dtype: str = "float32") -> Expr:
    """A thread's own array; in registers as long as every index is constant."""
    return T.alloc_buffer((count,), dtype, scope="local")


def set_register(cells: Expr, index: int, value: Expr) -> None:
    T.buffer_store(cells, value, [T.int32(index)])


def clear(cells: Expr, count: int) -> None:
    """Makes zeros of the first `count` registers."""
    for index in range(count):
        set_register(cells, index, tirx.const(0, cells.dtype))


def materialize(value: Expr, dtype: str = "int32") -> Expr:
    """Computes a number here and now: what TVM's simplifier cannot see through it does not copy into every use."""
    cell = registers(1, dtype)
    set_register(cell, 0, value)
    return T.Bind(cell[0])


def min_blocks_per_sm(blocks: int | None) -> Any:
    """A context inside a launch's: a thread gets so few registers that a multiprocessor has room for `blocks`; as many
    as ptxas likes, where that is None."""
    if blocks is None:
        return nullcontext()
    return T.attr(T.int32(0), "tirx.launch_bounds_min_blocks_per_sm", T.int32(blocks))


@contextmanager
def launch(blocks: Expr, threads: int, together: int | None = None) -> Iterator[tuple[Expr, Expr]]:
    """(block, thread) of a launch of so many blocks and threads of each; `together` is for `min_blocks_per_sm`."""
    with (
        T.launch_thread("blockIdx.x", blocks) as block,
        T.launch_thread("threadIdx.x", threads) as thread,
        min_blocks_per_sm(together),
    ):
        yield block, thread


def occupancy_hint(profile: CudaProfile, threads: int, registers: int, shared_bytes: int) -> int | None:
    """What `min_blocks_per_sm` is to be told of blocks whose threads take about so many registers. ptxas does not know
    that they take shared memory too: left to itself, it spilt a word or two for blocks that there is no room for.
    Where hardly a register is to spare it was the other way round."""
    return profile.blocks_at_once(threads, registers, shared_bytes) if registers + SPARE <= MOST_REGISTERS else None


def barrier() -> None:
    """Lets all threads of the block wait for each other. TVM knows this form, and adds no barriers of its own beside
    it."""
    T.evaluate(T.tvm_storage_sync("shared.dyn"))


def warp_barrier() -> None:
    """Lets the threads of the warp wait for each other: what they wrote to shared memory, they may read of each
    other."""
    T.evaluate(T.cuda.warp_sync())


def any_of_warp(condition: Expr) -> Expr:
    """Whether the condition holds in any lane of the warp."""
    return T.cuda.any_sync(T.uint32(_EVERY_LANE), T.cast(condition, "int32")) != 0


def any_of_block(condition: Expr) -> Expr:
    """Whether the condition holds in any thread of the block; a barrier of all its threads."""
    return T.cuda.syncthreads_or(T.cast(condition, "int32")) != 0


def ballot(condition: Expr) -> Expr:
    """A word with a bit for each lane: whether the condition holds there."""
    return T.cuda.ballot_sync(T.uint32(_EVERY_LANE), T.cast(condition, "int32"))


def shuffle_xor(value: Expr, lanes_apart: int) -> Expr:
    """The value of the lane whose number differs by this power of two."""
    shuffle = getattr(T.cuda, "__shfl_xor_sync")  # in a class, the name would be mangled
    return shuffle(T.uint32(_EVERY_LANE), value, T.int32(lanes_apart), T.int32(WARP))


def from_lane(value: Expr, lane: Expr) -> Expr:
    """The value of the lane of this number."""
    shuffle = getattr(T.cuda, "__shfl_sync")
    return shuffle(T.uint32(_EVERY_LANE), value, lane, T.int32(WARP))


def from_below(value: Expr, lanes_below: int) -> Expr:
    """The value of the lane so many below, its own where there is none."""
    shuffle = getattr(T.cuda, "__shfl_up_sync")
    return shuffle(T.uint32(_EVERY_LANE), value, T.int32(lanes_below), T.int32(WARP))


def over_quad(cells: Expr, index: int, join: Any) -> None:
    """Joins a value over the four lanes that share a row of C."""
    _over(cells, index, join, 1, 4)


def over_warp(cells: Expr, index: int, join: Any, *, step: int = 1, end: int = WARP) -> None:
    """Joins a value over the lanes whose numbers are alike modulo `step`, in groups of `end`, both powers of two."""
    _over(cells, index, join, step, end)


def _over(cells: Expr, index: int, join: Any, step: int, end: int) -> None:
    while step < end:
        set_register(cells, index, join(cells[index], shuffle_xor(cells[index], step)))
        step *= 2


def exp2(cells: Expr, index: int, value: Expr) -> None:
    """cells[index] = 2^value, to two units of float32; 0 of -inf."""
    T.evaluate(T.ptx["ex2.approx.ftz.f32"](cells[index], value))


def reciprocal(cells: Expr, index: int, value: Expr) -> None:
    """cells[index] = 1 / value, to a unit of float32; 0 of infinity."""
    T.evaluate(T.ptx["rcp.approx.ftz.f32"](cells[index], value))


def pack(words: Expr, index: int, low: Expr, high: Expr, dtype: str) -> None:
    """Two float32 rounded to one word of `dtype`."""
    T.evaluate(T.ptx[f"cvt.rn.{PTX_WORDS[dtype]}x2.f32"](words[index], high, low))


def unpack(word: Expr, dtype: str) -> tuple[Expr, Expr]:
    """Both values of a word of `dtype`, the low one first, as float32."""
    low, high = word & T.uint32(0xFFFF), word >> T.uint32(16)
    if dtype == "bfloat16":
        return T.reinterpret("float32", low << T.uint32(16)), T.reinterpret("float32", high << T.uint32(16))
    return tuple(T.cast(T.reinterpret("float16", T.cast(half, "uint16")), "float32") for half in (low, high))


def fetch_add(cells: Expr, index: int, address: Expr, value: Expr) -> None:
    """Adds to an int32 of global memory at once, whoever else does; cells[index] is what it was before."""
    T.evaluate(T.ptx["atom.global.add.s32"](cells[index], address, value))


def load_element(words: Expr, index: int, address: Expr, dtype: str) -> None:
    """Loads an element of global memory into words[index], its bits the lowest."""
    T.evaluate(T.ptx[f"ld.global.{_AS_BITS[dtype]}"](words[index], address))


def load_pair(words: Expr, index: int, address: Expr, dtype: str) -> None:
    """Loads two neighbours, of which the first lies at a multiple of their size, into the halves of the lowest bits of
    words[index], or into two words."""
    if dtype == "float32":
        T.evaluate(T.ptx["ld.global.v2.b32"](words[index], words[index + 1], address))
    else:
        T.evaluate(T.ptx[f"ld.global.{'u16' if dtype == 'bool' else 'b32'}"](words[index], address))


def load(cells: Expr, index: int, count: int, address: Expr, space: str = "shared") -> None:
    """Loads `count` words, 1, 2 or 4, into cells[index ..]: of 32 bits, uint32 or float32."""
    several = f".v{count}" if count > 1 else ""
    instruction = T.ptx[f"ld.{space}{several}.{_kind(cells[index])}"]
    T.evaluate(instruction(*(cells[index + i] for i in range(count)), address))


def store(address: Expr, values: Sequence[Expr], space: str = "shared") -> None:
    """Stores one word, two, or four."""
    several = f".v{len(values)}" if len(values) > 1 else ""
    T.evaluate(T.ptx[f"st.{space}{several}.{_kind(values[0])}"](address, *values))


def _kind(value: Expr) -> str:
    return "f32" if value.ty.dtype == "float32" else "b32"


def load_matrices(words: Expr, index: int, address: Expr, *, transposed: bool = False) -> None:
    """Loads four 8 x 8 matrices into words[index ..]: lane i gives the address of row i % 8 of matrix i // 8."""
    modifier = ".trans" if transposed else ""
    instruction = T.ptx[f"ldmatrix.sync.aligned.m8n8.x4{modifier}.shared.b16"]
    T.evaluate(instruction(*(words[index + i] for i in range(4)), address))


def transpose(words: Expr, index: int, word: Expr) -> None:
    """words[index] = this lane's word of the transpose of an 8 x 8 matrix, of which `word` is the lane's own word."""
    T.evaluate(T.ptx["movmatrix.sync.aligned.m8n8.trans.b16"](words[index], word))


def multiply_add(c: Expr, at: int, a: Expr, a_at: int, b: Expr, b_at: int, dtype: str) -> None:
    """C += A B, of tiles that begin at these indices of their registers."""
    short = PTX_WORDS[dtype]
    sums = [c[at + i] for i in range(4)]
    instruction = T.ptx[f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32"]
    T.evaluate(instruction(*sums, *(a[a_at + i] for i in range(4)), b[b_at], b[b_at + 1], *sums))


class ThreadIndex:
    """A thread's position: its warp, and in it lane 4 g + q."""

    def __init__(self, thread: Expr) -> None:
        self.thread = thread
        self.warp = materialize(T.truncdiv(thread, T.int32(WARP)))
        self.lane = materialize(T.truncmod(thread, T.int32(WARP)))
        self.g = materialize(T.truncdiv(self.lane, T.int32(4)))
        self.q = materialize(T.truncmod(self.lane, T.int32(4)))


Held = TypeVar("Held")
OfRows: TypeAlias = Held | tuple[Held, ...] | None
"""What all rows of a thread have, or what each of them has, where they are of several heads; or nothing."""


def of_row(values: OfRows[Held], row: int) -> Held | None:
    return values[row] if isinstance(values, tuple) else values


class Fragment(Protocol):
    """The keys of a thread's cells: of a tile's, those with the numbers `first` + offset.

    leads     whether the thread is the one of those that share its rows which speaks for them
    in_pairs  whether `first` is even, and each even offset followed by the next number
    Bits of a constant mask are found for them where `first` and an offset never add up beyond a multiple of 32.
    """

    first: Expr
    leads: Expr
    in_pairs: bool

    def offsets(self, count: int) -> list[int]:
        """The offsets of a thread's keys in a tile of so many columns, each of the cells' own width."""
        ...

    def at(self, row: int, count: int, number: int) -> int:
        """The index, in an array of all of a thread's scores, of the key at offset `number` in its row number `row`."""
        ...


class QuadFragment:
    """Tiles of 8 keys, as products of mma.sync leave them: a lane has two neighbours of each row."""

    in_pairs = True

    def __init__(self, place: ThreadIndex) -> None:
        self.first, self.leads = 2 * place.q, place.q == 0

    def offsets(self, count: int) -> list[int]:
        return [n * COLUMNS + e for n in range(count) for e in range(2)]

    def at(self, row: int, count: int, number: int) -> int:
        return cell(row, count, number // 2, number % 2)


class StridedCells:
    """Keys `first`, `first` + `stride`, ..; rows one after another."""

    in_pairs = False

    def __init__(self, first: Expr, stride: int, leads: Expr) -> None:
        self.first, self.stride, self.leads = first, stride, leads

    def offsets(self, count: int) -> list[int]:
        return [n * self.stride for n in range(count)]

    def at(self, row: int, count: int, number: int) -> int:
        return row * count + number


def cell(row: int, tiles: int, n: int, e: int) -> int:
    """The index, in a thread's array, of column 2 q + e of tile n of one of its rows; rows have `tiles` tiles."""
    return 4 * (row // 2 * tiles + n) + 2 * (row % 2) + e
