"""gpu_bench/ and benchmarks/gpu.py without a GPU: what is timed, how, what becomes of it; peers computed on the CPU."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_bench import artifact_cache, bench, peers
from gpu_bench.problem import Ceiling, GpuProblem, draw, large_copy, matrix_product
from gpu_bench.report import OURS, Ceilings, Figures, GpuResult, GpuRow, Machine, Sample, rows, text
from gpu_bench.timing import BURST, LEAST_ROUNDS, MOST_CALLS, interleave
from gpu_bench.workloads import GROUPS, WORKLOADS, CallWork, choose, work

from mhsa_compile.bench.workloads import Workload, module_of
from mhsa_compile.errors import DeviceError, InputError, MhsaError, ModelError
from mhsa_compile.hardware import data_paths
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.artifact.manifest import MANIFEST, OpReport
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.mask_patterns import Longformer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu

BY_NAME = {workload.name: workload for workload in WORKLOADS}


# What is timed.


def test_names_are_unique_and_groups_choose() -> None:
    assert len(BY_NAME) == len(WORKLOADS)
    assert [w.group for w in choose(["decode"])] == ["decode"] * 6
    assert choose(["all"]) == WORKLOADS
    assert choose(["gqa-8k-causal", "e256"])[-1].name == "gqa-8k-causal"
    with pytest.raises(InputError, match=f"workload: expected all, a group .{GROUPS[0]}.*got 'base128'"):
        choose(["all", "base128"])


def test_the_sizes_that_were_promised_are_there() -> None:
    forward = {(w.spec.head_dim, w.L, w.spec.causal is not None) for w in WORKLOADS if w.kind == "core" and w.L == w.S}
    assert {(E, L, c) for E in (64, 128) for L in (8192, 16_384) for c in (False, True)} <= forward
    assert {S for w in WORKLOADS if w.L == 1 for S in (w.S,)} == {8192, 16_384, 32_768}
    assert any(w.spec.window for w in WORKLOADS) and any(w.spec.static_mask for w in WORKLOADS)
    assert all(w.spec.dtype == "bfloat16" for w in WORKLOADS)


# By hand: FLOPs are 2 x (E + F) x B x H x pairs, and 2 x rows x columns x depth of each projection.
HAND = {
    "e128-8k": CallWork(4 * 128 * 2 * 16 * 8192 * 8192, 2 * 4 * 16_384 * 2048),
    "e128-8k-causal": CallWork(4 * 128 * 2 * 16 * (8192 * 8193 // 2), 2 * 4 * 16_384 * 2048),
    "gqa-8k-causal": CallWork(4 * 128 * 2 * 32 * (8192 * 8193 // 2), 2 * 2 * 8192 * 128 * (2 * 32 + 2 * 8)),
    "decode16x32k": CallWork(4 * 128 * 16 * 32 * 32_768, 2 * 16 * 128 * (2 * 32 + 2 * 8 * 32_768)),
    "window1024-16k": CallWork(4 * 128 * 16 * (1025 * 16_384 - 1024 * 1025 // 2), 2 * 4 * 16_384 * 2048),
    "vit-large": CallWork(
        4 * 64 * 64 * 16 * 197 * 197 + 4 * 2 * 64 * 197 * 1024 * 1024, 2 * (2 * 64 * 197 * 1024 + 4 * 1024 * 1024)
    ),
}


@pytest.mark.parametrize("name", HAND)
def test_work_is_counted_right(name: str) -> None:
    assert work(BY_NAME[name]) == HAND[name]


# How it is timed.


class Gpu:
    """A stopwatch of the test's own: calls say who they are, and each takes as long as it says, but for the first after
    somebody else's."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.bursts: list[tuple[str, int]] = []
        self.now = 0.0

    def call(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            disturbed = not self.log or self.log[-1] != name
            self.log.append(name)
            self.now += 10 * seconds if disturbed else seconds

        return run

    def seconds(self, calls: Sequence[Callable[[], Any]]) -> float:
        before, first = self.now, len(self.log)
        for call in calls:
            call()
        self.bursts.append((self.log[-1], len(self.log) - first))
        return self.now - before


def test_candidates_take_turns_and_the_first_call_of_a_turn_does_not_count() -> None:
    watch = Gpu()
    samples = interleave([[watch.call("a", 1e-3)], [watch.call("b", 4e-3)]], 0.0, watch)
    assert samples == [pytest.approx([1e-3] * LEAST_ROUNDS), pytest.approx([4e-3] * LEAST_ROUNDS)]
    turns = [name for name, _ in watch.bursts[2:]]  # behind the round that learns
    assert turns == [*"abbaabbaabbaab"]


def test_a_burst_is_as_long_as_it_should_be() -> None:
    watch = Gpu()
    interleave([[watch.call("a", 1e-3)], [watch.call("b", 2 * BURST)], [watch.call("c", 1e-9)]], 0.0, watch)
    sizes = dict(watch.bursts[3:])
    assert sizes == {"a": round(BURST / 1e-3), "b": 1, "c": MOST_CALLS}


def test_rounds_go_on_for_as_long_as_asked() -> None:
    watch = Gpu()
    samples = interleave([[watch.call("a", BURST)], [watch.call("b", 3 * BURST)]], 1.0, watch)
    rounds = 2.0 / (4 * BURST)
    assert len(samples[0]) == len(samples[1]) == pytest.approx(rounds, abs=1)


def test_every_set_of_inputs_has_its_turn() -> None:
    watch = Gpu()
    interleave([[watch.call(name, 5e-3) for name in "abc"]], 0.0, watch)
    assert "".join(watch.log[:9]) == "abcabcabc"


# What comes of it.

MACHINE = Machine("NVIDIA Made-up", (9, 0), 132, 139.8, (13, 0), "a CPU")


def result(samples: Sequence[Sample | GpuRow], name: str = "e128-8k") -> GpuResult:
    workload = BY_NAME[name]
    rounds = 3
    found = rows(samples, work(workload), [800e12] * rounds, [4e12] * rounds)
    kernels = ("attention: cuda.attention rows=128, default",)
    limits = Ceilings(800.0, 4000.0, 0.01)
    return GpuResult(
        name, workload.group, workload.dims, "bfloat16", True, work(workload), rounds, limits, kernels, found
    )


def ran(name: str, us: float, error: float = 0.5) -> Sample:
    return Sample(name, [us * 1e-6, us * 1.1e-6, us * 0.9e-6], error)


MISSING = GpuRow("SDPA cuDNN", missing="No available kernel. Aborting execution.")


def test_rows_say_how_each_compares() -> None:
    found = result([ran(OURS, 1600), ran("SDPA flash", 2000), MISSING, ran("FlexAttention", 1840)])
    ours, flash, missing, _ = found.rows
    assert ours.median_us == pytest.approx(1600) and ours.ratio == 1
    assert ours.tflops == pytest.approx(HAND["e128-8k"].flops / 1600e-6 / 1e12)
    assert ours.of_matrix == pytest.approx(ours.tflops / 800)
    assert ours.of_copy == pytest.approx(ours.gbs / 4000)
    assert flash.ratio == pytest.approx(1.25)
    assert missing is MISSING
    assert found.ok and found.best_peer is found.rows[3] and found.advantage == pytest.approx(1.15)


def test_the_ratio_is_that_of_the_same_round() -> None:
    """Both are twice as slow in one round: the machine was, and neither of them."""
    found = result([Sample(OURS, [1.0, 2.0, 1.0], 0), Sample("SDPA flash", [1.5, 3.0, 1.5], 0)])
    assert found.rows[1].ratio == pytest.approx(1.5)


def figures(*results: GpuResult, **failed: str) -> Figures:
    return Figures(MACHINE, {"torch": "2.13.0"}, date(2026, 11, 22), 0.5, list(results), failed)


TABLE = """\
NVIDIA Made-up, compute capability 9.0, 132 multiprocessors, 140 GiB, driver for CUDA 13.0; host a CPU; 2026-11-22

e128: a product of matrices 800 TFLOP/s, a copy 4000 GB/s
workload        ours us  TFLOP/s  of matrix  GB/s  of copy  spread  error          best peer        flash  cuDNN  flex
e128-8k          1600.0      687        86%   168       4%   10.0%   0.50          1.15 flex         1.25      -  1.15
e128-8k-causal  missing        -          -     -        -       -      -  (1000.0 us) flash  (1000.0 us)      -     -
fastest peer / ours: 1.15 to 1.15, geometric mean 1.15

windows: a product of matrices 800 TFLOP/s, a copy 4000 GB/s
workload               ours us  TFLOP/s  of matrix  GB/s  of copy  spread  error  best peer  flex
window256-16k (WRONG)    100.0      342        43%  2684      67%   10.0%   1.50  2.50 flex  2.50

decode1x8k: failed, the driver went away
"""


def test_a_table_names_the_device_and_the_date() -> None:
    missing = GpuRow("cuDNN", missing="No available kernel.")
    good = result([ran(OURS, 1600), ran("flash", 2000), missing, ran("flex", 1840)])
    alone = result([GpuRow(OURS, missing="no kernel"), ran("flash", 1000)], "e128-8k-causal")
    wrong = result([ran(OURS, 100, error=1.5), ran("flex", 250)], "window256-16k")
    shown = text(figures(good, alone, wrong, decode1x8k="the driver went away"))
    assert shown == TABLE


def test_figures_are_read_as_they_were_written(tmp_path: Path) -> None:
    found = figures(result([ran(OURS, 1600), MISSING]), e64="an error")
    (tmp_path / "figures.json").write_bytes(gpu.written(found))
    assert gpu.read(tmp_path / "figures.json") == found


def test_what_is_published_again_is_the_same_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(result([ran(OURS, 1600), ran("SDPA flash", 2000)]))
    (tmp_path / "figures.json").write_bytes(gpu.written(found))
    code = gpu.main(["--read", str(tmp_path / "figures.json"), "--text", str(tmp_path / "table.txt")])
    assert code == 0
    assert capsys.readouterr().out == text(found) == (tmp_path / "table.txt").read_text()


@pytest.mark.parametrize("bad", [{}, {"error": 1.5}, {"missing": True}])
def test_only_what_is_right_and_whole_is_well(bad: dict[str, Any]) -> None:
    good = result([ran(OURS, 1600)])
    assert figures(good).ok
    if not bad:
        assert not figures(good, e64="an error").ok and not figures().ok
    elif "error" in bad:
        assert not figures(good, result([ran(OURS, 1600, error=1.5)])).ok
    else:
        assert not figures(good, result([GpuRow(OURS, missing="no kernel")])).ok


# Whoever runs it.


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise DeviceError("device", "an NVIDIA GPU", "none")

    monkeypatch.setattr(bench.cuda_devices, "driver", refuse)
    assert gpu.main([]) == 2
    said = capsys.readouterr()
    assert "device: expected an NVIDIA GPU, got none" in said.err and not said.out


def test_a_pytorch_for_cpus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class One:
        count, cuda = 1, (13, 0)

    monkeypatch.setattr(bench.cuda_devices, "driver", One)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"PyTorch: expected one for CUDA, got .*https://pytorch\.org"):
        bench.require_gpu("cuda:0")


def test_unknown_words_are_refused_before_any_gpu_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--workload", "base128"]) == 2
    assert "workload: expected" in capsys.readouterr().err


class Pool(Executor):
    """Runs here what another process would; `died` is the workload whose process dies."""

    def __init__(self, opened: list[Pool]) -> None:
        self.ran: list[str] = []
        self.open = True
        opened.append(self)

    def submit(self, function: Any, workload: Workload, options: bench.Options) -> Future[Any]:  # type: ignore[override]
        found: Future[Any] = Future()
        self.ran.append(workload.name)
        if workload.name == "e128-2k":
            found.set_exception(BrokenProcessPool("A process was terminated abruptly"))
        else:
            found.set_result(function(workload, options))
        return found

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.open = False


def test_whoever_dies_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(workload: Workload, options: bench.Options) -> GpuResult:
        if workload.name == "e128-4k":
            raise DeviceError("a kernel launched earlier", "one that runs to its end", "ILLEGAL_ADDRESS")
        return result([ran(OURS, 1600)], workload.name)

    monkeypatch.setattr(bench, "measure", measure)
    noted: dict[str, GpuResult | str] = {}
    opened: list[Pool] = []
    names = ["e128-1k", "e128-2k", "e128-4k", "e128-8k", "e128-16k"]
    gpu.in_turn(
        [BY_NAME[name] for name in names],
        bench.Options("cuda-sm90a"),
        lambda workload, outcome: noted.update({workload.name: outcome}),
        partial(Pool, opened),
    )
    assert list(noted) == names
    assert "terminated abruptly" in str(noted["e128-2k"]) and "ILLEGAL_ADDRESS" in str(noted["e128-4k"])
    assert all(isinstance(noted[name], GpuResult) for name in ("e128-1k", "e128-8k", "e128-16k"))
    assert [pool.ran for pool in opened] == [["e128-1k", "e128-2k"], ["e128-4k"], ["e128-8k", "e128-16k"]]
    assert not any(pool.open for pool in opened)


def test_what_was_compiled_once_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An artifact is kept by what it is made of: a workload, a target, the records that are there for it."""
    made: list[str] = []

    class Made:
        def save(self, place: Path, force: bool) -> None:
            (place / MANIFEST).parent.mkdir()
            (place / MANIFEST).write_text(made[-1])

    def compile(module: Any, target: Any, dims: dict[str, int], cache: bool) -> Any:
        made.append(target.name)
        return Made()

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(bench, "compile", compile)
    monkeypatch.setattr(bench, "module_of", lambda workload: workload)
    monkeypatch.setattr(artifact_cache.Artifact, "open", lambda place: (place / MANIFEST).read_text())
    options = bench.Options("cuda-sm90a", artifacts=tmp_path / "artifacts")
    first, second = (BY_NAME[name] for name in ("e128-8k", "e128-8k-causal"))
    assert [bench.compiled(workload, options) for workload in (first, first, second)] == ["cuda-sm90a"] * 3
    assert bench.compiled(first, replace(options, target="cuda-sm80")) == "cuda-sm80"
    assert len(made) == 3
    records = data_paths.own_records("cuda-sm90a")
    records.parent.mkdir(parents=True)
    records.write_text("tuned since\n")
    bench.compiled(first, options)
    assert len(made) == 4
    assert isinstance(bench.compiled(first, replace(options, artifacts=None)), Made) and len(made) == 5


def test_all_that_goes_to_another_process_can() -> None:
    for workload in WORKLOADS:
        sent = (gpu.attempt, workload, bench.Options(load_profile("cuda-sm90a"), artifacts=Path("kept")))
        assert pickle.loads(pickle.dumps(sent)) == sent
    found = result([ran(OURS, 1600), MISSING])
    assert pickle.loads(pickle.dumps(found)) == found


def test_what_does_not_compile_is_left_to_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(workload: Workload, options: bench.Options) -> None:
        if workload.name == "e128-8k":
            raise ModelError("operation", "a kernel", "none")

    monkeypatch.setattr(bench, "compiled", refuse)
    names, options = ("e128-8k", "e128-16k"), bench.Options("cuda-sm90a")
    assert [gpu.compiles(BY_NAME[name], options) for name in names] == [False, True]


# Who we are compared with: the same computation, on the CPU.

LONGFORMER = Longformer(window=8, global_tokens=1)
SMALL = {
    "full": ("core", {"num_heads": 2}),
    "causal": ("core", {"num_heads": 4, "num_kv_heads": 2, "causal": True}),
    "window": ("core", {"num_heads": 2, "causal": True, "window": (5, 0)}),
    "constant mask": ("core", {"num_heads": 2, "static_mask": LONGFORMER}),
    "block": ("block", {"num_heads": 4, "num_kv_heads": 2, "causal": True}),
    "block without bias": ("block", {"num_heads": 2, "bias": False}),
}


@pytest.fixture(scope="module")
def small() -> Callable[[str], tuple[GpuProblem, Artifact]]:
    made: dict[str, tuple[GpuProblem, Artifact]] = {}

    def get(name: str) -> tuple[GpuProblem, Artifact]:
        if name not in made:
            kind, fields = SMALL[name]
            spec = AttentionSpec(embed_dim=64, dtype="bfloat16", **fields)
            workload = Workload(name, kind, "small", spec, 3, 37, 37)
            torch.manual_seed(0)
            weights = {n: t.detach() for n, t in module_of(workload).state_dict().items()}
            artifact: Any = SimpleNamespace(
                manifest=SimpleNamespace(spec=spec, int8_weights=False, coarsest_products="ieee")
            )
            made[name] = draw(workload, weights, "cpu", 1000), artifact
        return made[name]

    return get


def eager(function: Any, **_: Any) -> Any:
    return function


FORMS: dict[str, Callable[[GpuProblem], list[peers.Call]]] = {
    "SDPA": lambda problem: peers.core_calls(problem, peers.sdpa(problem)),
    "SDPA by a backend": lambda problem: peers.core_calls(problem, peers.sdpa(problem, "MATH")),
    "FlexAttention": lambda problem: peers.core_calls(problem, peers.flex(problem, eager)),
}


@pytest.mark.thorough_only(
    "causal-FlexAttention", "constant mask-FlexAttention", "full-FlexAttention", "window-FlexAttention"
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [name for name, (kind, _) in SMALL.items() if kind == "core"])
def test_cores_of_peers_are_right(small: Any, name: str, form: str) -> None:
    problem, artifact = small(name)
    with torch.inference_mode():
        calls = FORMS[form](problem)
        assert len(calls) == len(problem.sets) >= 2
        assert problem.error_share(artifact, bench.first(calls[0]())) <= 2  # PyTorch's own error twice, and chance


@pytest.mark.parametrize("name", [name for name, (kind, _) in SMALL.items() if kind == "block"])
def test_blocks_of_peers_are_right(small: Any, name: str) -> None:
    problem, artifact = small(name)
    with torch.inference_mode():
        assert problem.error_share(artifact, peers.block_calls(problem)[0]()) <= 2


def test_an_output_that_is_wrong_is_told(small: Any) -> None:
    problem, artifact = small("causal")
    q, k, v = (problem.sets[0][name] for name in "qkv")
    blind = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert problem.error_share(artifact, blind) > bench.WRONG


def test_heads_are_folded_for_one_query() -> None:
    workload = Workload("decode", "core", "small", AttentionSpec(embed_dim=64, num_heads=4, num_kv_heads=2), 2, 1, 19)
    problem = draw(workload, {}, "cpu", 1000)
    q, k, v = (problem.sets[0][name] for name in "qkv")
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(peers.folded(problem)(q, k, v), expected)


def test_what_a_peer_is_not_for_it_refuses(small: Any) -> None:
    problem, _ = small("full")
    with pytest.raises(ModelError, match="one query"):
        peers.folded(problem)
    with pytest.raises(ModelError, match=r"the package flash_attn, got none"):
        peers.flash_package("flash_attn.cute", problem)


def test_flash_packages_get_their_own_layout(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, artifact = small("window")
    said: list[dict[str, Any]] = []

    class Module:
        @staticmethod
        def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **words: Any) -> Any:
            assert q.shape == (3, 37, 2, 32) and q.is_contiguous()
            said.append(words)
            core = peers.sdpa(problem)
            return core(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2), None

    monkeypatch.setattr(peers.importlib, "import_module", lambda name: Module)
    with torch.inference_mode():
        output = peers.flash_package("flash_attn_interface", problem)[0]()
    assert said == [{"causal": True, "softmax_scale": None, "window_size": (5, 0)}]
    assert problem.error_share(artifact, output) <= 2


def test_peers_are_chosen_by_name_and_kind() -> None:
    assert {peer.of for peer in peers.find(["all"], "block")} == {"block"}
    assert [peer.name for peer in peers.find(["SDPA flash", "PyTorch"], "core")] == ["SDPA flash"]
    with pytest.raises(InputError, match=r"against: expected all, or of SDPA flash.*got 'inductor'"):
        peers.find(["inductor"], "core")


def test_inputs_go_beyond_the_cache() -> None:
    workload = Workload("small", "core", "small", AttentionSpec(embed_dim=64, num_heads=2, dtype="bfloat16"), 2, 16, 16)
    size = work(workload).bytes
    assert [len(draw(workload, {}, "cpu", cache).sets) for cache in (1, 3 * size, 10**9)] == [2, 6, 16]
    first, second, *_ = draw(workload, {}, "cpu", 1).sets
    assert not torch.equal(first["q"], second["q"])


def test_the_ceilings_count_what_they_do() -> None:
    product, copied = matrix_product("cpu", 64), large_copy("cpu", 4096)
    assert (product.amount, copied.amount) == (2 * 64**3, 2 * 4096)
    assert product.call().shape == (64, 64) and copied.call().shape == (4096,)


def test_all_of_it_together_with_a_made_up_gpu() -> None:
    """Each candidate becomes a row: who runs slower is told so, who is missing stays missing."""
    watch = Gpu()
    prepared = [
        bench.Prepared(OURS, [watch.call("ours", 2e-3)], 0.4),
        MISSING,
        bench.Prepared("SDPA flash", [watch.call("flash", 3e-3)], 0.6),
    ]
    limits = (Ceiling(watch.call("matrix", 1e-3), 10**12), Ceiling(watch.call("copy", 1e-3), 10**9))
    ops = [OpReport("op_0", "attention", "cuda.attention", {"rows": 128}, "default")]
    options = bench.Options("cuda-sm90a", seconds=0.0)
    found = bench.timed(BY_NAME["e128-8k"], prepared, ops, options, limits, watch)
    assert [row.name for row in found.rows] == [OURS, "SDPA cuDNN", "SDPA flash"]
    assert found.advantage == pytest.approx(1.5) and found.ok
    assert found.ceilings.matrix_tflops == pytest.approx(1000) and found.ceilings.copy_gbs == pytest.approx(1000)
    assert found.kernels == ("attention: cuda.attention rows=128, default",)


def test_what_a_candidate_raises_becomes_its_row(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, artifact = small("causal")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def refuse(problem: GpuProblem) -> list[Any]:
        raise RuntimeError("No available kernel.\nAborting execution.")

    def wrong(problem: GpuProblem) -> list[Any]:
        return [partial(torch.zeros_like, problem.sets[0]["q"])]

    for calls, words in ((refuse, "No available kernel."), (wrong, "wrong by")):
        row = bench._attempt(peers.GpuPeer("a peer", "core", calls), problem, artifact, False)
        assert isinstance(row, GpuRow) and words in str(row.missing)
    good = bench._attempt(peers.GpuPeer("a peer", "core", FORMS["SDPA"]), problem, artifact, False)
    assert isinstance(good, bench.Prepared)


def test_a_gpu_that_is_lost_ends_the_process(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, artifact = small("causal")

    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def refuse(problem: GpuProblem) -> list[Any]:
        raise MhsaError("kernel", "an answer", "none")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        bench._attempt(peers.GpuPeer("a peer", "core", refuse), problem, artifact, False)
