"""The operations that kernels may claim: what to compute, in dims and placements, never how.

Each has a `kind`, its word in reports, records and manifests, and a `summary`: what there is to compute, in one line,
without its lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Literal

import numpy as np

from mhsa_compile.kernels.interface.epilogue import Epilogue
from mhsa_compile.kernels.interface.score_step import ScoreStep, first
from mhsa_compile.spec.float32_products import Float32Products
from mhsa_compile.spec.semantics import Semantics
from mhsa_compile.spec.window import WindowSpec

Dim = int | str  # a fixed size, or the name of a symbolic one
DType = Literal["float32", "bfloat16", "float16"]
CacheDType = Literal["float32", "bfloat16", "float16", "int8", "uint8"]


def numbers_in_element(cache_dtype: str) -> int:
    """Keys or values in an element of memory: two of four bits in a byte."""
    return 2 if cache_dtype == "uint8" else 1


INT4_ZERO = 8
"""What half of a byte holds of the number 0."""


def products_summary(word: Float32Products) -> str:
    """What a summary says of an operation's products."""
    return "" if word == "ieee" else f", products {word}"


@dataclass(frozen=True)
class LinearOp:
    """y = x W^T + b for one or more W side by side: x (B, L, K) -> y (B, L, sum of the widths).

    `widths` are the out-features of each W; `transposed[i]` says that weight i is stored (K, N), not PyTorch's (N, K).
    x, the weights, the biases and y are of `dtype`; sums are float32. `int8_weights` asks for weights that are rounded
    to eight bits, with a scale for each out-feature, when they are packed. Rows of y end with `padding` elements that
    nobody writes or reads. `epilogue` is what y becomes before it is written; its operands come behind the biases.
    `float32_products` says how numbers are multiplied where `dtype` is float32.
    """

    kind: ClassVar[str] = "linear"
    computed: ClassVar[int] = 1
    """How many of the first inputs a call brings; behind them are weights."""

    rows: tuple[Dim, ...]
    in_features: int
    widths: tuple[int, ...]
    biased: tuple[bool, ...]
    transposed: tuple[bool, ...]
    dtype: DType = "float32"
    int8_weights: bool = False
    padding: int = 0
    epilogue: Epilogue | None = None
    float32_products: Float32Products = "ieee"

    @property
    def row_count(self) -> int | None:
        """How many rows x has; None where that is known when called only."""
        fixed = [dim for dim in self.rows if isinstance(dim, int)]
        return prod(fixed) if len(fixed) == len(self.rows) else None

    @property
    def pitch(self) -> int:
        """Elements from one row of y to the next."""
        return self.out_features + self.padding

    @property
    def out_features(self) -> int:
        return sum(self.widths)

    def summary(self) -> str:
        then = "" if self.epilogue is None else f", then {self.epilogue.summary()}"
        how = products_summary(self.float32_products) + self._storage_summary()
        return f"{self.in_features} -> {' + '.join(map(str, self.widths))}{how}{then}"

    def _storage_summary(self) -> str:
        """In what the weights are stored, where that is not the dtype of y."""
        return ""


Byte = Literal["int8", "uint8"]


@dataclass(frozen=True)
class QuantisedLinearOp(LinearOp):
    """y = (x - x_zero) (W - zero)^T * (x_scale * scale) + b, of x and weights in eight bits, as a file stores them.

    The product is exact, in whole numbers; what follows is float32, as y and its epilogue are. Inputs: x, x_zero and
    x_scale (each of one number); the weights, for each of them its zeros (N,) and its scales (N,), and the biases.

    x_dtype   of x and x_zero
    stored    of each weight and its zeros
    centred   whether each weight's zeros are all 0, of int8, or 128, of uint8: what a feature adds to a sum then
              depends on no row of x
    """

    computed: ClassVar[int] = 3

    x_dtype: Byte = "uint8"
    stored: tuple[Byte, ...] = ()
    centred: bool = False

    def _storage_summary(self) -> str:
        return f" of {' and '.join(dict.fromkeys((self.x_dtype, *self.stored)))}"


@dataclass(frozen=True)
class BlockLinearOp(LinearOp):
    """y = x W^T + b of weights in few bits, by blocks of `block` terms along K, n of them: W = (q - zero) scale.

    x, biases, y and scales are of `dtype`. Inputs: x; for each weight its numbers q (N, n, block * bits / 8) uint8, the
    first of a byte in its lowest bits, and its scales (N * n,); the zeros of those that have some; the biases. Terms
    beyond K are padding, whatever they are.

    zeros     of each weight "bytes", (N * their bytes in a row) uint8, packed as the numbers are; "floats", (N * n,) of
              `dtype`; or "", where zero is 2^(bits - 1)
    rounds_x  x is rounded to eight bits first, by the same blocks, 127 steps their largest magnitude
    """

    bits: int = 4
    block: int = 32
    zeros: tuple[Literal["", "bytes", "floats"], ...] = ()
    rounds_x: bool = False

    @property
    def blocks(self) -> int:
        """The blocks of a row of the weight."""
        return -(-self.in_features // self.block)

    @property
    def zero_bytes(self) -> int:
        """Bytes of the packed zero points of a row."""
        return -(-self.blocks * self.bits // 8)

    def _storage_summary(self) -> str:
        return f" of {self.bits} bits by blocks of {self.block}{', x of 8' if self.rounds_x else ''}"


@dataclass(frozen=True)
class QuantiseOp:
    """x (float32) in bytes, by the range of all of it, 0 included, as ONNX's DynamicQuantizeLinear says.

    y is round(x / scale) + zero, the even one of two nearest, within 0 .. 255; outputs y uint8, scale () float32 and
    zero () uint8. Of what ONNX leaves open: where all numbers are 0, scale is 1 and zero 0; NaN is left out of the
    range, and becomes byte 0 as it does in ONNX Runtime; where there is nothing but NaN, scale is NaN.
    """

    kind: ClassVar[str] = "quantise"
    dtype: ClassVar[DType] = "float32"

    dims: tuple[Dim, ...]

    def summary(self) -> str:
        return f"rows of {self.dims[-1]}" if self.dims else "one number"


@dataclass(frozen=True)
class ProductOperand:
    """A factor of a product, as it is stored: `rows`, `columns` and `batch` are places of its axes in `dims`.

    `batch` has one for each axis of the product's batch, None where all of its entries share the operand. Axes that
    nobody names are 1.
    """

    dims: tuple[Dim, ...]
    batch: tuple[int | None, ...]
    rows: int
    columns: int

    @property
    def is_shared(self) -> bool:
        """Whether all entries of the batch have the same."""
        return all(axis is None for axis in self.batch)

    @property
    def is_in_order(self) -> bool:
        """Whether it is stored as (batch, rows, columns), with nothing shared."""
        return (*self.batch, self.rows, self.columns) == tuple(range(len(self.dims)))


@dataclass(frozen=True)
class ProductOp:
    """Y = A B, both computed in the call: A (batch, M, K), B (batch, K, N) -> Y (batch, M, N).

    M is `rows`, K `inner`, N `columns`. A is `left` and B is `right`, both of `dtype`; Y is of `result`; sums are
    float32, and `float32_products` says how numbers are multiplied where `dtype` is that. Inputs: A, B.
    """

    kind: ClassVar[str] = "product"

    batch: tuple[Dim, ...]
    rows: Dim
    inner: Dim
    columns: Dim
    left: ProductOperand
    right: ProductOperand
    dtype: DType = "float32"
    result: DType = "float32"
    float32_products: Float32Products = "ieee"

    @property
    def is_flat(self) -> bool:
        """Whether all entries of the batch share B and lie one behind the other in A: it is one product of many
        rows."""
        return bool(self.batch) and self.right.is_shared and self.left.is_in_order

    def summary(self) -> str:
        batch = f", batch {list(self.batch)}" if self.batch else ""
        return f"{self.rows} x {self.inner} x {self.columns}{batch}{products_summary(self.float32_products)}"


@dataclass(frozen=True)
class SoftmaxOp:
    """Y = softmax(X) along `axis` of an array of these dims, float32. Input: X."""

    kind: ClassVar[str] = "softmax"
    dtype: ClassVar[DType] = "float32"

    dims: tuple[Dim, ...]
    axis: int

    def summary(self) -> str:
        return f"axis {self.axis} of {list(self.dims)}"


Cell = Literal["LSTM", "GRU", "RNN"]
GATES: dict[Cell, int] = {"LSTM": 4, "GRU": 3, "RNN": 1}
PANEL: dict[Cell, int] = {"LSTM": 16, "GRU": 16, "RNN": 64}
"""Units of a panel of recurrent weights: a vector or more for each gate, whatever the machine."""


@dataclass(frozen=True)
class Activation:
    """A function of ONNX's recurrent operators, by its name, and its parameters where it has any."""

    name: str
    alpha: float = 0.0
    beta: float = 0.0


@dataclass(frozen=True)
class RecurrenceOp:
    """A recurrent layer, from what its gates get of the inputs on, step by step: float32.

    T is `steps`, B `batch`, U `units`, G the gates of `cell` in ONNX's order, D directions, of which
    `backwards[d]` begin at the last step. Inputs:

        x          (T, B, D * G * U), products of the inputs and their weights
        weights    (D, U * G * U), which states are multiplied by: for each panel of PANEL units (the last one may have
                   fewer) that of state k to gate g of unit u lies at (k, g, u)
        biases     (D, G * U)
        state      (D, B, U), that of before the first step
        memory     (D, B, U), the same of an LSTM's cells
        peepholes  (D, 3 * U), of an LSTM with `peepholes`, in ONNX's order: input, output, forget
        hidden     (D, U), of a GRU with `linear_before_reset`: the bias within the reset
        lengths    (B,) int32, with `lengths`: later steps of a row are not taken, and give 0;
                   a row without any ends with states of 0

    Outputs: states (T, D, B, U), the last state (D, B, U), and of an LSTM the last memory (D, B, U). `activations` has
    the functions of each direction, in ONNX's order; what gates get is clipped to -`clip` .. `clip`.
    """

    kind: ClassVar[str] = "recurrence"
    dtype: ClassVar[DType] = "float32"

    cell: Cell
    steps: Dim
    batch: Dim
    units: int
    backwards: tuple[bool, ...]
    activations: tuple[tuple[Activation, ...], ...]
    clip: float | None = None
    linear_before_reset: bool = False
    input_forget: bool = False
    peepholes: bool = False
    lengths: bool = False
    lengths_name: str = ""

    @property
    def gates(self) -> int:
        return GATES[self.cell]

    def summary(self) -> str:
        directions = "in both directions" if len(self.backwards) > 1 else "backwards" if self.backwards[0] else ""
        return f"{self.cell} of {self.units} units{directions and ', '}{directions}"


@dataclass(frozen=True)
class HeadLayout:
    """Where the heads of Q, K, V or Y lie: in input number `buffer`, read in place.

    layout "rows": (B, length, width), head h begins at column `offset` + h * head_dim.
    layout "heads": (B, heads, length, head_dim).
    """

    buffer: int
    layout: Literal["rows", "heads"]
    width: int
    offset: int = 0


@dataclass(frozen=True)
class TensorInput:
    """A tensor that a function of scores reads by whole numbers."""

    dtype: str
    dims: tuple[Dim, ...]


@dataclass(frozen=True)
class AttentionOp:
    """Y = softmax(scores) V, where the scores are scale Q K^T after all steps of `scores`; ONNX Attention-25. B, L, S
    are dims; H, G, E, F fixed.

    Q, K, V and Y are of `dtype`; scores, statistics and sums are of `softmax`, where what asks for less gets float32.
    `float32_products` says how numbers of Q and K, and weights and V, are multiplied where `dtype` is float32.
    What a query sees is what all steps let it see. K and V are of `kv_dtype` where they are stored in another dtype, as
    in a cache; int8 has a scale for each row, if it `has_scales`, uint8 two numbers of four bits to a byte. Inputs:
    those of Q, K and V, the scales of K and of V (B, G, S) float32 where there are any, then those of the steps, in
    order.
    """

    kind: ClassVar[str] = "attention"

    batch: Dim
    q_length: Dim
    kv_length: Dim
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    query: HeadLayout
    key: HeadLayout
    value: HeadLayout
    output: HeadLayout
    dtype: DType = "float32"
    scores: tuple[ScoreStep, ...] = ()
    softmax: Literal["float32", "float64"] = "float32"
    float32_products: Float32Products = "ieee"
    kv_dtype: CacheDType | None = None
    unscaled: bool = False

    @property
    def stored_dtype(self) -> CacheDType:
        """What K and V are stored as in memory."""
        return self.kv_dtype or self.dtype

    @property
    def has_scales(self) -> bool:
        """Whether rows of K and V have scales."""
        return self.kv_dtype == "int8" and not self.unscaled

    @property
    def window(self) -> WindowSpec | None:
        """The keys that queries see by their places; None: all, and places are counted from the first query."""
        return first(step.window for step in self.scores)

    @property
    def from_end(self) -> bool:
        """Whether the last query stands at the last key; else the first at the first."""
        return self.window is not None and self.window.alignment == "bottom_right"

    @property
    def pairs(self) -> np.ndarray[Any, Any] | None:
        """The pairs that are known when the attention is compiled, bool (1 or H, L, S); True takes part."""
        return first(step.pairs for step in self.scores)

    def any_step(self, question: str) -> bool:
        """Whether the answer of any step to a question, an attribute of `ScoreStep`, is true."""
        return any(getattr(step, question) for step in self.scores)

    def summary(self) -> str:
        grouped = "" if self.num_heads == self.num_kv_heads else f"/{self.num_kv_heads}"
        words = [words for step in self.scores if (words := step.summary())]
        if self.kv_dtype is not None:
            words.append(f"keys and values in {'int4' if self.kv_dtype == 'uint8' else self.kv_dtype}")
        how = products_summary(self.float32_products)
        return ", ".join([f"{self.num_heads}{grouped} heads of {self.head_dim}", *words]) + how

    def semantics(self, name: str) -> Semantics:
        """What this attention means, resolved."""
        words: dict[str, Any] = {}
        for step in self.scores:
            words |= step.semantics()
        others = {word: words.pop(word) for word in sorted(words.keys() - set(Semantics.__struct_fields__))}
        if others:
            words["steps"] = others
        return Semantics(
            op=name,
            operator="ONNX Attention-25",
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            scale=self.scale,
            dtype=self.dtype,
            bool_mask="True takes part",
            fully_masked_row="zeros",
            softmax=self.softmax,
            **words,
        )


@dataclass(frozen=True)
class RotaryOp:
    """Y = x, the first R = `rotary_dim` elements of each head turned by its place: ONNX RotaryEmbedding-23.

    Of these, pair i is (x[i], x[i + R/2]), or (x[2 i], x[2 i + 1]) where `interleaved`:
        y1 = cos_i x1 - sin_i x2
        y2 = sin_i x1 + cos_i x2
    The other elements of a head are copied. All of it is of `dtype`; the arithmetic is float32, rounded once.

    max_positions   the angles are tables (max_positions, R/2), read at positions (B, L) int64 from 0 on; None: they are
                    those of each place, (B, L, R/2), and there are no positions
    shared_angles   the batch axis of the positions, or of the angles where there are none, is 1: one for all entries
    whole_angles    cos and sin have R elements instead of R/2, laid out as x is: y1 is computed with x1's, y2 with x2's
    positions_name  what to call the positions where they are beyond the tables, such as "input 'position_ids'"

    Inputs: x, cos, sin, positions. Roformer, eq. 34; https://arxiv.org/abs/2104.09864
    """

    kind: ClassVar[str] = "rope"

    batch: Dim
    length: Dim
    num_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool
    max_positions: Dim | None
    x: HeadLayout
    output: HeadLayout
    dtype: DType = "float32"
    shared_angles: bool = False
    whole_angles: bool = False
    positions_name: str = "position_ids"

    def summary(self) -> str:
        pairs = "interleaved" if self.interleaved else "in halves"
        return f"{self.num_heads} heads of {self.head_dim}, {self.rotary_dim} turned, {pairs}"


@dataclass(frozen=True)
class KvScatterOp:
    """A cache (B, ..., S, ...) with the L rows of an update written along `axis`, ONNX TensorScatter-24.

    cache         its dims; the update has the same but for `length` on the axis
    update        where the update lies, "rows" of a wider buffer whose heads are the cache's second axis (or whose one
                  head is a row of a cache (B, S, width)); None: by itself, laid out as the cache is
    circular      row j goes to (index + j) mod S; else it goes to index + j, and what does not fit is refused
    indexed       whether an input (B,) int64 says where the first row goes; else it goes to 0
    in_place      the new rows are written into the cache that was given, and it is the result: `Emitted.run` has no
                  output of its own then
    indices_name  what to call the indices where they are refused, such as "input 'write_indices'"
    update_name   what to call the update where it has more rows than the cache

    `dtype` is any of whole bytes: elements are copied as they are, or, where the update is of `update_dtype`, rounded,
    both floats. Inputs: cache, update, indices.
    """

    kind: ClassVar[str] = "scatter"

    cache: tuple[Dim, ...]
    axis: int
    length: Dim
    update: HeadLayout | None
    circular: bool
    indexed: bool
    in_place: bool
    dtype: str = "float32"
    indices_name: str = "write_indices"
    update_name: str = "update"
    update_dtype: DType | None = None

    @property
    def rounds(self) -> bool:
        """Whether the update is brought into another dtype."""
        return self.update_dtype is not None and self.update_dtype != self.dtype

    def summary(self) -> str:
        mode = "circular" if self.circular else "linear"
        place = "in place" if self.in_place else "into a copy"
        how = f", {self.update_dtype} to {self.dtype}" if self.rounds else ""
        return f"axis {self.axis} of {list(self.cache)}, {mode}, {place}{how}"


@dataclass(frozen=True)
class QuantiseRowsOp:
    """Rows of heads in eight bits, 127 steps their largest magnitude: x -> q (B, heads, L, E) int8 and the steps
    (B, heads, L) float32, so that q * step is within half a step of x. NaN or infinity makes the step of its row
    something that is no finite number. `x` is where the rows lie, of `dtype`.
    """

    kind: ClassVar[str] = "quantise_rows"

    batch: Dim
    length: Dim
    num_heads: int
    head_dim: int
    x: HeadLayout
    dtype: DType = "float32"

    def summary(self) -> str:
        return f"{self.num_heads} heads of {self.head_dim} in int8, a scale for each row"


@dataclass(frozen=True)
class ScoresOp:
    """What becomes of the scores of `attention`, (B, H, L, S) of its dtype: qk_matmul_output of ONNX Attention.

    `stage` 0 is scale Q K^T; 1 within limits; 2 masked, -inf where it hides; 3 the weights, zeros where it hides.
    Takes the attention's inputs.
    """

    kind: ClassVar[str] = "scores"

    attention: AttentionOp
    stage: int

    @property
    def dtype(self) -> DType:
        return self.attention.dtype

    def summary(self) -> str:
        return f"qk_matmul_output_mode {self.stage}"


@dataclass(frozen=True)
class KvConcatOp:
    """Present keys or values (B, G, P + L, E): P rows of each head from the past, then L new ones.

    past  P, or None where there is no past: the new rows alone, laid out by heads
    new   where the new rows lie, in input 0; the past is input 1, (B, G, P, E)
    """

    kind: ClassVar[str] = "present"

    batch: Dim
    past: Dim | None
    length: Dim
    num_heads: int
    head_dim: int
    new: HeadLayout
    dtype: DType = "float32"

    def summary(self) -> str:
        return f"{self.num_heads} heads of {self.head_dim}" + ("" if self.past is None else ", behind the past")


@dataclass(frozen=True)
class SoftmaxStatsOp:
    """What each row of the softmax of `attention` is like, from the same inputs (V's are not read). In this order:

    lse      (B, H, L) float32: ln of the sum of exp of what the row sees: scores after all steps, and its score
             of no key; -inf where that is nothing
    entropy  (B, H, L) float32: - sum of w ln w over the weights w, and the share of no key; 0 where nothing is seen
    top_k    (B, H, L, k) float32 and int64: the k largest weights and the keys they belong to, of equal scores the
             first key first; 0 and -1 beyond the keys that are seen
    """

    kind: ClassVar[str] = "statistics"
    dtype: ClassVar[DType] = "float32"

    attention: AttentionOp
    lse: bool = False
    entropy: bool = False
    top_k: int = 0

    def summary(self) -> str:
        words = {"lse": self.lse, "entropy": self.entropy, f"top_k {self.top_k}": self.top_k > 0}
        return ", ".join(word for word, is_output in words.items() if is_output)


@dataclass(frozen=True)
class AttentionProbsOp:
    """Rows of the softmax of `attention` themselves, (B, heads, rows, S) of its dtype, from the same inputs (V's are
    not read): of the chosen `heads` and query `rows`, None is all. A row may count from the end, -1 is the last; one
    that is not there is zeros, as is one that sees nothing."""

    kind: ClassVar[str] = "weights"

    attention: AttentionOp
    heads: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None

    @property
    def dtype(self) -> DType:
        return self.attention.dtype

    @property
    def whole(self) -> bool:
        """Whether it is all heads and rows."""
        return self.heads is None and self.rows is None

    def summary(self) -> str:
        axes = {"head": self.heads, "row": self.rows}
        return ", ".join(f"{axis}s {list(n)}" if n is not None else f"every {axis}" for axis, n in axes.items())


Op = (
    LinearOp
    | QuantiseOp
    | ProductOp
    | AttentionOp
    | ScoresOp
    | SoftmaxOp
    | RecurrenceOp
    | SoftmaxStatsOp
    | AttentionProbsOp
    | KvConcatOp
    | RotaryOp
    | QuantiseRowsOp
    | KvScatterOp
)


def float32_products_of(op: Op) -> Float32Products:
    """How an operation multiplies float32; those without a choice do it as IEEE has it."""
    return op.float32_products if isinstance(op, LinearOp | ProductOp | AttentionOp) else "ieee"
