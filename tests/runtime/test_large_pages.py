"""Packed weights on large pages."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mhsa_compile as mhsa
from mhsa_compile.runtime import large_pages

SIZE = 1 << 20


def array(begin: int, size: int) -> SimpleNamespace:
    """One of TVM's, as far as it is asked."""
    return SimpleNamespace(data_ptr=lambda: begin, shape=(size // 4,), dtype="float32")


@pytest.mark.parametrize(
    ("extents", "begins"),
    [
        ([(SIZE, 2 * SIZE)], [1, 2]),
        ([(SIZE + 64, 2 * SIZE)], [2]),
        ([(3 * SIZE - 64, 128)], []),
        ([(5 * SIZE, SIZE), (SIZE, SIZE)], [1, 5]),
        ([(2 * SIZE + 4096, SIZE - 4096), (SIZE + 64, SIZE - 64)], [2]),  # beside each other
        ([(SIZE, 4096), (SIZE + 2 * large_pages.GAP, 2 * SIZE)], [2]),
        ([], []),
    ],
)
def test_pages_are_full_of_arrays(extents: list[tuple[int, int]], begins: list[int]) -> None:
    pages = list(large_pages.pages([array(*extent) for extent in extents], SIZE))
    assert pages == [begin * SIZE for begin in begins]


@pytest.mark.parametrize(
    ("words", "size"), [("always [madvise] never", 1 << 21), ("[always] madvise never", 1 << 21), ("a [never]", None)]
)
def test_whoever_runs_the_machine_decides(
    words: str, size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "enabled").write_text(words)
    (tmp_path / "hpage_pmd_size").write_text("2097152\n")
    monkeypatch.setattr(large_pages, "SETTINGS", tmp_path)
    assert large_pages.page_size.__wrapped__() == size
    monkeypatch.setattr(large_pages, "SETTINGS", tmp_path / "none")
    assert large_pages.page_size.__wrapped__() is None


class Calls:
    """As many forks as have begun; one begins behind each piece."""

    def __init__(self) -> None:
        self.forks, self.lock = 0, self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.forks += 1


def test_a_fork_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []

    def madvise(piece: int, size: int, advice: int) -> None:
        pieces.append(piece)

    monkeypatch.setattr(large_pages.ctypes, "CDLL", lambda name: SimpleNamespace(madvise=madvise))
    large_pages._collapse(Calls(), 0, [], [1, 2, 3], 1 << 21)
    assert pieces == [1]


def test_a_loaded_artifact_is_on_large_pages_in_the_end() -> None:
    """And computes the same while they are collapsed."""
    size = large_pages.page_size()
    if size is None or size > 1 << 22:
        pytest.skip("this system gives nobody large pages of a few megabytes")
    artifact = mhsa.compile(mhsa.AttentionSpec(embed_dim=1024, num_heads=8), dims={"B": 1, "L": 1})
    x = np.random.default_rng(0).standard_normal((1, 1, 1024)).astype("f4")
    attention = mhsa.load(artifact, threads=1)
    results = []
    while any(thread.name.endswith("(_collapse)") for thread in threading.enumerate()):
        results.append(attention(x))
        time.sleep(0)
    results.append(attention(x))
    assert all((result == results[0]).all() for result in results)
    addresses = list(large_pages.pages(attention._packed, size))
    assert len(addresses) >= (3 << 22) // size  # of 16 MB
    refused = "this kernel collapses none: it is older than Linux 6.1, or has no memory in one piece"
    if not sum(map(_huge_kilobytes, addresses)):
        pytest.skip(refused)


def _huge_kilobytes(address: int) -> int:
    """Those on large pages in the piece of the address space around an address, as the kernel says."""
    is_inside, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and rest:
            begin, end = (int(bound, 16) for bound in first.split("-"))
            is_inside = begin <= address < end
        elif is_inside and first == "AnonHugePages:":
            total += int(rest[0])
    return total
