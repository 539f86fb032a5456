"""The walls between the rooms of mhsa_compile: who may import whom, who may know what, and how long a file may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mhsa_compile
from mhsa_compile.target.profile import NATIVE, profile_names

PACKAGE = Path(mhsa_compile.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "_data" not in path.parts)
IDS = [str(path.relative_to(PACKAGE)) for path in FILES]

# A room imports only from rooms before it.
LIGHT = [
    *("version", "errors", "refusals", "files", "opened", "staging", "free_memory"),
    *("spec_checks", "patterns", "positions", "outputs", "spec", "workloads", "masks"),
    *(
        "host",
        "installation",
        "zig",
        "data",
        "profile",
        "dims",
        "semantics",
        "manifest",
        "artifact",
        "loadable",
        "gpus",
        "calls_at_exit",
        "tvm_runtime",
        "stored_weights",
        "memory",
        "tensors",
        "device_tensors",
        "launches",
        "kv_cache",
        "runtime",
    ),
    *(
        "device",
        "jobs",
        "records",
        "journal",
        "record_files",
        "serve",
        "connections",
        "measuring",
        "sessions",
        "bundles",
        "results",
        "standalone",
    ),
]
COMPILE_SIDE = [
    *("inside", "core", "mhsa_operator", "operators", "model", "conversion"),
    *("reference_inside", "reference_scores", "reference_attention", "reference", "stored_model"),
    *("error_budget", "random_inputs", "onnx_graph", "softmax_parity", "parity"),
    *("subject", "pairs", "repeats", "selfcheck", "verify"),
    *("module_calls", "export_check", "sdpa_translation", "signatures"),
    *("torch_layers", "free_dims", "export", "symbols", "sources", "kernels"),
    "canonical",
    *("head_views", "attention_inputs", "attention_site", "rotary_site"),
    *("rotated_parts", "rotated_site", "scatter_site", "linear_pattern", "fusion"),
    *(
        "attention_masks",
        "attention_import",
        "conversions",
        "importer",
        "onnx_weights",
        "plain_attention",
        "plain_linear",
    ),
    *("op_keys", "op_summary", "lowered_module", "choices"),
    *("elementary", "traces", "rest", "rest_cuda", "schedule"),
    *("cubin", "device_code", "device_memory", "empty_grids", "races", "build", "pipeline"),
    *("limits", "accuracy", "timing", "peers", "bench_report", "bench", "gpu_bench"),
    *("inner_loops", "mca", "predict"),
    *("exercises", "spaces", "study_storage", "sampler", "studies", "guesses", "search"),
    *("leftovers", "tuning", "meta", "tune", "parcel", "gain"),
    *("drawing", "plots", "mask_plots", "tuning_plots"),
    *("analysis", "integrations", "cli"),
]
ORDER = [*LIGHT, *COMPILE_SIDE, "__init__", "__main__"]

HEAVY = {"torch", "onnx", "onnxscript", "onnxruntime", "tvm.relax", *(f"mhsa_compile.{room}" for room in COMPILE_SIDE)}
WALLS = {
    **dict.fromkeys(LIGHT, HEAVY),
    **dict.fromkeys(("manifest", "artifact"), HEAVY | {"tvm", "tvm_ffi"}),
    "kernels": {"torch", "onnx", *(f"mhsa_compile.{room}" for room in ("model", "parity", "selfcheck", "verify"))},
    **{room: {"tvm", "tvm_ffi"} for room in ("core", "operators", "model", "conversion")},
}
FAMILIES = sorted(path.parent.name for path in (PACKAGE / "kernels").glob("*/__init__.py"))
KERNELS = [
    path for path in FILES if (PACKAGE / "kernels") in path.parents and path != PACKAGE / "kernels" / "registry.py"
]
KNOWS_TARGET_NAMES = {"profile", "data", "cli"}
LONGEST_FILE = 350  # the aim is 300; past this a file holds two rooms


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(node: ast.AST) -> Iterator[str]:
    """Dotted names imported anywhere below, functions included; blocks for type checkers import nothing."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: a relative import; write mhsa_compile in full"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        else:
            yield from imports(child)


def within(name: str, wall: str) -> bool:
    return f"{name}.".startswith(f"{wall}.")


def test_every_room_has_its_place_in_the_order() -> None:
    assert {room_of(path) for path in FILES} <= set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_rooms_import_only_from_earlier_ones(path: Path) -> None:
    room = room_of(path)
    own = [name.split(".")[1] for name in imports(tree_of(path)) if name.startswith("mhsa_compile.")]
    rooms = {name for name in own if name in ORDER} - {room}
    later = {name for name in rooms if ORDER.index(name) > ORDER.index(room)}
    assert not later, f"{room} comes before {', '.join(sorted(later))}"
    unknown = set(own) - set(ORDER)
    assert not unknown, f"import {', '.join(sorted(unknown))} from the room that defines it"


@pytest.mark.parametrize("path", [p for p in FILES if room_of(p) in WALLS], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_walls_hold(path: Path) -> None:
    broken = {n for n in imports(tree_of(path)) for wall in WALLS[room_of(path)] if within(n, wall)}
    assert not broken


@pytest.mark.parametrize("path", KERNELS, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_families_of_kernels_do_not_know_each_other(path: Path) -> None:
    """What two of them need lies beside them and knows neither. Only the lists of `kernels/registry.py` know both."""
    own = path.relative_to(PACKAGE / "kernels").parts[0]
    others = [f"mhsa_compile.kernels.{family}" for family in FAMILIES if family != own]
    broken = {name for name in imports(tree_of(path)) for other in others if within(name, other)}
    assert not broken


def docstrings(tree: ast.Module) -> set[int]:
    """Identities of the nodes that are documentation: strings that stand alone as a statement."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


@pytest.mark.parametrize(
    "path", [p for p in FILES if room_of(p) not in KNOWS_TARGET_NAMES], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_targets_are_asked_for_capabilities_not_names(path: Path) -> None:
    """What can be seen in the source: no target's name as a string, and no `profile.name`."""
    tree = tree_of(path)
    documentation = docstrings(tree)
    names = "|".join(re.escape(name) for name in profile_names() if name != NATIVE)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            assert not re.search(rf"\b({names})\b", node.value), f"line {node.lineno} names a target"
        if isinstance(node, ast.Attribute) and node.attr == "name":
            assert not ast.unparse(node.value).endswith("profile"), f"line {node.lineno} reads a target's name"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE


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
    "import mhsa_compile.target.profile": {"numpy", "torch", "onnx", "tvm", "tvm_ffi"},
    "import mhsa_compile.runtime.artifact.artifact": {"torch", "onnx", "tvm", "tvm_ffi"},
    "import mhsa_compile.runtime.compiled_attention": {"torch", "onnx", "tvm.relax"},
    "import mhsa_compile.cli.app": {"numpy", "torch", "onnx", "tvm", "tvm_ffi"},
}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the memory map is read from /proc")
@pytest.mark.parametrize(("code", "absent"), FRESH.items(), ids=FRESH.keys())
def test_what_a_fresh_process_loads(code: str, absent: set[str]) -> None:
    modules, maps = loaded_after(code)
    assert not absent & modules
    assert "libtvm_compiler" not in maps
    assert "libtorch" not in maps


def test_public_names_are_what_the_rooms_define() -> None:
    from mhsa_compile.verification.verify import verify  # the room of this name must not take the function's place

    assert mhsa_compile.verification.verify is verify
    for name in mhsa_compile.__all__:
        assert getattr(mhsa_compile, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'attention'"):
        _ = mhsa_compile.attention
