"""A benchmark's report: who is in it, what the limits mean, how it is written down and drawn."""

from __future__ import annotations

import io
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

import mhsa_compile as mhsa
from mhsa_bench.bench import _floor, bench
from mhsa_bench.limits import ProductRates
from mhsa_bench.peers import registry
from mhsa_bench.peers.peer import DTYPES, WRONG, Problem
from mhsa_bench.peers.registry import Compiled
from mhsa_bench.plots import bench_plots, figure
from mhsa_bench.report import BenchReport, BenchRow, Floor
from mhsa_bench.roofline import Probe
from mhsa_compile.bench import accuracy
from mhsa_compile.bench.timing import INPUT_SETS, LEAST_ROUNDS
from mhsa_compile.bench.workloads import GROUPS, WORKLOADS, Workload, choose, compile_workload
from mhsa_compile.cli.commands.bench import _show
from mhsa_compile.errors import InputError, OutputError
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.nn.modules import MultiHeadAttention, ScaledDotProductAttention
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.verification.random_inputs import random_inputs

SAME_RATE = {"attention": 100.0, "linear": 100.0}


@pytest.fixture(scope="module")
def artifact():
    spec = mhsa.AttentionSpec(embed_dim=32, num_heads=4, mask="bool", causal=True)
    return mhsa.compile(mhsa.MultiHeadAttention(spec).eval(), dims={"B": 1})


@pytest.fixture(scope="module")
def report(artifact) -> BenchReport:
    return bench(artifact, dims={"L": 7}, threads=1, seconds=0.01)


@pytest.mark.thorough
def test_a_report_has_a_row_for_everyone(report):
    assert report.dims == {"B": 1, "L": 7, "S": 7}
    assert (report.threads, report.dtype) == (1, "float32")
    assert report.rounds >= LEAST_ROUNDS
    ours, *others = report.rows
    assert (ours.name, ours.ratio) == ("mhsa_compile", 1.0)
    assert [row.name for row in others] == ["torch", "onnxruntime"]
    assert report.ok
    for row in report.rows:
        if row.missing is None:
            assert min(row.median_us, row.ratio, row.gflops, row.share_of_peak, row.share_of_limit) > 0
            assert row.share_of_peak == pytest.approx(row.gflops / report.peak_gflops)
            assert row.share_of_limit == pytest.approx(report.floor.us / row.median_us)
            assert 0 <= row.error_share < WRONG


def test_an_artifact_for_a_gpu_is_timed_elsewhere(artifact):
    target = load_profile("cuda-sm90a")
    of_gpu = Artifact(artifact.path, msgspec.structs.replace(artifact.manifest, target=target))
    with pytest.raises(InputError, match=r"artifact: expected one for a CPU.*got one for cuda\. benchmarks/gpu\.py"):
        bench(of_gpu, dims={"L": 7})


def test_the_floor_counts_visible_pairs_and_each_byte_once(report):
    projections, pairs = 4 * 2 * 7 * 32 * 32, 7 * 8 // 2
    assert report.floor.flops == projections + 2 * 2 * pairs * 32
    weights, activations, mask = 4 * 4 * (32 * 32 + 32), 2 * 4 * 7 * 32, 7 * 7
    assert report.floor.bytes == weights + activations + mask
    assert report.floor.limit == "compute"  # all of that stays in the cache
    assert report.floor.memory_us is None


def test_bytes_bind_where_the_inputs_leave_the_cache(artifact):
    problem = Problem(artifact, [random_inputs(artifact.manifest, {"L": 7})] * INPUT_SETS)
    inside, outside = (_floor(problem, SAME_RATE, 1.0, cache) for cache in (1 << 20, 1 << 10))
    assert (inside.limit, inside.memory_us) == ("compute", None)
    assert outside.limit == "memory"
    weights = 4 * 4 * (32 * 32 + 32)
    moving = outside.bytes - weights
    kept = 1 << 10  # by the cache, since the calls went through these inputs last
    from_memory = (INPUT_SETS * moving + weights - kept) / INPUT_SETS
    assert outside.us == pytest.approx(from_memory / 1e3)  # 1 GB/s is 1000 bytes a microsecond


def test_no_limit_is_stated_for_products_in_eight_bits(artifact):
    """Products in eight bits have another rate than that of float32, of which they would be more than all."""
    eight = replace(artifact, manifest=msgspec.structs.replace(artifact.manifest, int8_weights=True))
    with ExitStack() as stack:
        rates = ProductRates.opened(stack, eight.manifest, 1, "float32").by_kind([100.0])
    assert rates == {"attention": 100.0}
    problem = Problem(eight, [random_inputs(artifact.manifest, {"L": 7})])
    assert _floor(problem, rates, 1.0, 1 << 20) is None


def test_products_by_terms_have_the_rate_of_tiles_by_the_number_of_terms(artifact):
    probe = Probe(lambda: None, 1)
    rates = ProductRates(probe, probe, {"attention": "ieee", "linear": "bf16x6"}).by_kind([200.0, 2400.0])
    assert rates == {"attention": 200.0, "linear": 400.0}
    problem = Problem(artifact, [random_inputs(artifact.manifest, {"L": 7})])
    plain, by_terms = (_floor(problem, gflops, 1.0, 1 << 20) for gflops in ({**rates, "linear": 200.0}, rates))
    projections = 4 * 2 * 7 * 32 * 32
    assert plain.compute_us - by_terms.compute_us == pytest.approx(projections / 400.0 / 1e3)


def test_times_that_spread_over_a_quarter_are_named():
    rows = [BenchRow("mhsa_compile", 10.0, 0.26, 1.0), BenchRow("torch", 20.0, 0.24, 2.0), BenchRow("iree", missing="")]
    report = BenchReport({}, "float32", 1, 5, 400.0, 0.01, 40.0, None, 1e-6, tuple(rows))
    assert report.unsteady == rows[:1]
    with redirect_stdout(io.StringIO()) as out:
        _show("tiny", report)
    assert "a quarter of their median (mhsa_compile by 26%)" in out.getvalue()


def test_who_is_faster_than_the_limit_is_named():
    floor = Floor("compute", 100.0, None, 10**6, 10**5)
    rows = (
        BenchRow("mhsa_compile", 74.0, 0.01, 1.0, share_of_limit=1.35),
        BenchRow("torch", 200.0, share_of_limit=0.5),
    )
    report = BenchReport({}, "float32", 1, 5, 400.0, 0.01, 40.0, floor, 1e-6, rows)
    assert report.beyond_limit == ["mhsa_compile"]


@pytest.mark.thorough
def test_onnxruntime_says_which_masks_its_attention_takes():
    key_padding = mhsa.compile(mhsa.AttentionSpec(embed_dim=16, num_heads=2, mask="key_padding"))
    report = bench(key_padding, against=("onnxruntime",), dims={"B": 2, "L": 7}, threads=1, seconds=0.01)
    assert "a mask with a row for each query" in report.rows[1].missing
    assert "--against onnxruntime-fused" in report.rows[1].missing


def test_what_cannot_run_is_a_row_that_says_why(artifact, monkeypatch: pytest.MonkeyPatch):
    class Broken(Compiled):
        name = "broken"

        @contextmanager
        def open(self, problem, threads):
            with super().open(problem, threads) as opened:
                yield replace(opened, calls=[lambda: {}["no such kernel\nand a long trace"]])

    class Wrong(Compiled):
        name = "wrong"

        @contextmanager
        def open(self, problem, threads):
            with super().open(problem, threads) as opened:
                yield replace(opened, arrays=lambda result: [result + 0.01])

    monkeypatch.setattr(registry, "PEERS", (Broken(), Wrong(), *registry.PEERS))
    foreign = replace(artifact, manifest=msgspec.structs.replace(artifact.manifest, spec=None))
    report = bench(foreign, against=("broken", "wrong", "torch"), dims={"L": 7}, threads=1, seconds=0.01)
    ours, broken, wrong, torch_row = report.rows
    assert ours.median_us is not None
    assert ours.error_share <= 1  # against the graph itself
    assert ours.gflops is report.floor is None  # nobody counted a foreign model's FLOPs
    assert "no such kernel" in broken.missing
    assert broken.median_us is None
    assert "times the budget" in wrong.missing
    assert "compiled from a spec" in torch_row.missing
    assert report.best_peer is None


@pytest.mark.parametrize(
    ("dims", "reason"),
    [({"B": 2, "L": 7}, "B = 1: the artifact fixes it"), ({"L": 7, "S": 5}, "S is L"), ({}, "'L'")],
)
def test_contradictory_dims_are_refused(artifact, dims, reason):
    with pytest.raises(InputError, match=reason):
        bench(artifact, against=(), dims=dims, threads=1, seconds=0.01)


def test_inputs_differ_between_calls(artifact):
    sets = [random_inputs(artifact.manifest, {"L": 7}, seed)["x"] for seed in range(INPUT_SETS)]
    assert len({array.tobytes() for array in sets}) == INPUT_SETS


SPECS = {
    "self": {},
    "gqa-causal": {"num_kv_heads": 2, "causal": True},
    "cross-bottom-right": {"kv_embed_dim": 12, "causal": "bottom_right", "bias": False, "scale": 0.3},
    "values-apart": {"kv_embed_dim": 12, "v_embed_dim": 5, "mask": "key_padding"},
    "window": {"causal": True, "window": (17, 0)},
    "static": {"static_mask": {"kind": "longformer", "window": 6, "global_tokens": 2}},
    **{mask: {"mask": mask, "v_head_dim": 6} for mask in ("bool", "additive", "key_padding")},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("module", [MultiHeadAttention, ScaledDotProductAttention])
@pytest.mark.parametrize("fields", SPECS.values(), ids=SPECS.keys())
def test_sampled_rows_are_those_of_the_module(module, fields):
    import torch

    from mhsa_compile.nn.functional import to_numpy, to_torch

    spec = mhsa.AttentionSpec(embed_dim=16, num_heads=4, **fields)
    core = module is ScaledDotProductAttention
    cases = [case for case in CASES if spec.is_cross or core or case["L"] == case["S"]]
    built = module(spec).to(getattr(torch, spec.dtype)).eval()
    weights = {name: to_numpy(tensor) for name, tensor in built.named_parameters()}
    wide = module(spec).double()
    wide.load_state_dict({name: to_torch(array).double() for name, array in weights.items()})
    for dims in cases:
        inputs = draw(spec, core, **dims)
        fields = [("spec", mhsa.AttentionSpec), ("int8_weights", bool, False), ("coarsest_products", str, "ieee")]
        manifest = msgspec.defstruct("Stub", fields)(spec)
        truth = accuracy.truth(msgspec.defstruct("Stub", ["manifest"])(manifest), inputs, weights)
        tensors = {
            n: t.double() if t.is_floating_point() else t for n, t in ((n, to_torch(a)) for n, a in inputs.items())
        }
        with torch.no_grad():
            exact = wide(**tensors).numpy()
        assert truth.share([exact]) < 1e-6
        assert truth.share([exact + 2 * truth.budget]) > 1
        assert len(truth.rows) == min(dims["L"], accuracy.ROWS)


CASES = ({"B": 3, "L": 7, "S": 7}, {"B": 1, "L": 197, "S": 197}, {"B": 2, "L": 5, "S": 11})


def draw(spec: mhsa.AttentionSpec, core: bool, B: int, L: int, S: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    H, G, E, F = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim
    if core:
        shapes = {"q": (B, H, L, E), "k": (B, G, S, E), "v": (B, G, S, F)}
    else:
        widths = spec.embed_dim, spec.source_dim, spec.v_source_dim
        rows = zip(("x", *spec.sources), widths, strict=True)
        shapes = {name: (B, L if name == "x" else S, width) for name, width in rows}
    dtype = DTYPES[spec.dtype]
    inputs = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    if spec.mask == "key_padding":
        inputs["mask"] = rng.random((B, S)) < 0.8
    elif spec.mask is not None:
        inputs["mask"] = rng.random((B, 1, L, S)) < 0.8
        if spec.mask == "additive":
            inputs["mask"] = np.where(inputs["mask"], rng.standard_normal((B, 1, L, S)), -np.inf).astype(dtype)
    return inputs


def test_workloads_are_consistent():
    assert len({workload.name for workload in WORKLOADS}) == len(WORKLOADS)
    for workload in WORKLOADS:
        assert workload.dims == {"B": workload.B, "L": workload.L, "S": workload.S}
        assert workload.spec.is_cross or workload.kind == "core" or workload.L == workload.S
    for group in GROUPS:
        assert all(workload.group == group for workload in choose([group]))
    assert choose(["all"]) == WORKLOADS
    with pytest.raises(InputError, match=r"a group \(blocks, .* got 'blcks'"):
        choose(["blcks"])


def test_workloads_have_other_dtypes():
    workload = choose(["tiny"])[0]
    assert workload.at("float32") is workload
    assert (workload.at("bfloat16").name, workload.at("bfloat16").spec.dtype) == ("tiny-bfloat16", "bfloat16")


@pytest.mark.thorough_but("core-inputs1")
@pytest.mark.parametrize(("kind", "inputs"), [("block", ["x"]), ("core", ["q", "k", "v"])])
def test_a_workload_is_compiled_as_its_kind_says(kind, inputs):
    workload = Workload("small", kind, "tests", mhsa.AttentionSpec(embed_dim=16, num_heads=2), 1, 5, 5)
    artifact = compile_workload(workload)
    assert [info.name for info in artifact.manifest.inputs] == inputs
    assert artifact.manifest.inputs[0].dims[0] == 1


def invented() -> dict[str, BenchReport]:
    """A report for every workload, without a measurement."""
    reports = {}
    for place, workload in enumerate(WORKLOADS):
        floor = Floor("compute", 100.0 * (place + 1), None, 10**6 * (place + 1), 5 * 10**5)
        rows = [BenchRow("mhsa_compile", 1.2 * floor.us, 0.01, 1.0, 200.0, 0.5, 0.83, 0.3)]
        rows += [BenchRow(p.name, 3.0 * floor.us, 0.01, 2.5, 80.0, 0.2, 0.33, 0.4) for p in registry.PEERS[:-1]]
        rows += [BenchRow(registry.PEERS[-1].name, missing="of no use")]
        reports[workload.name] = BenchReport(
            workload.dims, "float32", 2, 9, 400.0, 0.01, 40.0, floor, 1e-6, tuple(rows)
        )
    return reports


def test_reports_are_written_and_read():
    reports = invented()
    assert msgspec.json.decode(msgspec.json.encode(reports), type=dict[str, BenchReport]) == reports


@pytest.mark.parametrize("picture", [bench_plots.shares, bench_plots.growth, bench_plots.roofline])
def test_pictures_are_drawn(picture, tmp_path: Path):
    pytest.importorskip("matplotlib")
    reports = invented()
    picture(reports, tmp_path / "all.svg")
    text = (tmp_path / "all.svg").read_text()
    expected = {"shares": "bigbird4096", "growth": "ours, dense", "roofline": "40 GB/s"}[picture.__name__]
    assert expected in text
    picture(reports, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == text  # a picture that is committed changes with its figures only
    picture({name: reports[name] for name in ("core512", "dense2048")}, tmp_path / "two.png")
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.svg", "all.svg", "two.png"]


def test_every_peer_has_a_colour():
    assert list(bench_plots.PEERS) == [peer.name for peer in registry.PEERS]
    assert {*bench_plots.DENSE, *bench_plots.WINDOW, *bench_plots.SPARSE} <= {workload.name for workload in WORKLOADS}


def test_pictures_that_cannot_be_written_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"\.svg, \.png or \.pdf, got .*figure\.txt"):
        figure.check_path(tmp_path / "figure.txt")
    with pytest.raises(OutputError, match="folder that exists"):
        figure.check_path(tmp_path / "nowhere" / "figure.svg")
