"""Which kernel and which config an operation gets: a record's where one fits, else the default, and why."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest
from support.attention_ops import attention_of

from mhsa_compile.compiler.selection.op_key import bucket, key_of, symbols
from mhsa_compile.compiler.selection.select_kernel import kernels_for, select_kernel
from mhsa_compile.hardware.profile import TargetProfile, load_profile
from mhsa_compile.kernels.interface.ops import AttentionOp, HeadLayout, LinearOp, ScoresOp
from mhsa_compile.records.device import Device
from mhsa_compile.records.record import Record, RecordSet, isa_of
from mhsa_compile.spec.window import WindowSpec

AVX512, AVX2, NEON = (load_profile(name) for name in ("x86-64-v4", "x86-64-v3", "neoverse-n1"))


def linear(rows=(1, 37), widths=(72, 24), **fields) -> LinearOp:
    count = len(widths)
    return LinearOp(rows, 48, widths, (True,) * count, (False,) * count, **fields)


def attention(L=5, S=37, dtype="float32", band=None, **fields) -> AttentionOp:
    places = [HeadLayout(i, "heads", 64) for i in range(4)]
    return attention_of(1, L, S, 4, 2, 64, 64, 0.125, *places, dtype=dtype, band=band, **fields)


def record(op, kernel: str, config: dict[str, int], profile: TargetProfile, **fields) -> Record:
    stated = {
        "op": op.kind, "key": key_of(op), "sizes": {"L": 37}, "kernel": kernel, "config": config, "median_us": 10.0,
        "spread": 0.01, "default_us": 12.0, "error_share": 0.3, "threads": 2, "isa": isa_of(profile),
        "device": Device(cpu="made up", cores=2, architecture="x86_64"), "versions": {}, "date": "2026-11-21",
    }  # fmt: skip
    return Record(**stated | fields)


def chosen(op, profile: TargetProfile, *records: Record):
    willing, _ = kernels_for(op, profile)
    return select_kernel(op, profile, willing, RecordSet(records, profile))


@pytest.mark.parametrize("target", ["x86-64-v4", "cuda-sm90a"])
def test_kernels_are_asked_about_operations_of_their_type_only(target: str):
    profile, double = load_profile(target), attention(softmax="float64")
    assert kernels_for(ScoresOp(attention(), 3), profile) == ([], [])
    willing, reasons = kernels_for(double, profile)
    assert not willing and reasons and all("attention" in said or "decode" in said for said in reasons)


def test_a_record_that_fits_is_used_and_said():
    op = linear()
    config = {"rows": 2, "columns": 1, "block": 8, "depth": 16, "group": 2}
    choice = chosen(op, AVX512, record(op, "cpu.linear", config, AVX512))
    assert choice.config == config and choice.record is not None
    assert "1.20 times as fast as the default (made up, 2 threads, 2026-11-21)" in choice.tuning


def test_the_record_may_name_another_kernel_than_the_first():
    op = attention(L=2)
    config = {"queries": 16, "key_tile": 4, "keys": 64}
    assert chosen(op, AVX512).kernel.name == "cpu.decode"
    assert chosen(op, AVX512, record(op, "cpu.attention", config, AVX512)).kernel.name == "cpu.attention"


@pytest.mark.parametrize(("made_for", "used_on"), [(AVX512, AVX2), (AVX2, AVX512), (NEON, AVX2), (AVX512, NEON)])
def test_a_record_of_another_isa_is_never_used(made_for: TargetProfile, used_on: TargetProfile):
    op = linear()
    default = chosen(op, made_for)
    choice = chosen(op, used_on, record(op, "cpu.linear", default.config, made_for))
    assert choice.record is None and choice.config == chosen(op, used_on).config
    assert "made for" in choice.tuning


def test_a_feature_that_the_target_lacks_keeps_a_record_out():
    op = linear()
    config = chosen(op, AVX512).config
    isa = isa_of(AVX512)
    made = record(op, "cpu.linear", config, AVX512)
    beyond = msgspec.structs.replace(made, isa=msgspec.structs.replace(isa, features=(*isa.features, "avx512_fp16")))
    choice = chosen(op, AVX512, beyond)
    assert choice.record is None and "avx512_fp16" in choice.tuning


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"rows": 8, "columns": 4, "block": 8, "depth": 16, "group": 2}, "registers"),
        ({"rows": 2, "columns": 1, "block": 8, "depth": 16}, "knobs"),
        ({"rows": 0, "columns": 1, "block": 8, "depth": 16, "group": 2}, "from 1 on"),
    ],
)
def test_a_config_that_is_none_of_the_kernels_is_a_reason(config, reason):
    op = linear()
    choice = chosen(op, AVX512, record(op, "cpu.linear", config, AVX512))
    assert choice.record is None and reason in choice.tuning


def test_the_most_alike_device_comes_first():
    op = linear()
    config = {"rows": 2, "columns": 1, "block": 8, "depth": 16, "group": 2}
    alike = Device(cpu="alike", cores=8, architecture="x86_64", l1d_kib=32, l2_kib=1024)
    other = record(op, "cpu.linear", config, AVX512, median_us=1.0)
    emulated = record(op, "cpu.linear", config, AVX512, device=Device(cpu="q", cores=8, architecture="", emulated=True))
    own = record(op, "cpu.linear", {**config, "rows": 4}, AVX512, device=alike, threads=8)
    assert chosen(op, AVX512, emulated, other, own).record == own
    assert chosen(op, AVX512, emulated, other).record == other


def test_where_the_default_was_the_fastest_it_is_this_targets_default():
    op = linear()
    config = {"rows": 2, "columns": 1, "block": 8, "depth": 16, "group": 2}
    choice = chosen(op, AVX512, record(op, "cpu.linear", config, AVX512, default_us=10.0))
    assert choice.config == chosen(op, AVX512).config != config
    assert choice.record is not None and "the default was the fastest there" in choice.tuning


def test_without_a_record_the_default_says_why():
    assert chosen(linear(), AVX512).tuning == "no record of this operation at these lengths"


def test_lengths_share_buckets_and_symbols_have_their_own():
    assert [bucket(n) for n in (1, 2, 3, 129, 197, 256, "L")] == [1, 2, 4, 256, 256, 256, "any"]
    assert key_of(linear((1, 197))) == key_of(linear((2, 100))) != key_of(linear(("B", 197)))
    assert symbols(linear(("B", 7))) == {"B"}
    assert key_of(linear(widths=(96,))) == key_of(linear())  # panels are of all outputs together
    assert key_of(attention()) != key_of(attention(band=WindowSpec(None, 0)))
    assert key_of(attention()) != key_of(attention(dtype="bfloat16"))


def test_every_default_is_fit_and_every_space_holds_something_fit():
    """Every target is tried: a tuner draws from the space, and is measured against the default."""
    ops = [linear(dtype=d) for d in ("float32", "bfloat16")]
    ops += [attention(L=L, dtype=d) for L, d in product((1, 300), ("float32", "bfloat16"))]
    for name, op in product(("x86-64-v3", "x86-64-v4", "sapphirerapids", "cortex-a53", "neoverse-v2"), ops):
        profile = load_profile(name)
        for kernel in kernels_for(op, profile)[0]:
            default, space = kernel.default_config(op, profile), kernel.search_space(op, profile)
            assert kernel.why_not_config(op, profile, default) is None
            assert default.keys() == space.keys()
            choices = (dict(zip(space, values, strict=True)) for values in product(*space.values()))
            assert any(kernel.why_not_config(op, profile, config) is None for config in choices)
