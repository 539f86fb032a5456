"""One FusedAttention -> operations: the attention; present keys and values, and scores, where they are asked for. Masks
come in the one form that kernels read: four axes that are 1 or full.

Notation: B batch, L query length, S key length, P past length, H heads, F value head dim.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

from tvm import relax, te, tirx

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.fusion.fused_nodes import FusedAttention
from mhsa_compile.frontend.onnx_graph import node_error
from mhsa_compile.frontend.relax.imported_module import Broadcast, ImportContext, dim_of
from mhsa_compile.frontend.relax.sizes.agreements import Demand
from mhsa_compile.frontend.relax.values import RelaxValue, SizeExpr, difference, dims, equal
from mhsa_compile.kernels.interface.ops import (
    AttentionOp,
    AttentionProbsOp,
    HeadLayout,
    KvConcatOp,
    ScoresOp,
    SoftmaxStatsOp,
)
from mhsa_compile.kernels.interface.score_step import NodeScores, ScoreStep
from mhsa_compile.kernels.scores.order import STEPS, steps_of
from mhsa_compile.nn.mhsa_operator import MASK
from mhsa_compile.spec.window import WindowSpec

WEIGHTS = 3
"""The qk_matmul_output_mode of what the softmax gives, for which there are kernels."""
_LENGTH_AXIS = {"rows": 1, "heads": 2}
_UNKNOWN: Literal["unknown"] = "unknown"


class AttentionImport:
    """A fused node with the values of its inputs; `name` is what it is called where it is refused."""

    def __init__(self, context: ImportContext, name: str, fused: FusedAttention, inputs: list[RelaxValue]) -> None:
        self.context, self.bb = context, context.bb
        self.node = f"Attention node {name!r}"
        self.fused, self.inputs = fused, inputs
        self.places = {"q": fused.query, "k": fused.key, "v": fused.value}
        self.operands = {role: inputs[place.buffer] for role, place in self.places.items()}

    def demand(self) -> tuple[list[list[SizeExpr]], Demand]:
        """The shapes of Q, K, V and a mask that is computed, and how their sizes must fit."""
        shapes = [list(dims(self.operands[role])) for role in "qkv"]
        equal = [(shapes[0][0], shape[0]) for shape in shapes[1:]] + [(self._length("k"), self._length("v"))]
        mask, past = self._mask_input(), self.fused.past_key
        if mask is None or past is not None or self.context.input_name(mask) is not None:
            return shapes, Demand(equal)
        full = [shapes[0][0], self.fused.num_heads, self._length("q"), self._length("k")]
        full = [full[0], full[3]] if self.fused.key_mask else full
        reach = list(dims(mask))
        judged = slice(None, -1 if self.fused.pads_mask else None)
        return [*shapes, reach], Demand(equal, [[full[judged], reach[judged]]])

    def _input(self, number: int | None) -> RelaxValue | None:
        return None if number is None else self.inputs[number]

    def _mask_input(self) -> RelaxValue | None:
        (number,) = self.fused.roles.get(MASK, (None,))
        return self._input(number)

    def results(self) -> Any:
        """What the node gives: Y, or a tuple of it and present keys and values, scores, and what these are like.

        Raises ModelError.
        """
        outputs = self._presents()
        inputs = self._buffers()
        q, heads = self.operands["q"], self.fused.num_heads
        full = [dims(q)[0], heads, self._length("q"), self._length("k")]
        op = self._operation(full, inputs)
        if op.output.layout == "rows":
            shape = [full[0], full[2], op.output.width]
        else:
            shape = [full[0], heads, full[2], op.v_head_dim]
        outputs["y"] = self.context.call(op, inputs, shape)
        if "scores" in self.fused.gives:
            stage = self.fused.stage
            scores = AttentionProbsOp(op) if stage == WEIGHTS else ScoresOp(op, stage)
            outputs["scores"] = self.context.call(scores, inputs, full)
        outputs |= self._inside(op, inputs, full)
        results = [outputs[role] for role in self.fused.gives]
        return results[0] if len(results) == 1 else relax.Tuple(results)

    def _inside(self, op: AttentionOp, inputs: list[RelaxValue], full: list[SizeExpr]) -> dict[str, RelaxValue]:
        """What the rows of the softmax are like, as far as it is asked for."""
        request = self.fused.softmax_outputs
        rows, best = full[:3], [*full[:3], request.top_k]
        shapes = {"lse": (rows, "float32"), "entropy": (rows, "float32")}
        shapes |= {"top_k_weights": (best, "float32"), "top_k_keys": (best, "int64")}
        types = {name: relax.TensorType(*shapes[name]) for name in request.names if name in shapes}
        outputs: dict[str, RelaxValue] = {}
        if types:
            statistics = SoftmaxStatsOp(op, request.lse, request.entropy, request.top_k)
            values = self.context.call_for_several(statistics, inputs, list(types.values()))
            outputs = dict(zip(types, values, strict=True))
        if request.weights:
            heads = full[1] if request.heads is None else len(request.heads)
            queries = full[2] if request.rows is None else len(request.rows)
            probs = AttentionProbsOp(op, request.heads, request.rows)
            outputs["weights"] = self.context.call(probs, inputs, [full[0], heads, queries, full[3]])
        return outputs

    def _presents(self) -> dict[str, RelaxValue]:
        """present_key and present_value, where they are asked for; with a past, attention reads those."""
        fused, presents = self.fused, {}
        for role, result, past_number, size in (
            ("k", "present_key", fused.past_key, fused.head_dim),
            ("v", "present_value", fused.past_value, fused.v_head_dim),
        ):
            past = self._input(past_number)
            if past is not None or result in fused.gives:
                presents[result] = value = self._present(role, past, size)
                if past is not None:
                    self.operands[role], self.places[role] = value, HeadLayout(0, "heads", 0)
        return presents

    def _present(self, role: str, past: RelaxValue | None, size: int) -> RelaxValue:
        new, length, heads = self.operands[role], self._length(role), self.fused.num_kv_heads
        batch, before = dims(new)[0], None if past is None else dims(past)[2]
        op = KvConcatOp(
            batch=self.context.dim(batch),
            past=None if before is None else self.context.dim(before),
            length=self.context.dim(length),
            num_heads=heads,
            head_dim=size,
            new=replace(self.places[role], buffer=0),
            dtype=str(new.ty.dtype),  # type: ignore[arg-type]
        )
        inputs = [new] if past is None else [new, past]
        return self.context.call(op, inputs, [batch, heads, length if before is None else before + length, size])

    def _buffers(self) -> list[RelaxValue]:
        """The distinct operands, numbered in the placements."""
        buffers: list[RelaxValue] = []
        for role, value in self.operands.items():
            index = next((i for i, buffer in enumerate(buffers) if buffer.same_as(value)), len(buffers))
            buffers += [value] if index == len(buffers) else []
            self.places[role] = replace(self.places[role], buffer=index)
        return buffers

    def _length(self, role: str) -> SizeExpr:
        return dims(self.operands[role])[_LENGTH_AXIS[self.places[role].layout]]

    def _operation(self, full: list[SizeExpr], inputs: list[RelaxValue]) -> AttentionOp:
        """The operation; what it takes besides Q, K and V joins `inputs`."""
        fused, dim = self.fused, self.context.dim
        steps = self._steps(full)
        inputs += [self.inputs[n] for n in (fused.key_scale, fused.value_scale) if n is not None]
        inputs += [value for _, values in steps for value in values]
        dtype, stored = (str(self.operands[role].ty.dtype) for role in "qk")
        return AttentionOp(
            batch=dim(full[0]),
            q_length=dim(full[2]),
            kv_length=dim(full[3]),
            num_heads=fused.num_heads,
            num_kv_heads=fused.num_kv_heads,
            head_dim=fused.head_dim,
            v_head_dim=fused.v_head_dim,
            scale=fused.head_dim**-0.5 if fused.scale is None else fused.scale,
            query=self.places["q"],
            key=self.places["k"],
            value=self.places["v"],
            output=HeadLayout(0, fused.output_layout, fused.num_heads * fused.v_head_dim),
            dtype=dtype,  # type: ignore[arg-type]
            kv_dtype=None if stored == dtype else stored,  # type: ignore[arg-type]
            unscaled=stored == "int8" and fused.key_scale is None,
            scores=tuple(step for step, _ in steps),
            softmax=fused.softmax,
        )

    def _steps(self, full: list[SizeExpr]) -> list[tuple[ScoreStep, list[RelaxValue]]]:
        """The steps of the scores, in their order, each with its inputs."""
        fused, dim = self.fused, self.context.dim
        values = {role: [self.inputs[number] for number in numbers] for role, numbers in fused.roles.items()}
        window, mask = self._window(full, self._mask(full))
        if mask is not None:
            values[MASK] = [mask]
        for kind in STEPS:
            if kind.role in values:
                values[kind.role] = [self._read_as(kind, value) for value in values[kind.role]]
                for name in filter(None, map(self.context.input_name, values[kind.role] if kind.counts_keys else [])):
                    self.context.result.limits[name] = dim_of(full[3])
        node = NodeScores(
            dtype=str(self.operands["q"].ty.dtype),
            batch=dim(full[0]),
            heads=fused.num_heads,
            words=fused.words,
            inputs={
                role: [(str(value.ty.dtype), tuple(map(dim, dims(value)))) for value in own]
                for role, own in values.items()
            },
            pairs=fused.pairs,
            window=window,
        )
        steps = steps_of(node)
        if window is None and any(step.from_places for step in steps):
            steps = steps_of(replace(node, window=WindowSpec(None, None, fused.alignment)))
        return [(step, values.get(step.role, [])) for step in steps]

    def _read_as(self, kind: type[ScoreStep], value: RelaxValue) -> RelaxValue:
        """An input of a dtype that the step takes."""
        dtype = kind.read_as.get(str(value.ty.dtype))
        return value if dtype is None else self.bb.emit(relax.op.astype(value, dtype))

    def _mask(self, full: list[SizeExpr]) -> RelaxValue | None:
        """The mask with four axes. One from the call is checked there; a computed one here, as far as that goes."""
        mask = self._mask_input()
        if mask is None:
            return None
        name, key_mask, pads = self.context.input_name(mask), self.fused.key_mask, self.fused.pads_mask
        mask = _four_axes(self.bb, mask, key_mask, self.node)
        if name is not None and not key_mask:  # one flag a key has its exact shape, (B, S)
            shape_of_mask = Broadcast(tuple(map(dim_of, full)), pads)
            if self.context.result.masks.setdefault(name, shape_of_mask) != shape_of_mask:
                raise ModelError(f"input {name!r}", "a mask of attentions of one size", f"{shape_of_mask.full} as well")
        length, reach = full[3], dims(mask)[3]
        is_known = name is not None or isinstance(difference(length, reach), int)
        if pads and is_known and not equal(length, reach):
            mask = _padded(self.bb, mask, length)
        return mask if name is not None else _checked(self.bb, self.node, mask, full)

    def _window(self, full: list[SizeExpr], mask: RelaxValue | None) -> tuple[WindowSpec | None, RelaxValue | None]:
        """The window with causality in it, by itself, else in the mask."""
        past = self._input(self.fused.past_key)
        sizes = {"past": None if past is None else dims(past)[2], "queries": full[2], "keys": full[3]}
        window = self.fused.left, self.fused.right
        window_spec = _window_of(*window, self.fused.alignment, **sizes)
        if window_spec != _UNKNOWN:
            return window_spec, mask
        return None, _banded(self.bb, mask, *window, **sizes)


def _four_axes(builder: relax.BlockBuilder, mask: RelaxValue, key_mask: bool, node: str) -> RelaxValue:
    """The mask as a view of four axes, of 1 where it had none. A key mask is (B, S). Raises ModelError."""
    if mask.ty.shape is None:
        raise node_error(node, f"an {MASK} whose dims can be inferred", "a computed one whose dims cannot")
    shape = dims(mask)
    if key_mask:
        shape = [shape[0], 1, 1, shape[1]]
    elif len(shape) < 4:
        shape = [*[1] * (4 - len(shape)), *shape]
    else:
        return mask
    return builder.emit(relax.op.reshape(mask, relax.ShapeExpr(shape)))


def _padded(builder: relax.BlockBuilder, mask: RelaxValue, length: SizeExpr) -> RelaxValue:
    """The mask over `length` keys: those that it does not reach are hidden."""

    def longer(mask: te.Tensor) -> te.Tensor:
        def element(*at: Any) -> Any:
            return tirx.if_then_else(at[3] < mask.shape[3], mask[at], _fill(mask.dtype))

        return te.compute((*mask.shape[:3], length), element, "padded")

    return builder.emit_te(longer, mask, primfunc_name_hint="padded_mask")


def _checked(builder: relax.BlockBuilder, node: str, mask: RelaxValue, full: list[SizeExpr]) -> RelaxValue:
    """A computed mask, each of whose axes is 1 or full: shown now, or taken to be full, which every call checks.

    Raises ModelError.
    """
    sizes = dims(mask)
    target = [size if equal(size, 1) else whole for size, whole in zip(sizes, full, strict=True)]
    apart = [difference(size, want) for size, want in zip(sizes, target, strict=True)]
    if any(isinstance(by, int) and by for by in apart):
        raise node_error(node, f"an {MASK} with axes of 1 or of {_text(full)}", _text(sizes))
    if all(isinstance(by, int) for by in apart):
        return mask
    return builder.match_cast(mask, relax.TensorType(target, mask.ty.dtype))


def _window_of(
    left: int, right: int, alignment: str, *, past: SizeExpr | None, queries: SizeExpr, keys: SizeExpr
) -> WindowSpec | Literal["unknown"] | None:
    """The band of a window (-1: unbounded), causality in it: query i stands at i + P, or as `alignment` says.

    _UNKNOWN where no Band can say it: there are more or fewer new keys than queries, by a number that calls decide.
    """
    if left == right == -1:
        return None
    shift = 0
    if past is not None:
        alignment, shift = "bottom_right", difference(past, keys - queries)
        if not isinstance(shift, int):
            alignment, shift = "top_left", difference(past, 0)
        if not isinstance(shift, int):
            return _UNKNOWN
    bounds = (None if left < 0 else left - shift, None if right < 0 else right + shift)
    return WindowSpec(*bounds, alignment)  # type: ignore[arg-type]


def _banded(
    builder: relax.BlockBuilder,
    mask: RelaxValue | None,
    left: int,
    right: int,
    *,
    past: SizeExpr,
    queries: SizeExpr,
    keys: SizeExpr,
) -> RelaxValue:
    """A mask (mB, mH, L, S) that hides what `mask` hides, and what lies outside the window of query i at i + P."""

    def inside(*masks: te.Tensor) -> te.Tensor:
        one = tirx.const(1, "int64")
        batch, heads = masks[0].shape[:2] if masks else (one, one)

        def element(b: Any, h: Any, i: Any, j: Any) -> Any:
            visible = tirx.const(True, "bool")
            if left >= 0:
                visible = tirx.all(visible, j >= i + past - left)
            if right >= 0:
                visible = tirx.all(visible, j <= i + past + right)
            if not masks:
                return visible
            places = zip((b, h, i, j), masks[0].shape, strict=True)
            value = masks[0][tuple(tirx.min(place, size - 1) for place, size in places)]  # an axis of 1 broadcasts
            return tirx.Select(visible, value, _fill(masks[0].dtype))

        return te.compute((batch, heads, queries, keys), element, "banded")

    return builder.emit_te(inside, *([] if mask is None else [mask]), primfunc_name_hint="banded_mask")


def _fill(dtype: str) -> Any:
    return tirx.const(False, "bool") if dtype == "bool" else tirx.const(-math.inf, dtype)


def _text(sizes: list[SizeExpr]) -> str:
    return f"({', '.join(map(str, sizes))})"
