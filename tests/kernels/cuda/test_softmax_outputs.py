"""The kernels for GPUs that look into a softmax: run in NumPy by the interpreter, against what those for CPUs are held
to; and what nvcc makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.cuda import cuda_code
from support.simt import interpreter
from support.softmax_outputs_cases import ALL, SUMS, Array, asked_of, compare, operands, operation

from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.kernels.cuda.softmax_outputs.kernel import CudaAttentionProbsKernel, CudaSoftmaxStatsKernel
from mhsa_compile.kernels.cuda.softmax_outputs.row_scores import packed_bits
from mhsa_compile.kernels.interface.kernel import Emitted
from mhsa_compile.kernels.interface.ops import AttentionOp, AttentionProbsOp, SoftmaxStatsOp
from mhsa_compile.kernels.scores.call_mask import CallMask
from mhsa_compile.kernels.scores.static_mask import StaticMask
from mhsa_compile.spec.outputs import SoftmaxOutputs
from mhsa_compile.spec.window import WindowSpec

GPU = load_profile("cuda-sm80")
SHAPES = ((29, 7, 3), (2, 19, 71))
"""(B, L, S); short ones with many entries, as the budget wants to see PyTorch's error."""


def emitted(op: SoftmaxStatsOp | AttentionProbsOp) -> Emitted:
    kernel: Any = CudaSoftmaxStatsKernel() if isinstance(op, SoftmaxStatsOp) else CudaAttentionProbsKernel()
    assert kernel.why_not(op, GPU) is None
    return kernel.emit(op, GPU, kernel.default_config(op, GPU))  # type: ignore[no-any-return]


def run_of(op: SoftmaxStatsOp | AttentionProbsOp) -> Any:
    made = emitted(op)
    machine = interpreter.Machine(made.run)

    def run(inputs: Sequence[Array], outputs: Sequence[Array]) -> list[Array]:
        machine(*inputs, *made.constants, *outputs)
        return list(outputs)

    return run


def check(op: AttentionOp, wanted: SoftmaxOutputs = SUMS, shapes: Sequence[tuple[int, int, int]] = SHAPES) -> None:
    compare(op, [run_of(asked) for asked in asked_of(op, wanted)], shapes, wanted)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype(dtype):
    check(operation(dtype=dtype, v_head_dim=16, band=WindowSpec(None, 0)), ALL)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((97, 1, 1), marks=pytest.mark.thorough),
        pytest.param((1, 71, 37), marks=pytest.mark.thorough),
        (3, 5, 131),
    ],
    ids=str,
)
def test_ragged_lengths(shape):
    check(operation(), ALL, [shape])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "head_dim", [1, pytest.param(13, marks=pytest.mark.thorough), pytest.param(72, marks=pytest.mark.thorough)]
)
def test_heads_of_any_width(head_dim):
    check(operation(head_dim=head_dim, dtype="bfloat16"))


@pytest.mark.parametrize(
    "band",
    [
        pytest.param(WindowSpec(None, 0, "bottom_right"), marks=pytest.mark.thorough),
        WindowSpec(9, 2),
        pytest.param(WindowSpec(40, 33), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_bands(band):
    check(operation(band=band), ALL, [(29, 7, 3), (2, 19, 103), (1, 67, 35)])


@pytest.mark.parametrize(
    ("dims", "dtype"),
    [(("B", "H", "L", "S"), "float32"), pytest.param(("B", 1, 1, "S"), "bool", marks=pytest.mark.thorough)],
    ids=str,
)
def test_masks_of_the_call(dims, dtype):
    check(operation(mask=CallMask(dtype, dims), band=WindowSpec(None, 0)), ALL)


def test_a_mask_of_the_call_in_sixteen_bits_beside_a_constant_one():
    visible = np.random.default_rng(3).random((1, 19, 71)) < 0.5
    mask = CallMask("float16", ("B", 1, "L", "S"))
    check(
        operation(q_length=19, kv_length=71, dtype="float16", mask=mask, static_mask=StaticMask(visible)),
        ALL,
        SHAPES[1:],
    )


@pytest.mark.parametrize(
    ("heads", "wanted"),
    [pytest.param(4, ALL, marks=pytest.mark.thorough), (1, replace(ALL, rows=(5, -1, 36, 37), heads=(3, 1)))],
    ids=["all", "chosen"],
)
def test_constant_masks(heads, wanted):
    visible = np.random.default_rng(3).random((heads, 37, 131)) < 0.5
    visible[:, :, 30:70] = False
    visible[:, 5] = False
    op = operation(
        q_length=37, kv_length=131, static_mask=StaticMask(visible), band=WindowSpec(None, 0, "bottom_right")
    )
    check(op, wanted, [(2, 37, 131)])


def test_bits_of_a_constant_mask():
    visible = np.random.default_rng(0).random((2, 3, 71)) < 0.5
    bits = packed_bits(visible)
    assert bits.shape == (2, 3, 3) and bits.dtype == np.uint32
    for key in range(96):
        seen = visible[:, :, key] if key < 71 else np.zeros((2, 3), np.bool_)
        assert ((bits[:, :, key // 32] >> (key % 32) & 1) == seen).all()


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.thorough), "bfloat16"])
def test_what_else_makes_a_score(dtype):
    """Softcap, numbers of keys, sinks and slopes, together and with a bottom-right band; one entry has no key."""
    features = {"softcap": 2.0, "lengths": True, "sinks": True, "slopes": True, "dtype": dtype}
    check(operation(**features, band=WindowSpec(None, 0, "bottom_right")), ALL)


@pytest.mark.thorough
def test_numbers_of_keys_and_a_constant_mask_far_from_the_last_key():
    """With slopes, the largest scores of most rows are at neither end of the keys, and entries end elsewhere."""
    distance = np.arange(131) - np.arange(37)[:, None]
    visible = (abs(distance) <= 9) | (distance == -30)
    visible[20:, 100:] = True
    op = operation(q_length=37, kv_length=131, static_mask=StaticMask(visible[None]), lengths=True, slopes=True)
    check(op, ALL, [(5, 37, 131)])


@pytest.mark.thorough
def test_chosen_heads_and_rows_and_more_keys_than_there_are():
    """Rows that are not there are zeros, and so are the weights of keys that are not."""
    wanted = replace(ALL, heads=(2, 0), rows=(0, -1, 5, -3, 2), top_k=40)
    check(operation(band=WindowSpec(None, 0), lengths=True), wanted)


def test_of_equal_scores_the_first_key_comes_first():
    op = operation()
    q, k, v = operands(op, 1, 3, 70)
    k[:, :, [3, 4, 11, 40, 69]] = 4 * q[:, ::2, :1]  # the best of the first query, five times over
    outputs = [np.zeros((1, 4, 3, 4), np.float32), np.zeros((1, 4, 3, 4), np.int64)]
    _, keys = run_of(SoftmaxStatsOp(op, top_k=4))([q, k, v], outputs)
    assert (keys[:, ::2, 0] == [3, 4, 11, 40]).all()


@pytest.mark.thorough
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_hidden_reaches_no_output_and_what_is_seen_does(bad):
    op = operation(band=WindowSpec(None, 0))
    q, k, v = operands(op, 1, 60, 60)
    k[:, :, 40], q[..., 0] = bad, abs(q[..., 0])  # an infinite key makes infinite scores, of either sign, or NaN
    k[:, :, 40, 1:] = 0
    rows = (1, 4, 60)
    outputs = [np.zeros(rows, np.float32), np.zeros(rows, np.float32), np.zeros((*rows, 2), np.float32)]
    lse, entropy, largest, _ = run_of(SoftmaxStatsOp(op, True, True, 2))(
        [q, k, v], [*outputs, np.zeros((*rows, 2), np.int64)]
    )
    (weights,) = run_of(AttentionProbsOp(op))([q, k, v], [np.zeros((*rows, 60), np.float32)])
    for array in (lse, entropy, largest):
        assert np.isfinite(array[:, :, :40]).all() and np.isnan(array[:, :, 40:]).all()
    later = np.triu(np.ones((60, 60), np.bool_), 1)
    assert (weights[:, :, later] == 0).all() and np.isfinite(weights[:, :, :40]).all()
    assert np.isnan(weights[:, :, 40:][..., ~later[40:]]).all()


def test_rows_that_see_nothing():
    op = operation(mask=CallMask("bool", (1, 1, "L", "S")))
    q, k, v = operands(op, 1, 9, 40)
    mask = np.zeros((1, 1, 9, 40), np.bool_)
    mask[:, :, 4, 7] = True
    rows = (1, 4, 9)
    outputs = [np.zeros(rows, np.float32), np.ones(rows, np.float32), np.ones((*rows, 2), np.float32)]
    found = run_of(SoftmaxStatsOp(op, True, True, 2))([q, k, v, mask], [*outputs, np.zeros((*rows, 2), np.int64)])
    lse, entropy, largest, keys = (np.delete(array, 4, axis=2) for array in found)
    assert np.isneginf(lse).all() and (entropy == 0).all() and (largest == 0).all() and (keys == -1).all()
    assert (found[3][:, :, 4] == [7, -1]).all() and (found[2][:, :, 4] == [1, 0]).all()
    (weights,) = run_of(AttentionProbsOp(op))([q, k, v, mask], [np.ones((*rows, 40), np.float32)])
    assert weights.sum() == 4


def test_chosen_rows_of_a_call_without_queries_are_zeros():
    op = operation(band=WindowSpec(None, 0, "bottom_right"))
    (weights,) = run_of(AttentionProbsOp(op, None, (0, -1)))(
        operands(op, 2, 0, 40), [np.ones((2, 4, 2, 40), np.float32)]
    )
    assert not weights.any()


def test_what_they_do_not_take_is_named():
    for kernel, asked in ((CudaSoftmaxStatsKernel(), SoftmaxStatsOp), (CudaAttentionProbsKernel(), AttentionProbsOp)):
        assert "float64" in str(kernel.why_not(asked(operation(softmax="float64")), GPU))
        assert "softcap" in str(kernel.why_not(asked(operation(softcap=1e30)), GPU))
        assert kernel.op_type is asked


EVERYTHING = {
    "band": WindowSpec(40, 0, "bottom_right"),
    "mask": CallMask("bfloat16", ("B", 4, "L", "S")),
    "dtype": "bfloat16",
    **dict.fromkeys(("lengths", "sinks", "slopes"), True),
}
MACHINE_CODE: dict[str, tuple[str, SoftmaxStatsOp | AttentionProbsOp]] = {
    "statistics": ("sm_80", SoftmaxStatsOp(operation(head_dim=128), True, True)),
    "everything": ("sm_90a", SoftmaxStatsOp(operation(softcap=20.0, head_dim=64, **EVERYTHING), True, True, 100)),
    "weights": ("sm_90a", AttentionProbsOp(operation(head_dim=64, dtype="float16"))),
    "chosen weights": ("sm_80", AttentionProbsOp(operation(head_dim=13, **EVERYTHING), (1,), (0, -1))),
}


@pytest.mark.thorough_only("weights")
@pytest.mark.cuda
@pytest.mark.parametrize("case", MACHINE_CODE)
def test_machine_code(case, tmp_path):
    arch, op = MACHINE_CODE[case]
    text, _ = cuda_code.source(emitted(op), arch)
    code = cuda_code.machine_code(text, arch, tmp_path)
    assert (code.spilled, code.stack) == (0, 0)
    assert code.registers <= 168  # so that three blocks share a multiprocessor
