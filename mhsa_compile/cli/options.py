"""Options that several commands share. Dims are in the library's notation: B batch, L queries, S keys, C capacity."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mhsa_compile.spec_checks import LARGEST

_LARGEST_SEED = 2**63 - 1  # of PyTorch's generators

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
ArtifactFolder = Annotated[
    Path, typer.Argument(metavar="DIR", help="An artifact: the folder that `mhsa compile` wrote.")
]
Batch = Annotated[int | None, typer.Option("--batch", min=1, max=LARGEST, metavar="B", help="Batch size.")]
Length = Annotated[int | None, typer.Option("--length", min=1, max=LARGEST, metavar="L", help="Query length.")]
Capacity = Annotated[
    int | None, typer.Option("--capacity", min=1, max=LARGEST, metavar="C", help="Positions of a cache.")
]
KvLength = Annotated[
    int | None, typer.Option("--kv-length", min=1, max=LARGEST, metavar="S", help="Key and value length.")
]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Threads; by default the CPUs this process may use.")
]
Records = Annotated[
    Path | None,
    typer.Option("--records", metavar="FILE", help="Tuned records, instead of your own and those that are shipped."),
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=_LARGEST_SEED, help="Seed of whatever is random.")]


def stated_dims(
    batch: int | None, length: int | None, kv_length: int | None, capacity: int | None = None
) -> dict[str, int]:
    """The dims that were given, by symbol."""
    given = {"B": batch, "L": length, "S": kv_length, "C": capacity}
    return {symbol: size for symbol, size in given.items() if size is not None}


def peers(against: str) -> tuple[str, ...]:
    """The names of --against, or of all peers for "all". Raises InputError, before anything is compiled."""
    from mhsa_compile import peers

    names = list(filter(None, map(str.strip, against.split(","))))
    return tuple(peer.name for peer in (peers.PEERS if names == ["all"] else peers.find(names)))
