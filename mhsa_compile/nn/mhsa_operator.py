"""The operator mhsa.Attention: its outputs and attributes, and what it means in standard operators.

It is ONNX's Attention with more inputs (sinks, slopes) and more outputs, behind the standard's four: 4 lse, 5 entropy,
6 top_k_weights, 7 top_k_keys, 8 weights, as `outputs` says. Attributes: top_k, the number of keys; weights_heads and
weights_rows, which of them output 8 holds, all where they are absent.

A node with an attribute that is neither the standard's nor one of these has no definition: functions of scores, and
formulas that the standard does not know. That of any other is a function, so that any ONNX tool can run the file. A
bias that grows with the distance is an additive mask. A sink takes its share of the softmax: the output is the one
without it, times the share of the others,
sum exp(score) / (sum exp(score) + exp(sink)).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx
from onnx import FunctionProto, NodeProto, parser

from mhsa_compile.spec.attention_spec import DOMAIN
from mhsa_compile.spec.outputs import SoftmaxOutputs

FIRST = 4
"""The number of the first output of our own. Those before it are the standard's: Y, present_key, present_value,
qk_matmul_output."""
NAMES = ("lse", "entropy", "top_k_weights", "top_k_keys", "weights")
FIRST_TENSOR = 10
"""From this input on there is what functions of scores capture, each an attribute of their name: a traced ScoreFunction
as JSON. That of score_mod comes first."""
ATTRIBUTES = ("top_k", "weights_heads", "weights_rows")
MASK, LENGTHS = "attn_mask", "nonpad_kv_seqlen"
"""Inputs that whoever reads a graph looks through before steps of the scores take them."""
INPUTS = ("Q", "K", "V", MASK, "past_key", "past_value", LENGTHS, "sinks", "slopes")
STANDARD_INPUTS = 7
STANDARD_ATTRIBUTES = frozenset(onnx.defs.get_schema("Attention", 25, "").attributes)
_BIASED_SCORES = 2  # the standard's qk_matmul_output_mode that comes just before the softmax


def attributes_of(outputs: SoftmaxOutputs) -> dict[str, int | list[int]]:
    """What a node says beside the names of its outputs."""
    attrs: dict[str, int | list[int]] = {"top_k": outputs.top_k} if outputs.top_k else {}
    for name, indices in (("weights_heads", outputs.heads), ("weights_rows", outputs.rows)):
        if indices is not None:
            attrs[name] = list(indices)
    return attrs


def is_standard(attributes: Collection[str], inputs: Sequence[object]) -> bool:
    """Whether a node of these attributes and inputs is one of the standard's operator, but for its outputs."""
    return set(attributes) <= STANDARD_ATTRIBUTES and all(value is None for value in inputs[STANDARD_INPUTS:])


def has_definition(node: onnx.NodeProto) -> bool:
    """Whether standard operators can say what a node says."""
    return {attribute.name for attribute in node.attribute} <= STANDARD_ATTRIBUTES.union(ATTRIBUTES)


def outputs_of(node: onnx.NodeProto) -> SoftmaxOutputs:
    """What a node gives of the softmax's rows."""
    attrs = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    names = {name for name, value in zip(NAMES, node.output[FIRST:], strict=False) if value}
    heads, rows = (tuple(attrs[name]) if name in attrs else None for name in ("weights_heads", "weights_rows"))
    top_k = attrs.get("top_k", 0) if names & {"top_k_weights", "top_k_keys"} else 0
    return SoftmaxOutputs("lse" in names, "entropy" in names, top_k, "weights" in names, heads, rows)


def put_in_place(node: onnx.NodeProto, outputs: SoftmaxOutputs) -> None:
    """Spreads a node's outputs, Y and those of `outputs` side by side, over the operator's places for them."""
    if not outputs.names:
        return
    arrays = dict(zip(outputs.names, node.output[1:], strict=True))
    places = [node.output[0], *[""] * (FIRST - 1), *(arrays.get(name, "") for name in NAMES)]
    while not places[-1]:
        places.pop()
    del node.output[:]
    node.output.extend(places)


def attention_function(node: NodeProto, opset: int, *, bool_mask: bool) -> FunctionProto:
    """The definition of mhsa.Attention for the inputs that `node` brings and the outputs that it has.

    opset       the standard's, at least 24 for sinks and for more outputs than Y
    bool_mask   whether attn_mask, where there is one, is boolean
    """
    inputs = {name for name, value in zip(INPUTS, node.input, strict=False) if value}
    rows = any(attribute.name == "q_num_heads" for attribute in node.attribute)
    lines = _slopes_in_mask(inputs, 1 if rows else 2, bool_mask) if "slopes" in inputs else []
    outputs = outputs_of(node)
    with_scores = "sinks" in inputs or outputs.names != ()
    y, has_stage = "plain" if "sinks" in inputs else "Y", bool(node.output[3:4] and node.output[3]) and with_scores
    if has_stage:  # a stage of the scores for whoever calls the node, and below those that the softmax takes
        lines.append("same_y, same_key, same_value, stage = Attention (Q, K, V)")
    lines.append(f"{f'{y}, made_key, made_value, scores' if with_scores else y} = Attention (Q, K, V)")
    if outputs.names:  # beside lengths the operator gives neither, and nobody reads them
        present = ("K", "V") if "nonpad_kv_seqlen" in inputs else ("made_key", "made_value")
        lines += [f"present_key = Identity ({present[0]})", f"present_value = Identity ({present[1]})"]
    lines += _shared_with_sinks(rows) if "sinks" in inputs else []
    lines += _inside(outputs, sinks="sinks" in inputs) if outputs.names else []
    output_names = ("Y", "present_key", "present_value", "stage" if has_stage else "scores", *NAMES)[: len(node.output)]
    head = (
        f'<domain: "{DOMAIN}", opset_import: ["" : {opset}]> '
        f"Attention ({', '.join(INPUTS[: len(node.input)])}) => ({', '.join(output_names)})"
    )
    function = parser.parse_function("\n".join((head, "{", *lines, "}")))
    *before, call = (inner for inner in function.node if inner.op_type == "Attention")
    mask = "biased" if "slopes" in inputs else "attn_mask" if "attn_mask" in inputs else ""
    function.attribute.extend(attribute.name for attribute in node.attribute)
    for inner in (*before, call):
        if "nonpad_kv_seqlen" in inputs and len(inner.output) > 1:
            inner.output[1:3] = ["", ""]
        _pass_on(node, inner, [mask, *(name if name in inputs else "" for name in INPUTS[4:7])])
    if with_scores:
        for attribute in [candidate for candidate in call.attribute if candidate.name == "qk_matmul_output_mode"]:
            call.attribute.remove(attribute)
        call.attribute.append(onnx.helper.make_attribute("qk_matmul_output_mode", _BIASED_SCORES))
    return function


def _pass_on(node: NodeProto, call: NodeProto, inputs: list[str]) -> None:
    """Hands a standard Attention inside of the definition what `node` is given, behind Q, K and V."""
    call.input.extend(inputs)
    while not call.input[-1]:
        call.input.pop()
    for attribute in node.attribute:
        if attribute.name not in ATTRIBUTES:  # the definition is of their values
            call.attribute.add(name=attribute.name, type=attribute.type, ref_attr_name=attribute.name)


def _slopes_in_mask(inputs: set[str], axis: int, bool_mask: bool) -> list[str]:
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
    if "past_key" in inputs:
        lines += ["first = Shape <start = 2, end = 3> (past_key)", "S = Add (new, first)"]
    elif "nonpad_kv_seqlen" in inputs:
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
    if "attn_mask" not in inputs:
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


def _inside(outputs: SoftmaxOutputs, *, sinks: bool) -> list[str]:
    """What the rows of the softmax are like, from `scores` (B, H, L, S), -inf where hidden, `sinks` (H,) and Q."""
    lines = [
        "along = Constant <value = int64[1] {-1}> ()",
        "nil = Constant <value = float {0.0}> ()",
        "unity = Constant <value = float {1.0}> ()",
        "exact = Cast <to = 1> (scores)",
    ]
    lines += _WITH_SINKS if sinks else ["top = ReduceMax (exact, along)"]
    lines += [
        "unseen = IsInf <detect_positive = 0> (top)",
        "level = Where (unseen, nil, top)",
        "relative = Sub (exact, level)",
        "exponents = Exp (relative)",
        "key_total = ReduceSum (exponents, along)",
    ]
    if sinks:
        lines += ["sink_relative = Sub (sink_score, level)", "sink_exponent = Exp (sink_relative)"]
    lines.append(f"partition = {'Add (key_total, sink_exponent)' if sinks else 'Identity (key_total)'}")
    lines += ["divisor = Where (unseen, unity, partition)", "shares = Div (exponents, divisor)"]
    if outputs.lse:
        lines += [
            "log_total = Log (partition)",
            "lse_column = Add (level, log_total)",
            "lse = Squeeze (lse_column, along)",
        ]
    lines += _entropy(sinks) if outputs.entropy else []
    lines += _top_k(outputs.top_k) if outputs.top_k else []
    lines += _weights(outputs) if outputs.weights else []
    # A function makes all of its outputs, up to the last one; nobody reads these.
    last = NAMES.index(outputs.names[-1])
    return lines + [f"{name} = Identity (nil)" for name in NAMES[:last] if name not in outputs.names]


_WITH_SINKS = [
    "apart = Constant <value = int64[3] {0, 2, 3}> ()",
    "exact_sinks = Cast <to = 1> (sinks)",
    "sink_score = Unsqueeze (exact_sinks, apart)",
    "key_top = ReduceMax (exact, along)",
    "top = Max (key_top, sink_score)",
]


def _entropy(sinks: bool) -> list[str]:
    lines = [
        "all_shares = Identity (shares)",
        "log_shares = Log (all_shares)",
        "terms = Mul (all_shares, log_shares)",
        "vanish = Equal (all_shares, nil)",
        "nonzero_terms = Where (vanish, nil, terms)",
        "negative = ReduceSum <keepdims = 0> (nonzero_terms, along)",
        "entropy = Sub (nil, negative)",
    ]
    if sinks:
        lines[0] = "sink_share = Div (sink_exponent, divisor)"
        lines.insert(1, "all_shares = Concat <axis = -1> (shares, sink_share)")
    return lines


def _top_k(k: int) -> list[str]:
    """Lines that find the k largest weights and their keys; the scores are padded, as there may be fewer than k."""
    return [
        f"pads = Constant <value = int64[8] {{0, 0, 0, 0, 0, 0, 0, {k}}}> ()",
        "lowest = Constant <value = float {-inf}> ()",
        "longer = Pad (exact, pads, lowest)",
        f"k = Constant <value = int64[1] {{{k}}}> ()",
        "highest, places = TopK (longer, k)",
        "gone = IsInf <detect_positive = 0> (highest)",
        "nobody = Constant <value = int64 {-1}> ()",
        "top_k_keys = Where (gone, nobody, places)",
        "largest_relative = Sub (highest, level)",
        "largest_exponents = Exp (largest_relative)",
        "top_k_weights = Div (largest_exponents, divisor)",
    ]


def _weights(outputs: SoftmaxOutputs) -> list[str]:
    lines, last = ["all_weights = CastLike (shares, Q)"], "all_weights"
    if outputs.heads is not None:
        lines += [
            f"heads_chosen = {_integers(outputs.heads)}",
            "of_heads = Gather <axis = 1> (all_weights, heads_chosen)",
        ]
        last = "of_heads"
    if outputs.rows is not None:
        lines += [
            f"rows_chosen = {_integers(outputs.rows)}",
            "zeroth = Constant <value = int64[1] {0}> ()",
            "query_count = Shape <start = 2, end = 3> (scores)",
            "from_end = Add (rows_chosen, query_count)",
            "is_from_end = Less (rows_chosen, zeroth)",
            "rows_at = Where (is_from_end, from_end, rows_chosen)",
            "is_before = Less (rows_at, zeroth)",
            "is_within = Less (rows_at, query_count)",
            "is_after = Not (is_within)",
            "is_missing = Or (is_before, is_after)",
            "rows_there = Where (is_missing, zeroth, rows_at)",
            f"of_rows = Gather <axis = 2> ({last}, rows_there)",
            "behind_rows = Constant <value = int64[1] {1}> ()",
            "missing_rows = Unsqueeze (is_missing, behind_rows)",
            "no_weight = CastLike (nil, Q)",
            "with_missing = Where (missing_rows, no_weight, of_rows)",
        ]
        last = "with_missing"
    return [*lines, f"weights = Identity ({last})"]


def _integers(numbers: tuple[int, ...]) -> str:
    return f"Constant <value = int64[{len(numbers)}] {{{', '.join(map(str, numbers))}}}> ()"
