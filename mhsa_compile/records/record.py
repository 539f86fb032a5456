"""Tuned records: which config of which kernel was the fastest for an operation, on which device, and how right it was.

The schema, field by field: schedules/README.md. How they are kept: `record_files`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

import msgspec

from mhsa_compile.hardware import environment
from mhsa_compile.hardware.profile import CudaProfile, TargetProfile
from mhsa_compile.records.device import Device

T = TypeVar("T")
FORMAT = 2
STEADY = 0.05
"""The largest spread of a record that is shipped: a machine that is quieter than this tells the choices apart."""

Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0)]
Date = Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d\d-\d\d")]


class Isa(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the code of a record was generated for: a record is never used for anything else.

    Of code for a GPU, `gpu` is the architecture of its kernels, such as sm_90a, and `architecture` that of the host
    that launches them, whose vectors nobody uses: they are 0.
    """

    architecture: str
    vector_bits: int = 0
    vector_registers: int = 0
    features: tuple[str, ...] = ()  # that the code may use
    gpu: str = ""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line.

    op, key      the operation; its lengths in buckets, so that neighbours share a record (`op_key`)
    sizes        the lengths at which it was measured
    kernel       its name; "tvm" for an operator of TVM's, whose schedule is `trace`
    config       a value for each knob of the kernel
    median_us    microseconds a call, `spread` their interquartile range as a share of the median
    default_us   of the default config in the same rounds
    error_share  its largest error as a share of the error budget: at most 1
    threads      that a call used
    versions     of what generated and measured it (`environment.versions`)
    date         of the measurement, as ISO 8601 writes it
    """

    format: int = FORMAT  # first, and always written: a line is known by it
    op: str
    key: dict[str, Any]
    sizes: dict[str, int]
    kernel: str
    config: dict[str, int]
    median_us: Positive
    spread: Share
    default_us: Positive
    error_share: Share
    threads: Annotated[int, msgspec.Meta(ge=1)]
    isa: Isa
    device: Device
    versions: dict[str, str]
    date: Date
    trace: str = ""

    def summary(self) -> str:
        """One line on the time that was measured, the gain on the default config, and the device."""
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        at = f" at {sizes}" if sizes else ""
        gain = self.default_us / self.median_us
        threads = "" if self.isa.gpu else f", {self.threads} threads"
        where = f"{self.device.name}{threads}{', emulated' if self.device.emulated else ''}"
        return f"{self.median_us:,.1f} us{at}, {gain:.2f} times as fast as the default ({where}, {self.date})"


_ENCODER = msgspec.json.Encoder(order="deterministic")


def encoded(record: Record) -> bytes:
    """A record as the line of a file, without the newline; equal records give the same bytes."""
    return _ENCODER.encode(record)


def isa_of(profile: TargetProfile) -> Isa:
    architecture = profile.tvm.mtriple.partition("-")[0]
    if isinstance(profile, CudaProfile):
        return Isa(architecture=architecture, gpu=profile.tvm.arch)
    hardware = profile.hardware
    return Isa(
        architecture=architecture,
        vector_bits=hardware.vector_bits,
        vector_registers=hardware.vector_registers,
        features=hardware.features,
    )


def for_record(device: Device, profile: TargetProfile) -> Device:
    """A device without its list of features, long and apt to change with the system's kernel: a record's `isa` says
    which of them its code may use. Without its GPU, where that took no part. One that does not tell its
    microarchitecture is of that for which whoever measured there chose the target."""
    on_gpu = isinstance(profile, CudaProfile)
    return msgspec.structs.replace(
        device,
        features=(),
        gpu=device.gpu if on_gpu else None,
        microarchitecture=device.microarchitecture or microarchitecture_of(profile),
    )


def microarchitecture_of(profile: TargetProfile) -> str:
    """That of a target's CPU; empty for one that is for many, or for a GPU."""
    return "" if isinstance(profile, CudaProfile) else profile.hardware.microarchitecture


def why_not_on(record: Record, profile: TargetProfile) -> str | None:
    """Why a record must not be used for a target, or None."""
    own, isa = isa_of(profile), record.isa
    if record.error_share > 1:
        return "over the error budget"
    if isa.gpu != own.gpu:
        origin, target = (f"{one.gpu}, a GPU" if one.gpu else "a CPU" for one in (isa, own))
        return f"made for {origin}, not {target}"
    if isa.architecture != own.architecture:
        return f"made for {isa.architecture}, not {own.architecture}"
    if (isa.vector_bits, isa.vector_registers) != (own.vector_bits, own.vector_registers):
        origin, target = (f"{one.vector_registers} vectors of {one.vector_bits} bits" for one in (isa, own))
        return f"made for {origin}, not {target}"
    if missing := sorted(set(isa.features) - set(own.features)):
        return f"made for {', '.join(missing)}, which the target lacks"
    here = microarchitecture_of(profile)
    return record.device.why_unlike(here) if here else None


def does_not_tell(record: Record) -> bool:
    """Whether a record of a CPU leaves open on which microarchitecture it was measured, as those of format 1 do."""
    return not record.isa.gpu and not record.device.known_microarchitecture


def why_doubtful(record: Record) -> str | None:
    """Why a record must not be shipped to others, or None."""
    if record.error_share > 1:
        return f"over the error budget: {record.error_share:.3g} of it"
    if record.device.emulated:
        return "an emulator ran it: its times say nothing about hardware"
    if does_not_tell(record):
        return "it does not say on which microarchitecture: `mhsa records measured-on` adds that"
    if record.spread > STEADY:
        return f"its times spread over {record.spread:.1%} of their median, where {STEADY:.0%} are allowed"
    if record.median_us > record.default_us:
        return f"slower than the default config: {record.median_us:.4g} us, not {record.default_us:.4g}"
    if record.versions.get("source", "").endswith(environment.CHANGED):
        return "measured by a checkout with changes that are in no commit"
    return None


def merge_best(records: Iterable[Record]) -> list[Record]:
    """The fastest right one for each operation, number of threads, ISA and device, in the order in which they came.

    Of the same lengths that is the one of the shortest time; of different lengths in one bucket, the one that gains the
    most on the default config there.
    """
    fastest: dict[tuple[bytes, bytes], Record] = {}
    for record in records:
        place = identity(record), _ENCODER.encode(record.sizes)
        if record.error_share <= 1 and (place not in fastest or record.median_us < fastest[place].median_us):
            fastest[place] = record
    best: dict[bytes, Record] = {}
    for (same, _), record in fastest.items():
        if same not in best or share_of_default(record) < share_of_default(best[same]):
            best[same] = record
    return list(best.values())


def identity(record: Record) -> bytes:
    """What two records must share to be about the same thing; sizes within a bucket are not part of it."""
    return _ENCODER.encode((record.op, record.key, record.threads, record.isa, record.device))


def is_of_default(record: Record) -> bool:
    """Whether nothing was found that is faster than the default config."""
    return record.median_us == record.default_us


def share_of_default(record: Record) -> float:
    """A record's time as a share of that of the default config: 0.8 is a fifth less."""
    return record.median_us / record.default_us


def key_bytes(op: str, key: dict[str, Any]) -> bytes:
    return _ENCODER.encode((op, key))


class RecordSet:
    """Records at hand for a target, by operation."""

    def __init__(self, records: Iterable[Record], profile: TargetProfile) -> None:
        self.profile = profile
        self._by_key: dict[bytes, list[Record]] = {}
        for record in records:
            self._by_key.setdefault(key_bytes(record.op, record.key), []).append(record)

    def candidates(self, op: str, key: dict[str, Any]) -> tuple[list[Record], str]:
        """(the records of this operation that fit the target, the most alike device first; why the others do not)."""
        records = self._by_key.get(key_bytes(op, key), [])
        if not records:
            return [], "no record of this operation at these lengths"
        reasons = [why_not_on(record, self.profile) for record in records]
        fitting = [record for record, reason in zip(records, reasons, strict=True) if reason is None]
        reason_text = "; ".join(dict.fromkeys(reason for reason in reasons if reason is not None))
        return sorted(fitting, key=self._distance), reason_text

    def best_match(self, op: str, key: dict[str, Any], use: Callable[[Record], T | str]) -> tuple[Record, T] | str:
        """The first of `candidates` that `use` makes something of, and that; or why there is none. `use` returns why
        not as text."""
        records, reason = self.candidates(op, key)
        reasons = [reason] if reason else []
        for record in records:
            result = use(record)
            if not isinstance(result, str):
                return record, result
            reasons.append(f"a record of {record.date} does not apply: {result}")
        return "; ".join(dict.fromkeys(reasons))

    def knows(self, op: str, key: dict[str, Any] | None = None) -> bool:
        """Whether there are records of an operation, with this key or with any, fitting or not."""
        if key is not None:
            return key_bytes(op, key) in self._by_key
        return any(records[0].op == op for records in self._by_key.values())

    def _distance(self, record: Record) -> tuple[Any, ...]:
        device = record.device
        if isinstance(self.profile, CudaProfile):  # no record of another family fits
            multiprocessors = 0 if device.gpu is None else device.gpu.multiprocessors
            unlike = abs(multiprocessors - self.profile.hardware.multiprocessors)
            return (device.emulated, unlike, share_of_default(record))
        hardware = self.profile.hardware
        caches = (device.l1d_kib, device.l2_kib) != (hardware.l1d_kib, hardware.l2_kib)
        return (device.emulated, caches, abs(record.threads - hardware.cores), share_of_default(record))
