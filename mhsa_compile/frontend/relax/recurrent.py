"""LSTM, GRU and RNN: one product of the inputs of all steps with their weights, then an operation that takes the steps.

    LSTM(x, w, r, b)        ->        recurrence(matmul(x, w^T), panels of r, biases, states)

The recurrent weights are put into the order in which the operation reads them; where they are the model's weights, that
is done once, when they are bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.relax.imported_module import ImportContext
from mhsa_compile.frontend.relax.values import RelaxValue, SizeExpr, dims, equal, text_of
from mhsa_compile.kernels.interface.ops import GATES, PANEL, Activation, Cell, LinearOp, RecurrenceOp

_DEFAULTS: dict[Cell, tuple[str, ...]] = {
    "LSTM": ("Sigmoid", "Tanh", "Tanh"),
    "GRU": ("Sigmoid", "Tanh"),
    "RNN": ("Tanh",),
}
_FUNCTIONS: dict[str, tuple[float | None, ...]] = {
    "Affine": (None, None),
    "Elu": (1.0,),
    "HardSigmoid": (0.2, 0.5),
    "LeakyRelu": (0.01,),
    "Relu": (),
    "ScaledTanh": (None, None),
    "Sigmoid": (),
    "Softplus": (),
    "Softsign": (),
    "Tanh": (),
    "ThresholdedRelu": (None,),
}
"""The functions that ONNX lists -> alpha and beta where a node states none, as far as they have them; None where it
must: ONNX has no default, or ONNX Runtime another one."""


class RecurrentImport:
    """One node, its inputs in ONNX's order. Raises ModelError."""

    def __init__(
        self, context: ImportContext, cell: Cell, inputs: list[RelaxValue], attributes: dict[str, Any]
    ) -> None:
        self.context, self.bb, self.cell, self.attributes = context, context.bb, cell, attributes
        padded = [*inputs, *[None] * (8 - len(inputs))]
        self.x, self.w, self.r, self.b, self.lengths, self.state, self.memory, self.peepholes = padded
        self.title = f"{cell} node {attributes['tvm_custom']['name']!r}"
        self.batch_first = bool(attributes.get("layout", 0))
        direction = text_of(attributes.get("direction", "forward"))
        self.backwards = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction]
        shape, gates = self._fixed(self.r, "R"), GATES[cell]
        self.units = shape[-1]
        if shape != [len(self.backwards), gates * self.units, self.units]:
            expected = f"R of ({len(self.backwards)}, {gates} * hidden_size, hidden_size), as {direction} has it"
            raise self._refusal(expected, f"one of {tuple(shape)}")
        if attributes.get("hidden_size", self.units) != self.units:
            raise self._refusal(f"hidden_size={self.units}, as R has it", f"hidden_size={attributes['hidden_size']}")

    def results(self) -> Any:
        """(states of all steps, the last state, of an LSTM the last memory). Raises ModelError."""
        x = self.bb.normalize(self._transpose(self.x, (1, 0, 2)))
        steps, batch, _ = dims(x)
        arrays = [self._products(x), self._panels(), self._biases(), self._initial_state(self.state, batch)]
        if self.cell == "LSTM":
            arrays.append(self._initial_state(self.memory, batch))
        if self.peepholes is not None:
            arrays.append(self.peepholes)
        reset_first = self.cell == "GRU" and bool(self.attributes.get("linear_before_reset", 0))
        if reset_first:
            arrays.append(self._hidden_biases())
        if self.lengths is not None:
            arrays.append(self._agreeing(self.lengths, [batch]))
        op = RecurrenceOp(
            cell=self.cell,
            steps=self.context.dim(steps),
            batch=self.context.dim(batch),
            units=self.units,
            backwards=self.backwards,
            activations=self._activations(),
            clip=self.attributes.get("clip"),
            linear_before_reset=reset_first,
            input_forget=bool(self.attributes.get("input_forget", 0)),
            peepholes=self.peepholes is not None,
            lengths=self.lengths is not None,
            lengths_name=self._lengths_name(),
        )
        state_shape = [len(self.backwards), batch, self.units]
        shapes = [[steps, *state_shape], *[state_shape] * (2 if self.cell == "LSTM" else 1)]
        types = [relax.TensorType(shape, "float32") for shape in shapes]
        y, *last = self.context.call_for_several(op, arrays, types)
        return relax.Tuple([self._transpose(y, (2, 0, 1, 3)), *(self._transpose(value, (1, 0, 2)) for value in last)])

    def _products(self, x: RelaxValue) -> RelaxValue:
        both, rows, width = self._fixed(self.w, "W")
        if [both, rows] != [len(self.backwards), GATES[self.cell] * self.units]:
            expected = f"W of ({len(self.backwards)}, {GATES[self.cell] * self.units}, input size)"
            raise self._refusal(expected, f"{both, rows, width}")
        weights = relax.op.reshape(self.w, [both * rows, width])
        steps, batch, _ = dims(x)
        if isinstance(self.w, relax.Var) and self.w.name in self.context.result.weights:
            op = LinearOp((self.context.dim(steps), self.context.dim(batch)), width, (both * rows,), (False,), (False,))
            return self.context.call(op, [x, weights], [steps, batch, both * rows])
        rows_of_x = relax.op.reshape(x, relax.ShapeExpr([steps * batch, width]))  # of all steps at once
        products = relax.op.matmul(rows_of_x, relax.op.permute_dims(weights, [1, 0]))
        return relax.op.reshape(products, relax.ShapeExpr([steps, batch, both * rows]))

    def _panels(self) -> RelaxValue:
        """R in the order of `RecurrenceOp.weights`."""
        both, gates, width = len(self.backwards), GATES[self.cell], PANEL[self.cell]
        weights = relax.op.reshape(self.r, [both, gates, self.units, self.units])
        whole = self.units // width * width
        parts = []
        for first, end, size in ((0, whole, width), (whole, self.units, self.units - whole)):
            if end > first:
                part = relax.op.strided_slice(weights, [2], [first], [end])
                part = relax.op.reshape(part, [both, gates, (end - first) // size, size, self.units])
                part = relax.op.permute_dims(part, [0, 2, 4, 1, 3])
                parts.append(relax.op.reshape(part, [both, (end - first) * gates * self.units]))
        return parts[0] if len(parts) == 1 else relax.op.concat(relax.Tuple(parts), 1)

    def _biases(self) -> RelaxValue:
        """The sum of both biases; of a gate whose recurrent bias stands within the reset only the inputs'."""
        both, rows = len(self.backwards), GATES[self.cell] * self.units
        if self.b is None:
            return self._zeros([both, rows])
        inputs, states = self._part(0, rows), self._part(rows, 2 * rows)
        if self.cell == "GRU" and self.attributes.get("linear_before_reset", 0):
            biases = relax.op.strided_slice(states, [1], [0], [2 * self.units])
            states = relax.op.concat(relax.Tuple([biases, self._zeros([both, self.units])]), 1)
        return relax.op.add(inputs, states)

    def _hidden_biases(self) -> RelaxValue:
        if self.b is None:
            return self._zeros([len(self.backwards), self.units])
        end = 2 * GATES[self.cell] * self.units
        return self._part(end - self.units, end)

    def _part(self, first: int, end: int) -> RelaxValue:
        return relax.op.strided_slice(self.b, [1], [first], [end])

    def _initial_state(self, value: RelaxValue | None, batch: SizeExpr) -> RelaxValue:
        """A state of before the first step: zeros where there is none."""
        shape = [len(self.backwards), batch, self.units]
        if value is None:
            return self._zeros(shape)
        return self._agreeing(self.bb.normalize(self._transpose(value, (1, 0, 2))), shape)

    def _zeros(self, shape: Sequence[SizeExpr]) -> RelaxValue:
        if all(isinstance(size, int) for size in shape):
            return relax.const(np.zeros(shape, np.float32), "float32")
        return relax.op.zeros(relax.ShapeExpr(list(shape)), "float32")

    def _agreeing(self, value: RelaxValue, shape: Sequence[SizeExpr]) -> RelaxValue:
        """A value of this shape; a call is held to it where that is not known."""
        own = value.ty.shape
        if isinstance(own, relax.ShapeExpr) and all(map(equal, own.values, shape)):
            return value
        return self.bb.match_cast(value, relax.TensorType(list(shape), value.ty.dtype))

    def _transpose(self, value: RelaxValue, order: Sequence[int]) -> RelaxValue:
        return relax.op.permute_dims(value, list(order)) if self.batch_first else value

    def _activations(self) -> tuple[tuple[Activation, ...], ...]:
        """The functions of each direction. Alphas and betas are listed for those alone that have them, in order."""
        each, directions = len(_DEFAULTS[self.cell]), len(self.backwards)
        names = [*map(text_of, self.attributes.get("activations", ()))] or [*_DEFAULTS[self.cell] * directions]
        known = {name.lower(): name for name in _FUNCTIONS}
        if len(names) != each * directions or any(name.lower() not in known for name in names):
            expected = f"{each * directions} activations among {', '.join(_FUNCTIONS)}"
            raise self._refusal(expected, ", ".join(names))
        parameters = [list(self.attributes.get(f"activation_{word}", ())) for word in ("alpha", "beta")]
        functions = []
        for name in (known[name.lower()] for name in names):
            values = [parameters[i].pop(0) if parameters[i] else value for i, value in enumerate(_FUNCTIONS[name])]
            if any(value is None for value in values):
                raise self._refusal(f"activation_alpha and activation_beta for {name}", "fewer")
            functions.append(Activation(name, *(float(value) for value in values if value is not None)))
        if any(parameters):
            raise self._refusal("an alpha and a beta for each activation that has one", "more of them")
        return tuple(tuple(functions[i * each : (i + 1) * each]) for i in range(directions))

    def _lengths_name(self) -> str:
        if self.lengths is None:
            return ""
        return self.context.input_name(self.lengths) or f"sequence_lens of the {self.title}"

    def _fixed(self, value: RelaxValue, name: str) -> list[int]:
        """The dims of a weight."""
        shape = dims(value)
        if not all(isinstance(size, int) or hasattr(size, "value") for size in shape):
            raise self._refusal(f"{name} of fixed sizes", f"one of ({', '.join(map(str, shape))})")
        return [int(size) for size in shape]

    def _refusal(self, expected: str, got: str) -> ModelError:
        return ModelError(self.title, expected, got, "Write it in operators that are understood.")
