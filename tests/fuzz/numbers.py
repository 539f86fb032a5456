"""Random numbers by classes that kernels may treat apart: what terms, rounding and sums could lose is in one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Array = np.ndarray
WIDE, NARROW = (20, 40, 60, 100, 130), (2, 4, 3, 8, 18)
"""Powers of two: how far numbers are spread, rows are, those that are large, small, and denormal; NARROW of float16."""
MOST_SPECIAL = 3


def _rows(rng: np.random.Generator, x: Array, power: float) -> Array:
    return x * np.exp2(rng.uniform(-power, power, (*x.shape[:-1], 1)))


def _special(rng: np.random.Generator, x: Array) -> Array:
    for _ in range(rng.integers(1, MOST_SPECIAL + 1) if x.size else 0):
        x.reshape(-1)[rng.integers(x.size)] = rng.choice([np.nan, np.inf, -np.inf])
    return x


_CLASSES: dict[str, Callable[[np.random.Generator, Array, tuple[int, ...]], Array]] = {
    "normal": lambda rng, x, powers: x,
    "one sign": lambda rng, x, powers: np.abs(x),
    "spread": lambda rng, x, powers: x * np.exp2(rng.uniform(-powers[0], powers[0], x.shape)),
    "rows of scales": lambda rng, x, powers: _rows(rng, x, powers[1]),
    "large": lambda rng, x, powers: x * 2.0 ** powers[2],
    "small": lambda rng, x, powers: x * 2.0 ** -powers[3],
    "denormals": lambda rng, x, powers: np.where(rng.random(x.shape) < 0.5, x, x * 2.0 ** -powers[4]),
    "equal in rows": lambda rng, x, powers: np.broadcast_to(x[..., :1], x.shape).copy(),
    "rows of zeros": lambda rng, x, powers: x * (rng.random((*x.shape[:-1], 1)) < 0.7),
    "outliers": lambda rng, x, powers: np.where(rng.random(x.shape) < 0.01, 100 * x, x),
    "special": lambda rng, x, powers: _special(rng, x),
}
CLASSES = tuple(_CLASSES)
OF_SCORES = ("normal", "one sign", "denormals", "equal in rows", "rows of zeros", "special")
"""Those that leave scores as large as they are."""


def numbers(rng: np.random.Generator, shape: tuple[int, ...], kind: str, dtype: type) -> Array:
    """An array of a class of numbers, about 1 in size where the class says nothing else."""
    powers = NARROW if dtype == np.float16 else WIDE
    x = rng.standard_normal(shape, np.float32)
    return np.asarray(_CLASSES[kind](rng, x, powers), np.float32).astype(dtype)
