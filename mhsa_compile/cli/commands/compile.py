"""`mhsa compile`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mhsa_compile.cli.common import options, output, sources
from mhsa_compile.errors import SpecError

if TYPE_CHECKING:
    from mhsa_compile.runtime.artifact.artifact import Artifact

_SPEC = "The spec, instead of SOURCE"


def _field(flag: str, help: str) -> Any:
    return typer.Option(flag, help=help, rich_help_panel=_SPEC, show_default=False)


EmbedDim = Annotated[int | None, _field("--embed-dim", "D, the width of the activations.")]
NumHeads = Annotated[int | None, _field("--num-heads", "H, query heads.")]
NumKvHeads = Annotated[int | None, _field("--num-kv-heads", "G, key and value heads; H if not given.")]
HeadDim = Annotated[int | None, _field("--head-dim", "E, the width of a query or key head; D / H if not given.")]
VHeadDim = Annotated[int | None, _field("--v-head-dim", "F, the width of a value head; E if not given.")]
KvEmbedDim = Annotated[int | None, _field("--kv-embed-dim", "Cross-attention: the width of the second input.")]
Bias = Annotated[bool | None, _field("--bias/--no-bias", "Biases of the four projections.")]
Causal = Annotated[Literal["true", "top_left", "bottom_right"] | None, _field("--causal", "Which keys a query sees.")]
Window = Annotated[
    str | None, _field("--window", "LEFT,RIGHT: the keys a query sees on each side of itself; -1 is unbounded.")
]
StaticMask = Annotated[
    str | None, _field("--static-mask", "A constant mask, such as longformer:window=256,global_tokens=1.")
]
Mask = Annotated[Literal["bool", "additive", "key_padding"] | None, _field("--mask", "The mask a call takes.")]
Scale = Annotated[float | None, _field("--scale", "Factor of the scores; 1 / sqrt(E) if not given.")]
Softcap = Annotated[float | None, _field("--softcap", "c: scores become c * tanh(score / c).")]
RopeText = Annotated[
    str | None,
    _field(
        "--rope",
        "Rotary positions: default, or such as theta=500000,scaling=llama3,factor=8,original_max_length=8192.",
    ),
]
Alibi = Annotated[bool | None, _field("--alibi", "A bias that falls with the distance, a slope for each head.")]
Sinks = Annotated[bool | None, _field("--sinks", "One more learned score for each head, of no value.")]
KvCache = Annotated[bool | None, _field("--kv-cache", "Keys and values go into a cache; needs --causal true.")]
Outputs = Annotated[
    str | None,
    _field(
        "--outputs", "What a call returns, such as y,lse,entropy,top_k:5,weights:heads=0,3,rows=0,-1; y if not given."
    ),
]
Dtype = Annotated[Literal["float32", "bfloat16", "float16"] | None, _field("--dtype", "Of activations and weights.")]


def compile_source(
    source: sources.Source = None,
    *,
    out: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="The artifact's folder.")],
    target: Annotated[str, typer.Option(help="A name from `mhsa targets`, or a .toml file.")] = "native",
    force: Annotated[bool, typer.Option("--force", help="Replace the folder if it exists.")] = False,
    batch: options.Batch = None,
    length: options.Length = None,
    kv_length: options.KvLength = None,
    capacity: options.Capacity = None,
    dim: options.OtherDims = None,
    weights: Annotated[
        Literal["int8"] | None, typer.Option("--weights", help="Linears compute in eight bits, rounded at load.")
    ] = None,
    records: options.Records = None,
    dump: Annotated[Path | None, typer.Option(metavar="DIR", help="Write what passes between the stages.")] = None,
    seed: options.Seed = 0,
    json: options.Json = False,
    embed_dim: EmbedDim = None,
    num_heads: NumHeads = None,
    num_kv_heads: NumKvHeads = None,
    head_dim: HeadDim = None,
    v_head_dim: VHeadDim = None,
    kv_embed_dim: KvEmbedDim = None,
    bias: Bias = None,
    causal: Causal = None,
    window: Window = None,
    static_mask: StaticMask = None,
    mask: Mask = None,
    scale: Scale = None,
    softcap: Softcap = None,
    rope: RopeText = None,
    alibi: Alibi = None,
    sinks: Sinks = None,
    kv_cache: KvCache = None,
    outputs: Outputs = None,
    dtype: Dtype = None,
) -> None:
    """Compile SOURCE, or a spec given by flags with random weights, for a target.

    --batch, --length, --kv-length, --capacity and --dim fix those dims; they stay symbolic otherwise.
    """
    from mhsa_compile.spec.mask_patterns import parse_pattern
    from mhsa_compile.spec.outputs import split_words
    from mhsa_compile.spec.position_encoding import parse_rope

    fields = _given(
        embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim,
        kv_embed_dim=kv_embed_dim, bias=bias, causal=True if causal == "true" else causal,
        window=window and _pair(window), static_mask=static_mask and parse_pattern(static_mask), mask=mask,
        scale=scale, softcap=softcap, rope=rope and parse_rope(rope), alibi=alibi, sinks=sinks, kv_cache=kv_cache,
        outputs=outputs and split_words(outputs), dtype=dtype,
    )  # fmt: skip
    dims = options.stated_dims(batch, length, kv_length, capacity, dim)
    from mhsa_compile.files.atomic_write import check_place
    from mhsa_compile.runtime.artifact.manifest import MANIFEST

    check_place(out.resolve(), force, MANIFEST)  # before the work, not after it
    started = time.perf_counter()
    artifact = sources.compile_with_progress(
        source, fields, target, dims=dims, dump=dump, seed=seed, weights=weights, records=records
    )
    artifact.save(out, force=force)
    _report(out, artifact, time.perf_counter() - started, json)


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _pair(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise SpecError("--window", "LEFT,RIGHT, such as 256,0", repr(text)) from None


def _report(out: Path, artifact: Artifact, seconds: float, json: bool) -> None:
    manifest = artifact.manifest
    if json:
        said = {"artifact": out, "target": manifest.target.name, "seconds": seconds, "ops": manifest.ops}
        output.print_json(said | {"attention": manifest.attention, "fused": sum(b.fused for b in manifest.attention)})
        return
    rows = ((op.name, op.op, op.kernel, op.source, op.note) for op in manifest.ops)
    title = f"{out} for {manifest.target.name}, {seconds:.1f} s"
    output.print_table(title, ("operation", "kind", "kernel", "config from", "note"), rows)
    fused = sum(block.fused for block in manifest.attention)
    output.line(f"{fused} of {len(manifest.attention)} attention blocks fused")
    for block in manifest.attention:
        if block.note:
            output.line(f"  {block.name} ({block.form}), {'fused' if block.fused else 'not fused'}: {block.note}")
