"""What the kernels of attention in tiles of queries and keys have in common on a GPU: which attentions they take, which
sizes fit a block, and how a constant mask comes to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from mhsa_compile.hardware.profile import CudaProfile
from mhsa_compile.kernels.common.score_scale import why_not_scores
from mhsa_compile.kernels.common.static_mask import why_not_plan
from mhsa_compile.kernels.cuda.attention.block_sparsity import CudaBlockSparsity, separate_plan
from mhsa_compile.kernels.cuda.primitives.inputs import why_not_widths
from mhsa_compile.kernels.interface.kernel import Config, Emitted, unknown_knobs
from mhsa_compile.kernels.interface.ops import AttentionOp

if TYPE_CHECKING:
    from tvm.ir import Expr


class BlockSizes(Protocol):
    """The sizes of a block."""

    @property
    def queries(self) -> int: ...

    @property
    def keys(self) -> int: ...

    @property
    def shared_bytes(self) -> int: ...


Shape = TypeVar("Shape", bound=BlockSizes)


class TiledAttentionKernel(ABC, Generic[Shape]):
    """A kernel whose block has a tile of queries of one head and goes over tiles of keys."""

    op_type = AttentionOp
    dtypes: tuple[str, ...]
    dtypes_in_words: str
    knobs: tuple[str, ...]
    functions = True
    """Whether it computes mask_mod and score_mod."""

    @abstractmethod
    def shape(self, op: AttentionOp, config: Config) -> Shape:
        """The sizes of a block."""

    @abstractmethod
    def why_not_knobs(self, config: Config) -> str | None:
        """Why a block cannot be of such sizes, whatever the attention and the GPU."""

    @abstractmethod
    def why_not_shape(self, op: AttentionOp, shape: Shape) -> str | None:
        """Why the threads of a block have too few registers."""

    @abstractmethod
    def function(self, op: AttentionOp, shape: Shape, plan: CudaBlockSparsity | None, profile: CudaProfile) -> Expr:
        """The PrimFunc of an attention, whose blocks have these sizes."""

    def workspace(
        self, op: AttentionOp, shape: Shape, plan: CudaBlockSparsity | None, profile: CudaProfile
    ) -> tuple[int, ...]:
        """The shape of the function's workspace; empty where it has none."""
        return ()

    def why_not(self, op: AttentionOp, profile: CudaProfile) -> str | None:
        if op.dtype not in self.dtypes:
            return f"of {self.dtypes_in_words}, not {op.dtype}"
        return why_not_plan(op, "cuda") or why_not_widths(op) or why_not_scores(op, functions=self.functions)

    def why_not_config(self, op: AttentionOp, profile: CudaProfile, config: Config) -> str | None:
        if reason := unknown_knobs(config, self.knobs) or self.why_not_knobs(config):
            return reason
        shape, available = self.shape(op, config), profile.hardware.shared_kib_per_block * 1024
        if shape.shared_bytes > available:
            return f"{shape.shared_bytes} bytes of shared memory of {available}"
        return self.why_not_shape(op, shape)

    def emit(self, op: AttentionOp, profile: CudaProfile, config: Config) -> Emitted:
        shape = self.shape(op, config)
        op, plan = separate_plan(op, shape.queries, shape.keys)
        return Emitted(
            self.function(op, shape, plan, profile),
            constants=plan.arrays if plan else (),
            workspace=self.workspace(op, shape, plan, profile),
        )
