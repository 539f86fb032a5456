"""What an exported graph takes and gives: names, dims, dtypes, and which dims are fixed.

Notation: B batch, L query length, S key length, C capacity of a cache, E head dim, F value head dim.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mhsa_compile.errors import InputError, SpecError
from mhsa_compile.nn.modules import MultiHeadAttention, ScaledDotProductAttention
from mhsa_compile.runtime.symbolic_dims import is_expression, with_sizes
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.outputs import array_names

Shape = tuple[int | str, ...]
ModuleSignature = dict[str, tuple[Shape, torch.dtype]]
"""Input name -> (dims, dtype); a dim is a size or the name of a symbol."""

Axis = tuple[str, int]
"""An input and one of its axes."""

_PAST = re.compile(r"past_\d+_(self_)?(key|value)")
"""Names of a cache's keys and values of self-attention."""


def in_place(spec: AttentionSpec) -> dict[str, str]:
    """Inputs of a spec with kv_cache, and the outputs that may be written over them."""
    return {f"past_{name}": f"present_{name}" for name in spec.cache_arrays}


def own_signature(module: MultiHeadAttention | ScaledDotProductAttention) -> ModuleSignature:
    """The inputs of a module of this library, all that may be free symbolic."""
    spec = module.spec
    dtype = getattr(torch, spec.dtype)
    source_length = "S"
    G, E, F = spec.num_kv_heads, spec.head_dim, spec.v_head_dim
    if isinstance(module, MultiHeadAttention):
        shapes: dict[str, Shape] = {"x": ("B", "L", spec.embed_dim)}
        if spec.is_cross:  # one input, or two
            widths = spec.source_dim, spec.v_source_dim
            shapes |= {name: ("B", "S", width) for name, width in zip(spec.sources, widths, strict=True)}
        else:
            source_length = "L"
    else:
        shapes = {"q": ("B", spec.num_heads, "L", E), "k": ("B", G, "S", E), "v": ("B", G, "S", F)}
    signature: ModuleSignature = {name: (shape, dtype) for name, shape in shapes.items()}
    if spec.kv_cache:
        stored = getattr(torch, spec.cache_dtype)
        signature |= {"past_key": (("B", G, "C", E), stored), "past_value": (("B", G, "C", F), stored)}
        signature["length"] = (("B",), torch.int64)
        scales = [f"past_{name}" for name in spec.cache_arrays[2:]]
        signature |= dict.fromkeys(scales, (("B", G, "C"), torch.float32))
    if spec.masks_keys:
        signature["mask"] = (("B", source_length), torch.bool)
    elif spec.mask is not None:
        axes = ("mask_B", "mask_H" if spec.num_heads > 1 else 1, "mask_L", "mask_S")
        signature["mask"] = (axes, dtype if spec.adds_mask else torch.bool)
    return signature


def zeros_of(signature: ModuleSignature, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Tensors of a signature, its symbols of these sizes."""
    return {
        name: torch.zeros([sizes[dim] if isinstance(dim, str) else dim for dim in shape], dtype=dtype)
        for name, (shape, dtype) in signature.items()
    }


def check_lengths(spec: AttentionSpec, dims: Mapping[str, int | None]) -> None:
    """Whether what is fixed fits the spec's positions and one another. Raises InputError."""
    L, C = dims.get("L"), dims.get("C") if spec.kv_cache else None
    if L is not None and C is not None and L > C:
        raise InputError("dims", f"a capacity C of at least L = {L}", str(C), "The cache holds the keys of x as well.")
    for name, size in (("L", L), ("C", C)):
        if spec.rope is not None and size is not None and size > spec.rope.max_length:
            expected = f"{name} of at most the spec's rope.max_length = {spec.rope.max_length}"
            raise InputError("dims", expected, str(size), "Raise max_length.")


def sizes_within(spec: AttentionSpec, sizes: Mapping[str, int | str]) -> dict[str, int]:
    """Symbol -> the largest size that tensors allow which a function reads by a place itself, such as doc[q_idx].

    sizes   of b, q_idx and kv_idx, fixed or by name. Raises SpecError where a fixed one is too large.
    """
    limits: dict[str, int] = {}
    for name, function in spec.functions.items():
        for step in function.steps:
            if step.op != "load":
                continue
            kind = function.tensors[int(step.value)]
            for arg, most in zip(step.args, kind.shape, strict=True):
                leaf = function.steps[arg].op
                size = spec.num_heads if leaf == "h" else sizes.get(leaf, 0)
                if spec.kv_cache and leaf != "h":  # a cache may be longer than what is visible of it
                    continue
                if isinstance(size, str):
                    limits[size] = min(most, limits.get(size, most))
                elif size > most:
                    got = f"one of {most}, read by {leaf}"
                    raise SpecError(name, f"a captured tensor of at least {size} elements", got)
    return limits


def output_names(module: nn.Module) -> list[str] | None:
    """The outputs of a module of this library; None leaves those of any other to the exporter."""
    if not isinstance(module, MultiHeadAttention | ScaledDotProductAttention):
        return None
    return [*array_names(module.spec.outputs), *in_place(module.spec).values()]


def guess_symbols(examples: Mapping[str, Tensor], widths: frozenset[int] = frozenset()) -> dict[Axis, str]:
    """Symbols of the axes that look like a batch or a length: B and L are those of the first sequence.

    A sequence is (B, L) of whole numbers, (B, L, ...) or (B, heads, L, ...). `widths` are the sizes of the module's
    weights: (B, samples) of floats is a sequence, too, where none is as wide, and of (B, channels, samples) both axes
    are lengths where one is as wide as the channels and none as the samples. Another length is S, and a third one has
    a name of its own. Masks and biases have lengths of sequences; what is 1 in them is fixed. Keys and values of a
    cache (`nested_values`) have the length P, whatever else is as long, and a mask may have that and a sequence's.
    Where there is no sequence, the rows of matrices are N: a batch of vectors, or a sequence without a batch.
    """
    masks = {name for name in examples if "mask" in name or "bias" in name}
    pasts = {name for name, value in examples.items() if _PAST.fullmatch(name) and value.ndim == 4}
    axes_of = {name: _lengths_of(value, widths) for name, value in examples.items()}
    sequences = [name for name, axes in axes_of.items() if axes and name not in masks | pasts]
    if not sequences:
        return _rows(examples, masks)
    lengths: dict[int, str] = {}
    for name in sequences:
        for axis in axes_of[name]:
            new = "L" if not lengths else f"{name}_{axis}" if "S" in lengths.values() else "S"
            lengths.setdefault(examples[name].shape[axis], new)
    past = {examples[name].shape[2] for name in pasts}
    longer = {size + length: f"P + {symbol}" for size in past for length, symbol in lengths.items()}
    batch = examples[sequences[0]].shape[0]
    symbols: dict[Axis, str] = {}
    for name, value in examples.items():
        for axis, size in enumerate(value.shape):
            if axis == 0 and size == batch and (value.ndim > 1 or not value.is_floating_point()):
                symbols[name, axis] = "B"
            elif name in pasts:
                symbols |= {(name, axis): "P"} if axis == 2 else {}
            elif name in masks and size in longer.keys() - lengths.keys():
                symbols[name, axis] = longer[size]
            elif (axis in axes_of[name] and name not in masks) or (
                size != 1 and size in lengths and (name in masks or axis == 0) and not (axis == 1 and value.ndim == 4)
            ):
                symbols[name, axis] = lengths[size]
    return symbols


def _rows(examples: Mapping[str, Tensor], masks: set[str]) -> dict[Axis, str]:
    """N for the rows of the first matrix or list of whole numbers, a name of its own for each other number of rows. A
    mask has the rows of others, along both axes."""
    counts: dict[int, str] = {}
    for name, value in examples.items():
        if name not in masks and value.ndim == (2 if value.is_floating_point() else 1):
            counts.setdefault(value.shape[0], f"{name}_0" if counts else "N")
    symbols: dict[Axis, str] = {}
    for name, value in examples.items():
        for axis, size in enumerate(value.shape):
            if size in counts and (axis == 0 or (name in masks and size != 1)):
                symbols[name, axis] = counts[size]
    return symbols


def _lengths_of(value: Tensor, widths: frozenset[int]) -> tuple[int, ...]:
    """The axes of a sequence along which it is long; none of what is no sequence."""
    is_wide = value.is_floating_point() and value.ndim > 0 and (not widths or value.shape[-1] in widths)
    if value.ndim == 2:
        return () if is_wide else (1,)
    if value.ndim == 3:
        return (1,) if is_wide or value.shape[1] not in widths else (1, 2)
    return (2,) if value.ndim == 4 else ()


def with_fixed_dims(signature: ModuleSignature, dims: dict[str, int | None]) -> ModuleSignature:
    """The signature with sizes in place of the symbols that `dims` fixes. Raises InputError."""
    named = {dim for shape, _ in signature.values() for dim in shape if isinstance(dim, str)}
    symbols = {dim for dim in named if not is_expression(dim)}
    for name, size in dims.items():
        self_attention_length = name == "S" and size == dims.get("L")
        if name not in symbols and size is not None and not self_attention_length:
            raise InputError("dims", f"symbols among {', '.join(sorted(symbols))}", repr(name))
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise InputError("dims", f"a positive integer or None for {name!r}", repr(size))
    for axis in ("B", "L"):  # what is 1 leaves nothing to broadcast
        if dims.get(axis) == 1:
            dims.setdefault(f"mask_{axis}", 1)
    # The operator pads a mask that is short in its last axis instead of broadcasting it: there it is whole, always.
    dims.setdefault("mask_S", dims.get("S" if "S" in symbols else "L"))
    fixed = {name: size for name, size in dims.items() if size is not None}

    def resolve(dim: int | str) -> int | str:
        return with_sizes(dim, fixed) if isinstance(dim, str) else dim

    return {name: (tuple(map(resolve, shape)), dtype) for name, (shape, dtype) in signature.items()}
