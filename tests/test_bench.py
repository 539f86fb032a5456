"""The timing protocol on a clock of the test's own, the peers against our module, the peak's loop against NumPy."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import mhsa_compile as mhsa
from mhsa_compile import peers
from mhsa_compile.artifact import TensorInfo
from mhsa_compile.bench import BURST, INPUT_SETS, LEAST_ROUNDS, SETTLE, bench, interleave
from mhsa_compile.errors import InputError
from mhsa_compile.model import weights
from mhsa_compile.peak import _fma_loop, fma_peak
from mhsa_compile.profile import detect
from mhsa_compile.verify import random_inputs
from mhsa_compile.workloads import WORKLOADS

DIMS = {"B": 2, "L": 7, "S": 5}


class Clock:
    """Time passes only in calls; `log` keeps who was called when."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[tuple[str, float]] = []

    def __call__(self) -> float:
        return self.now

    def call(self, name: str, seconds: float, first: float | None = None):
        """Takes `seconds`, but `first` after somebody else's call."""

        def run() -> None:
            disturbed = not self.log or self.log[-1][0][0] != name[0]
            self.log.append((name, self.now))
            self.now += first if disturbed and first is not None else seconds

        return run

    def turns(self) -> list[str]:
        names = [name[0] for name, _ in self.log]
        return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


def test_candidates_take_turns_and_disturbed_calls_do_not_count():
    clock = Clock()
    fast, slow = clock.call("a", 1e-4, first=3e-3), clock.call("b", 0.1, first=0.2)
    samples = interleave([[fast], [slow]], 0.0, clock)
    assert [len(rounds) for rounds in samples] == [LEAST_ROUNDS] * 2
    assert samples[0] == pytest.approx([1e-4] * LEAST_ROUNDS)
    assert samples[1] == pytest.approx([0.1] * LEAST_ROUNDS)
    # The warm-up is a b; then rounds in alternating order, whose neighbours meet: a b, b a, a b, b a, a b.
    assert clock.turns() == ["a", "b", "a", "b", "a", "b", "a", "b"]


def test_a_turn_settles_and_then_lasts_as_long_as_a_burst():
    clock = Clock()
    interleave([[clock.call("a", 1e-3)], [clock.call("b", 1e-3)]], 0.0, clock)
    first_turn = [name for name, _ in clock.log].index("b")  # calls of a millisecond each
    assert first_turn * 1e-3 == pytest.approx(SETTLE + BURST, abs=2e-3)


def test_calls_go_through_all_sets_of_inputs_for_as_long_as_asked():
    clock = Clock()
    (samples,) = interleave([[clock.call(f"a{i}", 1e-3 * (i + 1)) for i in range(3)]], 1.0, clock)
    assert [name for name, _ in clock.log[:4]] == ["a0", "a1", "a2", "a0"]
    assert samples == pytest.approx([2e-3] * len(samples))
    assert clock.now == pytest.approx(1.0 + SETTLE + BURST, abs=0.05)


def test_workloads_are_consistent():
    assert len({workload.name for workload in WORKLOADS}) == len(WORKLOADS)
    for workload in WORKLOADS:
        assert workload.dims == {"B": workload.B, "L": workload.L, "S": workload.S}
        assert workload.spec.is_cross or workload.L == workload.S


def test_the_peak_loop_multiplies_and_adds():
    import tvm

    loop = tvm.compile(tvm.IRModule({"fma": _fma_loop(4, 3).with_attr("global_symbol", "fma")}), target="llvm")["fma"]
    total = tvm.runtime.tensor(np.zeros(4, np.float32))
    loop(tvm.runtime.tensor(np.array([3.0, 0.5], np.float32)), total, 2)
    expected = sum((start * 3 + 0.5) * 3 + 0.5 for start in range(3))
    assert total.numpy().tolist() == [expected] * 4


def test_the_peak_counts_what_all_threads_do():
    with fma_peak(detect(), 1) as one, fma_peak(detect(), 2) as two:
        one.run()
        two.run()
        assert two.flops == 2 * one.flops > 0


SPECS = {
    "self": {},
    "no-bias-f": {"bias": False, "v_head_dim": 6, "scale": 0.3},
    "gqa-causal": {"num_kv_heads": 2, "causal": True},
    "cross": {"kv_embed_dim": 12},
    "cross-top-left": {"kv_embed_dim": 12, "causal": "top_left"},
    "cross-bottom-right": {"kv_embed_dim": 12, "causal": "bottom_right"},
    **{mask: {"mask": mask} for mask in ("bool", "additive", "key_padding")},
    **{f"{mask}-causal": {"mask": mask, "causal": True} for mask in ("bool", "additive", "key_padding")},
    "cross-additive-bottom-right": {"kv_embed_dim": 12, "mask": "additive", "causal": "bottom_right"},
}


def stand_in(module: torch.nn.Module, folder: Path, inputs: dict[str, tuple[int | str, ...]]):
    """What a peer sees of an artifact."""
    spec = module.spec
    if spec.mask is not None:
        length = "S" if "S" in str(inputs) else "L"
        inputs["mask"] = ("B", length) if spec.mask == "key_padding" else ("B", 1, "L", length)
    infos = [
        TensorInfo(name, "bool" if name == "mask" and spec.mask != "additive" else "float32", dims)
        for name, dims in inputs.items()
    ]
    tensors = weights(module)
    save_file(tensors, folder / "weights.safetensors")
    return SimpleNamespace(path=folder, manifest=SimpleNamespace(spec=spec.to_dict(), weights=tensors, inputs=infos))


def torch_and_ours(module: torch.nn.Module, artifact) -> tuple[np.ndarray, np.ndarray]:
    inputs = random_inputs(artifact.manifest, DIMS, 3)
    with torch.no_grad():
        expected = module(**{name: torch.from_numpy(array) for name, array in inputs.items()}).numpy()
    peer, before = peers.TorchEager(), torch.get_num_threads()
    with peer.open(artifact, 1) as bind:
        (y,) = peer.arrays(bind(inputs)())
    assert torch.get_num_threads() == before
    return y, expected


@pytest.mark.parametrize("fields", SPECS.values(), ids=SPECS.keys())
def test_the_torch_peer_computes_what_our_module_does(fields, tmp_path: Path):
    spec = mhsa.AttentionSpec(embed_dim=16, num_heads=4, **fields)
    inputs = {"x": ("B", "L", 16), **({"context": ("B", "S", 12)} if spec.is_cross else {})}
    module = mhsa.MultiHeadAttention(spec)
    y, expected = torch_and_ours(module, stand_in(module, tmp_path, inputs))
    np.testing.assert_allclose(y, expected, atol=1e-6)


@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
def test_the_torch_peer_knows_the_core_alone(causal, tmp_path: Path):
    module = mhsa.ScaledDotProductAttention(mhsa.AttentionSpec(embed_dim=16, num_heads=4, causal=causal, mask="bool"))
    inputs = {"q": ("B", 4, "L", 4), "k": ("B", 4, "S", 4), "v": ("B", 4, "S", 4)}
    y, expected = torch_and_ours(module, stand_in(module, tmp_path, inputs))
    np.testing.assert_allclose(y, expected, atol=1e-6)


def test_unknown_peers_are_refused():
    assert [peer.name for peer in peers.find(["onnxruntime", "torch", "torch"])] == ["onnxruntime", "torch"]
    with pytest.raises(InputError, match="torch, onnxruntime, got 'magic'"):
        peers.find(["torch", "magic"])


@pytest.fixture(scope="module")
def artifact():
    spec = mhsa.AttentionSpec(embed_dim=32, num_heads=4, mask="bool", causal=True)
    return mhsa.compile(mhsa.MultiHeadAttention(spec).eval(), dims={"B": 1})


def test_a_report_has_a_row_for_everyone(artifact, tmp_path: Path):
    report = bench(artifact.save(tmp_path / "saved.mhsa").path, dims={"L": 7}, threads=1, seconds=0.01)
    assert report.dims == {"B": 1, "L": 7, "S": 7}
    assert report.threads == 1
    assert report.rounds >= LEAST_ROUNDS
    ours, *others = report.rows
    assert (ours.name, ours.ratio, ours.max_difference) == ("mhsa_compile", 1.0, 0.0)
    assert [row.name for row in others] == ["torch", "onnxruntime"]
    for row in report.rows:
        if row.missing is None:
            assert min(row.median_us, row.ratio, row.gflops, row.share_of_peak) > 0
            assert row.max_difference < 1e-5
            assert row.share_of_peak == pytest.approx(row.gflops / report.peak_gflops)


def test_what_cannot_run_is_a_row_that_says_why(artifact, monkeypatch: pytest.MonkeyPatch):
    class Broken(peers.Compiled):
        name = "broken"

        @contextmanager
        def open(self, artifact, threads):
            yield lambda inputs: lambda: {}["no such kernel\nand a long trace"]

    monkeypatch.setattr(peers, "PEERS", (Broken(), peers.TorchEager()))
    foreign = replace(artifact, manifest=msgspec.structs.replace(artifact.manifest, spec=None))
    report = bench(foreign, against=("broken", "torch"), dims={"L": 7}, threads=1, seconds=0.01)
    ours, broken, torch_row = report.rows
    assert ours.median_us is not None
    assert ours.gflops is None  # nobody counted a foreign model's FLOPs
    assert "no such kernel" in broken.missing
    assert broken.median_us is None
    assert "compiled from a spec" in torch_row.missing


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
