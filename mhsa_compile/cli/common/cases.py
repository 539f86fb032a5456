"""What a command line asks to be tuned: sources, at which sizes, and on what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mhsa_compile.cli.common import sources
from mhsa_compile.errors import DeviceError, InputError
from mhsa_compile.files import places
from mhsa_compile.spec.float32_products import Float32Request

if TYPE_CHECKING:
    from mhsa_compile.tuning.measure.rpc_server import Address

LOCAL, TRACKER, BUNDLE = "local", "tracker", "bundle"
_DEFAULT_DIMS = {"B": 1, "L": 128, "C": 1024}  # S is L unless given


@dataclass(frozen=True)
class Case:
    """One thing to tune: what `compile` takes, at `dims`, and the sizes to measure at."""

    name: str
    source: Any
    dims: dict[str, int]
    sizes: dict[str, int]
    weights: str | None
    float32_products: Float32Request = "auto"

    def options(self, dims: dict[str, int]) -> dict[str, Any]:
        """What `compile` takes beside the source and the target."""
        return {"dims": dims, "weights": self.weights, "float32_products": self.float32_products}


@dataclass(frozen=True)
class CaseOptions:
    """What was asked for: a source with the dims that were stated, or workloads, which bring theirs."""

    source: Path | None
    workloads: list[str]
    dtype: str | None
    dims: dict[str, int]
    symbolic: bool = False
    around: bool = False
    weights: str | None = None
    float32_products: Float32Request = "auto"
    seed: int = 0

    def check(self) -> None:
        """Raises InputError, ModelError and SpecError for what does not go together."""
        from mhsa_compile.bench.workloads import choose

        if self.workloads and (self.source is not None or self.dims):
            hint = "A workload brings its own spec and dims."
            raise InputError("--workload", "it alone", "a source or dims beside it", hint)
        if self.dtype is not None and not self.workloads:
            raise InputError("--dtype", "it with --workload", f"{self.dtype!r} alone", "A source states its own dtype.")
        if self.around and not self.workloads and (self.symbolic or not {"L", "S"} & self.dims.keys()):
            hint = "Give --length. A record for symbolic lengths serves all of them."
            raise InputError("--around", "lengths that are fixed", "symbolic ones", hint)
        if self.workloads:
            choose(self.workloads)
        elif self.source is None:
            raise InputError("SOURCE", "an .onnx file, a spec .toml, or --workload", "none of them")
        else:
            sources.resolve(self.source, {})

    def cases(self) -> Iterator[Case]:
        """Yields the cases one after another, since each has its weights. Those of a spec are random."""
        for case in self._own_cases():
            yield case
            if self.around:
                yield from _beside(case)

    def _own_cases(self) -> Iterator[Case]:
        import torch

        from mhsa_compile.bench.workloads import choose, module_of

        torch.manual_seed(self.seed)
        if self.source is not None:
            sizes = _DEFAULT_DIMS | self.dims
            sizes.setdefault("S", sizes["L"])
            dims = {} if self.symbolic else self.dims
            source = sources.resolve(self.source, {})
            yield Case(str(self.source), source, dims, sizes, self.weights, self.float32_products)
        for workload in choose(self.workloads):
            at_dtype = workload.at(self.dtype or workload.spec.dtype)
            dims = {} if self.symbolic else at_dtype.dims
            module = module_of(at_dtype)
            yield Case(at_dtype.name, module, dims, at_dtype.dims, self.weights, self.float32_products)


def _beside(case: Case) -> Iterator[Case]:
    """The case at half the lengths, and at twice them: the buckets beside its own. A single query stays one."""
    lengths = {name: size for name, size in case.dims.items() if name in ("L", "S", "C") and size > 1}
    for words, halves in (("half as long", 1), ("twice as long", 4)):
        other = {name: size * halves // 2 for name, size in lengths.items()}
        if other:
            yield replace(case, name=f"{case.name}, {words}", dims=case.dims | other, sizes=case.sizes | other)


def split(arguments: list[str], on: str) -> tuple[Path | None, tuple[Address, str] | None]:
    """(the source, address and key of the tracker's devices) of the arguments. Raises InputError and DeviceError."""
    from mhsa_compile.tuning.measure.rpc_server import parsed

    most = 2 if on == TRACKER else 1
    if len(arguments) > most:
        expected = "one source" if most == 1 else "a source and HOST:PORT/KEY"
        raise InputError("arguments", expected, f"{arguments[most]!r}, too")
    if on != TRACKER:
        return (Path(arguments[0]) if arguments else None), None
    place, _, key = arguments[-1].rpartition("/") if arguments else ("", "", "")
    if not (place and key) or (len(arguments) == 1 and places.is_file(arguments[0])):
        hint = "Such as: mhsa tune spec.toml --on tracker 127.0.0.1:9190/pi"
        raise DeviceError(
            "--on tracker", "HOST:PORT/KEY at the end", repr(arguments[-1]) if arguments else "nothing", hint
        )
    return (Path(arguments[0]) if len(arguments) == 2 else None), (parsed(place, "--on tracker"), key)
