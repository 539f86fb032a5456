"""The sizes of a decode block: what its warps hold in registers and in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from mhsa_compile.kernels.cuda.primitives.simt import COLUMNS, WARP
from mhsa_compile.kernels.cuda.primitives.smem_pipeline import RowFormat, halves, padded, words

WORD = 4  # bytes
QUERY_REGISTERS = 32
"""Registers that Q may stay in; where it has more, it is read again for every tile of keys."""


@dataclass(frozen=True)
class DecodeBlockShape:
    """`rows` of all queries that share a key head; `warps`, each with a ring of `stages` tiles of `keys` keys.

    terms         how many steps of scores there are, but those that count keys
    hides_values  whether a row may not see what another one of the block does; what none sees are zeros
    """

    rows: int
    keys: int
    stages: int
    warps: int
    head_dim: int
    v_head_dim: int
    dtype: str
    terms: int = 0
    hides_values: bool = True

    @property
    def is_wide(self) -> bool:
        """Whether the block is computed by multiply-adds of float32, not on tensor cores."""
        return self.dtype == "float32"

    @property
    def row_tiles(self) -> int:
        """Tiles of rows, where they are columns of products on tensor cores."""
        return -(-self.rows // COLUMNS)

    @property
    def shares_queries(self) -> bool:
        """Whether Q lies in shared memory."""
        return self.is_wide or self._query_words > QUERY_REGISTERS

    @property
    def _query_words(self) -> int:
        return self.row_tiles * padded(self.head_dim) // 8

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def piece(self) -> int:
        """Keys that the block takes at a time."""
        return self.warps * self.keys

    @property
    def lanes_of_key(self) -> int:
        """Lanes that share the products of one key, where they are of float32."""
        return WARP // self.keys

    @property
    def key_form(self) -> RowFormat:
        """The form of K's rows. In float32, each eight lanes read 16 bytes each of some keys: these lie in different
        banks where one key begins an odd multiple of its lanes' bytes behind another."""
        if not self.is_wide:
            return halves(self.head_dim)
        lanes, chunks = self.lanes_of_key, self.head_dim // 4
        odd = -(-chunks // lanes) | 1
        return RowFormat(self.head_dim, WORD, self.head_dim, 4 * lanes * odd)

    @property
    def value_form(self) -> RowFormat:
        return words(self.v_head_dim) if self.is_wide else halves(self.v_head_dim)

    @property
    def ring_bytes(self) -> int:
        tile = self.key_form.bytes(self.keys) + self.value_form.bytes(self.keys)
        return self.warps * self.stages * tile

    @property
    def result_pitch(self) -> int:
        """Words from a row's result to the next one's: its sums, its maximum, the sum of its probs."""
        return self.v_head_dim + 8

    @property
    def query_form(self) -> RowFormat:
        return words(self.head_dim) if self.is_wide else halves(self.head_dim)

    @property
    def query_rows(self) -> int:
        return self.rows if self.is_wide else self.row_tiles * COLUMNS

    @property
    def queries_byte(self) -> int:
        """The byte at which Q begins, if it is there: behind the rings and the results that take their place."""
        return max(self.ring_bytes, self.warps * self.rows * self.result_pitch * WORD)

    @property
    def shared_bytes(self) -> int:
        return self.queries_byte + (self.query_form.bytes(self.query_rows) if self.shares_queries else 0)

    @property
    def columns_of_lane(self) -> int:
        """Columns of O that a lane sums, where they are of float32: in chunks of four."""
        return 4 * -(-self.v_head_dim // (4 * WARP))

    @property
    def thread_registers(self) -> int:
        """The registers of a thread that nvcc was seen to need at most without spilling: S and O, m and l, Q where it
        stays in registers; more where a tile takes more copies, whose addresses it likes to know early, for each term
        of the scores, and where many rows hide values from each other."""
        copies = self.ring_bytes // self.stages // (16 * self.threads)  # of a lane
        rest = 40 + copies + 12 * self.terms
        if self.is_wide:
            return self.rows * (2 * self.columns_of_lane + 4 + self.terms) + rest
        if self.row_tiles > 2 and self.hides_values:
            rest += 16 * self.row_tiles
        query_words = 4 * self.row_tiles if self.shares_queries else self._query_words
        return self.row_tiles * ((padded(self.v_head_dim) + self.keys + 16) // 4 + 4 * self.terms) + query_words + rest
