"""Functions of scores while a module is exported: the lengths that captured tensors allow."""

from __future__ import annotations

from collections.abc import Mapping

from mhsa_compile.errors import SpecError
from mhsa_compile.spec.attention_spec import AttentionSpec


def sizes_within(spec: AttentionSpec, sizes: Mapping[str, int | str]) -> dict[str, int]:
    """Symbol -> the largest size that tensors allow which a function reads by a place itself, such as doc[q_idx].

    sizes   of b, q_idx and kv_idx, fixed or by name. Raises SpecError where a fixed one is too large.
    """
    limits: dict[str, int] = {}
    for name, function in spec.functions.items():
        for step in function.steps:
            if step.op != "load":
                continue
            kind = function.tensors[int(step.value)]
            for arg, most in zip(step.args, kind.shape, strict=True):
                leaf = function.steps[arg].op
                size = spec.num_heads if leaf == "h" else sizes.get(leaf, 0)
                if spec.kv_cache and leaf != "h":  # a cache may be longer than what is visible of it
                    continue
                if isinstance(size, str):
                    limits[size] = min(most, limits.get(size, most))
                elif size > most:
                    got = f"one of {most}, read by {leaf}"
                    raise SpecError(name, f"a captured tensor of at least {size} elements", got)
    return limits
