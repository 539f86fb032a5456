"""A scheduled module -> one shared library, for this host or another.

Zig's C compiler links for every target from any host, needs no system tool chain, and gives the same bytes twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from mhsa_compile.compiler.codegen import caller_memory, data_races, embed_cubin, empty_arrays, webassembly
from mhsa_compile.compiler.codegen.object_files import ObjectFiles, most_bytes_of_code, most_bytes_of_data
from mhsa_compile.compiler.codegen.runtime_functions import check_functions
from mhsa_compile.errors import TargetError
from mhsa_compile.files import atomic_write
from mhsa_compile.files.package_files import beside
from mhsa_compile.hardware import environment, zig
from mhsa_compile.hardware.profile import CpuProfile, CudaProfile, TargetProfile, system_of
from mhsa_compile.runtime import threads, tvm_runtime
from mhsa_compile.runtime.artifact.manifest import CallCost, OpReport, Packing, SlowOperation

POOL = (str(Path(threads.__path__[0], "threads.c")), "-fno-sanitize=undefined")
"""The pool of threads that an artifact for a CPU carries."""
_SYSTEM_WORDS = {
    "linux": ("-lpthread", "-ldl", "-Wl,-z,nodelete"),  # the pool's workers never end, so the library never goes
    "macos": ("-Wl,-undefined,dynamic_lookup", "-Wl,-install_name,@rpath/module.so"),
    "windows": ("-lapi-ms-win-core-synch-l1-2-0",),
}
"""What the linker is told besides, by operating system."""
_FOR_GPUS = tuple(
    f"s_tir.{name}"
    for name in (
        "InferFragment",
        "InjectDoubleBuffer",
        "InjectPermutedLayout",
        "InjectSoftwarePipeline",
        "InjectVirtualThread",
        "LowerAutoCopy",
        "LowerThreadAllreduce",
        "LowerVtcmAlloc",
        "ManifestSharedMemoryLocalStage",
        "MergeSharedMemoryAllocations",
        "ThreadSync",
        "TransformMmaBufferLayout",
    )
)
"""Passes about threads of a block, memory that they share, and tensor cores."""


@dataclass
class LoweredModule:
    """What `build` compiles. `weights` are the initializers, of which `weight_binding` has numbers; `packed` is how
    many parameters of main it makes of them, after the inputs."""

    module: Any
    weights: list[str]
    packed: int
    reports: list[OpReport]
    slow: tuple[SlowOperation, ...] = ()
    cost: CallCost | None = None
    packing: tuple[Packing, ...] = ()


def build(scheduled: LoweredModule, profile: TargetProfile, library: Path) -> None:
    """Writes the shared library. Raises BuildError with the linker's words, and InstallationError."""
    if isinstance(profile, CudaProfile):
        executable = device_executable(scheduled, profile)
    else:
        with pass_context():
            module = empty_arrays.allocate_constants(scheduled.module, "main")
            executable = relax.build(module, _target(profile), relax_pipeline=_pipeline())
        if profile.is_webassembly:
            webassembly.export(executable, library, profile)
            return
    _export(executable, library, profile)
    check_functions(library, tvm_runtime.libraries(isinstance(profile, CudaProfile)))


def device_executable(scheduled: LoweredModule, profile: CudaProfile) -> Any:
    """The executable for a GPU; its kernels are CUDA C++ still, whether there is a GPU here or not."""
    inputs = len(scheduled.module["main"].params) - scheduled.packed
    module = caller_memory.from_caller(tvm.transform.Sequential(_planning())(scheduled.module), inputs)
    module = empty_arrays.guard_launches(module)
    with _for_kernels():
        return relax.build(module, _target(profile), relax_pipeline=tvm.transform.Sequential(_lowering()))


def _target(profile: TargetProfile) -> Any:
    return tvm.target.Target(profile.tvm_config())


@contextmanager
def _for_kernels() -> Iterator[None]:
    """TVM compiles kernels itself where it finds a GPU; with this it leaves them to us there, too.

    Not `pass_context`: schedules of TVM's for GPUs cut their shared memory to size by a pass that it leaves out.
    """
    with (
        environment.variable("TVM_COMPILE_FORCE_FALLBACK", "1"),
        tvm.transform.PassContext(config={"tirx.disable_cse_tir": True}),
    ):
        yield


def library(functions: Mapping[str, Any], profile: TargetProfile) -> bytes:
    """PrimFuncs by name as a shared library of their own, without a VM. Raises BuildError with the linker's words, and
    TargetError for WebAssembly, of which there are none."""
    if isinstance(profile, CpuProfile) and profile.is_webassembly:
        raise TargetError("target", "one whose code a process maps, since it is measured by itself", "WebAssembly")
    compiled = machine_code(functions, profile)
    with atomic_write.temporary() as folder:
        path = folder / "functions.so"
        _export(compiled, path, profile)
        return path.read_bytes()


def machine_code(functions: Mapping[str, Any], profile: TargetProfile) -> Any:
    """PrimFuncs by name, compiled and not linked. Raises BuildError for a race of threads."""
    module = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items()})
    with _for_kernels() if isinstance(profile, CudaProfile) else pass_context():
        return tvm.compile(module, target=_target(profile))


def _export(executable: Any, library: Path, profile: TargetProfile) -> None:
    with atomic_write.temporary() as folder, ObjectFiles(folder) as objects:
        module = getattr(executable, "mod", executable)
        for part in [module, *module.imports]:
            if part.kind == "llvm":
                objects.check_room(partial(most_bytes_of_code, part))
        linker = _linker(profile.link.triple, objects, _sources(profile))
        executable.export_library(
            str(library), fcompile=linker, workspace_dir=str(folder), fpack_imports=_packer(profile, objects)
        )


def _sources(profile: TargetProfile) -> tuple[str, ...]:
    """What else is linked into the library, in C, and what the linker is told."""
    if isinstance(profile, CudaProfile):
        return ()
    if profile.system not in _SYSTEM_WORDS:
        expected = f"a link.triple for {' or '.join(_SYSTEM_WORDS)}"
        raise TargetError("target", expected, repr(profile.link.triple), "targets/README.md has the schema.")
    features = f'-DMHSA_CPU_FEATURES="{" ".join(sorted(profile.hardware.features))}"'
    return (
        *POOL,
        f"-I{threads.__path__[0]}",
        str(beside(__file__, "cpu_features.c")),
        features,
        *_SYSTEM_WORDS[profile.system],
    )


def _packer(profile: TargetProfile, objects: ObjectFiles) -> Any:
    """`fpack_imports` of export_library: an object file with what a module brings beside its code, the VM's program and
    a GPU's kernels, the latter as machine code."""
    pack_imports = tvm_ffi.get_global_func("runtime.ModulePackImportsToTensor")

    def pack(module: Any, is_system_lib: bool, prefix: str, folder: str) -> str:
        packed = pack_imports(module).numpy().tobytes()
        if isinstance(profile, CudaProfile):
            packed = embed_cubin.with_machine_code(packed, profile.tvm.arch)
            host = json.dumps({"kind": "llvm", "mtriple": profile.tvm.mtriple})
        else:
            code = next((part for part in [module, *module.imports] if part.kind == "llvm"), None)
            nothing = json.dumps(profile.tvm_config())  # a graph that computes nothing: an input, or a constant
            host = nothing if code is None else code.get_function("_get_target_string")()
        objects.check_room(partial(most_bytes_of_data, len(packed)))
        blob = tvm_ffi.get_global_func("codegen.codegen_blob")(packed, is_system_lib, host, prefix)
        path = str(Path(folder, "devc.o"))
        blob.write_to_file(path)
        return path

    return pack


@contextmanager
def pass_context() -> Iterator[None]:
    """A PassContext for code of a CPU, without the passes that give our kernels nothing. Two take three quarters of the
    time: the kernels' buffers are as large as they need to be, and LLVM finds common subexpressions itself. Two more
    walk through every kernel for what LLVM does as well: conditions out of loops, and code without effect. The rest
    look for what only GPUs have.

    Raises BuildError where threads would write to the same places (`data_races`)."""
    passes = ["s_tir.CompactBufferAllocation", "s_tir.HoistIfThenElse", "tirx.RemoveNoOp", *_FOR_GPUS]
    config = {"tirx.disable_cse_tir": True}
    with (
        data_races.race_check() as look,
        tvm.transform.PassContext(disabled_pass=passes, config=config, instruments=[look]),
    ):
        yield


def _pipeline() -> Any:
    """The passes from call_tir to the VM's instructions, in order."""
    return tvm.transform.Sequential([*_planning(), *_lowering()])


def _planning() -> list[Any]:
    """The passes that settle which array lies in which memory."""
    return [
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
        tvm.transform.module_pass(_plan_memory, opt_level=0),
    ]


def _plan_memory(module: Any, context: Any) -> Any:
    """Lets arrays that live one after another share memory. Where a function branches they have each their own: TVM's
    plan gives an array of one branch memory that only another one allocates."""
    functions = {key: function for key, function in module.functions_items() if isinstance(function, relax.Function)}
    blocks = (block for function in functions.values() for block in function.body.blocks)
    bindings = (binding for block in blocks for binding in block.bindings)
    if any(isinstance(binding.value, relax.If) for binding in bindings):
        return module
    unbounded = {key: _UnboundedSizes().visit_expr(function) for key, function in functions.items()}
    module = tvm.IRModule(dict(module.functions_items()) | unbounded, attrs=module.attrs)
    return relax.transform.StaticPlanBlockMemory()(module)


@mutator
class _UnboundedSizes(PyExprMutator):  # type: ignore[misc]
    """Arrays whose sizes have no bound that TVM's plan could see: it would ask for memory for as many elements as that,
    so for 2**31 - 2 where a Slice goes from 1 to the end, written as a number."""

    def visit_call_(self, call: Any) -> Any:
        if call.op != tvm.ir.Op.get("relax.builtin.alloc_tensor"):
            return super().visit_call_(call)
        shape = tvm_ffi.structural_map(call.args[0], (tirx.Min, _opaque))
        return relax.Call(call.op, [shape, *call.args[1:]], call.attrs)


def _opaque(size: Any) -> Any:
    """The same number, of which TVM's analysis knows nothing."""
    return tirx.call_intrin("int64", "tirx.reinterpret", size)


def _lowering() -> list[Any]:
    return [
        relax.transform.LowerAllocTensor(),
        relax.transform.KillAfterLastUse(),
        relax.transform.LowerRuntimeBuiltin(),
        relax.transform.ComputePrimValue(),
        relax.transform.VMShapeLower(),
        tvm.transform.module_pass(_order_shape_arithmetic, opt_level=0),
        relax.transform.AttachGlobalSymbol(),
    ]


def _order_shape_arithmetic(module: Any, _: Any) -> Any:
    """Sorts the stores of the sizes that VMShapeLower computes: it writes them in the order of a hash of addresses, and
    two builds would differ. They are independent, since each is computed from the inputs' own dims."""
    for variable, function in module.functions_items():
        if variable.name_hint.startswith("shape_func") and isinstance(function.body, tvm.tirx.SeqStmt):
            stores = sorted(function.body.seq, key=str)
            module[variable] = function.with_body(tvm.tirx.SeqStmt(stores))
    return module


def _linker(triple: str, files: ObjectFiles, sources: Sequence[str] = ()) -> Any:
    """`fcompile` of export_library: links object files, and C sources of ours, into a stripped shared library."""

    def link(output: str, objects: list[str], options: list[str] | None = None, **_: Any) -> None:
        helpers = [str(beside(__file__, "float16.c"))] if triple.startswith("riscv") else []
        inputs = files.on_disk(objects)
        # What Zig makes for whoever links with a library of Windows'; nobody does.
        imports = [f"-Wl,--out-implib,{files.folder / 'unused.lib'}"] if system_of(triple) == "windows" else []
        words = ["-shared", "-fPIC", "-O2", "-s", "-o", output, *inputs, *sources, *helpers, *imports, *(options or [])]
        zig.run("cc", triple, words, "a shared library")

    link.output_format = "so"  # type: ignore[attr-defined]
    return link
