"""What a call takes and gives: every kind of array and memory layout, masks that broadcast, and what is refused."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm_ffi
from support.tiny_artifact import MASK, X, Y, assert_right, draw, make, read_only
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError
from mhsa_compile.runtime import tvm_runtime
from mhsa_compile.runtime.array_memory import ALIGNMENT, aligned_zeros
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.artifact.manifest import TensorInfo
from mhsa_compile.runtime.call_arguments import Argument, Signature
from mhsa_compile.runtime.compiled_attention import CompiledAttention, load


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return make(tmp_path_factory.mktemp("artifact") / "tiny.mhsa")


@pytest.fixture(scope="module")
def compiled(artifact: Artifact) -> CompiledAttention:
    return load(artifact)


@pytest.mark.thorough
def test_torch_in_torch_out(compiled: CompiledAttention) -> None:
    x, mask = draw()
    tx, tmask = torch.from_numpy(x), torch.from_numpy(mask)
    for inputs in ((tx, tmask), (tx, mask), (x, tmask)):
        y = compiled(*inputs)
        assert type(y) is torch.Tensor
        assert not y.requires_grad
        assert_right(y.numpy(), x, mask)
    leaf = tx.clone().requires_grad_()
    for differentiable in (leaf, 2 * leaf):
        with pytest.raises(
            InputError, match=r"input 'x': .*got one that requires grad\. Call under torch\.no_grad\(\)"
        ):
            compiled(differentiable, tmask)
    with torch.no_grad():
        assert not compiled(leaf, tmask).requires_grad
    assert_right(compiled(leaf.detach(), tmask).numpy(), x, mask)
    strided = tx.transpose(0, 1).contiguous().transpose(0, 1)
    assert_right(compiled(strided, tmask).numpy(), x, mask)
    meta = torch.empty((3, 5, 8), device="meta")
    with pytest.raises(InputError, match=r"input 'x': expected a tensor in CPU memory, got one on meta"):
        compiled(meta, tmask)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_code_of_tvms_reads_lies_on_a_cache_line(dtype: str) -> None:
    """What is copied for its gaps lies on one, too, wherever its first byte was."""
    taken = Argument(TensorInfo("x", dtype, ("B", 3)), "input", {}, True)
    whole = aligned_zeros((40, 5), getattr(ml_dtypes, dtype, dtype))
    for first in range(16):
        for given in (whole[first:, :3], np.ascontiguousarray(whole[first:, :3]), read_only(whole[first:, :3].copy())):
            made = tvm_ffi.from_dlpack(taken.ready(given, {}))
            assert made.data_ptr() % ALIGNMENT == 0
            assert made.shape == given.shape


def test_other_arrays_come_in_through_dlpack(compiled: CompiledAttention) -> None:
    class Foreign:
        def __init__(self, array: np.ndarray) -> None:
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    x, mask = draw()
    assert_right(compiled(Foreign(x), mask), x, mask)


def offset(x: np.ndarray, by: int) -> np.ndarray:
    """A copy of `x` that begins `by` bytes after a multiple of 64."""
    buffer = np.zeros(x.nbytes + 128, np.uint8)
    begin = -buffer.ctypes.data % 64 + by
    view = buffer[begin : begin + x.nbytes].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


LAYOUTS = {
    "strided": lambda x: np.repeat(x, 2, axis=0)[::2],
    "transposed": lambda x: np.asfortranarray(x),
    "reversed": lambda x: x[::-1].copy()[::-1],
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
    "offset by an element": lambda x: offset(x, 4),
    "unaligned": lambda x: offset(x, 1),
    "read-only": read_only,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_memory_layout(compiled: CompiledAttention, layout: str) -> None:
    x, mask = draw()
    arranged = LAYOUTS[layout](x)
    assert_right(compiled(arranged, mask), np.array(arranged), mask)


def test_what_can_be_read_in_place_is_not_copied() -> None:
    x, mask = draw()
    signature = Signature((X, MASK), (Y,))
    for array in (x, read_only(x), offset(x, 4), torch.from_numpy(x)):
        taken = signature.arrays((array, mask), {})[0][0]
        assert np.shares_memory(np.from_dlpack(taken) if array is not taken else array, array)


def test_results_are_writable_and_independent(compiled: CompiledAttention) -> None:
    x, mask = draw()
    first = compiled(x, mask)
    kept = first.copy()
    second = compiled(-x, mask)
    np.testing.assert_array_equal(first, kept)
    second += 1


def test_several_results_are_a_tuple() -> None:
    x, mask = draw()
    assert Signature((X, MASK), (Y, Y)).results([x, x], [x, mask])[1] is not None
    with_torch = Signature((X, MASK), (Y, Y)).results([x, torch.from_numpy(x)], [x, torch.from_numpy(mask)])
    assert all(type(one) is torch.Tensor for one in with_torch)


@pytest.mark.parametrize("shape", [(3, 5), (1, 5), (5,), (3, 1), (1, 1), (1,)])
@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_masks_broadcast(compiled: CompiledAttention, shape: tuple[int, ...], convert: object) -> None:
    x, _ = draw()
    for mask in (np.random.default_rng(1).random(shape) < 0.5, np.ones(shape, bool)):
        assert_right(np.asarray(compiled(x, convert(mask))), x, mask)


def test_empty_inputs_give_empty_outputs(compiled: CompiledAttention) -> None:
    for B, L in ((0, 5), (3, 0)):
        x, mask = np.ones((B, L, 8), np.float32), np.ones((1, L), bool)
        assert compiled(x, mask).shape == (B, L, 8)
        assert compiled(torch.from_numpy(x), mask).shape == (B, L, 8)
    no_keys = Signature((TensorInfo("k", "float32", ("B", "S")),), (TensorInfo("y", "float32", ("B", 8)),))
    arrays, sizes = no_keys.arrays((np.ones((2, 0), np.float32),), {})
    assert no_keys.empty_results(arrays, sizes) is None  # there is something to compute


def test_a_size_of_zero_reaches_tvm_with_its_strides() -> None:
    """NumPy's and PyTorch's strides of empty arrays are others than those that TVM's code checks."""
    info = TensorInfo("past", "float32", ("B", 2, "P", 3))
    for past in (np.empty((4, 2, 0, 3), np.float32), torch.empty(4, 2, 0, 3)):
        (taken,), sizes = Signature((info,), (info,)).arrays((past,), {})
        assert sizes == {"B": 4, "P": 0}
        steps = taken.stride() if isinstance(taken, torch.Tensor) else tuple(s // 4 for s in taken.strides)
        assert (tuple(taken.shape), steps) == ((4, 2, 0, 3), (0, 0, 3, 1))


PAST, TOTAL = TensorInfo("past", "float32", ("B", "P")), TensorInfo("total", "float32", ("B", "P + S"))
NEW = TensorInfo("new", "float32", ("B", "S"))


def test_sizes_that_others_make() -> None:
    signature = Signature((TOTAL, PAST, NEW), (TOTAL,))
    arrays = [np.ones((2, size), np.float32) for size in (7, 5, 2)]
    assert signature.arrays(arrays, {})[1]["P + S"] == 7
    with pytest.raises(InputError, match=r"input 'total': expected .*\(B, P \+ S\), P \+ S = 7, got .*\(2, 8\)"):
        signature.arrays([np.ones((2, 8), np.float32), *arrays[1:]], {})
    empty = [np.ones((0, size), np.float32) for size in (7, 5, 2)]
    assert signature.empty_results(*signature.arrays(empty, {})).shape == (0, 7)


def test_masks_that_end_early() -> None:
    """Where the standard pads, the mask may have any length up to that of the keys; an axis of 1 is not the whole."""
    mask = TensorInfo("mask", "bool", ("mask_B", "T"), broadcast=("B", "P + S"), pads=True)
    signature = Signature((mask, PAST, NEW), (PAST,))
    others = [np.ones((2, size), np.float32) for size in (5, 2)]
    for shape in ((2, 7), (1, 6), (2, 1), (1, 0)):
        (taken, *_), _ = signature.arrays([np.ones(shape, np.bool_), *others], {})
        assert taken.shape == shape
    for shape in ((2, 8), (3, 7)):
        with pytest.raises(
            InputError, match=r"input 'mask': expected bool of shape \(1 or B, 1 to P \+ S\), .*got bool"
        ):
            signature.arrays([np.ones(shape, np.bool_), *others], {})


def test_numbers_of_keys_have_bounds() -> None:
    lengths = TensorInfo("lengths", "int64", ("B",), most="S")
    signature = Signature((lengths, NEW), (NEW,))
    keys = np.ones((2, 3), np.float32)
    for good in (np.array([0, 3]), torch.tensor([2, 1])):
        signature.arrays([good, keys], {})
    for bad, got in ((np.array([1, 4]), "4"), (torch.tensor([-1, 3]), "-1")):
        with pytest.raises(InputError, match=rf"input 'lengths': expected numbers from 0 to S = 3, got {got}"):
            signature.arrays([bad, keys], {})


x, mask = draw()
BAD_CALLS = {
    "missing": ((x,), {}, r"input 'mask': expected bool of shape .*, got nothing"),
    "none": ((None, mask), {}, r"input 'x': expected .*, got nothing"),
    "too many": ((x, mask, mask), {}, r"inputs: expected at most 2: x, mask, got 3 by position"),
    "unknown": ((x, mask), {"context": x}, r"input 'context': expected one of x, mask"),
    "near": ((x,), {"msk": mask}, r"input 'msk'.*Did you mean 'mask'\?"),
    "twice": ((x, mask), {"x": x}, r"input 'x': expected one value, got one by position and one by name"),
    "list": (([1.0], mask), {}, r"input 'x': expected float32 of shape \(B, L, 8\).*, got list"),
    "masked": ((np.ma.masked_array(x), mask), {}, r"input 'x': expected float32 .* without a mask, got a masked array"),
    "masked mask": ((x, np.ma.masked_array(mask)), {}, r"input 'mask': expected bool .* without a mask, got a masked"),
    "dtype": ((x.astype("f8"), mask), {}, r"expected float32 .*, got float64 of shape \(3, 5, 8\)\. Convert it"),
    "bytes swapped": ((x.astype(">f4"), mask), {}, r"expected float32 .*, got >f4"),
    "torch dtype": ((torch.ones(3, 5, 8).half(), mask), {}, r"expected float32 .*, got float16"),
    "rank": ((x[0], mask), {}, r"input 'x': expected float32 of shape \(B, L, 8\), got float32 of shape \(5, 8\)"),
    "dim": ((x[..., :7], mask), {}, r"input 'x': expected .*\(B, L, 8\), got float32 of shape \(3, 5, 7\)"),
    "mask dtype": ((x, mask.astype("f4")), {}, r"input 'mask': expected bool of shape .*, got float32"),
    "mask of numbers": ((x, mask * 2), {}, r"input 'mask': expected bool, or integers 0 and 1, got .* 2\. 1 takes"),
    "mask dim": ((x, mask[:, :4]), {}, r"\(1 or B, 1 or L\), B = 3 as in 'x', L = 5 as in 'x', got bool .*\(3, 4\)"),
    "mask batch": ((x, np.ones((2, 5), bool)), {}, r"input 'mask': .*B = 3 as in 'x'.*, got bool of shape \(2, 5\)"),
    "mask rank": ((x, mask[None]), {}, r"input 'mask': .*, got bool of shape \(1, 3, 5\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls(compiled: CompiledAttention, case: str) -> None:
    args, by_name, message = BAD_CALLS[case]
    with pytest.raises(InputError, match=message):
        compiled(*args, **by_name)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "int8"])
def test_a_mask_of_integers(compiled: CompiledAttention, dtype: str) -> None:
    some = mask.copy()
    some[:, ::2] = False
    expected = compiled(x, some)
    for _ in range(3):  # shapes and dtypes that were right once are known
        assert np.array_equal(compiled(x, some.astype(dtype)), expected)
        assert np.array_equal(compiled(x, mask=torch.from_numpy(some.astype(dtype))).numpy(), expected)
    with pytest.raises(InputError, match=r"expected bool, or integers 0 and 1, got values from 0 to 3"):
        compiled(x, some.astype(dtype) * 3)
    with pytest.raises(InputError, match=rf"input 'mask': expected bool .*, got {dtype}.* Bind a mask of bool"):
        compiled.bind(x, some.astype(dtype))


def test_a_shared_symbol_names_the_input_that_set_it() -> None:
    k, v = TensorInfo("k", "float32", ("B", "S")), TensorInfo("v", "float32", ("B", "S"))
    with pytest.raises(InputError, match=r"input 'v': expected .* S = 3 as in 'k', got float32 of shape \(2, 4\)"):
        Signature((k, v), (k,)).arrays((np.ones((2, 3), "f4"), np.ones((2, 4), "f4")), {})


BX, BY = TensorInfo("x", "bfloat16", ("B", 3)), TensorInfo("y", "bfloat16", ("B", 3))


def draw_bfloat16(B: int = 5) -> np.ndarray:
    return np.random.default_rng(B).standard_normal((B, 3), np.float32).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_goes_in_and_out_of_tvm(layout: str) -> None:
    """NumPy's own DLPack refuses it."""
    signature, x = Signature((BX,), (BY,)), LAYOUTS[layout](draw_bfloat16())
    (taken,), _ = signature.arrays((x,), {})
    assert (taken.dtype, tuple(taken.shape)) == ("bfloat16", x.shape)
    y = signature.results(taken, [x])
    assert y.dtype == ml_dtypes.bfloat16
    assert np.array_equal(y, x)


def test_bfloat16_is_not_copied() -> None:
    signature, x = Signature((BX,), (BY,)), draw_bfloat16()
    for array in (x, read_only(x), torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)):
        (taken,), _ = signature.arrays((array,), {})
        results = signature.results(taken, [array])
        bits = results.view(torch.int16).numpy() if isinstance(results, torch.Tensor) else results.view(np.int16)
        assert np.shares_memory(bits, x)


def test_a_second_call_reads_its_own_bits_of_bfloat16() -> None:
    """Shapes that were right are looked up: what is read, and what is no longer plain, is not."""
    signature, x, other = Signature((BX,), (BY,)), draw_bfloat16(), draw_bfloat16()[::-1].copy()
    signature.arrays((x,), {})
    assert signature._known
    for value in (x, other, read_only(other), draw_bfloat16(10)[::2], torch.zeros(5, 3, dtype=torch.bfloat16)):
        (taken,), sizes = signature.arrays((value,), {})
        bits = value.view(torch.uint16).numpy() if isinstance(value, torch.Tensor) else value.view(np.uint16)
        seen = np.from_dlpack(tvm_runtime.start().reinterpreted(taken, "uint16"))
        assert np.array_equal(seen, bits)
        assert sizes == {"B": 5}
    with pytest.raises(InputError, match="float32"):
        signature.arrays((np.zeros((5, 3), np.float32),), {})


def test_bfloat16_is_torch_s_where_torch_comes_in() -> None:
    signature, x = Signature((BX, BX), (BY, BY)), torch.randn(5, 3, dtype=torch.bfloat16)
    arrays, _ = signature.arrays((x, draw_bfloat16()), {})
    first, second = signature.results(tuple(reversed(arrays)), (x, arrays[1]))
    assert (first.dtype, second.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(second, x)


def test_a_dtype_that_is_not_bfloat16_is_named() -> None:
    for wrong, got, hint in (
        (np.ones((5, 3), np.float32), "float32", r"array\.astype\(ml_dtypes\.bfloat16\)"),
        (torch.ones(5, 3), "float32", "Convert it to bfloat16"),
        (np.ones((5, 3), np.uint16), "uint16", "ml_dtypes"),
    ):
        with pytest.raises(InputError, match=rf"input 'x': expected bfloat16 of shape \(B, 3\), got {got} .*{hint}"):
            Signature((BX,), (BY,)).arrays((wrong,), {})
    with pytest.raises(InputError, match=r"expected float32 of shape \(B, L, 8\), got bfloat16 of shape \(5, 3\)"):
        Signature((X,), (Y,)).arrays((draw_bfloat16(),), {})


def test_empty_bfloat16() -> None:
    signature = Signature((BX,), (BY,))
    for x in (draw_bfloat16()[:0], torch.ones(0, 3, dtype=torch.bfloat16)):
        arrays, sizes = signature.arrays((x,), {})
        y = signature.empty_results([x] if isinstance(x, torch.Tensor) else arrays, sizes)
        assert y.dtype == x.dtype
        assert tuple(y.shape) == (0, 3)


def test_a_bound_call_reads_what_is_in_its_arrays(compiled: CompiledAttention) -> None:
    x, mask = draw()
    run = compiled.bind(x, mask=mask)
    for seed in range(3):
        x[...] = np.random.default_rng(seed).standard_normal(x.shape)
        assert_right(run(), x, mask)
    first = run()
    x[...] = 0
    assert np.any(run() != first)  # an output of its own each time
    tensors = torch.ones(3, 5, 8), torch.from_numpy(mask)
    assert type(compiled.bind(*tensors)()) is torch.Tensor
    assert compiled.bind(x[:0], mask[:1])().shape == (0, 5, 8)


def test_a_bound_call_copies_anew_what_has_gaps(compiled: CompiledAttention) -> None:
    x, mask = draw()
    gaps = np.asfortranarray(x)
    for given, kind in ((gaps, np.asarray), (torch.from_numpy(gaps), torch.as_tensor)):
        run = compiled.bind(given, kind(mask))
        for seed in range(2):
            gaps[...] = np.random.default_rng(seed).standard_normal(x.shape)
            assert_right(np.asarray(run()), gaps, mask)
    with pytest.raises(InputError, match=r"input 'x': expected float32"):
        compiled.bind(x.astype(np.float64), mask)


@pytest.mark.thorough
def test_numbers_of_a_bound_call_are_looked_at_in_each_run() -> None:
    spec = mhsa.AttentionSpec(embed_dim=16, num_heads=2, kv_cache=True, causal=True)
    attention = mhsa.load(mhsa.compile(spec))
    x, length = np.ones((2, 1, 16), np.float32), np.zeros(2, np.int64)
    cache = [np.zeros((2, 2, 8, 8), np.float32) for _ in range(2)]
    run = attention.bind(x, *cache, length)
    y, keys, _ = run()
    assert keys is cache[0]
    assert y.shape == x.shape
    length[1] = 8
    with pytest.raises(InputError, match="length"):
        run()


def test_shapes_that_were_right_are_checked_again_where_they_differ(compiled: CompiledAttention) -> None:
    x, mask = draw()
    for _ in range(3):
        assert_right(compiled(x, mask), x, mask)
        with pytest.raises(InputError):
            compiled(x.astype(np.float64), mask)
        with pytest.raises(InputError):
            compiled(x, mask[:, :-1])
        read = read_only(x.copy())
        assert_right(compiled(read, mask), x, mask)
        assert_right(compiled(np.asfortranarray(x), mask), x, mask)


def test_tensors_that_were_right_are_checked_again_where_they_differ(compiled: CompiledAttention) -> None:
    x, mask = draw()
    tx, tmask = torch.from_numpy(x), torch.from_numpy(mask)
    negative = torch.complex(torch.zeros_like(tx), -tx).conj().imag
    assert negative.is_neg()
    for _ in range(3):
        assert_right(compiled(tx, tmask).numpy(), x, mask)
        assert_right(compiled(tx, tmask[:1]).numpy(), x, mask[:1])
        assert_right(compiled(tx.mT.contiguous().mT, tmask).numpy(), x, mask)
        assert_right(compiled(negative, tmask).numpy(), x, mask)
        for wrong in (tx.double(), tx[:, :-1], tx.clone().requires_grad_(), tx.to("meta")):
            with pytest.raises(InputError):
                compiled(wrong, tmask)
        with pytest.raises(InputError):
            compiled(tx, tmask[:, :-1])


def lazily_negated(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, whose memory holds the other sign."""
    lazy: torch.Tensor = torch._neg_view(-tensor)
    assert lazy.is_neg()
    return lazy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_a_lazy_negation_is_read_with_its_sign(dtype: torch.dtype) -> None:
    x = torch.arange(1, 13).reshape(4, 3).to(dtype)
    for role in ("input", "weight"):
        taken = Argument(TensorInfo("x", str(dtype).removeprefix("torch."), ("B", 3)), role, {})
        for right in (x, x[::2], torch.cat([x, x], 1)[:, :3]):
            ready = taken.ready(lazily_negated(right), {})
            assert not ready.is_neg()
            assert ready.is_contiguous()
            assert torch.equal(torch.from_dlpack(tvm_ffi.from_dlpack(ready)), right)


def test_calls_read_lazy_negations(compiled: CompiledAttention) -> None:
    x, mask = draw()
    tx, tmask = torch.from_numpy(x), torch.from_numpy(mask)
    for _ in range(2):  # after a plain call of the same shapes, too
        assert_right(compiled(lazily_negated(tx), tmask).numpy(), x, mask)
        assert_right(compiled(tx, tmask).numpy(), x, mask)
    memory = tx.clone()
    run = compiled.bind(torch._neg_view(memory), tmask)
    for seed in range(2):
        memory.copy_(torch.from_numpy(np.random.default_rng(seed).standard_normal(x.shape)))
        assert_right(run().numpy(), -memory.numpy(), mask)


def test_what_a_lazy_negation_cannot_be() -> None:
    """Memory that a call writes into, and truths."""
    written = Argument(TensorInfo("x", "float32", ("B", 3)), "input", {}, written=True)
    with pytest.raises(InputError, match=r"input 'x': .*got a lazy negation of other memory"):
        written.ready(lazily_negated(torch.ones(2, 3)), {})
    truths = Argument(TensorInfo("mask", "bool", ("B", 3)), "input", {})
    with pytest.raises(InputError, match=r"input 'mask': .*got a lazy negation of torch\.bool"):
        truths.ready(torch._neg_view(torch.ones(2, 3, dtype=torch.bool)), {})
    assert truths.ready(lazily_negated(torch.ones(2, 3, dtype=torch.int64)), {}).all()


def test_what_is_read_as_it_is_is_looked_up() -> None:
    signature = Signature((X, MASK), (Y,))
    x, mask = draw()
    for values in ((x, mask), (torch.from_numpy(x), torch.from_numpy(mask)), (x, mask[:1])):
        first = signature.arrays(values, {})
        assert signature.arrays(values, {})[1] is first[1]
    gaps = np.repeat(x, 2, axis=2)[:, :, ::2]
    assert signature.arrays((gaps, mask), {})[1] is not signature.arrays((gaps, mask), {})[1]


@pytest.mark.filterwarnings("ignore")  # PyTorch's, of kinds that it is about to drop or to change
@pytest.mark.parametrize("kind", ["sparse", "nested", "quantised", "fake", "mkldnn", "hollow"])
def test_tensors_that_are_no_numbers_in_rows_are_refused(compiled: CompiledAttention, kind: str) -> None:
    x = torch.from_numpy(draw()[0])
    with FakeTensorMode():
        fake = torch.empty(x.shape)
    odd = {
        "sparse": x.to_sparse,
        "nested": lambda: torch.nested.as_nested_tensor(list(x)),
        "quantised": lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "fake": lambda: fake,
        "mkldnn": x.to_mkldnn,
        "hollow": lambda: masked_tensor(x, x > 0),
    }[kind]()
    with pytest.raises(InputError, match=f"input 'x': .*{kind}.* tensor of PyTorch's"):
        compiled(odd, draw()[1])


@pytest.mark.thorough_only("derivative of torch.func")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("follower", ["vmap", "derivative of torch.func", "forward derivative", "tracing"])
def test_tensors_that_something_follows_are_refused(compiled: CompiledAttention, follower: str) -> None:
    """It would go on with a constant: a trace with the numbers of its example, a derivative without ours."""
    array, mask = draw()
    x = torch.from_numpy(array)
    assert_right(compiled(x, mask).numpy(), array, mask)  # what was right once is looked up

    def call(values: torch.Tensor) -> torch.Tensor:
        return values + compiled(values, mask)

    def by_forward_ad() -> None:
        with torch.autograd.forward_ad.dual_level():
            assert_right(compiled(x, mask).numpy(), array, mask)  # no dual tensor is among these
            call(torch.autograd.forward_ad.make_dual(x, x))

    ways = {
        "vmap": lambda: torch.vmap(call)(x[None]),
        "derivative of torch.func": lambda: torch.func.jvp(call, (x,), (x,)),
        "forward derivative": by_forward_ad,
        "tracing": lambda: torch.jit.trace(call, (x,)),
    }
    with pytest.raises(InputError, match=f"input 'x': .*{follower}"):
        ways[follower]()


def test_copies_share_what_is_loaded_and_a_pickle_is_refused(compiled: CompiledAttention) -> None:
    assert copy.deepcopy({"one": compiled})["one"] is compiled and copy.copy(compiled) is compiled
    with pytest.raises(InputError, match="Pickle the artifact, or its path"):
        pickle.dumps(compiled)


def test_a_weight_is_refused_as_one() -> None:
    signature = Signature([TensorInfo("x", "float32", ("n", 4))], [TensorInfo("y", "float32", ("n", 4))], weights=["g"])
    with pytest.raises(InputError, match=r"input 'g': .* bound when it was loaded\. .*weights=\{'g': array"):
        signature.arrays([np.zeros((2, 4), np.float32)], {"g": np.ones(4, np.float32)})
    with pytest.raises(InputError, match="the value in the file is part of the code"):
        signature.arrays([np.zeros((2, 4), np.float32)], {"steps": np.ones(4, np.float32)})
