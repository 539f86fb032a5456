"""What mhsa.Attention means, in standard operators: a function, so that any ONNX tool can run the file.

A bias that grows with the distance is an additive mask. A sink takes its share of the softmax: the output is the one
without it, times the share of the others, sum exp(score) / (sum exp(score) + exp(sink)).
"""

from __future__ import annotations

import onnx
from onnx import FunctionProto, NodeProto, parser

from mhsa_compile import operator_inside
from mhsa_compile.spec import DOMAIN

_INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen", "sinks", "slopes")
_BIASED_SCORES = 2  # the standard's qk_matmul_output_mode that comes just before the softmax


def attention_function(node: NodeProto, opset: int, *, bool_mask: bool) -> FunctionProto:
    """The definition of mhsa.Attention for the inputs that `node` brings and the outputs that it has.

    opset       the standard's, at least 24 for sinks and for more outputs than Y
    bool_mask   whether attn_mask, where there is one, is boolean
    """
    given = {name for name, value in zip(_INPUTS, node.input, strict=False) if value}
    rows = any(attribute.name == "q_num_heads" for attribute in node.attribute)
    lines = _slopes_in_mask(given, 1 if rows else 2, bool_mask) if "slopes" in given else []
    wanted = operator_inside.wanted_of(node)
    with_scores = "sinks" in given or wanted.names != ()
    y = "plain" if "sinks" in given else "Y"
    lines.append(f"{f'{y}, present_key, present_value, scores' if with_scores else y} = Attention (Q, K, V)")
    lines += _shared_with_sinks(rows) if "sinks" in given else []
    lines += operator_inside.definition(wanted, sinks="sinks" in given) if wanted.names else []
    outputs = ("Y", "present_key", "present_value", "scores", *operator_inside.NAMES)[: len(node.output)]
    head = (
        f'<domain: "{DOMAIN}", opset_import: ["" : {opset}]> '
        f"Attention ({', '.join(_INPUTS[: len(node.input)])}) => ({', '.join(outputs)})"
    )
    function = parser.parse_function("\n".join((head, "{", *lines, "}")))
    (call,) = (inner for inner in function.node if inner.op_type == "Attention")
    mask = "biased" if "slopes" in given else "attn_mask" if "attn_mask" in given else ""
    call.input.extend([mask, *(name if name in given else "" for name in _INPUTS[4:7])])
    while not call.input[-1]:
        call.input.pop()
    for attribute in node.attribute:
        function.attribute.append(attribute.name)
        if attribute.name in operator_inside.ATTRIBUTES:  # the definition is of their values
            continue
        call.attribute.add(name=attribute.name, type=attribute.type, ref_attr_name=attribute.name)
    if with_scores:
        call.attribute.append(onnx.helper.make_attribute("qk_matmul_output_mode", _BIASED_SCORES))
    return function


def _slopes_in_mask(given: set[str], axis: int, bool_mask: bool) -> list[str]:
    """`biased`: slope * (key - place of the query) on top of attn_mask; -inf where a boolean one hides.

    Lengths are on `axis` of Q and K.
    """
    lines = [
        "zero = Constant <value = int64 {0}> ()",
        "one = Constant <value = int64 {1}> ()",
        "after = Constant <value = int64[1] {1}> ()",
        "around = Constant <value = int64[3] {0, 2, 3}> ()",
        "behind = Constant <value = int64[3] {1, 2, 3}> ()",
        f"L = Shape <start = {axis}, end = {axis + 1}> (Q)",
        f"new = Shape <start = {axis}, end = {axis + 1}> (K)",
    ]
    if "past_key" in given:
        lines += ["first = Shape <start = 2, end = 3> (past_key)", "S = Add (new, first)"]
    elif "nonpad_kv_seqlen" in given:
        lines += ["offset = Sub (nonpad_kv_seqlen, L)", "first = Unsqueeze (offset, behind)", "S = Identity (new)"]
    else:
        lines += ["first = Identity (zero)", "S = Identity (new)"]
    lines += [
        "queries = Squeeze (L)",
        "keys = Squeeze (S)",
        "i = Range (zero, queries, one)",
        "j = Range (zero, keys, one)",
        "column = Unsqueeze (i, after)",
        "place = Add (column, first)",
        "distance = Sub (j, place)",
        "wide_distance = Cast <to = 1> (distance)",
        "wide_slopes = Cast <to = 1> (slopes)",
        "slope = Unsqueeze (wide_slopes, around)",
        "wide_bias = Mul (slope, wide_distance)",
        "bias = CastLike (wide_bias, Q)",
    ]
    if "attn_mask" not in given:
        return [*lines, "biased = Identity (bias)"]
    if not bool_mask:
        return [*lines, "biased = Add (bias, attn_mask)"]
    return [
        *lines,
        "minus_infinity = Constant <value = float {-inf}> ()",
        "hidden = CastLike (minus_infinity, Q)",
        "biased = Where (attn_mask, bias, hidden)",
    ]


def _shared_with_sinks(rows: bool) -> list[str]:
    """Y: the share of the weights that the sinks leave, times `plain`."""
    lines = [
        "last = Constant <value = int64[1] {-1}> ()",
        "beside = Constant <value = int64[3] {0, 2, 3}> ()",
        "sink = Unsqueeze (sinks, beside)",
        "best = ReduceMax (scores, last)",
        "largest = Max (best, sink)",  # finite, also where every score is -inf
        "below = Sub (scores, largest)",
        "powers = Exp (below)",
        "sum = ReduceSum (powers, last)",
        "sink_below = Sub (sink, largest)",
        "sink_power = Exp (sink_below)",
        "total = Add (sum, sink_power)",
        "share = Div (sum, total)",
    ]
    if not rows:
        return [*lines, "Y = Mul (plain, share)"]
    return [
        *lines,
        "kept = Constant <value = int64[2] {0, 0}> ()",
        "heads = Shape (sinks)",
        "split = Concat <axis = 0> (kept, heads, last)",
        "joined = Concat <axis = 0> (kept, last)",
        "plain_heads = Reshape (plain, split)",
        "share_rows = Transpose <perm = [0, 2, 1, 3]> (share)",
        "shared = Mul (plain_heads, share_rows)",
        "Y = Reshape (shared, joined)",
    ]
