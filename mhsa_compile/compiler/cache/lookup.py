"""One compilation's dealings with the cache: what came of the same source before, and where what comes of it goes.

What the bytes of an artifact hang on is one hash, its key. Of every source: the sources of this package, the versions
of what exports, generates code and links, the target's profile, the tuned records at hand, whether weights have eight
bits, how float32 is to be multiplied, and which outputs a graph gets beside its own. And then

- of an ONNX model, or of any nn.Module as it was exported: the model's bytes, weights among them, and the dims to fix
- of a module of ours whose state is as its class makes it: its class, its spec and the dims. Nothing but the file of
  weights hangs on the values of its parameters, so layers of one spec share an entry (`module_state`)
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from safetensors.numpy import save, save_file

from mhsa_compile.compiler.cache import artifact_store
from mhsa_compile.compiler.cache.artifact_store import MakeWeights, Turn
from mhsa_compile.compiler.codegen import cuda_compiler
from mhsa_compile.hardware import environment
from mhsa_compile.hardware.profile import TargetProfile
from mhsa_compile.records.record import Record, encoded
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.artifact.manifest import WEIGHTS, Manifest
from mhsa_compile.spec.float32_products import Float32Request

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
    float32_products: Float32Request = "auto"

    def key(self, *parts: bytes) -> str:
        """The key of a source, which is given as `parts`, compiled as asked."""
        versions = {name: environment.installed_version(name) for name in _DISTRIBUTIONS}
        versions |= cuda_compiler.versions(self.profile)
        rest = _encoded([self.profile, self.weights, versions, self.outputs, self.check, self.float32_products])
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


@functools.cache
def _sources() -> bytes:
    """The sources of this package as they were when this process first asked: a checkout changes under one version."""
    files = sorted(path for kind in ("*.py", "*.c", "*.h") for path in _PACKAGE.rglob(kind))
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()


class CacheLookup:
    """One compilation's dealings with the cache: it is asked first for a module of ours, then for the model; then given
    what was compiled. Without `request` it knows and keeps nothing.

    A context manager: inside, whoever else asks for the same thing waits, once this one was told that there is nothing.
    """

    def __init__(self, request: CacheRequest | None) -> None:
        self._request = request
        self._key: str | None = None
        self._state: State | None = None
        self._turn: Turn | None = None

    def __enter__(self) -> CacheLookup:
        return self

    def __exit__(self, *_: object) -> None:
        if self._turn is not None:
            self._turn.over()

    def of_module(self, source: object, dims: Mapping[str, int] | None) -> Artifact | None:
        """What a module of ours gave, with the weights that it has now. None also for every other source."""
        if self._request is None or isinstance(source, str | Path) or not hasattr(source, "spec"):
            return None  # and PyTorch need not be loaded
        from mhsa_compile.frontend.export.module_state import state_of

        self._state = state_of(source)
        if self._state is None:
            return None
        self._key = self._request.key_of_module(source, self._state, dims)
        return self._entry(self._key, partial(_write_weights, self._state))

    def of_model(self, model: onnx.ModelProto, dims: Mapping[str, int] | None) -> Artifact | None:
        """What a model gave, unless it is of a module that `of_module` was asked for."""
        if self._request is None or self._key is not None:
            return None
        self._key = self._request.key_of_model(model, dims)
        return self._entry(self._key)

    def _entry(self, key: str, make_weights: MakeWeights | None = None) -> Artifact | None:
        """An entry, also one that another process is making now: it is waited for. After None it is this one's turn."""
        if (artifact := artifact_store.find(key, make_weights)) is not None:
            return artifact
        self._turn = artifact_store.turn(key)
        if self._turn is None:
            return None
        self._turn.take()
        return artifact_store.find(key, make_weights)

    def keep(self, artifact: Artifact) -> None:
        """Keeps an artifact for the next time; of a module of ours only what its state alone could have made."""
        if self._key is not None and (self._state is None or _fits(self._state, artifact)):
            artifact_store.keep(self._key, artifact)


def _write_weights(state: State, manifest: Manifest, path: Path) -> None:
    """Writes weights as `package.write` does, byte for byte: the file's layout follows from names, dtypes and
    shapes."""
    save_file(_weights(state, manifest), path)


def _weights(state: State, manifest: Manifest) -> State:
    return {info.name: np.ascontiguousarray(state[info.name]) for info in manifest.weights}


def _fits(state: State, artifact: Artifact) -> bool:
    """Whether the artifact's file of weights is what the module's state gives."""
    manifest = artifact.manifest
    if not {info.name for info in manifest.weights} <= state.keys():
        return False
    return hashlib.sha256(save(_weights(state, manifest))).hexdigest() == manifest.files[WEIGHTS]
