"""One Attention node of an ONNX graph: what it asks for, where its heads lie, and the views around it.

Whatever it asks for that no kernel here can do is refused with its reason.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from mhsa_compile.errors import ModelError
from mhsa_compile.head_views import DOMAIN, Operand, keeps_rows, split_rows
from mhsa_compile.onnx_graph import Graph, attributes
from mhsa_compile.spec import SPEC_KEY
from mhsa_compile.spec_checks import DTYPES

ATTENTION = "MhsaAttention"


class AttentionSite:
    """One Attention node, checked, with the views around it."""

    def __init__(self, graph: Graph, node: onnx.NodeProto) -> None:
        self.graph, self.node = graph, node
        self.absorbed: list[onnx.NodeProto] = []
        self.inputs = [*node.input, *[""] * (7 - len(node.input))]
        self.attributes = attributes(node)
        self._refuse_what_no_kernel_does()
        self.operands = [
            self._operand(self.inputs[0], "q_num_heads"),
            self._operand(self.inputs[1], "kv_num_heads"),
            self._operand(self.inputs[2], "kv_num_heads"),
        ]
        self._refuse_heads_that_do_not_match()
        self.band = self._band()
        self.output, self.output_layout = self._find_output()
        self.static_mask = self._find_static_mask()
        self.mask, self.key_mask = ("", False) if self.static_mask is not None else self._find_mask()

    @property
    def _is_ours(self) -> bool:
        """Exported from a module of this library, whose masks broadcast in every axis; the runtime sees to the last."""
        return any(entry.key == SPEC_KEY for entry in self.graph.model.metadata_props)

    def _refuse(self, expected: str, got: str) -> ModelError:
        return ModelError(f"Attention node {self.node.name or self.node.output[0]!r}", expected, got)

    def _refuse_what_no_kernel_does(self) -> None:
        said = self.attributes
        if self.inputs[4] or self.inputs[5] or any(self.node.output[1:]):
            raise self._refuse("one output and no cache", "past or present keys, or the scores as an output")
        if said.get("softcap", 0.0) != 0.0:
            raise self._refuse("no softcap", f"softcap={said['softcap']}")
        for name in ("left_window_size", "right_window_size"):
            if said.get(name, -1) < -1:
                raise self._refuse(f"{name} of -1 or more", str(said[name]))
        dtypes = [self.graph.dtype(name) for name in self.inputs[:3]]
        if dtypes[0] not in DTYPES or len(set(dtypes)) > 1:
            got = ", ".join(f"{name} of {dtype or 'unknown dtype'}" for name, dtype in zip("QKV", dtypes, strict=True))
            raise self._refuse(f"Q, K and V all of {', or all of '.join(DTYPES)}", got)
        self.dtype = str(dtypes[0])
        # Kernels compute it in float32. Where less was asked for, that is what the operator allows, and more exact.
        precisions = {onnx.TensorProto.FLOAT, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))}
        if said.get("softmax_precision", onnx.TensorProto.FLOAT) not in precisions:
            raise self._refuse("softmax in float32", f"softmax_precision={said['softmax_precision']}")

    def _refuse_heads_that_do_not_match(self) -> None:
        q, k, v = self.operands
        if q.heads % k.heads or k.heads != v.heads:
            got = f"{q.heads} query, {k.heads} key and {v.heads} value heads"
            raise self._refuse("key and value heads that divide the query heads", got)
        if q.head_dim != k.head_dim:
            raise self._refuse("queries and keys of one head size", f"{q.head_dim} and {k.head_dim}")

    @property
    def _query_length(self) -> int | str | None:
        return self._length(self.inputs[0])

    @property
    def _key_length(self) -> int | str | None:
        return self._length(self.inputs[1])

    def _length(self, name: str) -> int | str | None:
        shape = self.graph.shape(name) or ()
        return shape[1 if len(shape) == 3 else 2] if shape else None

    def _operand(self, name: str, heads_attribute: str) -> Operand:
        """Where the heads lie: in the input itself, or before the Reshape and Transpose that split them."""
        shape = self.graph.shape(name)
        if shape is None or len(shape) not in (3, 4):
            raise self._refuse(f"{name} of known rank 3 or 4", str(shape))
        if len(shape) == 3:
            heads, width = self.attributes.get(heads_attribute), shape[2]
            if not isinstance(heads, int) or not isinstance(width, int) or width % heads:
                raise self._refuse(f"{heads_attribute} dividing the fixed last dim of {name}", f"{heads} and {width}")
            return Operand(name, "rows", heads, width // heads, width=width)
        heads, head_dim = shape[1], shape[3]
        if not isinstance(heads, int) or not isinstance(head_dim, int):
            raise self._refuse(f"fixed heads and head size of {name}", str(shape))
        split = split_rows(self.graph, name, "Attention")
        if split is not None:
            self.absorbed += split[1]
            return split[0]
        return Operand(name, "heads", heads, head_dim)

    def _find_output(self) -> tuple[str, str]:
        """The value to write: Y itself, or what the Transpose and Reshape that join the heads again make of it."""
        y = self.node.output[0]
        if self.graph.shape(self.inputs[0]) is not None and len(self.graph.shape(self.inputs[0]) or ()) == 3:
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

    def _band(self) -> tuple[int, int, str]:
        """(left, right, alignment) of windows and causality; nonpad_kv_seqlen may say that all keys are valid."""
        lengths = self.inputs[6]
        if lengths and not self._is_key_length(lengths):
            raise self._refuse("nonpad_kv_seqlen equal to the key length", f"{lengths!r}, computed otherwise")
        left, right = (self.attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
        causal = self.attributes.get("is_causal", 0)
        return left, 0 if causal else right, "bottom_right" if lengths else "top_left"

    def _is_key_length(self, name: str) -> bool:
        """Whether `name` is S for every batch entry: Expand(Shape(K)[its length axis])."""
        expand = self.graph.producer(name, "Expand")
        shape = None if expand is None else self.graph.producer(expand.input[0], "Shape")
        if expand is None or shape is None or self._key_length is None:
            return False
        said, measured = attributes(shape), self.graph.shape(shape.input[0]) or ()
        start, end = said.get("start", 0), said.get("end")
        one_axis = isinstance(start, int) and end == start + 1 and start < len(measured)
        found = one_axis and measured[start] == self._key_length
        if found and self.graph.only_consumer(name, "Attention") is not None:
            alone = [source for source in expand.input if self.graph.only_consumer(source, "Expand") is not None]
            shapes = [self.graph.producer(source, "Shape") for source in alone]
            self.absorbed += [expand, *(node for node in shapes if node is not None)]
        return found

    def _find_static_mask(self) -> np.ndarray[Any, Any] | None:
        """A constant attn_mask that only hides or shows, as bool (1 or H, L, S); None for any other."""
        mask = self.graph.constant(self.inputs[3]) if self.inputs[3] else None
        L, S = self._query_length, self._key_length
        if mask is None or mask.ndim > 4 or not isinstance(L, int) or not isinstance(S, int):
            return None
        if mask.dtype != np.bool_:
            shows = mask == 0
            if not (shows | (mask == -np.inf)).all():
                return None
            mask = shows
        if mask.ndim == 4 and len(mask) > 1:
            return None
        visible: np.ndarray[Any, Any] = mask.reshape((1,) * max(0, 3 - mask.ndim) + mask.shape[-3:])
        if self.graph.opset >= 24:  # a short mask hides the rest; before, only one of length 1 may be short
            visible = np.pad(visible, [(0, 0), (0, 0), (0, max(0, S - visible.shape[-1]))])
        full = (self.operands[0].heads, L, S)
        if any(size not in (1, whole) for size, whole in zip(visible.shape, full, strict=True)):
            raise self._refuse(f"an attn_mask that broadcasts to {(1, *full)}", str(mask.shape))
        return np.broadcast_to(visible, (len(visible), L, S))

    def _find_mask(self) -> tuple[str, bool]:
        """(the mask's tensor, whether it is (B, S): one flag a key). Unsqueezed axes are looked through."""
        name = self.inputs[3]
        shape = self.graph.shape(name) if name else ()
        if name and (shape is None or not 1 <= len(shape) <= 4):
            raise self._refuse("attn_mask of known rank 1 to 4", str(shape))
        pads = self.graph.opset >= 24 and not self._is_ours
        if name and shape and pads and shape[-1] != self._key_length:
            raise self._refuse("an attn_mask as long as the keys (opset 24 pads a shorter one)", str(shape))
        if name and self.graph.dtype(name) not in ("bool", self.dtype):
            raise self._refuse(f"a bool or {self.dtype} attn_mask", str(self.graph.dtype(name)))
        if shape is not None and len(shape) == 4 and shape[1:3] == (1, 1):
            base = name
            while (unsqueeze := self.graph.producer(base, "Unsqueeze")) is not None:
                base = unsqueeze.input[0]
            if len(self.graph.shape(base) or ()) == 2:
                return base, True
        return name, False

    def fused_node(self) -> onnx.NodeProto:
        buffers = list(dict.fromkeys(operand.source for operand in self.operands))
        q, _, v = self.operands
        said = self.attributes
        placements = {
            f"{role}_{key}": value
            for role, operand in zip("qkv", self.operands, strict=True)
            for key, value in {
                "buffer": buffers.index(operand.source),
                "layout": operand.layout,
                "width": operand.width,
                "offset": operand.offset,
            }.items()
        }
        return onnx.helper.make_node(
            ATTENTION,
            [*buffers, *([self.mask] if self.mask else [])],
            [self.output],
            name=self.node.name or self.node.output[0],
            domain=DOMAIN,
            num_heads=q.heads,
            num_kv_heads=v.heads,
            head_dim=q.head_dim,
            v_head_dim=v.head_dim,
            left=self.band[0],
            right=self.band[1],
            alignment=self.band[2],
            masked=int(bool(self.mask)),
            key_mask=int(self.key_mask),
            output_layout=self.output_layout,
            **({"scale": said["scale"]} if "scale" in said else {}),
            **({} if self.static_mask is None else {"static_mask": numpy_helper.from_array(self.static_mask)}),
            **placements,
        )
