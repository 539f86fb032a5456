"""Model-local functions become the nodes that they stand for, wherever they are called, by onnx's own inliner."""

from __future__ import annotations

import onnx
from onnx import inliner

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.detach_weights import light, whole
from mhsa_compile.frontend.onnx_graph import all_nodes
from mhsa_compile.spec.attention_spec import DOMAIN

_OWN = (DOMAIN, "Attention")  # ours stays one node: its kernels know it


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without functions of its own, but the definitions of mhsa.Attention. Raises ModelError."""
    if all((function.domain, function.name) == _OWN for function in model.functions):
        return model
    small, tensors = light(model)
    try:
        result = inliner.inline_selected_functions(small, [_OWN], exclude=True)
    except Exception as error:  # the inliner's own kinds, of C++
        raise _refused(model, str(error).strip().splitlines()[0][:200]) from error
    left = {(function.domain, function.name) for function in result.functions} - {_OWN}
    if called := next((n for n in all_nodes(result.graph) if (n.domain, n.op_type) in left), None):
        function = next(f for f in model.functions if (f.domain, f.name) == (called.domain, called.op_type))
        versions = ", ".join(f"{entry.domain or 'ai.onnx'} {entry.version}" for entry in function.opset_import)
        raise _refused(model, f"{called.domain}.{called.op_type}, written for other opsets ({versions})")
    del result.functions[:]
    result.functions.extend(f for f in model.functions if (f.domain, f.name) == _OWN)
    return whole(result, tensors)


def _refused(model: onnx.ModelProto, got: str) -> ModelError:
    hint = "Write the functions for the opset that the model imports, or inline them: onnx.inliner."
    return ModelError("functions of the model", "functions that can be inlined", got, hint)
