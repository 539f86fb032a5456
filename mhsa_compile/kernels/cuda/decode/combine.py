"""The second launch of decode: heads whose keys several shares had, put together in the order of their keys.

A head is at most one share's that begins it and does not end it. So block (s, r) looks after row r of the head that
share s begins so, if there is one: its threads are groups that join some of the shares' results each, then they join
the groups'.
"""

from __future__ import annotations

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.decode.block import CHUNK, DecodeArrays, write
from mhsa_compile.kernels.cuda.decode.block_shape import DecodeBlockShape
from mhsa_compile.kernels.cuda.decode.online_softmax import JoinedResults
from mhsa_compile.kernels.cuda.decode.split_kv import CudaSplitKv
from mhsa_compile.kernels.cuda.primitives.warp import barrier, load, materialize, registers, store
from mhsa_compile.kernels.interface.ops import AttentionOp

THREADS = 128


def combine(
    op: AttentionOp,
    shape: DecodeBlockShape,
    thread: Expr,
    share: Expr,
    row: Expr,
    shares: CudaSplitKv,
    arrays: DecodeArrays,
) -> None:
    low, high = shares.begin_of(share), shares.begin_of(share + 1)
    with T.If(low < high), T.Then():
        head, begin = shares.head_of(high - 1)
        b, g = (materialize(f(head, T.int32(op.num_kv_heads))) for f in (T.truncdiv, T.truncmod))
        end = materialize(begin + shares.entry(b).pieces)
        # This share begins the head and another one goes on with it: all others have nothing to do here.
        with T.If(T.And(begin >= low, end > high)), T.Then():
            last = shares.share_of(end - 1)
            ratio = op.num_heads // op.num_kv_heads
            query, number = (f(row, T.int32(ratio)) for f in (T.truncdiv, T.truncmod))
            out = (b, materialize(g * ratio + number), materialize(query))
            _combine_row(op, shape, thread, share, materialize(last - share + 1), row, arrays, out)


def _combine_row(
    op: AttentionOp,
    shape: DecodeBlockShape,
    thread: Expr,
    first: Expr,
    count: Expr,
    row: Expr,
    arrays: DecodeArrays,
    out: tuple[Expr, Expr, Expr],
) -> None:
    """Joins row `row` of `count` shares' results, from share `first` on; `out` is its batch entry, head and query."""
    chunks = shape.v_head_dim // CHUNK
    groups = THREADS // chunks
    group, chunk = (materialize(f(thread, T.int32(chunks))) for f in (T.truncdiv, T.truncmod))
    column = chunk * CHUNK
    words = CHUNK + 2
    pool = T.alloc_buffer((groups * chunks * words,), "float32", scope="shared.dyn")
    # A view: TVM would make the buffer itself as small as it thinks to be enough.
    partials = T.decl_buffer((groups, chunks, words), "float32", data=pool.data, scope="shared.dyn")
    results, result, statistics = JoinedResults(CHUNK), registers(words), registers(2)
    with T.If(group < groups), T.Then():
        # 1. Every so manieth result.
        with T.serial(T.truncdiv(count - group + (groups - 1), T.int32(groups))) as turn:
            number = materialize(group + turn * groups)
            slot = materialize(
                T.cast(2 * (first + number) + T.Select(number == 0, T.int32(1), T.int32(0)), "int64"), "int64"
            )
            at = [slot, T.cast(row, "int64")]
            load(statistics, 0, 2, T.address_of(arrays.workspace[(*at, T.int64(shape.v_head_dim))]), "global")
            load(result, 0, CHUNK, T.address_of(arrays.workspace[(*at, T.cast(column, "int64"))]), "global")
            results.add(statistics[0], statistics[1], [result[i] for i in range(CHUNK)])
        for i, value in enumerate([results.row_max, results.row_sum, *results.sums]):
            store(T.address_of(partials[group, chunk, T.int32(i)]), [value])
    barrier()
    # 2. All groups'.
    with T.If(group == 0), T.Then():
        # In a fixed order, so that results are the same every time.
        for other in range(1, groups):
            for i in range(words):
                load(result, i, 1, T.address_of(partials[T.int32(other), chunk, T.int32(i)]))
            results.add(result[0], result[1], [result[2 + i] for i in range(CHUNK)])
        write(op, arrays.y, *out, column, results.row_sum, results.sums)
