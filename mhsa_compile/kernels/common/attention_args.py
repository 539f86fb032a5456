"""What an attention is called with, and what looks into one: Q, K and V, a mask, and what it takes besides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import Dims, Expr, argument
from mhsa_compile.kernels.common.head_layout import placed_shape
from mhsa_compile.kernels.common.score_scale import LARGEST, LOG2_E
from mhsa_compile.kernels.interface.ops import AttentionOp


@dataclass(frozen=True)
class ExtraInputs(ABC):
    """The inputs of an attention after its mask, None where it has none: lengths (B,), sinks and slopes (H,).

    How elements are read and where numbers are kept, each family of kernels says for itself.
    """

    lengths: Expr | None
    sinks: Expr | None
    slopes: Expr | None

    @abstractmethod
    def keys(self, b: Expr, kv_length: Expr) -> Expr:
        """How many keys batch entry b has, as the family counts them."""

    @abstractmethod
    def settled(self, value: Expr) -> Expr:
        """The value, a float32, computed here and now."""

    @abstractmethod
    def element(self, buffer: Expr, head: Expr) -> Expr:
        """The element of `buffer` for a head, as float32."""

    def held(self, b: Expr, kv_length: Expr) -> Expr:
        """How many keys batch entry b has, int64: what a call brings is held to 0 .. `kv_length`."""
        return kv_length if self.lengths is None else T.max(T.int64(0), T.min(kv_length, self.lengths[b]))

    def sink(self, head: Expr) -> Expr | None:
        """The sink of a head, in units of log2. An infinite one is held to the largest number: what is infinitely below
        its row's maximum has a weight of 0, but the maximum itself must be one that can be subtracted from."""
        if self.sinks is None:
            return None
        sink, largest = self._in_log2(self.sinks, head), T.float32(LARGEST)
        return self.settled(T.Select(sink > largest, largest, sink))

    def slope(self, head: Expr) -> Expr | None:
        """What a head adds to a score for each key that lies further on, in units of log2."""
        return None if self.slopes is None else self._in_log2(self.slopes, head)

    def _in_log2(self, buffer: Expr, head: Expr) -> Expr:
        return self.settled(self.element(buffer, head) * T.float32(LOG2_E))


Extras = TypeVar("Extras", bound=ExtraInputs)


@dataclass(frozen=True)
class AttentionArguments(Generic[Extras]):
    """The arguments of an attention before its constants, and the sizes that they state. `inputs` are one for each
    distinct input of Q, K and V: a fused projection hands all three over in one buffer. `tensors` are what functions of
    scores capture."""

    op: AttentionOp
    batch: Expr
    q_length: Expr
    kv_length: Expr
    inputs: dict[int, Expr]
    mask: Expr | None
    extras: Extras
    tensors: tuple[Expr, ...]

    def output(self) -> Expr:
        """Declares the output, the argument behind the constants."""
        op = self.op
        shape = placed_shape(op.output, self.batch, self.q_length, op.num_heads, op.v_head_dim)
        return argument("y", shape, op.dtype)


def attention_arguments(op: AttentionOp, extras: type[Extras]) -> AttentionArguments[Extras]:
    """Declares the arguments of the function that is being built, where it is to be called first."""
    dim, heads = Dims(), T.int64(op.num_heads)
    sizes = batch, q_length, kv_length = dim(op.batch), dim(op.q_length), dim(op.kv_length)
    inputs = _inputs(op, batch, q_length, kv_length)
    mask = None if op.mask is None else argument("mask", [dim(d) for d in op.mask.dims], op.mask.dtype)
    more = extras(
        argument("lengths", [batch], "int64") if op.lengths else None,
        argument("sinks", [heads], op.dtype) if op.sinks else None,
        argument("slopes", [heads], op.dtype) if op.slopes else None,
    )
    tensors = tuple(
        argument(f"tensor{i}", [dim(size) for size in tensor.dims], tensor.dtype) for i, tensor in enumerate(op.tensors)
    )
    return AttentionArguments(op, *sizes, inputs, mask, more, tensors)


def _inputs(op: AttentionOp, batch: Expr, q_length: Expr, kv_length: Expr) -> dict[int, Expr]:
    roles = (
        (op.query, q_length, op.num_heads, op.head_dim),
        (op.key, kv_length, op.num_kv_heads, op.head_dim),
        (op.value, kv_length, op.num_kv_heads, op.v_head_dim),
    )
    buffers: dict[int, Expr] = {}
    for place, length, heads, width in sorted(roles, key=lambda role: role[0].buffer):
        if place.buffer not in buffers:
            shape = placed_shape(place, batch, length, heads, width)
            buffers[place.buffer] = argument(f"input{place.buffer}", shape, op.dtype)
    return buffers
