"""Runs the host's code of kernels for GPUs on tensors that lie on none; for test_empty_grids.py."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import tvm
import tvm_ffi
from tvm.script import tirx as T

from mhsa_compile.compiler.codegen.empty_arrays import guard_launches
from mhsa_compile.hardware.profile import load_profile

os.environ["TVM_COMPILE_FORCE_FALLBACK"] = "1"  # kernels stay source, which nothing runs


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    ]  # fmt: skip


_kept: list[Any] = []


def pretended(*shape: int) -> Any:
    """A float32 tensor of DLPack's that says it lies on cuda:0."""
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    steps = (ctypes.c_int64 * len(shape))(*(shape[1] if axis == 0 else 1 for axis in range(len(shape))))
    tensor = _Tensor(4096, 2, 0, len(shape), 2, 32, 1, sizes, steps, 0, None, None)
    _kept.extend((sizes, steps, tensor))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return tvm_ffi.from_dlpack(new(ctypes.addressof(tensor), b"dltensor", None))


@T.prim_func
def launched(x: T.handle):
    rows = T.int64()
    columns = T.int64()
    X = T.match_buffer(x, (rows, columns), "float32")
    block_x = T.launch_thread("blockIdx.x", rows)
    block_y = T.launch_thread("blockIdx.y", columns)
    thread = T.launch_thread("threadIdx.x", 32)
    if thread < 1:
        X[block_x, block_y] = T.float32(1)


@T.prim_func
def bound(x: T.handle):
    rows = T.int64()
    columns = T.int64()
    X = T.match_buffer(x, (rows, columns), "float32")
    for block_x in T.thread_binding(rows, thread="blockIdx.x"):
        for block_y in T.thread_binding(columns, thread="blockIdx.y"):
            for thread in T.thread_binding(32, thread="threadIdx.x"):
                if thread < 1:
                    X[block_x, block_y] = T.float32(1)


@T.prim_func
def fixed(x: T.handle):
    X = T.match_buffer(x, (4, 5), "float32")
    for block in T.thread_binding(4, thread="blockIdx.x"):
        for thread in T.thread_binding(5, thread="threadIdx.x"):
            X[block, thread] = T.float32(1)


def scheduled() -> Any:
    """A function as TVM's rules for GPUs schedule an operator."""
    from tvm import relax
    from tvm.s_tir import dlight

    builder = relax.BlockBuilder()
    rows, columns = tvm.tirx.Var("rows", "int64"), tvm.tirx.Var("columns", "int64")
    x = relax.Var("x", relax.TensorType([rows, columns], "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.exp(x)))
    module = relax.transform.LegalizeOps()(builder.get())
    with tvm.target.Target(load_profile("cuda-sm80").tvm_config()):
        module = dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(module)
    return next(f for f in module.functions.values() if isinstance(f, tvm.tirx.PrimFunc))


def built(module: Any) -> Any:
    """The host's code alone: a launch looks for its kernel, and there is none."""
    host = tvm.compile(module, target=tvm.target.Target(load_profile("cuda-sm80").tvm_config())).mod
    host.clear_imports()
    return host


def outcome(function: Any, tensors: int, rows: int, columns: int) -> str:
    try:
        function(*(pretended(rows, columns) for _ in range(tensors)))
    except Exception as error:
        if "run_kernel" not in str(error):
            raise
        return "launched"
    return "nothing launched"


def main() -> None:
    tvm_ffi.register_global_func("__tvm_set_device", lambda *_: None, override=True)
    for form, function, tensors in (("launched", launched, 1), ("bound", bound, 1), ("scheduled", scheduled(), 2)):
        module = tvm.IRModule({"run": function.with_attr("global_symbol", "run")})
        for how, program in (("as it was", built(module)), ("guarded", built(guard_launches(module)))):
            for rows, columns in ((0, 5), (4, 0), (0, 0), (4, 5)):
                print(f"{form}, {rows} x {columns}, {how}: {outcome(program['run'], tensors, rows, columns)}")
    module = tvm.IRModule({"run": fixed.with_attr("global_symbol", "run")})
    print("fixed, guarded:", "as it was" if tvm_ffi.structural_equal(guard_launches(module), module) else "changed")


if __name__ == "__main__":
    main()
