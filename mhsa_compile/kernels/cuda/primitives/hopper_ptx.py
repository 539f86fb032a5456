"""The PTX instructions of Hopper kernels: barriers in shared memory, the copy engine, and products of a warpgroup.

Addresses of shared memory are uint32, as cvta makes them: what is laid out for wgmma must begin at multiples of 1024
bytes, and only numbers can be rounded up. Sources: PTX ISA 9.7.13.15 (mbarrier), 9.7.9.27 (cp.async.bulk.tensor),
9.7.15 (wgmma), 9.7.20.5 (setmaxnreg).
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.primitives.simt import PTX_WORDS, registers, set_register

WARPGROUP = 128  # threads
ROWS, DEPTH = 64, 16
"""The sizes of one product: rows of A and C, columns of A and rows of B."""


# Barriers in shared memory: a phase ends when as many have arrived as `begin_barrier` said and all bytes are there.


def begin_barrier(address: Expr, arrivals: int) -> None:
    T.evaluate(T.ptx["mbarrier.init.shared::cta.b64"](address, T.uint32(arrivals)))


def fence_barriers() -> None:
    """Makes barriers known to the copy engine, too; to be called by who began them, before a barrier of the block."""
    T.evaluate(T.ptx["fence.mbarrier_init.release.cluster"]())
    T.evaluate(T.ptx["fence.proxy.async.shared::cta"]())


def arrive(address: Expr) -> None:
    T.evaluate(T.ptx["mbarrier.arrive.shared::cta.b64"](address))


def arrive_expecting(address: Expr, count: int) -> None:
    """Arrives, and the phase takes so many bytes more."""
    T.evaluate(T.ptx["mbarrier.arrive.expect_tx.shared::cta.b64"](address, T.uint32(count)))


def wait(address: Expr, parity: Expr) -> None:
    """Waits until the phase of this parity, 0 for the first, is over; the one "before the first" has parity 1."""
    T.evaluate(T.cuda.mbarrier_wait(address, T.cast(parity, "uint32")))


# Named barriers of some of a block's threads.


def meet(number: Expr, threads: int) -> None:
    T.evaluate(T.ptx["bar.sync"](number, T.uint32(threads)))


def announce(number: Expr, threads: int) -> None:
    """Arrives at the barrier at which others `meet`, without waiting."""
    T.evaluate(T.ptx["bar.arrive"](number, T.uint32(threads)))


def meet_any(result: Expr, number: Expr, threads: int, word: Expr) -> None:
    """result[0] = 1 if the word is not zero for any of those who meet, else 0."""
    T.evaluate(T.ptx["bar.red.or.pred"](result[0], number, T.uint32(threads), T.ptx.pred(word)))


# The copy engine.


def load_box(address: Expr, tensor: Expr, coordinates: Sequence[Expr], barrier: Expr) -> None:
    """Starts copying a box of a tensor, whose bytes count for the barrier; what lies outside of it becomes zeros."""
    words = f"cp.async.bulk.tensor.{len(coordinates)}d.shared::cluster.global.mbarrier::complete_tx::bytes"
    T.evaluate(T.ptx[words](address, T.address_of(tensor), *coordinates, barrier))


def store_box(tensor: Expr, coordinates: Sequence[Expr], address: Expr) -> None:
    """Starts copying a box to a tensor, but for what lies outside of it."""
    words = f"cp.async.bulk.tensor.{len(coordinates)}d.global.shared::cta.bulk_group"
    T.evaluate(T.ptx[words](T.address_of(tensor), *coordinates, address))


def wait_stores() -> None:
    """Waits until what this thread stores has been read from shared memory."""
    T.evaluate(T.ptx["cp.async.bulk.commit_group"]())
    T.evaluate(T.ptx["cp.async.bulk.wait_group.read"](0))


def fence_for_engines() -> None:
    """Lets the copy engine and the tensor cores read, after the next barrier, what this thread wrote to shared
    memory."""
    T.evaluate(T.ptx["fence.proxy.async.shared::cta"]())


def fetch_map(tensor: Expr) -> None:
    T.evaluate(T.ptx["prefetch.tensormap"](T.address_of(tensor)))


# Products of a warpgroup.


def products_begin() -> None:
    """Separates what is done to registers from the products that use them."""
    T.evaluate(T.ptx["wgmma.fence.sync.aligned"]())


def products_end() -> None:
    """Closes a group of products."""
    T.evaluate(T.ptx["wgmma.commit_group.sync.aligned"]())


def products_wait(pending: int) -> None:
    """Waits until all groups but the last `pending` are done. Their registers have to be pinned next."""
    T.evaluate(T.ptx["wgmma.wait_group.sync.aligned"](pending))


def multiply_shared(c: Expr, columns: int, a: Expr, b: Expr, adds: bool, dtype: str) -> None:
    """C = A B^T, or C += A B^T: A (64, 16) and B (columns, 16) by descriptors, rows of 16 elements in a row."""
    # Whether C is added to; A and B as they are, not negated; neither is transposed.
    T.evaluate(_product(columns, dtype)(*_all(c, columns // 2), a, b, T.bool(adds), 1, 1, 0, 0))


def multiply_registers(c: Expr, columns: int, a: Expr, at: int, b: Expr, dtype: str) -> None:
    """C += A B: A (64, 16) in the four words from a[at] on, B (16, columns) by a descriptor, columns in a row."""
    words = [a[at + i] for i in range(4)]
    # C is added to; A and B as they are, not negated; B is transposed.
    T.evaluate(_product(columns, dtype)(*_all(c, columns // 2), *words, b, T.bool(True), 1, 1, 1))


def _product(columns: int, dtype: str) -> Expr:
    short = PTX_WORDS[dtype]
    return T.ptx[f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{short}.{short}"]


def _all(cells: Expr, count: int) -> list[Expr]:
    return [cells[i] for i in range(count)]


def pin(cells: Expr, count: int, dtype: str = "float32") -> None:
    """The compiler moves no use of these registers across this place: it does not know that products write to them
    until they are waited for."""
    kind, letter = {"float32": ("float", "f"), "uint32": ("unsigned int", "r"), "int32": ("int", "r")}[dtype]
    name = f"pin_{dtype}_{count}"
    parameters = ", ".join(f"{kind}& r{i}" for i in range(count))
    operands = ", ".join(f'"+{letter}"(r{i})' for i in range(count))
    source = f'__forceinline__ __device__ void {name}({parameters}) {{ asm volatile("" : {operands} :: "memory"); }}'
    T.evaluate(T.cuda.func_call(name, *_all(cells, count), source_code=f"\n{source}\n"))


def fresh(value: Expr) -> Expr:
    """The same number, int32, as one that the compiler knows nothing of: what follows from it is computed where it is
    needed, not once for all items and kept in registers that products need."""
    cell = registers(1, "int32")
    set_register(cell, 0, value)
    pin(cell, 1, "int32")
    return T.Bind(cell[0])


# Roles.


def give_registers(count: int) -> None:
    """Keeps so many registers a thread, and gives the others of its warpgroup back to the block."""
    T.evaluate(T.ptx["setmaxnreg.dec.sync.aligned.u32"](count))


def take_registers(count: int) -> None:
    """Waits until there are so many registers for each thread of the warpgroup."""
    T.evaluate(T.ptx["setmaxnreg.inc.sync.aligned.u32"](count))


def same_for_warp(value: Expr, lanes: int = 0xFFFFFFFF) -> Expr:
    """A number that all lanes of a warp have which go on, by default all 32, so that the compiler knows they do:
    descriptors are of the warp, and so is what the copy engine is told. Lane 0 is among them."""
    shuffle = getattr(T.cuda, "__shfl_sync")  # in a class, the name would be mangled
    return shuffle(T.uint32(lanes), value, T.int32(0), T.int32(32))
