"""attention.profile: each operation once, what it has to do, and a trace that others read. No test looks at a time."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError, OutputError
from mhsa_compile.runtime.artifact.manifest import Manifest, OpReport
from mhsa_compile.runtime.compiled_attention import CompiledAttention
from mhsa_compile.runtime.profile import op_work
from mhsa_compile.runtime.profile.call_profile import CallProfile, OpProfile
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.semantics import Semantics
from mhsa_compile.spec.window import WindowSpec

SPEC = AttentionSpec(embed_dim=24, num_heads=2, causal=True, window=(5, 0), kv_cache=True)
CROSS = AttentionSpec(embed_dim=24, num_heads=4, num_kv_heads=2, kv_embed_dim=10, causal="bottom_right", bias=False)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


@pytest.fixture(scope="module")
def cross() -> CompiledAttention:
    return mhsa.load(mhsa.compile(CROSS))


@pytest.fixture(scope="module")
def cached() -> CompiledAttention:
    return mhsa.load(mhsa.compile(SPEC))


@pytest.fixture(scope="module")
def foreign() -> CompiledAttention:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(24, 24), nn.LayerNorm(24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                q = self.linear(self.norm(x)).view(x.shape[0], x.shape[1], 2, 12).transpose(1, 2)
                x = x + nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
            return x

    return mhsa.load(mhsa.compile(Twice().eval(), example_inputs=[torch.zeros(2, 5, 24)]))


@pytest.mark.thorough
def test_every_operation_has_its_row_and_its_work(cross: CompiledAttention) -> None:
    B, L, S = 2, 7, 11
    found = cross.profile(random(B, L, 24), random(B, S, 10), seconds=0.01)
    assert [(op.name, op.kind, op.kernel, op.config) for op in found.ops] == [
        (op.name, op.op, op.kernel, op.config) for op in cross.manifest.ops
    ]
    linears = sum(op.flops or 0 for op in found.ops if op.kind == "linear")
    (attention,) = (op for op in found.ops if op.kind == "attention")
    assert linears == CROSS.projection_flops(B, L, S)
    assert attention.flops == CROSS.attention_flops(B, L, S)
    assert attention.bytes is not None
    assert attention.bytes >= 4 * B * (2 * L * 24 + S * 24)  # q and y, k and v; rows may be padded
    assert found.rounds >= 5
    assert found.threads == cross.threads
    assert [op.us for op in found.by_time()] == sorted((op.us for op in found.ops), reverse=True)
    assert found.call_us == pytest.approx(found.ops_us + found.between_us + found.around_us)


def test_calls_are_what_they_were(cross: CompiledAttention) -> None:
    """Calls in other threads are that, too, while one profiles."""
    x, context = random(2, 7, 24), random(2, 11, 10)
    before = cross(x, context)
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(lambda: [cross(x, context) for _ in range(50)]) for _ in range(2)]
        for _ in range(3):
            cross.profile(x, context, seconds=0.01)
    assert all(np.array_equal(y, before) for result in results for y in result.result())
    assert np.array_equal(cross(x, context), before)


@pytest.mark.thorough
def test_a_cache_stays_as_long_as_it_is(cached: CompiledAttention) -> None:
    cache = cached.new_cache(1, 32)
    cached(random(1, 9, 24), cache=cache)
    twin = cached.new_cache(1, 32)
    cached(random(1, 9, 24), cache=twin)
    found = cached.profile(x=random(1, 1, 24), cache=cache, seconds=0.01)
    assert cache.length == twin.length == [9]
    (attention,) = (op for op in found.ops if op.kind == "attention")
    assert attention.flops == 2 * 2 * 6 * (12 + 12)  # the query at 9 sees the keys 4 to 9
    assert [op.flops for op in found.ops if op.kind == "scatter"] == [None, None]
    for _ in range(3):
        x = random(1, 1, 24)
        assert np.array_equal(cached(x, cache=cache), cached(x, cache=twin))


@pytest.mark.thorough
def test_code_of_tvms_own_is_one_row_a_function(foreign: CompiledAttention) -> None:
    found = foreign.profile(random(2, 5, 24), seconds=0.01)
    assert len({op.name for op in found.ops}) == len(found.ops)
    fallbacks = [op for op in found.ops if op.kind == "fallback"]
    assert fallbacks
    assert all((op.kernel, op.flops) == ("tvm", None) and op.bytes for op in fallbacks)
    assert max(op.runs for op in fallbacks) > 1  # both layers run one function
    named = {op.name for op in found.ops} - {op.name for op in fallbacks}
    assert len(named) == 4  # and both layers share their kernels' code
    assert named == {op.name for op in foreign.manifest.ops if op.source != "fallback"}
    assert sum(op.runs for op in found.ops) == len(found.events)
    together = found.alike_together()
    ours = {op.name: (op.runs, op.flops) for op in together.ops if op.kind != "fallback"}
    assert ours == {"op_0 ... op_2": (2, 2 * 2 * 10 * 24 * 24), "op_1 ... op_3": (2, 2 * 2 * 2 * 2 * 25 * 24)}
    assert together.ops_us == pytest.approx(found.ops_us)


def test_the_trace_is_what_chrome_reads(cross: CompiledAttention, tmp_path: Path) -> None:
    found = cross.profile(random(2, 7, 24), random(2, 11, 10), seconds=0.01)
    found.save_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in events] == [op.name for op in cross.manifest.ops]
    end = 0.0
    for event in events:
        assert {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"} == event.keys()
        assert event["ts"] == pytest.approx(end)
        end = event["ts"] + event["dur"]
    assert "float32 (2, 7, 24)" in events[0]["args"]["arrays"] + events[1]["args"]["arrays"]
    with pytest.raises(OutputError):
        found.save_trace(tmp_path / "missing" / "trace.json")


@pytest.mark.thorough
def test_what_cannot_be_profiled_is_refused(cross: CompiledAttention) -> None:
    with pytest.raises(InputError, match="sizes of at least 1"):
        cross.profile(random(2, 0, 24), random(2, 11, 10))
    with pytest.raises(InputError, match="x"):
        cross.profile(random(2, 7, 23), random(2, 11, 10))


def meaning(**changes: Any) -> Semantics:
    said: dict[str, Any] = {
        "op": "a", "operator": "", "num_heads": 3, "num_kv_heads": 3, "head_dim": 5, "v_head_dim": 7, "scale": 1.0,
        "dtype": "float32", "causal": None, "band": None, "static_mask": None, "softcap": None, "lengths": None,
        "sinks": False, "alibi": False, "mask": None, "bool_mask": "", "fully_masked_row": "", "softmax": "float32",
    }  # fmt: skip
    return Semantics(**said | changes)


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("left", "right"), [(None, 0), (2, 0), (2, 3), (0, None), (None, None)])
@pytest.mark.parametrize(("L", "S"), [(1, 1), (4, 9), (9, 4), (7, 7)])
def test_pairs_are_counted_as_a_query_sees_them(left: int, right: int, alignment: Any, L: int, S: int) -> None:
    seen = 0
    for i in range(L):
        place = i + (S - L if alignment == "bottom_right" else 0)
        seen += sum((left is None or j >= place - left) and (right is None or j <= place + right) for j in range(S))
    banded = meaning(band=WindowSpec(left, right, alignment))
    manifest = Manifest(mhsa_version="", inputs=(), outputs=(), weights=(), semantics=(), spec=None,
                        target=None, versions={}, ops=(), files={})  # type: ignore[arg-type]  # fmt: skip
    assert op_work.attention_flops(manifest, banded, L, S, [S]) == 2 * 3 * seen * 12
    assert op_work.attention_flops(manifest, meaning(static_mask="bool"), L, S, [S]) is None


def test_a_linear_without_words_has_no_flops() -> None:
    known = OpReport("op", "linear", "cpu.linear", {}, "default", "512 -> 512 + 64, more words")
    assert op_work.linear_flops(known, 10) == 2 * 10 * 512 * 576
    assert op_work.linear_flops(OpReport("op", "linear", "cpu.linear", {}, "default", ""), 10) is None


def test_a_product_is_counted_by_its_shapes() -> None:
    """B transposed, A in another order of axes, B shared by the batch, a vector; and one where K could be either."""
    assert op_work.product_flops([(3, 5, 64), (3, 7, 64), (3, 5, 7)]) == 2 * 3 * 5 * 7 * 64
    assert op_work.product_flops([(3, 5, 2, 64), (64, 7), (3, 2, 5, 7)]) == 2 * 3 * 2 * 5 * 7 * 64
    assert op_work.product_flops([(3, 7, 7), (3, 7, 7), (3, 7, 7)]) == 2 * 3 * 7 * 7 * 7
    assert op_work.product_flops([(1, 9), (9, 1), (1, 1)]) == 2 * 9
    assert op_work.product_flops([(2, 3, 4), (2, 3, 4), (2, 3, 3)]) == 2 * 2 * 3 * 3 * 4
    assert op_work.product_flops([(4, 4, 8), (4, 8, 4), (4, 4, 4)]) == 2 * 4 * 4 * 4 * 8


def test_shares_of_the_limit() -> None:
    def row(kind: str, flops: int | None, size: int | None) -> OpProfile:
        return OpProfile("op", kind, "k", {}, 1, 10.0, 1.0, flops, size)

    rows = (row("linear", 50_000, 10), row("linear", 50_000, 90_000), row("linear", None, 10), row("rope", 9, 10),
            row("fallback", None, 90_000))  # fmt: skip
    found = CallProfile(rows, 60.0, 55.0, 0.0, 1, 5, ()).against({"linear": 10.0}, 18.0, 1000)
    assert [op.share_of_limit for op in found.ops] == [0.5, 0.5, None, None, 0.5]
    slow = CallProfile(rows, 60.0, 55.0, 0.0, 1, 5, ()).against({"linear": 10.0}, 12.0, 1000)
    assert [op.share_of_limit for op in slow.ops] == [0.5, 0.75, None, None, 0.75]


def test_a_large_call_has_its_weights_from_memory_and_its_other_arrays_from_caches() -> None:
    def row(size: int, first: int | None) -> OpProfile:
        return OpProfile("op", "fallback", "k", {}, 1, 10.0, 1.0, None, size, first)

    rows = (row(1800, 900), row(1800, 1800), row(900, 0), row(900, None))
    large = CallProfile(rows, 60.0, 55.0, 0.0, 1, 5, ()).against({}, 0.36, 1000)
    assert [op.share_of_limit for op in large.ops] == [0.25, 0.5, 0.0, None]
    small = CallProfile(rows[:1], 60.0, 55.0, 0.0, 1, 5, ()).against({}, 0.36, 1000)
    assert [op.share_of_limit for op in small.ops] == [None]


class OfATable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.linear = nn.Embedding(5000, 24), nn.Linear(24, 24)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        q = self.linear(self.rows(ids)).view(ids.shape[0], ids.shape[1], 2, 12).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q)


@pytest.mark.thorough
def test_nobody_counts_the_rows_that_are_picked_from_a_table() -> None:
    attention = mhsa.load(mhsa.compile(OfATable().eval(), example_inputs=[torch.zeros(2, 5, dtype=torch.int64)]))
    found = attention.profile(np.ones((2, 5), np.int64), seconds=0.01)
    picks = [op for op in found.ops if "take" in op.name]
    assert len(picks) == 1
    assert (picks[0].bytes, picks[0].first_bytes, picks[0].gbs) == (None, None, None)
    linear = next(op for op in found.ops if op.kind == "linear")
    assert linear.bytes is not None and linear.first_bytes is not None
    assert linear.first_bytes == linear.bytes - 2 * 5 * 24 * 4  # all but x, which the table's rows were written to


MASKED = {
    "additive": AttentionSpec(embed_dim=24, num_heads=2, mask="additive"),
    "cross, additive": AttentionSpec(embed_dim=24, num_heads=2, kv_embed_dim=10, mask="additive"),
    "bool, sinks, slopes": AttentionSpec(embed_dim=24, num_heads=2, mask="bool", sinks=True, alibi=True),
    "core, additive": AttentionSpec(embed_dim=24, num_heads=4, num_kv_heads=2, v_head_dim=3, mask="additive"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", MASKED)
def test_lengths_are_those_of_queries_and_keys(name: str) -> None:
    spec, (B, L) = MASKED[name], (2, 7)
    S = 11 if spec.is_cross or name.startswith("core") else L
    mask = np.zeros((B, 1, L, S), bool if spec.mask == "bool" else np.float32)
    if name.startswith("core"):
        module: nn.Module = mhsa.ScaledDotProductAttention(spec)
        inputs = [random(B, 4, L, 6), random(B, 2, S, 6), random(B, 2, S, 3), mask]
    else:
        module = mhsa.MultiHeadAttention(spec)
        inputs = [random(B, L, 24), *([random(B, S, 10)] if spec.is_cross else []), mask]
    found = mhsa.load(mhsa.compile(module)).profile(*inputs, seconds=0.01)
    (attention,) = (op for op in found.ops if op.kind == "attention")
    assert attention.flops == spec.attention_flops(B, L, S)
