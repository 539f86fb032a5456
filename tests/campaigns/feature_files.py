"""How far a feature of attention scores is spread: in how many files outside of tests each is named.

    python -m campaigns.feature_files            a table, of the working tree; `make feature-files`
    python -m campaigns.feature_files --files    and which files they are

A file names a feature where one of its words is an identifier, or a string: not in a sentence, to people or to readers.
Two counts: on the way from a spec, or from a node of a graph, to a kernel and its proof, where a feature like it is
added; and everywhere, with what reads other people's forms of it (frontend/canonicalize and reading, conversion,
integrations) and what uses it (bench, analysis), which a feature can do without.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FEATURES: dict[str, tuple[str, ...]] = {
    "softcap": ("softcap", "Softcap"),
    "softclamp": ("softclamp", "SoftClamp"),
    "score_mod": ("score_mod", "ScoreMod"),
    "static mask": ("static_mask", "StaticMask"),
    "call's mask": ("CallMask", "attn_mask", "additive", "key_padding"),
    "mask_mod": ("mask_mod", "MaskMod"),
    "band": ("Band", "band", "is_causal", "left_window_size", "right_window_size"),
    "lengths": ("Lengths", "nonpad_kv_seqlen"),
    "sinks": ("sinks", "Sinks"),
    "slopes": ("slopes", "Slopes", "alibi", "alibi_slopes"),
}
"""What each is called: the step, the field of the spec, the attributes and inputs of a node."""
ASIDE = (
    *("frontend/canonicalize", "frontend/reading", "conversion", "integrations", "bench"),
    *(f"frontend/export/{name}.py" for name in ("flex_attention", "sdpa_translation", "torch_layers")),
    "spec/masks.py",
    "spec/semantics.py",
)
"""What a feature can do without, in the package: what reads other people's forms of it, and uses it; helpers that make
arrays for whoever calls; and the manifest's format, whose `steps` have room for any."""


def files() -> list[Path]:
    return sorted(path for package in ROOT.glob("mhsa_*") for path in package.rglob("*.py"))


@cache
def words(path: Path) -> frozenset[str]:
    return frozenset(_words(ast.parse(path.read_text(encoding="utf-8"))))


def _words(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for value in (getattr(node, name, None) for name in ("id", "attr", "arg", "name", "asname")):
            if isinstance(value, str):
                yield value
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def named_in(feature: str) -> list[str]:
    """The files that name a feature, below the root."""
    return [str(path.relative_to(ROOT)) for path in files() if words(path) & set(FEATURES[feature])]


def on_the_way(path: str) -> bool:
    package, _, below = path.partition("/")
    return package == "mhsa_compile" and not below.startswith(ASIDE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", action="store_true", help="which files they are")
    arguments = parser.parse_args()
    print(f"{'feature':14}{'to add':>8}{'named in':>10}")
    for feature in FEATURES:
        paths = named_in(feature)
        way = [path for path in paths if on_the_way(path)]
        print(f"{feature:14}{len(way):8}{len(paths):10}")
        for path in way if arguments.files else ():
            print(f"    {path}")


if __name__ == "__main__":
    main()
