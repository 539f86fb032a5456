"""Rotary embeddings of transformers: what a config says of them, and the cosines and sines that a model makes.

Notation: B batch, L query length, H heads, E head dim.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from mhsa_compile.conversion.attention_calls import refusal
from mhsa_compile.errors import ModelError
from mhsa_compile.spec.position_encoding import SCALINGS, Rope
from mhsa_compile.verification.error_budget import agrees

Tables = tuple[Tensor, Tensor]
"""Cosines and sines, each (L, rotary_dim / 2)."""


def tables_by_its_file(module: Any, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """(cos, sin) for the places 0, 1, ... of x (B, L, D), as the model around a layer makes them: by the rotary
    embedding that the file of the layer's class defines. None where it defines none. Raises ModelError."""
    for kind in type(module).__mro__:
        names = vars(sys.modules[kind.__module__])
        classes = {name: value for name, value in names.items() if name.endswith("RotaryEmbedding")}
        if classes:
            break
    else:
        return None
    own = kind.__name__.removesuffix("Attention") + "RotaryEmbedding"
    if own not in classes and len(classes) > 1:
        raise refusal(module, f"its file has several rotary embeddings: {', '.join(sorted(classes))}")
    rotary: Any = classes[own if own in classes else next(iter(classes))](config=module.config)
    more = {}
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        more["layer_type"] = _layer_type(module)
    cos, sin = rotary(x, torch.arange(x.shape[1])[None], **more)
    return cos, sin


def _layer_type(module: Any) -> str | None:
    """Which of the kinds of layers that its config lists a layer is, by its own word or its number."""
    if (kind := getattr(module, "layer_type", None)) is not None:
        return str(kind)
    number = getattr(module, "layer_idx", getattr(module, "layer_id", None))
    kinds = getattr(module.config, "layer_types", None)
    return None if number is None or kinds is None else str(kinds[number])


def half_tables(module: nn.Module, embeddings: Any) -> Tables | None:
    """What a layer was given as position_embeddings, one number for each pair of dims. Raises ModelError."""
    if embeddings is None:
        return None
    if not isinstance(embeddings, tuple | list) or [isinstance(one, Tensor) for one in embeddings] != [True, True]:
        raise refusal(module, "its position_embeddings are no cosines and sines")
    tables = []
    for table in embeddings:
        rows = table[0] if table.ndim == 3 else table
        is_of_places = rows.ndim == 2 and rows.is_floating_point()
        if not is_of_places or (table.ndim == 3 and not torch.equal(table, rows.expand_as(table))):
            raise refusal(module, "its rows stand at other places than 0, 1, ..., or at places with several axes")
        tables.append(rows.detach())
    width = tables[0].shape[1]
    for apart in (lambda t: t.chunk(2, dim=1), lambda t: (t[:, 0::2], t[:, 1::2])):
        if width % 2 == 0 and all(torch.equal(*apart(table)) for table in tables):
            return apart(tables[0])[0], apart(tables[1])[0]
    return tables[0], tables[1]


def check_tables(module: nn.Module, rope: Rope, theirs: Tables) -> None:
    """Raises ModelError unless the resolved `rope` has these cosines and sines, as float32 computes them."""
    L, pairs = theirs[0].shape
    assert rope.rotary_dim is not None
    exact = [torch.from_numpy(table) for table in msgspec.structs.replace(rope, max_length=max(L, 2)).tables()]
    if exact[0].shape[1] == pairs:
        powers = torch.arange(0, rope.rotary_dim, 2) / rope.rotary_dim
        rounding = (1 / rope.theta**powers).double() * rope.theta ** (powers.double())  # float32's error of the powers
        angles = (torch.atan2(exact[1][1], exact[0][1]) * rounding).float() * torch.arange(L).float()[:, None]
        size = torch.hypot(exact[1][1], exact[0][1]).float()
        if all(
            agrees(table[:L], factor * size, own.float())
            for table, factor, own in zip(exact, (angles.cos(), angles.sin()), theirs, strict=True)
        ):
            return
    words = f"theta {rope.theta:g}, {rope.rotary_dim} dims that turn, scaling {rope.scaling!r}"
    raise refusal(module, f"its cosines and sines are not those of what its config says: {words}")


def rope_of(layer: nn.Module, config: Any, head_dim: int, max_length: int | None = None) -> Rope:
    """The rotary embedding that a config of transformers describes, in the words of version 5 or before. Raises
    ModelError."""
    parameters = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    if kinds := [name for name, value in parameters.items() if isinstance(value, Mapping)]:
        kind = _layer_type(layer)
        if kind not in kinds:
            raise ModelError("layer", f"a layer_type among {', '.join(kinds)}, as its config has", repr(kind))
        parameters = dict(parameters[kind])
    share = float(parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None) or 1.0))
    return Rope(
        theta=float(parameters.get("rope_theta", getattr(config, "rope_theta", 10000.0))),
        rotary_dim=int(head_dim * share),
        max_length=config.max_position_embeddings if max_length is None else max_length,
        **_scaling_of(config, parameters),
    )


def _scaling_of(config: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    """The fields of a Rope that scale it. Source: transformers' modeling_rope_utils, ROPE_INIT_FUNCTIONS."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return {}
    if kind not in SCALINGS:
        expected = f"rotary positions as they are, or scaled by a table that no call changes: {', '.join(SCALINGS)}"
        raise ModelError("layer", expected, f"rope_type={kind!r}")
    if kind == "linear":
        return {"factor": float(parameters.get("factor", 1.0))}
    longest = config.max_position_embeddings
    word = "original_max_position_embeddings"
    own_length = parameters.get(word) or getattr(config, word, None)
    fields = {"scaling": kind, "original_max_length": int(own_length or longest)}
    fields["factor"] = float(parameters.get("factor") or longest / fields["original_max_length"])
    fields |= {name: parameters[name] for name in SCALINGS[kind] if parameters.get(name) is not None}
    mscales = [float(parameters.get(name) or 0) for name in ("mscale", "mscale_all_dim")]
    if kind == "yarn" and parameters.get("attention_factor") is None and all(mscales):
        over, under = (0.1 * mscale * math.log(max(fields["factor"], 1.0)) + 1.0 for mscale in mscales)
        fields["attention_factor"] = over / under
    return fields
