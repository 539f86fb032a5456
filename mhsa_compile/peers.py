"""Whom we are compared with: one small class each, in an explicit list. `Compiled` is ourselves, in the same form.

A peer is opened on an artifact: it computes the same thing, with the same weights, on the same number of threads, in
the fastest form that its own users would write. Inputs are brought into its own containers before the clock starts,
and outputs stay in them. Whatever keeps a peer from running is an exception, which `bench` turns into a visible row.
Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mhsa_compile import installation
from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.spec import AttentionSpec

if TYPE_CHECKING:
    from torch import Tensor

    from mhsa_compile.artifact import Artifact

Array = np.ndarray
Arrays = Mapping[str, Array]
Call = Callable[[], Any]
Bind = Callable[[Arrays], Call]
"""Inputs by name -> a call on them, without arguments: what is timed."""


class Peer(Protocol):
    """One way to run an artifact's computation."""

    name: str

    def open(self, artifact: Artifact, threads: int) -> AbstractContextManager[Bind]:
        """Ready to run for as long as the context is open. Raises whatever says why it cannot."""
        ...

    def arrays(self, result: Any) -> list[Array]:
        """What a call returned, as NumPy arrays in the order of the graph's outputs; not timed."""
        ...


class Compiled:
    """This project: NumPy in, NumPy out."""

    name = "mhsa_compile"

    @contextmanager
    def open(self, artifact: Artifact, threads: int) -> Iterator[Bind]:
        from mhsa_compile.runtime import load

        compiled = load(artifact, threads=threads)
        yield lambda inputs: partial(compiled, *inputs.values())

    def arrays(self, result: Any) -> list[Array]:
        return list(result) if isinstance(result, list | tuple) else [result]


class TorchEager:
    """PyTorch: fused projections and F.scaled_dot_product_attention, in inference mode.

    Not our module, which pays for its NaN semantics. One product projects everything that reads the same input, which
    was 7 % faster on tiny blocks than three of nn.Linear and the same on large ones. Masks are made ready (broadcast,
    and joined with causality, which the function does not take together) outside the timed call.
    """

    name = "torch"

    @contextmanager
    def open(self, artifact: Artifact, threads: int) -> Iterator[Bind]:
        fields = artifact.manifest.spec
        if fields is None:
            raise ModelError(
                "torch", "an artifact compiled from a spec", "one of a foreign .onnx, with no PyTorch form"
            )
        installation.require("torch", extra="bench")
        import torch
        from safetensors.torch import load_file

        spec = AttentionSpec.from_dict(fields)
        weights = load_file(artifact.path / "weights.safetensors") if artifact.manifest.weights else {}
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with torch.inference_mode():  # entered once: it costs a microsecond
                yield lambda arrays: _torch_call(spec, weights, {n: torch.from_numpy(a) for n, a in arrays.items()})
        finally:
            torch.set_num_threads(before)

    def arrays(self, result: Any) -> list[Array]:
        return [result.numpy()]


def _torch_call(spec: AttentionSpec, weights: dict[str, Tensor], inputs: dict[str, Tensor]) -> Call:
    from torch.nn.functional import linear, scaled_dot_product_attention

    mask, is_causal = _torch_mask(spec, inputs)
    grouped = spec.num_kv_heads != spec.num_heads
    core = partial(
        scaled_dot_product_attention, attn_mask=mask, is_causal=is_causal, scale=spec.scale, enable_gqa=grouped
    )
    if "q" in inputs:  # the core alone
        return partial(core, *(inputs[name] for name in "qkv"))
    x, context = inputs["x"], inputs.get("context")
    w_out, b_out = weights["out_proj.weight"], weights.get("out_proj.bias")

    def out(heads: Tensor) -> Tensor:
        return linear(heads.transpose(1, 2).flatten(2), w_out, b_out)

    if context is None:
        project = _projections(spec, weights, "qkv")
        return lambda: out(core(*project(x)))
    project_query, project_source = _projections(spec, weights, "q"), _projections(spec, weights, "kv")
    return lambda: out(core(*project_query(x), *project_source(context)))


def _projections(spec: AttentionSpec, weights: dict[str, Tensor], names: str) -> Callable[[Tensor], list[Tensor]]:
    """Some of q, k and v of one input, as heads (B, H or G, length, E or F), by one matrix product."""
    import torch
    from torch.nn.functional import linear

    weight = torch.cat([weights[f"{name}_proj.weight"] for name in names])
    bias = torch.cat([weights[f"{name}_proj.bias"] for name in names]) if spec.bias else None
    G, E, F = spec.num_kv_heads, spec.head_dim, spec.v_head_dim
    by_name = {"q": (spec.num_heads, E), "k": (G, E), "v": (G, F)}
    shapes = [by_name[name] for name in names]
    widths = [heads * width for heads, width in shapes]

    def project(x: Tensor) -> list[Tensor]:
        columns = torch.split(linear(x, weight, bias), widths, dim=-1)
        return [torch.unflatten(c, -1, shape).transpose(1, 2) for c, shape in zip(columns, shapes, strict=True)]

    return project


def _torch_mask(spec: AttentionSpec, inputs: dict[str, Tensor]) -> tuple[Tensor | None, bool]:
    """(attn_mask, is_causal) of F.scaled_dot_product_attention, whose own causality is top-left."""
    import torch

    mask = inputs.get("mask")
    if mask is not None and spec.mask == "key_padding":
        mask = mask[:, None, None, :]
    query = inputs["q"] if "q" in inputs else inputs["x"]
    source = inputs["k"] if "k" in inputs else inputs.get("context", query)
    L, S = query.shape[-2], source.shape[-2]
    if spec.causal is None or (mask is None and (spec.causal == "top_left" or L == S)):
        return mask, spec.causal is not None
    band = torch.ones(L, S, dtype=torch.bool).tril(S - L if spec.causal == "bottom_right" else 0)
    if mask is None:
        return band, False
    return mask & band if mask.dtype == torch.bool else mask.masked_fill(~band, -torch.inf), False


class OnnxRuntime:
    """ONNX Runtime on the artifact's own model.onnx, all graph optimisations on.

    Its pool spins between calls, as it does by default. Inputs and outputs are OrtValues: no copies are charged to it.
    """

    name = "onnxruntime"

    @contextmanager
    def open(self, artifact: Artifact, threads: int) -> Iterator[Bind]:
        installation.require("onnxruntime", extra="bench")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # what fails is raised, too
        # Its workers spin inside a call, as they do by default, but not on into the next candidate's turn.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        session = onnxruntime.InferenceSession(
            artifact.path / "model.onnx", options, providers=["CPUExecutionProvider"]
        )
        outputs = [output.name for output in session.get_outputs()]
        wrap = onnxruntime.OrtValue.ortvalue_from_numpy
        yield lambda arrays: partial(session.run_with_ort_values, outputs, {n: wrap(a) for n, a in arrays.items()})

    def arrays(self, result: Any) -> list[Array]:
        return [value.numpy() for value in result]


PEERS: tuple[Peer, ...] = (TorchEager(), OnnxRuntime())


def find(names: Iterable[str]) -> tuple[Peer, ...]:
    """The peers of these names, each once. Raises InputError for an unknown one."""
    known = {peer.name: peer for peer in PEERS}
    wanted = dict.fromkeys(names)
    if unknown := [name for name in wanted if name not in known]:
        raise InputError("against", f"some of {', '.join(known)}", repr(unknown[0]))
    return tuple(known[name] for name in wanted)
