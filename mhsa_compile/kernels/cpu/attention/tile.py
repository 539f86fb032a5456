"""One attention task: a tile of query rows of one head against all the keys they see, in one pass.

    for each block of keys, for each group of them:
        S^T = K Q^T;  where some score exceeds its row's reference m by far: m' = the new maximum, and what was summed
                      up so far (l, O, the block's probs) shrinks by 2^(m - m')
        P^T = 2^(S^T - m);  l = l + sum P^T
    O = O + P V
    Y = O / l, and zeros where nothing was visible (l = 0)

The reference need not be the maximum: a prob of 2^RISE is as exact as one of 1. So it hardly ever moves, nothing is
rescaled from block to block, and the probs of one group are computed among the products of the next one's scores,
or, where the registers are too few for both, just before them.

`key_loop` says which keys are visited; P V sums for each few rows only the keys that they see.
Sources: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867); tiling, Dao 2023 (arXiv:2307.08691); rescaling
only when it matters: FlashAttention-4 (github.com/Dao-AILab/flash-attention).
"""

from __future__ import annotations

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.head_layout import HeadView
from mhsa_compile.kernels.cpu.attention.key_loop import KeyGroup, KeyLoop, Route, Runs, VisitedBlock
from mhsa_compile.kernels.cpu.attention.masking import TileMask
from mhsa_compile.kernels.cpu.attention.matmuls import Products
from mhsa_compile.kernels.cpu.attention.online_softmax import OnlineSoftmax
from mhsa_compile.kernels.cpu.attention.output_accumulator import Accumulator
from mhsa_compile.kernels.interface.kernel import Config


class AttentionTile:
    """One attention task. Scratch is allocated where the tile is constructed: inside the loop over tasks, so per
    thread."""

    def __init__(
        self,
        products: Products,
        visibility: TileMask,
        config: Config,
        profile: CpuProfile,
        output: HeadView,
        runs: Runs | None,
    ) -> None:
        lanes, registers = profile.vector_lanes("float32"), profile.hardware.vector_registers
        self.products, self.output, self.queries = products, output, config["queries"]
        self.sums = Accumulator(products, visibility, self.queries, lanes, registers)
        self.probs = OnlineSoftmax(
            products,
            visibility,
            self.queries,
            config["key_tile"],
            lanes,
            self.sums.rescale,
            overwrites_summands=profile.overwrites_summands,
            interleaves=registers > 16,
        )
        # Backwards where scores fall with the distance, so that the reference need not rise.
        backwards = visibility.op.any_step("fades")
        route = Route(equal_blocks=True, backwards=backwards, drops_columns=True, begins_early=True)
        self.loop = KeyLoop(self, visibility, config, route, lanes=lanes, runs=runs)

    def emit(self) -> None:
        self.products.pack_queries()
        self.products.operands.prefetch_next(self.queries)
        self.sums.prefetch(self.output)
        self.probs.clear()
        self.sums.clear()
        self.loop.emit()
        self.sums.write(self.output, self.probs.row_sum)

    def begin_block(self) -> None:
        self.probs.begin_block()

    def add_group(self, group: KeyGroup) -> None:
        self.probs.add_group(group)

    def end_block(self, block: VisitedBlock) -> None:
        """Adds the block to the output: O = O + P V."""
        self.probs.end_block(block.groups)
        self.products.take_values(block.first_key, block.count)
        if block.hides is None:
            self.sums.add(block.first_key, block.count)
        else:
            self.sums.add_past_hidden(block.first_key, block.count, block.hides)
