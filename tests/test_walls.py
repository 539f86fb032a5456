"""The walls of mhsa_compile: which folder may import which, what a light one never loads, who knows a target's name.

A new file needs no entry here; a new folder of the package needs a line in MAY_IMPORT, a new package beside it one in
PACKAGES.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import mhsa_analysis
import mhsa_bench
import mhsa_compile
from mhsa_compile.hardware.profile import NATIVE, profile_names

PACKAGE = Path(mhsa_compile.__file__).parent
PACKAGES = (PACKAGE, Path(mhsa_analysis.__file__).parent, Path(mhsa_bench.__file__).parent)
FILES = sorted(path for package in PACKAGES for path in package.rglob("*.py") if "_data" not in path.parts)
FOLDERS = sorted({path.parent for path in FILES})

BASE = {"errors", "files", "version"}
MAY_IMPORT = {
    "files": set(),
    "spec": set(),
    "hardware": set(),
    "runtime": {"spec", "hardware"},
    "records": {"hardware"},
    "nn": {"spec"},
    "verification": {"nn", "runtime", "spec", "hardware"},
    "conversion": {"nn", "spec", "verification"},
    "kernels": {"spec", "hardware"},
    "mhsa_analysis": {"conversion", "mhsa_bench.plots.figure", "nn", "runtime", "spec", "verification"},
    "frontend": {"conversion", "kernels.interface", "kernels.scores", "nn", "runtime", "spec", "verification"},
    "compiler": {"frontend", "kernels", "records", "runtime", "spec", "hardware", "verification"},
    "integrations": {"compiler", "conversion", "frontend", "nn", "runtime", "spec", "hardware", "verification"},
    "bench": {"compiler", "nn", "runtime", "spec", "verification"},
    "mhsa_bench": {"bench", "compiler", "frontend", "kernels", "nn", "records", "runtime", "spec", "hardware"}
    | {"tuning", "verification"},
    "tuning.measure": {"records", "runtime", "hardware"},
    "tuning": {"bench", "compiler", "frontend", "kernels", "nn", "records", "runtime", "hardware", "verification"},
    "cli": {"bench", "compiler", "frontend", "kernels", "nn", "records", "runtime", "spec", "hardware", "tuning"}
    | {"verification", "mhsa_analysis", "mhsa_bench"},
}
"""What a folder may import beside itself and BASE; the innermost folder that is named here counts."""
WITHIN_KERNELS = {
    "kernels.interface": set(),
    "kernels.common": {"kernels.interface"},
    "kernels.cpu": {"kernels.common", "kernels.interface"},
    "kernels.cuda": {"kernels.common", "kernels.interface"},
    "kernels.scores": {"kernels.common", "kernels.interface", "kernels.cpu", "kernels.cuda"},
}
"""What a folder of kernels may import of the other ones: the two families never know each other; the list of both is
`kernels/registry.py`."""
FRAMEWORKS = {"torch", "onnx", "onnxscript", "onnxruntime"}
TVM = {"tvm", "tvm_ffi"}
NEVER = {
    **dict.fromkeys(("files", "spec", "hardware", "records", "runtime.artifact"), FRAMEWORKS | TVM),
    **dict.fromkeys(("runtime", "tuning.measure"), FRAMEWORKS | {"tvm.relax"}),
    "nn": TVM,
    "conversion": TVM | {"onnx", "onnxscript", "onnxruntime"},
    "mhsa_analysis": TVM | {"onnx", "onnxscript", "onnxruntime"},
    "kernels": FRAMEWORKS,
}
"""Libraries that a folder never imports, not even inside of a function."""
KNOW_TARGET_NAMES = {"hardware", "cli"}


def module_of(path: Path) -> str:
    """The dotted name below the library, `kernels.cpu.rope`, and of what lies beside it the whole,
    `mhsa_bench.roofline`; a folder's own for its `__init__`."""
    package = next(package for package in PACKAGES if path.is_relative_to(package))
    parts = path.relative_to(PACKAGE if package == PACKAGE else package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path) for path in FILES}


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@dataclass(frozen=True)
class Source:
    """What the walls ask of a file."""

    imports: frozenset[str]
    types: tuple[str, ...]
    target_names: tuple[str, ...]


@cache
def source_of(path: Path) -> Source:
    """A file is parsed once for all walls, which is most of their time."""
    tree = tree_of(path)
    return Source(frozenset(imports_below(tree)), tuple(type_names(tree)), tuple(target_names(tree)))


def imports(path: Path) -> frozenset[str]:
    return source_of(path).imports


def imports_below(node: ast.AST) -> Iterator[str]:
    """Dotted names that a file imports, also inside of functions; blocks for type checkers import nothing."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: a relative import; write mhsa_compile in full"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        else:
            yield from imports_below(child)


def own_imports(path: Path) -> set[str]:
    """Modules of these packages that a file imports, as `module_of` names them; names in them are cut off."""
    names = {name for name in imports(path) if name.partition(".")[0] in {package.name for package in PACKAGES}}
    modules = {name.removeprefix("mhsa_compile.") for name in names}
    return {module if module in MODULES else module.rpartition(".")[0] for module in modules}


def within(name: str, folder: str) -> bool:
    return f"{name}.".startswith(f"{folder}.")


def rule_of(module: str, table: dict[str, set[str]]) -> str | None:
    """The innermost folder of `table` that holds the module."""
    return max((folder for folder in table if within(module, folder)), key=len, default=None)


def outside(names: Iterable[str], folders: Collection[str]) -> set[str]:
    """The names that are within none of these folders."""
    return {name for name in names if not any(within(name, folder) for folder in folders)}


def offences(wall: Callable[[Path], Collection[str]], paths: Iterable[Path] = FILES) -> dict[str, Collection[str]]:
    """What is beyond a wall, by the module that has it: one test asks all files, of which there are hundreds."""
    of_files = {module_of(path): wall(path) for path in paths}
    assert of_files
    return {module: names for module, names in of_files.items() if names}


def test_folders_import_only_what_they_may() -> None:
    def others(path: Path) -> set[str]:
        folder = rule_of(module_of(path), MAY_IMPORT)
        if folder is None:
            return set() if path.parent == PACKAGE else {"its folder needs a line in MAY_IMPORT"}
        return outside(own_imports(path), MAY_IMPORT[folder] | BASE | {folder})

    assert offences(others) == {}, "MAY_IMPORT says what a folder may import"


def test_families_of_kernels_do_not_know_each_other() -> None:
    def others(path: Path) -> set[str]:
        folder = str(rule_of(module_of(path), WITHIN_KERNELS))
        kernels = (name for name in own_imports(path) if within(name, "kernels"))
        return outside(kernels, WITHIN_KERNELS[folder] | {folder})

    assert offences(others, (path for path in FILES if rule_of(module_of(path), WITHIN_KERNELS))) == {}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: module_of(folder / "__init__.py"))
def test_what_lies_in_a_folder_imports_in_one_direction(folder: Path) -> None:
    """No circle between the files and folders of any folder, at any depth."""
    inside = tuple(filter(None, module_of(folder / "__init__.py").split(".")))
    imported: dict[str, set[str]] = {}
    for path in FILES:
        parts = module_of(path).split(".")
        if tuple(parts[: len(inside)]) != inside or len(parts) == len(inside) or path == PACKAGE / "__init__.py":
            continue
        others = [name.split(".") for name in own_imports(path)]
        below = {other[len(inside)] for other in others if tuple(other[: len(inside)]) == inside < tuple(other)}
        imported.setdefault(parts[len(inside)], set()).update(below - {parts[len(inside)]})
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_folders_say_what_they_are_and_hold_no_code() -> None:
    """Importing one file of a folder loads that file and what it needs, nothing beside it."""

    def code(path: Path) -> list[str]:
        first, *rest = tree_of(path).body
        return [ast.unparse(node) for node in (rest if isinstance(first, ast.Expr) else (first, *rest))]

    places = (folder / "__init__.py" for folder in FOLDERS if folder != PACKAGE)
    assert offences(code, places) == {}, "an `__init__.py` is a docstring"


def test_light_folders_import_no_compiler() -> None:
    def compilers(path: Path) -> set[str]:
        libraries = NEVER[str(rule_of(module_of(path), NEVER))]
        return {name for name in imports(path) for library in libraries if within(name, library)}

    assert offences(compilers, (path for path in FILES if rule_of(module_of(path), NEVER))) == {}


def docstrings(tree: ast.Module) -> set[int]:
    """Identities of the nodes that are documentation: strings that stand alone as a statement."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def test_targets_are_asked_for_capabilities_not_names() -> None:
    """What can be seen in the source: no target's name as a string, and no `profile.name`."""
    others = (path for path in FILES if module_of(path).partition(".")[0] not in KNOW_TARGET_NAMES)
    assert offences(lambda path: source_of(path).target_names, others) == {}


TARGET_NAMES = re.compile(rf"\b({'|'.join(re.escape(name) for name in profile_names() if name != NATIVE)})\b")


def target_names(tree: ast.Module) -> Iterator[str]:
    documentation = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield from [f"line {node.lineno} names a target"] * bool(TARGET_NAMES.search(node.value))
        if isinstance(node, ast.Attribute) and node.attr == "name":
            owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
            yield from [f"line {node.lineno} reads a target's name"] * owner.endswith("profile")


def type_names(tree: ast.Module) -> Iterator[str]:
    """The classes of a file, and the names that it gives to types; a TypeVar is a parameter, and no type."""
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    blocks = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.If))]
    for node in (node for block in blocks for node in block if isinstance(node, ast.Assign)):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if not isinstance(node.value, ast.Call):
            yield from filter(re.compile(r"_?[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*").fullmatch, names)


def test_a_type_name_has_one_meaning() -> None:
    """Whoever searches for a type finds the one place that says what it is."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        for name in source_of(path).types:
            places.setdefault(name, []).append(module_of(path))
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def loaded_after(code: str) -> tuple[set[str], str]:
    """The modules and the memory map of a fresh process that ran `code`."""
    report = "import sys; print(*sys.modules); print('---'); print(open('/proc/self/maps').read())"
    child = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    modules, _, maps = child.stdout.partition("---")
    return set(modules.split()), maps


FRESH = {
    "import mhsa_compile": {"numpy", "msgspec", "torch", "onnx", "tvm", "tvm_ffi", "rich", "typer"},
    "import mhsa_compile.spec.attention_spec": {"numpy", "torch", "onnx", "tvm", "tvm_ffi"},
    "import mhsa_compile.hardware.profile": {"numpy", "torch", "onnx", "tvm", "tvm_ffi"},
    "import mhsa_compile.runtime.artifact.artifact": {"torch", "onnx", "tvm", "tvm_ffi"},
    "import mhsa_compile.runtime.compiled_attention": {"torch", "onnx", "tvm.relax"},
    "import mhsa_compile.analysis": {"numpy", "torch", "onnx", "tvm", "tvm_ffi"},
    "from mhsa_compile.analysis import HeadStatistics, gaussian_information": {"torch", "onnx", "tvm", "tvm_ffi"},
    "import mhsa_compile.cli.app": {"numpy", "torch", "onnx", "tvm", "tvm_ffi"},
}


@pytest.mark.thorough_but("import mhsa_compile", "import mhsa_compile.analysis")
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the memory map is read from /proc")
@pytest.mark.parametrize(("code", "absent"), FRESH.items(), ids=FRESH.keys())
def test_what_a_fresh_process_loads(code: str, absent: set[str]) -> None:
    modules, maps = loaded_after(code)
    assert not absent & modules
    assert "libtvm_compiler" not in maps
    assert "libtorch" not in maps


def test_public_names_are_there() -> None:
    for name in mhsa_compile.__all__:
        assert getattr(mhsa_compile, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'attention'"):
        _ = mhsa_compile.attention
    for name in mhsa_compile.analysis.__all__:
        assert callable(getattr(mhsa_compile.analysis, name))
    with pytest.raises(AttributeError, match="no attribute 'heads'"):
        _ = mhsa_compile.analysis.heads
