"""One Attention node of an ONNX graph in its surroundings: where its heads lie, which mask it has, the views around it.

What the node itself asks for is read in `attention_node`.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import onnx

from mhsa_compile.frontend.fusion.attention_node import AttentionNode
from mhsa_compile.frontend.fusion.fused_nodes import FusedAttention
from mhsa_compile.frontend.fusion.head_layout import Operand, keeps_rows
from mhsa_compile.frontend.fusion.stored_rows import StoredRows, stored_rows
from mhsa_compile.frontend.onnx_graph import GraphDim, GraphView, attributes, metadata_of
from mhsa_compile.kernels.interface.score_step import ScoreStep
from mhsa_compile.kernels.scores.order import STEPS
from mhsa_compile.nn.mhsa_operator import LENGTHS, MASK
from mhsa_compile.spec.attention_spec import SPEC_KEY
from mhsa_compile.spec.masks import HIDES, causal
from mhsa_compile.spec.score_functions import ScoreFunction

LOWEST = float(np.finfo(np.float32).min)


class AttentionPattern(AttentionNode):
    """One Attention node with the views around it."""

    def __init__(self, graph: GraphView, node: onnx.NodeProto) -> None:
        super().__init__(graph, node)
        heads = (None,) * 3 if self.heads is None else (self.heads[0], self.heads[1], self.heads[1])
        self.stored = self._stored()
        names = [self.names["Q"], *(stored.name for stored in self.stored)]
        numbers = (1, *(stored.numbers for stored in self.stored))
        self.operands = [
            self._operand(name, count, of_element)
            for name, count, of_element in zip(names, heads, numbers, strict=True)
        ]
        self.lengths, self.alignment = self._find_lengths()
        self.output, self.output_layout = self._find_output()
        self.pairs = self._constant_pairs()
        for kind in STEPS:
            if kind.foreseeable and (pairs := self._foreseen(kind)) is not None:
                self.pairs = pairs if self.pairs is None else self.pairs & pairs
                self.words.pop(kind.attribute)
                self.roles.pop(kind.role, None)
        self.mask, self.key_mask = ("", False) if self.pairs is not None else self._find_mask()
        if self.pairs is not None and self.pairs.all():
            self.pairs = None  # what hides nothing is no mask: the one row of a causal one that a step needs
        if self._is_causal():
            self.pairs, self.right = None, 0

    @property
    def _pads_mask(self) -> bool:
        """Whether a mask over fewer keys than there are hides the rest: opset 24 says so, before it was an error.

        Masks of a graph that was exported from a module of this library broadcast in every axis; the runtime sees to
        the last.
        """
        return self.graph.opset >= 24 and SPEC_KEY not in metadata_of(self.graph.model)

    def _stored(self) -> tuple[StoredRows, StoredRows]:
        """Where keys and values lie: in a cache of another dtype, where both do and no past comes before them."""
        own = StoredRows(self.names["K"]), StoredRows(self.names["V"])
        if self.past or self.heads is not None or "scores" in self.outputs or self.softmax != "float32":
            return own
        key, value = (stored_rows(self.graph, rows.name) for rows in own)
        if key is None or value is None or self.graph.dtype(key.name) != self.graph.dtype(value.name):
            return own
        return key, value

    def _operand(self, name: str, stated_heads: int | None, numbers: int) -> Operand:
        """Where an operand's heads lie: in the input itself, whose elements are so many numbers, or before the Reshape
        and Transpose that split them."""
        shape = self.graph.dims(name)
        if stated_heads is not None:
            width = _fixed(shape[2])
            return Operand(name, "rows", stated_heads, width // stated_heads, width=width)
        heads, head_dim = _fixed(shape[1]), _fixed(shape[3]) * numbers
        return self.split_rows(name) or Operand(name, "heads", heads, head_dim)

    def _find_output(self) -> tuple[str, Literal["rows", "heads"]]:
        """The value to write: Y itself, or what the Transpose and Reshape that join the heads again make of it."""
        y = self.node.output[0]
        if self.heads is not None:
            return y, "rows"
        transpose = self.graph.only_consumer(y, "Transpose")
        if transpose is not None and attributes(transpose).get("perm") == [0, 2, 1, 3]:
            join = self.graph.only_consumer(transpose.output[0], "Reshape")
            joined = None if join is None else self.graph.shape(join.output[0])
            width = self.operands[0].heads * self.operands[2].head_dim
            joins = join is not None and keeps_rows(self.graph, join)
            if join is not None and joins and joined is not None and len(joined) == 3 and joined[2] == width:
                self.absorbed += [transpose, join]
                return join.output[0], "rows"
        return y, "heads"

    def _find_lengths(self) -> tuple[str, Literal["top_left", "bottom_right"]]:
        """(the tensor of the keys' numbers, how queries and keys are aligned); no tensor where all keys count."""
        if not (name := self.names[LENGTHS]):
            return "", "top_left"
        expand = self.graph.producer(name, "Expand")
        shape = None if expand is None else self.graph.producer(expand.input[0], "Shape")
        if expand is None or shape is None or self.keys is None:
            return name, "bottom_right"
        attrs, measured = attributes(shape), self.graph.dims(shape.input[0])
        start, end = attrs.get("start", 0), attrs.get("end")
        one_axis = isinstance(start, int) and end == start + 1 and start < len(measured)
        if not one_axis or measured[start] != self.keys:
            return name, "bottom_right"
        readers = self.graph.consumers(name)
        if len(readers) == 1 and readers[0] is self.node and name not in self.graph.outputs:
            alone = [source for source in expand.input if self.graph.only_consumer(source, "Expand") is not None]
            shapes = [self.graph.producer(source, "Shape") for source in alone]
            self.absorbed += [expand, *(node for node in shapes if node is not None)]
        return "", "bottom_right"

    def _constant_pairs(self) -> np.ndarray[Any, Any] | None:
        """A constant mask that only hides or shows, as bool (1 or H, L, S); None for any other.

        What stands for -inf does so where every query sees a key; in a row of nothing else it is a number.
        """
        mask = self.graph.constant(self.names[MASK])
        L, S = self.query_length, self.keys
        if mask is None or mask.ndim > 4 or not isinstance(L, int) or not isinstance(S, int):
            return None
        if mask.dtype != np.bool_:
            shows = mask == 0
            hides = mask.astype(np.float32) < (HIDES if shows.any(-1).all() else LOWEST)
            if not (shows | hides).all():
                return None
            mask = shows
        if mask.ndim == 4 and len(mask) > 1:
            return None
        visible: np.ndarray[Any, Any] = mask.reshape((1,) * max(0, 3 - mask.ndim) + mask.shape[-3:])
        if self._pads_mask:  # before opset 24, only one of length 1 may be short
            visible = np.pad(visible, [(0, 0), (0, 0), (0, max(0, S - visible.shape[-1]))])
        full = (self.operands[0].heads, L, S)
        if any(size not in (1, whole) for size, whole in zip(visible.shape, full, strict=True)):
            raise self.refusal(f"an {MASK} that broadcasts to {(1, *full)}", mask.shape)
        return np.broadcast_to(visible, (len(visible), L, S))

    def _foreseen(self, kind: type[ScoreStep]) -> np.ndarray[Any, Any] | None:
        """What a function of places says of every pair, bool (1 or H, L, S), where all that it asks for is known."""
        L, S = self.query_length, self.keys
        arrays = [self.graph.constant(name) for name in self.roles.get(kind.role, ())]
        of_call = self.lengths or (self.names[MASK] and self.pairs is None)
        known = [array for array in arrays if array is not None]
        unknown = of_call or len(known) < len(arrays)
        if kind.attribute not in self.words or unknown or not isinstance(L, int) or not isinstance(S, int):
            return None
        from mhsa_compile.nn.score_functions import fixed_mask  # PyTorch is needed here only

        function = ScoreFunction.from_json(kind.attribute, str(self.words[kind.attribute]))
        offset = S - L if self.alignment == "bottom_right" else 0
        return fixed_mask(kind.attribute, function, known, heads=self.operands[0].heads, L=L, S=S, offset=offset)

    def _step_tensors(self) -> dict[str, tuple[str, ...]]:
        """The tensors of the steps of scores; those that are looked through come first."""
        first = {MASK: (self.mask,), LENGTHS: (self.lengths,)}
        return first | {role: names for role, names in self.roles.items() if role not in first}

    def _is_causal(self) -> bool:
        """Whether the constant mask says no more than is_causal would."""
        if self.pairs is None or self.past or self.names[LENGTHS] or (self.left, self.right) != (-1, -1):
            return False
        _, L, S = self.pairs.shape
        return bool((self.pairs == causal(L, S, self.alignment)).all())

    def _find_mask(self) -> tuple[str, bool]:
        """(the mask's tensor, whether it is (B, S): one flag a key). Unsqueezed axes are looked through."""
        name = self.names[MASK]
        shape = self.graph.shape(name) if name else ()
        if name and (shape is None or not 1 <= len(shape) <= 4):
            raise self.refusal(f"{MASK} of known rank 1 to 4", shape)
        if shape:
            self._refuse_contradictions(shape)
        whole = shape and (shape[-1] == self.keys is not None or not self._pads_mask)
        if whole and shape is not None and len(shape) == 4 and shape[1:3] == (1, 1):
            base = name
            while (unsqueeze := self.graph.producer(base, "Unsqueeze")) is not None:
                base = unsqueeze.input[0]
            if len(self.graph.dims(base)) == 2:
                return base, True
        return name, False

    def _refuse_contradictions(self, shape: tuple[GraphDim, ...]) -> None:
        """Refuses a mask with fixed sizes that do not broadcast to (B, H, L, S)."""
        batch = (self._shape("Q") or (None,))[0]
        full = (batch, self.operands[0].heads, self.query_length, self.keys)
        for axis, (size, whole) in enumerate(zip(reversed(shape), reversed(full), strict=False)):
            if not isinstance(size, int) or not isinstance(whole, int) or size in (1, whole):
                continue
            if not (self._pads_mask and axis == 0 and size < whole):
                shape_of_scores = f"({', '.join(str(dim or '?') for dim in full)})"
                raise self.refusal(f"an {MASK} that broadcasts to {shape_of_scores}", shape)

    def fused_node(self) -> onnx.NodeProto:
        q, k, v = self.operands
        past_key, past_value = self.past or ("", "")
        roles = {role: names for role, names in self._step_tensors().items() if any(names)}
        key_scale, value_scale = (stored.scales for stored in self.stored)
        others = (*(name for names in roles.values() for name in names), past_key, past_value, key_scale, value_scale)
        names = dict.fromkeys((q.source, k.source, v.source, *filter(None, others)))
        inputs = {name: number for number, name in enumerate(names)}
        outputs = {**self.outputs, "y": self.output}
        fused = FusedAttention(
            num_heads=q.heads,
            num_kv_heads=v.heads,
            head_dim=q.head_dim,
            v_head_dim=v.head_dim,
            query=q.as_input(inputs[q.source]),
            key=k.as_input(inputs[k.source]),
            value=v.as_input(inputs[v.source]),
            output_layout=self.output_layout,
            gives=tuple(outputs),
            softmax_outputs=self.softmax_outputs,
            left=self.left,
            right=self.right,
            alignment=self.alignment,
            softmax=self.softmax,
            stage=self.stage,
            key_mask=self.key_mask,
            pads_mask=self._pads_mask,
            words=self.words,
            roles={role: tuple(inputs[name] for name in names) for role, names in roles.items()},
            past_key=inputs.get(past_key),
            past_value=inputs.get(past_value),
            key_scale=inputs.get(key_scale),
            value_scale=inputs.get(value_scale),
            scale=self.scale,
            pairs=self.pairs,
        )
        return fused.to_node(self.node, list(inputs), list(outputs.values()))


def _fixed(dim: GraphDim) -> int:
    """A size that `attention_node` has found to be fixed."""
    assert isinstance(dim, int)
    return dim
