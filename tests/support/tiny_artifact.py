"""A small artifact that stands in for attention, so that the runtime is tested by itself.

It computes y[b, l] = scale * W x[b, l] where mask[b, l], else 0, with mask (1 or B, L), and packs W^T at load.
"""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
from safetensors.numpy import save_file

from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.artifact.manifest import Manifest, TensorInfo

W = np.random.default_rng(0).standard_normal((8, 8), np.float32)
X = TensorInfo("x", "float32", ("B", "L", 8))
MASK = TensorInfo("mask", "bool", ("mask_B", "mask_L"), broadcast=("B", "L"))
Y = TensorInfo("y", "float32", ("B", "L", 8))


def tiny_module(scale: float) -> object:
    from tvm.script import ir as I
    from tvm.script import relax as R
    from tvm.script import tirx as T

    @I.ir_module
    class Module:
        @T.prim_func
        def transpose(w: T.handle, p: T.handle):
            W = T.match_buffer(w, (8, 8), "float32")
            P = T.match_buffer(p, (8, 8), "float32")
            for i in range(8):
                for j in range(8):
                    P[i, j] = W[j, i]

        @T.prim_func
        def masked_linear(x: T.handle, m: T.handle, p: T.handle, y: T.handle):
            B = T.int64()
            L = T.int64()
            M = T.int64()
            X = T.match_buffer(x, (B, L, 8), "float32")
            K = T.match_buffer(m, (M, L), "bool")
            P = T.match_buffer(p, (8, 8), "float32")
            Y = T.match_buffer(y, (B, L, 8), "float32")
            for b in T.parallel(B):
                for l in range(L):
                    for j in range(8):
                        Y[b, l, j] = T.float32(0)
                        if K[T.min(b, M - T.int64(1)), l]:
                            for k in range(8):
                                Y[b, l, j] = Y[b, l, j] + T.float32(scale) * X[b, l, k] * P[k, j]

        @R.function
        def bind_weights_0(weight_0: R.Tensor((8, 8), "float32")):
            with R.dataflow():
                p = R.call_tir(Module.transpose, (weight_0,), out_ty=R.Tensor((8, 8), "float32"))
                packed = (p,)
                R.output(packed)
            return packed

        @R.function
        def main(
            x: R.Tensor(("B", "L", 8), "float32"),
            mask: R.Tensor(("M", "L"), "bool"),
            p: R.Tensor((8, 8), "float32"),
        ):
            B = T.int64()
            L = T.int64()
            with R.dataflow():
                y = R.call_tir(Module.masked_linear, (x, mask, p), out_ty=R.Tensor((B, L, 8), "float32"))
                R.output(y)
            return y

    return Module


def make(folder: Path, scale: float = 1.0, hidden: tuple[str, ...] = ()) -> Artifact:
    """An artifact of one small module; `hidden` are features of a CPU that its code asks for, and its manifest does
    not."""
    from mhsa_compile.compiler.codegen.build import build

    profile = load_profile("native")
    hardware = msgspec.structs.replace(profile.hardware, features=(*profile.hardware.features, *hidden))
    folder.mkdir()
    of_code = msgspec.structs.replace(profile, hardware=hardware)
    build(SimpleNamespace(module=tiny_module(scale)), of_code, folder / "module.so")
    save_file({"w": W}, folder / "weights.safetensors")
    (folder / "model.onnx").touch()
    manifest = Manifest(
        mhsa_version="0.1.0",
        inputs=(X, MASK),
        outputs=(Y,),
        weights=(TensorInfo("w", "float32", (8, 8)),),
        semantics=(),
        spec=None,
        target=profile,
        versions={},
        ops=(),
        files={},
    )
    return Artifact.assemble(folder, manifest)


def draw(B: int = 3, L: int = 5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(B * 1000 + L)
    return rng.standard_normal((B, L, 8), np.float32), rng.random((B, L)) < 0.7


def reference(x: np.ndarray, mask: np.ndarray, w: np.ndarray = W) -> np.ndarray:
    return np.where(np.broadcast_to(mask, x.shape[:2])[..., np.newaxis], x @ w.T, 0)


def assert_right(y: np.ndarray, x: np.ndarray, mask: np.ndarray, w: np.ndarray = W) -> None:
    assert type(y) is np.ndarray
    np.testing.assert_allclose(y, reference(x, mask, w), rtol=0, atol=2e-6)


def read_only(x: np.ndarray) -> np.ndarray:
    view = x.view()
    view.flags.writeable = False
    return view
