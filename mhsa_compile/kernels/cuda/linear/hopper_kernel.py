"""y = x W^T + b of 16-bit types on Hopper: products of whole warpgroups (wgmma) on tiles that the copy engine brings.

There is one block for each multiprocessor, which goes from part to part of y: 128 rows and `columns`. One thread asks
for tiles as far ahead as the ring goes, into the next part too; two warpgroups multiply, 64 rows each
(`hopper_block`).
Source: the persistent, cooperative kernel of CUTLASS 3 (sm90_gemm_tma_warpspecialized_cooperative.hpp).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CudaProfile
from mhsa_compile.kernels.cuda.linear.block import dealt
from mhsa_compile.kernels.cuda.linear.hopper_block import (
    CONSUMERS,
    HopperShape,
    LinearConsumer,
    LinearSharedMemory,
    matrix_map,
    produce,
)
from mhsa_compile.kernels.cuda.linear.kernel import (
    Arguments,
    MmaLinearKernel,
    launch_by_rows,
    likely_rows,
    linear_function,
)
from mhsa_compile.kernels.cuda.linear.pack_weights import WIDEST, pack, packed_shapes
from mhsa_compile.kernels.cuda.primitives import hopper_ptx
from mhsa_compile.kernels.cuda.primitives.hopper_tma import PANEL
from mhsa_compile.kernels.cuda.primitives.mbarrier_pipeline import REGISTERS
from mhsa_compile.kernels.cuda.primitives.warp import ROWS, WARP, ThreadIndex, barrier, materialize
from mhsa_compile.kernels.interface.kernel import Config, Emitted, unknown_knobs
from mhsa_compile.kernels.interface.ops import LinearOp

KNOBS = ("columns", "stages")
FEW_ROWS = 64
"""Up to so many rows, half of a block would be empty: mma.sync, in smaller blocks, serves them."""
_CHUNK = 8  # elements in 16 bytes, of which the copy engine's strides are multiples


class HopperLinearKernel:
    """A linear of 16-bit types by wgmma, for more rows than few."""

    name = "cuda.linear_hopper"
    op_type = LinearOp
    few = MmaLinearKernel()

    def why_not(self, op: LinearOp, profile: CudaProfile) -> str | None:
        if reason := self.few.why_not(op, profile):
            return reason
        if not profile.has_wgmma:
            return "made for GPUs with wgmma"
        if op.pitch % _CHUNK:
            return f"rows of y in multiples of {_CHUNK}, not {op.pitch}"
        rows = max(likely_rows(op))
        if rows <= FEW_ROWS:
            return f"more than {FEW_ROWS} rows, not {rows}"
        most = HopperShape(PANEL, 2).parts(rows, op.out_features)
        if 2 * most < profile.hardware.multiprocessors:
            return f"parts of y for half of the multiprocessors, not {most} for {profile.hardware.multiprocessors}"
        return None

    def search_space(self, op: LinearOp, profile: CudaProfile) -> dict[str, tuple[int, ...]]:
        return {"columns": (64, 128, 192, 256), "stages": (2, 3, 4, 5, 6, 7)}

    def default_config(self, op: LinearOp, profile: CudaProfile) -> dict[str, int]:
        """The columns that are fastest by the estimate, and as many tiles as fit."""
        sizes = (
            {"columns": columns, "stages": stages} for columns in (256, 192, 128, 64) for stages in (6, 5, 4, 3, 2)
        )
        deepest: dict[int, dict[str, int]] = {}
        for config in sizes:
            if self._fits(config, profile):
                deepest.setdefault(config["columns"], config)

        def clocks(config: dict[str, int]) -> float:
            shape = HopperShape(**config)
            return prod(shape.clocks(profile, rows, op.out_features, op.in_features) for rows in likely_rows(op))

        return min(deepest.values(), key=clocks)

    def _fits(self, config: Config, profile: CudaProfile) -> bool:
        return HopperShape(**config).shared_bytes <= 1024 * profile.hardware.shared_kib_per_block

    def why_not_config(self, op: LinearOp, profile: CudaProfile, config: Config) -> str | None:
        if reason := unknown_knobs(config, KNOBS):
            return reason
        if config["columns"] % PANEL or config["columns"] > WIDEST or config["stages"] < 2:
            return f"columns in multiples of {PANEL} up to {WIDEST} and two stages at least, not {dict(config)}"
        if not self._fits(config, profile):
            needed, most = HopperShape(**config).shared_bytes, 1024 * profile.hardware.shared_kib_per_block
            return f"{needed} bytes of shared memory of {most}"
        return None

    def emit(self, op: LinearOp, profile: CudaProfile, config: Config) -> Emitted:
        shape = HopperShape(**config)

        def body(arguments: Arguments) -> None:
            launch_by_rows(
                arguments.rows,
                FEW_ROWS,
                lambda: self.few.launch_few(op, profile, FEW_ROWS, arguments),
                lambda: _launch(op, shape, profile.hardware.multiprocessors, arguments),
            )

        return Emitted(linear_function(op, packed_shapes(op, None), body), pack(op, None), packed_shapes(op, None))


def _launch(op: LinearOp, shape: HopperShape, multiprocessors: int, arguments: Arguments) -> None:
    K, N, rows = T.int64(op.in_features), T.int64(op.out_features), arguments.rows
    nowhere = [0] * (len(arguments.x.shape) - 1)
    # 1. The operands as the copy engine sees them; y by the rows of a warp.
    maps = (
        matrix_map("x", arguments.x[(*nowhere, 0)], (K, rows), op.in_features, (PANEL, shape.rows), op.dtype),
        matrix_map("weight", arguments.weight[0, 0], (K, N), op.in_features, (PANEL, shape.columns), op.dtype),
        matrix_map("y", arguments.y[(*nowhere, 0)], (N, rows), op.pitch, (PANEL, ROWS), op.dtype),
    )
    parts = T.truncdiv(rows + (shape.rows - 1), T.int64(shape.rows)) * T.int64(-(-op.out_features // shape.columns))
    # One a multiprocessor, which goes from part to part.
    blocks = T.min(parts, T.int64(multiprocessors))
    with (
        T.launch_thread("blockIdx.x", blocks) as block,
        T.launch_thread("threadIdx.x", shape.threads) as thread,
        hopper_ptx.one_block(),
    ):
        # 2. Shared memory, and which parts are this block's.
        memory = LinearSharedMemory(shape)
        with T.If(thread == 0), T.Then():
            memory.ring.begin(CONSUMERS * hopper_ptx.WARPGROUP // WARP)
            hopper_ptx.fence_barriers()
        barrier()
        number, count, all_blocks = (materialize(T.cast(n, "int32")) for n in (block, parts, blocks))
        lines = materialize(T.cast(rows, "int32"))
        turns = -(-op.in_features // shape.depth)

        def each_part(body: Callable[[Expr, Expr, Expr], None]) -> None:
            """body(first row, first column, how many tiles came before) for each part of y that is this block's."""
            with T.serial(T.truncdiv(count - number + (all_blocks - 1), all_blocks)) as turn:
                part = materialize(number + turn * all_blocks)
                row, column = dealt(part, lines, op.out_features, (shape.rows, shape.columns))
                body(row, column, materialize(turn * turns))

        # 3. The roles.
        few, many = REGISTERS[CONSUMERS]
        with T.If(thread < hopper_ptx.WARPGROUP):
            with T.Then():
                hopper_ptx.give_registers(few)
                with T.If(thread == 0), T.Then():
                    each_part(lambda row, column, before: produce(memory, turns, maps, row, column, before))
            with T.Else():
                hopper_ptx.take_registers(many)
                consumer = LinearConsumer(
                    op.dtype,
                    shape,
                    memory,
                    ThreadIndex(materialize(thread - hopper_ptx.WARPGROUP)),
                    arguments.bias,
                    maps[2],
                )
                each_part(lambda row, column, before: consumer.part(turns, row, column, before))
                consumer.end()
