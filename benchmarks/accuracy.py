"""What fewer bits cost a trained sentence encoder, beside ONNX Runtime at the same bits.

    python benchmarks/accuracy.py [--json FILE]

all-MiniLM-L6-v2 on the sentences of this project's pages. Of each format: the mean and the least cosine between its
vectors and PyTorch's in float32, how many sentences keep their nearest neighbour, how many of the ten nearest stay, and
the bytes that are stored. ONNX Runtime's files are those of its own quantisers with their defaults.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import mhsa_compile as mhsa

ROOT = Path(__file__).resolve().parents[1]
WORDS = ("int8", "int4", "int4:zeros", "int4:block=128", "int4:activations=float", "int4:zeros,activations=float")
LEAST, MOST = 24, 300
"""Letters of what counts as a sentence."""
NEAREST = 10
Embed = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Cost:
    """What a format costs: shares of sentences, and cosines to the vectors of float32."""

    name: str
    mean: float
    least: float
    nearest: float
    ten: float
    megabytes: float


def sentences() -> list[str]:
    """Those of the English pages, without code, tables and headings, each once."""
    pages = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
    text = " ".join(_prose(page.read_text(encoding="utf-8")) for page in pages if ".zh." not in page.name)
    parts = (part.strip() for part in re.split(r"(?<=[.?!])\s+", text))
    own = (ROOT / "examples" / "sentences.txt").read_text(encoding="utf-8").splitlines()
    return list(dict.fromkeys([*own, *(part for part in parts if LEAST <= len(part) <= MOST)]))


def _prose(page: str) -> str:
    plain = re.sub(r"```.*?```", " ", page, flags=re.DOTALL)
    lines = [line for line in plain.splitlines() if not line.lstrip().startswith(("|", "#", "!", "<"))]
    return re.sub(r"[*_`]|\]\([^)]*\)|\[", "", " ".join(lines))


def cost(name: str, vectors: np.ndarray, exact: np.ndarray, stored: int) -> Cost:
    cosines = (vectors * exact).sum(1) / np.linalg.norm(vectors, axis=1)
    own, theirs = _neighbours(vectors), _neighbours(exact)
    ten = np.mean([len({*one} & {*other}) / NEAREST for one, other in zip(own, theirs, strict=True)])
    nearest = (own[:, 0] == theirs[:, 0]).mean()
    return Cost(name, float(cosines.mean()), float(cosines.min()), float(nearest), float(ten), stored / 1e6)


def _neighbours(vectors: np.ndarray) -> np.ndarray:
    """The numbers of the nearest others of each, the nearest first."""
    likeness = vectors @ vectors.T
    np.fill_diagonal(likeness, -np.inf)
    return np.argsort(-likeness, axis=1)[:, :NEAREST]


def costs(texts: list[str], folder: Path) -> list[Cost]:
    from minilm.compile_model import Sentences
    from minilm.encoder import Tokens
    from minilm.trained import load_reference, model_folder
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    bert, rows = load_reference(model_folder()), [list(one.ids) for one in Tokens(model_folder()).of_each(texts)]
    module, file = Sentences(bert).eval(), folder / "minilm.onnx"
    example = (torch.ones(2, 9, dtype=torch.long), torch.ones(2, 9, dtype=torch.bool))
    free = {0: "B", 1: "L"}
    torch.onnx.export(module, example, file, dynamo=True, opset_version=18, dynamic_shapes=(free, free), verbose=False)

    with torch.no_grad():
        exact = _vectors(rows, lambda ids, valid: module(torch.from_numpy(ids), torch.from_numpy(valid)).numpy())
    result = []
    for word in (None, *WORDS):
        artifact = mhsa.compile(file, weights=word).save(folder / f"{word or 'float32'}.mhsa")
        compiled = mhsa.load(artifact)
        size = (artifact.path / "weights.safetensors").stat().st_size
        result.append(cost(f"ours, {word or 'float32'}", _vectors(rows, compiled), exact, size))
    quantize_dynamic(file, folder / "int8.onnx", weight_type=QuantType.QInt8)
    quantiser = MatMulNBitsQuantizer(str(file), block_size=32, is_symmetric=True, accuracy_level=4)
    quantiser.process()
    quantiser.model.save_model_to_file(str(folder / "int4.onnx"), use_external_data_format=False)
    for name in ("int8", "int4"):
        path = folder / f"{name}.onnx"
        result.append(cost(f"ONNX Runtime, {name}", _vectors(rows, _session(path)), exact, path.stat().st_size))
    return result


def _session(path: Path) -> Embed:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return lambda *arrays: np.asarray(session.run(None, dict(zip(names, arrays, strict=True)))[0])


def _vectors(rows: list[list[int]], embed: Embed) -> np.ndarray:
    """One after the other: no padding has a say."""
    ids = (np.array([row], np.int64) for row in rows)
    return np.concatenate([np.asarray(embed(row, np.ones(row.shape, np.bool_))) for row in ids])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    texts = sentences()
    with tempfile.TemporaryDirectory() as folder:
        rows = costs(texts, Path(folder))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=2))
    table = Table(f"{len(texts)} sentences", "cosine", "at least", "nearest kept", "of ten", "MB")
    for row in rows:
        shares = (f"{row.nearest:.1%}", f"{row.ten:.1%}")
        table.add_row(row.name, f"{row.mean:.5f}", f"{row.least:.5f}", *shares, f"{row.megabytes:.1f}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "examples"))
    sys.exit(main())
