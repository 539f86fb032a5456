"""The page about heads: it needs nothing else, no text breaks out of it, and it holds what was measured."""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import torch

import mhsa_compile as mhsa
from mhsa_analysis.heads_page import LONGEST_MAP, MEASURES, ShownLayer, heads_page
from mhsa_compile import analysis

HOSTILE = "</script><script>alert(1)</script>"


def shown(L: int = 20) -> ShownLayer:
    torch.manual_seed(0)
    layer = mhsa.MultiHeadAttention(
        mhsa.AttentionSpec(embed_dim=24, num_heads=6, num_kv_heads=3, outputs=("y", "heads", "weights"))
    )
    x = torch.randn(2, L, 24)
    with torch.no_grad():
        outputs = layer(x)
    return ShownLayer(HOSTILE, analysis.HeadStatistics(layer).add(x, outputs).report(), outputs[2][:1].numpy())


def data_of(page: str) -> dict:
    found = re.search(r"^const data = (.*);$", page, re.MULTILINE)
    assert found
    return json.loads(found[1])


def test_it_is_one_file_from_which_no_text_breaks_out() -> None:
    page = heads_page(HOSTILE, [shown()], [[HOSTILE] * 20])
    assert page.count("<script") == page.count("</script>") == 1
    addresses = set(re.findall(r"(?:https?:)?//[\w.]+", page)) - {"http://www.w3.org"}
    assert not {address for address in addresses if not address.startswith("//DATA")}
    assert not re.search(r"\bsrc=|@import|url\(|<link", page)
    data = data_of(page)
    assert data["title"] == data["layers"][0]["name"] == data["texts"][0][0] == HOSTILE


def test_it_holds_what_was_measured() -> None:
    layer = shown(L=LONGEST_MAP + 3)
    data = data_of(heads_page("Heads", [layer], [[str(i) for i in range(LONGEST_MAP + 3)]]))
    assert len(data["texts"][0]) == LONGEST_MAP and data["cut"] == [True]
    (found,), report = data["layers"], layer.report
    assert tuple(found["roles"]) == report.roles and tuple(found["order"]) == report.order
    np.testing.assert_allclose(found["share"], report.entropy_share, atol=5e-4)
    for name in MEASURES:
        values = [[np.inf if value is None else value for value in row] for row in found["measures"][name]]
        np.testing.assert_allclose(values, getattr(report, name), atol=5e-4)
    assert [tuple(step["heads"]) for step in found["curve"]] == [report.prune(k).heads for k in (2, 4)]
    drawn = np.frombuffer(base64.b64decode(found["maps"][0]), np.uint8).reshape(6, LONGEST_MAP, LONGEST_MAP) / 255
    np.testing.assert_allclose(drawn, layer.maps[0][:, :LONGEST_MAP, :LONGEST_MAP], atol=0.5 / 255 + 1e-6)


def test_a_notebook_shows_a_report_in_a_frame() -> None:
    frame = shown().report._repr_html_()
    assert frame.startswith("<iframe srcdoc=") and frame.count("<") == 2  # the page in it is escaped
