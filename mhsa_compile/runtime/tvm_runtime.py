"""TVM's runtime, without its Python package and its compiler: 3 MB instead of 260, and no PyTorch.

    runtime = tvm_runtime.start()
    library = runtime.library(code, digest)   # a compiled module.so
    vm = library.new_vm()                     # one for each thread: a VM keeps its frames unlocked
    packed = weight_binding.bound(vm.machine, weights, call)
    y = vm.main(x, *packed)

Facts this file is built on, of TVM 0.27 and read in its sources (src/runtime: thread_pool.cc, threading_backend.cc,
memory/pooled_allocator.h), each seen in an experiment too:
- The thread pool belongs to the calling thread. It gets its size when it is first touched, by default half the hardware
  threads, and keeps it: later settings can only use fewer. Its first touch pins the caller.
- The memory pool keeps a freed buffer for requests of exactly its size, and never gives one back by itself: 300 lengths
  of one 768-wide layer kept 1.1 GB.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from mhsa_compile.errors import CALL_REFUSED, InputError, InstallationError
from mhsa_compile.files import proc, system, user_folders
from mhsa_compile.files.opened_once import mappable
from mhsa_compile.hardware import environment, host

_CPU, _CUDA, _POOLED = 1, 2, 2  # DLPack's device types; the VM's kind of memory allocator
_SPINS = ("TVM_THREAD_POOL_SPIN_COUNT", "1000")
"""How often an idle worker yields its CPU before it sleeps, unless the environment says otherwise: about 0.4 ms, enough
from one parallel loop to the next. TVM's own 300,000 took 0.12 s of CPU time after every call, which other libraries'
threads then lacked (docs/threads.md)."""
_RUNTIME, _FFI = {
    "windows": ("tvm_runtime.dll", "tvm_ffi.dll"),
    "macos": ("libtvm_runtime.dylib", "libtvm_ffi.dylib"),
}.get(host.system(), ("libtvm_runtime.so", "libtvm_ffi.so"))
_CUDART = "libcudart.so.13"
_SHARED_MEMORY = Path("/dev/shm")
_SHARE_ALL_CPUS = -3  # affinity mode: each worker may run on every CPU listed


Lock = Any  # threading.RLock is a function to type checkers


class CallsAtExit:
    """A lock for each thread, held while it is inside compiled code. As the interpreter ends it takes all of them, each
    once its call is over, and keeps them: no thread goes back in. A fork takes them for its moment.

    A thread that comes back from compiled code asks for the interpreter's lock. Where the interpreter has begun to end,
    Python (before 3.14) ends the thread there, by unwinding its stack; in it stands a destructor of TVM's binding that
    must not be unwound, and the process aborts. And a fork has none of the other threads, so what one of them had
    locked, such as TVM's memory, would stay so.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._registry = threading.RLock()
        self._locks: weakref.WeakSet[Lock] = weakref.WeakSet()
        self._own = threading.local()
        self._held: list[Lock] = []
        self.forks = 0  # so many have begun
        atexit.register(self._finish)
        if not system.IS_WINDOWS:  # which has no forks
            os.register_at_fork(
                before=self._acquire_for_fork, after_in_parent=self._release, after_in_child=self._release
            )

    @property
    def lock(self) -> Lock:
        """The calling thread's lock, to be held around whatever calls TVM."""
        lock = getattr(self._own, "lock", None)
        if lock is None:
            with self._registry:
                lock = self._own.lock = threading.RLock()
                self._locks.add(lock)
        return lock

    def _finish(self) -> None:
        if os.getpid() != self._process:
            return  # a fork: the threads that hold these locks do not exist in it
        self._acquire()

    def _acquire_for_fork(self) -> None:
        self._acquire()
        self.forks += 1

    def _acquire(self) -> None:
        self._registry.acquire()
        self._held = list(self._locks)
        for lock in self._held:
            lock.acquire()

    def _release(self) -> None:
        for lock in self._held:
            lock.release()
        self._registry.release()


@dataclass(frozen=True)
class Vm:
    """The functions of a compiled module, for one thread; `machine` has them all by name (`weight_binding`). `plan` is
    there on a GPU: see `caller_memory`."""

    machine: Any
    main: Callable[..., Any]
    plan: Callable[..., Any] | None
    instrument: Callable[[Any], None]


@dataclass(frozen=True)
class Library:
    """A mapped module.so. `threads` and `openmp` are of the pool that it brings (`threads/threads.c`); artifacts from
    before it have none, and run on TVM's."""

    module: Any

    @functools.cached_property
    def threads(self) -> Callable[..., Any] | None:
        return self._own("mhsa_threads")

    @functools.cached_property
    def openmp(self) -> Callable[..., Any] | None:
        return self._own("mhsa_openmp")

    @property
    def cpu_features(self) -> set[str]:
        """The CPU's features that its code needs, as it says itself; none of an artifact from before code said so."""
        tell = self._own("mhsa_cpu_features")
        return set() if tell is None else set(ctypes.string_at(int(tell())).decode().split())

    def _own(self, name: str) -> Callable[..., Any] | None:
        try:
            function: Callable[..., Any] = self.module.get_function(name, query_imports=True)
        except AttributeError:
            return None
        return function

    def new_vm(self, gpu: int | None = None) -> Vm:
        """A new VM on the CPU, or on a GPU with the CPU as its host."""
        vm = self.module["vm_load_executable"]()
        device = () if gpu is None else (_CUDA, gpu, _POOLED)
        vm["vm_initialization"](*device, _CPU, 0, _POOLED)
        plan = vm["plan"] if vm.implements_function("plan") else None
        return Vm(vm, vm["main"], plan, vm["set_instrument"])


@dataclass(frozen=True)
class Runtime:
    """TVM's runtime in this process."""

    ffi: Any
    process: int
    cpus: int
    calls: CallsAtExit
    _configure: Callable[[int, int, list[str]], None]
    _pool_threads: Callable[[], int]
    release_memory: Callable[[], None]
    _dtype: Callable[[str], Any]
    _view: Callable[[Any, Any, Any, int], Any]
    _allocate: Callable[[Any, Any, Any, None], Any]
    _copy: Callable[[Any, Any], None]
    _wait: Callable[[Any, int], None]
    nothing: Callable[..., Any]  # does as little as a function can
    _load: Callable[[str, str], Any]
    _libraries: dict[str, Library] = field(default_factory=dict)  # by digest

    def empty(self, shape: Sequence[int], dtype: str, gpu: int) -> Any:
        """A tensor of TVM's in a GPU's memory. Freeing it waits for the GPU."""
        device = self.ffi.device("cuda", gpu)
        return self._allocate(self.ffi.Shape(tuple(shape)), self._dtype(dtype), device, None)

    def on_gpu(self, arrays: Sequence[Any], gpu: int) -> list[Any]:
        """Tensors of TVM's with the same contents in a GPU's memory; those that lie there stay where they are."""
        tensors = []
        for tensor in map(self.ffi.from_dlpack, arrays):
            if tensor.device.type == "cpu":
                copy = self.empty(tensor.shape, str(tensor.dtype), gpu)
                self._copy(tensor, copy)
                tensor = copy
            tensors.append(tensor)
        self.wait(gpu)
        return tensors

    def to_host(self, tensor: Any) -> Any:
        """A tensor of TVM's in the host's memory with the contents of one in a GPU's."""
        copy = self._allocate(tensor.shape, tensor.dtype, self.ffi.device("cpu", 0), None)
        self._copy(tensor, copy)
        self.wait(tensor.device.index)
        return copy

    def wait(self, gpu: int, stream: int = 0) -> None:
        """Waits until the GPU has done what its default stream holds, or another one of this handle."""
        self._wait(self.ffi.device("cuda", gpu), stream)

    def reinterpreted(self, array: Any, dtype: str) -> Any:
        """A tensor of TVM's over the memory of `array`, whose elements are of the same size as those of `dtype`.

        NumPy's DLPack has no word for bfloat16, TVM's has: it goes in and out as uint16.
        """
        tensor = self.ffi.from_dlpack(array)
        return self._view(tensor, tensor.shape, self._dtype(dtype), 0)

    def library(self, code: bytes, digest: str) -> Library:
        """Maps a module.so, whose sha256 is `digest`: these very bytes, once for all who load them, and for ever.

        The dynamic linker knows libraries by the names they were opened with, and descriptors have the same ones again
        and again: an old library would answer to the name. So it spells the digest, in slashes and dots that lead
        nowhere. And the descriptor stays open: the first error that TVM raises opens all libraries by their names, for
        its backtrace. Whatever file had the number by then would be read as a library, and an empty one is a SIGBUS.
        """
        with self.calls.lock:
            library = self._libraries.get(digest)
            if library is None:
                library = self._libraries.setdefault(digest, Library(self._map(code, digest)))
        return library

    def _map(self, code: bytes, digest: str) -> Any:
        if system.IS_WINDOWS:
            return self._mapped_from_cache(code, digest)
        if not proc.is_mounted():
            return self._mapped_from_disk(code, digest)
        suffix = "".join("/." if bit == "1" else "/" for bit in f"{int(digest[:16], 16):064b}")
        handle = mappable(code, "module.so")
        try:
            return self._load(f"/proc/self/fd{suffix}/{handle}", "so")
        except BaseException:
            os.close(handle)
            raise

    def _mapped_from_disk(self, code: bytes, digest: str) -> Any:
        """Maps a file that is gone when this returns, in a folder of this process's alone: what has no name has no path
        where there is no /proc."""
        import tempfile

        reasons = []
        for place in (user_folders.temporary_place(), _SHARED_MEMORY, user_folders.cache_home()):
            try:
                with tempfile.TemporaryDirectory(prefix="mhsa_compile-", dir=place) as folder:
                    path = Path(folder, f"{digest}.so")
                    path.write_bytes(code)
                    return self._load(str(path), "so")
            except (OSError, RuntimeError) as error:
                reasons.append(f"{place}: {' '.join(str(error).split())}")
        raise InstallationError(
            "/proc",
            "mounted, or a folder for temporary files from which code may be mapped",
            "; ".join(reasons),
            "Mount /proc, or point TMPDIR to a folder that is not mounted noexec.",
        )

    def _mapped_from_cache(self, code: bytes, digest: str) -> Any:
        """Maps a file in the user's cache, by its hash: Windows removes no file that is mapped, so each process finds
        what another left. What is there is held against the code."""
        from mhsa_compile.files import atomic_write

        place = user_folders.cache_home() / "mhsa_compile" / "code"
        place = place if user_folders.can_write(place) else user_folders.spare()
        path = place / f"{digest}.dll"
        if not path.is_file() or path.read_bytes() != code:
            atomic_write.write(path, code, f"file {str(path)!r}")
        return self._load(str(path), "so")

    def use_threads(self, threads: int) -> None:
        """Makes the calling thread's parallel loops use `threads` from now on. Its affinity stays as it is.

        Raises InputError where its pool, touched before by someone else, is too small.
        """
        cpus = system.cpus()
        # The first call creates the pool, with as many workers as it names CPUs, and room for whoever comes later; the
        # second lets all of them run on the caller's CPUs, which it names at least `threads` times.
        for size in (max(threads, self.cpus), max(threads, len(cpus))):
            self._configure(_SHARE_ALL_CPUS, threads, [str(cpu) for cpu in islice(cycle(cpus), size)])
        if (size := self._pool_threads()) != threads:
            raise InputError(
                "threads",
                f"at most {size} in this thread of Python's: its first load or call made a pool of so many, which TVM "
                "cannot enlarge",
                str(threads),
                f"Load what uses {threads} before anything else, or load and call it in a threading.Thread of its own, "
                f"or load with threads={size}.",
            )

    def ensure_threads(self, threads: int) -> None:
        """The quick form of `use_threads`, for a thread that has called that before; to be called before each run."""
        if threads > 1 and os.getpid() != self.process:
            raise InputError(
                "process",
                "the one that loaded TVM, or threads=1",
                "a fork of it, which has none of its threads",
                "Start processes with the method 'spawn', or load only after the fork.",
            )
        if self._pool_threads() != threads:
            self.use_threads(threads)


@functools.cache
def start() -> Runtime:
    """Loads TVM's runtime. Raises InstallationError for a pair of packages that would crash."""
    library = _library(_RUNTIME)
    os.environ.setdefault(*_SPINS)  # read when the first pool starts
    tvm_ffi = _binding()
    if system.IS_WINDOWS:  # Microsoft's C++ library, which the package brings
        with suppress(OSError):
            os.add_dll_directory(str(library.parents[2] / "apache_tvm.libs"))  # type: ignore[attr-defined]
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    function = tvm_ffi.get_global_func
    return Runtime(
        ffi=tvm_ffi,
        process=os.getpid(),
        cpus=host.allowed_cpus(),
        calls=CallsAtExit(),
        _configure=function("runtime.config_threadpool"),
        _pool_threads=function("runtime.NumThreads"),
        release_memory=function("vm.builtin.memory_manager.clear"),
        _dtype=functools.cache(tvm_ffi.dtype),  # a microsecond each time
        _view=function("runtime.TVMTensorCreateView"),
        _allocate=function("runtime.TVMTensorAllocWithScope"),
        _copy=function("runtime.TVMTensorCopyFromTo"),
        _wait=function("runtime.Device_StreamSync"),
        nothing=tvm_ffi.get_global_func("testing.nop", allow_missing=True) or function("ffi.Array"),
        _load=function("ffi.Module.load_from_file.so"),
    )


@contextmanager
def importing() -> Iterator[None]:
    """Imports TVM's binding while the block does what leaves Python's lock to others, such as reading files: it takes a
    tenth of the time to a first result. What is wrong with the binding `start` says."""
    thread = threading.Thread(target=_import_quietly, daemon=True)
    started = "tvm_ffi" not in sys.modules and host.allowed_cpus() > 1
    if started:
        try:
            thread.start()
        except RuntimeError:  # no more threads for this process
            started = False
    try:
        yield
    finally:
        if started:
            thread.join()


def _import_quietly() -> None:
    with suppress(Exception):
        environment.tvm_libraries()  # refuses a pair that would crash
        _binding()


def _binding() -> Any:
    with without_torch():
        import tvm_ffi
    return tvm_ffi


@functools.cache
def start_cuda() -> Runtime:
    """Loads TVM's runtime with the part for NVIDIA's GPUs, which needs the driver and CUDA's runtime. Raises
    InstallationError."""
    runtime = start()
    try:
        _load_cudart()
        ctypes.CDLL(str(_library("libtvm_runtime_cuda.so")))
    except OSError as error:
        next_step = "Run: pip install --force-reinstall apache-tvm"
        raise InstallationError("apache-tvm", "its runtime for CUDA", str(error), next_step) from error
    return runtime


def _load_cudart() -> None:
    """CUDA's runtime, by the name by which TVM's part asks for it: the one that is there already (PyTorch brings it),
    the system's, or that of NVIDIA's package."""
    with suppress(OSError):
        ctypes.CDLL(_CUDART, ctypes.RTLD_GLOBAL)
        return
    for folder in environment.nvidia_folders():
        if (path := folder / "lib" / _CUDART).is_file():
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
            return
    raise InstallationError("CUDA's runtime", _CUDART, "none", "Run: pip install 'mhsa-compile[cuda]'")


def refusal(error: Exception) -> str | None:
    """What compiled code said as it refused a value, if that is what `error` is; see `errors.CALL_REFUSED`."""
    ffi_error = getattr(error, "__tvm_ffi_error__", None)
    return str(ffi_error.message) if ffi_error is not None and ffi_error.kind == CALL_REFUSED else None


def libraries(on_gpu: bool) -> list[Path]:
    """The libraries in which an artifact's code finds the functions that it calls by name."""
    ours = [_library(_RUNTIME), *([_library("libtvm_runtime_cuda.so")] if on_gpu else [])]
    return [Path(start().ffi.__file__).parent / "lib" / _FFI, *ours]


def _library(name: str) -> Path:
    """A library of TVM's. Raises InstallationError."""
    folder = environment.tvm_libraries()
    if (path := folder / name).is_file():
        return path
    if folder == environment.RUNTIME_LIBRARIES:
        next_step = f"Run: pip install 'apache-tvm=={environment.TESTED_TVM}', whose libraries are taken then."
        raise InstallationError("mhsa-runtime", f"{name} in its wheel", "none", next_step)
    next_step = "Run: pip install --force-reinstall apache-tvm"
    raise InstallationError("apache-tvm", f"lib/{name} in its package", "none", next_step)


@contextmanager
def without_torch() -> Iterator[None]:
    """TVM imports PyTorch where it is installed, which takes a second; it works without, torch tensors included.

    Only for this thread: another may be importing PyTorch at this moment.
    """
    finder = _RefuseTorch(threading.get_ident())
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@dataclass(frozen=True, eq=False)
class _RefuseTorch:
    thread: int

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "torch" and threading.get_ident() == self.thread:
            raise ModuleNotFoundError("hidden while TVM is imported", name=fullname)
