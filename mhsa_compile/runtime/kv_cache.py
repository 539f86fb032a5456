"""A cache of keys and values that calls write into, and the rules of a call with one.

Notation: B batch, L new positions of a call, C capacity, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import ml_dtypes  # noqa: F401  # NumPy knows bfloat16 by name from then on
import numpy as np
from numpy.typing import NDArray

from mhsa_compile.errors import InputError, InstallationError
from mhsa_compile.files.room import require_memory
from mhsa_compile.runtime.array_memory import aligned_zeros
from mhsa_compile.runtime.artifact.manifest import Manifest
from mhsa_compile.runtime.cuda_arguments import torch_of_cuda


class KVCache:
    """The keys and values of one layer, for one batch; `attention(x, cache=cache)` writes behind its length.

    key, value   (B, G, C, E) and (B, G, C, F), NumPy, of `dtype`; what lies behind the length means nothing
    scales       of int8: those of the rows of key and of value, (B, G, C) float32 each; none of other dtypes
    dtype        that of the spec, or what its kv_cache says instead
    length       int64 (B,): how many positions of each sequence are valid
    device       where keys and values lie: "cpu"

    It belongs to a spec, not to an artifact: the prefill and the step of one layer share it. One call at a time.
    """

    device = "cpu"
    key: Any
    value: Any
    scales: tuple[Any, ...]

    def __init__(self, spec: Mapping[str, Any], batch: int, capacity: int) -> None:
        self.spec = dict(spec)
        self.dtype = dtype_of_cache(spec)
        shape = (batch, spec["num_kv_heads"], capacity)
        self.key = self._zeros((*shape, spec["head_dim"]), self.dtype)
        self.value = self._zeros((*shape, spec["v_head_dim"]), self.dtype)
        self.scales = tuple(self._zeros(shape, "float32") for _ in range(2 if self.dtype == "int8" else 0))
        self._length = np.zeros(batch, np.int64)

    def _zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        return aligned_zeros(shape, dtype)

    def inputs(self) -> dict[str, Any]:
        """What a call takes of the cache, by the names of its inputs."""
        names = ("past_key", "past_value", "past_key_scale", "past_value_scale")
        return {**dict(zip(names, (self.key, self.value, *self.scales), strict=False)), "length": self.length}

    @property
    def nbytes(self) -> int:
        """How many bytes its arrays take."""
        return sum(int(array.nbytes) for array in (self.key, self.value, *self.scales))

    @property
    def batch(self) -> int:
        return int(self.key.shape[0])

    @property
    def capacity(self) -> int:
        """How many positions the cache has room for."""
        return int(self.key.shape[2])

    @property
    def length(self) -> NDArray[np.int64]:
        """How many positions of each sequence are valid; a copy, since `truncate` and calls change it."""
        return self._length.copy()

    def reset(self) -> None:
        """Forgets everything, for new sequences."""
        self._length[:] = 0

    def truncate(self, length: int | Sequence[int] | NDArray[np.integer]) -> None:
        """Forgets what lies behind `length`, one for all or one for each sequence: of padded prompts what is padding,
        of guessed tokens those that were wrong. Raises InputError."""
        lengths = np.asarray(length)
        if isinstance(length, np.ma.MaskedArray):
            raise InputError("length", "integers without a mask", "a masked array of NumPy's", "Fill it: x.filled(0).")
        if not np.issubdtype(lengths.dtype, np.integer) or lengths.shape not in ((), self._length.shape):
            got = f"{lengths.dtype} of shape {lengths.shape}"
            raise InputError("length", f"an integer, or one for each of the {self.batch} sequences", got)
        if (lengths < 0).any() or (lengths > self._length).any():
            raise InputError("length", f"from 0 to what is valid, {self._length.tolist()}", str(lengths.tolist()))
        self._length[:] = lengths

    def advance(self, count: int) -> None:
        """Adds to the length after a call that wrote `count` positions behind each sequence."""
        self._length += count

    def __repr__(self) -> str:
        fields = f"batch={self.batch}, capacity={self.capacity}, length={self._length.tolist()}, {self.dtype}"
        return f"<KVCache {fields}{'' if self.device == 'cpu' else f', {self.device}'}>"


class DeviceKVCache(KVCache):
    """A cache in a GPU's memory, as tensors of PyTorch's. Both sides count what is valid, so that a call waits for
    nothing; `truncate` and `reset` copy the host's count there."""

    def __init__(self, spec: Mapping[str, Any], batch: int, capacity: int, device: str) -> None:
        self._torch = torch_of_cuda()
        if self._torch is None:
            raise InstallationError(
                "PyTorch",
                "one for CUDA, imported: it holds the cache",
                "none",
                "Or pass past_key, past_value and length.",
            )
        self.device = device
        super().__init__(spec, batch, capacity)
        self._length_there = self._zeros((batch,), "int64")

    def _zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        with self._torch.inference_mode(False):  # what is made inside of it could not be written outside
            return self._torch.zeros(shape, dtype=getattr(self._torch, dtype), device=self.device)

    def inputs(self) -> dict[str, Any]:
        if self._torch.cuda.is_current_stream_capturing():
            hint = "In a graph pass past_key, past_value and length themselves, and count: length += L."
            raise InputError("cache", "a call that is not captured: the host counts, too", "one that is", hint)
        return {"past_key": self.key, "past_value": self.value, "length": self._length_there}

    def reset(self) -> None:
        super().reset()
        self._length_there.zero_()

    def truncate(self, length: int | Sequence[int] | NDArray[np.integer]) -> None:
        super().truncate(length)
        self._length_there.copy_(self._torch.from_numpy(self._length))

    def advance(self, count: int) -> None:
        super().advance(count)
        self._length_there += count


def new_cache(manifest: Manifest, batch: int | None, capacity: int | None, device: str = "cpu") -> KVCache:
    """An empty cache for an artifact; what it has fixed need not be said.

    Raises InputError, and InstallationError where there is no PyTorch that could hold it on a GPU.
    """
    spec = cached_spec(manifest)
    fixed = next(info.dims for info in manifest.inputs if info.name == "past_key")
    sizes: dict[str, int] = {}
    for name, value, dim in (("batch", batch, fixed[0]), ("capacity", capacity, fixed[2])):
        size = dim if value is None and isinstance(dim, int) else value
        if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
            raise InputError(name, "a positive integer", repr(size))
        if isinstance(dim, int) and size != dim:
            raise InputError(name, f"{dim}, as the artifact was compiled for", str(size))
        sizes[name] = int(size)
    rope = spec.get("rope")
    if rope is not None and sizes["capacity"] > rope["max_length"]:
        expected = f"at most the spec's rope.max_length = {rope['max_length']}"
        raise InputError("capacity", expected, str(sizes["capacity"]), "Raise max_length, and compile again.")
    if device != "cpu":
        return DeviceKVCache(spec, **sizes, device=device)
    dtype = dtype_of_cache(spec)
    row = (spec["head_dim"] + spec["v_head_dim"]) * np.dtype(dtype).itemsize + (8 if dtype == "int8" else 0)
    require_memory("cache", math.prod(sizes.values()) * spec["num_kv_heads"] * row)
    return KVCache(spec, **sizes)


def dtype_of_cache(spec: Mapping[str, Any]) -> str:
    """What a cache for a spec, as plain values, stores keys and values as."""
    stored = spec["kv_cache"]
    return str(stored["dtype"] if isinstance(stored, Mapping) else spec["dtype"])


def cached_spec(manifest: Manifest) -> Mapping[str, Any]:
    """The spec of an artifact that takes a cache, but for what it returns: no cache minds. Raises InputError."""
    if manifest.spec is None or not manifest.spec.kv_cache:
        expected, hint = "an artifact of a spec with kv_cache", "Set kv_cache=True in the spec, and compile again."
        raise InputError("cache", expected, "one without", hint)
    return {name: value for name, value in manifest.spec.to_dict().items() if name != "outputs"}


def check_call(manifest: Manifest, cache: object, x: Any, device: str = "cpu") -> KVCache:
    """Whether `cache` fits an artifact and has room for x (B, L, D), if x is of that rank. Raises InputError."""
    spec = cached_spec(manifest)
    if not isinstance(cache, KVCache):
        raise InputError("cache", "a KVCache", type(cache).__name__, "Make one: attention.new_cache(batch, capacity).")
    if cache.device != device:
        got, hint = f"one on {cache.device}", "Make one: attention.new_cache(batch, capacity)."
        raise InputError("cache", f"one on {device}, where the artifact is loaded", got, hint)
    if cache.spec != spec:
        differing = [name for name in {**cache.spec, **spec} if cache.spec.get(name) != spec.get(name)]
        ours, theirs = (", ".join(f"{name}={s.get(name)!r}" for name in differing) for s in (spec, cache.spec))
        raise InputError("cache", f"one for {ours}, as the artifact's spec", f"one for {theirs}")
    shape: Sequence[int] = getattr(x, "shape", ())
    if len(shape) != 3:
        return cache
    if shape[0] != cache.batch:
        raise InputError("cache", f"one for a batch of {shape[0]}, as x has", f"one for {cache.batch}")
    longest = int(cache.length.max())
    if longest + shape[1] > cache.capacity:
        expected, got = f"room for {shape[1]} more positions", f"length {longest} of capacity {cache.capacity}"
        hint = "Make a larger one, attention.new_cache(batch, capacity), or begin anew: cache.reset()."
        raise InputError("cache", expected, got, hint)
    return cache
