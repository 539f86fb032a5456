"""Every peer, in every form, computes what the module does, within the error budget; those that cannot say why."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import mhsa_compile as mhsa
from mhsa_bench.peers import iree, onnxruntime, openvino, registry, torch_compile, torch_eager
from mhsa_bench.peers.peer import WRONG, Problem
from mhsa_bench.peers.registry import Fastest
from mhsa_compile.bench import accuracy
from mhsa_compile.compiler import package
from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.frontend.export.export import export
from mhsa_compile.runtime.artifact.manifest import MODEL, WEIGHTS
from mhsa_compile.runtime.artifact.tensor_file import read_tensors
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.verification.random_inputs import random_inputs

# Inductor's own use of it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")

PACKAGES = {iree: "iree", onnxruntime: "onnxruntime", openvino: "openvino"}
FORMS = [
    *((torch_eager, form) for form in torch_eager.FORMS),
    *((torch_compile, form) for form in torch_compile.FORMS),
    (onnxruntime, onnxruntime.OnnxRuntimeOwnGraph()),
    *((onnxruntime, form) for form in onnxruntime.FUSED),
    *((openvino, form) for form in openvino.FORMS),
    (iree, iree.Iree()),
]
BLOCK, CORE = mhsa.MultiHeadAttention, mhsa.ScaledDotProductAttention
PROBLEMS = {
    "block": (BLOCK, {}, {"B": 2, "L": 7}),
    "core-gqa-causal": (CORE, {"num_kv_heads": 2, "causal": True}, {"B": 2, "L": 7, "S": 7}),
}
# Elsewhere only what is quick to open: the two that compile have shown above that they read the same graphs.
MORE = {
    "cross": (BLOCK, {"kv_embed_dim": 12, "causal": "bottom_right", "bias": False}, {"B": 2, "L": 5, "S": 7}),
    "values-apart": (BLOCK, {"kv_embed_dim": 12, "v_embed_dim": 5}, {"B": 2, "L": 5, "S": 7}),
    "block-causal": (BLOCK, {"causal": True, "scale": 0.3, "v_head_dim": 6}, {"B": 1, "L": 7}),
    "block-window": (BLOCK, {"causal": True, "window": (3, 0)}, {"B": 1, "L": 7}),
    "core-static": (CORE, {"static_mask": {"kind": "longformer", "window": 4}}, {"B": 1, "L": 9, "S": 9}),
    "core-decode": (CORE, {"num_kv_heads": 1}, {"B": 2, "L": 1, "S": 17}),
    "core-bool": (CORE, {"mask": "bool"}, {"B": 1, "L": 3, "S": 8}),
    "block-key-padding": (BLOCK, {"mask": "key_padding"}, {"B": 2, "L": 8}),
    "block-additive-causal": (BLOCK, {"mask": "additive", "causal": True}, {"B": 1, "L": 3}),
    "core-bfloat16": (CORE, {"dtype": "bfloat16"}, {"B": 1, "L": 7, "S": 7}),
    "block-bfloat16": (BLOCK, {"dtype": "bfloat16"}, {"B": 1, "L": 7}),
}
QUICK = [(room, form) for room, form in FORMS if room is not torch_compile and room is not iree]


@pytest.fixture(scope="module")
def problem(tmp_path_factory) -> Callable[[str], Problem]:
    """A function that gives, by name, what a peer sees of an artifact, without our kernels, which would take longer
    than all of the peers."""

    @cache
    def make(name: str) -> Problem:
        kind, fields, dims = (PROBLEMS | MORE)[name]
        torch.manual_seed(0)
        module = kind(mhsa.AttentionSpec(embed_dim=32, num_heads=4, **fields)).eval()
        model, folder = export(module, dims=dims), tmp_path_factory.mktemp(name)
        weights = [parameter for parameter, _ in module.named_parameters()]
        package.write(model, weights, folder / WEIGHTS, folder / MODEL)
        inputs = [random_inputs(model, {}, seed) for seed in range(2)]
        infos = [SimpleNamespace(name=name, dtype=str(array.dtype)) for name, array in inputs[0].items()]
        manifest = SimpleNamespace(
            files={},
            spec=module.spec,
            weights=weights,
            inputs=infos,
            outputs=[],
            int8_weights=False,
            coarsest_products="ieee",
        )
        stored = {"contents": partial(contents, folder), "weights": lambda: stored_weights(folder)}
        artifact = SimpleNamespace(path=folder, manifest=manifest, **stored)
        found = Problem(artifact, inputs)
        return replace(found, error_share=accuracy.truth(found.artifact, found.inputs[0], found.weights).share)

    return make


def contents(folder: Path, *names: str) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


def stored_weights(folder: Path) -> dict[str, np.ndarray]:
    with (folder / WEIGHTS).open("rb") as file:
        return read_tensors(file, os.fstat(file.fileno()).st_size)


def outcome(room, form, problem: Problem) -> str:
    """right, wrong, or refused."""
    if find_spec(PACKAGES.get(room, "torch")) is None:
        pytest.skip(f"{PACKAGES[room]} is not installed")
    before = torch.get_num_threads()
    try:
        with form.open(problem, 1) as opened:
            assert len(opened.calls) == 2
            results = [opened.arrays(call()) for call in reversed(opened.calls)]
    except Exception as error:
        if room in (torch_eager, torch_compile, iree) and not isinstance(error, ModelError):
            raise  # the errors of the others are their own
        return "refused"
    finally:
        assert torch.get_num_threads() == before
    return "right" if problem.error_share(results[-1]) < WRONG else "wrong"


def ids(pair) -> str:
    return f"{pair[0].__name__.rpartition('.')[2]}-{pair[1].name}"


@pytest.mark.thorough_only(
    "*-SDPA-block",
    "*-SDPA-core-gqa-causal",
    "iree-iree-block",
    "openvino-Attention-block",
    "torch_compile-FlexAttention-core-gqa-causal",
    "torch_compile-SDPA, symbolic-block",
    "torch_compile-products, symbolic-block",
    "torch_compile-products-*",
    "torch_eager-SDPA, heads folded-block",
    "torch_eager-SDPA, heads folded-core-gqa-causal",
)
@pytest.mark.parametrize(
    ("pair", "name"),
    [
        (pair, name)
        for pair in FORMS
        for name in PROBLEMS
        if not (pair[1].name.endswith(", symbolic") and name != "block")  # inductor takes twice as long
    ],
    ids=lambda value: value if isinstance(value, str) else ids(value),
)
def test_every_form_computes_what_the_module_does(pair, name, problem):
    expected = "refused" if name in NO_USE.get(ids(pair), ()) else "right"
    assert outcome(*pair, problem(name)) == expected


@pytest.mark.thorough_only(
    "openvino-Attention-values-apart",
    "torch_eager-SDPA, heads folded-block-additive-causal",
    "torch_eager-SDPA, heads folded-block-bfloat16",
    "torch_eager-SDPA, heads folded-block-causal",
    "torch_eager-SDPA, heads folded-block-key-padding",
    "torch_eager-SDPA, heads folded-block-window",
    "torch_eager-SDPA, heads folded-core-bfloat16",
    "torch_eager-SDPA, heads folded-core-bool",
    "torch_eager-SDPA, heads folded-core-decode",
    "torch_eager-SDPA, heads folded-cross",
    "torch_eager-SDPA, heads folded-values-apart",
    "torch_eager-SDPA-block-*",
    "torch_eager-SDPA-core-bfloat16",
    "torch_eager-SDPA-core-bool",
    "torch_eager-SDPA-core-decode",
    "torch_eager-SDPA-core-static",
    "torch_eager-SDPA-cross",
    "torch_eager-SDPA-values-apart",
)
@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("pair", QUICK, ids=ids)
def test_quick_forms_compute_the_rest_or_refuse(pair, name, problem):
    expected = "refused" if name in NO_USE.get(ids(pair), ()) else WRONG_READING.get((ids(pair), name), "right")
    assert outcome(*pair, problem(name)) == expected


@pytest.mark.thorough
@pytest.mark.parametrize(("form", "name"), [(5, "core-static"), (4, "core-decode"), (0, "core-static")])
def test_compiled_forms_serve_their_purpose(form, name, problem):
    assert outcome(torch_compile, torch_compile.FORMS[form], problem(name)) == "right"


ALL = {*PROBLEMS, *MORE}
MASKED = {"core-bool", "block-key-padding", "block-additive-causal"}
NARROW = {"core-bfloat16", "block-bfloat16"}
CAUSAL = {"core-gqa-causal", "block-window"}
NO_USE = {
    "torch_eager-SDPA, heads folded": ALL - {"core-decode"},
    "torch_compile-SDPA, heads folded": ALL - {"core-decode"},
    "torch_compile-FlexAttention": {"block"},
    "onnxruntime-onnxruntime": {"block-window", *MASKED, *NARROW},  # opset 25, masks that broadcast, bfloat16
    "onnxruntime-Attention": {name for name in ALL if name.startswith("core")} | {"cross", "values-apart", *NARROW},
    "onnxruntime-MultiHeadAttention": {"core-gqa-causal", "core-decode", *NARROW},
    "onnxruntime-GroupQueryAttention": ALL - CAUSAL,
    "onnxruntime-MatMul and Softmax": NARROW,
}
WRONG_READING = {("openvino-Attention", "block-window"): "wrong"}
"""OpenVINO's reader of Attention ignores its windows, silently; `bench` finds that and takes another form."""


class Slow(torch_eager.TorchEager):
    """PyTorch, after a while, or with another result."""

    def __init__(self, name: str, spins: int = 0, added: float = 0.0) -> None:
        super().__init__(name, torch_eager.sdpa_form)
        self.spins, self.added = spins, added

    @contextmanager
    def open(self, problem, threads):
        with super().open(problem, threads) as opened:

            def slower(call):
                def run():
                    for _ in range(self.spins):
                        pass
                    return call()

                return run

            yield replace(
                opened,
                calls=[slower(call) for call in opened.calls],
                arrays=lambda result: [array + self.added for array in opened.arrays(result)],
            )


class Broken:
    name = "broken"

    @contextmanager
    def open(self, problem, threads):
        raise RuntimeError("no such kernel")
        yield


def test_of_several_forms_the_quickest_right_one_stays(problem):
    forms = [Broken(), Slow("wrong", 0, 0.1), Slow("slow", 10**6), Slow("quick", 10**3)]
    with Fastest("several", forms).open(problem("block"), 1) as opened:
        assert opened.form == "quick"
        assert problem("block").error_share(opened.arrays(opened.calls[0]())) <= 1


def test_modes_of_forms_are_on_while_they_are_open_and_then_off(problem):
    forms = [Slow("slow", 10**6), Slow("quick", 10**3), Slow("slower", 2 * 10**6)]
    with Fastest("several", forms).open(problem("block"), 1) as opened:
        assert opened.form == "quick" and torch.is_inference_mode_enabled()
    assert not torch.is_inference_mode_enabled()


def test_where_no_form_runs_the_first_reason_is_given(problem):
    with (
        pytest.raises(RuntimeError, match="no such kernel"),
        Fastest("none", [Broken(), Slow("wrong", 0, 0.1)]).open(problem("block"), 1),
    ):
        pass


def test_scores_that_do_not_fit_are_not_written_down(problem, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mhsa_bench.peers.peer.os.sysconf", lambda name: 16)
    with pytest.raises(ModelError, match=r"room for all scores at once, got 0\.0 GB of them"):
        problem("block").check_scores_fit()


def test_unknown_peers_are_refused():
    assert [peer.name for peer in registry.find(["onnxruntime", "torch", "torch"])] == ["onnxruntime", "torch"]
    with pytest.raises(InputError, match=r"torch, torch\.compile, onnxruntime, .*, got 'magic'"):
        registry.find(["torch", "magic"])


@pytest.mark.parametrize("field", ["softcap", "rope", "alibi", "sinks", "kv_cache"])
def test_peers_are_not_asked_for_what_they_are_not_written_for(field: str) -> None:
    """Peers would compute something else, at a low softcap within any budget."""
    value = 30.0 if field == "softcap" else True
    spec = AttentionSpec(embed_dim=16, num_heads=2, causal=True, **{field: value})
    problem = Problem(SimpleNamespace(manifest=SimpleNamespace(spec=spec)), [])
    assert problem.manifest_spec == spec
    with pytest.raises(ModelError, match=f"got one with {field}"):
        _ = problem.spec
