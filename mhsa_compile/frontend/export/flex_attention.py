"""Modules that call torch.nn.attention.flex_attention, while they are exported: each call becomes one operator, with
its functions as traced steps.

torch.export would trace the call itself, and with it how a block mask is laid out, which no ONNX operator says and no
symbolic length survives. So what flex_attention hands its functions to is another here, and a block mask that is made
meanwhile has no blocks: what it hides is its mask_mod alone.
Source: torch.nn.attention.flex_attention (https://pytorch.org/docs/stable/nn.attention.flex_attention.html)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention import flex_attention as flex
from torch.onnx.ops import symbolic, symbolic_multi_out
from torch.utils._python_dispatch import _disable_current_modes

from mhsa_compile.errors import ModelError, SpecError
from mhsa_compile.nn import mhsa_operator
from mhsa_compile.nn.score_functions import MOST_PAIRS
from mhsa_compile.nn.score_tracing import ASKED, WHITELIST, UserFunction, as_kernels_read, trace, with_named_arguments
from mhsa_compile.spec.attention_spec import DOMAIN
from mhsa_compile.spec.score_functions import ScoreFunction, TensorKind

_NAME = "flex_attention"
_UNCOMPILED = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
_ANY = 7  # a size that no function looks at


@contextmanager
def as_operators() -> Iterator[None]:
    """Inside, calls of flex_attention in this thread become operators."""
    names = ("flex_attention_hop", "create_mask", "_convert_mask_to_block_mask", "_create_sparse_block_from_block_mask",
             "_create_empty_block_mask")  # fmt: skip
    theirs = {name: getattr(flex, name) for name in (*names, _UNCOMPILED)}
    calls, owner = _Calls(theirs["create_mask"]), threading.get_ident()
    ours: tuple[UserFunction, ...] = (calls.attend, _nothing, _two_of_nothing, calls.without_blocks, calls.empty)
    try:
        for name, function in zip(names, ours, strict=True):
            setattr(flex, name, _in_thread(owner, function, theirs[name]))
        setattr(flex, _UNCOMPILED, True)  # else Dynamo would follow what it calls
        yield
    finally:
        for name, value in theirs.items():
            setattr(flex, name, value)


def _in_thread(owner: int, function: UserFunction, other: UserFunction) -> UserFunction:
    """`function` in thread `owner`, in every other thread what was there."""
    return lambda *args, **kwargs: (function if threading.get_ident() == owner else other)(*args, **kwargs)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in for `create_mask`, which would make a mask of all pairs."""


def _two_of_nothing(*args: Any, **kwargs: Any) -> tuple[None, None]:
    """Stands in for what lists the blocks of a mask of all pairs, partial and whole."""
    return None, None


class _Calls:
    """What stands in for the parts of flex_attention during one export. `counts`, one of each block mask that is made
    here, tell these, whose mask_mod says all, from others."""

    def __init__(self, create_mask: UserFunction) -> None:
        self.create_mask = create_mask
        self.counts: list[Tensor] = []

    def without_blocks(
        self, masks: Any, mask_mod: UserFunction, seq_lengths: tuple[int, int], *blocks: int, **kwargs: int
    ) -> flex.BlockMask:
        """A block mask whose one block is partial."""
        return self._of_one_block(mask_mod, seq_lengths, flex._DEFAULT_SPARSE_BLOCK_SIZE)

    def empty(self, query: Tensor, key: Tensor) -> flex.BlockMask:
        """The block mask of a call without one."""
        return self._of_one_block(flex.noop_mask, (1, 1), flex._LARGE_SPARSE_BLOCK_SIZE)

    def _of_one_block(self, mask_mod: UserFunction, seq_lengths: tuple[int, int], size: int) -> flex.BlockMask:
        count, indices = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
        block_mask = flex.BlockMask.from_kv_blocks(
            count, indices, BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=seq_lengths, compute_q_blocks=False
        )
        self.counts.append(block_mask.kv_num_blocks)
        return block_mask

    def attend(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Makes one call of flex_attention the operator. Raises ModelError."""
        block_mask = args[4]
        is_own = any(block_mask[2] is count for count in self.counts)
        if not is_own and not _outside_trace(lambda: self._say_the_same(block_mask)):
            expected = "a block mask whose blocks hide what its mask_mod hides, and no more"
            hint = "Make it by create_block_mask in the module's forward: its mask_mod is what counts."
            raise ModelError("block_mask", expected, "one of which that cannot be shown", hint)
        return _operator(*args)

    def _say_the_same(self, block_mask: tuple[Any, ...]) -> bool:
        """Whether the blocks of a mask that was made before list all pairs that its mask_mod shows, and those that are
        listed as whole no others."""
        (q_len, kv_len), sizes, mask_mod = block_mask[:2], block_mask[-3:-1], block_mask[-1]
        counts, indices, whole_counts, whole_indices = block_mask[2:6]
        tensors = [tensor for tensor in block_mask[2:6] if tensor is not None]
        if not all(type(tensor) is Tensor for tensor in tensors) or not isinstance(q_len * kv_len, int):
            return False
        B, H = counts.shape[:2]
        if B * H * q_len * kv_len > MOST_PAIRS:
            return False
        with torch.no_grad():
            try:
                visible = self.create_mask(mask_mod, B, H, q_len, kv_len, device="cpu")
            except Exception:  # it captures what is being traced
                return False
            partial = _pairs(counts, indices, sizes, (q_len, kv_len))
            whole = torch.zeros_like(partial)
            if whole_counts is not None:
                whole = _pairs(whole_counts, whole_indices, sizes, (q_len, kv_len))
        return not bool((visible & ~(partial | whole)).any() or (whole & ~visible).any())


def _outside_trace(question: Callable[[], bool]) -> bool:
    """The answer to a question that is asked in another thread, where nobody follows what PyTorch computes."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(question).result()


def _pairs(counts: Tensor, indices: Tensor, sizes: tuple[int, int], lengths: tuple[int, int]) -> Tensor:
    """(B, H, L, S): the pairs of the blocks that are listed."""
    columns = -(-lengths[1] // sizes[1])
    blocks = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool)
    listed = torch.arange(indices.shape[-1]) < counts[..., None]
    blocks.scatter_(-1, torch.where(listed, indices, columns).long(), True)
    pairs = blocks[..., :columns].repeat_interleave(sizes[0], -2).repeat_interleave(sizes[1], -1)
    return pairs[..., : lengths[0], : lengths[1]]


def _operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: UserFunction,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: Mapping[str, Any],
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, each row's log-sum-exp to base 2 or nothing, nothing) of query (B, H, L, E), key (B, G, S, E) and value
    (B, G, S, F).

    Raises ModelError for what the operator has no words for.
    """
    if kernel_options.get("OUTPUT_MAX"):  # PyTorch itself refuses it on CPUs, so far
        hint = "AuxRequest(lse=True) is the largest score and what the others add to it."
        raise ModelError(_NAME, "a call for its output, or for lse, too", "AuxRequest(max_scores=True)", hint)
    if query.shape[0] != key.shape[0]:
        raise ModelError(_NAME, "one batch size", f"{query.shape[0]} of queries and {key.shape[0]} of keys")
    functions: dict[str, ScoreFunction | None] = {"score_mod": None, "mask_mod": None}
    tensors: list[Tensor] = []
    for name, function, plain in (
        ("score_mod", score_mod, flex._identity),
        ("mask_mod", block_mask[-1], flex.noop_mask),
    ):
        if function is not plain:
            functions[name], captured = separate_captures(name, function)
            tensors += captured
    attributes: dict[str, Any] = {"scale": float(scale)}
    inputs: list[Tensor | None] = [query, key, value]
    wants_lse = bool(kernel_options.get("OUTPUT_LOGSUMEXP"))
    if functions["score_mod"] is None and functions["mask_mod"] is None and not wants_lse:
        name, version = "Attention", 23
    else:
        name, version = f"{DOMAIN}::Attention", 1
        attributes |= {name: function.to_json() for name, function in functions.items() if function is not None}
        if tensors:
            inputs += [*[None] * (mhsa_operator.FIRST_TENSOR - len(inputs)), *tensors]
    shape = (*query.shape[:-1], value.shape[-1])
    nothing = query.new_zeros(0)
    if not wants_lse:
        return symbolic(name, inputs, attributes, dtype=query.dtype, shape=shape, version=version), nothing, nothing
    dtypes, shapes = [query.dtype, torch.float32], [shape, query.shape[:-1]]
    y, lse = symbolic_multi_out(name, inputs, attributes, dtypes=dtypes, shapes=shapes, version=version)
    return y, lse / math.log(2), nothing


class _CapturingTracer(fx.Tracer):
    """Follows a function by the words that it uses, so that what it captures stays what it was: `captured` by name."""

    def __init__(self) -> None:
        super().__init__()
        self.captured: dict[str, Tensor] = {}

    def create_arg(self, a: Any) -> Any:
        if not isinstance(a, Tensor):
            return super().create_arg(a)
        name = next((name for name, other in self.captured.items() if other is a), f"captured_{len(self.captured)}")
        self.captured[name] = a
        return self.create_node("get_attr", name, (), {})


def separate_captures(name: str, function: UserFunction) -> tuple[ScoreFunction, list[Tensor]]:
    """A function that captures tensors of a graph which is being traced: its steps, and these tensors.

    Raises ModelError.
    """
    try:
        tracer = _CapturingTracer()
        graph = tracer.trace(with_named_arguments(name, function))
        with _disable_current_modes():
            stand_ins = {name: _stand_in(tensor) for name, tensor in tracer.captured.items()}
            module = fx.GraphModule(stand_ins, graph)
            steps, used = trace(name, module, keep=True)
    except SpecError as error:
        raise ModelError(name, error.expected, error.got, error.next_step) from error
    except Exception as error:  # whatever the function trips over
        first = str(error).strip().partition("\n")[0]
        raise ModelError(name, ASKED, f"{type(error).__name__}: {first}", WHITELIST) from error
    tensors = []
    for stand_in in used:
        (key,) = (key for key in stand_ins if getattr(module, key) is stand_in)
        tensors.append(as_kernels_read(tracer.captured[key]))
    kinds = (TensorKind(kind.dtype, tuple(_sizes(tensor))) for kind, tensor in zip(steps.tensors, tensors, strict=True))
    return ScoreFunction(steps.steps, tuple(kinds)), tensors


def _stand_in(tensor: Tensor) -> Tensor:
    """A tensor of the same kind that nobody is tracing."""
    return torch.zeros([size if isinstance(size, int) else _ANY for size in tensor.shape], dtype=tensor.dtype)


def _sizes(tensor: Tensor) -> Iterator[int]:
    """The sizes of a tensor, -1 where one is free."""
    return (size if isinstance(size, int) else -1 for size in tensor.shape)
