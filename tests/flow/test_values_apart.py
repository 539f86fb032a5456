"""Queries, keys and values of three inputs, through the whole flow: prime widths, ragged lengths, masks, threads."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError, SpecError
from mhsa_compile.verification.error_budget import budget, max_error
from mhsa_compile.verification.random_inputs import random_inputs

D, K, V, H = 22, 13, 37, 2  # no width is another's, nor a multiple of a vector
SIZES = ((1, 1, 1), (3, 1, 197), (2, 7, 31), (1, 197, 7), (2, 67, 131))
"""B, L and S."""
MASKS = {"int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8, "bool": torch.bool}


@pytest.fixture(scope="module")
def layer() -> nn.MultiheadAttention:
    """PyTorch's own layer, with biases that are not zero: zeros would hide a swap."""
    torch.manual_seed(5)
    made = nn.MultiheadAttention(D, H, kdim=K, vdim=V, batch_first=True).eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


@pytest.fixture(scope="module")
def artifact(layer: nn.MultiheadAttention, tmp_path_factory: pytest.TempPathFactory) -> mhsa.Artifact:
    """The layer's artifact, saved and opened again."""
    folder = tmp_path_factory.mktemp("apart") / "attention.mhsa"
    mhsa.compile(mhsa.from_torch(layer, mask="key_padding")).save(folder)
    return mhsa.Artifact.open(folder)


def drawn(B: int, L: int, S: int, seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in ((B, L, D), (B, S, K), (B, S, V))]
    seen = rng.random((B, S)) < 0.8
    seen[:, 0] = True  # PyTorch's layer gives NaN for a query that sees nothing
    return arrays, seen


@torch.no_grad()
def of_pytorch(layer: nn.MultiheadAttention, arrays: list[np.ndarray], seen: np.ndarray, dtype: torch.dtype):
    """The layer at this dtype. Its parameters are the fixture's: they are float32 again afterwards, exactly."""
    given = [torch.from_numpy(array).to(dtype) for array in arrays]
    try:
        return layer.to(dtype)(*given, key_padding_mask=~torch.from_numpy(seen), need_weights=False)[0].numpy()
    finally:
        layer.float()


@pytest.mark.thorough_only("(1, 1, 1)-1")
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_is_pytorchs_layer_in_float64(
    layer: nn.MultiheadAttention, artifact: mhsa.Artifact, sizes: tuple[int, int, int], threads: int
) -> None:
    attention = mhsa.load(artifact, threads=threads)
    for seed in range(3):
        arrays, seen = drawn(*sizes, seed)
        exact, eager = (of_pytorch(layer, arrays, seen, dtype) for dtype in (torch.float64, torch.float32))
        allowed = budget(exact, eager, "float32")
        first = attention(*arrays, seen)
        assert max_error(exact, first) <= allowed
        for name, dtype in MASKS.items():
            mask = torch.from_numpy(seen).to(dtype)
            assert np.array_equal(attention(*arrays, mask=mask.numpy()), first), name
            in_torch = attention(*map(torch.from_numpy, arrays), mask=mask)
            assert isinstance(in_torch, torch.Tensor) and np.array_equal(in_torch.numpy(), first), name
        x, key, value = arrays
        assert np.array_equal(attention(mask=seen, value=value, key=key, x=x), first)


@pytest.mark.thorough
def test_callers_at_once_get_what_one_gets(artifact: mhsa.Artifact) -> None:
    attention = mhsa.load(artifact)
    calls = [drawn(2, L, S, seed=L) for L, S in ((3, 29), (31, 7), (67, 101))]
    expected = [attention(*arrays, seen) for arrays, seen in calls]
    wrong: list[int] = []

    def call(number: int) -> None:
        arrays, seen = calls[number]
        for _ in range(30):
            if not np.array_equal(attention(*arrays, seen), expected[number]):
                wrong.append(number)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_the_artifact_says_what_it_takes_and_holds(artifact: mhsa.Artifact) -> None:
    spec = artifact.manifest.spec
    assert spec is not None and (spec.kv_embed_dim, spec.v_embed_dim) == (K, V)
    dims = {info.name: info.dims for info in artifact.manifest.inputs}
    assert dims == {"x": ("B", "L", D), "key": ("B", "S", K), "value": ("B", "S", V), "mask": ("B", "S")}
    weights = {info.name: info.dims for info in artifact.manifest.weights}
    assert weights["k_proj.weight"] == (D, K) and weights["v_proj.weight"] == (D, V)
    verdict = mhsa.verify(artifact, threads=2)
    assert verdict.ok, verdict.worst
    assert all(check.ok for check in verdict.checks)


def test_weights_of_another_layer_are_bound_at_load(artifact: mhsa.Artifact) -> None:
    torch.manual_seed(6)
    other = nn.MultiheadAttention(D, H, kdim=K, vdim=V, batch_first=True).eval()
    attention = mhsa.load(artifact, weights=mhsa.weights(mhsa.from_torch(other)))
    arrays, seen = drawn(2, 7, 31)
    exact, eager = (of_pytorch(other, arrays, seen, dtype) for dtype in (torch.float64, torch.float32))
    assert max_error(exact, attention(*arrays, seen)) <= budget(exact, eager, "float32")
    swapped = nn.MultiheadAttention(D, H, kdim=V, vdim=K)
    with pytest.raises(InputError, match=r"weight 'k_proj.weight': expected float32 of shape \(22, 13\)"):
        mhsa.load(artifact, weights=mhsa.weights(mhsa.from_torch(swapped)))


@pytest.mark.thorough
@pytest.mark.parametrize("mask", [None, "bool", "additive", "key_padding"])
def test_onnx_runtime_reads_the_file_and_agrees(mask: str | None, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(7)
    spec = mhsa.AttentionSpec(embed_dim=D, num_heads=H, kv_embed_dim=K, v_embed_dim=V, mask=mask)
    artifact = mhsa.compile(spec)
    artifact.save(tmp_path / "attention.mhsa")
    session = runtime.InferenceSession(tmp_path / "attention.mhsa" / "model.onnx", providers=["CPUExecutionProvider"])
    L = 1 if mask == "key_padding" else 11  # it refuses an attn_mask of one row for several queries
    inputs = random_inputs(artifact.manifest, {"B": 2, "L": L, "S": 29})
    if mask is not None:  # its rows that see nothing are the mean of V or NaN, by its version
        inputs["mask"][..., 0] = 0 if mask == "additive" else True
    (found,) = session.run(None, inputs)
    made = mhsa.load(artifact)(**inputs)
    assert max_error(found.astype(np.float64), made) <= 2**-19 * np.abs(found).max()


BAD: dict[str, tuple[dict[str, tuple[int, ...] | None], str]] = {
    "value of the keys' width": ({"value": (2, 11, K)}, r"input 'value': expected .*\(B, S, 37\).*\(2, 11, 13\)"),
    "no value": ({"value": None}, r"input 'value': expected .*\(B, S, 37\).* got nothing"),
    "no key": ({"key": None}, r"input 'key': expected .*\(B, S, 13\).* got nothing"),
    "another length": ({"value": (2, 10, V)}, r"input 'value': .*S = 11 as in 'key', got .*\(2, 10, 37\)"),
    "another batch": ({"value": (1, 11, V)}, r"input 'value': .*B = 2 as in 'x'"),
    "a context": ({"context": (2, 11, K)}, r"input 'context': expected one of x, key, value, mask"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_calls_have_one_message(artifact: mhsa.Artifact, case: str) -> None:
    attention = mhsa.load(artifact)
    changed, message = BAD[case]
    shapes = {"x": (2, 5, D), "key": (2, 11, K), "value": (2, 11, V), **changed}
    given = {name: np.ones(shape, np.float32) for name, shape in shapes.items() if shape is not None}
    for _ in range(2):
        with pytest.raises(InputError, match=message):
            attention(**given, mask=np.ones((2, 11), bool))


@pytest.mark.thorough
def test_a_value_where_there_is_no_input_for_it() -> None:
    cross = mhsa.load(mhsa.compile(mhsa.AttentionSpec(embed_dim=D, num_heads=H, kv_embed_dim=K)))
    rows = [np.ones((2, length, width), np.float32) for length, width in ((5, D), (11, K), (11, K))]
    with pytest.raises(InputError, match="at most 2: x, context, got 3 by position"):
        cross(*rows)
    with pytest.raises(InputError, match="input 'value': expected one of x, context"):
        cross(*rows[:2], value=rows[2])
    with pytest.raises(SpecError, match=r"v_embed_dim: expected None without kv_embed_dim, got 5\. .*kv_embed_dim=22"):
        mhsa.AttentionSpec(embed_dim=D, num_heads=H, v_embed_dim=5)


@pytest.mark.thorough
def test_one_query_is_decoded() -> None:
    spec = mhsa.AttentionSpec(embed_dim=24, num_heads=6, num_kv_heads=2, kv_embed_dim=K, v_embed_dim=V, mask="bool")
    artifact = mhsa.compile(spec, dims={"L": 1})
    assert "cpu.decode" in {op.kernel for op in artifact.manifest.ops}
    verdict = mhsa.verify(artifact, cases=[{"B": B, "S": S} for B, S in ((1, 1), (3, 197), (2, 1023))], threads=2)
    assert verdict.ok, verdict.worst


@pytest.mark.thorough
def test_what_is_inside_and_fixed_dims() -> None:
    """What a softmax is like, beside y, with every dim fixed but the batch."""
    torch.manual_seed(8)
    outputs = ("y", "lse", "entropy", "top_k:3", "weights", "heads")
    spec = mhsa.AttentionSpec(
        embed_dim=D, num_heads=H, kv_embed_dim=K, v_embed_dim=V, v_head_dim=5, alibi=True, sinks=True,
        causal="bottom_right", outputs=outputs,
    )  # fmt: skip
    artifact = mhsa.compile(spec, dims={"L": 7, "S": 31})
    verdict = mhsa.verify(artifact, cases=[{"B": 1}, {"B": 3}], threads=1)
    assert verdict.ok, verdict.worst
