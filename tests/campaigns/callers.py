"""Large artifacts, called by several threads of Python at once, the same one and different ones: equal bits.

    python -m campaigns.callers [--seconds 600] [--only bfloat16]

Layers of BERT's size, linears of bfloat16 whose rows begin within cache lines and are copied, whole layers, decoders
with caches: each with 1, 2, 3 and 8 threads, by 1, 2, 3 and 8 callers. What a first call with one thread gives is
expected of all. Exit code 1 if any call differed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from torch import nn

import mhsa_compile as mhsa
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.verification.self_check_inputs import SelfCheckInputs

THREADS = CALLERS = (1, 2, 3, 8)
CALLS = 12
"""Of each caller in a round."""
D, H, F, LINE = 768, 12, 3072, 64
Arrays = dict[str, np.ndarray]
Loaded = Callable[..., Any]


class Case(NamedTuple):
    """An artifact, and inputs of it by name. `shift`: the bytes from a cache line on at which each input begins."""

    artifact: Artifact
    inputs: Arrays
    shift: int = 0

    def call(self, loaded: Loaded) -> list[bytes]:
        """The bits of all outputs, of inputs that are this call's own, since it may write into a cache."""
        results = loaded(**{name: placed(array, self.shift) for name, array in self.inputs.items()})
        return [one.tobytes() for one in (results if isinstance(results, tuple) else (results,))]


def placed(array: np.ndarray, shift: int) -> np.ndarray:
    """A copy that begins `shift` bytes behind a cache line."""
    memory = np.empty(array.nbytes + 2 * LINE, np.uint8)
    first = -memory.ctypes.data % LINE + shift
    copy = memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def artifacts() -> Iterator[tuple[str, Artifact, tuple[tuple[int, int, int], ...]]]:
    """(name, artifact, the (B, L, shift) that it is called at)."""
    spec = mhsa.AttentionSpec(embed_dim=D, num_heads=H)
    yield "float32", mhsa.compile(spec), ((1, 512, 0), (1, 1024, 4), (3, 131, 0))
    narrow = mhsa.AttentionSpec(embed_dim=D, num_heads=H, dtype="bfloat16")
    yield "bfloat16", mhsa.compile(narrow), ((1, 512, 0), (1, 1024, 2), (3, 131, 6))
    linear = nn.Sequential(nn.Linear(D, F)).eval().bfloat16()
    example = (torch.randn(2, 7, D).bfloat16(),)
    compiled = mhsa.compile(linear, example_inputs=example, without_attention="accept")
    yield "a linear of bfloat16", compiled, ((1, 512, 2), (1, 1024, 34), (3, 131, 6), (1, 512, 0))
    layer = nn.TransformerEncoderLayer(D, H, F, batch_first=True, activation="gelu").eval()
    yield "a whole layer", mhsa.compile(layer, example_inputs=(torch.randn(2, 7, D),)), ((1, 512, 0), (2, 331, 4))
    decoder = mhsa.AttentionSpec(embed_dim=D, num_heads=H, num_kv_heads=4, causal="bottom_right", kv_cache=True)
    yield "a decoder's prompt", mhsa.compile(decoder), ((2, 1024, 0),)
    yield "a decoder's token", mhsa.compile(decoder, dims={"L": 1}), ((2, 4099, 0),)


def cases(only: str = "") -> dict[str, Case]:
    chosen: dict[str, Case] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of linears without attention
        for name, artifact, places in artifacts():
            if only in name:
                chosen |= {f"{name}, {at}": Case(artifact, drawn(artifact, *at[:2]), at[2]) for at in places}
    return chosen


def drawn(artifact: Artifact, B: int, L: int) -> Arrays:
    """Random inputs; every free length is L, but queries of a cache, which are fewer than its room."""
    subject = SelfCheckInputs(artifact.manifest, 0)
    sizes = subject.sizes | dict.fromkeys(subject.lengths, L) | ({subject.batch: B} if subject.batch else {})
    arrays: Arrays = subject.draw_at(sizes)
    narrow = {info.name for info in artifact.manifest.inputs if info.dtype == "bfloat16"}
    return {name: x.astype(ml_dtypes.bfloat16) if name in narrow else x for name, x in arrays.items()}


def loaded_for(cases: Mapping[str, Case], threads: int) -> dict[str, Loaded]:
    """One function for all callers, and for all cases of an artifact."""
    by_artifact = {id(case.artifact): mhsa.load(case.artifact, threads=threads) for case in cases.values()}
    return {name: by_artifact[id(case.artifact)] for name, case in cases.items()}


def differing(
    cases: Mapping[str, Case],
    loaded: Mapping[str, Loaded],
    expected: Mapping[str, list[bytes]],
    plan: list[str],
    calls: int = CALLS,
) -> Counter[str]:
    """By case, how many calls differ of those that callers make at once: each of `plan`, `calls` times."""

    def call(name: str) -> Counter[str]:
        return Counter({name: sum(cases[name].call(loaded[name]) != expected[name] for _ in range(calls))})

    with ThreadPoolExecutor(len(plan)) as pool:
        return sum(pool.map(call, plan), Counter[str]())


def campaign(seconds: float, only: str = "") -> int:
    """How many calls differed."""
    chosen, begin = cases(only), time.monotonic()
    one = loaded_for(chosen, 1)
    expected = {name: case.call(one[name]) for name, case in chosen.items()}
    loaded = {threads: loaded_for(chosen, threads) for threads in THREADS}
    wrong, calls, names = Counter[str](), 0, list(chosen)
    rounds = itertools.cycle(itertools.product(range(len(names)), CALLERS, THREADS, ("same", "different")))
    for first, callers, threads, kind in rounds:
        if time.monotonic() - begin > seconds:
            break
        plan = [names[(first + (number if kind == "different" else 0)) % len(names)] for number in range(callers)]
        off = differing(chosen, loaded[threads], expected, plan)
        calls += CALLS * callers
        if off.total():
            print(f"{callers} callers of {kind} artifacts, {threads} threads: {dict(off)}", flush=True)
        wrong += off
    print(f"{calls:,} calls of {len(names)} cases at once: {wrong.total()} differ, {time.monotonic() - begin:.0f} s")
    return wrong.total()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--only", default="", help="artifacts whose name holds this")
    options = parser.parse_args()
    return 1 if campaign(options.seconds, options.only) else 0


if __name__ == "__main__":
    sys.exit(main())
