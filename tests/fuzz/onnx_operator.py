"""Random nodes of the operator Attention, as other tools might write them, compiled and held against float64.

python -m fuzz.onnx_operator [COUNT [SEED]]      # 200 from seed 0 on; a failure prints the call of `model`
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from support.operator_models import H, model

import mhsa_compile as mhsa
from mhsa_compile.errors import MhsaError
from mhsa_compile.verification.parity import CaseResult, check

Sizes = dict[str, int]


def drawn(seed: int) -> tuple[dict[str, Any], Sizes]:
    """(what `model` is called with, sizes of its symbols)."""
    rng = np.random.default_rng(seed)

    def one_of(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    def perhaps(probability: float) -> bool:
        return bool(rng.random() < probability)

    opset, dtype = one_of(23, 24, 25), one_of("float32", "float32", "float16", "bfloat16")
    L = one_of(1, 3, 5, 7, 19, "L")
    S = one_of(1, 11, L, "S", "S")
    past = one_of(None, None, 4, "P")
    said: dict[str, Any] = {"opset": opset, "dtype": dtype, "axes": one_of(3, 4), "L": L, "S": S, "past": past}
    said["lengths"] = past is None and opset >= 24 and perhaps(0.5)
    attributes: dict[str, Any] = {"is_causal": 1} if perhaps(0.5) else {}
    if opset == 25:
        attributes |= {"left_window_size": int(rng.integers(-1, 9)), "right_window_size": int(rng.integers(-1, 5))}
    optional = {"softcap": (0.5, 3.0, 30.0), "scale": (0.1, 0.5, 1.0), "softmax_precision": (1, 10, 11, 16)}
    attributes |= {name: one_of(*values) for name, values in optional.items() if perhaps(0.3)}
    outputs = ["y", *(("present_key", "present_value") if past is not None else ("", ""))]
    if perhaps(0.25):
        outputs.append("scores")
        attributes["qk_matmul_output_mode"] = one_of(0, 1, 2, 3)
    sizes = {"B": one_of(1, 2, 3), "L": one_of(1, 5, 17), "S": one_of(1, 7, 33, 70), "P": one_of(0, 1, 13, 60)}
    queries, new, before = (size if isinstance(size, int) else sizes.get(str(size), 0) for size in (L, S, past))
    sizes["T"] = int(rng.integers(1, new + before + 1)) if opset >= 24 and perhaps(0.4) else new + before
    sizes["mL"] = one_of(1, queries)
    if perhaps(0.6):
        axes = [one_of("B", 1), one_of(H, 1), one_of("mL", L), "T"]
        said["mask"] = (one_of("bool", dtype), axes[rng.integers(4) :])
    return {**said, "attributes": attributes, "outputs": outputs}, sizes


def run(said: dict[str, Any], sizes: Sizes, seed: int) -> CaseResult:
    """One node against the oracle. Raises whatever compiling or calling it does."""
    source = model(**said)
    attention = mhsa.load(mhsa.compile(source))
    names = {dim for info in attention.inputs for dim in info.dims if isinstance(dim, str)}

    def call(inputs: Any) -> list[np.ndarray]:
        results = attention(**inputs)
        return list(results) if isinstance(results, tuple) else [results]

    with np.errstate(all="ignore"):  # of the evaluations: an infinite score less an infinite one
        return check(source, call, {name: size for name, size in sizes.items() if name in names}, seed)


def main(count: int = 200, first: int = 0) -> int:
    wrong, worst = 0, 0.0
    for seed in range(first, first + count):
        said, sizes = drawn(seed)
        try:
            result = run(said, sizes, seed)
            worst, failed = max(worst, result.ratio), "" if result.ok else f"{result.error} > {result.budget}"
        except (MhsaError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            failed = f"{type(error).__name__}: {error}"
        if failed:
            wrong += 1
            print(f"seed {seed}: {failed}\n    model(**{said}), sizes {sizes}", flush=True)
    print(f"{count - wrong} of {count} nodes within the error budget; the worst of these at {worst:.0%} of it")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
