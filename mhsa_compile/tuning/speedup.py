"""What tuning gained for a whole artifact: the one with default configs and the tuned one, in turns in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from mhsa_compile.bench.timing import INPUT_SETS, interleave, workers_apart
from mhsa_compile.runtime.array_memory import to_list
from mhsa_compile.verification.random_inputs import random_inputs
from mhsa_compile.verification.verify import verify

if TYPE_CHECKING:
    import numpy as np

    from mhsa_compile.runtime.artifact.artifact import Artifact


@dataclass(frozen=True)
class Gain:
    """What tuning gained. `speedup` is the median over the rounds of the default's time by the tuned one's;
    `error_share` that of the tuned one, by its budget: above 1 is wrong."""

    default_us: float
    best_us: float
    speedup: float
    error_share: float
    rounds: int


def gain(default: Artifact, tuned: Artifact, *, dims: Mapping[str, int], threads: int, seconds: float) -> Gain:
    """Times both artifacts on the same random inputs, for `seconds` each."""
    from mhsa_compile.runtime.compiled_attention import load

    inputs = [random_inputs(tuned.manifest, dims, seed) for seed in range(INPUT_SETS)]
    loaded = [load(artifact, threads=threads) for artifact in (default, tuned)]
    outputs = [to_list(attention(*inputs[0].values())) for attention in loaded]
    turns = [[partial(attention, *arrays.values()) for arrays in inputs] for attention in loaded]
    with workers_apart():
        default_times, tuned_times = interleave(turns, seconds)
    return Gain(
        default_us=1e6 * median(default_times),
        best_us=1e6 * median(tuned_times),
        speedup=median(a / b for a, b in zip(default_times, tuned_times, strict=True)),
        error_share=_error_share(tuned, inputs[0], outputs[1]),
        rounds=len(tuned_times),
    )


def _error_share(artifact: Artifact, inputs: Mapping[str, np.ndarray], outputs: list[np.ndarray]) -> float:
    """The error of sampled rows, as a share of its budget, at the sizes that were timed; where more than y is returned,
    by `verify` at its own."""
    from mhsa_compile.bench import accuracy  # PyTorch

    if accuracy.returns_y_alone(artifact):
        weights = artifact.weights() if artifact.manifest.weights else {}
        return accuracy.truth(artifact, inputs, weights).share(outputs)
    return verify(artifact).worst.ratio
