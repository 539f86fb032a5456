"""helgrind.py without valgrind: what it makes of reports, and how it ends; the rest is `make helgrind`."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns import helgrind
from campaigns.helgrind import Finding

LIBC, MODULE = "/usr/lib/x86_64-linux-gnu/libc.so.6", "/memfd:module.so (deleted)"


def report(*errors: tuple[tuple[str, ...], ...]) -> str:
    """A report of errors with stacks of frames in these files; "" is a frame in none."""

    def frame(file: str) -> str:
        return f"<frame><ip>0x1</ip>{file and f'<obj>{file}</obj>'}</frame>"

    stacks = (["".join(map(frame, stack)) for stack in error] for error in errors)
    inner = ("".join(f"<stack>{frames}</stack>" for frames in error) for error in stacks)
    return f"<valgrindoutput>{''.join(f'<error>{one}</error>' for one in inner)}</valgrindoutput>"


@pytest.mark.parametrize(
    ("errors", "count"),
    [
        ([], 0),
        ([((LIBC, "libtvm_runtime.so"), (LIBC, ""))], 0),
        ([((MODULE, "", ""), (LIBC,))], 1),
        ([((LIBC,), (LIBC, MODULE))], 1),  # memset, called by compiled code
        ([(("", ""), (LIBC,)), ((LIBC,),)], 1),
    ],
)
def test_races_are_those_of_compiled_code(errors: list[tuple[tuple[str, ...], ...]], count: int) -> None:
    assert helgrind.in_compiled_code(report(*errors)) == count


@pytest.mark.parametrize(
    ("finding", "wrong"),
    [
        (Finding("kernels", "plain", launches=2, loops=1, of=1), ""),
        (Finding("kernels", "plain", launches=2, loops=1, of=1, races=3), "races"),
        (Finding("kernels", "plain"), "no loop ran in parallel: this proves nothing"),
        (Finding("kernels", "plain", failure="RuntimeError: exit code 2"), "RuntimeError: exit code 2"),
        (Finding("planted", "scratch", launches=2, loops=1, of=1, races=3), ""),
        (Finding("planted", "scratch", launches=2, loops=1, of=1), "the planted race was not seen"),
    ],
)
def test_what_is_wrong_ends_with_1(finding: Finding, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert finding.wrong == wrong
    assert helgrind.concluded([finding], None) == int(bool(wrong))
    assert f"{int(bool(wrong))} not as they must be" in capsys.readouterr().out


def test_without_valgrind_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert helgrind.main([]) == 2
    assert "apt-get install valgrind" in capsys.readouterr().err
