"""LSTM, GRU and RNN against NumPy's in float64: directions, lengths, states, functions, free sizes, halves, threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError, ModelError

RNG = np.random.default_rng(0)
Array = np.ndarray[Any, Any]
I = 5
"""The width of the inputs."""
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
FUNCTIONS = {
    "Sigmoid": lambda x, a, b: 1 / (1 + np.exp(-x)),
    "Tanh": lambda x, a, b: np.tanh(x),
    "Relu": lambda x, a, b: np.maximum(x, 0),
    "Affine": lambda x, a, b: a * x + b,
    "LeakyRelu": lambda x, a, b: np.where(x < 0, a * x, x),
    "ThresholdedRelu": lambda x, a, b: np.where(x < a, 0, x),
    "ScaledTanh": lambda x, a, b: a * np.tanh(b * x),
    "HardSigmoid": lambda x, a, b: np.clip(a * x + b, 0, 1),
    "Elu": lambda x, a, b: np.where(x < 0, a * np.expm1(x), x),
    "Softsign": lambda x, a, b: x / (1 + np.abs(x)),
    "Softplus": lambda x, a, b: np.log1p(np.exp(x)),
}
DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
WITH_ALPHA = {"Affine": 0, "Elu": 1, "HardSigmoid": 0.2, "LeakyRelu": 0.01, "ScaledTanh": 0, "ThresholdedRelu": 0}
WITH_BETA = {"Affine": 0, "HardSigmoid": 0.5, "ScaledTanh": 0}


class Layer:
    """A node of the graph, with its weights, and its meaning row by row."""

    def __init__(self, name: str, cell: str, units: int, inputs: str = "", **attributes: Any) -> None:
        self.name, self.cell, self.units, self.inputs, self.attributes = name, cell, units, inputs.split(), attributes
        self.directions = 2 if attributes.get("direction") == "bidirectional" else 1
        both, gates = self.directions, GATES[cell] * units
        self.weights = {"w": self._drawn(both, gates, I), "r": self._drawn(both, gates, units) / np.sqrt(units)}
        self.weights |= {"b": self._drawn(both, 2 * gates)} if "b" in self.inputs else {}
        self.weights |= {"p": self._drawn(both, 3 * units)} if "p" in self.inputs else {}
        self.names = [f"{self.name}_{part}" for part in ("y", "h", "c")[: 3 if cell == "LSTM" else 2]]

    def _drawn(self, *dims: int) -> Array:
        return RNG.normal(0, 0.7, dims).astype(np.float16).astype(np.float32)

    def state(self, part: str) -> str:
        """The input that is its state of before the first step, h, or its memory, c."""
        return f"{part}_{self.directions}_{self.units}"

    def node(self) -> onnx.NodeProto:
        names = ["x_rows" if self.attributes.get("layout") else "x", f"{self.name}_w", f"{self.name}_r"]
        for part in ("b", "lengths", "h", "c", "p"):
            own = part if part == "lengths" else f"{self.name}_{part}" if part in "bp" else self.state(part)
            names.append(own if part in self.inputs else "")
        while not names[-1]:
            names.pop()
        return helper.make_node(self.cell, names, self.names, name=self.name, hidden_size=self.units, **self.attributes)

    def right(self, inputs: dict[str, Array]) -> list[Array]:
        """(Y, Y_h, Y_c of an LSTM) in float64."""
        x = inputs["x"].astype(np.float64)
        steps, batch, _ = x.shape
        y = np.zeros((steps, self.directions, batch, self.units))
        state, memory = (
            inputs[self.state(part)].astype(np.float64)
            if part in self.inputs
            else np.zeros((self.directions, batch, self.units))
            for part in "hc"
        )
        for d in range(self.directions):
            backwards = self.attributes.get("direction") == "reverse" or d == 1
            for row in range(batch):
                length = inputs["lengths"][row] if "lengths" in self.inputs else steps
                if not length:  # as ONNX Runtime has it
                    state[d, row] = memory[d, row] = 0
                for step in range(length)[:: -1 if backwards else 1]:
                    state[d, row], memory[d, row] = self._step(d, x[step, row], state[d, row], memory[d, row])
                    y[step, d, row] = state[d, row]
        results = [y, state, memory][: len(self.names)]
        if self.attributes.get("layout"):
            results = [y.transpose(2, 0, 1, 3), *(value.transpose(1, 0, 2) for value in results[1:])]
        return results

    def _step(self, d: int, x: Array, h: Array, c: Array) -> tuple[Array, Array]:
        clip, at = self.attributes.get("clip", np.inf), self.attributes
        functions = [self._function(d, i) for i in range(len(DEFAULTS[self.cell]))]
        w, r = (self.weights[part][d].astype(np.float64) for part in "wr")
        b = self.weights.get("b", np.zeros((2, 2 * len(w))))[d].reshape(2, GATES[self.cell], -1)
        gates, of_state = (w @ x).reshape(b[0].shape) + b[0], (r @ h).reshape(b[0].shape) + b[1]
        f = functions[0]
        if self.cell == "RNN":
            return f(np.clip(gates[0] + of_state[0], -clip, clip)), c
        if self.cell == "GRU":
            z, reset = (f(np.clip(gates[i] + of_state[i], -clip, clip)) for i in (0, 1))
            within = reset * of_state[2]
            if not at.get("linear_before_reset"):
                within = r.reshape(3, self.units, -1)[2] @ (reset * h) + b[1][2]
            candidate = functions[1](np.clip(gates[2] + within, -clip, clip))
            return (1 - z) * candidate + z * h, c
        p = self.weights.get("p", np.zeros((2, 3 * self.units)))[d].reshape(3, -1)
        i, o, forget, new = gates + of_state
        i = f(np.clip(i + p[0] * c, -clip, clip))
        kept = 1 - i if at.get("input_forget") else f(np.clip(forget + p[2] * c, -clip, clip))
        c = kept * c + i * functions[1](np.clip(new, -clip, clip))
        return f(np.clip(o + p[1] * c, -clip, clip)) * functions[2](c), c

    def _function(self, d: int, place: int) -> Any:
        each = len(DEFAULTS[self.cell])
        names = self.attributes.get("activations", DEFAULTS[self.cell] * self.directions)
        stated = [list(self.attributes.get(f"activation_{word}", ())) for word in ("alpha", "beta")]
        for i, name in enumerate(names):
            values = [
                (stated[k].pop(0) if stated[k] else known[name]) if name in known else 0.0
                for k, known in enumerate((WITH_ALPHA, WITH_BETA))
            ]
            if i == d * each + place:
                return lambda x, name=name, values=values: FUNCTIONS[name](x, *values)
        raise AssertionError


LAYERS = [
    Layer("plain", "LSTM", 20),
    Layer("whole", "LSTM", 33, "b lengths h c p", direction="bidirectional", clip=0.9),
    Layer(
        "odd", "LSTM", 7, "b", direction="reverse", input_forget=1,
        activations=["HardSigmoid", "Softsign", "ScaledTanh"], activation_alpha=[0.3, 0.8], activation_beta=[0.4, 0.6],
    ),
    Layer("gru", "GRU", 33, "b lengths h", direction="reverse"),
    Layer(
        "linear", "GRU", 7, "b h", direction="bidirectional", linear_before_reset=1, layout=0, clip=1.1,
        activations=["Sigmoid", "Softplus", "HardSigmoid", "Elu"], activation_alpha=[0.25],
    ),
    Layer("rows", "GRU", 20, "", layout=1, linear_before_reset=1),
    Layer("rnn", "RNN", 70, "b lengths", direction="bidirectional", activations=["Relu", "Tanh"]),
    Layer("affine", "RNN", 7, "", activations=["Affine"], activation_alpha=[0.5], activation_beta=[0.1]),
    Layer("leaky", "RNN", 7, "b", direction="bidirectional", activations=["ThresholdedRelu", "LeakyRelu"],
        activation_alpha=[0.3]),
]  # fmt: skip
STATES = sorted({(one.state(part), one.directions, one.units) for one in LAYERS for part in one.inputs if part in "hc"})


def model(layers: list[Layer], dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """All of them side by side, of x (T, B, I)."""
    values = {"x": ["T", "B", I]} | {name: [both, "B", units] for name, both, units in STATES}
    inputs = [helper.make_tensor_value_info(name, dtype, dims) for name, dims in values.items()]
    inputs.append(helper.make_tensor_value_info("lengths", TensorProto.INT32, ["B"]))
    outputs = [helper.make_tensor_value_info(name, dtype, None) for layer in layers for name in layer.names]
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    weights = [
        numpy_helper.from_array(value.astype(kind), f"{layer.name}_{part}")
        for layer in layers
        for part, value in layer.weights.items()
    ]
    turn = helper.make_node("Transpose", ["x"], ["x_rows"], perm=[1, 0, 2])
    graph = helper.make_graph([turn, *(layer.node() for layer in layers)], "layers", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


def drawn(steps: int, batch: int, dtype: Any = np.float32) -> dict[str, Array]:
    inputs = {"x": RNG.standard_normal((steps, batch, I)).astype(dtype)}
    inputs |= {name: RNG.standard_normal((both, batch, units)).astype(dtype) for name, both, units in STATES}
    return inputs | {"lengths": RNG.integers(1, steps + 1, batch).astype(np.int32)}


def check(call: Any, layers: list[Layer], inputs: dict[str, Array], tolerance: float) -> None:
    results = iter(call(**inputs))
    for layer in layers:
        for name, right in zip(layer.names, layer.right(inputs), strict=True):
            output = np.asarray(next(results), np.float64)
            assert output.shape == right.shape, name
            assert np.abs(output - right).max() < tolerance * (1 + np.abs(right).max()), name


@pytest.fixture(scope="module")
def artifact() -> Any:
    return mhsa.compile(model(LAYERS), without_attention="accept", check=False)


@pytest.mark.thorough_only("3-9-14")
@pytest.mark.parametrize(("threads", "steps", "batch"), [(1, 6, 1), (2, 1, 3), (3, 9, 14), (8, 4, 7)])
def test_against_numpy(artifact: Any, threads: int, steps: int, batch: int) -> None:
    kernels = [op.kernel for op in artifact.manifest.ops]
    assert kernels.count("cpu.recurrence") == len(LAYERS)
    check(mhsa.load(artifact, threads=threads), LAYERS, drawn(steps, batch), 3e-6)


def test_lengths_beyond_the_steps_are_refused(artifact: Any) -> None:
    call, inputs = mhsa.load(artifact), drawn(4, 3)
    for wrong in (5, -1):
        with pytest.raises(InputError, match="lengths from 0 to 4"):
            call(**inputs | {"lengths": np.array([1, wrong, 2], np.int32)})
    inputs["lengths"] = np.array([0, 4, 0], np.int32)
    check(call, LAYERS, inputs, 3e-6)


@pytest.mark.thorough
def test_halves_are_computed_in_float32() -> None:
    layers = [layer for layer in LAYERS if layer.name in ("whole", "linear")]
    call = mhsa.load(mhsa.compile(model(layers, TensorProto.FLOAT16), without_attention="accept", check=False))
    check(call, layers, drawn(40, 2, np.float16), 6e-4)


def test_what_is_not_understood_is_refused() -> None:
    for attributes, word in (
        ({"activations": ["Sine"]}, "Sine"),
        ({"activations": ["Affine"]}, "activation_alpha"),
        ({"activations": ["ThresholdedRelu"]}, "activation_alpha"),
        ({"activation_alpha": [0.5]}, "more of them"),
    ):
        with pytest.raises(ModelError, match=rf"(?s)refused.*{word}"):
            mhsa.compile(model([Layer("refused", "RNN", 4, **attributes)]), without_attention="accept")
