"""The outputs of mhsa.Attention after the standard's: what the rows of the softmax are like.

4 lse, 5 entropy, 6 top_k_weights, 7 top_k_keys, 8 weights: as `outputs` says. Attributes: top_k, the number of keys;
weights_heads and weights_rows, which of them output 8 holds, all where they are absent.
"""

from __future__ import annotations

import onnx

from mhsa_compile.outputs import Inside

FIRST = 4
"""Outputs before it are the standard's: Y, present_key, present_value, qk_matmul_output."""
NAMES = ("lse", "entropy", "top_k_weights", "top_k_keys", "weights")
ATTRIBUTES = ("top_k", "weights_heads", "weights_rows")


def attributes_of(wanted: Inside) -> dict[str, int | list[int]]:
    """What a node says beside the names of its outputs."""
    said: dict[str, int | list[int]] = {"top_k": wanted.top_k} if wanted.top_k else {}
    for name, chosen in (("weights_heads", wanted.heads), ("weights_rows", wanted.rows)):
        if chosen is not None:
            said[name] = list(chosen)
    return said


def wanted_of(node: onnx.NodeProto) -> Inside:
    """What a node gives of the softmax's rows."""
    said = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    given = {name for name, value in zip(NAMES, node.output[FIRST:], strict=False) if value}
    heads, rows = (tuple(said[name]) if name in said else None for name in ("weights_heads", "weights_rows"))
    top_k = said.get("top_k", 0) if given & {"top_k_weights", "top_k_keys"} else 0
    return Inside("lse" in given, "entropy" in given, top_k, "weights" in given, heads, rows)


def put_in_place(node: onnx.NodeProto, wanted: Inside) -> None:
    """Spreads a node's outputs, Y and those of `wanted` side by side, over the operator's places for them."""
    if not wanted.names:
        return
    found = dict(zip(wanted.names, node.output[1:], strict=True))
    places = [node.output[0], *[""] * (FIRST - 1), *(found.get(name, "") for name in NAMES)]
    while not places[-1]:
        places.pop()
    del node.output[:]
    node.output.extend(places)


def definition(wanted: Inside, *, sinks: bool) -> list[str]:
    """The outputs in standard operators, from `scores` (B, H, L, S), -inf where hidden, `sinks` (H,) and Q."""
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
    if wanted.lse:
        lines += [
            "log_total = Log (partition)",
            "lse_column = Add (level, log_total)",
            "lse = Squeeze (lse_column, along)",
        ]
    lines += _entropy(sinks) if wanted.entropy else []
    lines += _top_k(wanted.top_k) if wanted.top_k else []
    lines += _weights(wanted) if wanted.weights else []
    # A function makes all of its outputs, up to the last one; nobody reads these.
    last = NAMES.index(wanted.names[-1])
    return lines + [f"{name} = Identity (nil)" for name in NAMES[:last] if name not in wanted.names]


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
    """The scores are padded, as there may be fewer than k."""
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


def _weights(wanted: Inside) -> list[str]:
    lines, last = ["all_weights = CastLike (shares, Q)"], "all_weights"
    if wanted.heads is not None:
        lines += [
            f"heads_chosen = {_integers(wanted.heads)}",
            "of_heads = Gather <axis = 1> (all_weights, heads_chosen)",
        ]
        last = "of_heads"
    if wanted.rows is not None:
        lines += [
            f"rows_chosen = {_integers(wanted.rows)}",
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
