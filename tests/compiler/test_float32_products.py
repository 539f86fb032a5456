"""Which products of float32 operations get: what was asked for, where a kernel makes it, and why where it does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from support.attention_ops import attention_of
from support.onnx_models import model_of
from support.term_products import WORDS, OfferingAttention, TermLinear

import mhsa_compile as mhsa
from mhsa_compile.compiler import pipeline
from mhsa_compile.compiler.selection.float32_products import offers_products, resolutions, resolve
from mhsa_compile.compiler.selection.op_key import key_of
from mhsa_compile.compiler.selection.select_kernel import kernels_for
from mhsa_compile.errors import InputError
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.kernels.interface.ops import HeadLayout, KvConcatOp, LinearOp, RotaryOp
from mhsa_compile.kernels.registry import KERNELS

AVX512, AVX2 = load_profile("x86-64-v4"), load_profile("x86-64-v3")


def linear(**fields) -> LinearOp:
    return LinearOp((2, "L"), 48, (72,), (True,), (False,), **fields)


def attention(L=64, **fields):
    places = [HeadLayout(i, "heads", 64) for i in range(4)]
    return attention_of(1, L, 64, 4, 2, 64, 64, 0.125, *places, **fields)


@pytest.fixture
def unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels by terms, on targets with vectors of 512 bits, before those that there are."""
    monkeypatch.setitem(KERNELS, "cpu", (TermLinear(), *KERNELS["cpu"]))


@pytest.mark.parametrize("asked", ["auto", "ieee", *WORDS])
def test_without_such_kernels_all_is_ieee_and_the_wish_is_answered(asked):
    elsewhere = (
        f"no matrix unit on target x86-64-v4 makes {asked} products; compile for graniterapids or sapphirerapids"
    )
    nowhere = f"no kernel makes {asked} products of such an operation on any target"
    for op, reason in ((linear(), elsewhere), (attention(), elsewhere), (attention(1), nowhere)):
        resolution = resolve(op, asked, AVX512)
        assert resolution.op == op and offers_products(op, AVX512) == ()
        assert resolution.reason == ("" if asked in ("auto", "ieee") else reason)


def test_operations_get_what_their_kernel_makes(unit):
    assert offers_products(linear(), AVX512) == WORDS and offers_products(linear(), AVX2) == ()
    for word in WORDS:
        assert resolve(linear(), word, AVX512).op.float32_products == word
    assert resolve(linear(), "auto", AVX512).op.float32_products == "bf16x6"
    assert resolve(linear(), "auto", AVX2) == resolve(linear(), "ieee", AVX512)
    assert resolve(linear(), "ieee", AVX512).op.float32_products == "ieee"


def test_auto_takes_what_is_known_to_be_exact(unit, monkeypatch):
    monkeypatch.setattr(TermLinear, "exact", ())
    resolution = resolve(linear(), "auto", AVX512)
    assert resolution.op == linear() and "not known to stay inside" in resolution.reason
    assert resolve(linear(), "bf16x6", AVX512).op.float32_products == "bf16x6"


def test_a_target_without_the_unit_is_named_with_a_way_out(unit):
    resolution = resolve(linear(), "bf16", AVX2)
    assert resolution.op == linear()
    assert resolution.reason.startswith("no matrix unit on target x86-64-v3 makes bf16 products; compile for ")
    assert "x86-64-v4" in resolution.reason and "neoverse" not in resolution.reason


def test_operations_without_products_of_float32_are_left_alone(unit):
    place = HeadLayout(0, "heads", 64)
    rotary = RotaryOp(1, 7, 2, 64, 64, False, 32, place, place)
    for op in (linear(dtype="bfloat16"), linear(int8_weights=True), attention(dtype="float16"), rotary):
        assert resolve(op, "bf16", AVX512) == resolve(op, "bf16", AVX2) == resolve(op, "ieee", AVX2)


def test_the_kernel_that_comes_first_decides(monkeypatch):
    """Few queries are another kernel's, which is not passed over for a word."""
    cpu = [OfferingAttention() if kernel.name == "cpu.attention" else kernel for kernel in KERNELS["cpu"]]
    monkeypatch.setitem(KERNELS, "cpu", tuple(cpu))
    assert resolve(attention(64), "bf16", AVX512).op.float32_products == "bf16"
    few = resolve(attention(1), "bf16", AVX512)
    assert few.op.float32_products == "ieee" and few.reason
    assert kernels_for(few.op, AVX512)[0][0].name == "cpu.decode"


def test_no_other_kernel_takes_an_operation_with_a_word(unit):
    willing, reasons = kernels_for(linear(float32_products="bf16"), AVX512)
    assert [kernel.name for kernel in willing] == ["test.term_linear"]
    others = [kernel.name for kernel in KERNELS["cpu"] if kernel.op_type is LinearOp][1:]
    assert reasons == [f"{name}: it makes no products of float32 by bf16" for name in others] and others
    assert [kernel.name for kernel in kernels_for(linear(), AVX512)[0]] == ["cpu.linear"]


def test_keys_and_summaries_say_it_where_it_is_not_ieee():
    for op in (linear(), attention()):
        other = replace(op, float32_products="bf16x3")
        assert "float32_products" not in key_of(op) and key_of(other) == key_of(op) | {"float32_products": "bf16x3"}
        assert "products" not in op.summary() and other.summary() == f"{op.summary()}, products bf16x3"


@pytest.mark.parametrize("word", ["bf16x2", "BF16", None, 3, ["bf16"]])
def test_a_wrong_word_is_refused(word):
    with pytest.raises(InputError, match=r'^float32_products: expected "auto", .* or "bf16", got'):
        mhsa.compile(mhsa.AttentionSpec(embed_dim=32, num_heads=4), float32_products=word)


def test_the_manifest_says_what_was_asked_and_got(unit, monkeypatch):
    """What is scheduled decides: none of the code is built, which takes seconds for each attention."""
    monkeypatch.setattr(pipeline._Code, "build", lambda code, scheduled, path: path.write_bytes(b""))
    spec = mhsa.AttentionSpec(embed_dim=32, num_heads=4)
    manifests = {word: mhsa.compile(spec, AVX512, float32_products=word).manifest for word in ("auto", "bf16x3")}
    for asked, manifest in manifests.items():
        assert manifest.float32_products == asked
        assert {op.op: op.float32_products for op in manifest.ops} == {
            "linear": "bf16x6" if asked == "auto" else asked, "attention": "ieee",
        }  # fmt: skip
        assert manifest.coarsest_products == ("bf16x6" if asked == "auto" else asked)
    assert manifests["auto"].float32_outcome() == "asked auto, got bf16x6 in 2 operations"
    assert manifests["bf16x3"].float32_outcome() == (
        "asked bf16x3, got bf16x3 in 2 operations; "
        "ieee in 1 operation: no kernel makes bf16x3 products of such an operation on any target"
    )
    plain = mhsa.compile(spec, AVX2).manifest
    assert plain.float32_outcome() == "" and plain.coarsest_products == "ieee"


def test_a_manifest_without_a_choice_has_the_bytes_of_before():
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    model = model_of([node], {"x": ["R", 32]}, {"y": ["R", 40]}, {"w": np.ones((32, 40), np.float32)})
    artifact = mhsa.compile(model, AVX2, without_attention="accept")
    assert [op.kernel for op in artifact.manifest.ops] == ["cpu.linear"]
    assert b"float32_products" not in (artifact.path / "manifest.json").read_bytes()
    ieee = mhsa.compile(model, AVX2, float32_products="ieee", without_attention="accept")
    assert ieee.manifest.ops == artifact.manifest.ops and ieee.manifest.float32_products == "ieee"
    assert np.array_equal(*((one.path / "module.so").read_bytes() for one in (artifact, ieee)))


def test_a_model_with_a_cache_gets_it_too(unit):
    """A call with single tokens multiplies in float32, in the same function."""
    cache = KvConcatOp("B", "P", "L", 2, 64, HeadLayout(0, "heads", 0))
    answers = resolutions({"a": linear(), "cache": cache}, "auto", AVX512)
    assert answers["a"].op.float32_products == "bf16x6" and answers["cache"].op == cache
