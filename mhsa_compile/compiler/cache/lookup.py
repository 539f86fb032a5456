"""One compilation's dealings with the cache: what came of the same source before, and where what comes of it goes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save, save_file

from mhsa_compile.compiler.cache import artifact_store
from mhsa_compile.compiler.cache.artifact_store import MakeWeights, Turn
from mhsa_compile.compiler.cache.cache_key import CacheRequest
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.artifact.manifest import WEIGHTS, Manifest

if TYPE_CHECKING:
    import onnx

    from mhsa_compile.frontend.export.module_state import State


class CacheLookup:
    """One compilation's dealings with the cache: it is asked first for a module of ours, then for the model; then given
    what was compiled. Without `asked` it knows and keeps nothing.

    A context manager: inside, whoever else asks for the same thing waits, once this one was told that there is nothing.
    """

    def __init__(self, asked: CacheRequest | None) -> None:
        self._asked = asked
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
        if self._asked is None or isinstance(source, str | Path) or not hasattr(source, "spec"):
            return None  # and PyTorch need not be loaded
        from mhsa_compile.frontend.export.module_state import state_of

        self._state = state_of(source)
        if self._state is None:
            return None
        self._key = self._asked.key_of_module(source, self._state, dims)
        return self._entry(self._key, partial(_write_weights, self._state))

    def of_model(self, model: onnx.ModelProto, dims: Mapping[str, int] | None) -> Artifact | None:
        """What a model gave, unless it is of a module that `of_module` was asked for."""
        if self._asked is None or self._key is not None:
            return None
        self._key = self._asked.key_of_model(model, dims)
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
    return sha256(save(_weights(state, manifest))).hexdigest() == manifest.files[WEIGHTS]
