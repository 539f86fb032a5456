"""What an attention is called with, and what looks into one: Q, K and V, and what the steps of its scores take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import SizeVars, argument
from mhsa_compile.kernels.common.head_layout import HeadView, head_view, placed_shape
from mhsa_compile.kernels.interface.ops import AttentionOp, numbers_in_element
from mhsa_compile.kernels.interface.score_step import ScoreStep

if TYPE_CHECKING:
    from tvm.ir import Expr


@dataclass(frozen=True)
class AttentionArguments:
    """The arguments of an attention before its constants, and the sizes that they state. `inputs` are one for each
    distinct input of Q, K and V: a fused projection hands all three over in one buffer. `of_steps` are those of each
    step, `scales` those of the rows of K and of V, where they have any."""

    op: AttentionOp
    batch: Expr
    q_length: Expr
    kv_length: Expr
    inputs: dict[int, Expr]
    of_steps: tuple[tuple[Expr, ...], ...]
    scales: tuple[Expr, ...]

    def steps(self) -> list[tuple[ScoreStep, tuple[Expr, ...]]]:
        """The steps, each with its arguments."""
        return list(zip(self.op.scores, self.of_steps, strict=True))

    def keys(self, b: Expr) -> Expr:
        """How many keys batch entry b has, int64."""
        count = self.kv_length
        for step, own in self.steps():
            count = step.keys(own, b, count)
        return count

    def key(self, b: Expr, g: Expr) -> HeadView:
        """The keys of one head."""
        op = self.op
        return head_view(self.inputs[op.key.buffer], op.key, op.head_dim, b, g, *self.scales[:1])

    def value(self, b: Expr, g: Expr) -> HeadView:
        """The values of one head."""
        op = self.op
        return head_view(self.inputs[op.value.buffer], op.value, op.v_head_dim, b, g, *self.scales[1:])

    def output(self) -> Expr:
        """Declares the output, the argument behind the constants."""
        op = self.op
        shape = placed_shape(op.output, self.batch, self.q_length, op.num_heads, op.v_head_dim)
        return argument("y", shape, op.dtype)


def attention_arguments(op: AttentionOp) -> AttentionArguments:
    """Declares the arguments of the function that is being built, where it is to be called first."""
    dim = SizeVars()
    sizes = batch, q_length, kv_length = dim(op.batch), dim(op.q_length), dim(op.kv_length)
    inputs = _inputs(op, batch, q_length, kv_length)
    names = ("key_scales", "value_scales") if op.has_scales else ()
    scales = tuple(argument(name, [batch, T.int64(op.num_kv_heads), kv_length], "float32") for name in names)
    of_steps = tuple(
        tuple(argument(name, [dim(size) for size in kind.dims], kind.dtype) for name, kind in step.arguments(op))
        for step in op.scores
    )
    return AttentionArguments(op, *sizes, inputs, of_steps, scales)


def _inputs(op: AttentionOp, batch: Expr, q_length: Expr, kv_length: Expr) -> dict[int, Expr]:
    roles = (
        (op.query, q_length, op.num_heads, op.head_dim, op.dtype),
        (op.key, kv_length, op.num_kv_heads, op.head_dim, op.stored_dtype),
        (op.value, kv_length, op.num_kv_heads, op.v_head_dim, op.stored_dtype),
    )
    buffers: dict[int, Expr] = {}
    for place, length, heads, width, dtype in sorted(roles, key=lambda role: role[0].buffer):
        if place.buffer not in buffers:
            shape = placed_shape(place, batch, length, heads, width // numbers_in_element(dtype))
            buffers[place.buffer] = argument(f"input{place.buffer}", shape, dtype)
    return buffers
