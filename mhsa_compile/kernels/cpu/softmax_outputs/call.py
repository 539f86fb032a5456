"""A call that looks into an attention: its arguments, which are the attention's own, and the scratch of one task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.attention_args import AttentionArguments, attention_arguments
from mhsa_compile.kernels.cpu.attention.masking import TileMask
from mhsa_compile.kernels.cpu.attention.matmuls import Products, TaskOperands, unit_for
from mhsa_compile.kernels.cpu.score_parts import tile_parts
from mhsa_compile.kernels.cpu.units.choice import units
from mhsa_compile.kernels.cpu.units.unit import Unit
from mhsa_compile.kernels.interface.kernel import Config
from mhsa_compile.kernels.interface.ops import AttentionOp


def default_config(profile: CpuProfile) -> dict[str, int]:
    """A config of two columns of queries: a last tile wastes little. Scores leave some registers to their
    exponentials."""
    key_tile = 8 if profile.hardware.vector_registers >= 32 else 4
    return {"queries": 2 * profile.vector_lanes("float32"), "key_tile": key_tile, "keys": 256}


@dataclass(frozen=True)
class SoftmaxCall(AttentionArguments):
    """The arguments of a call, and what its tasks are computed with."""

    profile: CpuProfile
    config: Config
    unit: Unit

    def task(self, b: Expr, h: Expr, first_query: Expr, place: Expr = None) -> tuple[Products, TileMask]:
        """Allocates the scratch of one tile of query rows; `place` is that of a chosen row among those asked for."""
        config, lanes = self.config, self.profile.vector_lanes("float32")
        operands = TaskOperands.of(self, b, h, first_query)
        parts = tile_parts(self, b, h, place)
        products = Products(operands, self.unit, config, lanes)
        return products, TileMask(operands, config["queries"], config["keys"], parts, lanes)


def call_arguments(op: AttentionOp, profile: CpuProfile, config: Config) -> SoftmaxCall:
    """The arguments that an attention and what looks into it have in common."""
    lanes, arguments = profile.vector_lanes("float32"), attention_arguments(op)
    # Scores go from registers to whoever wants them, row by row; words need whole vectors of queries.
    *narrow, last = units(profile, op.dtype)
    fitting = [unit for unit in narrow if unit.rows == 1 and config["queries"] % lanes == 0]
    unit = unit_for(op, [*fitting, last], config["key_tile"], lanes)
    return SoftmaxCall(**vars(arguments), profile=profile, config=config, unit=unit)


def function(name: str, body: Callable[[], None]) -> Expr:
    with IRBuilder() as builder:
        with T.prim_func():
            T.func_name(name)
            T.func_attr({"tirx.noalias": True})
            body()
    return builder.get()
