"""What a call brings and gets back: checked against the manifest, and copied only where TVM could not read it in place.

An array is a NumPy array or a torch tensor here; others come in through DLPack as NumPy arrays.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mhsa_compile.errors import InputError, did_you_mean
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.runtime import tvm_runtime
from mhsa_compile.runtime.array_memory import (
    ALIGNMENT,
    address,
    aligned_copy,
    any_torch,
    as_tvm_strides,
    bfloat16_to_numpy,
    exportable,
    follower,
    is_plain_tensor,
    is_torch,
    may_be_followed,
    overlap,
    to_torch,
)
from mhsa_compile.runtime.artifact.manifest import Dims, TensorInfo
from mhsa_compile.runtime.misfits import shape_text, shapes_of
from mhsa_compile.runtime.symbolic_dims import is_expression, size_of, value_of
from mhsa_compile.spec.outputs import together

Sizes = dict[str, int]  # of the symbolic dims in one call

_FIXED = (
    "An artifact takes what it was compiled with: of what a file lists as an input and as an initializer, the value in "
    "the file is part of the code."
)
_KNOWN_SHAPES = 64
"""Shapes of inputs that are remembered as right: more than a program calls with again and again."""


class Argument:
    """One input or weight: what it must be, and where sizes that it shares were seen first. `written`: a call writes
    into it. `has_bits`: NumPy's arrays of it are handed over as their bits."""

    def __init__(
        self, info: TensorInfo, role: str, owners: Mapping[str, str], aligned: bool = False, written: bool = False
    ) -> None:
        self.info = info
        self._aligned = aligned and not written
        self._written = written
        self.has_bits = info.dtype == "bfloat16"
        self.label = f"{role} {info.name!r}"
        self._list = "inputs" if role == "input" else "manifest.weights"
        self._differentiable = role == "input" and not written
        self._owners = owners
        self._right_dtypes: set[object] = set()  # as NumPy's and PyTorch's objects, which compare faster than names

    @property
    def is_checked_by_shape(self) -> bool:
        """Whether a contiguous array of a shape and dtype that were right once is right, but for its numbers, which
        `check_values` looks at: nothing is written into it."""
        return not self._written

    @property
    def is_bounded(self) -> bool:
        """Whether the numbers themselves must lie in bounds."""
        return self.info.most is not None or self.info.rows is not None

    def reads(self, value: Any, array: Any) -> bool:
        """Whether `array`, which `ready` made of a contiguous array or tensor, is it, or its bits."""
        return array is value or (self.has_bits and type(value) is np.ndarray)

    def in_place(self, value: Any) -> Any:
        """A contiguous array or tensor that was right, as TVM reads it in place."""
        return _bfloat16(value) if self.has_bits and type(value) is np.ndarray else value

    def ready(self, value: Any, sizes: Sizes) -> Any:
        """`value` as an array that TVM reads in place; its symbolic dims join `sizes`. Raises InputError."""
        array = value if type(value) is np.ndarray else self._adopt(value)
        if array.dtype not in self._right_dtypes:
            array = self._truths(array) if self.info.dtype == "bool" else array
            self._check_dtype(array)
        if self.info.broadcast is not None:
            array = self._broadcast(array, self.info.broadcast, sizes)
        elif array.ndim != len(self.info.dims) or not fits(self.info.dims, array.shape, sizes):
            raise self._wrong_shape(array, sizes)
        if self._written:
            self._check_writable(array)
        self.check_values(array, sizes)
        if 0 in array.shape:
            array = as_tvm_strides(array)
        if not isinstance(array, np.ndarray):
            plain = array if array.is_contiguous() and not array.requires_grad else array.detach().contiguous()
            return (
                plain if not self._aligned or plain.data_ptr() % ALIGNMENT == 0 or not plain.numel() else plain.clone()
            )
        if self._aligned and array.__array_interface__["data"][0] % ALIGNMENT and array.size:
            array = aligned_copy(array)
        return _bfloat16(array) if self.has_bits else exportable(array)

    def _adopt(self, value: Any) -> Any:
        if isinstance(value, np.ma.MaskedArray):
            hint = "A call would read what the mask hides: pass x.filled(...), and the mask as an input of its own."
            raise InputError(self.label, f"{self._requirement()} without a mask", "a masked array of NumPy's", hint)
        if isinstance(value, np.ndarray):
            return value
        if is_torch(value):
            if value.device.type != "cpu":
                raise InputError(self.label, "a tensor in CPU memory", f"one on {value.device}", "Move it: x.cpu().")
            self._check_no_gradient(value)
            self._check_numbers_in_rows(value)
            return self._with_its_sign(value)
        hint = "Pass a tensor of PyTorch's, which has it: torch.from_dlpack(x)." if self.has_bits else ""
        with reading(InputError, self.label, "DLPack memory of the CPU, in a dtype of NumPy's", hint):
            if hasattr(value, "__dlpack__"):
                return np.from_dlpack(value)
        got = "nothing" if value is None else type(value).__name__
        is_numbers = isinstance(value, list | tuple | int | float | np.generic)
        hint = f"Pass np.asarray(x, {self.info.dtype!r})." if is_numbers and self.info.dtype != "bfloat16" else ""
        raise InputError(self.label, f"{self._requirement()}, from NumPy, PyTorch or DLPack", got, hint)

    def _check_numbers_in_rows(self, tensor: Any) -> None:
        """Raises InputError for a tensor of PyTorch's whose memory is not its numbers with strides between them."""
        torch = sys.modules["torch"]
        kind, hint = "", "Pass its dense form: x.to_dense()."
        if tensor.is_nested:
            kind, hint = "nested", "Pass a padded tensor, x.to_padded_tensor(0.0), and a mask of its padding."
        elif tensor.layout is not torch.strided:
            kind = str(tensor.layout).removeprefix("torch.").lstrip("_")
        elif tensor.is_quantized:
            kind, hint = "quantised", "Pass its numbers: x.dequantize()."
        elif isinstance(tensor, torch._subclasses.FakeTensor):
            kind, hint = "fake", "Pass numbers: what is traced runs by mhsa.accelerate or torch.compile."
        elif tensor.numel() and tensor.data_ptr() == 0:  # a wrapper around others, or one whose memory was freed
            kind, hint = "hollow", f"A {type(tensor).__name__} has no memory of its own here: pass the numbers."
        if kind:
            raise InputError(self.label, self._requirement(), f"a {kind} tensor of PyTorch's", hint)

    def _with_its_sign(self, tensor: Any) -> Any:
        """A tensor whose memory holds its own numbers: PyTorch may note a negation beside them, which no other code
        reads. What a call writes into stays as it is, for `_check_writable`."""
        if self._written or not tensor.is_neg():
            return tensor
        if tensor.dtype == sys.modules["torch"].bool:  # PyTorch has no numbers for it either
            raise InputError(self.label, self._requirement(), "a lazy negation of torch.bool", "Use torch.logical_not.")
        return tensor.resolve_neg()

    def _check_dtype(self, array: Any) -> None:
        if str(array.dtype).removeprefix("torch.") != self.info.dtype:
            hint = f"Convert it to {self.info.dtype}."
            if self.info.dtype == "bfloat16" and isinstance(array, np.ndarray):
                hint = "Convert it: array.astype(ml_dtypes.bfloat16)."
            raise InputError(self.label, self._requirement(), _description(array), hint)
        self._right_dtypes.add(array.dtype)

    def _truths(self, array: Any) -> Any:
        """Integers 0 and 1, as tokenizers give a mask, as bool; what is no integer as it is. Raises InputError."""
        if not is_integer(array.dtype):
            return array
        if not bool(((array == 0) | (array == 1)).all()):
            raise InputError(self.label, "bool, or integers 0 and 1", _range(array), "1 takes part, as True does.")
        return array != 0

    def _check_no_gradient(self, tensor: Any) -> None:
        """Refuses a tensor that requires grad: a result that silently has no gradient would train nothing. Weights are
        parameters, and bound once.

        So does one that a transformation follows. Raises InputError.
        """
        if may_be_followed() and (one := follower(tensor)):
            hint = "mhsa.accelerate and torch.compile leave such calls to PyTorch."
            raise InputError(self.label, "numbers: compiled code is all that reads them", f"a tensor under {one}", hint)
        if self._differentiable and tensor.requires_grad and sys.modules["torch"].is_grad_enabled():
            expected = "a tensor without a gradient to follow: compiled code computes none"
            raise InputError(
                self.label, expected, "one that requires grad", "Call under torch.no_grad(), or pass x.detach()."
            )

    def _check_writable(self, array: Any) -> None:
        """Checks that a call can write into an array: what is written cannot be a copy. Raises InputError."""
        if isinstance(array, np.ndarray):
            flags = array.flags
            fits, got = flags.carray, "read-only memory" if not flags.writeable else "an array with gaps or unaligned"
        else:
            fits = array.is_contiguous() and not (array.requires_grad or array.is_neg())
            got = "a tensor that requires grad" if array.requires_grad else "a tensor with gaps"
            got = "a lazy negation of other memory" if array.is_neg() else got
        expected = "contiguous memory that can be written: the call writes into it"
        if fits and self.info.aligned and (rest := address(array) % ALIGNMENT):
            fits, got = False, f"memory {rest} bytes behind such a place"
            expected = f"memory that begins at a multiple of {ALIGNMENT} bytes: the call writes into it"
        if not fits:
            raise InputError(self.label, expected, got, "Allocate it by itself, once, and pass it to each call.")

    def _broadcast(self, array: Any, full: Dims, sizes: Sizes) -> Any:
        """An array at its full rank. Axes of 1 stay, but the last, which opset 24 would pad where it is short."""
        dims = self.info.dims
        mask = array[(None,) * (len(dims) - array.ndim)] if array.ndim < len(dims) else array
        last = size_of(full[-1], sizes)
        if mask.shape[-1] == 1 and dims[-1] != 1 and last not in (1, None) and not self.info.pads:
            shape = (*mask.shape[:-1], last)
            mask = np.broadcast_to(mask, shape) if isinstance(mask, np.ndarray) else mask.expand(shape)
        full_shape = [size_of(dim, sizes) for dim in full]
        if self.info.pads and full_shape[-1] is not None:
            full_shape[-1] = min(full_shape[-1], mask.shape[-1])
        if mask.ndim != len(dims) or not (_broadcasts(mask.shape, full_shape) and fits(dims, mask.shape, sizes)):
            raise self._wrong_shape(array, sizes)
        return mask

    def check_values(self, array: Any, sizes: Sizes) -> None:
        """Raises InputError for numbers out of the bounds that the manifest states."""
        if (rows := self.info.rows) is not None and 0 not in array.shape:
            least, largest = _extremes(array)
            if least < -rows or largest >= rows:
                expected = f"numbers from {-rows} to {rows - 1}: the table that they pick from has {rows} rows"
                hint = "The tokenizer knows more tokens than the model, if they are its ids."
                raise InputError(self.label, expected, str(largest if largest >= rows else least), hint)
        if self.info.most is None:
            return
        most = size_of(self.info.most, sizes)
        least, largest = _extremes(array) if len(array) else (0, 0)
        if least < 0 or (most is not None and largest > most):
            span = f"0 to {self.info.most}" + ("" if most in (None, self.info.most) else f" = {most}")
            raise InputError(self.label, f"numbers from {span}", str(least if least < 0 else largest))

    def check_expressions(self, array: Any, sizes: Sizes) -> None:
        """Axes that symbols make, "P + S", once all symbols are known. Raises InputError."""
        for dim in self.info.dims:
            size = value_of(dim, sizes) if isinstance(dim, str) else None
            if size is not None and size != sizes[str(dim)]:
                raise self._wrong_shape(array, {**sizes, str(dim): size})

    def _requirement(self) -> str:
        dims = self.info.dims
        if self.info.broadcast is not None:
            up_to = [f"1 or {most}" for most in self.info.broadcast]
            up_to[-1] = f"1 to {self.info.broadcast[-1]}" if self.info.pads else up_to[-1]
            pairs = zip(dims, self.info.broadcast, up_to, strict=True)
            dims = tuple(d if d in (1, most) else text for d, most, text in pairs)
        return f"{self.info.dtype} of shape {shape_text(dims)}"

    def _wrong_shape(self, array: Any, sizes: Sizes) -> InputError:
        symbols = {dim: self._owners.get(str(dim)) for dim in (*self.info.dims, *(self.info.broadcast or ()))}
        facts = [
            f"{symbol} = {sizes[str(symbol)]} as in {first!r}"
            for symbol, first in symbols.items()
            if symbol in sizes and first not in (None, self.info.name)
        ]
        facts += [f"{dim} = {size_of(dim, sizes)}" for dim in symbols if is_expression(dim)]
        expected = ", ".join((self._requirement(), *facts))
        return InputError(self.label, expected, _description(array), f"`.{self._list}` lists what each must be.")


class Signature:
    """The inputs and outputs of a compiled function. `in_place`: output -> the input that a call turns into it."""

    device = "cpu"

    def __init__(
        self,
        inputs: Sequence[TensorInfo],
        outputs: Sequence[TensorInfo],
        *,
        aligned: bool = False,
        in_place: Mapping[str, str] | None = None,
        limits: Mapping[str, int] | None = None,
        weights: Iterable[str] = (),
        make: Callable[..., Argument] = Argument,
    ) -> None:
        """`weights`: names that a call may not bring, since they were bound at load."""
        self._weights = frozenset(weights)
        self._limits = dict(limits or {})
        # What broadcasts or has bounds is checked last, against sizes that the others bring.
        self._order = sorted(range(len(inputs)), key=lambda i: (inputs[i].broadcast, inputs[i].most) != (None, None))
        self._composed = [i for i, info in enumerate(inputs) if any(map(is_expression, info.dims))]
        owners: dict[str, str] = {}
        for i in self._order:
            for dim in inputs[i].dims:
                owners.setdefault(str(dim), inputs[i].name)
        self._names = [info.name for info in inputs]
        self._outputs = outputs
        self._together = together(info.name for info in outputs)
        pairs = {} if in_place is None else in_place
        self.in_place = {i: self._names.index(pairs[out.name]) for i, out in enumerate(outputs) if out.name in pairs}
        written = set(self.in_place.values())
        self._apart = [(i, j) for i in written for j in range(len(inputs)) if j > i or (j < i and j not in written)]
        self._arguments = [make(info, "input", owners, aligned, i in written) for i, info in enumerate(inputs)]
        self._aligned = aligned
        self._checked_by_shapes = not self._apart and all(argument.is_checked_by_shape for argument in self._arguments)
        self._bounded = [i for i, argument in enumerate(self._arguments) if argument.is_bounded]
        self._has_bits = any(argument.has_bits for argument in self._arguments)
        self._known: dict[tuple[object, ...], Sizes] = {}  # the sizes of shapes and dtypes that were right
        self._to_numpy = [bfloat16_to_numpy if out.dtype == "bfloat16" else np.from_dlpack for out in outputs]

    def values(self, args: Sequence[Any], by_name: Mapping[str, Any]) -> Sequence[Any]:
        """What was given, in the order of the inputs. Raises InputError."""
        return args if len(args) == len(self._names) and not by_name else self._arrange(args, by_name)

    def arrays(self, args: Sequence[Any], by_name: Mapping[str, Any]) -> tuple[list[Any], Sizes]:
        """Arrays in the order of the inputs, and the sizes of the symbolic dims. Raises InputError."""
        values = args if len(args) == len(self._names) and not by_name else self._arrange(args, by_name)
        key = self._key(values) if self._checked_by_shapes else None
        if key is not None and (sizes_before := self._known.get(key)) is not None:
            if self._bounded:
                self.check_values(values, sizes_before)
            if not self._has_bits:
                return list(values), sizes_before
            return [one.in_place(value) for one, value in zip(self._arguments, values, strict=True)], sizes_before
        arrays, sizes = list(values), Sizes()
        for i in self._order:
            arrays[i] = self._arguments[i].ready(values[i], sizes)
        for symbol, most in self._limits.items():
            if sizes.get(symbol, 0) > most:
                raise InputError(
                    f"dim {symbol!r}",
                    f"at most {most}, the most that the model has tables or checks for",
                    str(sizes[symbol]),
                )
        if self._apart:
            self._check_apart(arrays)
        for i in self._composed:
            self._arguments[i].check_expressions(arrays[i], sizes)
        as_they_are = zip(self._arguments, values, arrays, strict=True)
        if key is not None and 0 not in sizes.values() and all(one.reads(*pair) for one, *pair in as_they_are):
            if len(self._known) >= _KNOWN_SHAPES:
                self._known.clear()
            self._known[key] = sizes
        return arrays, sizes

    def _key(self, values: Sequence[Any]) -> tuple[object, ...] | None:
        """The shapes and dtypes of values that are read as they are; None where one of them needs more than a look."""
        key: list[object] = []
        if "torch" in sys.modules and may_be_followed():
            return None
        for value in values:
            if not (value.flags.carray if type(value) is np.ndarray else is_plain_tensor(value)):
                return None
            if self._aligned and address(value) % ALIGNMENT:
                return None
            key += (value.shape, value.dtype)
        return tuple(key)

    def copies(self, values: Sequence[Any], arrays: Sequence[Any]) -> list[tuple[Any, Any]]:
        """(value, array) where a call reads a copy of a value, since it has gaps or begins off a cache line.

        Raises InputError where what it reads is no array of the same kind, as of bfloat16 in NumPy.
        """
        pairs = []
        for argument, value, array in zip(self._arguments, values, arrays, strict=True):
            kinds = [
                isinstance(one, np.ndarray) if isinstance(value, np.ndarray) else is_torch(one)
                for one in (value, array)
            ]
            if kinds[0] and 0 not in value.shape and address(value) != address(array):
                if kinds[1] and value.dtype != array.dtype:
                    raise InputError(
                        argument.label, argument._requirement(), _description(value), "Bind a mask of bool."
                    )
                if not kinds[1]:
                    hint = f"Bind a contiguous array that begins at a multiple of {ALIGNMENT} bytes, or call as usual."
                    raise InputError(argument.label, "memory that is read where it lies", "an array that is not", hint)
                pairs.append((value, array))
        return pairs

    @property
    def has_bounds(self) -> bool:
        """Whether numbers in some input must lie in bounds."""
        return bool(self._bounded)

    def check_values(self, arrays: Sequence[Any], sizes: Sizes) -> None:
        """Checks again what a value, not a shape, must be. Raises InputError."""
        for i in self._bounded:
            self._arguments[i].check_values(arrays[i], sizes)

    def _check_apart(self, arrays: Sequence[Any]) -> None:
        """Checks that what is written shares no byte with any other input. Raises InputError."""
        for i, j in self._apart:
            if overlap(arrays[i], arrays[j]):
                expected = f"memory of its own: the call writes into {self._names[i]!r}"
                raise InputError(self._arguments[j].label, expected, f"some of that of {self._names[i]!r}")

    def results(self, outputs: Any, values: Sequence[Any]) -> Any:
        """What TVM returned as torch tensors if any value was one, else as NumPy arrays; over the same memory.

        What was written in place is the caller's own value: `values` must then be what the call was given.
        """
        importers = [to_torch] * len(self._outputs) if any_torch(values) else self._to_numpy
        if len(importers) == 1:
            return importers[0](outputs) if not self.in_place else values[self.in_place[0]]
        if not self.in_place:
            return self._together(import_(one) for import_, one in zip(importers, outputs, strict=True))
        own = {i: values[j] for i, j in self.in_place.items()}
        return self._together(own[i] if i in own else importers[i](one) for i, one in enumerate(outputs))

    def refused(self, words: str, arrays: Sequence[Any], sizes: Sizes) -> InputError:
        """The error for what compiled code found wrong with a value; see `errors.CALL_REFUSED`."""
        argument, *lines = words.split("\n")
        expected, got = (re.sub(r"\{(.*?)\}", lambda name: str(sizes.get(name[1], name[1])), line) for line in lines)
        index = next((i for i, one in enumerate(self._arguments) if one.label == argument), None)
        if index is None:
            shapes = shapes_of([one.info for one in self._arguments], arrays)
            return InputError(argument, expected, got or "some beyond", f"The call brings {shapes}.")
        return InputError(argument, expected, got or _range(arrays[index]))

    def empty_results(self, arrays: Iterable[Any], sizes: Sizes) -> Any:
        """The outputs of a call in which some size is 0, or None where one of them holds something to compute."""
        sizes_of = [[size_of(dim, sizes) for dim in info.dims] for info in self._outputs]
        shapes = [[size for size in dims if size is not None] for dims in sizes_of]
        if shapes != sizes_of or not all(0 in shape for shape in shapes):
            return None
        of_torch = any_torch(arrays)
        results = [self._empty(shape, info.dtype, of_torch) for shape, info in zip(shapes, self._outputs, strict=True)]
        return results[0] if len(results) == 1 else self._together(results)

    def _empty(self, shape: Sequence[int], dtype: str, of_torch: bool) -> Any:
        torch = sys.modules["torch"] if of_torch else None
        return np.empty(shape, dtype) if torch is None else torch.empty(shape, dtype=getattr(torch, dtype))

    def _arrange(self, args: Sequence[Any], by_name: Mapping[str, Any]) -> list[Any]:
        names = ", ".join(self._names)
        if len(args) > len(self._names):
            raise InputError("inputs", f"at most {len(self._names)}: {names}", f"{len(args)} by position")
        values = dict(zip(self._names, args, strict=False))
        for name, value in by_name.items():
            if name not in self._names and value is not None:  # mask=None is how PyTorch's callers say "no mask"
                if name in self._weights:
                    hint = f"Bind another one: mhsa.load(artifact, weights={{{name!r}: array, ...}})."
                    got = "a weight of the model, which was bound when it was loaded"
                    raise InputError(f"input {name!r}", f"one of {names}", got, hint)
                got, hint = "an input that the artifact does not take", did_you_mean(name, self._names, _FIXED)
                raise InputError(f"input {name!r}", f"one of {names}", got, hint)
            if name in values:
                raise InputError(f"input {name!r}", "one value", "one by position and one by name")
            values[name] = value
        return [values.get(name) for name in self._names]


def is_integer(dtype: Any) -> bool:
    """Whether a dtype of NumPy's, PyTorch's or TVM's is one of whole numbers; bool is not."""
    return re.fullmatch(r"u?int\d+", str(dtype).removeprefix("torch.")) is not None


def fits(dims: Dims, shape: Sequence[int], sizes: Sizes) -> bool:
    """Whether `shape` agrees with the fixed dims and with `sizes`, to which it adds the new symbols."""
    for dim, size in zip(dims, shape, strict=True):
        if size != (dim if isinstance(dim, int) else sizes.setdefault(dim, size)):
            return False
    return True


def _bfloat16(array: np.ndarray[Any, Any]) -> Any:
    """An array of ml_dtypes.bfloat16, which NumPy cannot hand over, as TVM's of the same memory where that is
    possible."""
    return tvm_runtime.start().reinterpreted(exportable(array.view(np.uint16)), "bfloat16")


def _broadcasts(shape: Sequence[int], full: Sequence[int | None]) -> bool:
    return all(size == 1 or whole in (size, None) for size, whole in zip(shape, full, strict=True))


def _range(value: Any) -> str:
    numbers = value if hasattr(value, "min") else np.from_dlpack(value)
    least, most = int(numbers.min()), int(numbers.max())
    return str(least) if least == most else f"values from {least} to {most}"


def _extremes(array: Any) -> tuple[int, int]:
    """The least and the largest of whole numbers, of which there is one at least, in the CPU's memory."""
    numbers = (array if isinstance(array, np.ndarray) else array.detach().numpy()).ravel()
    return int(numbers[numbers.argmin()]), int(
        numbers[numbers.argmax()]
    )  # a fifth of the time of min() where there are few


def _description(array: Any) -> str:
    return f"{str(array.dtype).removeprefix('torch.')} of shape {shape_text(array.shape)}"
