"""Whom we are compared with: one file for each family, in an explicit list. `Compiled` is ourselves, in the same form.

A peer computes the same thing, with the same weights, on the same number of threads, in the fastest form that its own
users would write; where that differs from workload to workload it has several, and `Fastest` tries them. Inputs are
brought into its own containers before the clock starts, and outputs stay in them. Whatever keeps a peer from running is
an exception, which `bench` turns into a visible row.
"""

from __future__ import annotations

from collections.abc import Iterable

from mhsa_bench.peers import iree, onnxruntime, openvino, torch_compile, torch_eager
from mhsa_bench.peers.fastest import Fastest
from mhsa_bench.peers.peer import Peer
from mhsa_compile.errors import InputError

PEERS: tuple[Peer, ...] = (
    Fastest("torch", torch_eager.FORMS),
    Fastest("torch.compile", torch_compile.FORMS),
    onnxruntime.OnnxRuntimeOwnGraph(),
    Fastest("onnxruntime-fused", onnxruntime.FUSED),
    Fastest("openvino", openvino.FORMS),
    iree.Iree(),
)


def find(names: Iterable[str]) -> tuple[Peer, ...]:
    """The peers of these names, each once. Raises InputError for an unknown one."""
    by_name = {peer.name: peer for peer in PEERS}
    unique_names = dict.fromkeys(names)
    if unknown := [name for name in unique_names if name not in by_name]:
        raise InputError("against", f"some of {', '.join(by_name)}", repr(unknown[0]))
    return tuple(by_name[name] for name in unique_names)
