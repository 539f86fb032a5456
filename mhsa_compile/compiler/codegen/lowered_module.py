"""What a lowered model is: a module of kernels, as it is built, and the report of what runs what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mhsa_compile.runtime.artifact.manifest import OpReport, SlowOperation


@dataclass
class LoweredModule:
    """What `build` compiles. `weights` are the initializers, of which `weight_binding` has numbers; `packed` is how
    many parameters of main it makes of them, after the inputs."""

    module: Any
    weights: list[str]
    packed: int
    reports: list[OpReport]
    slow: tuple[SlowOperation, ...] = ()
