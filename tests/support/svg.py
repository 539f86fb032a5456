"""What is written and drawn in an SVG of matplotlib's: its words, its maps of cells, and whether two are alike."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np

_IMAGE = re.compile(r'"data:image/png;base64,\s*([^"]+)"')
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
_NAMES = re.compile(r'(?:id|clip-path|xlink:href)="[^"]*"')


def words(path: Path) -> list[str]:
    """The texts, in their order."""
    text = path.read_text(encoding="utf-8")
    return [re.sub(r"<[^>]+>", "", match).strip() for match in re.findall(r"<text[^>]*>(.*?)</text>", text, re.DOTALL)]


def images(path: Path) -> list[np.ndarray]:
    """The maps of cells, (rows, columns, 4) bytes each."""
    from PIL import Image

    found = _IMAGE.findall(path.read_text(encoding="utf-8"))
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA")) for data in found]


def smallest_text(path: Path, pixels: float) -> float:
    """The size of the smallest text, in pixels, where the picture is so many pixels wide."""
    text = path.read_text(encoding="utf-8")
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", text)]
    (width,) = re.findall(r'viewBox="0 0 ([\d.]+) ', text)
    return min(sizes) * pixels / float(width)


def same(one: Path, other: Path, within: float) -> bool:
    """Whether both have the same elements, numbers no farther apart than `within`, and cells of the same colours but
    for one step. What matplotlib names after its coordinates is left out."""
    pictures = images(one), images(other)
    if [image.shape for image in pictures[0]] != [image.shape for image in pictures[1]]:
        return False
    colours = [np.abs(a.astype(int) - b.astype(int)).max() for a, b in zip(*pictures, strict=True)]
    plain = [_NAMES.sub("", _IMAGE.sub("", path.read_text(encoding="utf-8"))) for path in (one, other)]
    numbers = [np.array([float(number) for number in _NUMBER.findall(text)]) for text in plain]
    if _NUMBER.sub("0", plain[0]) != _NUMBER.sub("0", plain[1]) or max(colours, default=0) > 1:
        return False
    return bool((np.abs(numbers[0] - numbers[1]) <= within).all())
