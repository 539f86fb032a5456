"""What no kernel takes, in TVM's operators: what `test_operator` cannot ask a CPU for, which has kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm
from fuzz.attention import draw_operands, evaluated, placed
from support.attention_ops import attention_of
from tvm import relax

from mhsa_compile.compiler.fallback import attention
from mhsa_compile.kernels.interface.ops import AttentionOp, HeadLayout
from mhsa_compile.spec.window import WindowSpec
from mhsa_compile.verification.error_budget import budget, max_error


def run(op: AttentionOp, arrays: list[np.ndarray]) -> np.ndarray:
    builder = relax.BlockBuilder()
    params = [relax.Var(f"p{i}", relax.TensorType(a.shape, str(a.dtype))) for i, a in enumerate(arrays)]
    with builder.function("main", params):
        with builder.dataflow():
            y = builder.emit_output(attention.emit(builder, op, list(params)))
        builder.emit_func_output(y)
    executable = relax.build(builder.get(), tvm.target.Target({"kind": "llvm"}))
    found = relax.VirtualMachine(executable, tvm.cpu())["main"](*map(tvm.runtime.tensor, arrays))
    return found.numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "band", [None, pytest.param(WindowSpec(None, 0, "bottom_right"), marks=pytest.mark.thorough)], ids=str
)
def test_slopes_and_sinks(band: WindowSpec | None) -> None:
    B, L, S, H, G, E, F = 2, 5, 11, 4, 2, 7, 3
    places = {role: HeadLayout(i, "heads", 0) for i, role in enumerate(("query", "key", "value"))}
    op = attention_of(
        B, L, S, H, G, E, F, scale=E**-0.5, band=band, mask=None, output=HeadLayout(0, "rows", H * F),
        slopes=True, sinks=True, lengths=True, **places,
    )  # fmt: skip
    given = draw_operands(np.random.default_rng(0), op, (B, L, S), 1.0, 0)
    expected, eager = (evaluated(op, given, dtype) for dtype in (torch.float64, torch.float32))
    assert max_error(expected, run(op, placed(op, given))) <= budget(expected, eager.astype(np.float32), "float32")
