"""What the bytes of an artifact hang on, as one hash.

Of every source: the sources of this package, the versions of what exports, generates code and links, the target's
profile, the tuned records at hand, whether weights have eight bits, and which outputs a graph gets beside its own. And
then

- of an ONNX model, or of any nn.Module as it was exported: the model's bytes, weights among them, and the dims to fix
- of a module of ours whose state is as its class makes it: its class, its spec and the dims. Nothing but the file of
  weights hangs on the values of its parameters, so layers of one spec share an entry (`module_state`)
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from mhsa_compile.compiler.codegen import cuda_compiler
from mhsa_compile.hardware import environment
from mhsa_compile.hardware.profile import CudaProfile, TargetProfile
from mhsa_compile.records.record import Record, encoded

if TYPE_CHECKING:
    import onnx

    from mhsa_compile.frontend.export.module_state import State

_PACKAGE = Path(__file__).resolve().parents[2]
_DISTRIBUTIONS = ("apache-tvm", "apache-tvm-ffi", "ml-dtypes", "msgspec", "numpy", "onnx", "onnx-ir", "onnxruntime",
                  "onnxscript", "safetensors", "torch", "ziglang")  # fmt: skip


@dataclass(frozen=True)
class CacheRequest:
    """What `compile` was asked for beside the source."""

    profile: TargetProfile
    weights: str | None
    records: tuple[Record, ...]
    outputs: tuple[str, ...] = ()
    check: bool = False

    def key(self, *parts: bytes) -> str:
        """The key of a source, which is given as `parts`, compiled as asked."""
        rest = _encoded([self.profile, self.weights, _versions(self.profile), self.outputs, self.check])
        digest = hashlib.sha256()
        for part in (*parts, _sources(), *map(encoded, self.records), rest):
            digest.update(hashlib.sha256(part).digest())
        return digest.hexdigest()

    def key_of_model(self, model: onnx.ModelProto, dims: Mapping[str, int] | None) -> str:
        """The key of a model as its file has it, and of the dims to be fixed."""
        return self.key(b"model", model.SerializeToString(deterministic=True), _encoded(sorted((dims or {}).items())))

    def key_of_module(self, module: Any, state: State, dims: Mapping[str, int] | None) -> str:
        """The key of a module of ours with this state. Its tables are no parameters, and so part of the key."""
        tables = {name: state[name] for name, _ in module.named_buffers()}
        digests = {name: hashlib.sha256(table.tobytes()).hexdigest() for name, table in tables.items()}
        parts = [type(module).__name__, module.spec.to_json(), sorted((dims or {}).items()), sorted(digests.items())]
        return self.key(b"module", _encoded(parts))


def _encoded(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


def _versions(profile: TargetProfile) -> dict[str, str | None]:
    numbers = {name: environment.installed_version(name) for name in _DISTRIBUTIONS}
    if isinstance(profile, CudaProfile):
        compiler, number = cuda_compiler.compiler()
        numbers[compiler] = number
    return numbers


@functools.cache
def _sources() -> bytes:
    """The sources of this package as they were when this process first asked: a checkout changes under one version."""
    files = sorted(path for kind in ("*.py", "*.c", "*.h") for path in _PACKAGE.rglob(kind))
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()
