"""What kernels on matrix tiles become, compiled on any machine for one that has them: loads for each product,
registers, calls while a tile holds something, and tiles that a task would leave configured."""

from __future__ import annotations

from fractions import Fraction

import pytest
from support.attention_ops import attention_of
from support.kernel_runs import assembly
from support.tiles.tile_flow import TileFunction, tile_functions

from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.kernels.cpu.linear.rounded_on_tiles import CpuRoundedTileLinearKernel
from mhsa_compile.kernels.cpu.linear.tiles import CpuTileLinearKernel
from mhsa_compile.kernels.cpu.products.on_tiles import CpuTileProductKernel
from mhsa_compile.kernels.cpu.tile_attention.kernel import CpuTileAttentionKernel
from mhsa_compile.kernels.interface.ops import AttentionOp, HeadLayout, LinearOp, ProductOp, ProductOperand

TARGET, WITH_FLOAT16 = load_profile("sapphirerapids"), load_profile("graniterapids")
SUMS = 2
"""Tiles of sums that are loaded at once."""


def attention(E: int, S: int | str = "S", dtype: str = "bfloat16") -> AttentionOp:
    places = [HeadLayout(i, "heads", 0) for i in range(3)]
    return attention_of(
        "B", "L", S, 8, 8, E, E, E**-0.5, band=None, mask=None, query=places[0], key=places[1], value=places[2],
        output=HeadLayout(0, "heads", 0), dtype=dtype,
    )  # fmt: skip


def product(dtype: str, word: str = "ieee") -> ProductOp:
    operand = ProductOperand((8, "M", 96), (0,), 1, 2)
    turned = ProductOperand((8, "N", 96), (0,), 2, 1)
    return ProductOp((8,), "M", 96, "N", operand, turned, dtype, dtype, word)


KERNELS = {
    # One tile by two: three loads for two products.
    "linear": (
        CpuTileLinearKernel(),
        LinearOp(("B", "L"), 768, (768,), (True,), (False,), "bfloat16"),
        {Fraction(3, 2)},
    ),
    "linear of float16": (
        CpuTileLinearKernel(),
        LinearOp(("B", "L"), 768, (768,), (True,), (False,), "float16"),
        {Fraction(3, 2)},
    ),
    "rounded linear": (
        CpuRoundedTileLinearKernel(),
        LinearOp(("B", "L"), 768, (768,), (True,), (False,), float32_products="bf16"),
        {Fraction(3, 2)},
    ),
    # One tile by two where there are 32 queries, one by one where there are 16.
    **{f"attention, {E}": (CpuTileAttentionKernel(), attention(E), {Fraction(3, 2), Fraction(2)}) for E in (64, 128)},
    "attention of float16": (
        CpuTileAttentionKernel(),
        attention(64, dtype="float16"),
        {Fraction(3, 2), Fraction(2)},
    ),
    "product": (CpuTileProductKernel(), product("bfloat16"), {Fraction(3, 2)}),
    "product of float16": (CpuTileProductKernel(), product("float16"), {Fraction(3, 2)}),
    # Six products of two tiles by two, and of one by two.
    "product of float32": (CpuTileProductKernel(), product("float32", "bf16x6"), {Fraction(14, 24), Fraction(11, 12)}),
}


@pytest.fixture(params=KERNELS, scope="module")
def code(request: pytest.FixtureRequest) -> tuple[TileFunction, set[Fraction]]:
    kernel, op, loads = KERNELS[request.param]
    target = WITH_FLOAT16 if op.dtype == "float16" else TARGET
    text = assembly(kernel.emit(op, target, kernel.default_config(op, target)), target)
    assert ("tdpfp16ps" in text, "tdpbf16ps" in text) == (op.dtype == "float16", op.dtype != "float16")
    (function,) = tile_functions(text)
    return function, loads


@pytest.mark.thorough_but("linear")
def test_products_share_their_loads_and_spill_nothing(code: tuple[TileFunction, set[Fraction]]) -> None:
    function, loads = code
    blocks = [block for block in function.blocks if block.products]
    loops = [block for block in blocks if any(function.blocks[after] is block for after in block.following)]
    assert {Fraction(block.loads - block.sums, block.products) for block in loops} == loads
    for block in blocks:
        # Where two products are interleaved with vectors, a block begins or ends with sums of theirs.
        assert block.loads <= max(loads) * block.products + SUMS
        assert not block.spills, "\n".join(block.lines)


@pytest.mark.thorough_but("linear")
def test_nothing_is_called_while_tiles_live_and_none_stay_configured(code: tuple[TileFunction, set[Fraction]]) -> None:
    function, _ = code
    assert function.calls_across_tiles == []
    assert function.returns_configured == 0


FUNCTION = """run:
	ldtilecfg	(%rsp)
{before}
	tileloadd	(%rdi,%rax), %tmm6
	tilezero	%tmm0
.LBB0_1:                                # a loop
	tileloadd	(%rsi,%rax), %tmm7
	tdpbf16ps	%tmm7, %tmm6, %tmm0
	jne	.LBB0_1
{across}
	tilestored	%tmm0, (%rdx,%rax)
	je	.LBB0_2
	tilerelease
.LBB0_2:
	{end}
	retq
"""


@pytest.mark.parametrize(
    ("places", "calls", "ways"),
    [
        ({"before": "	callq	malloc@PLT", "end": "tilerelease"}, [], 0),
        ({"across": "	callq	*(%rax)"}, ["callq	*(%rax)"], 1),
    ],
    ids=["right", "wrong"],
)
def test_planted_calls_and_returns_are_seen(places: dict[str, str], calls: list[str], ways: int) -> None:
    text = FUNCTION.format(**{"before": "", "across": "", "end": "nop", **places})
    (function,) = tile_functions(text)
    assert (function.calls_across_tiles, function.returns_configured) == (calls, ways)
    assert [(block.products, block.loads) for block in function.blocks if block.products] == [(1, 1)]
