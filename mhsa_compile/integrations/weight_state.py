"""Whether a weight is what it was when it was bound, asked in each call and answered in a microsecond.

PyTorch counts writes in a tensor's version. Past that counter write its fused optimizers, whoever writes into `.data`
(libraries that merge adapters do), NumPy's views, and inference tensors, which have none. So a sample of the numbers is
compared as well: SAMPLES of them, at a step that no row and no column of a matrix escapes for long.

What replaces a layer's forward, `ReplacedForward`, asks it.
"""

from __future__ import annotations

import copyreg
import ctypes
import math
import operator
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mhsa_compile.errors import OutputError
from mhsa_compile.integrations.call_context import StandsForFunction, is_recorded, why_watched
from mhsa_compile.integrations.first_calls import FirstCalls
from mhsa_compile.runtime.compiled_attention import CompiledAttention
from mhsa_compile.spec.float32_products import coarsest

SAMPLES = 256
"""Numbers of one weight. An edit of a part p of the numbers, spread evenly, is missed with (1 - p) ** 256: of 2 %, in
one case of 170. A block of rows is never missed from one row in 256 on."""
_MOST_SAMPLES, _LEAST_SAMPLES = 4096, 16
"""Numbers of all weights of a graph together; of each, however many there are."""
MOST_SETS = 4
"""Sets of weights that one layer keeps packed: programs that change between adapters have them in turns."""


_address, _version = Tensor.data_ptr, operator.attrgetter("_version")
_to_storage: Callable[[Any], Any] = StorageWeakRef
_is_gone = torch.UntypedStorage._expired
Kind = TypeVar("Kind", bound=Hashable)
Result = TypeVar("Result")


class WeightStates:
    """Weights as they were bound, which they do not keep alive; None stands for one that a layer lacks.

    Weights are known by their memory, not by their objects: two objects of one memory have the same numbers, and
    PyTorch swaps no object to which a weak reference is.

    `read_alike`: somebody else sees to it that the memory is read as it was, by its shape, strides and dtype.
    """

    def __init__(self, weights: Sequence[Tensor | None] = (), *, read_alike: bool = False) -> None:
        samples = max(_LEAST_SAMPLES, min(SAMPLES, _MOST_SAMPLES // max(1, len(weights))))
        present = [weight for weight in weights if weight is not None]
        self._read_alike, self._present = read_alike, [weight is not None for weight in weights]
        self._counted = not any(weight.is_inference() for weight in present)
        self._storages: list[Any] = [_to_storage(weight.untyped_storage()) for weight in present]
        self._references = [storage.cdata for storage in self._storages]
        self._places = _views([_places(weight, samples) for weight in present if weight.numel()])
        self._addresses, self._objects = list(map(_address, present)), list(map(id, present))
        self._forms, self._samples = self._forms_of(present), self._read()

    def hold(self, weights: Sequence[Tensor | None]) -> bool:
        """Whether these are the weights that were bound, in number, too, with the same numbers as far as is seen."""
        if [weight is not None for weight in weights] != self._present:
            return False
        present = [weight for weight in weights if weight is not None]
        try:
            if list(map(_address, present)) != self._addresses or self.are_gone():
                return False
            # their memory is there, since they are
            return self._forms_of(present) == self._forms and self._read() == self._samples
        except RuntimeError:  # of weights without memory, or without a count of writes
            return False

    def are_gone(self) -> bool:
        """Whether memory of some of the weights was given back: no call can have them any more."""
        return any(map(_is_gone, self._references))

    def are_where(self, others: WeightStates) -> bool:
        """Whether they lay where other weights lie, which are written over them."""
        return self._addresses == others._addresses

    def are_moved(self, others: WeightStates) -> bool:
        """Whether some of their objects have other memory among others, as by `.data =`: of what is written into the
        memory that they had, their counts tell nothing."""
        then = dict(zip(self._objects, self._addresses, strict=True))
        now = zip(others._objects, others._addresses, strict=True)
        return any(then.get(one, address) != address for one, address in now)

    def _forms_of(self, weights: Sequence[Tensor]) -> tuple[list[Any], ...]:
        """PyTorch's counts of writes, and how the numbers of each are read."""
        versions = map(_version, weights) if self._counted else (_version(w) for w in weights if not w.is_inference())
        return list(versions), [] if self._read_alike else list(map(_reading, weights))

    def _read(self) -> list[bytes]:
        return [memory.take(index).tobytes() for memory, index in self._places]


def _reading(weight: Tensor) -> tuple[Any, ...]:
    return weight.shape, weight.stride(), weight.dtype, weight.is_neg()


def _places(weight: Tensor, samples: int) -> tuple[int, np.ndarray]:
    """(the bytes of a number, the addresses of those that are compared)."""
    size, strides = weight.element_size(), np.array(weight.stride(), np.int64)
    order = sorted(range(weight.ndim), key=lambda axis: int(strides[axis]), reverse=True)
    shape = tuple(weight.shape[axis] for axis in order)
    numbers = np.arange(0, weight.numel(), _step(weight.numel(), shape[-1] if shape else 1, samples))
    steps = zip(np.unravel_index(numbers, shape) if shape else (), strides[order], strict=True)
    return size, weight.data_ptr() + size * sum((place * stride for place, stride in steps), np.zeros_like(numbers))


def _views(places: Sequence[tuple[int, np.ndarray]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each size of numbers: a view of the memory from the first of the addresses to the last, and an index into it.
    One look at all of them takes as long as one at each of two weights."""
    views = []
    for size in sorted({size for size, _ in places}):
        addresses = np.concatenate([one for other, one in places if other == size])
        first = int(addresses.min())
        memory: Any = (ctypes.c_ubyte * (int(addresses.max()) + size - first)).from_address(first)
        offsets = addresses - first
        if (offsets % size).any():  # numbers that do not begin at multiples of their size
            views.append((np.frombuffer(memory, np.uint8), (offsets[:, None] + np.arange(size)).ravel()))
        else:
            views.append((np.frombuffer(memory, f"u{size}" if size <= 8 else f"V{size}"), offsets // size))
    return views


def _step(elements: int, row: int, samples: int) -> int:
    """The step between samples: of no divisor in common with a row's length, so that all columns have their turn."""
    step = max(1, elements // samples)
    while step > 1 and math.gcd(step, row) > 1:
        step += 1
    return step


def _why_no_memory(weights: Sequence[Tensor | None]) -> str:
    """Why no artifact can read weights where they lie; "" if one can."""
    layouts = {str(weight.layout) for weight in weights if weight is not None}
    odd = sorted(layouts - {str(torch.strided)})
    return f"weights that are {odd[0].removeprefix('torch.')}" if odd else ""


def no_room(error: OutputError) -> str:
    """Why PyTorch computes a call whose artifact no file could hold."""
    return f"no room for what is compiled ({error.argument}: {error.got})"


class LayerInUse(NamedTuple):
    """A layer whose forward is replaced, and what its calls turn to.

    load         gives the artifact for what `_source` says of a kind of call, with these weights
    left         is told why PyTorch computes a call
    first_calls  holds first calls against PyTorch's
    refreshes    how often all weights were to be bound anew
    repacked     is told in how many seconds weights were packed that had changed
    """

    layer: Any
    load: Callable[..., CompiledAttention]
    left: Callable[[str], None]
    first_calls: FirstCalls
    refreshes: Callable[[], int]
    repacked: Callable[[float], None]


class _WeightSet(NamedTuple):
    """Weights that were bound: as they were, an artifact for each kind of call or why there is none, and how often all
    had been bound anew by then."""

    states: WeightStates
    artifacts: Mapping[Any, CompiledAttention | str]
    refreshes: int


class ReplacedForward(StandsForFunction, Generic[Kind, Result]):
    """The forward of a layer whose calls run on artifacts. Weights are bound for each kind of call when it is first
    met, and again when they changed; of sets of weights that take turns some stay bound. Calls that an artifact has no
    form for are PyTorch's.

    Any number of threads may call at once; one of them binds. Where it `is_restored`, whoever holds it still gets what
    the layer's own forward gives.
    """

    def __init__(self, use: LayerInUse) -> None:
        self._use, self._class = use, type(use.layer)
        self._layer, self._load, self._left, self._first_calls, self._refreshes, _ = use
        self._lock = threading.Lock()
        self._bound: tuple[_WeightSet, ...] = ()  # the newest first
        self.is_restored = False

    def _function(self) -> Any:
        return type(self._layer).forward.__get__(self._layer)

    def _is_pytorchs(self) -> bool:
        """Whether a call is PyTorch's with nothing asked of the layer. While PyTorch records a program, its call is as
        right; what watches operators sees nothing of an artifact's, which counts."""
        if self.is_restored or is_recorded():
            return True
        if why := why_watched():
            self._left(why)
        return bool(why)

    def __reduce__(self) -> Any:  # a copy binds its own weights
        return copyreg.__newobj__, (type(self),), self._arguments()  # type: ignore[attr-defined]

    def __setstate__(self, arguments: tuple[Any, ...]) -> None:
        """Begins a copy, which is known by now: the layer among the arguments has it, and there is to be one."""
        type(self).__init__(self, *arguments)

    def _arguments(self) -> tuple[Any, ...]:
        """What this was made with."""
        return (self._use,)

    def forget(self) -> None:
        """Lets go of what is bound: the next call binds the weights again."""
        with self._lock:
            self._bound = ()

    def _by_pytorch(self, *arguments: Any, why: str = "") -> Result:
        """What PyTorch's own forward gives, which is left the call for a reason that counts."""
        if why:
            self._left(why)
        result: Result = type(self._layer).forward(self._layer, *arguments)
        return result

    def _weights(self) -> tuple[Tensor | None, ...]:
        """The layer's weights as they are now; None stands for one that it lacks."""
        raise NotImplementedError

    def _why_unbound(self) -> str:
        """Why an artifact cannot have the weights as they are now; "" if it can. It is asked where they are new."""
        return ""

    def _source(self, kind: Kind) -> tuple[Any, Mapping[str, Any]]:
        """What is compiled for a kind of call, and the weights by their names in it."""
        raise NotImplementedError

    def _why_changed(self) -> str:
        """Why PyTorch is to compute all calls; "" if the layer is what it was, and none of its calls was wrong."""
        if self._first_calls.wrong or type(self._layer) is self._class:
            return self._first_calls.wrong
        return f"a layer that became a {type(self._layer).__name__}"

    def _compiled(self, kind: Kind) -> CompiledAttention | str:
        """The artifact for this kind of call, with the weights as they are now; or why none can have them.

        Where no file can grow, which compiling and loading need, a warning says so, and so it stays until the weights
        change or are forgotten: to try with each call would cost seconds.
        """
        weights, refreshes = self._weights(), self._refreshes()
        bound = self._set_of(weights, refreshes)
        if bound is not None and kind in bound.artifacts:
            return bound.artifacts[kind]
        # modules draw the weights that they begin with, and a caller's torch.device() may be another
        with self._lock, torch.random.fork_rng(devices=()), torch.device("cpu"):
            bound = self._set_of(weights, refreshes)
            if bound is None:
                if reason := self._why_unbound() or _why_no_memory(weights):
                    return reason
                bound = _WeightSet(WeightStates(weights), {}, refreshes)
            if kind not in bound.artifacts:
                bound = bound._replace(artifacts={**bound.artifacts, kind: self._bound_or_why(kind)})
                self._bound = (bound, *self._others_of(bound))[:MOST_SETS]
            return bound.artifacts[kind]

    def _set_of(self, weights: Sequence[Tensor | None], refreshes: int) -> _WeightSet | None:
        """What is bound of these weights; None where they are new."""
        for bound in self._bound:
            if bound.refreshes == refreshes and bound.states.hold(weights):
                return bound
        return None

    def _others_of(self, bound: _WeightSet) -> list[_WeightSet]:
        """What is bound of other weights, which a call may have again."""
        now, then = bound.states, bound.refreshes
        alike = [one for one in self._bound if one.refreshes == then and not one.states.are_gone()]
        return [one for one in alike if not (one.states.are_where(now) or one.states.are_moved(now))]

    def _bound_or_why(self, kind: Kind) -> CompiledAttention | str:
        is_new = not any(kind in bound.artifacts for bound in self._bound if bound.refreshes == self._refreshes())
        begin = time.perf_counter()
        try:
            compiled = self._load(*self._source(kind))
        except OutputError as error:
            why = no_room(error)
            rest = "PyTorch computes such calls until the weights change or report.refresh() is called"
            warnings.warn(f"{why}; {rest}. {error.next_step}", stacklevel=5)
            return why
        checks = self._first_calls
        checks.products = coarsest(checks.products, compiled.manifest.coarsest_products)
        if not is_new:
            self._use.repacked(time.perf_counter() - begin)
        return compiled
