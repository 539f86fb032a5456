"""A layer without some of its heads, as a module that is compiled as any other."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from mhsa_analysis.pruning import HeadSet, PruningPlan, checked_heads
from mhsa_compile.errors import InputError, ModelError, SpecError
from mhsa_compile.nn.modules import MultiHeadAttention
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.field_notes import fields_with_notes


def pruned(layer: MultiHeadAttention, heads: Sequence[int], *, refit: bool = False) -> MultiHeadAttention:
    """`layer` without `heads`: a MultiHeadAttention with fewer of them, whose output is "y".

    heads    of a plan (`report.prune(k).heads`, `report.without([3, 7]).heads`), which knows what was measured: what
             these heads add in the mean moves into the bias. Plain numbers are removed, and nothing makes up for them
    refit    whether W_O and the bias are fitted anew, so that what is kept comes near to y; `plan.unseen_refit_error`
             says how near on sequences that the fit did not see

    A layer without biases gets them, where a mean is moved. Raises InputError (heads that do not exist, all of them, a
    part of a group, too few tokens or sequences for a refit), SpecError (ALiBi: a head's slope follows from the number
    of heads) and ModelError.

    >>> import mhsa_compile as mhsa
    >>> small = pruned(mhsa.MultiHeadAttention(mhsa.AttentionSpec(embed_dim=32, num_heads=4)), [1, 2])
    >>> small.spec.num_heads, small.spec.head_dim, small(torch.zeros(1, 5, 32)).shape
    (2, 8, torch.Size([1, 5, 32]))
    """
    if not isinstance(layer, MultiHeadAttention):
        raise ModelError("layer", "a MultiHeadAttention", type(layer).__name__)
    spec = layer.spec
    if spec.alibi:
        got = "alibi=True"
        raise SpecError("layer", "heads that do not know how many there are", got, "ALiBi's slopes would all change.")
    removal = checked_heads(heads, spec.num_heads, spec.num_kv_heads)
    rest = [head for head in range(spec.num_heads) if head not in removal]
    group = spec.num_heads // spec.num_kv_heads
    plan = _plan_of(layer, heads, refit)
    small = MultiHeadAttention(
        msgspec.structs.replace(
            spec,
            num_heads=len(rest),
            num_kv_heads=len(rest) // group,
            bias=spec.bias or plan is not None,
            outputs=("y",),
        )
    )
    columns = _columns(rest, spec.v_head_dim)
    state = {name: value.detach() for name, value in layer.named_parameters()}
    projections = _projections(state, rest, group, (spec.head_dim, spec.v_head_dim))
    projections["out_proj.weight"] = state["out_proj.weight"][:, columns]
    if "out_proj.bias" in state:
        projections["out_proj.bias"] = state["out_proj.bias"]
    if plan is not None:
        moments = plan.split.fitted
        out = plan.fit.out if refit else moments.out[moments.columns(rest)]
        projections["out_proj.weight"] = torch.from_numpy(np.ascontiguousarray(out.T))
        projections["out_proj.bias"] = torch.from_numpy(moments.bias(rest, out))
    with torch.no_grad():
        for name, parameter in small.named_parameters():
            parameter.copy_(projections[name] if name in projections else torch.zeros_like(parameter))
    return small.to(layer.out_proj.weight.device).eval()


def _plan_of(layer: MultiHeadAttention, heads: Sequence[int], refit: bool) -> PruningPlan | None:
    """The plan that the heads are of, if it is one for this layer. Raises InputError."""
    plan = heads.plan if isinstance(heads, HeadSet) else None
    if plan is None:
        if refit:
            raise InputError(
                "refit", "heads of a plan, which were measured", "plain numbers", "Pass report.without(heads).heads."
            )
        return None
    ours = layer.out_proj.weight.detach().cpu().double().numpy()
    if not np.array_equal(ours, plan.split.fitted.layer.arrays["out_proj.weight"]):
        raise InputError("heads", "a plan for this layer", "one for a layer with other weights")
    return plan


def _projections(
    state: dict[str, Tensor], heads: Sequence[int], group: int, widths: tuple[int, int]
) -> dict[str, Tensor]:
    """The rows of the kept heads in what makes queries, keys and values, and their numbers in what holds one a head."""
    shared = [head // group for head in heads[::group]]
    rows = {"q": _columns(heads, widths[0]), "k": _columns(shared, widths[0]), "v": _columns(shared, widths[1])}
    projections = {
        name: state[name][rows[part]]
        for part in rows
        for name in (f"{part}_proj.weight", f"{part}_proj.bias")
        if name in state
    }
    fields = fields_with_notes(AttentionSpec).items()
    of_heads = [name for name, field in fields if field.note.parameters == "num_heads" and name in state]
    return projections | {name: state[name][list(heads)] for name in of_heads}


def _columns(heads: Sequence[int], width: int) -> Tensor:
    return (torch.tensor(list(heads))[:, None] * width + torch.arange(width)).reshape(-1)
