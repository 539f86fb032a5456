"""Activations, residual sums and gates become part of the linear whose result they read.

    y = linear(x); h = gelu(y); z = h + residual        ->        z = linear(x, residual), with an epilogue

By itself each is a pass over all activations. What is taken is arithmetic on single elements, with numbers, with
tensors of the same shape and with one number for each feature, where nobody else reads what lies between.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Expr

from mhsa_compile.frontend.relax.imported_module import ImportedModule
from mhsa_compile.kernels.interface.epilogue import Epilogue, EpilogueStep
from mhsa_compile.kernels.interface.ops import LinearOp, Op

Takes = Callable[[LinearOp], bool]
_ELSEWHERE = math.inf  # the place of whoever reads a value outside of its block


def with_epilogues(imported: ImportedModule, takes: Takes) -> ImportedModule:
    """The module with epilogues in its linears; `takes` says whether a kernel can compute one with its epilogue."""
    main, ops = imported.module["main"], dict(imported.ops)
    blocks, values = list[list[Expr]](), [[binding.value for binding in block.bindings] for block in main.body.blocks]
    for number, block in enumerate(main.body.blocks):
        others = [value for other in (*values[:number], *values[number + 1 :], [main.body.body]) for value in other]
        outside = {variable for value in others for variable in relax.analysis.free_vars(value)}
        blocks.append(_rewritten(list(block.bindings), outside, ops, takes))
    return with_bindings(imported, blocks, ops)


def with_bindings(imported: ImportedModule, blocks: list[list[Expr]], ops: dict[str, Op]) -> ImportedModule:
    """The module whose `main` has these bindings in its blocks, which call `ops`."""
    main, module = imported.module["main"], imported.module.clone()
    body = relax.SeqExpr(
        [
            (relax.DataflowBlock if isinstance(block, relax.DataflowBlock) else relax.BindingBlock)(bindings)
            for block, bindings in zip(main.body.blocks, blocks, strict=True)
        ],
        main.body.body,
    )
    module.update_func(
        module.get_global_var("main"), relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    )
    return replace(imported, module=relax.transform.Normalize()(module), ops=ops)


def _rewritten(bindings: list[Expr], outside: set[Expr], ops: dict[str, Op], takes: Takes) -> list[Expr]:
    """The bindings of a block with epilogues in their linears, of which `ops` learns. What is in `outside` is read by
    others, too."""
    readers: dict[Expr, list[float]] = {variable: [_ELSEWHERE] for variable in outside}
    for place, binding in enumerate(bindings):
        for variable in relax.analysis.free_vars(binding.value):
            readers.setdefault(variable, []).append(place)
    result: list[Expr | None] = list(bindings)
    for place, binding in enumerate(bindings):
        name, value = _operation(binding.value), binding.value
        op = ops.get(name)
        if not isinstance(op, LinearOp) or op.dtype != "float32" or op.padding:
            continue
        chain = _Chain(binding.var)
        places = _follow(chain, result, readers)
        if not places or not takes(with_one := replace(op, epilogue=chain.epilogue())):
            continue
        ops[name] = with_one
        function, inputs = value.args
        call = relax.Call(
            value.op, [function, relax.Tuple([*inputs.fields, *chain.inputs])], value.attrs, value.ty_args
        )
        for index in (place, *places):
            result[index] = None
        result[places[-1]] = relax.VarBinding(bindings[places[-1]].var, call)
    return [binding for binding in result if binding is not None]


def _operation(value: Expr) -> str:
    """The name of the operation of ours that a value is a call of, else ""."""
    ours = isinstance(value, relax.Call) and value.op == tvm.ir.Op.get("relax.call_dps_packed")
    return str(value.args[0].global_symbol) if ours else ""


def _follow(chain: _Chain, bindings: list[Expr | None], readers: dict[Expr, list[float]]) -> list[int]:
    """The places of what an epilogue takes, in order: all that reads what lies between, and so is gone. `chain` has
    their steps, and no more."""
    places: list[int] = []
    most = 0
    while True:
        waiting = {place for variable in chain.values for place in readers.get(variable, ())} - set(places)
        following = min(waiting, default=_ELSEWHERE)
        binding = None if following == _ELSEWHERE else bindings[int(following)]
        if binding is None or not chain.take(binding):
            break
        places.append(int(following))
        readable = {variable for variable in chain.values if set(readers.get(variable, ())) - set(places)}
        if readable <= {binding.var} - chain.steps_of.keys():
            most = len(places)
            chain.keep()
    chain.go_back()
    return places[:most]


class _Chain:
    """Arithmetic on the elements of a linear's result y, step by step.

    `values` are what it has so far: y, then one for each binding that it took. Of bytes, whose scale and zero are in
    `steps_of`, that is the byte less its zero, which only a DequantizeLinear reads. Arguments of steps are constants,
    "y", or ("operand", i), ("feature", i) and ("step", i) until all operands are known.
    """

    def __init__(self, y: Expr) -> None:
        self._type = y.ty
        self.values: dict[Expr, Any] = {y: "y"}
        self.steps_of: dict[Expr, tuple[float, int]] = {}
        self.operands: list[Expr] = []
        self.features: list[Expr] = []
        self._steps: list[tuple[str, tuple[Any, ...]]] = []
        self.keep()

    def keep(self) -> None:
        """Makes this the state to which `go_back` goes back."""
        self._sizes = len(self.operands), len(self.features), len(self._steps)

    def go_back(self) -> None:
        for values, count in zip((self.operands, self.features, self._steps), self._sizes, strict=True):
            del values[count:]

    @property
    def inputs(self) -> list[Expr]:
        """What a linear with this epilogue takes behind its biases."""
        return [*self.operands, *self.features]

    def take(self, binding: Expr) -> bool:
        """Adds the steps of a binding; whether that could be."""
        value = binding.value
        if (rounding := self._rounded(binding)) is not None:
            return rounding
        steps = _STEPS.get(value.op.name) if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) else None
        if steps is None or not _alike(binding.var.ty, self._type):
            return False
        arguments = [self._argument(argument) for argument in value.args]
        step = None if None in arguments else steps(self._step, *arguments)
        if step is None:
            return False
        self.values[binding.var] = step
        return True

    def _rounded(self, binding: Expr) -> bool | None:
        """The same of a quantization by one number, or of what undoes it; None of another binding."""
        value = binding.value
        name = value.op.name if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) else ""
        if name not in ("relax.quantize", "relax.dequantize"):
            return None
        x, *numbers = value.args
        if x not in self.values or not all(isinstance(number, tvm.ir.GenericConst) for number in numbers):
            return False
        scale, zero = (number.value.numpy().reshape(-1) for number in numbers)
        kind = str(binding.var.ty.dtype if name == "relax.quantize" else x.ty.dtype)
        if scale.size != 1 or zero.size != 1 or scale.dtype != np.float32 or kind not in ("int8", "uint8"):
            return False
        steps = float(scale[0]), int(zero[0])
        if name == "relax.dequantize":
            is_own = self.steps_of.get(x) == steps
            if is_own:
                self.values[binding.var] = self._step("mul", self.values[x], steps[0])
            return is_own
        if x in self.steps_of:
            return False
        # By a product with the inverse, which takes less than a quotient, and differs from it by its last bit.
        nearest = self._step("round", self._step("mul", self.values[x], float(np.float32(1 / steps[0]))))
        least, most = (float(bound - steps[1]) for bound in (np.iinfo(kind).min, np.iinfo(kind).max))
        self.values[binding.var] = self._step("min", self._step("max", nearest, least), most)
        self.steps_of[binding.var] = steps
        return True

    def _step(self, op: str, *arguments: Any) -> Any:
        self._steps.append((op, arguments))
        return "step", len(self._steps) - 1

    def _argument(self, value: Expr) -> Any:
        """What a step knows a value by; None where it cannot be in an epilogue."""
        if value in self.steps_of:
            return None
        if value in self.values:
            return self.values[value]
        if isinstance(value, tvm.ir.GenericConst) and value.value.numpy().size == 1:
            return float(value.value.numpy().item()) if str(value.ty.dtype) == "float32" else None
        if isinstance(value, relax.Var | tvm.ir.GenericConst) and _is_of_columns(value.ty, self._type):
            if value not in self.features:
                self.features.append(value)
            return "feature", self.features.index(value)
        if not isinstance(value, relax.Var) or not _alike(value.ty, self._type):
            return None
        if value not in self.operands:
            self.operands.append(value)
        return "operand", self.operands.index(value)

    def epilogue(self) -> Epilogue:
        first = {"operand": 1, "feature": 1 + len(self.operands), "step": 1 + len(self.inputs)}

        def numbered(argument: Any) -> int | float:
            if argument == "y":
                return 0
            return argument if isinstance(argument, float) else first[argument[0]] + argument[1]

        steps = (EpilogueStep(op, tuple(map(numbered, arguments))) for op, arguments in self._steps)
        return Epilogue(len(self.operands), tuple(steps), len(self.features))


def _alike(one: Expr, other: Expr) -> bool:
    """Whether two values are tensors of one shape and dtype."""
    if not all(isinstance(kind, relax.TensorType) and isinstance(kind.shape, relax.ShapeExpr) for kind in (one, other)):
        return False
    if one.dtype != other.dtype or one.ndim != other.ndim:
        return False
    return all(map(tvm.sym.Analyzer().can_prove_equal, one.shape.values, other.shape.values))


def _is_of_columns(one: Expr, whole: Expr) -> bool:
    """Whether a value is one number for each place of another's last axis, which has more than one."""
    kinds = (one, whole)
    if not all(isinstance(kind, relax.TensorType) and isinstance(kind.shape, relax.ShapeExpr) for kind in kinds):
        return False
    if one.ndim != 1 or whole.ndim < 2 or one.dtype != whole.dtype:
        return False
    sizes = one.shape.values[0], whole.shape.values[-1]
    return all(isinstance(size, tvm.tirx.IntImm) for size in sizes) and 1 < int(sizes[0]) == int(sizes[1])


def _power(step: Callable[..., Any], x: Any, exponent: Any) -> Any:
    return step(_POWERS[exponent], x) if exponent in _POWERS else None


_POWERS = {2.0: "square", 3.0: "cube"}


def _plain(op: str) -> Callable[..., Any]:
    return lambda step, *arguments: step(op, *arguments)


_STEPS: dict[str, Callable[..., Any]] = {
    "relax.add": _plain("add"),
    "relax.divide": _plain("div"),
    "relax.erf": _plain("erf"),
    "relax.maximum": _plain("max"),
    "relax.minimum": _plain("min"),
    "relax.multiply": _plain("mul"),
    "relax.negative": lambda step, x: step("mul", x, -1.0),
    "relax.nn.gelu": _plain("gelu"),
    "relax.nn.gelu_tanh": _plain("gelu_tanh"),
    "relax.nn.relu": lambda step, x: step("max", x, 0.0),
    "relax.nn.silu": _plain("silu"),
    "relax.power": _power,
    "relax.round": _plain("round"),
    "relax.sigmoid": _plain("sigmoid"),
    "relax.subtract": _plain("sub"),
    "relax.tanh": _plain("tanh"),
}
"""How an operator is done in steps: what adds one and gives its value, then the arguments -> the value, or None."""
