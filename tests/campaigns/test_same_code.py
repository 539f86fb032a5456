"""What `make same-code` compares: functions by what they are and refer to, manifests key by key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tvm
from tvm.script import from_source

from campaigns import same_code_artifacts
from campaigns.same_code import compare, differing
from mhsa_compile.compiler.codegen import build
from mhsa_compile.hardware.profile import load_profile

TEXT = """
@I.ir_module
class Module:
    @T.prim_func(s_tir=True)
    def first(x: T.Buffer((64,), "float32")):
        T.func_attr({"global_symbol": "first"})
        for i in T.parallel(64):
            x[i] = x[i] * T.float32(FACTOR) + T.float32(0.25)
    @T.prim_func(s_tir=True)
    def second_op_1(x: T.Buffer((64,), "float32")):
        T.func_attr({"global_symbol": "second_op_1"})
        for i in T.parallel(64):
            x[i] = x[i] * T.float32(3) + T.float32(0.125)
"""
SIDE: dict[str, Any] = {
    "name": "a row",
    "target": "x86-64-v3",
    "kernels": ["cpu.linear"],
    "operations": ["op_1"],
    "library": "0",
    "functions": {"first": "1", "second_op_1": "2", "second_op_1_compute_": "3"},
    "manifest": {"inputs": [{"dims": ["B", "L", 64]}], "ops": [{"name": "op_1"}]},
}


@pytest.fixture(scope="module", params=["x86-64-v3", "aarch64-generic"])
def machine(request: pytest.FixtureRequest) -> Any:
    return load_profile(request.param)


def hashes(text: str, machine: Any, folder: Any) -> dict[str, str]:
    with build.pass_context():
        made = tvm.compile(from_source(text), target=tvm.target.Target(machine.tvm_config()))
    made.mod.write_to_file(str(folder / "made.o"))
    return same_code_artifacts.functions((folder / "made.o").read_bytes())


@pytest.mark.thorough
def test_a_function_is_the_same_wherever_it_lies(machine: Any, tmp_path: Any) -> None:
    """A longer neighbour moves it, its constants and its texts; another constant of its own is another function."""
    plain = hashes(TEXT.replace("FACTOR", "3"), machine, tmp_path)
    longer = hashes(TEXT.replace("x[i] * T.float32(FACTOR)", "x[63 - i] / x[i] * T.float32(7)"), machine, tmp_path)
    changed = hashes(TEXT.replace("FACTOR", "3").replace("0.125", "0.5"), machine, tmp_path)
    assert {"first", "first_loop_0", "second_op_1", "second_op_1_loop_0"} <= plain.keys()
    assert {name for name in plain if plain[name] != longer[name]} == {"first_loop_0"}
    assert {name for name in plain if plain[name] != changed[name]} == {"second_op_1_loop_0"}


def test_equal_sides() -> None:
    found = compare(SIDE, SIDE)
    assert found.is_same and found.described() == "same" and found.functions == 3
    assert replace(found, same_library=False).described().startswith("same, but")


def test_different_sides() -> None:
    functions = {"first": "other", "second_op_1": "2", "second_op_1_compute_": "other", "third": "4"}
    manifest = {"inputs": [{"dims": ["B", 7, 64]}], "ops": [{"name": "op_1", "note": ""}]}
    found = compare(SIDE, {**SIDE, "functions": functions, "manifest": manifest})
    assert found.of_kernels == ("second_op_1_compute_",)
    assert found.of_others == ("first", "third")
    assert found.manifest == ("inputs[0].dims[1]", "ops[0].note")
    assert not found.is_same and "OF KERNELS: second_op_1_compute_" in found.described()


def test_what_does_not_compile() -> None:
    found = compare({"name": "a row", "target": "x86-64-v3", "error": "BuildError: no"}, SIDE)
    assert not found.is_same and found.described() == "old does not compile: BuildError: no"


def test_lists_of_other_lengths() -> None:
    assert list(differing({"a": [1, 2]}, {"a": [1]})) == ["a"]


def test_a_key_that_is_not_there_says_null() -> None:
    assert not list(differing({"a": None}, {}))
    assert list(differing({}, {"a": {"b": 1}})) == ["a"]
