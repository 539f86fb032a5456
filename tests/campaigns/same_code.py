"""Whether a change of the source leaves compiled code as it was: artifacts of every kernel, for CPUs and for GPUs, as
the working tree makes them and as a commit does, function by function. `make same-code AGAINST=COMMIT`.

    python -m campaigns.same_code COMMIT --json build/same-code.json
    python -m campaigns.same_code COMMIT --only sm90a             rows whose name or target holds this
    python -m campaigns.same_code --sides OLD.json NEW.json       what `same_code_artifacts.py` wrote before

What lies in the library beside code (the linker's notes, where a function begins) has no say; of manifests everything
but versions and hashes of files does. Needs nvcc or NVRTC for the GPUs' rows, no GPU. Exits with 1 if anything differs,
a row does not compile, or no row ran some kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILDER = Path(__file__).with_name("same_code_artifacts.py")
Side = dict[str, Any]  # what the builder writes of a row


@dataclass(frozen=True)
class Comparison:
    """What differs in a row: functions, of our kernels and of what TVM lowers; keys of the manifest. `error` says why a
    side has nothing to compare."""

    name: str
    target: str
    kernels: tuple[str, ...]
    of_kernels: tuple[str, ...]
    of_others: tuple[str, ...]
    manifest: tuple[str, ...]
    functions: int
    same_library: bool
    error: str = ""

    @property
    def is_same(self) -> bool:
        return not (self.of_kernels or self.of_others or self.manifest or self.error)

    def described(self) -> str:
        if self.is_same:
            return "same" + ("" if self.same_library else ", but for the library's bytes around its functions")
        named = {"OF KERNELS": self.of_kernels, "other functions": self.of_others, "manifest": self.manifest}
        words = [f"{what}: {', '.join(names)}" for what, names in named.items() if names]
        return "; ".join([self.error] if self.error else words)


def compare(old: Side, new: Side) -> Comparison:
    name, target = new["name"], new["target"]
    errors = [
        f"{side} does not compile: {row['error']}" for side, row in (("old", old), ("new", new)) if "error" in row
    ]
    if errors:
        return Comparison(name, target, (), (), (), (), 0, False, "; ".join(errors))
    functions = {key: old["functions"].get(key) == value for key, value in new["functions"].items()}
    functions |= dict.fromkeys(old["functions"].keys() - new["functions"].keys(), False)
    operations = {*old["operations"], *new["operations"]}
    different = sorted(key for key, is_same in functions.items() if not is_same)
    ours = [key for key in different if is_of(key, operations)]
    return Comparison(
        name=name,
        target=target,
        kernels=tuple(new["kernels"]),
        of_kernels=tuple(ours),
        of_others=tuple(key for key in different if key not in ours),
        manifest=tuple(differing(old["manifest"], new["manifest"])),
        functions=len(functions),
        same_library=old["library"] == new["library"],
    )


def is_of(function: str, operations: set[str]) -> bool:
    """Whether a function belongs to one of the operations: "attention_op_1_compute_" is op_1's."""
    return any(f"_{operation}_" in f"{function}_" for operation in operations)


def differing(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """The places where two trees of JSON differ: "ops[2].note". A key that is not there is one that says null."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from differing(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differing(one, other, f"{path}[{i}]")
    elif old != new:
        yield path


def built(tree: Path, folder: Path, only: str) -> list[Side]:
    """The rows as a tree compiles them, in a process of its own."""
    file = folder / f"{tree.name}.json"
    print(f"Compiling with {tree}", file=sys.stderr, flush=True)
    words = [sys.executable, str(BUILDER), "--json", str(file), "--only", only]
    subprocess.run(words, check=True, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)})
    found = json.loads(file.read_text())
    if not Path(found["package"]).is_relative_to(tree):
        sys.exit(f"{found['package']} was imported, not the package of {tree}")
    rows: list[Side] = found["rows"]
    return rows


def both(commit: str, only: str) -> tuple[list[Side], list[Side]]:
    """The rows of the commit and of the working tree."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="same-code-") as name:
        tree = Path(name).resolve() / "commit"
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            return built(tree, Path(name), only), built(ROOT, Path(name), only)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def absent(rows: list[Side]) -> list[str]:
    """The kernels that no row ran."""
    from mhsa_compile.kernels.registry import KERNELS

    ran = {kernel for row in rows for kernel in row.get("kernels", ())}
    return sorted({kernel.name for family in KERNELS.values() for kernel in family} - ran)


def report(found: list[Comparison]) -> None:
    for one in found:
        print(f"{one.name:34}{one.target:17}{' '.join(one.kernels):70}{one.described()}")
    same, libraries = sum(one.is_same for one in found), sum(one.same_library for one in found)
    functions = sum(one.functions for one in found)
    ours, others = (sum(len(getattr(one, part)) for one in found) for part in ("of_kernels", "of_others"))
    manifests, failed = sum(bool(one.manifest) for one in found), sum(bool(one.error) for one in found)
    print(f"{len(found)} artifacts, {same} the same, {libraries} of the libraries to the byte; {failed} not compiled")
    print(f"{functions:,} functions: {ours} of kernels differ, {others} others; {manifests} manifests differ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="what the working tree is compared with")
    parser.add_argument("--sides", nargs=2, type=Path, metavar=("OLD", "NEW"), help="files of both sides, instead")
    parser.add_argument("--only", default="", help="rows whose name or target holds this")
    parser.add_argument("--json", type=Path, help="the table as JSON")
    options = parser.parse_args()
    if (options.commit is None) == (options.sides is None):
        parser.error("either a commit or --sides")
    if options.sides:
        old, new = (json.loads(file.read_text())["rows"] for file in options.sides)
    else:
        old, new = both(options.commit, options.only)
    found = [compare(one, other) for one, other in zip(old, new, strict=True)]
    report(found)
    missing = [] if options.only else absent(new)
    print(f"kernels that no row ran: {', '.join(missing) or 'none'}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        rows = [{**asdict(one), "same": one.is_same} for one in found]
        options.json.write_text(json.dumps({"against": options.commit, "absent": missing, "rows": rows}, indent=1))
    return int(bool(missing) or not all(one.is_same for one in found))


if __name__ == "__main__":
    sys.exit(main())
