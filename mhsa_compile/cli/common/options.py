"""Options that several commands share, and the flags that state a spec: one for each field of AttentionSpec whose note
has words for it. Dims are in the library's notation: B batch, L queries, S keys, C capacity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec
import typer

from mhsa_compile.cli.common.option_groups import OPTION
from mhsa_compile.errors import InputError
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.checks import LARGEST
from mhsa_compile.spec.field_notes import SpecField, fields_with_notes

if TYPE_CHECKING:
    from mhsa_compile.runtime.artifact.manifest import TensorInfo


_LARGEST_SEED = 2**63 - 1  # of PyTorch's generators

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
ArtifactFolder = Annotated[
    Path, typer.Argument(metavar="DIR", help="An artifact: the folder that `mhsa compile` wrote.")
]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Threads; by default the CPUs this process may use.")
]
InputArrays = Annotated[
    list[str] | None, typer.Option("--input", metavar="NAME=FILE.npy", help="Repeat it; what is missing is random.")
]
Records = Annotated[
    Path | None,
    typer.Option("--records", metavar="FILE", help="Tuned records, instead of your own and those that are shipped."),
]
WeightWord = Annotated[
    str | None,
    typer.Option("--weights", metavar="WORD", help="Linears in few bits: int8, or int4:block=64,zeros and the like."),
]
Float32ProductsWord = Annotated[
    str, typer.Option("--float32-products", metavar="WORD", help="auto, ieee, bf16x6, bf16x3 or bf16.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=_LARGEST_SEED, help="Seed of whatever is random.")]


def _dim(symbol: str, help: str) -> Any:
    return typer.Option(min=1, max=LARGEST, metavar=symbol, help=help)


@dataclass(frozen=True, kw_only=True)
class StatedDims:
    """Sizes of dims, as a command line states them."""

    batch: Annotated[int | None, _dim("B", "Batch size.")] = None
    length: Annotated[int | None, _dim("L", "Query length.")] = None
    kv_length: Annotated[int | None, _dim("S", "Key and value length.")] = None
    capacity: Annotated[int | None, _dim("C", "Positions of a cache.")] = None
    dim: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=N", help="Size of any other symbol, as the model names it. Repeat it."),
    ] = None

    def sizes(self) -> dict[str, int]:
        """The sizes that were given, by symbol. Raises InputError."""
        flags = {"B": self.batch, "L": self.length, "S": self.kv_length, "C": self.capacity}
        sizes = {symbol: size for symbol, size in flags.items() if size is not None}
        for assignment in self.dim or ():
            symbol, _, size = assignment.rpartition("=")
            if not (symbol and size.isascii() and size.isdigit() and int(size)):
                raise InputError("--dim", "NAME=N with N of at least 1, such as seq=128", repr(assignment))
            if sizes.setdefault(symbol, int(size)) != int(size):
                raise InputError("--dim", f"one size for {symbol!r}", f"{sizes[symbol]} and {size}")
        return sizes

    def check_symbols(self, inputs: Iterable[TensorInfo]) -> None:
        """Raises InputError unless --dim names symbols of an artifact's inputs."""
        symbols = list(dict.fromkeys(dim for info in inputs for dim in info.dims if isinstance(dim, str)))
        for assignment in self.dim or ():
            name = assignment.rpartition("=")[0]
            if name not in symbols:
                raise InputError(
                    "--dim", f"a symbol of the inputs: {', '.join(symbols) or 'all are fixed'}", repr(name)
                )


def peers(against: str) -> tuple[str, ...]:
    """The names of --against, or of all peers for "all". Raises InputError, before anything is compiled."""
    from mhsa_bench.peers import registry as peers

    names = list(filter(None, map(str.strip, against.split(","))))
    return tuple(peer.name for peer in (peers.PEERS if names == ["all"] else peers.find(names)))


_PARSE, _FIELD = "parse", "field"
_PANEL = "The spec, instead of SOURCE"
_OFF = {one.name for one in msgspec.structs.fields(AttentionSpec) if one.default is False}


def _flag(name: str, spec_field: SpecField) -> tuple[str, Any, Any]:
    """A flag named after its field; a bool has its --no- form where it is true if nothing is stated."""
    note = spec_field.note
    names = [f"--{name.replace('_', '-')}"] if name in _OFF else []
    option = typer.Option(None, *names, help=note.help, rich_help_panel=_PANEL, show_default=False)
    kind = (get_args(spec_field.type) or (spec_field.type,))[0]
    if note.choices:
        kind = Literal[note.choices]
    elif note.parse is not None:
        kind = str
    return name, kind | None, field(default=None, metadata={OPTION: option, _PARSE: note.parse, _FIELD: name})


def _flags() -> Iterator[tuple[str, Any, Any]]:
    for name, spec_field in fields_with_notes(AttentionSpec).items():
        if not spec_field.note.help:
            continue
        yield _flag(name, spec_field)
        if spec_field.note.form is not None:
            yield _form_flag(name, *spec_field.note.form)


def _form_flag(name: str, key: str, texts: tuple[str, ...]) -> tuple[str, Any, Any]:
    """The flag of a value {key: text} of a field."""
    flag = f"--{name.replace('_', '-')}"
    help = f"{flag}, in this {key}."
    option = typer.Option(None, f"{flag}-{key}", help=help, rich_help_panel=_PANEL, show_default=False)
    metadata = {OPTION: option, _PARSE: lambda text: {key: text}, _FIELD: name}
    return f"{name}_{key}", Literal[texts] | None, field(default=None, metadata=metadata)


_Flags: Any = make_dataclass("_Flags", _flags(), frozen=True, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class SpecFlags(_Flags):  # type: ignore[misc]  # made of the fields of AttentionSpec
    """The fields of AttentionSpec as a command line states them, in their order; None was not stated."""

    def spec_fields(self) -> dict[str, Any]:
        """What AttentionSpec takes of the flags that were stated. Raises SpecError.

        An empty text stays one, for the spec to refuse.
        """
        values = {}
        for flag in fields(self):
            value, parse = getattr(self, flag.name), flag.metadata[_PARSE]
            if value is not None:
                values[flag.metadata[_FIELD]] = parse(value) if parse and value else value
        return values
