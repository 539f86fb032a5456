"""The picture of a layer in a notebook: well-formed, in one piece, without colours of its own for text."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import mhsa_compile as mhsa
from mhsa_compile.nn.modules import MultiHeadAttention, ScaledDotProductAttention
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.picture import card, parameters_of, picture_of, shortened

SPECS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ("4 of 6 dims", "all keys", "float32")),
    ({"num_kv_heads": 2, "bias": False}, ("2 of keys and values: 2 heads share each", "without biases")),
    ({"num_kv_heads": 1, "v_head_dim": 10}, ("4 heads share each", "values have 10 dims")),
    ({"causal": True, "window": (5, 0)}, ("causal, top_left", "a window of 5 keys to the left, 0 to the right")),
    ({"window": (-1, 2)}, ("all keys to the left, 2 to the right",)),
    ({"rope": {"scaling": "linear", "factor": 2.0, "interleaved": True}}, ("6 dims in neighbours", "factor 2")),
    ({"alibi": True, "causal": True, "kv_cache": True}, ("ALiBi", "calls write into one")),
    ({"scale": 0.5, "softcap": 30.0, "sinks": True}, ("times 0.5; capped at 30; a sink for each head",)),
    ({"softclamp": 7.5}, ("softly clamped at 7.5",)),
    ({"kv_embed_dim": 10, "mask": "key_padding"}, ("context", "which keys are no padding")),
    ({"mask": "bool", "outputs": ("y", "weights:heads=0")}, ("True takes part", "y, weights:heads=0")),
    ({"static_mask": {"kind": "longformer", "window": 4}}, ("a constant mask, Longformer",)),
    ({"dtype": "bfloat16"}, ("4.8 kB of bfloat16",)),
]


def parsed(html: str) -> ElementTree.Element:
    assert not re.search(r"<script|https?://|url\(|prefers-color-scheme|color:(?!inherit)", html)
    return ElementTree.fromstring(html)


@pytest.mark.parametrize(("fields", "said"), SPECS, ids=str)
def test_what_a_picture_says(fields: dict[str, Any], said: tuple[str, ...]) -> None:
    spec = AttentionSpec(embed_dim=24, num_heads=4, **fields)
    layer = MultiHeadAttention(spec)
    html = layer._repr_html_()
    root = parsed(html)
    text = " ".join(root.itertext())
    assert all(words in text for words in said), text
    stripes = [len(group.findall("rect")) for group in root.iter("g") if "head" in (group.findtext("title") or "")]
    assert stripes == [4, spec.num_kv_heads, spec.num_kv_heads, 4]
    assert parameters_of(spec) == sum(parameter.numel() for parameter in layer.parameters())


def cells(**fields: Any) -> int:
    root = parsed(picture_of("", AttentionSpec(embed_dim=8, num_heads=2, **fields)))
    (mask,) = (group for group in root.iter("g") if group.findtext("title") == "who sees whom")
    return len(mask.findall("rect"))


def test_who_sees_whom_is_drawn() -> None:
    assert cells() == 144
    assert cells(causal=True) == 78
    assert cells(causal=True, window=(1, 0)) == 23
    assert cells(window=(2, 1)) == 12 + 11 + 11 + 10
    assert cells(causal=True, window=(500, 0)) == cells(causal=True, window=(3, 0)) == 42
    assert cells(static_mask=mhsa.masks.BlockDiagonal(block=3)) == 4 * 9
    assert cells(static_mask=torch.ones(5, 7, dtype=torch.bool).numpy()) == 144  # for other lengths than are drawn


def test_numbers_and_names_of_others() -> None:
    assert [shortened(n) for n in (7, 999, 1000, 16_640, 3.3e12)] == ["7", "999", "1 k", "16.6 k", "3.3 T"]
    assert "<b>" not in card("<b>", [("<i>", "<u>")])
    many = ScaledDotProductAttention(AttentionSpec(embed_dim=400, num_heads=100), dropout=0.25)._repr_html_()
    assert "0.25, in training" in many and "parameters" not in many
    parsed(many)


@pytest.mark.thorough
def test_compiled_attention_has_one_too() -> None:
    attention = mhsa.load(mhsa.compile(AttentionSpec(embed_dim=8, num_heads=2, causal=True)))
    text = " ".join(parsed(attention._repr_html_()).itertext())
    assert "causal" in text and "cpu.attention" in text and "(B, L, 8) float32" in text

    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x) * 2

    other = mhsa.load(mhsa.compile(Doubled(), example_inputs={"x": torch.zeros(1, 2, 5, 4)}))
    assert "svg" not in other._repr_html_() and "kernels" in other._repr_html_()
    parsed(other._repr_html_())


def test_it_loads_no_pytorch() -> None:
    code = "import sys, mhsa_compile.spec.picture; assert not {'torch', 'numpy', 'tvm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
