"""Linears of PyTorch on compiled artifacts: the layer stays, its forward is another.

PyTorch's product arranges the weights anew in each call; a compiled linear has them packed once, when they are bound.

Notation: R rows, which are all axes of x but the last; I, O features in and out.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from mhsa_compile.integrations.call_context import check_inference, why_not_numbers
from mhsa_compile.integrations.weight_state import LayerInUse, ReplacedForward
from mhsa_compile.nn.weight_blocks import WeightBlocks, in_blocks, rounded, stands_for
from mhsa_compile.spec.weight_words import BlockForm

LEAST_WEIGHTS = 256 * 256
"""What a layer must have for its product to take longer than what a call costs besides."""
_OPSET = 24


class LinearKind(NamedTuple):
    """What is compiled once. `is_transposed`: the weight is (I, O), as transformers' Conv1D has it, not (O, I); `form`:
    what it becomes when it is bound, None where it stays as it is."""

    I: int
    O: int
    has_bias: bool
    is_transposed: bool
    form: BlockForm | None


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer is an nn.Linear or a Conv1D of transformers, or a subclass of one."""
    return isinstance(layer, _kinds())


def _kinds() -> tuple[type[nn.Module], ...]:
    """nn.Linear, and Conv1D if transformers is in use at all."""
    library = sys.modules.get("transformers.pytorch_utils")
    return (nn.Linear,) if library is None else (nn.Linear, library.Conv1D)


def rows_of(layer: nn.Module) -> Tensor:
    """A linear's weight, (O, I)."""
    weight: Any = layer.weight
    rows: Tensor = weight.detach() if isinstance(layer, nn.Linear) else weight.detach().T
    return rows


def why_not(layer: nn.Module) -> str:
    """Why a linear cannot be replaced; "" if it can."""
    if type(layer) not in _kinds():
        return f"it is a {type(layer).__name__}, which may compute something else"
    if "forward" in vars(layer):
        return "it has a forward of its own"
    parameters = {name: getattr(layer, name, None) for name in ("weight", "bias")}
    for name, value in parameters.items():
        if value is None and name == "bias":
            continue
        if type(value) is not nn.Parameter:
            return f"{name} is a {type(value).__name__}"
        if value.device.type != "cpu":
            return f"{name} is on {value.device}"
        if value.dtype != torch.float32:
            return f"{name} is of {value.dtype}, not torch.float32"
    weight: Any = parameters["weight"]
    if weight.ndim != 2 or weight.numel() < LEAST_WEIGHTS:
        return f"it has fewer than {LEAST_WEIGHTS} weights"
    return ""


def graph_of(kind: LinearKind) -> onnx.ModelProto:
    """The ONNX graph x (R, I) -> y (R, O), whose weights are zeros until they are bound."""
    shape = (kind.I, kind.O) if kind.is_transposed else (kind.O, kind.I)
    constants = [numpy_helper.from_array(np.zeros(shape, np.float32), "weight")]
    if kind.has_bias:
        constants.append(numpy_helper.from_array(np.zeros(kind.O, np.float32), "bias"))
    inputs = ["x", *(constant.name for constant in constants)]
    node = helper.make_node("Gemm", inputs, ["y"], name="linear", transB=int(not kind.is_transposed))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ("R", kind.I))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ("R", kind.O))
    graph = helper.make_graph([node], "linear", [x], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=11)


class LinearForward(ReplacedForward[LinearKind, Tensor]):
    """The forward of one linear. `form` is what its weights become when they are bound; None: they stay. `stored` are
    blocks of that form that stand for them, as a file has them; None: they are made."""

    def __init__(self, use: LayerInUse, form: BlockForm | None, stored: WeightBlocks | None = None) -> None:
        super().__init__(use)
        self._form, self._stored = form, stored

    def _arguments(self) -> tuple[Any, ...]:
        return (*super()._arguments(), self._form, self._stored)

    def __call__(self, input: Tensor) -> Tensor:
        """x (..., I) -> y (..., O). Raises InputError in training and where a gradient is wanted."""
        if self._is_pytorchs():  # what PyTorch does is as right
            return self._by_pytorch(input)
        if why := self._why_not(input):
            return self._by_pytorch(input, why=why)
        check_inference(self._layer, "input", input, *self._weights())
        kind = self._kind()
        rows = input.reshape(-1, kind.I)
        if not len(rows):
            return self._by_pytorch(input)
        compiled = self._compiled(kind)
        if isinstance(compiled, str):
            return self._by_pytorch(input, why=compiled)
        with torch.no_grad():
            y: Tensor = compiled(rows)
        y = y.view(*input.shape[:-1], kind.O)
        if why := self._first_calls.check((kind, len(rows) == 1), [y], lambda: [self._expected(input)]):
            return self._by_pytorch(input, why=why)
        return y

    def _expected(self, input: Tensor) -> Tensor:
        """PyTorch's result, of weights and activations in few bits where there are such."""
        if self._form is None:
            return self._by_pytorch(input)
        bias = self._weights()[1]
        rows = rounded(input, self._form.block) if self._form.rounds_x else input
        y: Tensor = nn.functional.linear(rows, self._blocks().floats(input.shape[-1]), bias)
        return y

    def _weights(self) -> tuple[Tensor | None, Tensor | None]:
        parameters = self._layer._parameters
        return parameters.get("weight"), parameters.get("bias")

    def _why_not(self, input: Tensor) -> str:
        """Why PyTorch is to compute a call; "" if an artifact can."""
        if why := self._why_changed() or why_not_numbers(input):
            return why
        weight, bias = self._weights()
        if bias is None and getattr(self._layer, "bias", None) is not None:
            return "a bias that is no parameter"
        for value in (weight,) if bias is None else (weight, bias):
            if type(value) is not nn.Parameter:
                return f"weights that are a {type(value).__name__}, or computed anew for each call"
            if value.dtype != torch.float32 or value.device.type != "cpu":
                return "weights that are not torch.float32 in CPU memory"
        if input.dtype != torch.float32 or input.device.type != "cpu":
            return "inputs that are not torch.float32 in CPU memory"
        assert weight is not None
        if weight.ndim != 2 or not input.ndim or input.shape[-1] != self._kind().I:
            return "a shape that it refuses"
        return ""

    def _why_unbound(self) -> str:
        if self._stored is None or stands_for(self._stored, self._rows()):
            return ""
        return "weights other than the file's, which were bound"

    def _kind(self) -> LinearKind:
        weight, bias = self._weights()
        assert weight is not None
        is_transposed = not isinstance(self._layer, nn.Linear)
        inputs, outputs = weight.shape if is_transposed else reversed(weight.shape)
        return LinearKind(inputs, outputs, bias is not None, is_transposed, self._form)

    def _source(self, kind: LinearKind) -> tuple[LinearKind, dict[str, Tensor]]:
        names = ("weight", "bias") if kind.has_bias else ("weight",)
        arrays = {name: getattr(self._layer, name).detach() for name in names}
        if kind.form is not None:
            del arrays["weight"]
            arrays |= self._blocks().named("weight")
        return kind, arrays

    def _blocks(self) -> WeightBlocks:
        """The weight in few bits."""
        assert self._form is not None
        return in_blocks(self._rows().contiguous(), self._form) if self._stored is None else self._stored

    def _rows(self) -> Tensor:
        """The weight, (O, I)."""
        return rows_of(self._layer)
