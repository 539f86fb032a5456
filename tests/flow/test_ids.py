"""Ids beyond the table that they pick from are refused by each way of calling; those within are what ONNX says."""

from __future__ import annotations

import numpy as np
import onnx.numpy_helper
import onnx.parser
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError

ROWS = 50
TEXT = """
    <ir_version: 9, opset_import: ["" : 18]>
    embedded (int32[B, L] ids, int64[B, L] kinds) => (float[B, L, 4] y)
    <int64[1] first = {0}>
    {
        wide = Cast <to = 7> (ids)
        column = Unsqueeze (wide, first)
        rows = Squeeze (column, first)
        word = Gather (table, rows)
        kind = Gather (types, kinds)
        y = Add (word, kind)
    }
"""


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    model = onnx.parser.parse_model(TEXT)
    for name, rows in (("table", ROWS), ("types", 2)):
        array = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def test_ids_beyond_the_table(model: onnx.ModelProto) -> None:
    artifact = mhsa.compile(model, without_attention="accept")
    assert [info.rows for info in artifact.manifest.inputs] == [ROWS, 2]
    embedded = mhsa.load(artifact)
    ids, kinds = np.array([[0, -ROWS, ROWS - 1]], np.int32), np.array([[0, 1, -2]], np.int64)
    (expected,) = ReferenceEvaluator(model).run(None, {"ids": ids, "kinds": kinds})
    assert np.array_equal(embedded(ids, kinds), expected)
    for beyond in (ROWS, -ROWS - 1, 10**9):
        wrong = ids.copy()
        wrong[0, 1] = beyond
        with pytest.raises(InputError, match=f"input 'ids': .*from -50 to 49.*got {beyond}"):
            embedded(wrong, kinds)
        with pytest.raises(InputError, match="input 'ids'"):
            embedded(torch.from_numpy(wrong), torch.from_numpy(kinds))
    with pytest.raises(InputError, match="input 'kinds'"):
        embedded(ids, kinds + 2)
    assert embedded(ids[:, :0], kinds[:, :0]).shape == (1, 0, 4)
