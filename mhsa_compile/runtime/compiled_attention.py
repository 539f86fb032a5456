"""Load an artifact and call it: NumPy and TVM's 3 MB runtime, no PyTorch, no ONNX, no compiler.

attention = load("attention.mhsa")
y = attention(x)                       # x (B, L, D) -> y (B, L, D)
y = attention(x, mask=mask)            # inputs by position or by name
layer_7 = load("attention.mhsa", weights="layer_7.safetensors")

cache = attention.new_cache(batch=1, capacity=1024)    # of a spec with kv_cache
y = attention(x, cache=cache)          # the prompt, then x (B, 1, D) again and again
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from mhsa_compile.errors import ArtifactError, InputError, MhsaError
from mhsa_compile.files.foreign_errors import entry_point, reading, refusal_of
from mhsa_compile.files.opened_once import HashedFile
from mhsa_compile.hardware import host
from mhsa_compile.runtime import cuda_devices, kv_cache, large_pages, tvm_runtime
from mhsa_compile.runtime.array_memory import is_torch
from mhsa_compile.runtime.artifact.artifact import Artifact, open_artifact, stored_weights
from mhsa_compile.runtime.artifact.load_checks import check_cpu, check_features, check_loops
from mhsa_compile.runtime.artifact.manifest import MODULE, WEIGHTS, Manifest, TensorInfo
from mhsa_compile.runtime.call_arguments import Argument, Signature, Sizes
from mhsa_compile.runtime.cuda_arguments import DeviceSignature, DeviceWeight
from mhsa_compile.runtime.cuda_launch import Launches
from mhsa_compile.runtime.kv_cache import KVCache
from mhsa_compile.runtime.misfits import misfit, shapes_of
from mhsa_compile.runtime.threads.call_threads import CallThreads, Pool, ThreadSettings, check_pool, openmp_path
from mhsa_compile.runtime.weight_binding import SharedWeights, Weights, bound, own_weights, weight_arrays
from mhsa_compile.spec.outputs import together

if TYPE_CHECKING:
    from mhsa_compile.runtime.profile.call_profile import CallProfile
    from mhsa_compile.runtime.profile.profile_call import KernelRun

_MISFIT = "ErrorContext(match_cast"
"""What TVM's VM says where sizes that must agree inside of a model do not."""
_REPORT = "Compile it again; if it ends so once more, report it, with the model."
_AGAIN = "Compile it again."


@entry_point
def load(
    path: str | os.PathLike[str] | Artifact,
    *,
    weights: Weights | None = None,
    device: str | None = None,
    threads: int | None = None,
    pool: Pool = "auto",
) -> CompiledAttention:
    """Checks an artifact, maps its code and packs its weights.

    path      the folder, or an Artifact; every byte is checked before any code is mapped
    weights   instead of the artifact's own: arrays by name, such as a state_dict, or a .safetensors file
    device    "cpu", or of an artifact for GPUs "cuda:0", the default, "cuda:1" and so on
    threads   that a call uses at most; by default the CPUs that this process may use, or as many as PyTorch was told
              to. On a GPU there are none
    pool      whose threads: "own", those of one pool for the process; "openmp", those of PyTorch's OpenMP (or another
              that is loaded); "auto", PyTorch's where they are awake when a call comes, else our own

    Raises ArtifactError (damaged, of a newer format, for another CPU or GPU), InputError, InstallationError and
    DeviceError (no GPU, or too little memory on it).

    >>> import mhsa_compile as mhsa, numpy as np
    >>> attention = load(mhsa.compile(mhsa.AttentionSpec(embed_dim=32, num_heads=4)))
    >>> attention(np.zeros((2, 9, 32), np.float32)).shape
    (2, 9, 32)
    """
    if threads is not None:
        host.thread_count(threads)
    check_pool(pool)
    with open_artifact(path.path if isinstance(path, Artifact) else path) as artifact:
        manifest = artifact.manifest
        readers: dict[str, Callable[[HashedFile], Any]] = {MODULE: HashedFile.read}
        shared = SharedWeights(manifest, weights)
        if (needs := own_weights(manifest, weights)) is not None:
            readers[WEIGHTS] = partial(stored_weights, needs=lambda name: needs(name) and shared.needs(name))
        with tvm_runtime.importing():
            contents = artifact.read(readers)
    if manifest.target.family == cuda_devices.FAMILY:
        return _on_gpu(manifest, contents, weights, device, threads)
    if device not in (None, "cpu"):
        next_step = "Compile it for a GPU: --target cuda-..., see `mhsa targets`."
        raise InputError("device", '"cpu", as it was compiled for one', repr(device), next_step)
    check_cpu(manifest)
    check_loops(manifest, artifact.path)
    runtime = tvm_runtime.start()
    with runtime.calls.lock:
        arrays = weight_arrays(manifest, contents.pop(WEIGHTS, {}), weights, Argument, shared.needs)
        library = _library(runtime, manifest, contents)
        check_features(library.cpu_features)
        signature = Signature(
            manifest.inputs,
            manifest.outputs,
            aligned=manifest.wants_cache_lines,
            in_place=manifest.in_place,
            limits=manifest.limits,
            weights=(info.name for info in manifest.weights),
        )
        with reading(ArtifactError, "artifact", "code that `mhsa compile` made", _AGAIN):
            settings = ThreadSettings(host.thread_count(threads), pool, threads is None)
            thread = _Threads(runtime, library, settings)
        return CompiledAttention(manifest, signature, thread, arrays, shared)


def _on_gpu(
    manifest: Manifest, contents: dict[str, Any], weights: Weights | None, device: str | None, threads: int | None
) -> CompiledAttention:
    """Loads an artifact onto a GPU: what is wrong with the machine is said before anything is loaded, and nothing is
    launched before all is well."""
    if threads is not None:
        raise InputError("threads", "None: a GPU computes", repr(threads))
    gpu = cuda_devices.select_gpu(manifest, device)
    arrays = weight_arrays(manifest, contents.pop(WEIGHTS, {}), weights, partial(DeviceWeight, gpu))
    runtime = tvm_runtime.start_cuda()
    with runtime.calls.lock:
        library = _library(runtime, manifest, contents)
        signature = DeviceSignature(manifest, gpu)
        return CompiledAttention(manifest, signature, Launches(library, manifest, signature, gpu), arrays)


def _library(runtime: tvm_runtime.Runtime, manifest: Manifest, contents: Mapping[str, Any]) -> tvm_runtime.Library:
    hint = "Compile it for this machine. Where memory must not be mapped as code, TMPDIR must not be noexec."
    with reading(ArtifactError, f"artifact file {MODULE!r}", "a library that this machine loads", hint):
        return runtime.library(contents[MODULE], manifest.files[MODULE])


class CompiledAttention:
    """A compiled function with its weights. Calls are safe from several threads at once; each uses its own workers."""

    def __init__(
        self,
        manifest: Manifest,
        signature: Signature,
        thread: _Threads | Launches,
        weights: list[Any],
        shared: SharedWeights | None = None,
    ) -> None:
        self.manifest = manifest
        self._signature = signature
        self._thread = thread
        self._words = [info.name for info in manifest.inputs if info.name in ("cache", "stream")]
        with reading(ArtifactError, "artifact", "code that fits its manifest", _AGAIN):
            self._packed = thread.bind(weights, shared)
        self._shared = shared  # others may have them as long as this has

    def __copy__(self) -> CompiledAttention:
        return self  # nothing of it changes: a copy of a model shares it

    def __deepcopy__(self, memo: object) -> CompiledAttention:
        return self

    def __reduce__(self) -> NoReturn:
        hint = "Pickle the artifact, or its path, and mhsa.load it there."
        raise InputError(
            "a loaded artifact", "to stay in its process, where its code is loaded", "a pickle of it", hint
        )

    def __call__(self, /, *inputs: Any, cache: Any = None, stream: Any = None, **by_name: Any) -> Any:
        """The output, or a named tuple of them: torch tensors if any input is one, else NumPy arrays.

        Inputs are read in place unless they are strided. A mask that broadcasts may leave out leading axes
        and have axes of 1. What the manifest has as `in_place` is written into, and is itself the output. Raises
        InputError; rows that would overrun a cache are refused before any of them is written.

        cache   a KVCache of `new_cache`, in place of past_key, past_value and length: the keys and values of x
                (B, L, D), for any L, are written behind its length, which then grows by L
        stream  of a GPU, on which to run: PyTorch's, an object with __cuda_stream__, or a handle; by default PyTorch's
                current one. Inputs in a GPU's memory must be contiguous, and are never copied

        Of a model with inputs called `cache` or `stream` these are those.
        """
        if self._words:
            keywords = {"cache": cache, "stream": stream}
            by_name |= {name: keywords[name] for name in self._words if keywords[name] is not None}
            cache, stream = (None if name in self._words else value for name, value in keywords.items())
        if stream is not None:
            with self._thread.on(stream):
                return self(*inputs, cache=cache, **by_name)
        if cache is not None:
            return self._cached(cache, inputs, by_name)
        with self._thread.lock:
            return self._call(inputs, by_name)

    def _call(self, inputs: tuple[Any, ...], by_name: dict[str, Any]) -> Any:
        signature = self._signature
        try:
            arrays, sizes = signature.arrays(inputs, by_name)
        except MemoryError as error:
            raise refusal_of(error) or error from error
        if 0 in sizes.values() and (results := signature.empty_results(arrays, sizes)) is not None:
            return results
        return self._run(arrays, sizes, signature.values(inputs, by_name) if signature.in_place else arrays)

    def _run(self, arrays: Sequence[Any], sizes: Sizes, values: Sequence[Any]) -> Any:
        """Runs a call, and returns its outputs. `values` are what the caller gave: what is written in place is its own.
        To be called with the lock."""
        try:
            return self._signature.results(self._thread.run(arrays, sizes, self._packed), values)
        except MhsaError:
            raise
        except Exception as error:
            raise self._refusal(error, arrays, sizes) from error

    def with_weights(self, weights: Weights) -> CompiledAttention:
        """The same code with other weights: arrays by name, or a .safetensors file, for all that the manifest lists. On
        a CPU only. Raises InputError.

        >>> import mhsa_compile as mhsa, numpy as np
        >>> attention = load(mhsa.compile(mhsa.AttentionSpec(embed_dim=32, num_heads=4)))
        >>> zeros = {info.name: np.zeros(info.dims, np.float32) for info in attention.manifest.weights}
        >>> float(abs(attention.with_weights(zeros)(np.ones((2, 9, 32), np.float32))).max())
        0.0
        """
        if isinstance(self._signature, DeviceSignature):
            raise InputError("with_weights", "an artifact for a CPU", f"one for {self.device}", "Load it again.")
        with self._thread.lock:
            arrays = weight_arrays(self.manifest, {}, weights, Argument)
            return CompiledAttention(self.manifest, self._signature, self._thread, arrays)

    @entry_point
    def bind(self, /, *inputs: Any, **by_name: Any) -> BoundCall:
        """A call of these very arrays, for loops that make it again and again: they are checked now, and each run reads
        what is in them then. Raises InputError, also for a GPU's artifact.

        >>> import mhsa_compile as mhsa, numpy as np
        >>> attention = load(mhsa.compile(mhsa.AttentionSpec(embed_dim=32, num_heads=4)))
        >>> x = np.zeros((2, 9, 32), np.float32)
        >>> run = attention.bind(x)
        >>> run().shape
        (2, 9, 32)
        """
        if isinstance(self._signature, DeviceSignature):
            hint = "Capture the call in a CUDA graph."
            raise InputError("bind", "an artifact for a CPU", f"one for {self.device}", hint)
        arrays, sizes = self._signature.arrays(inputs, by_name)
        values = self._signature.values(inputs, by_name)
        return BoundCall(self._signature, self._run, lambda: self._thread.lock, values, arrays, sizes)

    @entry_point
    def profile(self, /, *inputs: Any, cache: Any = None, seconds: float = 1.0, **by_name: Any) -> CallProfile:
        """What this call spends its time on, by operation: it is made again and again, for about so many seconds.

        A cache stays as long as it is, and what the call would write behind its length is written. On a CPU only; calls
        that are not profiled cost nothing for it. Raises InputError, also for sizes of 0.

        >>> import mhsa_compile as mhsa, numpy as np
        >>> attention = load(mhsa.compile(mhsa.AttentionSpec(embed_dim=32, num_heads=4)))
        >>> [op.kind for op in attention.profile(np.zeros((2, 9, 32), np.float32), seconds=0.01).ops]
        ['linear', 'attention', 'linear']
        """
        from mhsa_compile.runtime.profile.profile_call import Turns, profile_call  # what only calls does not load it

        if cache is not None and "cache" in self._words:
            by_name["cache"] = cache
        elif cache is not None:
            x: Any = inputs[0] if inputs else by_name.get("x")
            by_name |= kv_cache.check_call(self.manifest, cache, x, self.device).inputs()
        thread = self._thread
        if not isinstance(thread, _Threads):
            raise InputError("profile", "an artifact for a CPU", f"one for {self.device}", "NVIDIA's nsys times GPUs.")
        self(*inputs, **by_name)  # whatever is wrong with the arguments is said by a call
        with thread.lock:
            arrays, sizes = self._signature.arrays(inputs, by_name)
            if 0 in sizes.values():
                raise InputError("inputs", "sizes of at least 1, so that there is something to time", str(sizes))
            kernels = thread.captured(arrays, sizes, self._packed)
        turns = Turns(
            call=partial(self, *inputs, **by_name),
            function=partial(thread.run, arrays, sizes, self._packed),
            alone=partial(thread.alone, sizes),
        )
        return profile_call(thread.runtime, self.manifest, kernels, turns, self.threads, seconds)

    def _refusal(self, error: Exception, arrays: Sequence[Any], sizes: Sizes) -> MhsaError:
        """What a call of compiled code raised, as an error of ours."""
        if (words := tvm_runtime.refusal(error)) is not None:
            return self._signature.refused(words, arrays, sizes)
        if (shortage := refusal_of(error)) is not None:
            return shortage
        shapes = shapes_of(self.inputs, arrays)
        about_sizes = str(error) if isinstance(error, ValueError) or _MISFIT in str(error) else None
        if (refusal := misfit(self.manifest.agreements, sizes, shapes, about_sizes)) is not None:
            return refusal
        return ArtifactError("artifact", "code that fits its manifest", f"code that ends at {shapes}", _REPORT)

    @entry_point
    def from_host(self, /, *inputs: Any, **by_name: Any) -> Any:
        """A call on NumPy arrays, wherever it runs: to a GPU they are copied, and its outputs back.

        For checks and first steps: a program that cares for time keeps its tensors on the GPU. Raises InputError and
        DeviceError.
        """
        signature, thread = self._signature, self._thread
        if not isinstance(signature, DeviceSignature) or not isinstance(thread, Launches):
            return self(*inputs, **by_name)
        host = signature.host
        with thread.lock:
            arrays, sizes = host.arrays(inputs, by_name)
            if 0 in sizes.values() and (results := host.empty_results(arrays, sizes)) is not None:
                return results
            try:
                outputs = thread.run_from_host(arrays, sizes, self._packed)
            except MhsaError:
                raise
            except Exception as error:
                raise self._refusal(error, arrays, sizes) from error
            return host.results(outputs[0] if len(outputs) == 1 else outputs, arrays)

    def _cached(self, argument: object, inputs: tuple[Any, ...], by_name: dict[str, Any]) -> Any:
        x: Any = inputs[0] if inputs else by_name.get("x")
        cache = kv_cache.check_call(self.manifest, argument, x, self.device)
        outputs = self(*inputs, **cache.inputs(), **by_name)
        cache.advance(x.shape[1])
        pairs = zip(self.outputs, outputs, strict=True)
        results = {info.name: value for info, value in pairs if info.name not in self.manifest.in_place}
        return next(iter(results.values())) if len(results) == 1 else together(results)(results.values())

    def new_cache(self, batch: int | None = None, capacity: int | None = None) -> KVCache:
        """An empty cache for `batch` sequences of up to `capacity` positions; what was fixed at compile time is known.

        The artifacts of one spec share it, such as that of any L for prompts and that of L = 1 for steps. Raises
        InputError.
        """
        return kv_cache.new_cache(self.manifest, batch, capacity, self.device)

    @property
    def device(self) -> str:
        """The device that calls run on: "cpu", or "cuda:0" and the like."""
        return self._signature.device

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        return self.manifest.inputs

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        return self.manifest.outputs

    @property
    def threads(self) -> int:
        return self._thread.count

    @property
    def pool(self) -> str:
        """Whose threads this thread's last call ran on: "own", "openmp" (PyTorch's), or "tvm" (an old artifact's)."""
        return self._thread.pool

    def __repr__(self) -> str:
        inputs, outputs = (
            ", ".join(f"{info.name} ({', '.join(map(str, info.dims))})" for info in infos)
            for infos in (self.inputs, self.outputs)
        )
        return f"<CompiledAttention {inputs} -> {outputs}, threads={self.threads}>"

    def _repr_html_(self) -> str:
        """The card that a notebook shows: what the attention computes, where, and by which kernels."""
        from mhsa_compile.spec.picture import card, picture_of  # what only calls does not load it

        kernels = ", ".join(dict.fromkeys(op.kernel for op in self.manifest.ops))
        rows = [(info.name, f"({', '.join(map(str, info.dims))}) {info.dtype}") for info in self.inputs]
        rows += [(f"gives {info.name}", f"({', '.join(map(str, info.dims))}) {info.dtype}") for info in self.outputs]
        rows += [("runs on", f"{self.device}, {self.threads} threads"), ("kernels", kernels)]
        spec = self.manifest.spec
        return card("CompiledAttention", rows) if spec is None else picture_of("CompiledAttention", spec, more=rows)


PlainCall = Callable[[Sequence[Any], Sizes, Sequence[Any]], Any]


class BoundCall:
    """A call of the same arrays again and again: checked once, then only run. Several threads may run one at once.
    `run(arrays, sizes, values)` is the call itself; it wants `lock()` held.

        run = attention.bind(x, mask=mask)
        for batch in batches:
            x[...] = batch                 # each run reads what is in the arrays then
            y = run()
    """

    def __init__(
        self,
        signature: Signature,
        run: PlainCall,
        lock: Callable[[], Any],
        values: Sequence[Any],
        arrays: Sequence[Any],
        sizes: Sizes,
    ) -> None:
        """`arrays` are `values` as a signature made them ready. Raises InputError for some that would be copied."""
        self._copies = signature.copies(values, arrays)
        self._signature, self._run, self._lock, self._sizes = signature, run, lock, sizes
        self._values, self._arrays = list(values), list(arrays)
        self._bounded, self._empty = signature.has_bounds, 0 in sizes.values()
        adopt = tvm_runtime.start().ffi.from_dlpack
        self._tensors = [array if is_torch(array) or 0 in array.shape else adopt(array) for array in arrays]

    def __call__(self) -> Any:
        """What the attention itself returns. Raises InputError for numbers in the arrays that are out of bounds now."""
        for value, copy in self._copies:
            copy[...] = value
        if self._bounded:
            self._signature.check_values(self._arrays, self._sizes)
        with self._lock():
            if self._empty and (nothing := self._signature.empty_results(self._values, self._sizes)) is not None:
                return nothing
            return self._run(self._tensors, self._sizes, self._values)


class _Threads(threading.local):
    """What each calling thread has for itself: a VM, and what it says to the pool. Python makes it anew in each."""

    def __init__(self, runtime: tvm_runtime.Runtime, library: tvm_runtime.Library, settings: ThreadSettings) -> None:
        self.count, self.lock = settings.limit, runtime.calls.lock
        self.runtime, self._library = runtime, library
        self._sizes: Sizes = {}
        with self.lock:
            self._vm = library.new_vm()
            self._call_threads = _call_threads(library, settings)
            if self._call_threads is None:
                runtime.use_threads(settings.limit)

    def run(self, arrays: Sequence[Any], sizes: Sizes, packed: Sequence[Any]) -> Any:
        self._prepare(sizes)
        return self._vm.main(*arrays, *packed)

    def on(self, stream: Any) -> AbstractContextManager[None]:
        raise InputError("stream", "None: the artifact was compiled for a CPU", type(stream).__name__)

    @property
    def pool(self) -> str:
        """The pool whose threads ran this thread's last parallel loop."""
        return "tvm" if self._call_threads is None else self._call_threads.ran_on

    def captured(self, arrays: Sequence[Any], sizes: Sizes, packed: Sequence[Any]) -> list[KernelRun]:
        """The kernels that a call runs, noted by a VM of their own: this thread's stays without an instrument."""
        from mhsa_compile.runtime.profile.profile_call import capture

        self._prepare(sizes)
        return capture(self.runtime, self._library.new_vm(), [*arrays, *packed])

    @contextmanager
    def alone(self, sizes: Sizes) -> Iterator[None]:
        """Inside, kernels may be run by themselves, as in a call."""
        with self.lock:
            self._prepare(sizes)
            yield

    def _prepare(self, sizes: Sizes) -> None:
        if self._call_threads is None:
            self.runtime.ensure_threads(self.count)
        else:
            self._call_threads.say()
        if sizes != self._sizes:
            # Buffers of the last sizes would never be used again, nor freed.
            self.runtime.release_memory()
            self._sizes = sizes

    def bind(self, weights: list[Any], shared: SharedWeights | None) -> tuple[Any, ...]:
        """Packs the weights, and takes them out of their list; all threads share the result."""
        self._prepare({})
        packed = bound(self._vm.machine, weights, self._bind, shared)
        if shared is not None:  # who binds other weights to the same code may do so again and again
            large_pages.collapse(self.runtime.calls, packed)
        return packed

    def _bind(self, function: Callable[..., Any], weights: list[Any]) -> Any:
        packed = function(*map(self.runtime.ffi.from_dlpack, weights))
        self.runtime.release_memory()  # what lay between weights and packed ones
        return packed


def _call_threads(library: tvm_runtime.Library, settings: ThreadSettings) -> CallThreads | None:
    """The calling thread's settings; None for an artifact from before artifacts brought a pool. Raises InputError."""
    if settings.pool == "openmp" and (library.openmp is None or openmp_path(library.openmp) is None):
        hint = 'Import PyTorch before, or load with pool="auto".' if library.openmp else _AGAIN
        raise InputError("pool", '"openmp" where an OpenMP runtime is loaded', "none in this process", hint)
    return None if library.threads is None else CallThreads(library.threads, settings)
