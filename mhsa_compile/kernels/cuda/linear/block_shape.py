"""The sizes of a block of a linear on a GPU: what they take of a multiprocessor, and how long a block may take.

A block computes `rows` x `columns` of y. Its warps have `warp_rows` x `warp_columns` each; where that is fewer warps
than hide the latency of memory, `slices` of them share one such part, each with some of the terms of every sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mhsa_compile.hardware.profile import CudaProfile
from mhsa_compile.kernels.cuda.primitives.simt import COLUMNS, DEPTH, MOST_REGISTERS, ROWS, SPARE, WARP

KNOBS = ("rows", "columns", "depth", "stages", "warp_rows", "warp_columns", "slices")
CHUNK = 16  # bytes that one copy moves

# Of one multiprocessor in one clock. For the choice of a default alone: ratios matter, and they differ little.
_SHARED_BYTES, _L2_BYTES = 128, 32
_COPY_CLOCKS = 800
"""Clocks from the begin of a copy until all of a tile is there."""
_BLOCK_CLOCKS = 1500
"""Clocks of a block beside its products: the first tile, the last stores."""
_TERMS_IN_A_ROW = 64
"""The most terms of a tile for one slice, whose products stand one after the other in the code: of more, ptxas loaded
so many operands ahead that it spilt; in float32 always, on tensor cores where 512 threads or more leave each few
registers."""


@dataclass(frozen=True)
class LinearBlockShape:
    """depth: terms of the sums in one tile; stages: tiles of the ring, all but one of which are on their way."""

    rows: int
    columns: int
    depth: int
    stages: int
    warp_rows: int
    warp_columns: int
    slices: int

    element: ClassVar[int]
    """Bytes of x and of the weights."""
    products: ClassVar[int]
    """Multiply-adds of a multiprocessor in a clock."""
    step: ClassVar[int]
    """Terms that are multiplied at once."""
    least_rows: ClassVar[int]
    least_columns: ClassVar[int]

    @property
    def parts(self) -> int:
        """Parts into which the warps of one slice cut the block."""
        return self.rows // self.warp_rows * (self.columns // self.warp_columns)

    @property
    def threads(self) -> int:
        return self.parts * self.slices * WARP

    @property
    def sums(self) -> int:
        """Sums that a thread holds."""
        return self.warp_rows * self.warp_columns // WARP

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.columns) * self.depth * self.element

    @property
    def y_bytes(self) -> int:
        """Bytes of y, on its way through shared memory."""
        return 0

    @property
    def shared_bytes(self) -> int:
        """Bytes of the ring; and when it is done with, of y and of the sums of all slices but the first."""
        return max(self.stages * self.stage_bytes, self.y_bytes + 4 * (self.slices - 1) * self.rows * self.columns)

    @property
    def thread_registers(self) -> int:
        """The registers that a thread is likely to take."""
        raise NotImplementedError

    @property
    def loads_ahead(self) -> bool:
        """Whether a long row of products would spill: `_TERMS_IN_A_ROW`."""
        raise NotImplementedError

    @property
    def read_clocks(self) -> float:
        """Clocks that shared memory takes to read a warp's operands of one term."""
        return (self.warp_rows + self.warp_columns) * self.element / _SHARED_BYTES

    @property
    def instructions(self) -> float:
        """Instructions that share a pipe with the multiplications, for each of these."""
        return 1.0

    def resident(self, profile: CudaProfile) -> int:
        """Blocks that a multiprocessor holds at a time."""
        return profile.blocks_at_once(self.threads, min(self.thread_registers, MOST_REGISTERS), self.shared_bytes)

    def together(self, profile: CudaProfile) -> int | None:
        """What `simt.min_blocks_per_sm` is told: how many blocks shared memory has room for, where each thread may
        have all registers then. Told of more blocks ptxas spills, and left to itself for blocks without room."""
        most = profile.blocks_at_once(self.threads, MOST_REGISTERS, self.shared_bytes)
        by_shared = profile.blocks_at_once(self.threads, 1, self.shared_bytes)
        return most if most == by_shared and self.thread_registers + SPARE <= MOST_REGISTERS else None

    def why_not(self, profile: CudaProfile) -> str | None:
        """Why there is no such block on this GPU, or None."""
        sizes = (self.rows, self.columns, self.depth, self.warp_rows, self.warp_columns, self.slices)
        if any(size & (size - 1) for size in sizes):
            return f"powers of two but for stages, not {sizes}"
        if self.stages < 2:
            return "at least 2 stages: one is copied while the other is multiplied"
        part = f"{self.warp_rows} x {self.warp_columns}"
        if self.warp_rows < self.least_rows or self.warp_columns < self.least_columns:
            return f"parts of {self.least_rows} x {self.least_columns} at least, not {part}"
        if self.rows < self.warp_rows or self.columns < self.warp_columns:
            return f"a part of {part} in a block of {self.rows} x {self.columns}"
        if self.depth % (self.step * self.slices):
            return f"{self.depth} terms, not a multiple of {self.step} for each of {self.slices} slices"
        in_a_row = self.depth // self.slices
        if self.loads_ahead and in_a_row > _TERMS_IN_A_ROW:
            return f"up to {_TERMS_IN_A_ROW} terms of a tile for each slice, not {in_a_row}"
        if self.thread_registers > MOST_REGISTERS:
            return f"about {self.thread_registers} registers of {MOST_REGISTERS}"
        if self.resident(profile) == 0:
            return f"{self.threads} threads, about {self.thread_registers} registers each, {self.shared_bytes} bytes"
        return None

    def clocks(self, profile: CudaProfile, rows: int, columns: int, depth: int) -> float:
        """About how long y (rows, columns) of sums of `depth` terms takes: what a multiprocessor's blocks ask of the
        units that multiply, of its shared memory or of the second-level cache, whichever is most, or else the latency
        of their copies, which those that are there at a time share."""
        blocks = -(-rows // self.rows) * -(-columns // self.columns)
        most = -(-blocks // profile.hardware.multiprocessors)  # on one multiprocessor
        terms = -(-depth // self.depth) * self.depth
        work = terms * max(
            self.rows * self.columns / self.products * self.instructions,
            self.parts * self.read_clocks,
            (self.rows + self.columns) * self.element / _L2_BYTES,
        )
        rounds = -(-most // self.resident(profile))
        latency = terms / self.depth * _COPY_CLOCKS / (self.stages - 1)
        return max(most * work, rounds * latency) + rounds * _BLOCK_CLOCKS


@dataclass(frozen=True)
class TensorShape(LinearBlockShape):
    """A block for 16-bit types, multiplied by tensor cores."""

    element = 2
    products = 1024
    step, least_rows, least_columns = DEPTH, ROWS, 2 * COLUMNS  # ldmatrix brings two tiles of columns

    @property
    def y_bytes(self) -> int:
        return self.rows * self.columns * self.element

    @property
    def thread_registers(self) -> int:
        """The registers for sums, the operands of this step and of the next, and addresses."""
        return self.sums + (self.warp_rows + self.warp_columns) // 2 + 44

    @property
    def loads_ahead(self) -> bool:
        return self.threads >= 512


@dataclass(frozen=True)
class ThreadShape(LinearBlockShape):
    """A block for float32: 4 x 8 threads of a warp with `thread_rows` x `thread_columns` each."""

    element = 4
    products = 128
    step, least_rows, least_columns = 4, 4, 32
    loads_ahead = True

    @property
    def thread_rows(self) -> int:
        return self.warp_rows // 4

    @property
    def thread_columns(self) -> int:
        return self.warp_columns // 8

    @property
    def thread_registers(self) -> int:
        """The registers for sums and their parts, four terms of x, those of two of the weights, and addresses."""
        return 2 * self.sums + 4 * self.thread_rows + 2 * self.thread_columns + 56

    @property
    def read_clocks(self) -> float:
        """Clocks to read the operands of one term: two for each load of four elements."""
        return (self.thread_rows + self.thread_columns) / 2

    @property
    def instructions(self) -> float:
        """Instructions for each multiplication: itself, its share of the loads of four terms at once, and of the
        addition of each part to its sum."""
        loads = (self.thread_rows + self.thread_columns) / (4 * self.sums)
        return 1 + loads + self.slices / self.depth
