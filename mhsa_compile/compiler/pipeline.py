"""compile(): the whole flow, from a source to an artifact, as a flat list of stages."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from mhsa_compile.compiler import proof, tvm_compiler
from mhsa_compile.compiler.cache import artifact_store
from mhsa_compile.compiler.cache.lookup import CacheLookup, CacheRequest
from mhsa_compile.compiler.codegen import cuda_compiler
from mhsa_compile.errors import BuildError, DefectError, InputError, MhsaError, ModelError, OutputError
from mhsa_compile.files import atomic_write, places, user_folders
from mhsa_compile.files.atomic_write import Unfinished
from mhsa_compile.files.foreign_errors import defect, entry_point, place_of_slip, reading
from mhsa_compile.files.patience import shown_stages
from mhsa_compile.files.room import NO_ROOM, number_of
from mhsa_compile.frontend.export.input_dims import check_dims
from mhsa_compile.frontend.export.source import Source, as_module, read_source, with_outputs
from mhsa_compile.hardware import environment
from mhsa_compile.hardware.profile import CudaProfile, TargetProfile, load_profile
from mhsa_compile.records import record_files
from mhsa_compile.records.record import Record, RecordSet
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.artifact.manifest import FORMAT_VERSION, MODEL, MODULE, SOURCE, WEIGHTS, Manifest
from mhsa_compile.spec.float32_products import Float32Request, float32_request
from mhsa_compile.spec.weight_words import BlockForm, block_form, is_int8
from mhsa_compile.version import __version__

if TYPE_CHECKING:
    import onnx
    from torch import nn

    from mhsa_compile.compiler.codegen.build import LoweredModule
    from mhsa_compile.frontend.canonicalize.canonicalize import Canonical
    from mhsa_compile.frontend.relax.imported_module import ImportedModule
    from mhsa_compile.spec.attention_spec import AttentionSpec
    from mhsa_compile.spec.outputs import LayerWord


WithoutAttention = Literal["warn", "accept", "refuse"]
"""What becomes of a model that holds no attention: it is compiled and a warning says so, compiled, or a ModelError."""
_READ = "a graph that this library reads"
_REPORT = "If `onnx.checker` finds the model valid, this is a defect of ours: report it, with the model."


@entry_point
def compile(
    source: AttentionSpec | nn.Module | onnx.ModelProto | str | Path,
    target: str | TargetProfile = "native",
    *,
    dims: Mapping[str, int] | None = None,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None = None,
    outputs: Sequence[str] | None = None,
    weights: str | None = None,
    float32_products: Float32Request = "auto",
    in_place: bool = False,
    without_attention: WithoutAttention = "warn",
    records: str | Path | Iterable[Record] | None = None,
    progress: Callable[[str], None] | None = None,
    dump: str | Path | None = None,
    cache: bool = True,
    check: bool | None = None,
) -> Artifact:
    """Compiles attention for a target.

    source          a spec (weights at random), an nn.Module, an ONNX model or the path of one
    target          a name that `mhsa targets` lists, the path of a .toml profile, "native", or a TargetProfile
    dims            sizes to fix, by symbol ("B", "L", "S"); the others stay symbolic
    example_inputs  for an nn.Module that is not one of ours: tensors, and tuples, dicts and caches of them, in the
                    order of forward or by name. Its batch and lengths stay symbolic where it allows; what it fixes is
                    warned of, with the reason
    dynamic_shapes  which of their dims stay symbolic, in torch.export's forms: {"x": {0: "B", 1: Dim("L", max=512)}}
    outputs         what a call returns, in the words of `AttentionSpec.outputs`: of a spec, or of a module of ours, as
                    if the spec said so; of any other graph beside its own outputs, of every layer ("entropy") or of
                    one ("weights@3"), as `layer3_weights`; `artifact.manifest.attention` lists the layers
    weights         "int8": linears compute with weights of eight bits, a scale for each output, rounded at load, and
                    with activations of eight bits, a scale for each row; the artifact stores the weights as they are.
                    "int4": the artifact has weights of four bits, a scale for each block of 32 terms, and linears
                    compute with them as they are, and with activations of eight bits; "int8:block=32": of eight
                    (`spec/weight_words.py` has the words for other blocks, zero points, and activations as they are)
    float32_products  how linears, attention and other products multiply float32: "ieee"; by bfloat16 terms, where the
                    target's kernels do, "bf16x6" (as exact), "bf16x3" or "bf16" (less); or "auto", which stays inside
                    float32's error budget. `artifact.manifest.ops` says what each operation got, and why not that
    in_place        of an ONNX model: a call writes into the caches that it is given, and returns these arrays, wherever
                    the graph allows it: a TensorScatter, a GroupQueryAttention whose past and present have one length
    without_attention  what becomes of a model that holds no attention, which other compilers are made for: "warn"
                    compiles it and warns, "accept" compiles it, "refuse" is a ModelError
    records         tuned records: a file, or some at hand; by default the user's and those shipped for this target
    progress        is told the name of each stage as it begins; by default a terminal is, from two seconds on
    dump            a folder for what passes between the stages
    cache           whether the same thing, compiled before, is taken from the user's cache folder, and kept there; the
                    bytes are those of a compilation. MHSA_CACHE=0 switches it off everywhere, `dump` this once

    check           whether what came of an ONNX model, or of an nn.Module that is not one of ours, is run once against
                    an independent evaluation of that model, at two sets of free sizes; `artifact.manifest.check` says
                    what came of it. By default it is, unless MHSA_CHECK=0 is in the environment

    The artifact lives in a temporary folder until `save`. Raises SpecError, TargetError, ModelError, InputError,
    RecordsError, InstallationError, BuildError and MismatchError; warns of a file of records whose last line is torn.

    >>> import mhsa_compile as mhsa
    >>> artifact = compile(mhsa.AttentionSpec(embed_dim=32, num_heads=4, causal=True), dims={"B": 1})
    >>> [op.kernel for op in artifact.manifest.ops]
    ['cpu.linear', 'cpu.attention', 'cpu.linear']
    """
    _check_words(weights, without_attention, dims)
    request = _request(target, weights, float32_products, records, check)
    if dump is not None:
        places.make_folder(dump, OutputError, "dump")
    source, extra_outputs = with_outputs(as_module(source, example_inputs), outputs)
    source = _in_place(source) if in_place else source
    request = replace(request, outputs=tuple(map(str, extra_outputs)))
    use_cache = cache and dump is None and artifact_store.is_on()
    stages = shown_stages("mhsa.compile") if progress is None else nullcontext(progress)
    with stages as tell, CacheLookup(request if use_cache else None) as before:
        tell("export")
        is_bare = example_inputs is None and dynamic_shapes is None
        if is_bare and (entry := before.of_module(source, dims)) is not None:
            return entry
        origin = read_source(source, dims, example_inputs, dynamic_shapes)
        entry = before.of_model(origin.original, dims)
        if entry is not None and (entry.manifest.attention or without_attention == "accept"):
            return entry
        tell("import")
        canonical = _canonical(origin, extra_outputs, without_attention)
        if entry is None:
            entry = _artifact(origin, canonical, request, tell, None if dump is None else Path(dump))
            before.keep(entry)
        return entry


def _check_words(weights: str | None, without_attention: WithoutAttention, dims: Mapping[str, int] | None) -> None:
    """Raises InputError for a word that is none and a size that no dim has, before the work."""
    block_form(weights)
    if without_attention not in get_args(WithoutAttention):
        raise InputError("without_attention", '"warn", "accept" or "refuse"', repr(without_attention))
    check_dims(dims)


def _request(
    target: str | TargetProfile,
    weights: str | None,
    float32_products: Float32Request,
    records: str | Path | Iterable[Record] | None,
    check: bool | None,
) -> CacheRequest:
    """What is asked for beside the source. Raises InputError, TargetError, InstallationError and RecordsError."""
    products = float32_request(float32_products)
    profile = _able_target(target)
    at_hand = tuple(_records(records, profile))
    return CacheRequest(profile, weights, at_hand, check=proof.is_on(check), float32_products=products)


def _able_target(target: str | TargetProfile) -> TargetProfile:
    """The profile of a target that can be compiled for here. Raises TargetError and InstallationError."""
    profile = load_profile(target)
    if isinstance(profile, CudaProfile):
        cuda_compiler.compiler()
    _check_tools()
    return profile


def _check_tools() -> None:
    """What PyTorch's exporter and TVM need before they are imported. Raises InstallationError and OutputError."""
    environment.check_compiler()
    user_folders.let_tvm_load()
    user_folders.temporary_place()


def _artifact(
    origin: Source, canonical: Canonical, request: CacheRequest, tell: Callable[[str], None], dump: Path | None
) -> Artifact:
    """The stages behind the canonical model: its operations, their code, the files, and what they compute."""
    weights = request.weights
    if (few_bits := block_form(weights)) is not None:
        # From here on this is the model: what it is held against, and what the artifact has.
        canonical = _with_block_weights(canonical, few_bits)
        origin, weights = replace(origin, original=canonical.model), None
    origin, imported = _import(origin, canonical, weights)
    tell("schedule")
    profile, products = request.profile, request.float32_products
    code = _Code(canonical.model, profile, RecordSet(request.records, profile), weights, products)
    scheduled = code.scheduled(imported)
    if dump is not None:
        _dump(dump, origin, imported, scheduled, profile)
    manifest = _manifest(origin, canonical, imported, scheduled, profile, products)
    with _temporary_folder() as owner:
        tell("build")
        with ThreadPoolExecutor(1) as beside:  # both take a second, and LLVM runs on one thread
            with_source = not request.outputs
            files = beside.submit(_write_weights, owner.path, origin, scheduled.weights, with_source=with_source)
            code.build(scheduled, owner.path / MODULE)
            files.result()
        unchecked, outcome = Artifact.assemble(owner.path, manifest), proof.OFF
        if request.check:
            tell("check")
            outcome = proof.check_source(origin, unchecked, _again(request, weights), dump)
        return unchecked.with_check(outcome, owner)


def _again(request: CacheRequest, weights: str | None) -> Callable[..., Artifact]:
    """A compilation of another source in the same way, for a check that looks for what differs."""
    options: dict[str, Any] = {"records": request.records, "weights": weights, "cache": False, "check": False}
    options |= {"target": request.profile, "float32_products": request.float32_products}
    return partial(compile, without_attention="accept", **options)


def import_source(
    source: AttentionSpec | nn.Module | onnx.ModelProto | str | Path,
    *,
    dims: Mapping[str, int] | None = None,
    weights: str | None = None,
) -> ImportedModule:
    """A source before it meets a target: its operations, and a module of them and of what no kernel claims. Arguments
    and errors as `compile`."""
    few_bits = block_form(weights)
    _check_tools()
    origin = read_source(source, dims, None)
    canonical = _canonical(origin)
    if few_bits is not None:
        canonical, weights = _with_block_weights(canonical, few_bits), None
    return _import(origin, canonical, weights)[1]


def _in_place(source: Any) -> onnx.ModelProto:
    """An ONNX model, or the file of one, whose metadata say that its caches are written where they lie."""
    import onnx

    from mhsa_compile.frontend.canonicalize.caches_in_place import with_caches_in_place
    from mhsa_compile.frontend.export.source import read_onnx

    if not isinstance(source, str | Path | onnx.ModelProto):
        hint = "Of a module, metadata of its export say it."
        raise InputError("in_place", "it with an ONNX model", f"it with {type(source).__name__}", hint)
    model = source if isinstance(source, onnx.ModelProto) else read_onnx(Path(source))
    return with_caches_in_place(model)


def _with_block_weights(canonical: Canonical, few_bits: BlockForm) -> Canonical:
    from mhsa_compile.frontend.fusion.few_bits import with_block_weights

    return replace(canonical, model=with_block_weights(canonical.model, few_bits))


def _import(origin: Source, canonical: Canonical, weights: str | None) -> tuple[Source, ImportedModule]:
    """The source as it became canonical, and what it asks for in Relax."""
    with _stage(ModelError, _READ):
        imported = _parsed(canonical.model, weights)
    return replace(origin, model=canonical.model), imported


def _parsed(model: onnx.ModelProto, weights: str | None) -> ImportedModule:
    tvm_compiler.load()
    from mhsa_compile.frontend.relax import importer

    return importer.import_onnx(model, int8_weights=is_int8(weights))


@dataclass(frozen=True)
class _Code:
    """What a canonical model becomes on a target. Where it has no code there, the error names a node that has none."""

    model: onnx.ModelProto
    profile: TargetProfile
    shelf: RecordSet
    weights: str | None
    float32_products: Float32Request

    def scheduled(self, imported: ImportedModule) -> LoweredModule:
        """Its operations with kernels and configs. Raises BuildError and ModelError."""
        with self._node_named("operations that have code on this target", self._schedule_part):
            return self._schedule(imported)

    def build(self, scheduled: LoweredModule, path: Path) -> None:
        """The library of it, in a file. Raises BuildError and ModelError."""
        from mhsa_compile.compiler.codegen.build import build
        from mhsa_compile.compiler.kernel_code import failing_kernel

        def build_part(part: onnx.ModelProto) -> None:
            build(self._schedule_part(part), self.profile, path)

        with self._node_named("code for this target", build_part):
            try:
                build(scheduled, self.profile, path)
            except Exception as error:
                if (ours := failing_kernel(scheduled, self.profile, error)) is not None:
                    raise ours from error
                raise

    def _schedule_part(self, part: onnx.ModelProto) -> LoweredModule:
        return self._schedule(_parsed(part, self.weights))

    def _schedule(self, imported: ImportedModule) -> LoweredModule:
        from mhsa_compile.compiler import lower

        return lower.schedule(imported, self.profile, self.shelf, self.float32_products)

    @contextmanager
    def _node_named(self, expected: str, compiles: Callable[[onnx.ModelProto], object]) -> Iterator[None]:
        """Raises what a user can act on: a defect as one, else the name of the node that has no code, else the error
        as it is."""
        from mhsa_compile.compiler.failing_node import failing_node, refusal

        try:
            with _stage(BuildError, expected):
                yield
        except DefectError:
            raise
        except BuildError as error:
            cause = error.__cause__
            if isinstance(cause, Exception) and (node := failing_node(self.model, compiles)) is not None:
                raise refusal(node, cause) from error
            raise


@contextmanager
def _stage(kind: type[MhsaError], expected: str) -> Iterator[None]:
    """A stage on a source that was found valid: what others trip over becomes a `kind`, a mistake of ours a
    DefectError."""
    with reading(kind, "model", expected, _REPORT):
        try:
            yield
        except Exception as error:
            if place_of_slip(error) is not None:
                raise defect("model", expected, error) from error
            raise


def _write_weights(folder: Path, origin: Source, weights: Sequence[str], *, with_source: bool) -> None:
    """The weights and the graph; of somebody else's model, its own graph as well, with the same weights."""
    from mhsa_compile.compiler import package

    package.write(origin.model, weights, folder / WEIGHTS, folder / MODEL)
    if origin.spec is None and with_source:
        package.write_source(origin.original, origin.model, folder / WEIGHTS, folder / SOURCE)


def _canonical(
    origin: Source, outputs: Sequence[LayerWord] = (), without_attention: WithoutAttention = "warn"
) -> Canonical:
    """The source's model with standard attention. Of one without any it warns, or raises ModelError, as is asked."""
    from mhsa_compile.frontend.canonicalize.canonicalize import canonicalize
    from mhsa_compile.frontend.reading.contradictions import InferenceError, contradiction

    with _stage(ModelError, _READ):
        try:
            canonical = canonicalize(origin.model, outputs)
        except InferenceError as error:
            raise contradiction(origin.model, error) from error
    if canonical.instead and without_attention == "refuse":
        hint = "Attention is an Attention operator, or a Softmax between two products of activations."
        raise ModelError("model", "at least one attention", canonical.instead, hint)
    if canonical.instead and without_attention == "warn":
        sentence = f"the model holds no attention ({canonical.instead}): linears get kernels, the rest is left to TVM"
        warnings.warn(f"{sentence}, which other compilers are made for", stacklevel=4)
    return canonical


def _records(source: str | Path | Iterable[Record] | None, profile: TargetProfile) -> Iterable[Record]:
    if source is not None and not isinstance(source, str | Path):
        records = tuple(source)
        if wrong := [one for one in records if not isinstance(one, Record)]:
            raise InputError("records", "a file of records, or Record objects", type(wrong[0]).__name__)
        return records
    shelf, warnings_of_files = record_files.gather(profile.records() if source is None else [Path(source)])
    for sentence in warnings_of_files:
        warnings.warn(sentence, stacklevel=5)  # behind `_request`, `compile` and its entry point
    return shelf


@contextmanager
def _temporary_folder() -> Iterator[Unfinished]:
    """A folder that outlives the block, but not its failure. Raises OutputError where the disk is full."""
    owner = None
    try:
        owner = atomic_write.temporary()
        yield owner
    except BaseException as error:
        if owner is not None:
            owner.remove()
        unwritten = isinstance(error, OSError) or number_of(error) in NO_ROOM
        if isinstance(error, MhsaError) or not unwritten:
            raise
        hint = "Free some space, lift the limit on sizes of files, or point TMPDIR elsewhere."
        place = "temporary folder" if owner is None else f"temporary folder {str(owner.path.parent)!r}"
        raise OutputError(place, "room for the artifact", str(error), hint) from error


def _manifest(
    origin: Source,
    canonical: Canonical,
    imported: Any,
    scheduled: Any,
    profile: TargetProfile,
    float32_products: Float32Request,
) -> Manifest:
    from mhsa_compile.compiler.package import signature, weight_infos
    from mhsa_compile.kernels.interface.ops import AttentionOp, LinearOp

    inputs, outputs = signature(origin.model, imported)
    semantics = [op.semantics(name) for name, op in imported.ops.items() if isinstance(op, AttentionOp)]
    return Manifest(
        format_version=FORMAT_VERSION,
        mhsa_version=__version__,
        inputs=inputs,
        outputs=outputs,
        in_place=imported.in_place,
        weights=weight_infos(origin.model, scheduled.weights),
        int8_weights=any(isinstance(op, LinearOp) and op.int8_weights for op in imported.ops.values()),
        float32_products=float32_products,
        semantics=tuple(semantics),
        spec=origin.spec,
        target=profile,
        versions=_versions(profile),
        ops=tuple(scheduled.reports),
        attention=canonical.blocks,
        limits=canonical.limits,
        agreements=tuple(imported.agreements),
        slow=scheduled.slow,
        cost=scheduled.cost,
        packing=scheduled.packing,
        files={},
    )


def _versions(profile: TargetProfile) -> dict[str, str]:
    names = ("apache-tvm", "apache-tvm-ffi", "onnx", "torch")
    numbers = {name: environment.installed_version(name) or environment.UNKNOWN for name in names}
    return numbers | cuda_compiler.versions(profile)


def _dump(folder: Path, origin: Source, imported: Any, scheduled: Any, profile: TargetProfile) -> None:
    """Writes what passes between the stages into a folder, in order, each file whole or not at all. Raises
    OutputError."""
    import onnx

    with atomic_write.atomic_file(folder / "1_exported.onnx", "dump") as file:
        onnx.save(origin.model, file)
    for name, text in (
        ("2_imported.py", imported.module.script()),
        ("3_scheduled.py", scheduled.module.script()),
        ("4_target.toml", profile.to_toml()),
    ):
        atomic_write.write(folder / name, text.encode(), "dump")
