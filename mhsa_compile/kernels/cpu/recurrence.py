"""A recurrent layer on a vector CPU: the products of its states, and what its cells make of them, one step after
another.

A task is some rows of the batch in one direction, with all their steps: nobody waits for anybody else. In each step the
weights are read panel by panel, a register tile of rows x gates; what the gates of a panel sum up to becomes new states
at once. The old states stay until every panel has read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.assertions import refuse_unless, spelled
from mhsa_compile.kernels.common.buffers import SizeVars, argument, prim_func
from mhsa_compile.kernels.common.score_scale import LOG2_E
from mhsa_compile.kernels.cpu.simd.vector_math import exp2, natural_log, tanh
from mhsa_compile.kernels.cpu.simd.vectors import (
    RegisterTile,
    chunks,
    constant,
    each_vector,
    load,
    materialize,
    register_tile,
    scratch,
    splat,
    store,
    tile_registers,
)
from mhsa_compile.kernels.interface.kernel import Config, Emitted, Fixed
from mhsa_compile.kernels.interface.ops import PANEL, Activation, RecurrenceOp

_STEEP = 126.0
"""The largest power of 2 that is asked for: its reciprocal is still a normal number."""


def activated(activation: Activation, x: Expr, lanes: int) -> Expr:
    """The function of a vector; NaN of NaN."""
    value = FUNCTIONS[activation.name](materialize(x, "float32", lanes), activation, lanes)
    return materialize(value, "float32", lanes)


def clipped(x: Expr, bound: float | None, lanes: int) -> Expr:
    """The vector within -bound .. bound."""
    if bound is None:
        return x
    x, low, high = materialize(x, "float32", lanes), constant(-bound, lanes), constant(bound, lanes)
    return T.Select(x < low, low, T.Select(x > high, high, x))


def _sigmoid(x: Expr, activation: Activation, lanes: int) -> Expr:
    one, steep = constant(1.0, lanes), constant(_STEEP, lanes)
    power = materialize(x * constant(-LOG2_E, lanes), "float32", lanes)
    return one / (one + exp2(T.Select(power > steep, steep, power), lanes))


def _relu(x: Expr, activation: Activation, lanes: int) -> Expr:
    zero = constant(0.0, lanes)
    return T.Select(x < zero, zero, x)


def _affine(x: Expr, activation: Activation, lanes: int) -> Expr:
    return x * constant(activation.alpha, lanes) + constant(activation.beta, lanes)


def _hard_sigmoid(x: Expr, activation: Activation, lanes: int) -> Expr:
    zero, one = constant(0.0, lanes), constant(1.0, lanes)
    line = materialize(_affine(x, activation, lanes), "float32", lanes)
    return T.Select(line < zero, zero, T.Select(line > one, one, line))


def _elu(x: Expr, activation: Activation, lanes: int) -> Expr:
    below = (_exp_of_negative(x, lanes) - constant(1.0, lanes)) * constant(activation.alpha, lanes)
    return T.Select(x < constant(0.0, lanes), materialize(below, "float32", lanes), x)


def _softplus(x: Expr, activation: Activation, lanes: int) -> Expr:
    """ln(1 + e^x) as max(x, 0) + ln(1 + e^-|x|)."""
    power = constant(1.0, lanes) + _exp_of_negative(-_magnitude(x, lanes), lanes)
    return _relu(x, activation, lanes) + natural_log(materialize(power, "float32", lanes), lanes)


def _exp_of_negative(x: Expr, lanes: int) -> Expr:
    """e^x of numbers below 0; 1 of others."""
    zero, power = constant(0.0, lanes), materialize(x * constant(LOG2_E, lanes), "float32", lanes)
    return exp2(T.Select(power > zero, zero, power), lanes)


def _magnitude(x: Expr, lanes: int) -> Expr:
    return T.call_llvm_pure_intrin("float32" if lanes == 1 else f"float32x{lanes}", "llvm.fabs", x)


FUNCTIONS: dict[str, Callable[[Expr, Activation, int], Expr]] = {
    "Affine": _affine,
    "Elu": _elu,
    "HardSigmoid": _hard_sigmoid,
    "LeakyRelu": lambda x, one, n: T.Select(x < constant(0.0, n), x * constant(one.alpha, n), x),
    "Relu": _relu,
    "ScaledTanh": lambda x, one, n: constant(one.alpha, n) * tanh(x * constant(one.beta, n), n),
    "Sigmoid": _sigmoid,
    "Softplus": _softplus,
    "Softsign": lambda x, one, n: x / (constant(1.0, n) + _magnitude(x, n)),
    "Tanh": lambda x, one, n: tanh(x, n),
    "ThresholdedRelu": lambda x, one, n: T.Select(x < constant(one.alpha, n), constant(0.0, n), x),
}


ROWS = 8
"""Rows of a task at most."""
OUTPUT, FORGET, CELL = 1, 2, 3  # gates of an LSTM, behind the input's
RESET, HIDDEN = 1, 2  # gates of a GRU, behind the update's


class CpuRecurrenceKernel(Fixed):
    """LSTM, GRU and RNN in float32, for any vector CPU."""

    name = "cpu.recurrence"
    op_type = RecurrenceOp

    def why_not(self, op: RecurrenceOp, profile: CpuProfile) -> str | None:
        unknown = {one.name for functions in op.activations for one in functions} - FUNCTIONS.keys()
        return f"no function {', '.join(sorted(unknown))}" if unknown else None

    def emit(self, op: RecurrenceOp, profile: CpuProfile, config: Config) -> Emitted:
        return Emitted(_recurrence(op, profile.vector_lanes("float32"), profile.hardware.vector_registers))


def _recurrence(op: RecurrenceOp, lanes: int, registers: int) -> Expr:
    with prim_func("recurrence") as builder:
        layer = _Layer.of_arguments(op, lanes)
        layer.check_lengths()
        layer.run(*_tile(op, lanes, registers))
    return builder.get()


def _tile(op: RecurrenceOp, lanes: int, registers: int) -> tuple[int, int]:
    """(rows, vectors of each gate) of the register tile; one of each where a machine has too few registers for all
    gates."""
    room = max(tile_registers(registers), min(registers, 16))
    if room < 2 * op.gates + 1:
        return 1, 1
    widths = [op.gates * n for n in (1, 2, 4) if n * lanes <= PANEL[op.cell]]
    most = op.batch if isinstance(op.batch, int) else ROWS
    rows, columns = register_tile(room, range(1, max(1, min(ROWS, most)) + 1), widths)
    return rows, columns // op.gates


@dataclass(frozen=True)
class _Layer:
    """The arguments, and the loops over tasks and steps."""

    op: RecurrenceOp
    lanes: int
    steps: Expr
    batch: Expr
    inputs: dict[str, Expr] = field(default_factory=dict)
    outputs: dict[str, Expr] = field(default_factory=dict)

    @staticmethod
    def of_arguments(op: RecurrenceOp, lanes: int) -> _Layer:
        dim, both, units, gates = SizeVars(), T.int64(len(op.backwards)), T.int64(op.units), op.gates
        steps, batch = dim(op.steps), dim(op.batch)
        state_shape = [both, batch, units]
        shapes = {
            "x": [steps, batch, T.int64(len(op.backwards) * gates * op.units)],
            "weights": [both, T.int64(op.units * gates * op.units)],
            "biases": [both, T.int64(gates * op.units)],
            "state": state_shape,
        }
        shapes |= {"memory": state_shape} if op.cell == "LSTM" else {}
        shapes |= {"peepholes": [both, T.int64(3 * op.units)]} if op.peepholes else {}
        shapes |= {"hidden": [both, units]} if op.linear_before_reset else {}
        inputs = {name: argument(name, shape, "float32") for name, shape in shapes.items()}
        if op.lengths:
            inputs["lengths"] = argument("lengths", [batch], "int32")
        output_shapes = {"y": [steps, both, batch, units], "last_state": state_shape}
        output_shapes |= {"last_memory": state_shape} if op.cell == "LSTM" else {}
        outputs = {name: argument(name, shape, "float32") for name, shape in output_shapes.items()}
        return _Layer(op, lanes, steps, batch, inputs, outputs)

    def check_lengths(self) -> None:
        """Ends the call where a row has more steps than there are, or fewer than none."""
        if not self.op.lengths:
            return
        wrong = T.alloc_buffer((1,), "int32")
        store(wrong, [T.int64(0)], T.int32(0), 1)
        with T.serial(self.batch) as b:
            length = materialize(T.cast(self.inputs["lengths"][b], "int64"))
            store(wrong, [T.int64(0)], wrong[0] | T.cast(T.Or(length < 0, length > self.steps), "int32"), 1)
        refuse_unless(wrong[0] == 0, self.op.lengths_name, f"lengths from 0 to {spelled(self.op.steps)}")

    def run(self, rows: int, vectors: int) -> None:
        """All tasks: blocks of so many rows of the batch, and the rest row by row, in each direction."""
        directions = len(self.op.backwards)
        whole = materialize(T.truncdiv(self.batch, T.int64(rows)))
        single = materialize(self.batch - whole * rows)
        fits = isinstance(self.op.batch, int) and self.op.batch % rows == 0

        def task(number: Expr) -> None:
            d = materialize(T.truncdiv(number, whole + single)) if directions > 1 else T.int64(0)
            block = materialize(T.truncmod(number, whole + single))
            if fits or rows == 1:
                self._block(d, materialize(block * rows), rows, vectors)
                return
            with T.If(block < whole):
                with T.Then():
                    self._block(d, materialize(block * rows), rows, vectors)
                with T.Else():
                    self._block(d, materialize(whole * rows + (block - whole)), 1, vectors)

        if directions == 1 and self.op.batch == rows:
            task(T.int64(0))
            return
        with T.parallel(materialize((whole + single) * directions)) as number:
            task(number)

    def _block(self, d: Expr, first: Expr, rows: int, vectors: int) -> None:
        """The steps of `rows` rows from `first` on in direction d; where the functions of both directions differ, each
        has code of its own."""
        functions = self.op.activations
        if len(set(functions)) == 1:
            _Block(self, d, first, rows, vectors, functions[0]).run()
            return
        with T.If(d == 0):
            with T.Then():
                _Block(self, d, first, rows, vectors, functions[0]).run()
            with T.Else():
                _Block(self, d, first, rows, vectors, functions[1]).run()


class _Block:
    """Some rows of the batch in one direction."""

    def __init__(
        self, layer: _Layer, d: Expr, first: Expr, rows: int, vectors: int, functions: tuple[Activation, ...]
    ) -> None:
        self.layer, self.op, self.lanes = layer, layer.op, layer.lanes
        self.d, self.first, self.rows, self.vectors, self.functions = d, first, rows, vectors, functions
        shape = (rows, self.op.units)
        self.state, self.next = scratch(shape), scratch(shape)
        self.memory = scratch(shape) if self.op.cell == "LSTM" else None
        self.sums = scratch((rows, vectors * self.op.gates * self.lanes))
        self.places, self.taken = scratch((rows,), "int64"), scratch((rows,), "int32")
        self.two_passes = self.op.cell == "GRU" and not self.op.linear_before_reset
        self.update, self.reset = (scratch(shape) if self.two_passes else None for _ in range(2))

    def run(self) -> None:
        op, layer = self.op, self.layer
        self._each(self._begin)
        with T.serial(layer.steps) as step:
            with T.serial(T.int64(self.rows)) as r:
                length = layer.steps
                if op.lengths:
                    length = materialize(T.cast(layer.inputs["lengths"][self.first + r], "int64"))
                    store(self.taken, [r], T.cast(step < length, "int32"), 1)
                store(self.places, [r], self._place(step, length), 1)
            if self.two_passes:
                self._each_panel((0, RESET), self.state, self._gru_gates)
                self._each_panel((HIDDEN,), self.reset, self._within_lengths(self._gru_states))
            else:
                cell = {"LSTM": self._lstm, "GRU": self._gru_at_once, "RNN": self._rnn}[op.cell]
                self._each_panel(tuple(range(op.gates)), self.state, self._within_lengths(cell))
            self._each(lambda r, u, n: store(self.state, [r, u], load(self.next, [r, u], n), n))
        self._each(self._end)

    def _place(self, step: Expr, length: Expr) -> Expr:
        """Where a row's step lies among the steps; those beyond its length where they are."""
        backwards = self.op.backwards
        if not any(backwards):
            return step
        backward_step = length - 1 - step
        if self.op.lengths:
            backward_step = T.Select(step < length, backward_step, step)
        return backward_step if all(backwards) else T.Select(self.d == 1, backward_step, step)

    def _within_lengths(self, cell: Callable[[_Cell], None]) -> Callable[[_Cell], None]:
        """The new states of rows that have such a step."""
        if not self.op.lengths:
            return cell

        def either(units: _Cell) -> None:
            with T.If(self.taken[units.row] > 0):
                with T.Then():
                    cell(units)
                with T.Else():
                    units.leave()

        return either

    def _each(self, body: Callable[[Expr, Expr, int], None]) -> None:
        """body(row, unit, n) for all units of all rows, n at a time."""
        with T.serial(T.int64(self.rows)) as row:
            each_vector(self.op.units, self.lanes, partial(body, row))

    def _begin(self, r: Expr, u: Expr, n: int) -> None:
        """The states of before the first step; of rows without steps 0, as ONNX Runtime's end."""
        for buffer, name in ((self.state, "state"), (self.memory, "memory")):
            if buffer is None:
                continue
            value = load(self.layer.inputs[name], [self.d, self.first + r, u], n)
            if self.op.lengths:
                has_steps = splat(self.layer.inputs["lengths"][self.first + r] > 0, n)
                value = T.Select(has_steps, value, constant(0.0, n))
            store(buffer, [r, u], value, n)

    def _end(self, r: Expr, u: Expr, n: int) -> None:
        store(self.layer.outputs["last_state"], [self.d, self.first + r, u], load(self.state, [r, u], n), n)
        if self.memory is not None:
            store(self.layer.outputs["last_memory"], [self.d, self.first + r, u], load(self.memory, [r, u], n), n)

    def _each_panel(self, gates: tuple[int, ...], source: Expr, cell: Callable[[_Cell], None]) -> None:
        """cell() for each vector of units, with its sums over `source` (rows, U) of some gates."""
        width = PANEL[self.op.cell]
        whole, rest = divmod(self.op.units, width)
        if whole:
            with T.serial(T.int64(whole)) as panel:
                self._panel(gates, source, cell, materialize(panel * width), width)
        if rest:
            self._panel(gates, source, cell, T.int64(whole * width), rest)

    def _panel(
        self, gates: tuple[int, ...], source: Expr, cell: Callable[[_Cell], None], unit: Expr, width: int
    ) -> None:
        op, weights = self.op, self.layer.inputs["weights"]
        start = materialize(unit * (op.units * op.gates))
        vectors = chunks(width, self.lanes)
        for first in range(0, len(vectors), self.vectors):
            group = vectors[first : first + self.vectors]
            columns = [(gate, offset, n) for gate in gates for offset, n in group]
            tile = RegisterTile(self.rows, [(offset, n) for _, offset, n in columns])
            tile.fill(0.0)
            with T.serial(T.int64(op.units)) as k:
                line = materialize(start + k * (op.gates * width))
                at = [(line + (gate * width + offset), n) for gate, offset, n in columns]
                scalars, vector = partial(self._scalar, source, k), partial(self._weights, weights, at)
                tile.outer_product(scalars, vector)
            starts = list(accumulate((n for _, _, n in columns), initial=0))
            for column, (_, _, n) in enumerate(columns):
                for row in range(self.rows):
                    store(self.sums, [row, starts[column]], tile.get(row, column), n)
            with T.serial(T.int64(self.rows)) as row:  # not written out: a cell is much code
                for i, (offset, n) in enumerate(group):
                    places = [starts[place * len(group) + i] for place in range(len(gates))]
                    products = {g: load(self.sums, [row, at], n) for g, at in zip(gates, places, strict=True)}
                    cell(_Cell(self, row, materialize(unit + offset), n, products))

    @staticmethod
    def _scalar(source: Expr, k: Expr, row: int) -> Expr:
        return source[row, k]

    def _weights(self, weights: Expr, at: list[tuple[Expr, int]], column: int) -> Expr:
        place, n = at[column]
        return load(weights, [self.d, place], n)

    # ---- What a cell makes of the sums of its gates

    def _lstm(self, cell: _Cell) -> None:
        f, g, h = self.functions
        memory = materialize(cell.load(self.memory), "float32", cell.n)
        input_gate = self._function(f, cell.sum(0) + cell.peephole(0, memory), cell.n)
        forget_gate = constant(1.0, cell.n) - input_gate
        if not self.op.input_forget:
            forget_gate = self._function(f, cell.sum(FORGET) + cell.peephole(2, memory), cell.n)
        memory = forget_gate * memory + input_gate * self._function(g, cell.sum(CELL), cell.n)
        memory = materialize(memory, "float32", cell.n)
        output = self._function(f, cell.sum(OUTPUT) + cell.peephole(1, memory), cell.n)
        cell.store(self.memory, memory)
        cell.take(output * activated(h, memory, cell.n))  # the memory is no gate: other runtimes do not clip it

    def _rnn(self, cell: _Cell) -> None:
        cell.take(self._function(self.functions[0], cell.sum(0), cell.n))

    def _gru_at_once(self, cell: _Cell) -> None:
        """A GRU's cells whose reset is of the product of the state."""
        f, g = self.functions
        update, reset = (self._function(f, cell.sum(gate), cell.n) for gate in (0, RESET))
        within = cell.products[HIDDEN] + load(self.layer.inputs["hidden"], [self.d, cell.unit], cell.n)
        candidate = self._function(g, cell.outside(HIDDEN) + reset * within, cell.n)
        cell.take(self._update(cell, update, candidate))

    def _gru_gates(self, cell: _Cell) -> None:
        """A GRU's gates; what the reset leaves of the state is what the other product is of."""
        f, _ = self.functions
        cell.store(self.update, self._function(f, cell.sum(0), cell.n))
        cell.store(self.reset, self._function(f, cell.sum(RESET), cell.n) * cell.load(self.state))

    def _gru_states(self, cell: _Cell) -> None:
        candidate = self._function(self.functions[1], cell.sum(HIDDEN), cell.n)
        cell.take(self._update(cell, cell.load(self.update), candidate))

    def _update(self, cell: _Cell, update: Expr, candidate: Expr) -> Expr:
        return (constant(1.0, cell.n) - update) * candidate + update * cell.load(self.state)

    def _function(self, activation: Activation, x: Expr, n: int) -> Expr:
        return activated(activation, clipped(x, self.op.clip, n), n)


@dataclass(frozen=True)
class _Cell:
    """`n` units of a row beside each other from `unit` on, and the products of their gates with the row's state."""

    block: _Block
    row: Expr
    unit: Expr
    n: int
    products: dict[int, Expr]

    def load(self, array: Expr) -> Expr:
        """The numbers of this row and these units in a scratch (rows, U)."""
        return load(array, [self.row, self.unit], self.n)

    def store(self, array: Expr, value: Expr) -> None:
        store(array, [self.row, self.unit], value, self.n)

    def outside(self, gate: int) -> Expr:
        """What a gate gets of the inputs, and its bias."""
        block, units = self.block, self.block.op.units
        row = [block.places[self.row], block.first + self.row]
        column = block.d * (block.op.gates * units) + (gate * units + self.unit)
        x = load(block.layer.inputs["x"], [*row, column], self.n)
        return x + load(block.layer.inputs["biases"], [block.d, gate * units + self.unit], self.n)

    def sum(self, gate: int) -> Expr:
        """All that a gate gets, but by peepholes."""
        return self.products[gate] + self.outside(gate)

    def peephole(self, place: int, memory: Expr) -> Expr:
        """What a gate gets of the memory."""
        block = self.block
        if not block.op.peepholes:
            return constant(0.0, self.n)
        return load(block.layer.inputs["peepholes"], [block.d, place * block.op.units + self.unit], self.n) * memory

    def take(self, state: Expr) -> None:
        """Makes `state` the new one, and an output."""
        state = materialize(state, "float32", self.n)
        self.store(self.block.next, state)
        self.write(state)

    def leave(self) -> None:
        """Keeps the old state; the output is 0."""
        self.store(self.block.next, self.load(self.block.state))
        self.write(constant(0.0, self.n))

    def write(self, value: Expr) -> None:
        block = self.block
        place = [block.places[self.row], block.d, block.first + self.row, self.unit]
        store(block.layer.outputs["y"], place, value, self.n)
