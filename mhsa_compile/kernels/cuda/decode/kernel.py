"""Attention of one or few queries on NVIDIA GPUs from sm_80 on, as a language model's next token asks for it: bound by
memory.

All rows that share a key head, those of its query heads and of all queries, are computed together, so every key and
value is read once. Blocks fill the GPU once; `split_kv` deals the keys out to them, `block` is the work of
one. A second launch, `results.combine`, puts together what several blocks had of a head.
"""

from __future__ import annotations

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CudaProfile
from mhsa_compile.kernels.common.attention_args import attention_arguments
from mhsa_compile.kernels.common.buffers import argument, prim_func
from mhsa_compile.kernels.common.decode_limits import rows_of_key_head, why_not_few_queries
from mhsa_compile.kernels.cuda.decode.block import DecodeBlock
from mhsa_compile.kernels.cuda.decode.block_shape import DecodeBlockShape
from mhsa_compile.kernels.cuda.decode.results import THREADS, DecodeArrays, combine
from mhsa_compile.kernels.cuda.decode.split_kv import CudaSplitKv
from mhsa_compile.kernels.cuda.primitives.inputs import why_not_widths
from mhsa_compile.kernels.cuda.primitives.simt import MOST_REGISTERS, ThreadIndex, launch, materialize
from mhsa_compile.kernels.interface.kernel import Config, Emitted, unknown_knobs
from mhsa_compile.kernels.interface.ops import AttentionOp

KNOBS = ("keys", "stages", "warps", "blocks")
MOST_QUERIES, MOST_ROWS = 8, 32  # of its own: fewer than a CPU takes


class CudaDecodeKernel:
    """Few queries against many keys. A config: `warps` a block, each with a ring of `stages` tiles of `keys` keys, and
    the `blocks` that a multiprocessor is given."""

    name = "cuda.decode"
    op_type = AttentionOp

    def why_not(self, op: AttentionOp, profile: CudaProfile) -> str | None:
        if reason := why_not_few_queries(op, MOST_QUERIES, MOST_ROWS) or why_not_widths(op):
            return reason
        if not self._fitting(op, profile):
            return f"{rows_of_key_head(op)} rows of {op.v_head_dim} columns are more than a block has room for"
        return None

    def search_space(self, op: AttentionOp, profile: CudaProfile) -> dict[str, tuple[int, ...]]:
        return {"keys": (8, 16, 32), "stages": (2, 3, 4), "warps": (2, 4, 8), "blocks": (1, 2, 3, 4, 6)}

    def default_config(self, op: AttentionOp, profile: CudaProfile) -> dict[str, int]:
        return self._fitting(op, profile)[0]

    def _fitting(self, op: AttentionOp, profile: CudaProfile) -> list[dict[str, int]]:
        """Configs that fit, the preferred one first: two blocks a multiprocessor, so that one reads while the other
        puts its results together, and three tiles for each warp."""
        keys = 8 if op.dtype == "float32" else 16
        preferred = ((keys, 3, 4, 2), (keys, 2, 4, 2), (keys, 3, 4, 1), (keys, 2, 4, 1), (keys, 2, 2, 1))
        configs = [dict(zip(KNOBS, sizes, strict=True)) for sizes in preferred]
        return [config for config in configs if self.why_not_config(op, profile, config) is None]

    def why_not_config(self, op: AttentionOp, profile: CudaProfile, config: Config) -> str | None:
        if reason := unknown_knobs(config, KNOBS):
            return reason
        if config["keys"] not in ((8, 16, 32) if op.dtype == "float32" else (16, 32)) or config["stages"] < 2:
            return f"16 or 32 keys, in float32 also 8, and from 2 stages on, not {dict(config)}"
        shape = _shape(op, config)
        blocks, hardware = config["blocks"], profile.hardware
        registers = min(MOST_REGISTERS, hardware.registers_per_multiprocessor // (shape.threads * blocks) // 8 * 8)
        if shape.thread_registers > registers:
            return f"{shape.thread_registers} registers of {registers}"
        if profile.blocks_at_once(shape.threads, registers, shape.shared_bytes) < blocks:
            return f"{shape.shared_bytes} bytes of shared memory for each of {blocks} blocks a multiprocessor"
        return None

    def shared_bytes(self, op: AttentionOp, config: Config) -> int:
        """Bytes that a block takes of shared memory."""
        return _shape(op, config).shared_bytes

    def emit(self, op: AttentionOp, profile: CudaProfile, config: Config) -> Emitted:
        shape, count = _shape(op, config), config["blocks"] * profile.hardware.multiprocessors
        return Emitted(
            _decode(op, shape, config["blocks"], count), workspace=(2 * count, shape.rows, shape.result_pitch)
        )


def _shape(op: AttentionOp, config: Config) -> DecodeBlockShape:
    keys, stages, warps = (config[knob] for knob in KNOBS[:3])
    terms = sum(not step.counts_keys for step in op.scores)
    hides_values = op.any_step("blind") or (op.any_step("hides") and op.q_length != 1)
    return DecodeBlockShape(
        rows_of_key_head(op), keys, stages, warps, op.head_dim, op.v_head_dim, op.dtype, terms, hides_values
    )


def _decode(op: AttentionOp, shape: DecodeBlockShape, blocks: int, count: int) -> Expr:
    assert isinstance(op.q_length, int)
    with prim_func("decode") as builder:
        arguments = attention_arguments(op)
        y = arguments.output()
        slots = [T.int64(size) for size in (2 * count, shape.rows, shape.result_pitch)]
        arrays = DecodeArrays(arguments, y, argument("workspace", slots, "float32"))

        def shares(lane: Expr) -> CudaSplitKv:
            return CudaSplitKv(arguments, lane, piece=shape.piece, count=count)

        with launch(T.int64(count), shape.threads, blocks) as (block, thread):
            place = ThreadIndex(thread)
            DecodeBlock(shape, place, materialize(block), shares(place.lane), arrays).emit()
        with launch(T.int64(count * shape.rows), THREADS) as (block, thread):
            share, row = (materialize(f(T.cast(block, "int32"), T.int32(shape.rows))) for f in (T.truncdiv, T.truncmod))
            lane = materialize(T.truncmod(thread, T.int32(32)))
            combine(shape, thread, share, row, shares(lane), arrays)
    return builder.get()
