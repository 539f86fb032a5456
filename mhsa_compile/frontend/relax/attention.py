"""One MhsaAttention node -> operations: the attention; present keys and values, and scores, where they are asked for.

Notation: B batch, L query length, S key length, H heads, F value head dim.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import tvm
from onnx import numpy_helper
from tvm import relax

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.relax import masks as attention_masks
from mhsa_compile.frontend.relax.masks import (
    Size,
    Value,
    difference,
    dims,
    equal,
)
from mhsa_compile.kernels.interface.ops import (
    AttentionOp,
    AttentionProbsOp,
    Dim,
    HeadLayout,
    KvConcatOp,
    MaskInput,
    Op,
    ScoresOp,
    SoftmaxStatsOp,
    StaticMask,
    WindowSpec,
)

WEIGHTS = 3
"""The qk_matmul_output_mode of what the softmax gives, for which there are kernels."""
_CHOSEN = ("weights_heads", "weights_rows")
_LENGTH_AXIS = {"rows": 1, "heads": 2}


@dataclass(frozen=True)
class Broadcast:
    """What a mask of the call must broadcast to, (B, H, L, S), and whether it may end early, hiding the other keys."""

    full: tuple[Dim, ...]
    pads: bool


class ImportContext(Protocol):
    """The graph that is being imported."""

    bb: relax.BlockBuilder
    masks: dict[str, Broadcast]  # what an input must broadcast to
    limits: dict[str, Dim]  # the largest number that an input of integers may hold

    def dim(self, size: Size) -> Dim:
        """A fixed size, or the name under which a kernel binds the size it finds."""
        ...

    def call(self, op: Op, inputs: list[Value], shape: list[Size]) -> Value: ...

    def call_for_several(self, op: Op, inputs: list[Value], types: list[Any]) -> list[Value]: ...

    def input_name(self, value: Value) -> str | None:
        """The input of the graph that `value` is."""
        ...


class AttentionImport:
    """A node with its inputs. What `attention_pattern` wrote into it is read here."""

    def __init__(self, graph: ImportContext, inputs: list[Value], attrs: Mapping[str, Any]) -> None:
        self.graph, self.bb = graph, graph.bb
        self.said = {name: text(value) for name, value in attrs.items()}
        self.node = f"Attention node {text(attrs['tvm_custom']['name'])!r}"
        names = self._texts("extras")
        self.extras = dict(zip(names, inputs[len(inputs) - len(names) :], strict=True))
        self.places = {
            role: HeadLayout(*(self.said[f"{role}_{key}"] for key in ("buffer", "layout", "width", "offset")))
            for role in "qkv"
        }
        self.operands = {role: inputs[place.buffer] for role, place in self.places.items()}

    def _texts(self, name: str) -> list[str]:
        return [text(value) for value in self.said.get(name, ())]

    def results(self) -> Any:
        """What the node gives: Y, or a tuple of it and present keys and values, scores, and what these are like.

        Raises ModelError.
        """
        made = self._presents()
        inputs = self._buffers()
        q, heads = self.operands["q"], self.said["num_heads"]
        full = [dims(q)[0], heads, self._length("q"), self._length("k")]
        op = self._operation(full, inputs)
        if op.output.layout == "rows":
            shape = [full[0], full[2], op.output.width]
        else:
            shape = [full[0], heads, full[2], op.v_head_dim]
        made["y"] = self.graph.call(op, inputs, shape)
        if "scores" in self._texts("gives"):
            stage = self.said["stage"]
            asked = AttentionProbsOp(op) if stage == WEIGHTS else ScoresOp(op, stage)
            made["scores"] = self.graph.call(asked, inputs, full)
        made |= self._inside(op, inputs, full)
        results = [made[role] for role in self._texts("gives")]
        return results[0] if len(results) == 1 else relax.Tuple(results)

    def _inside(self, op: AttentionOp, inputs: list[Value], full: list[Size]) -> dict[str, Value]:
        """What the rows of the softmax are like, as far as it is asked for."""
        gives, k = self._texts("gives"), self.said.get("top_k", 0)
        rows = relax.TensorType(full[:3], "float32")
        types: dict[str, Any] = {name: rows for name in ("lse", "entropy") if name in gives}
        if "top_k_weights" in gives or "top_k_keys" in gives:
            types["top_k_weights"] = relax.TensorType([*full[:3], k], "float32")
            types["top_k_keys"] = relax.TensorType([*full[:3], k], "int64")
        made: dict[str, Value] = {}
        if types:
            statistics = SoftmaxStatsOp(op, "lse" in types, "entropy" in types, k if "top_k_keys" in types else 0)
            made = dict(zip(types, self.graph.call_for_several(statistics, inputs, list(types.values())), strict=True))
        if "weights" in gives:
            chosen = [tuple(self.said[name]) if name in self.said else None for name in _CHOSEN]
            counts = [
                size if numbers is None else len(numbers) for size, numbers in zip(full[1:3], chosen, strict=True)
            ]
            made["weights"] = self.graph.call(AttentionProbsOp(op, *chosen), inputs, [full[0], *counts, full[3]])
        return made

    def _presents(self) -> dict[str, Value]:
        """present_key and present_value, where they are asked for; with a past, attention reads those."""
        made = {}
        for role, name, size in (("k", "key", "head_dim"), ("v", "value", "v_head_dim")):
            past = self.extras.get(f"past_{name}")
            if past is not None or f"present_{name}" in self._texts("gives"):
                made[f"present_{name}"] = value = self._present(role, past, self.said[size])
                if past is not None:
                    self.operands[role], self.places[role] = value, HeadLayout(0, "heads", 0)
        return made

    def _present(self, role: str, past: Value | None, size: int) -> Value:
        new, length, heads = self.operands[role], self._length(role), self.said["num_kv_heads"]
        batch, before = dims(new)[0], None if past is None else dims(past)[2]
        op = KvConcatOp(
            batch=self.graph.dim(batch),
            past=None if before is None else self.graph.dim(before),
            length=self.graph.dim(length),
            num_heads=heads,
            head_dim=size,
            new=replace(self.places[role], buffer=0),
            dtype=str(new.ty.dtype),  # type: ignore[arg-type]
        )
        inputs = [new] if past is None else [new, past]
        return self.graph.call(op, inputs, [batch, heads, length if before is None else before + length, size])

    def _buffers(self) -> list[Value]:
        """The distinct operands, numbered in the placements."""
        buffers: list[Value] = []
        for role, value in self.operands.items():
            found = next((i for i, buffer in enumerate(buffers) if buffer.same_as(value)), len(buffers))
            buffers += [value] if found == len(buffers) else []
            self.places[role] = replace(self.places[role], buffer=found)
        return buffers

    def _length(self, role: str) -> Size:
        return dims(self.operands[role])[_LENGTH_AXIS[self.places[role].layout]]

    def _operation(self, full: list[Size], inputs: list[Value]) -> AttentionOp:
        """The operation; what it takes besides Q, K and V joins `inputs`."""
        said, dim = self.said, self.graph.dim
        mask = self._mask(full)
        band, mask = self._band(full, mask)
        lengths = self.extras.get("lengths")
        if lengths is not None and (name := self.graph.input_name(lengths)) is not None:
            self.graph.limits[name] = stated(full[3])
        sinks, slopes = self.extras.get("sinks"), self.extras.get("slopes")
        if band is None and slopes is not None:  # which count from the queries' places
            band = WindowSpec(None, None, said["alignment"])
        inputs += [value for value in (mask, lengths, sinks, slopes) if value is not None]
        return AttentionOp(
            batch=dim(full[0]),
            q_length=dim(full[2]),
            kv_length=dim(full[3]),
            num_heads=said["num_heads"],
            num_kv_heads=said["num_kv_heads"],
            head_dim=said["head_dim"],
            v_head_dim=said["v_head_dim"],
            scale=said.get("scale", said["head_dim"] ** -0.5),
            band=band,
            mask=None if mask is None else MaskInput(str(mask.ty.dtype), tuple(map(dim, dims(mask)))),  # type: ignore[arg-type]
            query=self.places["q"],
            key=self.places["k"],
            value=self.places["v"],
            output=HeadLayout(0, said["output_layout"], said["num_heads"] * said["v_head_dim"]),
            dtype=str(self.operands["q"].ty.dtype),  # type: ignore[arg-type]
            static_mask=StaticMask(numpy_helper.to_array(said["static_mask"])) if "static_mask" in said else None,
            softcap=said["softcap"],
            lengths=lengths is not None,
            sinks=sinks is not None,
            slopes=slopes is not None,
            softmax=said["softmax"],
        )

    def _mask(self, full: list[Size]) -> Value | None:
        """The mask with four axes. One from the call is checked there; a computed one here, as far as that goes."""
        mask = self.extras.get("mask")
        if mask is None:
            return None
        name, key_mask, pads = self.graph.input_name(mask), bool(self.said["key_mask"]), bool(self.said["pads_mask"])
        mask = attention_masks.four_axes(self.bb, mask, key_mask, self.node)
        if name is not None and not key_mask:  # one flag a key has its exact shape, (B, S)
            wanted = Broadcast(tuple(map(stated, full)), pads)
            if self.graph.masks.setdefault(name, wanted) != wanted:
                raise ModelError(f"input {name!r}", "a mask of attentions of one size", f"{wanted.full} as well")
        length, reach = full[3], dims(mask)[3]
        known = name is not None or isinstance(difference(length, reach), int)
        if pads and known and not equal(length, reach):
            mask = attention_masks.padded(self.bb, mask, length)
        return mask if name is not None else attention_masks.checked(self.bb, self.node, mask, full)

    def _band(self, full: list[Size], mask: Value | None) -> tuple[WindowSpec | None, Value | None]:
        """The window with causality in it, as a band, else in the mask."""
        past = self.extras.get("past_key")
        sizes = {"past": None if past is None else dims(past)[2], "queries": full[2], "keys": full[3]}
        window = self.said["left"], self.said["right"]
        band = attention_masks.band_of(*window, self.said["alignment"], **sizes)
        if band != attention_masks.UNKNOWN:
            return band, mask
        return None, attention_masks.banded(self.bb, mask, *window, **sizes)


def stated(size: Size) -> Dim:
    """A size as a signature states it: a number, or an expression of its symbols."""
    if isinstance(size, int | tvm.tirx.IntImm):
        return int(size)
    return re.sub(r"T\.int64\((\d+)\)", r"\1", str(size))


def text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value
