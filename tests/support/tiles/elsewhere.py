"""Runs cases of `runs` in a process that gets no tiles.

    python -m support.tiles.elsewhere emulated RESULTS.npz "attention, causal" ...

The permission for tiles is never taken back, and where it is held nothing faults; so what asks for it is replaced before
anything is imported that does. Prints how many instructions were emulated.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Literal

import numpy as np

from mhsa_compile.hardware import tile_permission

How = Literal["emulated", "soft"]


def results(how: How, names: list[str], file: Path) -> tuple[dict[str, list[np.ndarray]], int]:
    """What cases give on tiles of a kind, by way of a file, and how many instructions were emulated."""
    command = [sys.executable, "-m", "support.tiles.elsewhere", how, str(file), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(file) as arrays:
        counts = {name: sum(key.startswith(f"{name}/") for key in arrays) for name in names}
        return {name: [arrays[f"{name}/{i}"] for i in range(counts[name])] for name in names}, int(done.stdout)


def main(how: How, file: str, *names: str) -> None:
    tile_permission.refusal = lambda: "tiles are to fault"
    from mhsa_compile.kernels.cpu.units import tiles
    from support.tiles import emulator, runs, soft

    handler = emulator.install() if how == "emulated" else None
    if how == "soft":
        tiles._text = soft.text
    arrays = {f"{name}/{i}": array for name in names for i, array in enumerate(runs.CASES[name]())}
    np.savez(file, **arrays)
    print(0 if handler is None else handler.tiles_emulated())


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
