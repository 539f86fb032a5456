"""LSTM, GRU and RNN for onnx's evaluator, which itself leaves out lengths, functions, clips and coupled gates.

Notation: T steps, B batch, D directions, U units.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

CellFunction = Callable[[np.ndarray], np.ndarray]

_DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "affine": lambda x, alpha, beta: alpha * x + beta,
    "elu": lambda x, alpha=1.0: np.where(x < 0, alpha * np.expm1(x), x),
    "hardsigmoid": lambda x, alpha=0.2, beta=0.5: np.clip(alpha * x + beta, 0, 1),
    "leakyrelu": lambda x, alpha=0.01: np.where(x < 0, alpha * x, x),
    "relu": lambda x: np.maximum(x, 0),
    "scaledtanh": lambda x, alpha, beta: alpha * np.tanh(beta * x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softplus": lambda x: np.logaddexp(0, x),
    "softsign": lambda x: x / (1 + np.abs(x)),
    "tanh": lambda x: np.tanh(x),
    "thresholdedrelu": lambda x, alpha: np.where(x < alpha, 0, x),
}
_ALPHA = ("affine", "elu", "hardsigmoid", "leakyrelu", "scaledtanh", "thresholdedrelu")
_BETA = ("affine", "hardsigmoid", "scaledtanh")


class _RecurrentRun(OpRun):  # type: ignore[misc]
    """A cell's steps in each direction; inputs and attributes as ONNX has them."""

    def _run(
        self,
        x: np.ndarray,
        w: np.ndarray,
        r: np.ndarray,
        b: np.ndarray | None = None,
        lengths: np.ndarray | None = None,
        h: np.ndarray | None = None,
        c: np.ndarray | None = None,
        p: np.ndarray | None = None,
        **attributes: Any,
    ) -> tuple[np.ndarray, ...]:
        kind = np.float64 if x.dtype == np.float64 else np.float32
        batch_first, units = attributes.get("layout"), r.shape[-1]
        directions = len(w)
        if batch_first:
            x, h, c = (None if value is None else value.swapaxes(0, 1) for value in (x, h, c))  # type: ignore[assignment]
        steps, batch = x.shape[:2]
        lengths = np.full(batch, steps) if lengths is None else lengths
        state = [
            np.zeros((directions, batch, units), kind) if value is None else value.astype(kind) for value in (h, c)
        ]
        for value in state:
            value[:, lengths == 0] = 0  # as ONNX Runtime has it
        y = np.zeros((steps, directions, batch, units), kind)
        biases = np.zeros((directions, 2 * w.shape[1]), kind) if b is None else b.astype(kind)
        peepholes = np.zeros((directions, 3 * units), kind) if p is None else p.astype(kind)
        functions = self._functions(attributes, directions)
        for d in range(directions):
            backwards = attributes["direction"] == "reverse" or d == 1
            cell = self._cell(r[d].astype(kind), biases[d], peepholes[d], functions[d], attributes)
            for step in range(steps):
                rows = np.flatnonzero(step < lengths)
                at = lengths[rows] - 1 - step if backwards else np.full(len(rows), step)
                states = cell(x[at, rows].astype(kind) @ w[d].astype(kind).T, state[0][d, rows], state[1][d, rows])
                state[0][d, rows], state[1][d, rows] = states
                y[at, d, rows] = states[0]
        results = [y, *state][: 3 if self.op_type == "LSTM" else 2]
        if batch_first:
            results = [y.transpose(2, 0, 1, 3), *(value.swapaxes(0, 1) for value in results[1:])]
        return tuple(value.astype(x.dtype) for value in results[: len(self.onnx_node.output)])

    def _functions(self, attributes: dict[str, Any], directions: int) -> list[list[CellFunction]]:
        names = [name.lower() for name in attributes.get("activations") or _DEFAULTS[self.op_type] * directions]
        parameters = [list(attributes.get(f"activation_{word}") or ()) for word in ("alpha", "beta")]
        functions: list[CellFunction] = []
        for name in names:
            values = {
                word: numbers.pop(0)
                for word, numbers, having in zip(("alpha", "beta"), parameters, (_ALPHA, _BETA), strict=True)
                if name in having and numbers
            }
            functions.append(lambda x, name=name, values=values: _FUNCTIONS[name](x, **values))  # type: ignore[misc]
        each = len(names) // directions
        return [functions[d * each : (d + 1) * each] for d in range(directions)]

    def _cell(
        self, r: np.ndarray, b: np.ndarray, p: np.ndarray, functions: list[CellFunction], attributes: dict[str, Any]
    ) -> Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """(products of the inputs, states, memories), each a row of the batch -> (states, memories)."""
        clip = attributes.get("clip")
        gates = len(r) // r.shape[1]
        of_inputs, of_states = (part.reshape(gates, -1) for part in np.split(b, 2))

        def bounded(values: np.ndarray) -> np.ndarray:
            return values if clip is None else np.clip(values, -clip, clip)

        def products(rows: np.ndarray) -> np.ndarray:
            return rows.reshape(len(rows), gates, -1).swapaxes(0, 1)

        def lstm(x: np.ndarray, h: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            f, g, last = functions
            i, o, forget, new = products(x + h @ r.T + b[: len(r)] + b[len(r) :])
            peep = p.reshape(3, -1)
            input_gate = f(bounded(i + peep[0] * c))
            forget_gate = 1 - input_gate if attributes.get("input_forget") else f(bounded(forget + peep[2] * c))
            c = forget_gate * c + input_gate * g(bounded(new))
            return f(bounded(o + peep[1] * c)) * last(c), c

        def gru(x: np.ndarray, h: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            f, g = functions
            inputs = products(x) + of_inputs[:, None]
            states = products(h @ r.T) + of_states[:, None]
            update, reset = (f(bounded(inputs[i] + states[i])) for i in (0, 1))
            within = reset * states[2]
            if not attributes.get("linear_before_reset"):
                within = (reset * h) @ np.split(r, 3)[2].T + of_states[2]
            return (1 - update) * g(bounded(inputs[2] + within)) + update * h, c

        def rnn(x: np.ndarray, h: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return functions[0](bounded(x + h @ r.T + of_inputs[0] + of_states[0])), c

        return {"LSTM": lstm, "GRU": gru, "RNN": rnn}[self.op_type]


RECURRENT = tuple(type(name, (_RecurrentRun,), {"op_type": name}) for name in ("LSTM", "GRU", "RNN"))
"""The operators, which the evaluator finds by the names of their classes."""
