"""Which tests stay: a set that reaches all, the quickest case of each function, and whatever is quick."""

from __future__ import annotations

import dataclasses

from support.attention_ops import attention_of
from support.kernel_features import features

from campaigns.choose_tests import SLOW, MeasuredTest, changes, choose
from mhsa_compile.kernels.interface.ops import HeadLayout
from mhsa_compile.spec.window import WindowSpec


def made(id: str, seconds: float, *lines: int, tier: str = "") -> MeasuredTest:
    return MeasuredTest(id, seconds, frozenset(("file.py", str(line)) for line in lines), frozenset(), tier)


def test_what_alone_reaches_something_stays() -> None:
    first, second, third = range(50), range(50, 100), range(100, 150)
    tests = [made("a.py::f[1]", 5, *first, *second), made("a.py::f[2]", 6, *second, *third)]
    assert choose([*tests, made("a.py::f[3]", 7, *first, *third)]) == {"a.py::f[3]"}


def test_what_adds_little_for_its_seconds_does_not() -> None:
    assert choose([made("a.py::f", 5, *range(50)), made("a.py::g", 5, *range(30, 60))]) == {"a.py::g"}
    assert choose([made("a.py::f", 5, *range(50), tier="arm"), made("a.py::g", 5, *range(30, 60), tier="arm")]) == set()


def test_a_function_that_is_not_slow_keeps_its_quickest_case() -> None:
    tests = [made("a.py::f[1]", 2, 1), made("a.py::f[2]", 1, 1), made("a.py::g", SLOW, 1), made("a.py::slow", 9, 1)]
    assert choose(tests) == {"a.py::f[1]", "a.py::slow"}


def test_what_is_quick_stays() -> None:
    assert choose([made("a.py::f[1]", 0.01, 1), made("a.py::f[2]", 0.02, 1)]) == set()


def test_the_suite_counts_on_no_other_target() -> None:
    tests = [made("a.py::f", 4, *range(50)), made("a.py::g", 4, 1, tier="arm"), made("a.py::h", 4, 1, 60, tier="arm")]
    assert choose(tests) == {"a.py::g"}


def test_features_of_an_operation() -> None:
    rows = HeadLayout(0, "rows", 64)
    op = attention_of("B", 7, "S", 4, 2, 16, 16, 0.25, rows, rows, rows, rows, band=WindowSpec(8, 0), softcap=5.0)
    assert features(op) == {
        "grouped heads", "batch free", "kv_length free", "Band", "Band.window.left", "Band.window.right",
        "Band.window.alignment=top_left", "Softcap",
        "query.layout=rows", "key.layout=rows", "value.layout=rows", "output.layout=rows", "dtype=float32",
        "softmax=float32", "float32_products=ieee",
    }  # fmt: skip


def test_marks_to_change_are_those_that_differ() -> None:
    marked, other = dataclasses.replace(made("a.py::f", 1), thorough=True), made("a.py::g", 1)
    assert list(changes([other, marked], {"a.py::f"})) == []
    assert list(changes([other, marked], {"a.py::g"})) == ["- a.py::f", "+ a.py::g"]
