"""Where to compute: a target profile, read from `targets/<name>.toml` or detected. The schema: targets/README.md."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from mhsa_compile.errors import TargetError, did_you_mean
from mhsa_compile.files import input_files
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.hardware import data_paths, host, microarchitecture

NATIVE = data_paths.NATIVE
_DTYPE_BITS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int16": 16, "int32": 32}

# The x86-64 psABI's levels as /proc/cpuinfo names their features (pni is SSE3, abm is LZCNT).
_V2 = frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"})
_V4 = _V3 | frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
_X86_LEVELS = (  # (LLVM's name, what it needs, vector bits, vector registers), best first
    ("x86-64-v4", _V4, 512, 32),
    ("x86-64-v3", _V3, 256, 16),
    ("x86-64-v2", _V2, 128, 16),
    ("x86-64", frozenset[str](), 128, 16),
)
# Narrow products that kernels ask for, on top of a level: as /proc/cpuinfo and as LLVM names them.
_DOTS = {
    "x86-64-v4": {
        "amx_bf16": "+amx-bf16",
        "amx_fp16": "+amx-fp16",
        "amx_int8": "+amx-int8",
        "amx_tile": "+amx-tile",
        "avx512_bf16": "+avx512bf16",
        "avx512_vnni": "+avx512vnni",
    },
    "x86-64-v3": {"avx_vnni": "+avxvnni"},
    "generic": {"asimddp": "+dotprod", "bf16": "+bf16", "i8mm": "+i8mm"},  # aarch64
}
_NEVER = {"aarch64": ("-balance-fp-ops",)}
"""What LLVM is told to leave out, by architecture, since it makes wrong code. The pass that balances chains of
multiply-adds between odd and even registers, on by default for the cortex-a53 and a57, gave linears with eight-bit
weights wrong sums (LLVM 22)."""

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Triple = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.+-]+\Z")]  # it becomes a word of command lines


class TvmTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What TVM's code generator is told."""

    kind: Literal["llvm"]
    mtriple: Triple
    mcpu: str = ""
    mattr: tuple[str, ...] = ()


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts the kernels shape themselves by; the defaults are a modest machine's."""

    cores: Count = 1
    vector_bits: Annotated[int, msgspec.Meta(ge=64, multiple_of=64)] = 128
    vector_registers: Count = 16
    l1d_kib: Count = 32
    l2_kib: Count = 256
    pages_in_turn: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    features: tuple[str, ...] = ()
    modelled_as: str = ""
    microarchitecture: str = ""


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the shared library is linked for: a Zig triple such as x86_64-linux-gnu.2.17."""

    triple: Triple


def system_of(triple: str) -> str:
    """The operating system of a Zig triple.

    >>> system_of("aarch64-macos.12.0")
    'macos'
    """
    return triple.partition("-")[2].partition("-")[0].partition(".")[0]


class CudaTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the code generators are told: `arch` for the kernels, `mtriple` for the code of the host that launches them.

    arch  sm_80 runs on every GPU of compute capability 8.0 to 8.9; with an "a" behind, sm_90a, on that of 9.0 alone
    """

    kind: Literal["cuda"]
    arch: Annotated[str, msgspec.Meta(pattern=r"^sm_[1-9][0-9]{1,2}a?$")]
    mtriple: Triple

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability: (9, 0) of sm_90a."""
        digits = self.arch.removeprefix("sm_").removesuffix("a")
        return int(digits[:-1]), int(digits[-1])


class CudaHardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts that kernels for a GPU shape themselves by, all of one multiprocessor but the number of these."""

    multiprocessors: Count
    shared_kib_per_block: Count
    shared_kib_per_multiprocessor: Count
    registers_per_multiprocessor: Count
    threads_per_multiprocessor: Count
    blocks_per_multiprocessor: Count
    warp_lanes: Count = 32


class _Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What targets of all families have. Everyone but `profile`, `data` and `cli` asks for capabilities, never for the
    name."""

    name: str
    link: Link

    @property
    def system(self) -> str:
        """The operating system that the library is linked for, as Zig names it: linux, macos, windows, wasi.

        >>> load_profile("apple-m1").system
        'macos'
        """
        return system_of(self.link.triple)

    def records(self) -> list[Path]:
        """The files that hold tuned records of this target: the user's own, then what is shipped. Raises
        InstallationError."""
        return data_paths.records_for(self.name)

    def own_records(self) -> Path:
        """The file in which tuning for this target leaves its records, unless another one is named."""
        return data_paths.own_records(self.name)

    def to_toml(self) -> str:
        """The text of a file that `load_profile` reads back; the file's name becomes the target's."""
        tables = msgspec.to_builtins(self)
        lines = [f"family = {json.dumps(tables['family'])}"]
        for table in ("tvm", "hardware", "link"):
            # JSON's strings, integers and lists of strings are TOML's too. What is empty is the default.
            entries = ((key, value) for key, value in tables[table].items() if value not in ("", ()))
            lines += ["", f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in entries)]
        return "\n".join(lines) + "\n"


class CpuProfile(_Profile, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="family", tag="cpu"):
    """A CPU."""

    family: ClassVar[str] = "cpu"
    tvm: TvmTarget
    hardware: Hardware

    def vector_lanes(self, dtype: str) -> int:
        """Elements of `dtype` in one vector register. Raises TargetError for a dtype without a fixed width."""
        if dtype not in _DTYPE_BITS:
            raise TargetError("dtype", " or ".join(_DTYPE_BITS), repr(dtype))
        return self.hardware.vector_bits // _DTYPE_BITS[dtype]

    @property
    def is_webassembly(self) -> bool:
        """Whether code is for WebAssembly, which JavaScript calls: no library that a process maps."""
        return self.tvm.mtriple.startswith("wasm32")

    @property
    def overwrites_summands(self) -> bool:
        """Whether a vector multiply-add leaves its sum where one of its operands was, and only there (FMLA)."""
        return self.tvm.mtriple.startswith("aarch64")

    def elements_at_once(self, dtype: str) -> int:
        """Factors that are best loaded together: where a multiplication takes one element of a vector by a whole vector
        of others, as many as a vector holds; where it takes it from memory, one."""
        return self.vector_lanes(dtype) if self.tvm.mtriple.startswith("aarch64") else 1

    def tvm_config(self) -> dict[str, Any]:
        """The argument of `tvm.target.Target`."""
        never = _NEVER.get(self.tvm.mtriple.partition("-")[0], ())
        config = {**msgspec.to_builtins(self.tvm), "mattr": [*self.tvm.mattr, *never]}
        if self.is_webassembly:  # of which TVM knows no width, and says so whenever it is asked
            config["vector-width"] = self.hardware.vector_bits
        return {key: value for key, value in config.items() if value}


class CudaProfile(_Profile, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="family", tag="cuda"):
    """A GPU of NVIDIA's, and the CPU that launches its kernels."""

    family: ClassVar[str] = "cuda"
    tvm: CudaTarget
    hardware: CudaHardware

    def tvm_config(self) -> dict[str, Any]:
        """The argument of `tvm.target.Target`. Schedules of TVM's own keep to the shared memory that every block has;
        kernels that want more ask for it, up to `shared_kib_per_block`."""
        return {
            "kind": self.tvm.kind,
            "arch": self.tvm.arch,
            "max_shared_memory_per_block": _UNASKED_SHARED_BYTES,
            "max_threads_per_block": _THREADS_PER_BLOCK,
            "thread_warp_size": self.hardware.warp_lanes,
            "host": {"kind": "llvm", "mtriple": self.tvm.mtriple},
        }

    @property
    def has_wgmma(self) -> bool:
        """Whether warpgroups multiply, tiles are copied by an engine and registers go from role to role: what sm_90a
        has and neither sm_90 nor anything later."""
        return self.tvm.arch == "sm_90a"

    def blocks_at_once(self, threads: int, registers: int, shared_bytes: int) -> int:
        """How many blocks one multiprocessor holds at a time, 0 where it cannot hold one: blocks of `threads`, each
        with so many `registers`, and of `shared_bytes` of shared memory.

        The rules of the CUDA C++ Programming Guide, "Hardware Multithreading", and of CUDA's cuda_occupancy.h: each
        quarter of a multiprocessor hands out its registers to warps by 256; a launch is refused where a block would
        take too many if all quarters had as many of its warps as one; shared memory goes to blocks by 128 bytes, 1 KiB
        of it for the system.
        """
        hardware = self.hardware
        warps = -(-threads // hardware.warp_lanes)
        if threads > _THREADS_PER_BLOCK or shared_bytes > 1024 * hardware.shared_kib_per_block:
            return 0
        registers_of_warp = -(-registers * hardware.warp_lanes // 256) * 256
        warps_of_quarter = hardware.registers_per_multiprocessor // 4 // registers_of_warp
        by_registers = 4 * warps_of_quarter // warps if warps_of_quarter >= -(-warps // 4) else 0
        by_threads = hardware.threads_per_multiprocessor // (warps * hardware.warp_lanes)
        block_bytes = 1024 + -(-shared_bytes // 128) * 128
        by_shared = 1024 * hardware.shared_kib_per_multiprocessor // block_bytes
        return min(by_registers, by_threads, by_shared, hardware.blocks_per_multiprocessor)


_UNASKED_SHARED_BYTES = 48 * 1024  # what a kernel may declare; beyond it the launch has to ask
_THREADS_PER_BLOCK = 1024  # of every compute capability

TargetProfile = CpuProfile | CudaProfile
"""One target."""


def profile_names() -> tuple[str, ...]:
    """Every name that `load_profile` knows: "native" and the files of targets/."""
    return (NATIVE, *sorted(path.stem for path in data_paths.targets_folder().glob("*.toml")))


def load_profile(name_or_path: str | Path | TargetProfile) -> TargetProfile:
    """A profile by name, with or without its architecture in front (aarch64-cortex-a76 is cortex-a76), by the path of a
    .toml file, or detected ("native"); a profile is itself. Raises TargetError.

    >>> load_profile("aarch64-cortex-a76").vector_lanes("float32")
    4
    """
    if isinstance(name_or_path, TargetProfile):
        return name_or_path
    if not isinstance(name_or_path, str | Path):
        expected, hint = "a name, the path of a .toml file, or a TargetProfile", "`mhsa targets` lists the names."
        raise TargetError("target", expected, type(name_or_path).__name__, hint)
    if name_or_path == NATIVE:
        return detect()
    path = Path(name_or_path)
    if path.suffix != ".toml":
        if (name := shipped_name(str(name_or_path))) is None:
            raise _unknown(str(name_or_path))
        path = _file(name)
    return _parse(path)


def shipped_name(name: str) -> str | None:
    """The name of the file in targets/ that a target's name means, None if there is none: aarch64-cortex-a76 is
    cortex-a76."""
    names = set(profile_names()) - {NATIVE}
    architecture, _, rest = name.partition("-")
    if name in names:
        return name
    if rest in names and _parse(_file(rest)).tvm.mtriple.partition("-")[0] == architecture:
        return rest
    return None


def profile_of_gpu(capability: tuple[int, int]) -> CudaProfile | None:
    """The latest target that a GPU of this compute capability runs, or None: code for 8.0 runs on 8.6, too."""
    profiles = [profile for name in profile_names() if isinstance(profile := load_profile(name), CudaProfile)]
    fitting = [p for p in profiles if p.tvm.capability[0] == capability[0] and p.tvm.capability <= capability]
    return max(fitting, key=lambda p: p.tvm.capability, default=None)


def shipped_relatives(profile: TargetProfile) -> list[TargetProfile]:
    """The targets in targets/ of this one's family and architecture."""

    def kind(target: TargetProfile) -> tuple[str, str]:
        return target.family, target.tvm.mtriple.partition("-")[0]

    return [target for target in _shipped() if kind(target) == kind(profile)]


@functools.cache
def _shipped() -> tuple[TargetProfile, ...]:
    return tuple(load_profile(name) for name in profile_names() if name != NATIVE)


def load_cpu_profile(name_or_path: str | Path, what: str) -> CpuProfile:
    """Loads a CPU's profile as `load_profile` does. Raises TargetError, also for a GPU's: `what`, such as "tuning", is
    done with CPUs only."""
    profile = load_profile(name_or_path)
    if not isinstance(profile, CpuProfile):
        raise TargetError("target", f"a CPU: {what} is for those so far", f"{str(name_or_path)!r}, a GPU")
    return profile


def detect(root: Path = host.ROOT) -> CpuProfile:
    """The profile of this machine: code for the highest common level it has, so the artifact runs on its equals too,
    and for the narrow products that it has beyond that, tiles where the system grants them to this process."""
    architecture, present = host.architecture(), host.usable_features(root)
    name = host.microarchitecture_name(root)
    mcpu, features, vector_bits, vector_registers = _level(architecture, present)
    dots = {feature: flag for feature, flag in _DOTS.get(mcpu, {}).items() if feature in present}
    system_triple, link_triple = _triples(architecture)
    return CpuProfile(
        name=NATIVE,
        tvm=TvmTarget(kind="llvm", mtriple=system_triple, mcpu=mcpu, mattr=tuple(dots.values())),
        hardware=Hardware(
            cores=host.allowed_cpus(root),
            vector_bits=vector_bits,
            vector_registers=vector_registers,
            l1d_kib=host.cache_kib(1, root) or 32,
            l2_kib=host.cache_kib(2, root) or 256,
            features=tuple(sorted(features | dots.keys())),
            microarchitecture=name,
            pages_in_turn=microarchitecture.pages_in_turn(name),
        ),
        link=Link(triple=link_triple),
    )


def _triples(architecture: str) -> tuple[str, str]:
    """LLVM's and Zig's triples of this machine's system."""
    if host.system() == "windows":
        return f"{architecture}-w64-windows-gnu", f"{architecture}-windows-gnu"
    if host.system() == "macos":
        return f"{architecture}-apple-macos12", f"{architecture}-macos.12.0"
    glibc = ".2.17" if architecture in ("x86_64", "aarch64") else ""  # the oldest that both ship; others began later
    return f"{architecture}-linux-gnu", f"{architecture}-linux-gnu{glibc}"


def _level(architecture: str, features: frozenset[str]) -> tuple[str, frozenset[str], int, int]:
    """LLVM's CPU, the features its code needs, vector bits and registers."""
    if architecture == "x86_64":
        return next(level for level in _X86_LEVELS if level[1] <= features)
    if architecture == "aarch64":
        return "generic", frozenset({"fp", "asimd"}) & features, 128, 32
    return "", frozenset(), 128, 32  # riscv64, ppc64le, ...: LLVM's baseline


def _file(name: str) -> Path:
    return data_paths.targets_folder() / f"{name}.toml"


def _unknown(name: str) -> TargetError:
    hint = f"{did_you_mean(name, profile_names(), most=3)} `mhsa targets` lists them.".lstrip()
    return TargetError("target", "a known target or a .toml file", repr(name), hint)


def _parse(path: Path) -> TargetProfile:
    import tomllib

    text = input_files.read_text(path, TargetError, "target", "a readable .toml file")
    schema = "The schema is in targets/README.md; `mhsa targets native` prints an example."
    with reading(TargetError, f"target file {str(path)!r}", "a target profile", schema):
        fields = tomllib.loads(text)
        if "name" in fields:
            raise ValueError("a key `name`: the file's name is the target's")
        profile: TargetProfile = msgspec.convert({"name": path.stem, **fields}, CpuProfile | CudaProfile)
        return profile
