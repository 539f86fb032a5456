"""A mistake of ours is called one, wherever it is made; what a model is to blame for is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import tvm
from onnx import helper
from support.onnx_models import model_of
from tvm import tirx

import mhsa_compile as mhsa
from mhsa_compile.compiler import lower
from mhsa_compile.errors import BuildError, DefectError, InputError, ModelError
from mhsa_compile.files.foreign_errors import first_line, place_of_slip, reading
from mhsa_compile.frontend.canonicalize import canonicalize
from mhsa_compile.frontend.relax import op_converters
from mhsa_compile.kernels.cpu.attention import kernel as attention_kernel
from mhsa_compile.kernels.cpu.attention.kernel import CpuAttentionKernel
from mhsa_compile.kernels.scores.limit import Softcap

TARGET = "x86-64-v3"
MISTAKES = {
    "AssertionError": "assert arguments == 1",
    "AttributeError": "None.columns",
    "IndexError": "[][1]",
    "KeyError": "{}['axis']",
    "NameError": "columns",
    "NotImplementedError": "raise NotImplementedError",
    "TypeError": "len(1)",
}


def mistaken(place: str, statement: str) -> Callable[..., Any]:
    """A function that makes a mistake in a file of the package."""
    scope: dict[str, Any] = {}
    text = f"def slip(*arguments, **named):\n    {statement}\n"
    exec(compile(text, str(Path(mhsa.__file__).parent / place), "exec"), scope)
    function: Callable[..., Any] = scope["slip"]
    return function


def compiled(source: Any) -> mhsa.Artifact:
    return mhsa.compile(source, TARGET, cache=False, without_attention="accept", check=False)


def capped() -> onnx.ModelProto:
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], softcap=20.0)
    return model_of([node], {name: [1, 2, 19, 8] for name in "qkv"}, {"y": None}, opset=23)


def odd() -> onnx.ModelProto:
    return model_of([helper.make_node("Erf", ["x"], ["y"], name="odd")], {"x": [2, 8]}, {"y": None}, opset=23)


@pytest.mark.parametrize("kind", [*MISTAKES, "ValueError"])
def test_in_the_code_of_a_kernel(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slip = mistaken("kernels/cpu/attention/kernel.py", MISTAKES.get(kind, "raise ValueError('3 rows')"))
    monkeypatch.setattr(attention_kernel, "_attention", slip)
    with pytest.raises(DefectError, match=r"code of kernel cpu\.attention with .*defect of ours") as caught:
        compiled(capped())
    assert f"got {kind}" in str(caught.value) and "mhsa_compile/kernels/cpu/attention/kernel.py:2" in caught.value.got
    assert "attention" in caught.value.argument and "a target of fewer features" in caught.value.next_step
    assert type(caught.value.__cause__).__name__ == kind


def test_in_a_step_of_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Softcap, "score", mistaken("kernels/scores/limit.py", MISTAKES["KeyError"]))
    with pytest.raises(DefectError, match=r"KeyError: 'axis', at mhsa_compile/kernels/scores/limit\.py:2"):
        compiled(capped())


def test_in_machine_code_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    emit = CpuAttentionKernel.emit

    def beyond_llvm(*arguments: Any) -> Any:
        emitted = emit(*arguments)
        of_gpus = tirx.Evaluate(tvm.tirx.call_intrin("int32", "tirx.ptx.wgmma_commit_group"))
        body = tirx.SeqStmt([emitted.run.body, of_gpus])
        return dataclasses.replace(emitted, run=emitted.run.with_body(body))

    monkeypatch.setattr(CpuAttentionKernel, "emit", beyond_llvm)
    with pytest.raises(DefectError, match=r"machine code of kernel cpu\.attention with .*defect of ours"):
        compiled(capped())


@pytest.mark.parametrize("kind", MISTAKES)
@pytest.mark.parametrize(
    ("module", "name", "place"),
    [
        (canonicalize, "canonicalize", "frontend/canonicalize/canonicalize.py"),
        (lower, "with_epilogues", "compiler/epilogues.py"),
    ],
)
def test_in_a_pass(module: Any, name: str, place: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, name, mistaken(place, MISTAKES[kind]))
    with pytest.raises(DefectError, match=f"got {kind}.*at mhsa_compile/{place}:2.*defect of ours"):
        compiled(odd())


def test_in_a_converter_the_node_and_a_way_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    slip = mistaken("frontend/relax/op_converters.py", MISTAKES["KeyError"])
    monkeypatch.setitem(op_converters.CONVERSIONS, "Erf", slip)
    with pytest.raises(DefectError, match=r"^Erf node 'odd': .*KeyError: 'axis', at .*defect of ours.*Fix free sizes"):
        compiled(odd())


def test_what_others_trip_over_is_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: the same places, where TVM raises what looks alike."""

    def of_tvm(*_: Any) -> Any:
        return tvm.ir.Op.get("relax.nowhere")  # an AttributeError

    monkeypatch.setitem(op_converters.CONVERSIONS, "Erf", of_tvm)
    with pytest.raises(ModelError, match=r"^Erf node 'odd': expected inputs and attributes of a form"):
        compiled(odd())
    monkeypatch.undo()
    monkeypatch.setattr(lower, "with_epilogues", of_tvm)
    with pytest.raises(BuildError) as caught:
        compiled(odd())
    assert not isinstance(caught.value, DefectError)


def raised(place: str, statement: str) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011  whatever it is
        mistaken(place, statement)()
    return caught.value


def test_whose_mistake_it_is() -> None:
    assert place_of_slip(raised("nn/masks.py", "{}['axis']")) == "mhsa_compile/nn/masks.py:2"
    assert first_line(raised("nn/masks.py", "{}['axis']")).endswith(
        "'axis', at mhsa_compile/nn/masks.py:2, a defect of ours"
    )
    assert place_of_slip(raised("/elsewhere.py", "{}['axis']")) is None  # a user's forward
    assert place_of_slip(raised("nn/masks.py", "int('x')")) is None  # numbers of a file
    assert place_of_slip(KeyError("nobody raised it")) is None
    with pytest.raises(InputError) as caught, reading(InputError, "file", "one"):
        mistaken("files/reader.py", "{}['axis']")()
    assert "defect" not in str(caught.value)  # bytes from outside: what they lack is their fault
