"""Operators of Microsoft's: what they are rewritten to means what ONNX Runtime computes, and compiles.

Every case is run three times: by ONNX Runtime as it is, in float64 by the oracle after the rewriting, and compiled.
B batch, L query length, S key length, P past, H heads, G key/value heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.canonicalize.canonicalize import canonicalize
from mhsa_compile.frontend.export.source import read_source
from mhsa_compile.spec.outputs import layer_words
from mhsa_compile.verification.error_budget import budget, max_error
from mhsa_compile.verification.verify import eager, oracle

B, L, S, P, H, G, E = 2, 5, 7, 3, 6, 2, 32  # ONNX Runtime rotates heads of multiples of 16 only
D = H * E
KINDS = {"f": TensorProto.FLOAT, "i": TensorProto.INT32, "l": TensorProto.INT64}
MICROSOFT = "com.microsoft"

Dims = list[int | str]


class File:
    """A model of a few nodes, as it is built."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.inputs: list[onnx.ValueInfoProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.nodes: list[onnx.NodeProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.feeds: dict[str, np.ndarray] = {}

    def input(self, name: str, dims: Dims, sizes: tuple[int, ...] | np.ndarray, kind: str = "f") -> str:
        """`sizes` of random floats, or the array itself."""
        self.inputs.append(helper.make_tensor_value_info(name, KINDS[kind], dims))
        array = sizes if isinstance(sizes, np.ndarray) else self.rng.standard_normal(sizes)
        self.feeds[name] = array.astype(helper.tensor_dtype_to_np_dtype(KINDS[kind]))
        return name

    def weight(self, name: str, *shape: int) -> str:
        array = (self.rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def node(self, op_type: str, inputs: list[str], outputs: list[str], domain: str = MICROSOFT, **said: Any) -> None:
        self.nodes.append(helper.make_node(op_type, inputs, outputs, name=op_type, domain=domain, **said))

    def output(self, name: str, dims: Dims) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, dims))

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "g", self.inputs, self.outputs, self.constants)
        domains = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=domains, ir_version=10)


def rows(file: File, name: str, length: int | str, size: int, width: int = D) -> str:
    return file.input(name, ["B", length, width], (B, size, width))


MASKS: dict[str, tuple[Dims, np.ndarray]] = {
    "keys": (["B", "L"], np.array([[1] * L, [0, 1, 1, 0, 0]])),
    "nothing left": (["B", "L"], np.array([[1] * L, [0] * L])),
    "square": (["B", "L", "L"], np.random.default_rng(1).integers(0, 2, (B, L, L))),
    "ends": (["B"], np.array([L, 2])),
}


def attention(mask: str = "", past: bool = False, added: bool = False, **said: Any) -> File:
    file = File()
    file.node("Identity", [rows(file, "x0", "L", L)], ["x"], domain="")
    inputs = ["x", file.weight("w", D, 3 * D), file.weight("b", 3 * D)]
    if mask == "ends and starts":
        halves = {"ends": np.array([L, 4]), "starts": np.array([1, 2])}
        file.node("Concat", [file.input(n, ["B"], h, kind="i") for n, h in halves.items()], ["m"], domain="", axis=0)
        inputs.append("m")
    else:
        inputs.append(file.input("mask", *MASKS[mask], kind="i") if mask else "")
    inputs.append(file.input("past", [2, "B", H, "P", E], (2, B, H, P, E)) if past else "")
    inputs.append(file.input("added", [1, H, "L", "L"], (1, H, L, L)) if added else "")
    file.node("Attention", inputs, ["y", *(["present"] if past else [])], num_heads=H, **said)
    file.output("y", ["B", "L", D])
    if past:
        file.output("present", [2, "B", H, "T", E])
    return file


def fixed_bounds(batch: int | str = B, more: int = 0) -> File:
    """Ends and starts in one input, perhaps with `more` behind them."""
    file = File()
    bounds = np.array([L, L - 1, 0, 3, *range(more)])
    inputs = [file.input("x", [batch, L, D], (B, L, D)), file.weight("w", D, 3 * D), file.weight("b", 3 * D)]
    file.node("Attention", [*inputs, file.input("mask", [len(bounds)], bounds, kind="i")], ["y"], num_heads=H)
    file.output("y", [batch, L, D])
    return file


def multi_head(form: str = "rows", mask: bool = False, bias: bool = False, **said: Any) -> File:
    file = File()
    packed = {"packed": (["B", "L", H, 3, E], (B, L, H, 3, E))}
    inputs = [file.input("q", *packed[form]) if form == "packed" else rows(file, "q", "L", L)]
    if form == "rows":
        inputs += [rows(file, "k", "S", S), rows(file, "v", "S", S)]
    elif form == "packed keys":
        inputs += [file.input("k", ["B", "S", H, 2, E], (B, S, H, 2, E)), ""]
    elif form == "heads":
        inputs += [file.input(name, ["B", H, "S", E], (B, H, S, E)) for name in "kv"]
    elif form == "past":
        inputs += [rows(file, "k", "L", L), rows(file, "v", "L", L)]
    inputs += [""] * (3 - len(inputs)) + [file.weight("bias", 3 * D) if bias else ""]
    length = L if form in ("packed", "past") else S
    seen = np.random.default_rng(1).integers(0, 2, (B, length))
    inputs.append(file.input("mask", ["B", "L" if length == L else "S"], seen, kind="i") if mask else "")
    outputs = ["y"]
    if form == "past":
        inputs += ["", *(file.input(name, ["B", H, "P", E], (B, H, P, E)) for name in ("past_key", "past_value"))]
        outputs += ["present_key", "present_value"]
    file.node("MultiHeadAttention", inputs, outputs, num_heads=H, **said)
    file.output("y", ["B", "L", D])
    for name in outputs[1:]:
        file.output(name, ["B", H, "T", E])
    return file


def grouped(past: str = "", length: int = L, ends: tuple[int, ...] = (L, L), rotary: int = 0, **said: Any) -> File:
    """`past`: none, "grows" (P rows before), "buffer" (of 11 rows, the first of them filled). A row ends at `ends`."""
    file, batch = File(), len(ends)
    widths = {"q": (H + 2 * G) * E} if said.pop("packed", False) else {"q": D, "k": G * E, "v": G * E}
    inputs = [file.input(name, ["B", "L", width], (batch, length, width)) for name, width in widths.items()]
    inputs += [""] * (3 - len(inputs))
    size, present = {"": (0, "L"), "grows": (P, "T"), "buffer": (11, "P")}[past]
    for name in ("past_key", "past_value"):
        inputs.append(file.input(name, ["B", G, "P", E], (batch, G, size, E)) if past else "")
        if past == "buffer":  # behind what a row has there is nothing yet
            filled = np.arange(size)[:, np.newaxis] < np.array(ends).reshape(-1, 1, 1, 1) - length
            file.feeds[name] = np.where(filled, file.feeds[name], np.float32(0))
    inputs.append(file.input("seqlens_k", ["B"], np.array(ends) - 1, kind="i"))
    file.constants.append(numpy_helper.from_array(np.array(max(ends), np.int32), "total"))
    inputs.append("total")
    if rotary:
        inputs += [file.weight("cos", 32, rotary // 2), file.weight("sin", 32, rotary // 2)]
        said["do_rotary"] = 1
    if said.pop("sinks", False):
        inputs += [""] * (11 - len(inputs))
        inputs.append(file.weight("sinks", H))
    outputs = ["y", "present_key", "present_value"]
    file.node("GroupQueryAttention", inputs, outputs, num_heads=H, kv_num_heads=G, **said)
    file.output("y", ["B", "L", D])
    for name in outputs[1:]:
        file.output(name, ["B", G, present, E])
    return file


def first_prompt(length: int | str) -> File:
    """A past of no rows, as exporters write it for a prompt, and presents whose lengths the file does not say."""
    file = grouped("grows", rotary=E)
    sizes = [B, G, 0, E]
    for value in file.inputs:
        if value.name.startswith("past"):
            value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, sizes))
            file.feeds[value.name] = np.zeros(sizes, np.float32)
        elif value.name in "qkv":
            value.type.tensor_type.shape.dim[1].CopyFrom(
                onnx.TensorShapeProto.Dimension(**{"dim_value" if isinstance(length, int) else "dim_param": length})
            )
    for value in file.outputs[1:]:
        value.type.tensor_type.shape.dim[2].Clear()
    return file


CASES: dict[str, Callable[[], File]] = {
    "attention": attention,
    "attention, causal": lambda: attention(unidirectional=1),
    **{f"attention, mask of {name}": lambda name=name: attention(mask=name, scale=0.3) for name in MASKS},
    "attention, mask of ends and starts": lambda: attention(mask="ends and starts"),
    "attention, ends and starts, past": lambda: attention(mask="ends and starts", past=True, unidirectional=1),
    "attention, fixed ends and starts": fixed_bounds,
    "attention, keys, causal": lambda: attention(mask="keys", unidirectional=1),
    "attention, lowest filter": lambda: attention(mask="nothing left", mask_filter_value=float(np.finfo("f4").min)),
    "attention, added": lambda: attention(mask="keys", added=True),
    "attention, past": lambda: attention(past=True, unidirectional=1),
    "multi-head": multi_head,
    "multi-head, bias and mask": lambda: multi_head(bias=True, mask=True),
    "multi-head, heads": lambda: multi_head("heads"),
    "multi-head, past": lambda: multi_head("past", bias=True, unidirectional=1),
    "grouped": grouped,
    "grouped, packed, rotary": lambda: grouped(packed=True, rotary=E),
    "grouped, part rotary, interleaved": lambda: grouped(rotary=E - 16, rotary_interleaved=1),
    "grouped, softcap, scale, sinks": lambda: grouped(softcap=2.5, scale=0.4, sinks=True),
    "grouped, a smooth softmax": lambda: grouped("buffer", 1, (5, 9), smooth_softmax=1, local_window_size=4),
    "grouped, not causal": lambda: grouped("buffer", causal=0),
    "grouped, window": lambda: grouped(local_window_size=3),
    "grouped, past grows": lambda: grouped("grows", ends=(P + L,), rotary=E),
    "grouped, no rows before": lambda: first_prompt(L),
    "grouped, no rows before a prompt of any length": lambda: first_prompt("L"),
    "grouped, one step in a buffer of rows of different length": lambda: grouped("buffer", 1, (5, 9), rotary=E),
    "grouped, first prompt in a buffer": lambda: grouped("buffer", local_window_size=2),
}


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


@pytest.mark.parametrize("case", CASES)
def test_means_what_onnxruntime_computes(case: str) -> None:
    file = CASES[case]()
    model = file.model()
    rewritten = canonicalize(model).model
    assert MICROSOFT not in {node.domain for node in rewritten.graph.node}
    theirs = run(model, file.feeds)
    expected, yardstick = oracle(rewritten, file.feeds), eager(rewritten, file.feeds)
    for truth, other, allowed in zip(expected, theirs, yardstick, strict=True):
        assert max_error(truth, other) <= budget(truth, allowed, "float32")


@pytest.mark.parametrize("case", CASES)
def test_says_what_it_does_inside(case: str) -> None:
    file = CASES[case]()
    known, words = [value.name for value in file.model().graph.output], ("weights", "heads", "lse")
    found = canonicalize(file.model(), layer_words(words)).model
    onnx.checker.check_model(found, full_check=True)
    names = [value.name for value in found.graph.output]
    assert names == [*known, *(f"layer0_{word}" for word in words)]
    results = dict(zip(names, oracle(found, file.feeds), strict=True))
    weights, heads = results["layer0_weights"], results["layer0_heads"]
    sums, unseen = weights.sum(-1), results["layer0_lse"] == -np.inf
    has_sinks = any(function.input[7:8] == ["sinks"] for function in found.functions)
    assert (sums < 1).all() if has_sinks else np.allclose(sums, np.where(unseen, 0, 1))
    assert np.allclose(heads.transpose(0, 2, 1, 3).reshape(results["y"].shape), results["y"])
    if "present_value" in results and not file.feeds.keys() & {"seqlens_k"}:
        values = results["present_value"]
        repeated = np.repeat(values, heads.shape[1] // values.shape[1], axis=1)
        assert np.allclose(weights @ repeated, heads)


COMPILED = [
    "attention, ends and starts, past",
    "multi-head, past",
    "grouped, softcap, scale, sinks",
    "grouped, one step in a buffer of rows of different length",
]


@pytest.mark.parametrize(
    "outputs",
    [
        pytest.param(None, marks=pytest.mark.thorough),
        pytest.param(["weights", "entropy", "heads"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("case", COMPILED)
def test_compiles(case: str, outputs: list[str] | None) -> None:
    file = CASES[case]()
    artifact = mhsa.compile(file.model(), outputs=outputs)
    assert [block.fused for block in artifact.manifest.attention] == [True]
    results = mhsa.load(artifact)(**file.feeds)
    rewritten = onnx.load(artifact.path / "model.onnx")
    expected, yardstick = oracle(rewritten, file.feeds), eager(rewritten, file.feeds)
    for truth, y, allowed in zip(
        expected, results if isinstance(results, tuple) else [results], yardstick, strict=True
    ):
        assert max_error(truth, y) <= budget(truth, allowed, "float32")


@pytest.mark.parametrize("packed", ["queries, keys and values", "keys and values"])
def test_packed_heads_are_those_side_by_side(packed: str) -> None:
    """ONNX Runtime computes these on GPUs only: held against the same heads as rows."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((B, L, H, E)).astype(np.float32) for _ in "qkv")
    file = File()
    if packed == "keys and values":
        inputs = [file.input("q", ["B", "L", D], q.reshape(B, L, D))]
        inputs += [file.input("kv", ["B", "L", H, 2, E], np.stack((k, v), axis=3)), ""]
    else:
        inputs = [file.input("qkv", ["B", "L", H, 3, E], np.stack((q, k, v), axis=3))]
    file.node("MultiHeadAttention", inputs, ["y"], num_heads=H)
    file.output("y", ["B", "L", D])
    plain = File()
    rows = {name: value.reshape(B, L, D) for name, value in zip("qkv", (q, k, v), strict=True)}
    names = [plain.input(name, ["B", "L", D], value) for name, value in rows.items()]
    plain.node("MultiHeadAttention", names, ["y"], num_heads=H)
    plain.output("y", ["B", "L", D])
    expected = run(plain.model(), plain.feeds)[0]
    (y,) = eager(canonicalize(file.model()).model, file.feeds)
    (exact,) = oracle(canonicalize(file.model()).model, file.feeds)
    assert max_error(exact, expected) <= budget(exact, y, "float32")


def bias_by_call() -> File:
    file = multi_head(bias=True)
    file.constants.clear()
    file.input("bias", [3 * D], (3 * D,))
    return file


REFUSED: dict[str, tuple[Callable[[], File], str]] = {
    "rotary": (lambda: attention(do_rotary=1), "Attention node 'Attention': expected do_rotary=0, got do_rotary=1"),
    "scores": (
        lambda: grouped(qk_output=1),
        "GroupQueryAttention node .*: expected a fourth output where qk_output is 1",
    ),
    "a window that is not causal": (
        lambda: grouped(causal=0, local_window_size=3),
        "expected local_window_size=-1 beside causal=0, got 3",
    ),
    "no window": (
        lambda: grouped(local_window_size=0),
        "expected local_window_size of 1 or more, or -1 for none, got 0",
    ),
    "causal of other keys": (
        lambda: multi_head(unidirectional=1),
        "expected unidirectional=0, or as many keys as queries, .*Export the model without it",
    ),
    "bias of the call": (
        bias_by_call,
        "'bias' as a constant, got an input of the model. Make it an initializer",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_standard_cannot_say(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        canonicalize(read_source(make().model(), None, None).model)


@pytest.mark.parametrize("file", [fixed_bounds("B"), fixed_bounds(more=B + 2)], ids=["of any batch", "of packed rows"])
def test_a_mask_of_another_form(file: File) -> None:
    message = (
        r"expected a mask of \(B, T\), .* ends and starts \(2B,\), B fixed or two joined; .* the first B are the ends"
    )
    with pytest.raises(ModelError, match=message):
        canonicalize(file.model())


def _convolved(activation: str, params: list[float] | None = None, more: bool = False, **said: Any) -> File:
    file, groups = File(), said.get("group", 1)
    inputs = [
        file.input("x", ["B", 6, "Y", "X"], (2, 6, 9, 8)),
        file.weight("w", 8, 6 // groups, 3, 3),
        file.weight("b", 8),
    ]
    inputs += [file.input("z", ["B", 8, "Y", "X"], (2, 8, 9, 8))] if more else []
    words = {} if params is None else {"activation_params": params}
    file.node("FusedConv", inputs, ["y"], activation=activation, pads=[1] * 4, **words, **said)
    file.output("y", ["B", 8, "Y", "X"])
    return file


def _multiplied(left: tuple[int, ...], right: tuple[int, ...], **said: Any) -> File:
    file = File()
    file.node("FusedMatMul", [file.input("x", [*left], left), file.input("z", [*right], right)], ["y"], **said)
    file.output("y", [f"y{i}" for i in range(len(left))])
    return file


def _added() -> File:
    file = File()
    inputs = [file.input("x", ["B", 24], (7, 24)), file.weight("w", 9, 24), file.weight("b", 9)]
    words = {"activation": "LeakyRelu", "activation_alpha": 0.3, "transB": 1, "alpha": 0.5, "beta": 2.0}
    file.node("FusedGemm", inputs, ["y"], **words)
    file.output("y", ["B", 9])
    return file


FUSED: dict[str, Callable[[], File]] = {
    "Conv, Relu": lambda: _convolved("Relu"),
    "Conv of groups, more, Relu": lambda: _convolved("Relu", more=True, group=2),
    "Conv, more, Sigmoid": lambda: _convolved("Sigmoid", more=True),
    "Conv of groups, Tanh": lambda: _convolved("Tanh", group=2),
    "Conv, LeakyRelu": lambda: _convolved("LeakyRelu", [0.2]),
    "Conv, Clip": lambda: _convolved("Clip", [-0.3, 0.5]),
    "Conv, HardSigmoid": lambda: _convolved("HardSigmoid", [0.3, 0.4]),
    "Gemm, LeakyRelu": _added,
    "MatMul, batches of A": lambda: _multiplied((7, 2, 3, 5), (2, 3, 5, 6), transBatchA=1, alpha=0.5),
    "MatMul, batches of both": lambda: _multiplied((7, 2, 3, 5), (5, 2, 3, 6), transBatchA=1, transBatchB=1),
    "MatMul, batches of A, turned": lambda: _multiplied((5, 2, 3, 7), (2, 3, 5, 6), transBatchA=1, transA=1),
}


@pytest.mark.thorough_only("Conv, more, Sigmoid", "Conv of groups, Tanh")  # six seconds each, in TVM
@pytest.mark.parametrize("name", FUSED)
def test_what_the_optimizer_fuses(name: str) -> None:
    """FusedConv, FusedGemm, FusedMatMul: a session keeps files with them."""
    file = FUSED[name]()
    model, expected = file.model(), run(file.model(), file.feeds)[0]
    plain = canonicalize(model).model
    assert not any(node.domain == MICROSOFT for node in plain.graph.node)
    (exact,), (yardstick,) = oracle(plain, file.feeds), eager(plain, file.feeds)
    most = budget(exact, yardstick, "float32")
    assert max_error(exact, expected) <= 2 * most  # ONNX Runtime's own roundings
    y = mhsa.load(mhsa.compile(model, without_attention="accept"))(**file.feeds)
    assert y.shape == expected.shape and max_error(exact, y) <= most


def test_an_activation_that_is_not_understood_is_refused() -> None:
    with pytest.raises(ModelError, match=r"activation among Clip, .* got 'Softplus'"):
        canonicalize(_convolved("Softplus").model())
