"""The code of every kernel on tiles, run where tiles fault: by the emulator and by soft tiles, bit for bit as the CPU's
own where it has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.this_cpu import with_tiles
from support.tiles import elsewhere, runs
from support.tiles.runs import CASES

from mhsa_compile.hardware import host

QUICK = ("product tdpbf16ps", "product tdpbusd", "linear")
OTHERS = tuple(name for name in CASES if name not in QUICK)


@pytest.fixture(autouse=True)
def vectors() -> None:
    if (why := runs.lacking()) is not None:
        pytest.skip(why)


Results = dict[str, list[np.ndarray]]


def differences(one: Results, other: Results) -> dict[str, int]:
    """How many elements of each case have other bits."""
    assert one.keys() == other.keys()
    pairs = ((name, zip(one[name], other[name], strict=True)) for name in one)
    return {name: sum(int((x.view(_bits(x)) != y.view(_bits(y))).sum()) for x, y in arrays) for name, arrays in pairs}


def _bits(array: np.ndarray) -> np.dtype:
    return np.dtype(f"uint{8 * array.itemsize}")


def with_one_nan(results: Results) -> Results:
    """LLVM promises no more of NaN than that it is one."""
    return {
        name: [
            np.where(np.isnan(array), np.nan, array).astype(array.dtype) if array.dtype == np.float32 else array
            for array in arrays
        ]
        for name, arrays in results.items()
    }


@pytest.mark.parametrize(
    "names", [pytest.param(QUICK, id="some"), pytest.param(OTHERS, id="others", marks=pytest.mark.thorough)]
)
class TestTiles:
    def test_emulated_as_the_cpu(self, names: tuple[str, ...], tmp_path: Path) -> None:
        """Where the CPU has no tiles, as soft ones."""
        emulated, count = elsewhere.results("emulated", list(names), tmp_path / "results.npz")
        assert count > 1000
        features = host.usable_features()
        here = [name for name in names if ("amx_fp16" if name in runs.OF_FLOAT16 else "amx_tile") in features]
        real = {name: CASES[name]() for name in here}
        assert differences(real, {name: emulated[name] for name in here}) == dict.fromkeys(here, 0)
        if others := {name: arrays for name, arrays in emulated.items() if name not in real}:
            self.assert_soft(others, tmp_path)

    @with_tiles
    @pytest.mark.thorough
    def test_soft_as_emulated(self, names: tuple[str, ...], tmp_path: Path) -> None:
        emulated, _ = elsewhere.results("emulated", list(names), tmp_path / "results.npz")
        self.assert_soft(emulated, tmp_path)

    def assert_soft(self, emulated: Results, folder: Path) -> None:
        soft, count = elsewhere.results("soft", list(emulated), folder / "soft.npz")
        assert count == 0
        assert differences(with_one_nan(emulated), with_one_nan(soft)) == dict.fromkeys(emulated, 0)
