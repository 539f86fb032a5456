"""The ONNX nodes of the domain `mhsa` that fusion writes and the importer reads: a dataclass for each.

The fields of one are the attributes of its node: numbers and arrays as such, all else as JSON; what is None is absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self, get_type_hints

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from mhsa_compile.kernels.interface.ops import HeadLayout
from mhsa_compile.spec.attention_spec import DOMAIN
from mhsa_compile.spec.outputs import SoftmaxOutputs


@dataclass(frozen=True)
class FusedNode:
    """What a node says, beside the names of its tensors."""

    op_type: ClassVar[str]

    def to_node(self, replaced: onnx.NodeProto, inputs: Sequence[str], outputs: Sequence[str]) -> onnx.NodeProto:
        """The node, named as the one that it takes the place of."""
        attributes = {field.name: _attribute(getattr(self, field.name)) for field in fields(self)}
        name = replaced.name or replaced.output[0]
        return onnx.helper.make_node(self.op_type, inputs, outputs, name=name, domain=DOMAIN, **attributes)

    @classmethod
    def from_node(cls, node: onnx.NodeProto) -> Self:
        """What `to_node` wrote."""
        return cls.from_attributes({a.name: onnx.helper.get_attribute_value(a) for a in node.attribute})

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, Any]) -> Self:
        """Reads back what `to_node` wrote; `attributes` may hold others, which are ignored."""
        kinds = get_type_hints(cls)
        names = [field.name for field in fields(cls) if field.name in attributes]
        return cls(**{name: _value(attributes[name], kinds[name]) for name in names})


def _attribute(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    return numpy_helper.from_array(value) if isinstance(value, np.ndarray) else msgspec.json.encode(value)


def _value(attribute: Any, kind: Any) -> Any:
    if isinstance(attribute, bytes):
        return msgspec.json.decode(attribute, type=kind)
    if isinstance(attribute, onnx.TensorProto):
        return numpy_helper.to_array(attribute)
    return bool(attribute) if kind is bool else attribute


@dataclass(frozen=True)
class FusedLinear(FusedNode):
    """LinearOp. Inputs: x, the weights, then the biases of those that have one."""

    op_type = "MhsaLinear"
    widths: tuple[int, ...]
    biased: tuple[bool, ...]
    transposed: tuple[bool, ...]
    padding: int


@dataclass(frozen=True)
class FusedQuantisedLinear(FusedNode):
    """QuantisedLinearOp. Inputs, as far as they are there: x, its zero and its scale; the weights; the zeros, scales
    and biases of those that have one."""

    op_type = "MhsaQuantisedLinear"
    x_zeroed: bool
    x_scaled: bool
    widths: tuple[int, ...]
    zeroed: tuple[bool, ...]
    scaled: tuple[bool, ...]
    biased: tuple[bool, ...]
    transposed: tuple[bool, ...]
    padding: int

    def parted(self, inputs: Sequence[Any]) -> tuple[list[Any], ...]:
        """([x, its zero, its scale], weights, zeros, scales, biases), None in the place of what is missing."""
        left = iter(inputs)
        every = (True,) * len(self.widths)
        kinds = ((True, self.x_zeroed, self.x_scaled), every, self.zeroed, self.scaled, self.biased)
        return tuple([next(left) if there else None for there in kind] for kind in kinds)


@dataclass(frozen=True)
class FusedBlockLinear(FusedNode):
    """BlockLinearOp, which says what the fields mean. Inputs: x; the numbers of the weights; their scales; the zeros
    and the biases of those that have some."""

    op_type = "MhsaBlockLinear"
    widths: tuple[int, ...]
    zeros: tuple[Literal["", "bytes", "floats"], ...]
    biased: tuple[bool, ...]
    in_features: int
    bits: int
    block: int
    rounds_x: bool
    padding: int

    def parted(self, inputs: Sequence[Any]) -> tuple[list[Any], ...]:
        """(x alone, numbers, scales, zeros, biases)."""
        left, count = iter(inputs), len(self.widths)
        sizes = (1, count, count, sum(map(bool, self.zeros)), sum(self.biased))
        return tuple([next(left) for _ in range(size)] for size in sizes)


@dataclass(frozen=True)
class FusedPatches(FusedNode):
    """The patches that a convolution sees, as rows. Inputs: x, and of bytes their zero point, if that is not 0. Each
    field but the last has a number for each axis.

    before, behind   how many zeros, or zero points, stand around x
    channels_last    whether x is (B, ..., C) and a row taps x C; else x is (B, C, ...) and a row C x taps
    groups           of channels, if these are last; a row is groups x taps x C / groups
    """

    op_type = "MhsaPatches"
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    behind: tuple[int, ...]
    channels_last: bool
    groups: int = 1

    @property
    def is_each_element(self) -> bool:
        """Whether the patches are x, if its channels are last."""
        return set(self.kernel) == set(self.strides) == {1} and not any((*self.before, *self.behind))


@dataclass(frozen=True)
class FusedDepthwise(FusedPatches):
    """A convolution of each channel by itself, which are last. Inputs: x (B, ..., C), weights (taps, C)."""

    op_type = "MhsaDepthwise"


@dataclass(frozen=True)
class FusedGroupedConvolution(FusedPatches):
    """A convolution of groups of channels, which are last. Inputs: x (B, ..., C) and weights (groups, taps x C /
    groups, O / groups); gives (B, ..., O)."""

    op_type = "MhsaGroupedConvolution"


@dataclass(frozen=True)
class FusedPixelShuffle(FusedNode):
    """Phases of an image put beside each other: y (B, ..., C) at the place strides * place + phase, without what is cut
    off at both ends. Inputs: rows (B, ..., phases x C), as many places in each.
    Each field but the last has a number for each axis.

    before, behind   how many elements are cut off
    phases           of each input its phases along each axis; 0 where no input has one
    """

    op_type = "MhsaPixelShuffle"
    strides: tuple[int, ...]
    before: tuple[int, ...]
    behind: tuple[int, ...]
    phases: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class FusedRotary(FusedNode):
    """RotaryOp, which says what the fields mean. Inputs: x, cos, sin, then the positions, if there are any."""

    op_type = "MhsaRotary"
    x: HeadLayout
    output_layout: Literal["rows", "heads"]
    num_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool
    shared_angles: bool
    whole_angles: bool = False
    positions_name: str = ""


@dataclass(frozen=True)
class FusedQuantiseRows(FusedNode):
    """QuantiseRowsOp. Input: x."""

    op_type = "MhsaQuantiseRows"
    x: HeadLayout
    num_heads: int
    head_dim: int


@dataclass(frozen=True)
class FusedScatter(FusedNode):
    """KvScatterOp, which says what the fields mean. Inputs: cache, update, then the indices, if there are any."""

    op_type = "MhsaScatter"
    axis: int
    circular: bool
    in_place: bool
    indices_name: str
    update_name: str
    update: HeadLayout | None = None


@dataclass(frozen=True, eq=False)
class FusedAttention(FusedNode):
    """AttentionOp, and what else the node gives.

    query, key, value   where their heads lie; `buffer` is the number of the node's input
    gives               which of `attention_node.OUTPUTS` each output is
    softmax_outputs     those of the softmax's rows among them
    left, right         the window, -1 unbounded, with causality in it
    stage               the qk_matmul_output_mode of "scores"
    key_mask            whether the mask is (B, S): one flag a key
    pads_mask           whether a mask over fewer keys than there are hides the rest
    words               the attributes that steps of scores are read from
    roles               the numbers of the inputs of these steps
    past_key, _value    the numbers of these inputs; None of those that are not there
    key_scale, _value_  the numbers of the scales of rows of keys and values, where they have any
    scale               None is 1 / sqrt(E)
    pairs               those that are known now, bool (1 or H, L, S)
    """

    op_type = "MhsaAttention"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    query: HeadLayout
    key: HeadLayout
    value: HeadLayout
    output_layout: Literal["rows", "heads"]
    gives: tuple[str, ...]
    softmax_outputs: SoftmaxOutputs
    left: int
    right: int
    alignment: Literal["top_left", "bottom_right"]
    softmax: Literal["float32", "float64"]
    stage: int
    key_mask: bool
    pads_mask: bool
    words: dict[str, int | float | str]
    roles: dict[str, tuple[int, ...]]
    past_key: int | None = None
    past_value: int | None = None
    key_scale: int | None = None
    value_scale: int | None = None
    scale: float | None = None
    pairs: np.ndarray[Any, Any] | None = None
