"""Memory of a GPU, planned once: `main` takes its workspace and the arrays of its outputs from the caller.

A GPU works behind its caller's back, so whoever gives memory to a call must know when the GPU has done with it:
streams, captured graphs. TVM's pool knows of none. The caller's own allocator does, so it brings all that a call needs:

    plan(inputs) -> (bytes of the workspace,), shape of each output      # computed on the host, nothing is launched
    main(inputs, packed weights, workspace, outputs) -> outputs

What comes after TVM's StaticPlanBlockMemory is rewritten: storages become places in the workspace, one after another.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx

from mhsa_compile.compiler.calls import element_bytes
from mhsa_compile.errors import ModelError

MAIN, PLAN = "main", "plan"
ALIGNMENT = 256  # bytes, as of every allocation of CUDA's
_STORAGE, _TENSOR, _FRESH = "relax.memory.alloc_storage", "relax.memory.alloc_tensor", "relax.builtin.alloc_tensor"


def from_caller(module: Any, inputs: int) -> Any:
    """The module with `main` taking its memory from the caller; `inputs` is how many of main's parameters come before
    the packed weights.

    Raises ModelError for an array that is two outputs.
    """
    main = module[MAIN]
    memory = _Memory(main)
    builder = relax.BlockBuilder(module)
    builder.update_func(module.get_global_var(MAIN), memory.rewritten())
    sizes = memory.plan()
    plan = relax.Function(list(main.params[:inputs]), sizes, sizes.body.ty)
    builder.add_func(relax.utils.copy_with_new_vars(plan).with_attr("global_symbol", PLAN), PLAN)
    return builder.get()


class _Memory:
    """The places of the arrays of one function, in the workspace or as outputs."""

    def __init__(self, main: Any) -> None:
        self.main = main
        self.bindings = [binding for block in main.body.blocks for binding in block.bindings]
        self.total: Any = tirx.const(0, "int64")
        self.places: dict[Any, Any] = {}  # storage, or an array of its own -> where it begins in the workspace
        self.outputs = self._outputs()
        for binding in self.bindings:
            if _callee(binding.value) == _STORAGE:
                self._place(binding.var, binding.value.args[0].values[0])
            elif _callee(binding.value) == _FRESH and not any(binding.var.same_as(output) for output in self.outputs):
                self._place(binding.var, _bytes(binding.value.args[0].values, binding.var.ty.dtype))

    def _place(self, variable: Any, size: Any) -> None:
        self.places[variable] = self.total
        self.total = self.total + tirx.truncdiv(size + (ALIGNMENT - 1), ALIGNMENT) * ALIGNMENT

    def _outputs(self) -> list[Any]:
        """The arrays that are made for what is returned; an input that is returned, changed in place, is none."""
        values = {binding.var: binding.value for binding in self.bindings}
        result = values.get(self.main.body.body, self.main.body.body)
        outputs: list[Any] = []
        for value in result.fields if isinstance(result, relax.Tuple) else [self.main.body.body]:
            variable = value
            while (source := _alias_of(values.get(variable), values)) is not None:
                variable = source
            if _callee(values.get(variable)) == _FRESH and not any(variable.same_as(other) for other in outputs):
                outputs.append(variable)
            elif not any(variable.same_as(parameter) for parameter in self.main.params):
                raise ModelError("outputs", "arrays of their own", f"{variable.name}, which is two of them")
        return outputs

    def plan(self) -> Any:
        """Workspace and outputs: their sizes, by the symbols of the inputs."""
        shapes = [next(b.value.args[0] for b in self.bindings if b.var.same_as(output)) for output in self.outputs]
        sizes = relax.Tuple([relax.ShapeExpr([self.total]), *shapes])
        variable = relax.Var("sizes", relax.TupleType([relax.ShapeType(shape.values) for shape in sizes.fields]))
        return relax.SeqExpr([relax.BindingBlock([relax.VarBinding(variable, sizes)])], variable)

    def rewritten(self) -> Any:
        workspace = relax.Var("workspace", relax.TensorType(ndim=1, dtype="uint8"))
        arrays = [relax.Var(f"output_{i}", output.ty) for i, output in enumerate(self.outputs)]
        arguments = dict(zip(self.outputs, arrays, strict=True))
        bindings: list[Any] = []
        for binding in self.bindings:
            callee, value = _callee(binding.value), binding.value
            if callee == _STORAGE:
                continue
            if callee == _TENSOR:
                bindings += _view(binding.var, workspace, self.places[value.args[0]] + value.args[1], *value.args[2:4])
            elif callee == _FRESH and binding.var in arguments:
                bindings.append(relax.VarBinding(binding.var, arguments[binding.var]))
            elif callee == _FRESH:
                bindings += _view(binding.var, workspace, self.places[binding.var], *value.args[:2])
            else:
                bindings.append(binding)
        body = relax.SeqExpr([relax.BindingBlock(bindings)], self.main.body.body)
        params = [*self.main.params, workspace, *arrays]
        return relax.Function(params, body, self.main.ret_ty, self.main.is_pure, self.main.attrs)


def _view(variable: Any, workspace: Any, offset: Any, shape: Any, dtype: Any) -> list[Any]:
    """Bindings that make `variable` an array in the workspace, `offset` bytes behind its begin."""
    place = relax.Var(f"{variable.name}_place", variable.ty)
    kinds = [variable.ty]
    view = relax.Call(relax.ExternFunc("runtime.TVMTensorCreateView"), [workspace, shape, dtype, offset], ty_args=kinds)
    # Compiled code takes no offsets: they go into the address.
    without_offset = relax.Call(relax.ExternFunc("vm.builtin.ensure_zero_offset"), [place], ty_args=kinds)
    return [relax.VarBinding(place, view), relax.VarBinding(variable, without_offset)]


def _callee(value: Any) -> str:
    operator = value.op if isinstance(value, relax.Call) else None
    return str(operator.name) if isinstance(operator, tvm.ir.Op) else ""


def _alias_of(value: Any, values: dict[Any, Any]) -> Any:
    """What `value` is another name or view of, or one of several results of; None if it is of none."""
    if isinstance(value, relax.Var):
        return value
    if isinstance(value, relax.TupleGetItem):
        several = values.get(value.tuple_value, value.tuple_value)
        return several.fields[value.index] if isinstance(several, relax.Tuple) else None
    return value.args[0] if _callee(value) == "relax.reshape" else None


def _bytes(sizes: Any, dtype: str) -> Any:
    total = tirx.const(element_bytes(dtype), "int64")
    for size in sizes:
        total = total * size
    return total
