"""A pytest plugin that notes which kernels each test emits, for operations with which features, and pairs of them.

`campaigns/choose_tests.py` loads it, and reads what it writes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mhsa_compile.kernels.interface.ops import AttentionOp
from mhsa_compile.kernels.registry import KERNELS
from support.cpu_time import cpu_seconds

FOLDER = "MHSA_KERNEL_FEATURES"  # an environment variable: where each process of pytest writes its lines
TIERS = ("arm", "cuda", "slow")  # markers of tests that have a target of their own

_emitted: set[tuple[str, str]] = set()


def features(op: Any, prefix: str = "") -> set[str]:
    """What an operation asks for: flags that are set, choices by name, parts that are there, dims that are free."""
    grouped = isinstance(op, AttentionOp) and op.num_kv_heads < op.num_heads
    names = {f"{prefix}grouped heads"} if grouped else set[str]()
    for field in _fields(op):
        name, value, optional = f"{prefix}{field.name}", getattr(op, field.name), "None" in str(field.type)
        if name.endswith("_name") or value is False or value is None:  # names of inputs serve messages
            continue
        if dataclasses.is_dataclass(value) or isinstance(value, msgspec.Struct):
            names |= features(value, f"{name}.")
        for step in value if name.endswith("scores") else ():
            names |= {step_name := f"{prefix}{type(step).__name__}"} | features(step, f"{step_name}.")
        if isinstance(value, str):
            names.add(f"{name} free" if "Dim" in str(field.type) else f"{name}={value}")
        elif value is True or optional or _is_set(value, field.default):
            names.add(name)
    return names


def _fields(part: Any) -> Iterable[Any]:
    """Those of a dataclass, or of a part that manifests hold as well."""
    return msgspec.structs.fields(part) if isinstance(part, msgspec.Struct) else dataclasses.fields(part)


def _is_set(value: Any, default: Any) -> bool:
    """Whether a number is not what it is by default, or a flag of several is set."""
    if isinstance(value, tuple):
        return any(entry is True for entry in value)
    return isinstance(default, int | float) and value != default


def _noting(kernel: type) -> None:
    emit = kernel.emit  # type: ignore[attr-defined]

    @functools.wraps(emit)
    def noting(self: Any, op: Any, profile: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = f"{self.name} for {profile.tvm.arch if profile.family == 'cuda' else profile.link.triple}"
        names = sorted(features(op) | {f"for {profile.name}"})
        pairs = itertools.combinations(names, 2)
        _emitted.update((kernel, together) for together in (*names, *map(" and ".join, pairs)))
        return emit(self, op, profile, *args, **kwargs)

    kernel.emit = noting  # type: ignore[attr-defined]


def pytest_configure() -> None:
    for kernel in {type(kernel) for kernels in KERNELS.values() for kernel in kernels}:
        _noting(kernel)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _emitted.clear()
    start = cpu_seconds()
    result = yield
    tier = next((marker for marker in TIERS if item.get_closest_marker(marker)), "")
    thorough = item.get_closest_marker("thorough") is not None
    line = {
        "test": item.nodeid,
        "tier": tier,
        "thorough": thorough,
        "seconds": cpu_seconds() - start,
        "pairs": sorted(_emitted),
    }
    with (Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    return result
