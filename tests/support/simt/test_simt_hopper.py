"""The interpreter of Hopper kernels: descriptors and swizzles against the PTX ISA's own examples, and that it finds
what is wrong in kernels which are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.simt.hopper import HopperMachine
from support.simt.hopper_tma import TensorMap, swizzled
from support.simt.hopper_wgmma import Descriptor, accumulators, fragments, left_operand
from support.simt.memory import SimtError
from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import argument, prim_func
from mhsa_compile.kernels.cuda.primitives import hopper_ptx, simt
from mhsa_compile.kernels.cuda.primitives.hopper_tma import SwizzledTiles, Tensor
from mhsa_compile.kernels.cuda.primitives.simt import barrier, materialize, registers, set_register, store, warp_barrier
from mhsa_compile.kernels.interface.ops import HeadLayout

KEYS, WIDTH = 48, 72
"""The sizes of the small kernels: rows of K, and its columns, which are more than a panel."""


def word(start: int, leading: int, stride: int, swizzle: int) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | swizzle << 62


def elements(layout: tuple[tuple[int, int], ...], number: np.ndarray) -> np.ndarray:
    """A mode of a CuTe layout, ((shape, stride), ...), the first the fastest."""
    at = np.zeros_like(number)
    for shape, stride in layout:
        at, number = at + number % shape * stride, number // shape
    return at


@pytest.mark.parametrize(
    ("swizzle", "bits", "leading", "stride", "rows", "depth"),
    [
        # PTX ISA 9.7.15.5.1.2.1.3, the examples of figures 168 to 170, bf16: in elements.
        (0, 0, 128, 64, ((8, 1), (2, 64)), ((8, 8), (2, 128))),
        (3, 1, 128, 256, ((8, 1), (2, 8), (2, 128)), ((8, 16), (2, 256))),
        (2, 2, 256, 512, ((8, 1), (4, 8), (2, 256)), ((8, 32), (2, 512))),
        # The canonical layout of 128 bytes, with the strides of the attention kernel's V for 48 keys.
        (1, 3, 48 * 64, 512, ((8, 1), (8, 8), (2, 48 * 64)), ((8, 64), (2, 512))),
    ],
)
def test_matrices_whose_rows_are_neighbours(swizzle, bits, leading, stride, rows, depth):
    count = int(np.prod([shape for shape, _ in rows]))
    addresses = Descriptor.of(word(4096, 2 * leading, 2 * stride, swizzle)).addresses(count, is_transposed=True)
    plain = 2 * (elements(rows, np.arange(count))[:, None] + elements(depth, np.arange(16)))
    expected = plain ^ (plain >> 7 & (1 << bits) - 1) << 4  # Swizzle<bits, 4, 3>
    np.testing.assert_array_equal(addresses - 4096, expected)


def test_matrices_whose_depth_is_neighbours():
    """Swizzle<3, 4, 3> o ((8, m), (T, 2 k)) : ((8 T, SBO), (1, T)), and 16 columns further on."""
    for step in range(4):
        addresses = Descriptor.of(word(4096 + 32 * step, 16, 1024, 1)).addresses(24, is_transposed=False)
        row, column = np.arange(24)[:, None], np.arange(16) + 16 * step
        plain = row // 8 * 1024 + row % 8 * 128 + column * 2
        np.testing.assert_array_equal(addresses - 4096, plain ^ (plain >> 7 & 7) << 4)


def test_a_descriptor_that_hardware_reads_otherwise_is_refused():
    for wrong, why in (
        (word(4096 + 128, 16, 1024, 1), "pattern"),
        (word(4096 + 112, 16, 1024, 1), "span"),
        (1 << 50, "base"),
    ):
        with pytest.raises(SimtError, match=why):
            Descriptor.of(wrong).addresses(8, is_transposed=False)


def test_fragments():
    """Thread 4 g + q of warp w holds row 16 w + g, columns 2 q and 2 q + 1, then row + 8; then the next eight
    columns."""
    matrix = np.arange(2 * 64 * 24, dtype=np.float32).reshape(2, 64, 24)
    values = fragments(matrix)
    np.testing.assert_array_equal(accumulators(values), matrix)
    assert values[:8, 1, 32 * 2 + 4 * 5 + 3].tolist() == [
        matrix[1, 32 + 5 + 8 * h, 8 * n + 6 + e] for n in range(2) for h in range(2) for e in range(2)
    ]
    halves = np.arange(64 * 16, dtype=np.float16).reshape(1, 64, 16)
    pairs = fragments(halves.astype(np.float32)).astype(np.float16).reshape(4, 2, 1, 128)
    packed = np.ascontiguousarray(pairs.transpose(0, 2, 3, 1)).view(np.uint32)[..., 0]
    np.testing.assert_array_equal(left_operand(packed, np.float16), halves)


def test_boxes_are_zeros_outside_of_their_tensor():
    from support.simt.memory import GlobalMemory

    source = np.arange(3 * 5 * 24, dtype=np.float16).reshape(3, 5, 24)
    tensor_map = TensorMap()
    numbers = [24, 5, 3, 48, 240, 64, 8, 1, 1, 1, 1]
    tensor_map.encode((GlobalMemory("K", source), 0), numbers, "float16", 3, 3)
    box = tensor_map.read([8, 2, 1]).view(np.float16).reshape(8, 64)
    np.testing.assert_array_equal(box[:3, :16], source[1, 2:, 8:])
    assert not box[3:].any() and not box[:, 16:].any()
    with pytest.raises(SimtError, match="strides"):
        tensor_map.encode((GlobalMemory("K", source), 0), [24, 5, 3, 40, 240, 64, 8, 1, 1, 1, 1], "float16", 3, 3)
    assert swizzled(np.array([128 * 3 + 16]), 128).tolist() == [128 * 3 + 32]


def product(change: str = "") -> HopperMachine:
    """y = x K^T of one warpgroup, x of ones in registers but for its rows' numbers; `change` says what is wrong."""
    with prim_func("product") as builder:
        k = argument("k", [T.int64(1), T.int64(1), T.int64(KEYS), T.int64(WIDTH)], "float16")
        y = argument("y", [T.int64(64), T.int64(KEYS)], "float32")
        sizes = [T.int64(n) for n in (1, KEYS, 1, WIDTH)]
        tensor = Tensor("k", k, HeadLayout(0, "heads", 0), sizes, KEYS)
        tensor.encode()
        with simt.launch(T.int64(1), 256) as (_, thread):
            _body(change, tensor, y, thread)
    return HopperMachine(builder.get())


def _body(change: str, tensor: Tensor, y: Expr, thread: Expr) -> None:
    pool = T.alloc_buffer((16384,), "uint16", scope="shared.dyn")
    begin = materialize(T.cuda.cvta_generic_to_shared(T.address_of(pool[0])), "uint32")
    first = materialize(T.bitwise_and(begin + T.uint32(1023), T.uint32(2**32 - 1024)), "uint32")
    tiles = SwizzledTiles(first, 1, KEYS, WIDTH)
    full = first + T.uint32(tiles.bytes)
    with T.If(thread == 0), T.Then():
        hopper_ptx.begin_barrier(full, 2 if change == "nobody arrives" else 1)
        if change != "the engine knows no barrier":
            hopper_ptx.fence_barriers()
    if change != "barriers begun in time":
        barrier()
    with T.If(thread < 128):
        with T.Then(), T.If(thread == 0), T.Then():
            more = {"too many bytes": 16, "more bytes than there can be": 1 << 20}.get(change, 0)
            hopper_ptx.arrive_expecting(full, tiles.bytes + more)
            tiles.load(T.int32(0), tensor, T.int32(0), T.int32(0), T.int32(0), full)
        with T.Else():
            _multiply(change, tiles, full, y, materialize(thread - 128))


def _multiply(change: str, tiles: SwizzledTiles, full: Expr, y: Expr, thread: Expr) -> None:
    sums, left = registers(KEYS // 2), registers(4, "uint32")
    for i in range(4):
        set_register(left, i, T.uint32(0x3C003C00))  # ones
    for i in range(KEYS // 2):
        set_register(sums, i, T.float32(0))
    if change != "nobody waits":
        hopper_ptx.wait(full, T.int32(1 if change == "the wrong phase" else 0))
    if change == "stored plainly":
        store(tiles.address(T.int32(0), T.truncmod(thread, T.int32(KEYS)), T.int32(0)), [T.uint32(0)])
        hopper_ptx.meet(T.uint32(1), 128)
    right = tiles.by_rows(T.int32(0))
    if change != "no fence":
        hopper_ptx.products_begin()
    instruction = T.ptx[f"wgmma.mma_async.sync.aligned.m64n{KEYS}k16.f32.f16.f16"]
    for step in range(-(-WIDTH // 16)):
        b = right + T.uint64(tiles.row_step(step))
        T.evaluate(instruction(*(sums[i] for i in range(KEYS // 2)), *(left[i] for i in range(4)), b, True, 1, 1, 0))
    hopper_ptx.products_end()
    if change != "nobody waits for products":
        hopper_ptx.products_wait(0)
    if change == "overwritten early":
        store(tiles.address(T.int32(0), T.int32(0), T.int32(0)), [T.cast(thread, "uint32")])
    warp, lane = T.truncdiv(thread, T.int32(32)), T.truncmod(thread, T.int32(32))
    row, column = warp * 16 + T.truncdiv(lane, T.int32(4)), T.truncmod(lane, T.int32(4)) * 2
    for i in range(KEYS // 2):
        at = T.cast(row + 8 * (i // 2 % 2), "int64"), T.cast(column + (i // 4 * 8 + i % 2), "int64")
        T.buffer_store(y, sums[i], list(at))


def given() -> tuple[np.ndarray, np.ndarray]:
    k = np.random.default_rng(0).integers(-8, 8, (1, 1, KEYS, WIDTH)).astype(np.float16)
    return k, np.full((64, KEYS), np.nan, np.float32)


def test_a_product_of_what_the_copy_engine_brings():
    k, y = given()
    product()(k, y)
    np.testing.assert_array_equal(y, np.broadcast_to(k[0, 0].astype(np.float32).sum(axis=1), (64, KEYS)))


REFUSED = {
    "nobody arrives": "deadlock",
    "too many bytes": "deadlock",
    "more bytes than there can be": "bytes in a phase",
    "the engine knows no barrier": "no fence since it was begun",
    "barriers begun in time": "was begun",
    "nobody waits": "nothing says that warp",
    "stored plainly": "nothing says|fence.proxy.async",
    "no fence": "wgmma.fence",
    "nobody waits for products": "before its products",
    "overwritten early": "nothing says",
}


@pytest.mark.parametrize(("change", "why"), REFUSED.items(), ids=REFUSED)
def test_what_would_go_wrong_on_a_gpu_is_refused(change: str, why: str):
    with pytest.raises(SimtError, match=why):
        product(change)(*given())


def stored(change: str = "") -> HopperMachine:
    """y, (64, 64), is what a warpgroup has written to shared memory: of each warp 16 rows, the copy engine brings them
    out."""
    with prim_func("stored") as builder:
        y = argument("y", [T.int64(1), T.int64(1), T.int64(64), T.int64(64)], "float16")
        tensor = Tensor("y", y, HeadLayout(0, "heads", 0), [T.int64(n) for n in (1, 64, 1, 64)], 16)
        tensor.encode()
        with simt.launch(T.int64(1), 128) as (_, thread):
            pool = T.alloc_buffer((8192,), "uint16", scope="shared.dyn")
            begin = materialize(T.cuda.cvta_generic_to_shared(T.address_of(pool[0])), "uint32")
            first = materialize(T.bitwise_and(begin + T.uint32(1023), T.uint32(2**32 - 1024)), "uint32")
            tiles = SwizzledTiles(first, 1, 64, 64)
            warp, lane = materialize(T.truncdiv(thread, T.int32(32))), materialize(T.truncmod(thread, T.int32(32)))
            row = materialize(warp * 16)
            for i in range(16):
                store(tiles.address(T.int32(0), row + i, 2 * lane), [T.cast((row + i) * 32 + lane, "uint32")])
            if change != "no fence":
                hopper_ptx.fence_for_engines()
            if change != "no barrier of the warp":
                warp_barrier()
            with T.If(lane == 0), T.Then():
                place = T.int32(0) if change == "one place" else row
                tiles.store(T.int32(0), row, tensor, place, T.int32(0), T.int32(0))
                if change == "not in a group":
                    T.evaluate(T.ptx["cp.async.bulk.wait_group.read"](0))
                else:
                    hopper_ptx.wait_stores()
    return HopperMachine(builder.get())


def test_what_the_copy_engine_stores():
    y = np.zeros((1, 1, 64, 64), np.float16)
    stored()(y)
    np.testing.assert_array_equal(y.view(np.uint32).ravel(), np.arange(64 * 32))


REFUSED_STORES = {
    "no fence": "fence.proxy.async",
    "no barrier of the warp": "no barrier of the warp",
    "not in a group": "before its products or stores",
    "one place": "stores what another wrote",
}


@pytest.mark.parametrize(("change", "why"), REFUSED_STORES.items(), ids=REFUSED_STORES)
def test_a_store_that_would_go_wrong_is_refused(change: str, why: str):
    with pytest.raises(SimtError, match=why):
        stored(change)(np.zeros((1, 1, 64, 64), np.float16))


def roles(body: Callable[[Expr], None], *, bounded: bool = True) -> None:
    """Runs a block of three warpgroups; `body` is given the number of each."""
    with prim_func("roles") as builder, simt.launch(T.int64(1), 384, 1 if bounded else None) as (_, thread):
        T.alloc_buffer((8,), "uint16", scope="shared.dyn")
        body(materialize(T.truncdiv(thread, T.int32(128))))
    HopperMachine(builder.get())()


def dealt(few: int, many: int) -> Callable[[Expr], None]:
    def body(group: Expr) -> None:
        with T.If(group == 0):
            with T.Then():
                hopper_ptx.give_registers(few)
            with T.Else():
                hopper_ptx.take_registers(many)

    return body


def test_registers_that_there_are_not_are_refused():
    """A block of 384 threads begins with 168 a thread."""
    roles(dealt(24, 240))
    for few, many, bounded, why in (
        (32, 240, True, "for ever"),
        (176, 160, True, "from 168"),
        (24, 240, False, "bounds"),
    ):
        with pytest.raises(SimtError, match=why):
            roles(dealt(few, many), bounded=bounded)


@pytest.mark.parametrize(
    ("number", "threads", "why"),
    [(16, (384, 384, 384), "16 of 16"), (1, (384, 384, 352), "before"), (1, (400, 400, 400), "400 threads")],
    ids=str,
)
def test_named_barriers_that_there_are_not_are_refused(number: int, threads: tuple[int, ...], why: str):
    def body(group: Expr) -> None:
        for i, count in enumerate(threads):
            with T.If(group == i), T.Then():
                hopper_ptx.meet(T.uint32(number), count)

    with pytest.raises(SimtError, match=why):
        roles(body)


def test_the_phase_before_the_first_is_over():
    """A wait with the wrong parity returns at once, and what it did not wait for is garbage."""
    with pytest.raises(SimtError, match="nothing says"):
        product("the wrong phase")(*given())
