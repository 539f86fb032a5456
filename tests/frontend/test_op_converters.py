"""Operators that are converted here, because TVM's importer knows less or reads astray: against NumPy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import helper
from support.onnx_models import model_of
from torch import Tensor, nn
from torch.nn import functional
from tvm import relax

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError
from mhsa_compile.frontend.relax.op_converters import concat_of_dims_that_must_agree
from mhsa_compile.runtime.artifact.artifact import Artifact

INT64, INT32 = np.iinfo(np.int64), np.iinfo(np.int32)
SLICES = {
    "to the end": (([5], [INT64.max], [3], [1]), np.s_[..., 5:]),
    "to the end of 32 bits": (([5], [INT32.max], [-1], None), np.s_[..., 5:]),
    "from the end": (([-3], [INT64.max], [3], None), np.s_[..., -3:]),
    "but the last": (([0], [-1], [1], [1]), np.s_[:, :-1]),
    "backwards": (([-1], [INT64.min], [3], [-1]), np.s_[..., ::-1]),
    "steps": (([1], [INT64.max], [3], [3]), np.s_[..., 1::3]),
    "beyond": (([2], [99], [2], [1]), np.s_[:, :, 2:99]),
    "no axes": (([0, 1], [INT64.max, 2], None, None), np.s_[0:, 1:2]),
    "two axes": (([1, 4], [INT64.max, 6], [-1, 2], None), np.s_[:, :, 4:6, 1:]),
}

ROTARY = {"x": ("B", 3, 7, 10), "cos": ("B", 7, 5), "sin": ("B", 7, 5)}


def test_slices_and_expand() -> None:
    """A tensor is cut and expanded beside a rotary embedding, which is what there is to compile. Its batch is
    symbolic."""
    nodes = [helper.make_node("RotaryEmbedding", ["x", "cos", "sin"], ["y"])]
    constants = {"sizes": [5, 1, 1, 7, 1]}
    for i, (bounds, _) in enumerate(SLICES.values()):
        names = ["" if bound is None else f"{role}_{i}" for role, bound in zip("seat", bounds, strict=True)]
        constants |= {name: bound for name, bound in zip(names, bounds, strict=True) if name}
        nodes.append(helper.make_node("Slice", ["x", *names], [f"part_{i}"]))
    nodes.append(helper.make_node("Expand", ["x", "sizes"], ["expanded"]))
    outputs = {node.output[0]: None for node in nodes} | {"y": ("B", 3, 7, 10)}
    source = model_of(nodes, ROTARY, outputs, constants)
    x = np.random.default_rng(0).standard_normal((2, 3, 7, 10), np.float32)
    _, *parts, expanded = mhsa.load(mhsa.compile(source))(x, np.ones((2, 7, 5), "f4"), np.zeros((2, 7, 5), "f4"))
    for name, part, (_, index) in zip(SLICES, parts, SLICES.values(), strict=True):
        assert np.array_equal(part, x[index]), name
    assert np.array_equal(expanded, np.broadcast_to(x, (5, 2, 3, 7, 10)))


@pytest.mark.thorough
def test_the_first_and_the_last_of_any_number_broadcast() -> None:
    """As a token that stands for all is added to all."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            heads = x[:, None]
            y = functional.scaled_dot_product_attention(heads, heads, heads)[:, 0]
            return y[:, :1] + x, x[:, -1:] * y

    attention = mhsa.load(mhsa.compile(Model(), example_inputs=(torch.randn(2, 7, 24),)))
    for L in (1, 2, 53):
        x = torch.randn(3, L, 24)
        for got, expected in zip(attention(x), Model()(x), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.fixture(scope="module")
def agreeing() -> Artifact:
    """A Concat whose dims only a call shows to be equal, as in PP-OCR's recogniser, whose images have any height until
    there is one row left."""
    nodes = [
        helper.make_node("RotaryEmbedding", ["x", "cos", "sin"], ["y"]),
        helper.make_node("Concat", ["x", "rows"], ["both"], axis=3),
        helper.make_node("Relu", ["both"], ["z"]),
    ]
    inputs = {"x": ("B", 3, 7, 10), "rows": ("B", 3, "R", 2), **ROTARY}
    return mhsa.compile(model_of(nodes, inputs, {"y": ("B", 3, 7, 10), "z": None}))


def test_a_concat_whose_dims_only_a_call_shows_to_be_equal(agreeing: Artifact) -> None:
    function = mhsa.load(agreeing)
    x, rows = np.random.default_rng(0).standard_normal((2, 2, 3, 7, 10), np.float32)
    tables = np.ones((2, 7, 5), "f4"), np.zeros((2, 7, 5), "f4")
    _, both = function(x, rows[..., :2], *tables)
    assert np.array_equal(both, np.concatenate([x, rows[..., :2]], 3).clip(0))
    with pytest.raises(InputError, match="Concat node 'both': expected operands whose sizes fit each other"):
        function(x, rows[:, :, :5, :2], *tables)


def test_a_concat_whose_dims_are_equal_is_left_to_tvm() -> None:
    """TVM makes a shape of constant sizes of it, as a Reshape behind it needs: view(-1, x.size(-1)) in GPT-2."""
    one, other = (relax.const(np.array([[number, 5]]), "int64") for number in (-1, 60))
    for axis in (0, 1, -1):
        assert concat_of_dims_that_must_agree(relax.BlockBuilder(), [one, other], {"axis": axis}) is None


AFTER_OTHER_FILES = """
import os, sys
import numpy as np
import mhsa_compile as mhsa

function = mhsa.load(sys.argv[1])
names = ["empty"] * 30 + ["broken"] * 30
held = [os.open(name, os.O_RDWR) for name in names]
x, rows, table = np.ones((2, 3, 7, 10), "f4"), np.ones((2, 3, 5, 2), "f4"), np.ones((2, 7, 5), "f4")
try:
    function(x, rows, table, table)
except mhsa.errors.InputError as error:
    print(error)
"""


def test_the_first_error_of_a_process_reads_no_file_of_somebody_else(agreeing: Artifact, tmp_path: Path) -> None:
    """TVM's backtrace opens each library again by its name, which is the number of a descriptor."""
    (tmp_path / "empty").touch()
    (tmp_path / "broken").write_bytes(b"\x7fELF\x02\x01\x01" + b"\xff" * 5000)
    command = [sys.executable, "-c", AFTER_OTHER_FILES, str(agreeing.path)]
    child = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout.startswith("Concat node 'both': expected operands whose sizes fit each other")
