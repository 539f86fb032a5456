"""benchmarks/tiles.py and what it is made of, as far as a CPU without tiles can tell: words, cases, tables, peers."""

from __future__ import annotations

import inspect
import subprocess
import sys
from contextlib import ExitStack
from datetime import date
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from rich.console import Console

import mhsa_compile as mhsa
from mhsa_bench import tile_peak
from mhsa_bench.bench import attempt
from mhsa_bench.native_threads import together
from mhsa_bench.peers.peer import Problem
from mhsa_compile.bench import accuracy
from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.hardware import host
from mhsa_compile.verification.random_inputs import random_inputs

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import models
import numkong_peers
import tiles
import torch_linear_peers


def test_words_are_read() -> None:
    usual = tiles.parse([])
    assert tuple(usual.only) == tiles.SECTIONS and usual.threads[0] == 1 and not usual.without_tiles
    some = tiles.parse(["--only", "linears", "models", "--threads", "2", "--case", "bert", "--against", "torch"])
    assert (some.only, some.threads, some.case, some.against) == (["linears", "models"], [2], ["bert"], ["torch"])
    with pytest.raises(SystemExit):
        tiles.parse(["--only", "convolutions"])


def test_cases_are_those_that_were_promised() -> None:
    every = tiles.cases(tiles.SECTIONS, None)
    assert {case.dtype for case in every if case.section in ("linears", "attention", "blocks")} == {"bfloat16"}
    assert {case.dtype for case in every if case.section == "float32"} == {"float32"}
    linears = {case.linear for case in every if case.section == "linears"}
    assert {(M, K, N) for M in (128, 512, 1024, 4096) for K, N in tiles.LINEARS} == linears
    cores = [case.workload for case in every if case.section == "attention"]
    assert {(one.spec.head_dim, one.L, one.spec.causal is not None) for one in cores if one} == {
        (E, L, causal) for E in (64, 128) for L in (128, 512, 1024, 2048) for causal in (False, True)
    }
    (block,) = tiles.cases(["blocks"], ["base128"])
    assert block.flops == 4 * 2 * 128 * 512 * 512 + 2 * 2 * 128 * 128 * 512
    with pytest.raises(InputError, match="case: expected some of bert, gpt2-prefill, vit, got 'base128'"):
        tiles.cases(["models"], ["base128"])


def test_tables_have_ratios_and_shares() -> None:
    row = tiles.Row("linears", "512 x 768 to 768", 1, "kernels", 2 * 512 * 768 * 768, 2000.0, 900.0, 160.0, 0.2)
    row.seconds = {tiles.OWN: [1e-3, 2e-3, 1e-3], "torch": [2e-3, 3e-3, 2e-3], "openvino-default": [1e-4] * 3}
    row.missing = {"numkong": "no reason"}
    assert (row.ratio("torch"), row.best_peer()) == (2.0, "torch")
    assert row.share(tiles.OWN) == pytest.approx(row.flops / 1e-3 / 2e12)
    figures = tiles.Figures("a CPU", {}, date(2026, 11, 26), 0.0, None, [row])
    again = msgspec.json.decode(msgspec.json.encode(figures), type=tiles.Figures)
    (table,) = tiles.tables(again)
    console = Console(width=200)
    with console.capture() as text:
        console.print(table)
    for words in ("tiles 2000 to 2000 GFLOP/s", "604 30%", "2.00 torch", "Disturbed, measure again: 512 x"):
        assert words in text.get()


def test_peaks_are_the_best_round_s() -> None:
    row, probes = tiles.Row("linears", "one", 1, "kernels"), [tiles.Probe(lambda: None, 10**9)] * 3
    tiles.note_peaks(row, probes, [[2.0, 1.0, 3.0], [0.5, 0.4, 0.6], [2.0, 0.2, 1.0]])
    assert (row.fma_gflops, row.tile_gflops, row.all_gflops) == (1.0, 5.0, 1.0)
    assert row.disturbed
    tiles.note_peaks(row, probes[:1], [[2.0, 2.0, 2.01]])
    assert row.fma_gflops == 0.5 and not row.disturbed


def test_a_cpu_without_tiles_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr(host, "cpu_features", lambda: frozenset({"avx2", "amx_tile"}))
    assert tiles.main([]) == 0
    assert "No matrix tiles here: the CPU has no amx_bf16. --without-tiles" in capsys.readouterr().out


PRODUCTS_OF_TILES = """
from mhsa_bench import tile_peak
from mhsa_compile.hardware.profile import detect
if (reason := tile_peak.why_no_tiles()) is not None:
    raise SystemExit(reason)
for sums in (tile_peak.FEW_SUMS, tile_peak.MOST_SUMS):
    with tile_peak.tile_products(detect(), 2, sums) as probe:
        probe.run()
    assert probe.amount == 2 * tile_peak.PRODUCTS * tile_peak.FLOPS
"""


@pytest.mark.thorough
@pytest.mark.skipif(not set(tile_peak.FEATURES) <= host.cpu_features(), reason="no matrix tiles")
def test_products_of_tiles_run() -> None:
    """In a process of its own: once it may use tiles, it may for ever."""
    child = subprocess.run([sys.executable, "-c", PRODUCTS_OF_TILES], capture_output=True, text=True, check=False)
    if "Linux does not permit them" in child.stderr:
        pytest.skip(child.stderr.strip())
    assert child.returncode == 0, child.stderr


def test_calls_run_together_and_tell_of_failures() -> None:
    seen: list[int] = []
    with together([lambda: seen.append(0), lambda: seen.append(1)]) as run:
        run()
    assert sorted(seen) == [0, 1]

    def refuse() -> None:
        raise ValueError("no")

    with together([lambda: None, refuse]) as run, pytest.raises(ValueError, match="no"):
        run()


@pytest.fixture(scope="module")
def linear() -> Problem:
    torch.manual_seed(0)
    module, rows = torch.nn.Linear(48, 40, dtype=torch.bfloat16).eval(), torch.zeros(37, 48, dtype=torch.bfloat16)
    artifact = mhsa.compile(module, dims={"N": 37}, example_inputs=(rows,), without_attention="accept")
    inputs = [random_inputs(artifact.manifest, {}, seed) for seed in range(2)]
    return Problem(artifact, inputs, accuracy.truth(artifact, inputs[0], Problem(artifact, inputs).weights).share)


@pytest.mark.thorough
def test_peers_of_a_linear_are_right(linear: Problem) -> None:
    with ExitStack() as stack:
        assert attempt(stack, torch_linear_peers.FORMS[0], linear, 1).missing is None
        product = attempt(stack, numkong_peers.NumKongLinear(), linear, 2)
        assert product.missing is None or "numkong" in product.missing


@pytest.mark.thorough
def test_numkong_says_what_it_cannot(tmp_path: Path) -> None:
    spec = mhsa.AttentionSpec(embed_dim=64, num_heads=2, dtype="bfloat16", causal=True)
    artifact = mhsa.compile(mhsa.ScaledDotProductAttention(spec), dims={"B": 1, "L": 5, "S": 5})
    problem = Problem(artifact, [random_inputs(artifact.manifest, {}, 0)])
    with (
        pytest.raises(ModelError, match="sees all keys"),
        numkong_peers.NumKongAttention("tiles", "", None).open(problem, 1),
    ):
        pass
    full = mhsa.compile(mhsa.ScaledDotProductAttention(msgspec.structs.replace(spec, causal=None)), dims={"B": 1})
    problem = Problem(full, [random_inputs(full.manifest, {"L": 5, "S": 5}, 0)])
    for folder in (None, tmp_path):
        peer = numkong_peers.NumKongAttention("tiles", "", folder)
        with pytest.raises(ModelError, match="a folder of its sources"), peer.open(problem, 1):
            pass


def test_parts_cover_all() -> None:
    assert numkong_peers._parts(5, 2) == [(0, 2), (2, 5)]
    assert numkong_peers._parts(1, 4) == [(0, 1)]
    assert numkong_peers._aligned(10).ctypes.data % 64 == 0 and not np.any(numkong_peers._aligned(10))


def test_a_choice_of_products_is_an_argument_or_a_reason() -> None:
    if "float32_products" in inspect.signature(mhsa.compile).parameters:
        assert models.products_argument("bf16") == {"float32_products": "bf16"}
    else:
        with pytest.raises(ValueError, match="no choice of float32_products"):
            models.products_argument("bf16")
