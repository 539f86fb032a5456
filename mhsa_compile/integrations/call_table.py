"""The artifacts that calls of models run on: compiled when a kind of call is first met, and then kept by the process.

How operands of one shape, as they lie in memory, reach their artifact is worked out once, a `CallPlan`; a call then is
a few views.

Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from mhsa_compile.compiler import pipeline
from mhsa_compile.hardware.profile import TargetProfile
from mhsa_compile.integrations.attention_graph import AttentionCall, Layout, graph_of
from mhsa_compile.runtime.compiled_attention import CompiledAttention, load
from mhsa_compile.spec.float32_products import Float32Request


class CallPlan:
    """The calls of operands with the shapes and strides of q (B, H, L, E), k (B, G, S, E) and v (B, G, S, F).

    compiled  their artifact
    layout    how it reads keys and values
    """

    def __init__(self, compiled: CompiledAttention, layout: Layout, q: Tensor, k: Tensor, v: Tensor) -> None:
        self._compiled, self._by_rows = compiled, layout == "rows"
        (B, H, L, E), F = q.shape, v.shape[3]
        self._rows, self._y = (B, L, H * E), (B, L, H, F)
        self._q = _rows_of(q)
        self._k, self._v = (_rows_of(k), _rows_of(v)) if self._by_rows else (None, None)

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *others: Tensor | None) -> Tensor:
        """y (B, L, H, F); operands as in `attention_operator.attend`, None where there is none."""
        q = q.transpose(1, 2).reshape(self._rows) if self._q is None else q.as_strided(*self._q)
        if self._k is not None and self._v is not None:
            k, v = k.as_strided(*self._k), v.as_strided(*self._v)
        inputs = [q, k, v]
        if mask is not None:
            inputs.append(_as_small_as_it_is(mask))
        y: Tensor = self._compiled(*inputs, *(x for x in others if x is not None))
        return y.view(self._y)


def _rows_of(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The size and strides of x (B, H, L, E) as rows (B, L, H * E); None where they do not lie in memory so."""
    if not x.transpose(1, 2).is_contiguous():
        return None
    B, H, L, E = x.shape
    return (B, L, H * E), (L * H * E, H * E, 1)


def _as_small_as_it_is(mask: Tensor) -> Tensor:
    """A mask without the repetitions of an expanded one, which a call would copy."""
    for axis in range(3):
        if mask.shape[axis] > 1 and mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    return mask


class CallTable:
    """Kinds of calls and their artifacts, two for each: for any length, and for a single query. Any number of threads
    may ask at once; one of them compiles."""

    def __init__(self, target: str | TargetProfile = "native") -> None:
        self._target = target
        self._products: Float32Request = "auto"
        self._lock = threading.Lock()
        self._loaded: dict[tuple[AttentionCall, bool], CompiledAttention] = {}
        # of calls all of whose siblings are loaded
        self._complete: dict[tuple[AttentionCall, bool, bool, bool], CompiledAttention] = {}
        self._checks, self._checked = True, set[tuple[object, ...]]()
        self._left: set[AttentionCall] = set()
        self.plans: dict[Hashable, CallPlan] = {}  # of calls that were right; let go of with what they stand on

    def use(
        self, target: str | TargetProfile, *, check: bool = True, float32_products: Float32Request = "auto"
    ) -> None:
        """Sets the target that calls are compiled for from now on, and how float32 is to be multiplied; what was
        compiled otherwise is let go. `check`: whether first calls are held against PyTorch's."""
        with self._lock:
            if (target, float32_products) != (self._target, self._products):
                self._target, self._loaded, self._complete = target, {}, {}
                self._products = float32_products
                self._checked, self._left, self.plans = set(), set(), {}
            elif check and not self._checks:
                self.plans = {}
            self._checks = check

    def __len__(self) -> int:
        return len(self._loaded)

    def float32_outcomes(self) -> dict[str, int]:
        """What became of `float32_products` -> of how many artifacts, where there is something to say."""
        outcomes = Counter(compiled.manifest.float32_outcome() for compiled in list(self._loaded.values()))
        return {outcome: number for outcome, number in outcomes.items() if outcome}

    def get(self, call: AttentionCall, *, one_query: bool, causal: bool, windowed: bool) -> CompiledAttention:
        """The artifact of a kind of call, which is compiled if it is new, together with all that differs from it by
        lengths alone; `causal` and `windowed` as in `siblings`."""
        key = (call, one_query, causal, windowed)
        if (compiled := self._complete.get(key)) is not None:
            return compiled
        with self._lock, torch.random.fork_rng(devices=()):
            for kind in siblings(call, causal=causal, windowed=windowed):
                for variant, one in ((kind, False), (kind.of_one_query, True)):
                    if (variant, one) not in self._loaded:
                        artifact = pipeline.compile(
                            graph_of(variant, one_query=one), self._target, float32_products=self._products
                        )
                        self._loaded[variant, one] = load(artifact)
            compiled = self._loaded[(call.of_one_query, True) if one_query else (call, False)]
            self._complete[key] = compiled
            return compiled

    def check(self, call: AttentionCall, q: Tensor, mask: Tensor | None, difference: Callable[[], str]) -> str:
        """What is wrong with a first call of its kind (one query or several, a mask of these axes; q is (B, H, L, E)),
        as `difference` says; "" for other calls."""
        axes = None if mask is None else tuple(size == 1 for size in mask.shape)
        kind, checked = (call, q.shape[2] == 1, axes), self._checked
        if not self._checks or kind in checked:
            return ""
        wrong = difference()
        checked.add(kind)  # not before: other threads' first calls are as unsure, and a check may be cut short
        return wrong

    def is_left(self, call: AttentionCall) -> bool:
        """Whether calls of this kind are PyTorch's, since one of them was wrong."""
        return bool(self._left) and call._replace(kv_layout="heads") in self._left

    def leave(self, call: AttentionCall, why: str) -> None:
        """Leaves calls of this kind to PyTorch, with a warning."""
        self._left.add(call._replace(kv_layout="heads"))
        self.plans = {}
        warnings.warn(f"attention of {call.H} heads of {call.E}: {why}; PyTorch computes such calls", stacklevel=4)

    def layout(self, call: AttentionCall, k: Tensor, v: Tensor) -> Layout:
        """How to read k (B, S, G, E) and v, which are seen by rows: as they lie, and where they may be read either way,
        as was compiled for."""
        if not (k.is_contiguous() and v.is_contiguous()):
            return "heads"
        if not (k.transpose(1, 2).is_contiguous() and v.transpose(1, 2).is_contiguous()):
            return "rows"
        layouts = {kind.kv_layout for kind, _ in self._loaded if kind._replace(kv_layout=call.kv_layout) == call}
        return "rows" if layouts == {"rows"} else "heads"


def siblings(call: AttentionCall, *, causal: bool, windowed: bool) -> list[AttentionCall]:
    """A kind of call, and those that the same layer makes once its sequences are longer or shorter.

    causal     the layer is causal wherever no mask says so: a cache that was there before brings one
    windowed   it has a window, which is a mask from the length on where it hides something, and from which on some
               caches hand over the new keys as they are instead of their buffers
    """
    kinds = [call]
    if causal or windowed:
        bias = call.mask == "additive"
        if not bias:
            kinds.append(call._replace(causal=causal, mask=None))
        if not bias or call.causal:
            kinds.append(call._replace(causal=False, mask="additive" if bias else "bool"))
    if windowed:
        layouts: tuple[Layout, Layout] = ("rows", "heads")
        kinds += [kind._replace(kv_layout=layout) for kind in kinds for layout in layouts]
    return list(dict.fromkeys(kinds))


IMPLEMENTATION = "mhsa"
"""The attn_implementation of models that ask for nothing of their own."""
TABLES = {IMPLEMENTATION: CallTable()}
"""The call tables of this process, by attention implementation: models come and go, and those of one shape share what
was compiled."""
