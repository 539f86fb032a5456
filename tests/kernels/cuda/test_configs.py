"""A slice of `make cuda-configs`: of each kernel and target one config down to machine code; that what it compiles is
what there is, and that what is wrong would be found."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from campaigns import cuda_configs as campaign
from campaigns.cuda_configs import Job, Outcome, profile_of
from support.cuda import cuda_code
from support.cuda.cuda_code import Launch, Lowered, MachineCode
from support.cuda.cuda_configs import CASES, HOPPER, TARGETS, WHOLE, Case, covering, kernel_of, space

from mhsa_compile.compiler.codegen import cuda_compiler
from mhsa_compile.kernels.registry import KERNELS
from mhsa_compile.tuning.search.space import Point

slow = pytest.mark.cuda  # of `make test-cuda`
OF_HOPPER = {"cuda.attention_hopper", "cuda.linear_hopper"}
PAIRS = sorted({(case.kernel, target) for case in CASES for target in case.targets})


@pytest.mark.thorough_only(
    "cuda.linear_float32-*",
    "cuda.attention-cuda-sm80",
    "cuda.attention-cuda-sm86",
    "cuda.decode-cuda-sm80",
    "cuda.linear-cuda-sm80",
    "cuda.linear_hopper-cuda-sm90a",
    "cuda.present-cuda-sm80",
    "cuda.scatter-cuda-sm80",
    "cuda.statistics-cuda-sm80",
    "cuda.weights-cuda-sm80",
)
@slow
@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize(("kernel", "target"), PAIRS)
def test_one_config(kernel: str, target: str, tmp_path: Path) -> None:
    """The config is drawn from all of an operation that is drawn, the same ones every time."""
    draw = random.Random(f"{kernel} {target}")
    number = draw.choice([i for i, case in enumerate(CASES) if case.kernel == kernel and target in case.targets])
    job = Job(number, target, draw.choice(space(CASES[number], profile_of(target))))
    outcome = campaign.done(job, cuda_compiler.compiler()[0], tmp_path)
    assert not outcome.wrong, f"{job}: {outcome.wrong}"
    assert outcome.source and outcome.registers > 0 and (outcome.products > 0) >= (kernel in campaign.MULTIPLIES)


def test_every_kernel_has_operations_on_every_target_it_is_made_for() -> None:
    kernels = {kernel.name for kernel in KERNELS["cuda"]}
    everywhere = {(kernel, target) for kernel in kernels - OF_HOPPER for target in TARGETS}
    assert set(PAIRS) == everywhere | {(kernel, HOPPER) for kernel in OF_HOPPER}


@slow
def test_every_operation_is_taken_and_has_the_default_among_its_points() -> None:
    for case in CASES:
        for target in case.targets:
            kernel, profile = kernel_of(case.kernel), profile_of(target)
            points = space(case, profile)
            assert kernel.default_config(case.op, profile) in [point.config for point in points], (case, target)


def test_pairs_that_occur_are_covered_by_few() -> None:
    """The space has a hole: large values do not come together."""
    knobs = {"a": range(5), "b": range(4), "c": range(3), "d": range(3)}
    points = [Point.of("k", dict(zip(knobs, v, strict=True))) for v in itertools.product(*knobs.values()) if sum(v) < 8]

    def pairs(some: list[Point]) -> set[Any]:
        return {pair for point in some for pair in itertools.combinations(point.knobs, 2)}

    chosen = covering(points, 2)
    assert pairs(chosen) == pairs(points) and len(chosen) < len(points) / 4 and set(chosen) <= set(points)
    assert chosen == covering(points, 2) and covering(points, 0) == points
    assert len(covering(points, 3)) > len(chosen)


LINEAR = next(case for case in CASES if case.kernel == "cuda.linear")
FLOAT32 = next(case for case in CASES if case.kernel == "cuda.linear_float32")
LOWERED = Lowered("extern __shared__ int pool[];", "", (Launch("run_kernel", 256, 90 << 10),))
CODE = MachineCode({"run_kernel": 200}, 0, ("HMMA",), "")
FAULTS: dict[str, tuple[str, Case, dict[str, Any], dict[str, Any]]] = {
    "a store": ("1 accesses", LINEAR, {}, {"order": ("HMMA", "STL")}),
    "a frame": ("8 bytes of local memory", LINEAR, {}, {"stack": 8}),
    "registers": ("of 300 registers", LINEAR, {}, {"registers_of": {"run_kernel": 300}}),
    "threads": ("2048 threads", LINEAR, {"launches": (Launch("run_kernel", 2048, 0),)}, {}),
    "shared memory": ("200000 bytes", LINEAR, {"launches": (Launch("run_kernel", 32, 200000),)}, {}),
    "hidden memory": ("beside what", LINEAR, {"text": "__shared__ int pool[64];"}, {}),
    "no launch": ("launches nothing", LINEAR, {"launches": ()}, {}),
    "no product": ("no HMMA", LINEAR, {}, {"order": ("FFMA",)}),
    "narrow product": ("float32 on tensor cores", FLOAT32, {}, {"order": ("FFMA", "HMMA")}),
    "serialized": ("ptxas: C7510", LINEAR, {}, {"said": "warning C7510: Potential Performance Loss: wgmma"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_found(fault: str) -> None:
    words, case, lowered, code = FAULTS[fault]
    profile = profile_of("cuda-sm86")
    assert not [*campaign.wrongs(LINEAR, profile, LOWERED, CODE)]
    (found,) = campaign.wrongs(case, profile, replace(LOWERED, **lowered), replace(CODE, **code))
    assert words in found


def test_a_multiprocessor_holds_as_many_blocks_as_a_config_says() -> None:
    found = [[*campaign.wrongs(LINEAR, profile_of("cuda-sm86"), LOWERED, CODE, blocks)] for blocks in (1, 2)]
    assert not found[0] and "holds 1, not 2" in found[1][0]


def a_job() -> Job:
    number = next(i for i, case in enumerate(CASES) if case.kernel == "cuda.present")
    return Job(number, "cuda-sm80", Point("cuda.present", ()))


def test_what_does_not_compile_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refusals = [subprocess.CalledProcessError(1, "nvcc", "", "error: too many"), RuntimeError("error: too many")]
    for refused in refusals:
        monkeypatch.setattr(cuda_code, "machine_code", lambda *_, error=refused, **__: (_ for _ in ()).throw(error))
        (words,) = campaign.done(a_job(), "nvcc", tmp_path).wrong
        assert "error: too many" in words


def test_a_source_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times = []

    def machine_code(text: str, arch: str, folder: Path, *, by_nvrtc: bool) -> MachineCode:
        times.append(by_nvrtc)
        for name in ("kernel.cu", "kernel.cubin"):
            (folder / name).touch()
        return CODE

    monkeypatch.setattr(cuda_code, "machine_code", machine_code)
    first, second = (campaign.done(a_job(), "nvrtc", tmp_path) for _ in range(2))
    assert first == second and not first.wrong and first.source and times == [True]


@pytest.mark.parametrize("wrong", [(), ("spills",)])
def test_the_figures_of_a_campaign(
    wrong: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def outcomes(todo: Any, *_: Any) -> list[Outcome]:
        assert len(todo) > 1 and all(count == 1 <= WHOLE for _, count in todo)
        return [Outcome(job, "one", 20 + i, 1024, 3 * bool(wrong), 0, wrong) for i, (job, _) in enumerate(todo)]

    monkeypatch.setattr(campaign, "campaign", outcomes)
    path = tmp_path / "build" / "figures.json"
    words = ["--compiler", "nvrtc", "--kernels", "cuda.present", "--targets", "cuda-sm80", "--json", str(path)]
    assert campaign.main(words) == bool(wrong)
    written, spilled = json.loads(path.read_text()), 3 if wrong else 0
    (row,) = written["rows"]
    count = len(written["outcomes"])
    assert list(row.values()) == [
        *("cuda.present", "cuda-sm80", count, count, count, 1, count),
        *(spilled and count, spilled, 19 + count, 1024, spilled and count),
    ]
    assert f"{spilled and count} of them wrong" in capsys.readouterr().out
