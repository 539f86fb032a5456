"""Code that is less exact than float32 by choice: checks hold it against the budget of that choice, reports say it."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import msgspec
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from support.onnx_models import model_of
from support.term_products import Offers, TermLinear
from typer.testing import CliRunner

import mhsa_compile as mhsa
from mhsa_compile.bench import accuracy
from mhsa_compile.cli.app import app
from mhsa_compile.compiler import pipeline
from mhsa_compile.errors import InputError, MismatchError
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.integrations import layer_artifacts as in_place
from mhsa_compile.integrations import transformers as mhsa_transformers
from mhsa_compile.integrations.call_table import TABLES
from mhsa_compile.kernels.interface.kernel import TermProducts
from mhsa_compile.kernels.registry import KERNELS
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.tuning.op_jobs import job_of
from mhsa_compile.verification.random_inputs import random_inputs
from mhsa_compile.verification.stored_model import stored_model

SPEC = mhsa.AttentionSpec(embed_dim=64, num_heads=4)


@pytest.fixture(autouse=True)
def unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linears by terms on this machine, whatever it is, and nothing else by terms."""
    monkeypatch.setattr(Offers, "lanes", load_profile("native").vector_lanes("float32"))
    others = (kernel for kernel in KERNELS["cpu"] if not isinstance(kernel, TermProducts))
    monkeypatch.setitem(KERNELS, "cpu", (TermLinear(), *others))
    monkeypatch.setattr(in_place, "_ARTIFACTS", in_place._Artifacts())


def as_ieee(artifact: Artifact) -> Artifact:
    """The artifact with a manifest that says nothing of a choice."""
    ops = tuple(msgspec.structs.replace(op, float32_products="ieee") for op in artifact.manifest.ops)
    return replace(artifact, manifest=msgspec.structs.replace(artifact.manifest, ops=ops))


@pytest.mark.thorough
@pytest.mark.parametrize("word", ["bf16x6", "bf16x3", "bf16"])
def test_verify_allows_what_was_chosen_and_no_more(word: str) -> None:
    artifact = mhsa.compile(SPEC, float32_products=word)
    cases = [{"B": 2, "L": 37}]
    assert mhsa.verify(artifact, cases=cases).ok
    plain = mhsa.verify(as_ieee(artifact), cases=cases, self_checks=False)
    assert plain.ok == (word == "bf16x6")
    inputs = random_inputs(stored_model(artifact), {"B": 2, "L": 37})
    weights = {info.name: np.zeros(info.dims, np.float32) for info in artifact.manifest.weights}
    y = mhsa.load(artifact)(**inputs)
    if word != "bf16x6":  # by rows, the weights would have to be the artifact's own
        assert accuracy.truth(artifact, inputs, weights).share([y]) <= 1


def product() -> onnx.ModelProto:
    weight = np.float32(np.random.default_rng(0).standard_normal((64, 40)))
    node, kind = helper.make_node("MatMul", ["x", "w"], ["y"]), TensorProto.FLOAT
    return model_of([node], {"x": (kind, ["R", 64])}, {"y": (kind, ["R", 40])}, {"w": weight})


@pytest.mark.thorough_but("bf16x3")
@pytest.mark.parametrize("word", ["bf16x3", "bf16"])
def test_the_proof_of_a_file_goes_by_the_choice(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"float32_products": word, "without_attention": "accept", "check": True}
    check = mhsa.compile(product(), **options).manifest.check
    assert check is not None and check.against == ("onnx.reference in float64",)
    assert 0.1 < check.error / check.budget <= 1
    from mhsa_compile.verification import precision

    monkeypatch.setattr(precision.Precision, "of", classmethod(lambda cls, manifest: cls()))
    with pytest.raises(MismatchError, match="'y'"):
        mhsa.compile(product(), **options)


def test_layers_in_place_get_it_and_the_report_says_so() -> None:
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(256, 4, 256, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    x = torch.randn(2, 37, 256)
    with torch.no_grad():
        expected = model(x)
    report = mhsa.accelerate(model, float32_products="bf16", linears=True, layers="parts")
    assert "float32 products: asked bf16; first calls show what layers get" in repr(report)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        y = model(x)
    assert not report.calls and report.checked
    assert 1e-4 < float((y - expected).abs().max()) < 0.1
    text = "asked bf16, got bf16 in 2 operations; ieee in 1 operation: no kernel makes bf16"
    assert any(outcome.startswith(text) for outcome in report.float32_outcomes())
    assert "float32 products: asked bf16, got bf16 in 1 operation, in 4 artifacts" in repr(report)
    mhsa.restore(model)
    with pytest.raises(InputError, match="float32_products"):
        mhsa.accelerate(model, float32_products="bf8")
    assert "_mhsa_acceleration" not in vars(model)


@pytest.mark.thorough
def test_a_first_call_that_is_off_by_more_than_the_choice_is_refused() -> None:
    layer = torch.nn.MultiheadAttention(64, 4, batch_first=True).eval()
    x = torch.randn(2, 9, 64)
    mhsa.accelerate(layer, float32_products="bf16")
    with torch.no_grad():
        layer(x, x, x)
    assert vars(layer)["forward"]._first_calls.products == "bf16"
    mhsa.restore(layer)


@pytest.mark.filterwarnings("ignore:torch.compile. a graph of")
def test_the_backend_takes_it_and_says_what_was_not_to_be_had() -> None:
    x, linear = torch.randn(2, 4, 9, 16), torch.nn.Linear(16, 16).eval()

    def attend(x: torch.Tensor) -> torch.Tensor:
        return linear(torch.nn.functional.scaled_dot_product_attention(x, x, x))

    with pytest.raises(Exception, match="float32_products: expected"), torch.no_grad():
        torch.compile(attend, backend="mhsa", options={"float32_products": "half"})(x)
    torch.compiler.reset()
    model = torch.compile(attend, backend="mhsa", options={"float32_products": "bf16"})
    with torch.no_grad(), pytest.warns(UserWarning, match="float32_products: asked bf16, got "):
        model(x)
    torch.compiler.reset()


def test_transformers_attention_is_registered_with_it() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(InputError, match="float32_products"):
        mhsa_transformers.register(float32_products="fp16")
    mhsa_transformers.register(float32_products="bf16x3")
    table = TABLES["mhsa"]
    assert table._products == "bf16x3" and table.float32_outcomes() == {}
    mhsa_transformers.register()


def test_exercises_of_a_tuner_have_the_budget_of_their_word() -> None:
    spec = mhsa.AttentionSpec(embed_dim=64, num_heads=4)
    for op in pipeline.import_source(spec, dims={"B": 2, "L": 37}).ops.values():
        budgets = [
            job_of(replace(op, float32_products=word), {}).budget for word in ("ieee", "bf16x6", "bf16x3", "bf16")
        ]
        assert budgets[0] == budgets[1] < budgets[2] < budgets[3]


def test_the_command_line_says_it(tmp_path) -> None:
    flags = ["--embed-dim", "64", "--num-heads", "4", "-o", str(tmp_path / "a.mhsa"), "--no-cache"]
    wrong = CliRunner().invoke(app, ["compile", *flags, "--float32-products", "bf17"])
    assert wrong.exit_code != 0 and "float32_products" in str(wrong.exception) + wrong.output
    done = CliRunner().invoke(app, ["compile", *flags, "--float32-products", "bf16"])
    assert "float32 products: asked bf16, got bf16 in 2 operations; ieee in 1 operation" in done.output
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "a.mhsa")])
    assert "float32 products" in shown.output and "got bf16 in 2 operations" in " ".join(shown.output.split())
    stated = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path / "a.mhsa"), "--json"]).output)["manifest"]
    assert stated["float32_products"] == "bf16"
    assert [op["float32_products"] for op in stated["ops"]] == ["bf16", "ieee", "bf16"]
