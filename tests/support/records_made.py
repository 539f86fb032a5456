"""Records that tests make up."""

from __future__ import annotations

from typing import Any

import msgspec

from mhsa_compile.hardware.profile import TargetProfile, load_profile
from mhsa_compile.records.device import Device
from mhsa_compile.records.record import Record, isa_of, microarchitecture_of

DEVICE = Device(cpu="a CPU", cores=2, architecture="x86_64", l1d_kib=32, l2_kib=1024, microarchitecture="zen4")


def device_of(profile: TargetProfile) -> Device:
    """A device of a target's microarchitecture."""
    return msgspec.structs.replace(DEVICE, microarchitecture=microarchitecture_of(profile) or DEVICE.microarchitecture)


def made(target: str = "x86-64-v4", **changes: Any) -> Record:
    """A record of a linear layer for a target, measured on its microarchitecture, or on a Zen 4."""
    profile = load_profile(target)
    record = Record(
        op="linear", key={"rows": 128, "in_features": 512, "dtype": "float32"}, sizes={"rows": 100}, kernel="linear",
        config={"tile_rows": 8, "tile_columns": 2}, median_us=80.0, spread=0.01, default_us=100.0, error_share=0.25,
        threads=1, isa=isa_of(profile), device=device_of(profile), versions={"mhsa-compile": "0.1.0"},
        date="2026-11-21T16:30:00Z",
    )  # fmt: skip
    return msgspec.structs.replace(record, **changes)
