"""Which unit multiplies: the list of all, and those that a machine has."""

from __future__ import annotations

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.cpu.units import dot_products, matrix_products
from mhsa_compile.kernels.cpu.units.float32_lanes import Float32Lanes
from mhsa_compile.kernels.cpu.units.unit import Unit

NARROW: tuple[Unit, ...] = (*matrix_products.UNITS, *dot_products.UNITS)
"""The fastest first: a matrix product does twice the work of a dot product."""


def units(profile: CpuProfile, dtype: str) -> list[Unit]:
    """The units that multiply elements of `dtype`, as they are where there is one, in float32 as the last resort."""
    return [*(unit for unit in NARROW if unit.dtype == dtype and unit.is_on(profile)), Float32Lanes.of(profile)]
