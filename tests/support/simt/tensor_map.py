"""Tensor maps and the copies of boxes that go by them, as the CUDA driver's cuTensorMapEncodeTiled and PTX ISA 5.5
("Tensors") have them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from support.simt.memory import Array, GlobalMemory, SimtError

_BYTES = {"bfloat16": 2, "float16": 2}
SPANS = {0: 16, 1: 32, 2: 64, 3: 128}
"""Bytes of a row of a box that is swizzled, by the driver's CUtensorMapSwizzle; 16 is none."""


def swizzled(address: Array, span: int) -> Array:
    """The address at which a swizzled byte lies: bits 4 .. of its address XORed with its bits 7 .., as many as there
    are 16-byte chunks in the span."""
    return address ^ ((address >> 7) & (span // 16 - 1)) << 4


@dataclass
class TensorMap:
    """What `tensormap_encode_tiled` fills in."""

    memory: GlobalMemory | None = None
    first: int = 0
    dims: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()  # bytes, of the innermost too
    box: tuple[int, ...] = ()
    span: int = 16

    def encode(
        self, pointer: tuple[GlobalMemory, int], numbers: list[int], dtype: str, rank: int, swizzle: int
    ) -> None:
        """`numbers`: dims, byte strides of all but the innermost, box, element strides. Raises SimtError where the
        driver would refuse."""
        element = _BYTES[dtype]
        self.memory, self.first = pointer
        self.dims, rest = tuple(numbers[:rank]), numbers[rank:]
        self.strides, rest = (element, *rest[: rank - 1]), rest[rank - 1 :]
        self.box, steps, self.span = tuple(rest[:rank]), rest[rank:], SPANS[swizzle]
        wrong = (
            (not self.memory.data.size, "an address of nothing"),
            (self.first % 16 != 0, "an address that is no multiple of 16"),
            (any(not 1 <= dim <= 1 << 32 for dim in self.dims), f"dims {self.dims}"),
            (any(s % 16 or not 0 <= s < 1 << 40 for s in self.strides[1:]), f"strides {self.strides}"),
            (any(not 1 <= size <= 256 for size in self.box), f"box {self.box}"),
            (self.box[0] * element % 16 != 0, f"box {self.box}"),
            (swizzle != 0 and self.box[0] * element > self.span, f"a row of {self.box[0]} in {self.span} bytes"),
            (any(step != 1 for step in steps), f"element strides {steps}"),
        )
        for is_wrong, what in wrong:
            if is_wrong:
                raise SimtError(f"tensor map: {what}")

    @property
    def bytes(self) -> int:
        return int(np.prod(self.box)) * self.strides[0]

    def places(self, corner: list[int]) -> tuple[Array, Array]:
        """(byte offset in global memory of each element of the box at `corner`, whether it is inside the tensor), both
        in the order of the box, the innermost dim fastest."""
        at, inside = np.zeros(1, np.int64), np.ones(1, np.bool_)
        for dim in range(len(self.dims)):
            index = corner[dim] + np.arange(self.box[dim])
            at = (index[:, None] * self.strides[dim] + at).ravel()
            inside = (((index >= 0) & (index < self.dims[dim]))[:, None] & inside).ravel()
        return at + self.first, inside

    def read(self, corner: list[int]) -> Array:
        """The bytes of a box, zeros outside of the tensor."""
        assert self.memory is not None
        at, inside = self.places(corner)
        bytes_at = at[inside][:, None] + np.arange(self.strides[0])
        self._check(bytes_at)
        data = np.zeros((at.size, self.strides[0]), np.uint8)
        if self.memory.writer is not None:
            raise SimtError(f"{self.memory.name}: written and loaded by the copy engine in one launch")
        data[inside] = self.memory.data[0][bytes_at]
        return data.ravel()

    def write(self, corner: list[int], values: Array, number: int) -> None:
        """Stores the bytes of a box, but for those outside of the tensor, for thread `number` of the launch."""
        assert self.memory is not None
        at, inside = self.places(corner)
        bytes_at = at[inside][:, None] + np.arange(self.strides[0])
        self._check(bytes_at)
        self.memory.stored(bytes_at, number)
        self.memory.data[0][bytes_at] = values.reshape(at.size, -1)[inside]

    def _check(self, bytes_at: Array) -> None:
        assert self.memory is not None
        if bytes_at.size and (bytes_at.min() < 0 or bytes_at.max() >= self.memory.data.shape[1]):
            raise SimtError(f"tensor map: bytes {bytes_at.min()} to {bytes_at.max()} of {self.memory.name}")
