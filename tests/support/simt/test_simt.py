"""The interpreter of kernels with threads: each instruction against plain NumPy, fragments by the formulas of the PTX
ISA; and what it has to refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.simt import interpreter
from support.simt.memory import SimtError
from tvm.tirx import Var
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import prim_func

RNG = np.random.default_rng(7)
HALVES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SHORT = {"bfloat16": "bf16", "float16": "f16"}


def kernel(
    body: Callable[..., None], shapes: dict[str, tuple[tuple[Any, ...], str]], threads: int = 32, blocks: Any = 1
) -> Any:
    """body(block, thread, *arguments) as a PrimFunc."""
    with prim_func("kernel") as builder:
        arguments = [T.match_buffer(T.arg(name, T.handle()), *shape) for name, shape in shapes.items()]
        with T.launch_thread("blockIdx.x", blocks) as block, T.launch_thread("threadIdx.x", threads) as thread:
            body(block, thread, *arguments)
    return builder.get()


def cells(count: int, dtype: str = "float32") -> Any:
    return T.alloc_buffer((count,), dtype, scope="local")


def shared(shape: tuple[int, ...], dtype: str) -> Any:
    return T.alloc_buffer(shape, dtype, scope="shared.dyn")


def barrier() -> None:
    T.evaluate(T.tvm_storage_sync("shared.dyn"))


def test_blocks_and_threads_of_a_symbolic_length():
    n = Var("n", "int64")

    def body(block, thread, x, y):
        i = T.Bind(T.cast(block, "int64") * 32 + T.cast(thread, "int64"))
        with T.If(i < n), T.Then():
            T.buffer_store(y, x[i] * T.float32(2) + T.cast(block, "float32"), [i])

    func = kernel(body, {"x": ((n,), "float32"), "y": ((n,), "float32")}, blocks=T.truncdiv(n + 31, T.int64(32)))
    for size in (1, 67, 1031):
        x, y = RNG.standard_normal(size, np.float32), np.zeros(size, np.float32)
        interpreter.run(func, x, y)
        np.testing.assert_array_equal(y, x * 2 + (np.arange(size) // 32).astype(np.float32))


def test_threads_that_part_come_together_again():
    """Loops whose trips differ, a while loop, both sides of a branch."""

    def body(_, thread, y):
        total = cells(1, "int32")
        T.buffer_store(total, T.int32(0), [0])
        with T.serial(T.truncmod(thread, T.int32(5))) as i:
            T.buffer_store(total, total[0] + i, [0])
        with T.While(total[0] < T.truncdiv(thread, T.int32(2))):
            T.buffer_store(total, total[0] * 2 + 1, [0])
        with T.If(thread < 9):
            with T.Then():
                T.buffer_store(y, total[0], [thread])
            with T.Else():
                T.buffer_store(y, T.int32(0) - total[0], [thread])

    y = np.zeros(32, np.int32)
    interpreter.run(kernel(body, {"y": ((32,), "int32")}), y)
    for thread in range(32):
        total = sum(range(thread % 5))
        while total < thread // 2:
            total = total * 2 + 1
        assert y[thread] == (total if thread < 9 else -total)


def test_vectors_and_views():
    def body(_, thread, x, y):
        words = T.decl_buffer((32, 4), "uint32", data=x.data)
        row = T.Bind(words[thread, T.Ramp(T.int32(0), T.int32(1), 4)])
        value = T.Bind(T.Shuffle([row], [T.int32(i) for i in (3, 2, 1, 0)]) ^ T.Broadcast(T.uint32(1), 4))
        T.buffer_store(y, value, [thread, T.Ramp(T.int32(0), T.int32(1), 4)])

    x, y = RNG.standard_normal((32, 4), np.float32), np.zeros((32, 4), np.uint32)
    interpreter.run(kernel(body, {"x": ((32, 4), "float32"), "y": ((32, 4), "uint32")}), x, y)
    np.testing.assert_array_equal(y, x.view(np.uint32)[:, ::-1] ^ 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_arithmetic(dtype):
    def body(_, thread, x, y):
        a, w = cells(1), cells(1, "uint32")
        T.evaluate(T.ptx["ex2.approx.ftz.f32"](a[0], x[thread, 0]))
        T.evaluate(T.ptx[f"cvt.rn.{SHORT[dtype]}x2.f32"](w[0], x[thread, 1], x[thread, 0]))
        T.buffer_store(y, a[0], [thread, 0])
        T.buffer_store(y, T.reinterpret("float32", w[0]), [thread, 1])
        T.buffer_store(y, T.if_then_else(thread < 31, x[thread + 1, 0], T.float32(5)), [thread, 2])

    x, y = RNG.standard_normal((32, 2), np.float32), np.zeros((32, 3), np.float32)
    interpreter.run(kernel(body, {"x": ((32, 2), "float32"), "y": ((32, 3), "float32")}), x, y)
    np.testing.assert_array_equal(y[:, 0], np.exp2(x[:, 0]))
    pairs = np.ascontiguousarray(y[:, 1]).view(HALVES[dtype]).reshape(32, 2)
    np.testing.assert_array_equal(pairs, x.astype(HALVES[dtype]))  # the first is the lower half
    np.testing.assert_array_equal(y[:, 2], np.append(x[1:, 0], 5))


@pytest.mark.parametrize("threads", [32, 96])
def test_shuffles(threads):
    def body(_, thread, y):
        value, mask, width = T.cast(thread * 10, "float32"), T.uint32(0xFFFFFFFF), T.int32(32)
        for i, (name, operand) in enumerate((("xor", 5), ("up", 3), ("down", 4))):
            shuffle = getattr(T.cuda, f"__shfl_{name}_sync")
            T.buffer_store(y, shuffle(mask, value, T.int32(operand), width), [thread, i])
        T.buffer_store(y, getattr(T.cuda, "__shfl_sync")(mask, value, T.int32(7), width), [thread, 3])

    y = np.zeros((threads, 4), np.float32)
    interpreter.run(kernel(body, {"y": ((threads, 4), "float32")}, threads=threads), y)
    for thread in range(threads):
        first, lane = thread // 32 * 32, thread % 32
        sources = (lane ^ 5, lane - 3 if lane >= 3 else lane, lane + 4 if lane < 28 else lane, 7)
        np.testing.assert_array_equal(y[thread], [10 * (first + source) for source in sources])


def test_votes():
    """A bit for each lane, and the number of the first that is set, from 1 on."""

    def body(_, thread, votes, first):
        mask = T.cuda.ballot_sync(T.uint32(0xFFFFFFFF), T.cast(thread % 5 == 3, "int32"))
        T.buffer_store(votes, mask, [thread])
        rest = mask & (T.uint32(0xFFFFFFFF) << T.cast(thread % 32, "uint32"))  # from this lane on
        T.buffer_store(first, T.cuda.ffs_u32(rest), [thread])

    votes, first = np.zeros(96, np.uint32), np.zeros(96, np.int32)
    interpreter.run(kernel(body, {"votes": ((96,), "uint32"), "first": ((96,), "int32")}, threads=96), votes, first)
    for thread in range(96):
        lanes = [lane for lane in range(32) if (thread // 32 * 32 + lane) % 5 == 3]
        assert votes[thread] == sum(1 << lane for lane in lanes)
        assert first[thread] == next((lane + 1 for lane in lanes if lane >= thread % 32), 0)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "trans"])
def test_ldmatrix(count, transposed):
    """PTX ISA: of matrix i, thread t holds the elements 2 (t % 4) and the next of row t / 4; with .trans, of column t
    / 4 those of rows 2 (t % 4) and the next. The addresses of its rows come from threads 8 i .. 8 i + 7."""

    def body(_, thread, x, y):
        tile, words = shared((8 * count, 24), "float16"), cells(count, "uint32")
        row = T.truncmod(thread, T.int32(8 * count))
        with T.If(thread < 8 * count), T.Then(), T.serial(T.int32(8)) as i:
            T.buffer_store(tile, x[row, i], [row, i])
        barrier()
        suffix = ".trans" if transposed else ""
        load = T.ptx[f"ldmatrix.sync.aligned.m8n8.x{count}{suffix}.shared.b16"]
        T.evaluate(load(*(words[i] for i in range(count)), T.address_of(tile[row, 0])))
        for i in range(count):
            T.buffer_store(y, words[i], [thread, i])

    x, y = RNG.standard_normal((8 * count, 8)).astype(np.float16), np.zeros((32, count), np.uint32)
    interpreter.run(kernel(body, {"x": ((8 * count, 8), "float16"), "y": ((32, count), "uint32")}), x, y)
    fragments = y.view(np.float16).reshape(32, count, 2)
    for t in range(32):
        for i in range(count):
            matrix = x[8 * i : 8 * i + 8].T if transposed else x[8 * i : 8 * i + 8]
            np.testing.assert_array_equal(fragments[t, i], matrix[t // 4, 2 * (t % 4) : 2 * (t % 4) + 2])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mma(dtype):
    """PTX ISA, fragments of m16n8k16: the formulas for a, b and c, thread by thread."""

    def body(_, thread, a, b, c):
        sums = cells(4)
        for i in range(4):
            T.buffer_store(sums, c[thread, i], [i])
        left, right = [a[thread, i] for i in range(4)], [b[thread, i] for i in range(2)]
        product = T.ptx[f"mma.sync.aligned.m16n8k16.row.col.f32.{SHORT[dtype]}.{SHORT[dtype]}.f32"]
        T.evaluate(product(*(sums[i] for i in range(4)), *left, *right, *(sums[i] for i in range(4))))
        for i in range(4):
            T.buffer_store(c, sums[i], [thread, i])

    A, B = (RNG.standard_normal(shape).astype(HALVES[dtype]) for shape in ((16, 16), (16, 8)))
    C = RNG.standard_normal((16, 8), np.float32)
    a, b = np.zeros((32, 8), HALVES[dtype]), np.zeros((32, 4), HALVES[dtype])
    c, expected = np.zeros((32, 4), np.float32), np.zeros((32, 4))
    whole = C + A.astype(np.float64) @ B.astype(np.float64)
    for t in range(32):
        group, member = t // 4, t % 4
        for i in range(8):
            row = group if i < 2 or 4 <= i < 6 else group + 8
            a[t, i] = A[row, member * 2 + (i & 1) + (8 if i >= 4 else 0)]
        for i in range(4):
            b[t, i] = B[member * 2 + (i & 1) + (8 if i >= 2 else 0), group]
            row, column = group if i < 2 else group + 8, member * 2 + (i & 1)
            c[t, i], expected[t, i] = C[row, column], whole[row, column]
    shapes = {"a": ((32, 4), "uint32"), "b": ((32, 2), "uint32"), "c": ((32, 4), "float32")}
    interpreter.run(kernel(body, shapes), a.view(np.uint32), b.view(np.uint32), c)
    np.testing.assert_allclose(c, expected, rtol=0, atol=2e-5)


def copying(wait: int | None) -> Any:
    """Two groups of copies, of the first and the second half of a row of 16 bytes each; the last six rows get zeros."""

    def body(_, thread, x, y):
        tile = shared((32, 16), "float16")
        for half in range(2):
            size = T.Select(thread < 26, T.uint32(16), T.uint32(0))
            source, target = T.address_of(x[T.min(thread, T.int32(25)), 8 * half]), T.address_of(tile[thread, 8 * half])
            T.evaluate(T.ptx["cp.async.cg.shared.global"](target, source, 16, size))
            T.evaluate(T.ptx["cp.async.commit_group"]())
        if wait is not None:
            T.evaluate(T.ptx["cp.async.wait_group"](wait))
        with T.serial(T.int32(16)) as i:
            T.buffer_store(y, tile[thread, i], [thread, i])

    return kernel(body, {"x": ((26, 16), "float16"), "y": ((32, 16), "float16")})


def test_asynchronous_copies_arrive_when_they_are_waited_for():
    x = RNG.standard_normal((26, 16)).astype(np.float16)
    whole = np.concatenate([x, np.zeros((6, 16), np.float16)])
    for wait, count in ((0, 16), (1, 8), (2, 0), (None, 0)):
        y = np.zeros((32, 16), np.float16)
        interpreter.run(copying(wait), x, y)
        np.testing.assert_array_equal(y[:, :count], whole[:, :count])
        assert np.isnan(y[:, count:]).all()


def neighbours(sync: Callable[[], None] | None, apart: int, *, again: bool = False) -> Any:
    """Each of 64 threads writes a word and reads another's; with `again`, then writes its own a second time."""

    def body(_, thread, y):
        words = shared((64,), "uint32")
        T.buffer_store(words, T.cast(thread, "uint32"), [thread])
        if sync is not None:
            sync()
        T.buffer_store(y, words[T.bitwise_xor(thread, T.int32(apart))], [thread])
        if again:
            T.buffer_store(words, T.cast(thread + 1, "uint32"), [thread])

    return kernel(body, {"y": ((64,), "uint32")}, threads=64)


def warp_barrier() -> None:
    T.evaluate(T.cuda.warp_sync())


def test_races():
    y = np.zeros(64, np.uint32)
    for func in (neighbours(barrier, 33), neighbours(warp_barrier, 3), neighbours(None, 0, again=True)):
        interpreter.run(func, y)
    for func in (neighbours(None, 1), neighbours(warp_barrier, 33)):
        with pytest.raises(SimtError, match="reads what another thread wrote"):
            interpreter.run(func, y)
    with pytest.raises(SimtError, match="overwrites what another thread read"):
        interpreter.run(neighbours(barrier, 1, again=True), y)


def test_what_a_warp_has_read_it_may_overwrite_once_it_has_met():
    """Several of its threads read one place: another of them may write there behind a barrier of the warp, and a thread
    of another warp only behind one of the block."""

    def body(writers, first, sync):
        def parts(_, thread, y):
            words = shared((64,), "uint32")
            T.buffer_store(words, T.cast(thread, "uint32"), [thread])
            barrier()
            T.buffer_store(y, words[T.truncdiv(thread, T.int32(32)) * 32], [thread])  # all of a warp the same
            sync()
            with T.If(T.truncmod(thread, T.int32(32)) == writers), T.Then():
                T.buffer_store(words, T.uint32(99), [T.truncdiv(thread + first, T.int32(32)) % 2 * 32])

        return kernel(parts, {"y": ((64,), "uint32")}, threads=64)

    y = np.zeros(64, np.uint32)
    interpreter.run(body(5, 0, warp_barrier), y)
    assert (y == np.repeat([0, 32], 32)).all()
    for func in (body(5, 32, warp_barrier), body(5, 0, lambda: None)):
        with pytest.raises(SimtError, match="overwrites what another thread read"):
            interpreter.run(func, y)


def handed_over(sync: Callable[[], None], apart: int, *, plainly: bool, same: bool = False) -> Any:
    """Each of 128 threads writes a word of global memory and reads another's, or all write the same one."""

    def body(block, thread, y):
        number = block * 64 + thread
        word, place = cells(1, "uint32"), T.int32(0) if same else number
        T.evaluate(T.ptx["st.global.b32"](T.address_of(y[T.int32(0), place]), T.cast(thread, "uint32")))
        sync()
        other = T.bitwise_xor(number, T.int32(apart))
        if plainly:
            T.buffer_store(word, y[T.int32(0), other], [0])
        else:
            T.evaluate(T.ptx["ld.global.b32"](word[0], T.address_of(y[T.int32(0), other])))
        T.buffer_store(y, word[0], [T.int32(1), number])

    return kernel(body, {"y": ((2, 128), "uint32")}, threads=64, blocks=2)


@pytest.mark.parametrize("blocks_together", [1, 2])
def test_who_may_touch_what_others_write_to_global_memory(blocks_together: int):
    """Threads of the same warp may behind a barrier, by instructions; nobody else may before the next launch."""
    y = np.zeros((2, 128), np.uint32)
    interpreter.run(handed_over(warp_barrier, 3, plainly=False), y, blocks_together=blocks_together)
    np.testing.assert_array_equal(y[1], (np.arange(128) ^ 3) % 64)
    wrong = (
        (handed_over(warp_barrier, 3, plainly=True), "reads plainly what thread"),  # a compiler may have kept it
        (handed_over(lambda: None, 3, plainly=False), "reads what thread"),
        (handed_over(barrier, 33, plainly=False), "reads what thread"),
        (handed_over(barrier, 0, plainly=False, same=True), "two threads write one element"),
    )
    for func, words in wrong:
        with pytest.raises(SimtError, match=words):
            interpreter.run(func, y, blocks_together=blocks_together)


def test_what_another_block_writes_is_there_in_the_next_launch():
    def body(reads: bool) -> Any:
        def part(block, thread, y):
            number = block * 32 + thread
            value = y[T.int32(0), T.bitwise_xor(number, T.int32(32))] if reads else T.cast(number, "uint32")
            T.buffer_store(y, value, [T.int32(reads), number])

        return part

    def both(*launches: bool) -> Any:
        with prim_func("kernel") as builder:
            y = T.match_buffer(T.arg("y", T.handle()), (2, 64), "uint32")
            for reads in launches:
                with T.launch_thread("blockIdx.x", 2) as block, T.launch_thread("threadIdx.x", 32) as thread:
                    body(reads)(block, thread, y)
        return builder.get()

    y = np.zeros((2, 64), np.uint32)
    interpreter.run(both(False, True), y)
    np.testing.assert_array_equal(y[1], np.arange(64) ^ 32)


def test_a_transpose():
    """Matrices of 8 x 8, one for each warp."""

    def body(_, thread, x, y):
        word = cells(1, "uint32")
        T.evaluate(T.ptx["movmatrix.sync.aligned.m8n8.trans.b16"](word[0], x[thread]))
        T.buffer_store(y, word[0], [thread])

    x, y = RNG.integers(0, 1 << 16, (2, 8, 8)).astype(np.uint16), np.zeros(64, np.uint32)
    interpreter.run(
        kernel(body, {"x": ((64,), "uint32"), "y": ((64,), "uint32")}, threads=64), x.view(np.uint32).ravel(), y
    )
    np.testing.assert_array_equal(y.view(np.uint16).reshape(2, 8, 8), x.swapaxes(1, 2))


def test_words_are_floats_where_registers_are():
    def body(_, thread, x, y):
        pair = cells(2)
        T.evaluate(T.ptx["ld.global.v2.f32"](pair[0], pair[1], T.address_of(x[thread * 2])))
        T.evaluate(T.ptx["st.global.v2.f32"](T.address_of(y[thread * 2]), pair[1] * T.float32(2), pair[0]))

    x, y = RNG.standard_normal(64, np.float32), np.zeros(64, np.float32)
    interpreter.run(kernel(body, {"x": ((64,), "float32"), "y": ((64,), "float32")}), x, y)
    np.testing.assert_array_equal(y.reshape(-1, 2), x.reshape(-1, 2)[:, ::-1] * np.float32([2, 1]))


def test_what_no_gpu_may_do():
    def barrier_of_some(_, thread, y):
        with T.If(thread < 5), T.Then():
            barrier()

    def beyond(_, thread, y):
        T.buffer_store(y, T.float32(0), [thread + 1])

    def misaligned(_, thread, y):
        words = cells(4, "uint32")
        with T.If(thread < 4), T.Then():
            T.evaluate(T.ptx["ld.global.v4.b32"](*(words[i] for i in range(4)), T.address_of(y[thread])))

    for body, words in ((barrier_of_some, "do not reach"), (beyond, "index 32"), (misaligned, "16 bytes from byte 4")):
        with pytest.raises(SimtError, match=words):
            interpreter.run(kernel(body, {"y": ((32,), "float32")}), np.zeros(32, np.float32))
