"""Exercises: the expectation is right for the kernels' defaults, and notices what is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import ml_dtypes  # noqa: F401  names bfloat16 to NumPy
import numpy as np
import pytest
import tvm
from support.attention_ops import attention_of

import mhsa_compile as mhsa
from mhsa_compile.compiler.pipeline import import_source
from mhsa_compile.compiler.selection.select_kernel import kernels_for
from mhsa_compile.errors import BuildError, ModelError
from mhsa_compile.hardware.profile import detect
from mhsa_compile.kernels.interface.ops import AttentionOp, HeadLayout, LinearOp
from mhsa_compile.kernels.scores.call_mask import CallMask
from mhsa_compile.kernels.scores.static_mask import StaticMask
from mhsa_compile.spec.window import WindowSpec
from mhsa_compile.tuning.measure.job import Candidate, MeasureJob
from mhsa_compile.tuning.op_jobs import candidate_of, job_of

NATIVE = detect()
SIZES = {"B": 2, "L": 19, "S": 37}


def run(job: MeasureJob, candidate: Candidate, folder: Path) -> np.ndarray:
    """The output of a candidate's library, called in this process."""
    path = folder / "candidate.so"
    path.write_bytes(candidate.library)
    module = tvm.runtime.load_module(str(path))
    tensors = [tensor(array) for array in job.inputs]
    packed = [tvm.runtime.empty(shape, dtype) for shape, dtype in candidate.packed]
    if packed:
        module["pack"](*map(tensor, job.weights), *packed)
    output = tensor(np.full(job.output[0], np.nan, np.dtype(job.output[1])))
    module["run"](*tensors, *packed, *map(tensor, candidate.constants), output)
    return output.numpy()


def tensor(array: np.ndarray):
    return tvm.runtime.tensor(np.ascontiguousarray(array))


def fused(L="L", **fields) -> AttentionOp:
    """Q, K and V side by side, as a fused projection leaves them: H/G 4/2, E 8, F 12."""
    width = 4 * 8 + 2 * 8 + 2 * 12
    places = [HeadLayout(0, "rows", width, offset) for offset in (0, 32, 48)]
    fields = {"band": None, "mask": None, "q_length": L, "kv_length": L} | fields
    return attention_of(
        batch="B", num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=12, scale=0.3, query=places[0], key=places[1],
        value=places[2], output=HeadLayout(0, "rows", 48), **fields,
    )  # fmt: skip


def apart(**fields) -> AttentionOp:
    places = [HeadLayout(i, "heads", 0) for i in (0, 1, 2, 0)]
    stated = {"band": None, "mask": None} | fields
    return attention_of(
        batch="B", q_length="L", kv_length="S", num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=12, scale=0.3,
        query=places[0], key=places[1], value=places[2], output=places[3], **stated,
    )  # fmt: skip


OPS = {
    "linear": LinearOp(("B", "L"), 23, (17, 5), (True, False), (False, True), padding=3),
    "linear-int8": LinearOp(("B", 7), 64, (33,), (True,), (False,), int8_weights=True),
    "fused-causal": fused(band=WindowSpec(None, 0)),
    "fused-static": fused(L=19, static_mask=StaticMask(np.random.default_rng(1).random((1, 19, 19)) < 0.3)),
    "apart-window": apart(band=WindowSpec(5, 2, "bottom_right"), softcap=5.0),
    "apart-masked": apart(mask=CallMask("bool", ("mask_B", "mask_H", "mask_L", "mask_S")), sinks=True),
    "apart-additive": apart(mask=CallMask("float32", ("B", 1, 1, "S")), lengths=True),
    "apart-alibi": apart(slopes=True, band=WindowSpec(None, 0)),
    "decode": dataclasses.replace(apart(), q_length=1),
}


@pytest.mark.thorough_but("linear", "linear-int8", "apart-additive")
@pytest.mark.parametrize("name", OPS)
def test_defaults_pass_their_exercise_and_a_wrong_output_fails(name: str, tmp_path: Path):
    op = OPS[name]
    job = job_of(op, SIZES)
    kernel = kernels_for(op, NATIVE)[0][0]
    output = run(job, candidate_of(op, kernel, kernel.default_config(op, NATIVE), NATIVE), tmp_path)
    assert job.error_share(output) <= 1 and job.flops > 0
    last = output.copy()
    last.reshape(-1)[job.checked[-1]] += 3 * job.budget
    assert job.error_share(last) > 1
    unwritten = output.copy()
    unwritten.reshape(-1)[job.checked[0]] = np.nan
    assert job.error_share(unwritten) == np.inf


@pytest.mark.thorough
def test_bfloat16_and_long_lengths_are_sampled(tmp_path: Path):
    op = fused(dtype="bfloat16", band=WindowSpec(40, 0))
    job = job_of(op, {"B": 1, "L": 1023})
    assert job.expected.size == 64 * 4 * 12 and job.checked.max() == 1023 * 48 - 1
    kernel = kernels_for(op, NATIVE)[0][0]
    assert job.error_share(run(job, candidate_of(op, kernel, kernel.default_config(op, NATIVE), NATIVE), tmp_path)) <= 1


def test_a_few_queries_take_their_keys_from_memory():
    assert job_of(OPS["decode"], SIZES).sets == 4
    assert job_of(OPS["apart-window"], {**SIZES, "L": 13}).sets == job_of(OPS["linear"], SIZES).sets == 1


def test_a_symbol_needs_a_size():
    with pytest.raises(ModelError, match=r"none for S.*--kv-length"):
        job_of(apart(), {"B": 1, "L": 7})


def test_what_cannot_be_built_is_named():
    op = OPS["linear"]
    kernel = kernels_for(op, NATIVE)[0][0]
    with pytest.raises(BuildError, match=r"cpu\.linear"):
        candidate_of(op, kernel, {"rows": 2}, NATIVE)


def test_the_operations_of_a_source():
    ops = import_source(mhsa.AttentionSpec(embed_dim=24, num_heads=3), dims={"B": 1, "L": 7}).ops
    assert sorted(type(op).__name__ for op in ops.values()) == ["AttentionOp", "LinearOp", "LinearOp"]
    for op in ops.values():
        assert job_of(op, {}).budget > 0
