"""The manifest of an artifact: what it says of inputs, outputs, meaning, target, kernels and files, and how it is read.

A hash in it is of manifest.json itself, so that no byte of an artifact is without one. Imports no TVM.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec

from mhsa_compile.errors import ArtifactError
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.files.input_files import require_unique_keys
from mhsa_compile.hardware.profile import TargetProfile
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.checks import LARGEST
from mhsa_compile.spec.float32_products import Float32Products, Float32Request, coarsest
from mhsa_compile.spec.semantics import Semantics

FORMAT_VERSION = 6
_READ = (3, 4, 5, FORMAT_VERSION)
"""Formats that are read. Of 3 `load_checks` refuses some: threads disturbed each other in their code."""
_ANY_ADDRESS = 5
"""The first format in which TVM's own code, too, reads arrays at any address."""
MANIFEST, MODULE, WEIGHTS, MODEL = "manifest.json", "module.so", "weights.safetensors", "model.onnx"
SOURCE = "source.onnx"
"""The file that was compiled, as its author wrote it: an artifact of a foreign .onnx has it, where it shares the
weights."""
_COPY_AGAIN = "The artifact is damaged: copy it again, or compile it again."
_UNSEALED = "0" * 64

Size = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Dims = tuple[Size | str, ...]  # ints are fixed, names are symbols, "P + S" is what symbols make
TensorDType = Literal[
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64",
]  # fmt: skip
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


IDS = ("int64", "int32")
"""Dtypes of numbers that pick rows of a table."""


class TensorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An input, an output or a weight.

    `broadcast`, on a mask, is the full size of each axis: a call may bring that or 1. ("B", 8, "L", "S"), for instance,
    beside the dims ("mask_B", "mask_H", "mask_L", "mask_S"). `pads` says that the last axis may also be shorter, which
    hides the rest. `most`, on numbers of keys, is the largest that they may be. `rows`, on ids, is how many rows the
    table has that they pick from, counted from its end where they are below 0. `aligned`, in formats before 5: what a
    call writes into, and is therefore never copied, must begin with a cache line.
    """

    name: str
    dtype: TensorDType
    dims: Dims
    broadcast: Dims | None = None
    pads: bool = False
    most: Size | str | None = None
    rows: Size | None = None
    aligned: bool = False

    def __post_init__(self) -> None:
        if self.broadcast is not None and len(self.broadcast) != len(self.dims):
            raise ValueError(f"{self.name!r} broadcasts to {len(self.broadcast)} axes, and has {len(self.dims)}")
        if self.rows is not None and self.dtype not in IDS:
            raise ValueError(f"{self.name!r} picks from {self.rows} rows, and is of {self.dtype}")


class OpReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What computes one operation, and where its config comes from: `tuning` says which tuned record was used, or why
    none was. `float32_products` is how it multiplies float32, and `float32_reason` why not as was asked."""

    name: str
    op: str
    kernel: str
    config: dict[str, int]
    source: Literal["default", "record", "fallback"]
    note: str = ""
    tuning: str = ""
    float32_products: Float32Products = "ieee"
    float32_reason: str = ""


class AttentionCoverage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One attention of the source, named after its node (its Softmax, where it was several), and what became of it.

    `form` is "Attention", "decomposed", or an operator of Microsoft's. `note` is why it was not fused, or what its
    user should know.
    """

    name: str
    form: str
    fused: bool
    note: str = ""


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What came of the one run in which the compiled code was held against the file it was compiled from.

    `against` names the evaluators, `sizes` the sizes of the free dims, a run each. `error` is the largest, by its
    budget, and `budget` what was allowed. `note` says what was not judged; or, where `against` is empty, why nothing
    was.
    """

    against: tuple[str, ...] = ()
    sizes: tuple[dict[str, Size], ...] = ()
    error: float = 0.0
    budget: float = 0.0
    note: str = ""

    def sentence(self) -> str:
        """The outcome in one sentence."""
        if not self.against:
            return f"not checked: {self.note}"
        runs = [" ".join(f"{name}={size}" for name, size in case.items()) for case in self.sizes if case]
        at = f" at {' and at '.join(runs)}" if runs else ""
        rest = f"; {self.note}" if self.note else ""
        evaluators = " and ".join(self.against)
        return f"agrees with {evaluators}{at}: the largest error is {self.error:.2g} of {self.budget:.2g} allowed{rest}"


class Agreement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the sizes of a node's operands must be to each other, where only a call shows whether they are.

    `operands` are the shapes, `equal` pairs of sizes that are one, `broadcast` groups of shapes that broadcast to one.
    "?" is a size that values of the call make. The code holds a call to it; this says what is wrong with one.
    """

    node: str
    operands: tuple[Dims, ...]
    equal: tuple[tuple[Size | str, Size | str], ...] = ()
    broadcast: tuple[tuple[Dims, ...], ...] = ()


class SlowOperation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function of TVM's own, by the name that a profile gives it, that is expected to be slow at these sizes of the
    free dims.

    `runs` is how often a call runs it, `share` its part of the predicted time of a call, `times_limit` how many times
    longer it takes than the machine would need at its limit.
    """

    name: str
    runs: int
    share: float
    times_limit: int
    sizes: dict[str, Size]
    why: str
    way_out: str

    def sentence(self) -> str:
        """The prediction in one sentence."""
        at = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        runs = f", {self.runs} times a call" if self.runs > 1 else ""
        share = f"{self.share:.0%} of the predicted time{f' at {at}' if at else ''}"
        return f"{self.name}{runs}: {share}, {self.times_limit:,} times the machine's limit; {self.why}; {self.way_out}"


class CallCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a call costs by arithmetic, at these sizes of the free dims; nothing of it is measured.

    flops       of products in kernels
    kernels_us  at half of what their units multiply at most, on `cores` at `clock_ghz`, and what starting them takes
    loops_us    of functions of TVM's own, by their loops
    bytes       of weights of linears, inputs and outputs
    memory_us   what `bytes` take at `gbs`, 10^9 bytes a second
    """

    sizes: dict[str, Size]
    flops: int
    kernels_us: float
    loops_us: float
    bytes: int
    gbs: float
    memory_us: float
    cores: int
    clock_ghz: float

    @property
    def us(self) -> float:
        """Microseconds of a call: its computations or its memory, whichever takes longer."""
        return max(self.kernels_us + self.loops_us, self.memory_us)

    def sentence(self) -> str:
        """The cost in one sentence."""
        at = "".join(f" {name}={size}" for name, size in self.sizes.items())
        loops = f", loops of TVM {_time(self.loops_us)}" if self.loops_us else ""
        kernels = f"{_count(self.flops)}FLOP in kernels {_time(self.kernels_us)}"
        memory = f"{_count(self.bytes)}B at {self.gbs:.0f} GB/s {_time(self.memory_us)}"
        machine = f"{self.cores} core{'s' * (self.cores > 1)} at {self.clock_ghz:g} GHz"
        return f"by arithmetic {_time(self.us)}{f' at{at}' if at else ''}, {machine}: {kernels}{loops}; {memory}"


def _time(us: float) -> str:
    return f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.3g} us"


def _count(number: int) -> str:
    """A number with the letter of its thousands."""
    scale, letter = next(((s, x) for s, x in ((10**9, "G"), (10**6, "M"), (10**3, "k")) if number >= s), (1, ""))
    return f"{number / scale:.3g} {letter}"


class Packing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a function that packs weights reads, by their places in the manifest, and the digest of what it does."""

    weights: tuple[Size, ...]
    digest: Digest


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What manifest.json holds, in its order."""

    format_version: int = FORMAT_VERSION
    mhsa_version: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    in_place: dict[str, str] = {}  # output -> the input that a call turns into it
    weights: tuple[TensorInfo, ...]
    int8_weights: bool = False  # whether linears round them to eight bits when they are bound
    float32_products: Float32Request = "auto"  # as asked for; each operation says what it got
    semantics: tuple[Semantics, ...]  # of each attention, as resolved
    spec: AttentionSpec | None  # where one was compiled
    target: TargetProfile
    versions: dict[str, str]
    ops: tuple[OpReport, ...]
    attention: tuple[AttentionCoverage, ...] = ()
    limits: dict[str, Size] = {}  # symbol -> its largest size, where a table of the model has no more rows
    agreements: tuple[Agreement, ...] = ()  # in the order of the nodes
    slow: tuple[SlowOperation, ...] = ()  # what is expected to be
    cost: CallCost | None = None  # None of code for GPUs, and in artifacts from before there was one
    check: Check | None = None  # None in artifacts from before there was one
    packing: tuple[Packing, ...] = ()  # of each function that packs weights, in their order; in older artifacts of none
    files: dict[str, Digest]
    sha256: Digest = _UNSEALED  # of manifest.json itself, as it is with zeros in this place

    def __post_init__(self) -> None:
        inputs, outputs, weights = (
            [info.name for info in infos] for infos in (self.inputs, self.outputs, self.weights)
        )
        for names in (inputs, outputs, weights):
            if len(set(names)) < len(names):
                raise ValueError("two inputs, outputs or weights of one name")
        if not self.in_place.keys() <= set(outputs) or not set(self.in_place.values()) <= set(inputs):
            raise ValueError("in_place names what is no output, or no input")
        if any(isinstance(dim, str) for info in self.weights for dim in info.dims):
            raise ValueError("a weight whose size is not known")
        if any(place >= len(weights) for packing in self.packing for place in packing.weights):
            raise ValueError("packing of a weight that is not there")

    @property
    def has_fallbacks(self) -> bool:
        """Whether TVM's own code runs some of the operations."""
        return any(op.source == "fallback" for op in self.ops)

    @property
    def coarsest_products(self) -> Float32Products:
        """How the least exact of the operations multiplies float32: what the error budget goes by."""
        return coarsest(*(op.float32_products for op in self.ops))

    def products_of(self, kind: str) -> Float32Products | None:
        """How all operations of a kind multiply float32, "ieee" if there are none; None where they differ."""
        words = {op.float32_products for op in self.ops if op.op == kind} or {"ieee"}
        return None if len(words) > 1 else words.pop()

    def float32_outcome(self) -> str:
        """What became of `float32_products`, where operations got other than IEEE's or other than was asked for; ""
        where that is nothing to speak of."""
        numbers: dict[tuple[str, str], int] = {}
        for op in self.ops:
            if op.float32_products != "ieee" or op.float32_reason:
                key = op.float32_products, op.float32_reason
                numbers[key] = numbers.get(key, 0) + 1
        counts = {key: f"{n} operation{'s' * (n > 1)}" for key, n in numbers.items()}
        parts = [f"{word} in {count}{reason and ': '}{reason}" for (word, reason), count in counts.items()]
        if not parts:
            if self.float32_products in ("auto", "ieee"):
                return ""
            parts = ["ieee: no operation has products of float32 to choose"]
        return f"asked {self.float32_products}, got {'; '.join(parts)}"

    def cost_lines(self) -> list[str]:
        """What a report ends with: the operations that are expected to be slow, and what a call costs."""
        cost = [] if self.cost is None else [f"a call: {self.cost.sentence()}"]
        return [*(f"slow: {operation.sentence()}" for operation in self.slow), *cost]

    @property
    def wants_cache_lines(self) -> bool:
        """Whether some of the code takes arrays to begin with a cache line, and reads copies of those that do not."""
        return self.format_version < _ANY_ADDRESS and self.has_fallbacks


def seal(manifest: Manifest, files: dict[str, str]) -> tuple[Manifest, bytes]:
    """The manifest with the hashes of the files and its own; and its bytes."""
    manifest = msgspec.structs.replace(manifest, files=files, sha256=_UNSEALED)
    raw = _encode(msgspec.structs.replace(manifest, sha256=hashlib.sha256(_encode(manifest)).hexdigest()))
    return msgspec.json.decode(raw, type=Manifest), raw


def _encode(manifest: Manifest) -> bytes:
    """A manifest as bytes, the same for the same content: fields in their order, keys of dicts sorted.

    `v_embed_dim`, `agreements`, `slow`, `cost`, `check`, `packing` and how float32 is multiplied are written where
    they are set: an artifact without them has the bytes that it had before there were any.
    """
    fields = msgspec.to_builtins(manifest, order="deterministic")
    if manifest.check is None:
        del fields["check"]
    if not manifest.agreements:
        del fields["agreements"]
    if not manifest.slow:
        del fields["slow"]
    if manifest.cost is None:
        del fields["cost"]
    if not manifest.packing:
        del fields["packing"]
    if manifest.float32_products == "auto":
        del fields["float32_products"]
    for op in fields["ops"]:
        if op["float32_products"] == "ieee":
            del op["float32_products"]
        if not op["float32_reason"]:
            del op["float32_reason"]
    if manifest.spec is not None and manifest.spec.v_embed_dim is None:
        del fields["spec"]["v_embed_dim"]
    return msgspec.json.format(msgspec.json.encode(fields), indent=2) + b"\n"


def read_manifest(raw: bytes, argument: str) -> Manifest:
    """The manifest in these bytes, checked: format version, fields, hash, and that each file has one. Raises
    ArtifactError."""
    with reading(ArtifactError, argument, f"a manifest of format version {FORMAT_VERSION}", _COPY_AGAIN):
        version = msgspec.json.decode(raw, type=_ManifestVersion).format_version
        if version not in _READ:
            raise _other_version(argument, version)
        require_unique_keys(raw)
        manifest = msgspec.json.decode(raw, type=Manifest)
    digest = hashlib.sha256(raw.replace(manifest.sha256.encode(), _UNSEALED.encode())).hexdigest()
    if digest != manifest.sha256:
        raise damage(argument, f"sha256 {manifest.sha256}", digest)
    if missing := {MODULE, WEIGHTS, MODEL} - manifest.files.keys():
        raise damage(argument, "a hash of each file", f"none of {', '.join(sorted(missing))}")
    return manifest


class _ManifestVersion(msgspec.Struct):
    """The one field that every format has; a newer one may differ in all others."""

    format_version: int


def _other_version(argument: str, version: int) -> ArtifactError:
    next_step = "Update mhsa-compile." if version > FORMAT_VERSION else "Compile it again."
    return ArtifactError(argument, f"format version {FORMAT_VERSION}", f"format version {version}", next_step)


def damage(argument: str, expected: str, got: str) -> ArtifactError:
    """A file that is not what the manifest says, as an error."""
    return ArtifactError(argument, expected, got, _COPY_AGAIN)
