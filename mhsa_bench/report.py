"""What a benchmark found: a row for each candidate, and the least time that the machine allows.

It is written and read as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass

from mhsa_compile.runtime.profile.call_profile import DISTURBED

UNSTEADY = 0.25
"""A spread of a candidate's times above this: half of its rounds differ by a quarter, and so may its rank."""


@dataclass(frozen=True)
class BenchRow:
    """One candidate: `missing` says why it did not run, and then there are no numbers.

    median_us       microseconds a call, median over the rounds
    spread          interquartile range over the rounds, as a share of the median
    ratio           this candidate's time by ours in the same round, median over the rounds: above 1, we are faster
    gflops          useful FLOPs a second; None without a floor, as of a foreign .onnx, whose FLOPs nobody counted
    share_of_peak   the floor of operations as a share of this candidate's time: `gflops` by the rate that was measured
                    for such products
    share_of_limit  the floor as a share of this candidate's time: of whichever limit binds, operations or bytes
    error_share     largest error against float64 as a share of the budget: above 1 is wrong
    form            which of a peer's several forms was its fastest
    """

    name: str
    median_us: float | None = None
    spread: float | None = None
    ratio: float | None = None
    gflops: float | None = None
    share_of_peak: float | None = None
    share_of_limit: float | None = None
    error_share: float | None = None
    form: str = ""
    missing: str | None = None


@dataclass(frozen=True)
class Floor:
    """The least time that a call can take on this machine.

    limit            "compute" or "memory": which of the two is the larger
    compute_us       useful FLOPs at the measured rate of multiply-adds, and of tiles where ours multiplies on them
    memory_us        bytes that no cache can have kept since they were read last, at the measured rate of reading; None
                     where they stay in the cache from call to call
    flops, bytes     of one call; bytes are inputs, weights and outputs, each once
    """

    limit: str
    compute_us: float
    memory_us: float | None
    flops: int
    bytes: int

    @property
    def us(self) -> float:
        return max(self.compute_us, self.memory_us or 0.0)


@dataclass(frozen=True)
class BenchReport:
    """What `bench` found; the first row is this project.

    peak_gflops      multiply-adds measured at the workload's dtype, in the best round; `peak_spread` as for a row
    bandwidth_gbs    10^9 bytes a second, read from memory, in the best round
    floor            None for a foreign .onnx, a cache, weights of eight bits, and linears of which some are by terms
    budget           the largest error allowed
    """

    dims: dict[str, int]
    dtype: str
    threads: int
    rounds: int
    peak_gflops: float
    peak_spread: float
    bandwidth_gbs: float
    floor: Floor | None
    budget: float
    rows: tuple[BenchRow, ...]

    @property
    def disturbed(self) -> bool:
        """Whether something else took CPU time meanwhile; the figures then mean little."""
        return self.peak_spread > DISTURBED

    @property
    def unsteady(self) -> list[BenchRow]:
        """The rows whose times spread so much that their medians say little."""
        return [row for row in self.rows if (row.spread or 0.0) > UNSTEADY]

    @property
    def beyond_limit(self) -> list[str]:
        """Who was faster than the limit: nobody can be, so it was measured too low."""
        return [row.name for row in self.rows if (row.share_of_limit or 0.0) > 1]

    @property
    def ours(self) -> BenchRow:
        return self.rows[0]

    @property
    def ok(self) -> bool:
        """Whether our own outputs were within the budget."""
        return self.ours.error_share is not None and self.ours.error_share <= 1

    @property
    def best_peer(self) -> BenchRow | None:
        """The fastest of the others that ran."""
        ran = [row for row in self.rows[1:] if row.ratio is not None]
        return min(ran, key=lambda row: row.ratio or 0.0, default=None)
