"""compile(): sources of every kind, the artifact's bytes, and each thing that is refused."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from safetensors.numpy import load_file
from support.onnx_models import model_of
from torch import nn
from torch.nn import functional as F

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError, ModelError, OutputError, TargetError
from mhsa_compile.nn.functional import to_numpy
from mhsa_compile.nn.modules import weights
from mhsa_compile.spec.window import WindowSpec
from mhsa_compile.verification.verify import verify

SPEC = mhsa.AttentionSpec(embed_dim=32, num_heads=4)
pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")


class Block(nn.Module):
    """A block as people write it: fused or separate projections, 4-D attention, residual and LayerNorm around it."""

    def __init__(self, heads: int = 4, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value, self.out = (nn.Linear(64, 64) for _ in range(4))
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.norm(x + self.out(y.transpose(1, 2).flatten(2)))


def compiled_block(causal=False):
    """A block, and its artifact."""
    block = Block(causal=causal).eval()
    return block, mhsa.compile(block, example_inputs=(torch.randn(2, 7, 64),))


@pytest.fixture(scope="module")
def plain_block():
    return compiled_block()


@pytest.fixture(scope="module")
def of_spec(tmp_path_factory):
    """A layer of SPEC, its artifact, and the folder of what passed between the stages."""
    layer, dump = mhsa.MultiHeadAttention(SPEC).eval(), tmp_path_factory.mktemp("pipeline") / "dump"
    return layer, mhsa.compile(layer, dump=dump), dump


@pytest.mark.thorough
@pytest.mark.parametrize("causal", [False, True])
def test_any_module_with_attention_compiles(causal, plain_block):
    block, artifact = compiled_block(causal) if causal else plain_block
    kinds = [(op.op, op.source) for op in artifact.manifest.ops]
    assert kinds[:3] == [("linear", "default"), ("attention", "default"), ("linear", "default")]
    assert ("nn.layer_norm", "fallback") in kinds
    x = torch.randn(3, 53, 64)
    with torch.inference_mode():
        assert torch.allclose(mhsa.load(artifact)(x), block(x), atol=2e-6)


def test_unaligned_memory_is_read_right_where_tvm_runs_some_operators(plain_block):
    """TVM's own code takes 64-byte alignment for granted, and faults without it."""
    block, artifact = plain_block
    memory = np.zeros(2 * 9 * 64 + 64, np.float32)
    stored = {name: value.detach().numpy() for name, value in block.named_parameters()}
    for offset in range(0, 32, 3):
        weights = {
            name: np.concatenate([memory[:offset], w.ravel()])[offset:].reshape(w.shape) for name, w in stored.items()
        }
        x = memory[offset : offset + 2 * 9 * 64].reshape(2, 9, 64)
        x[...] = np.random.default_rng(offset).standard_normal(x.shape)
        with torch.inference_mode():
            expected = block(torch.from_numpy(x.copy())).numpy()
        for given in (x, torch.from_numpy(x)):
            assert np.allclose(mhsa.load(artifact, weights=weights)(given), expected, atol=2e-6)


class CutProjection(nn.Module):
    """One matrix for queries, keys and values, which TVM's code cuts into three where weights are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(192, 64) / 6), nn.Parameter(torch.randn(192))

    def forward(self, x):
        parts = zip(self.weight.chunk(3), self.bias.chunk(3), strict=True)
        heads = [nn.functional.linear(x, *part).unflatten(-1, (4, 16)).transpose(1, 2) for part in parts]
        return nn.functional.scaled_dot_product_attention(*heads)


@pytest.mark.thorough
def test_unaligned_weights_are_read_right_where_kernels_run_all_operators():
    module = CutProjection().eval()
    artifact = mhsa.compile(module, example_inputs=(torch.randn(2, 9, 64),))
    assert not artifact.manifest.has_fallbacks
    x = torch.randn(3, 7, 64)
    with torch.no_grad():
        expected = module(x)
    for offset in range(0, 32, 3):
        weights = {
            name: torch.cat((torch.zeros(offset), value.detach().flatten()))[offset:].view(value.shape)
            for name, value in module.named_parameters()
        }
        assert torch.allclose(mhsa.load(artifact, weights=weights)(x), expected, atol=2e-6)


def test_the_heads_are_read_where_they_lie(plain_block):
    """No Transpose, no Reshape of activations is left of the 4-D form: three operations of ours do it all."""
    _, artifact = plain_block
    left = {op.op for op in artifact.manifest.ops}
    assert left == {"linear", "attention", "nn.layer_norm"}  # the residual sum is in the output projection
    assert sum(op.op == "linear" for op in artifact.manifest.ops) == 2  # Q, K and V side by side


@pytest.mark.thorough
def test_a_torch_layer_compiles_as_it_is():
    layer = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    attention = mhsa.load(mhsa.compile(layer))
    x = torch.randn(2, 19, 32)
    with torch.inference_mode():
        assert torch.allclose(attention(x), layer(x, x, x, need_weights=False)[0], atol=1e-6)


def attention_model(path, *, opset=23, ops=(), attributes=None, outputs=("y",), inputs=("q", "k", "v")):
    """q (B, 2, L, 8), k and v (B, 2, S, 8) -> Attention -> `ops`, one after the other."""
    queries, keys = ["B", 2, "L", 8], ["B", 2, "S", 8]
    values = {"q": queries, "k": keys, "v": keys, "mask": (TensorProto.BOOL, ["L", "S"])}
    nodes = [helper.make_node("Attention", list(inputs), ["y0", *outputs[1:]], **(attributes or {}))]
    nodes += [helper.make_node(op, [f"y{i}"], [f"y{i + 1}"]) for i, op in enumerate(ops)]
    onnx.save(model_of(nodes, {name: values[name] for name in inputs}, {f"y{len(ops)}": queries}, opset=opset), path)
    return path


@pytest.mark.thorough
def test_a_file_made_elsewhere_compiles_without_a_spec(tmp_path):
    path = attention_model(tmp_path / "core.onnx", ops=("Tanh",), inputs=("q", "k", "v", "mask"))
    artifact = mhsa.compile(path)
    assert artifact.manifest.spec is None
    verdict = mhsa.verify(artifact, cases=[{"B": 2, "L": 7, "S": 31}, {"B": 1, "L": 1, "S": 1}])
    assert verdict.ok, verdict.worst


@pytest.mark.thorough
def test_a_window_made_elsewhere(tmp_path):
    """The window is without causality, and over lengths that differ: neither a spec of ours nor opset 24 could say
    it."""
    attributes = {"left_window_size": 5, "right_window_size": 2}
    artifact = mhsa.compile(attention_model(tmp_path / "core.onnx", opset=25, attributes=attributes))
    assert artifact.manifest.semantics[0].band == WindowSpec(5, 2, "top_left")
    verdict = mhsa.verify(artifact, cases=[{"B": 2, "L": 7, "S": 31}, {"B": 1, "L": 31, "S": 7}])
    assert verdict.ok, verdict.worst


@pytest.mark.thorough
def test_a_constant_mask_for_each_head(tmp_path):
    model = onnx.load(attention_model(tmp_path / "core.onnx", inputs=("q", "k", "v", "mask")))
    del model.graph.input[3]
    mask = np.random.default_rng(0).random((2, 7, 67)) < 0.4
    mask[1, 3] = False
    model.graph.initializer.append(onnx.numpy_helper.from_array(mask, "mask"))
    artifact = mhsa.compile(model, dims={"L": 7, "S": 67})
    assert artifact.manifest.semantics[0].static_mask.startswith("bool [2, 7, 67]")
    assert [info.name for info in artifact.manifest.inputs] == ["q", "k", "v"]
    assert artifact.manifest.weights == ()
    verdict = mhsa.verify(artifact, cases=[{"B": 3}])
    assert verdict.ok, verdict.worst


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_in_and_out(dtype):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(64, 4, batch_first=True, dtype=dtype).eval()
    attention = mhsa.load(mhsa.compile(layer))
    x = torch.randn(2, 53, 64).to(dtype)
    y = attention(x)
    assert y.dtype == dtype
    with torch.inference_mode():
        expected = layer(x, x, x, need_weights=False)[0]
    assert torch.allclose(y, expected, atol=2 * torch.finfo(dtype).eps)
    array = to_numpy(x)
    assert np.array_equal(attention(array), to_numpy(y))
    with pytest.raises(InputError, match=f"expected {str(dtype)[6:]} of shape .*, got float32 of shape"):
        attention(x.float())


@pytest.mark.thorough
def test_weights_of_eight_bits_are_stored_as_they_were(tmp_path, of_spec):
    module, plain, _ = of_spec
    artifact = mhsa.compile(module, weights="int8").save(tmp_path / "int8.mhsa")
    assert artifact.manifest.int8_weights
    assert not plain.manifest.int8_weights
    stored = load_file(artifact.path / "weights.safetensors")
    assert all(np.array_equal(stored[name], array) for name, array in weights(module).items())
    assert mhsa.verify(artifact).ok
    layer = mhsa.MultiHeadAttention(SPEC).eval()
    x = torch.randn(1, 31, 32)
    with torch.inference_mode():
        expected = layer(x)
    y = mhsa.load(artifact, weights=layer.state_dict())(x)
    assert torch.allclose(y, expected, atol=0.02)
    assert not torch.allclose(y, expected, atol=1e-5)


def test_dims_are_fixed_by_name(tmp_path):
    artifact = mhsa.compile(attention_model(tmp_path / "core.onnx"), dims={"B": 2, "L": 5})
    assert artifact.manifest.inputs[0].dims == (2, 2, 5, 8)
    assert artifact.manifest.inputs[1].dims == (2, 2, "S", 8)
    with pytest.raises(InputError, match="a symbol of the model: B, L, S, got 'T'"):
        mhsa.compile(tmp_path / "core.onnx", dims={"T": 2})


@pytest.mark.thorough
def test_another_process_makes_the_same_bytes(tmp_path):
    """A fresh one, with hashes and addresses of its own; this one has compiled others before."""
    code = (
        "import sys, torch, mhsa_compile as mhsa; torch.manual_seed(3);"
        "spec = mhsa.AttentionSpec(embed_dim=24, num_heads=4, mask='key_padding', kv_embed_dim=10,"
        " causal='bottom_right');"
        "mhsa.compile(spec).save(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "there")], check=True)
    torch.manual_seed(3)
    spec = mhsa.AttentionSpec(embed_dim=24, num_heads=4, mask="key_padding", kv_embed_dim=10, causal="bottom_right")
    mhsa.compile(spec).save(tmp_path / "here")
    here, there = (
        {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (tmp_path / name).iterdir()}
        for name in ("here", "there")
    )
    assert here == there
    assert set(here) == {"manifest.json", "model.onnx", "module.so", "weights.safetensors"}


def test_one_artifact_serves_every_layer_of_its_spec(of_spec):
    layer, artifact, _ = of_spec
    layers = [layer, *(mhsa.MultiHeadAttention(SPEC).eval() for _ in range(2))]
    x = torch.randn(2, 11, 32)
    for layer in layers:
        with torch.inference_mode():
            assert torch.allclose(mhsa.load(artifact, weights=weights(layer))(x), layer(x), atol=1e-6)


def test_dump_shows_what_passes_between_the_stages(of_spec):
    _, _, dump = of_spec
    names = sorted(file.name for file in dump.iterdir())
    assert names == ["1_exported.onnx", "2_imported.py", "3_scheduled.py", "4_target.toml"]
    assert "op_1" in (dump / "2_imported.py").read_text()


@pytest.mark.thorough
def test_code_for_other_machines_is_built_here(tmp_path):
    for target in ("x86-64-v3", "aarch64-generic"):
        artifact = mhsa.compile(SPEC, target=target)
        assert (artifact.path / "module.so").read_bytes()[:4] == b"\x7fELF"


def test_a_model_without_attention_compiles_and_says_so() -> None:
    nodes = [helper.make_node("Gemm", ["x", "weight"], ["z"]), helper.make_node("Relu", ["z"], ["y"])]
    weight = np.random.default_rng(0).standard_normal((24, 24), np.float32)
    model = model_of(nodes, {"x": ["R", 24]}, {"y": ["R", 24]}, {"weight": weight})
    for _ in range(2):  # the second one may come from the cache
        with pytest.warns(UserWarning, match=r"holds no attention \(Gemm, Relu\)"):
            artifact = mhsa.compile(model)
    assert artifact.manifest.ops[0].kernel == "cpu.linear"
    assert verify(artifact).ok
    with warnings.catch_warnings(action="error"):
        mhsa.compile(model, without_attention="accept")
    with pytest.raises(ModelError, match="expected at least one attention, got Gemm, Relu"):
        mhsa.compile(model, without_attention="refuse")
    with pytest.raises(InputError, match='without_attention: expected "warn", "accept" or "refuse"'):
        mhsa.compile(model, without_attention="no")


class TestRefused:
    def refused(self, source, message, **arguments):
        with pytest.raises(ModelError, match=message):
            mhsa.compile(source, **arguments)

    def test_an_operator_nobody_converts(self, tmp_path):
        self.refused(
            attention_model(tmp_path / "m.onnx", ops=("Bernoulli",)),
            "Bernoulli node .*: .*Random numbers are not compiled",
        )

    @pytest.mark.parametrize(
        ("attributes", "words"),
        [
            ({"softcap": -2.0}, r"softcap of 0 \(none\) or more, got -2.0"),
            ({"softmax_precision": 9}, "softmax_precision of 1, 10, 16, 11, got 9"),
            ({"qk_matmul_output_mode": 4}, "qk_matmul_output_mode of 0, 1, 2, 3, got 4"),
        ],
    )
    def test_what_the_standard_does_not_know(self, tmp_path, attributes, words):
        self.refused(attention_model(tmp_path / "m.onnx", attributes=attributes), words)

    def test_heads_that_do_not_divide(self, tmp_path):
        model = onnx.load(attention_model(tmp_path / "m.onnx"))
        for value in (model.graph.input[0], model.graph.output[0]):
            value.type.tensor_type.shape.dim[1].dim_value = 3
        self.refused(model, "heads that divide the query heads, got 3 query, 2 key and 2 value heads")

    def test_a_negative_window(self, tmp_path):
        path = attention_model(tmp_path / "m.onnx", opset=25, attributes={"left_window_size": -3})
        self.refused(path, "left_window_size must be -1 or nonnegative, got -3")

    def test_other_weights(self):
        with pytest.raises(InputError, match=r"expected None.*got 'int2'"):
            mhsa.compile(SPEC, weights="int2")

    def test_eight_bits_without_a_linear(self, tmp_path):
        self.refused(attention_model(tmp_path / "m.onnx"), "a model with a linear", weights="int8")

    def test_a_truncated_file(self, tmp_path):
        path = attention_model(tmp_path / "m.onnx")
        path.write_bytes(path.read_bytes()[:-40])
        self.refused(path, "truncated|valid ONNX model")

    def test_something_else(self, tmp_path):
        (tmp_path / "m.onnx").write_bytes(b"not a model" * 40)
        self.refused(tmp_path / "m.onnx", "expected an ONNX model")
        (tmp_path / "m.onnx").write_bytes(b"")
        self.refused(tmp_path / "m.onnx", "empty or truncated")
        self.refused(tmp_path / "absent.onnx", r"a readable .onnx file, got .*absent.onnx' \(No such file or directory")
        self.refused(3, "an AttentionSpec, an nn.Module")

    @pytest.mark.parametrize("location", ["../weights.bin", "/etc/hostname"])
    def test_external_data_outside_its_folder(self, tmp_path, location):
        (tmp_path / "weights.bin").write_bytes(b"\0" * 4096)
        folder = tmp_path / "model"
        folder.mkdir()
        model = onnx.load(attention_model(folder / "m.onnx"))
        tensor = helper.make_tensor("w", TensorProto.FLOAT, [4], np.zeros(4, np.float32))
        tensor.ClearField("float_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)
        model.graph.initializer.append(tensor)
        (folder / "m.onnx").write_bytes(model.SerializeToString())
        self.refused(folder / "m.onnx", "external data in the model's own folder")

    def test_an_unknown_target(self):
        with pytest.raises(TargetError, match="Did you mean"):
            mhsa.compile(SPEC, target="x86-64-v9")

    def test_a_full_disk_leaves_nothing(self, tmp_path, monkeypatch):
        import tempfile

        from mhsa_compile.compiler import package

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(package, "write", full)
        node = helper.make_node("Relu", ["x"], ["y"])
        with pytest.raises(OutputError, match="No space left"):
            mhsa.compile(model_of([node], {"x": ["R", 24]}, {"y": ["R", 24]}, {}), without_attention="accept")
        assert not list(tmp_path.glob("mhsa-*"))


class Windows(nn.Module):
    """Attention within windows of 4: its Reshapes cut the length too, and only look like a split of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.project(x)
        heads = rows.reshape(6, 4, 2, 8).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads)
        return y.transpose(1, 2).reshape(2, 12, 16)


def test_rows_cut_into_windows_are_not_taken_for_heads():
    module = Windows().eval()
    x = torch.randn(2, 12, 16)
    artifact = mhsa.compile(module, example_inputs=(x,), dims={"B": 2, "L": 12})
    with torch.inference_mode():
        assert torch.allclose(mhsa.load(artifact)(x), module(x), atol=1e-6)


@pytest.mark.thorough
def test_a_key_padding_mask_keeps_its_exact_shape_where_the_batch_is_one():
    spec = mhsa.AttentionSpec(embed_dim=32, num_heads=4, mask="key_padding")
    (x, mask) = mhsa.compile(spec, dims={"B": 1}).manifest.inputs
    assert x.dims == (1, "L", 32)
    assert mask.dims == (1, "L")
    assert mask.broadcast is None


def test_a_shape_that_others_read_too_survives(tmp_path):
    """The key length behind nonpad_kv_seqlen is an output as well: the node that measures it must stay."""
    model = onnx.load(attention_model(tmp_path / "m.onnx", opset=24, attributes={"is_causal": 1}))
    attention = model.graph.node[0]
    attention.input.extend(["", "", "", "lengths"])
    model.graph.node.insert(0, helper.make_node("Shape", ["k"], ["S1"], start=2, end=3))
    model.graph.node.insert(1, helper.make_node("Shape", ["k"], ["B1"], start=0, end=1))
    model.graph.node.insert(2, helper.make_node("Expand", ["S1", "B1"], ["lengths"]))
    model.graph.node.append(helper.make_node("Identity", ["S1"], ["length"]))
    model.graph.output.append(helper.make_tensor_value_info("length", TensorProto.INT64, [1]))
    from mhsa_compile.frontend.fusion.fuse import fuse

    kinds = [node.op_type for node in fuse(model).graph.node]
    assert kinds == ["Shape", "MhsaAttention", "Identity"]


@pytest.mark.thorough
def test_a_mask_that_the_graph_computes_must_fit_at_each_call(tmp_path):
    """Nothing says that T is S: it is taken to be, and a call in which it is not is refused."""
    model = onnx.load(attention_model(tmp_path / "m.onnx", inputs=("q", "k", "v", "mask")))
    model.graph.input[3].type.tensor_type.shape.dim[1].dim_param = "T"
    model.graph.node[0].input[3] = "flipped"
    model.graph.node.insert(0, helper.make_node("Not", ["mask"], ["flipped"]))
    attention = mhsa.load(mhsa.compile(model))
    arrays = {info.name: np.ones([{"B": 2, "L": 3, "S": 5, "T": 5}.get(d, d) for d in info.dims], info.dtype)
              for info in attention.inputs}  # fmt: skip
    assert attention(**arrays).shape[2] == 3
    with pytest.raises(InputError, match=r"Attention node '\w*': expected operands whose sizes fit .* and \(3, 4\)"):
        attention(**{**arrays, "mask": arrays["mask"][..., :4]})
    # One key's mask would spread over all of them; the code is of another form, and no size contradicts another.
    with pytest.raises(InputError, match=r"sizes that fit each other inside the model, .* mask \(3, 1\)"):
        attention(**{**arrays, "mask": arrays["mask"][..., :1]})


@pytest.mark.thorough
@pytest.mark.parametrize("mask", ["bool", "additive", "key_padding"])
def test_nan_behind_a_mask_never_comes_out(mask):
    """The last 5 rows of the context are NaN and Inf, masked for every query: the output is as without them."""
    spec = mhsa.AttentionSpec(embed_dim=32, num_heads=4, kv_embed_dim=24, mask=mask)
    attention = mhsa.load(mhsa.compile(spec))
    rng = np.random.default_rng(0)
    x, context = rng.standard_normal((2, 37, 32), np.float32), rng.standard_normal((2, 53, 24), np.float32)
    visible = np.ones((2, 53) if mask == "key_padding" else (2, 1, 37, 53), bool)
    visible[..., -5:] = False
    given = np.where(visible, 0, -np.inf).astype(np.float32) if mask == "additive" else visible
    clean = attention(x, context, mask=given)
    context[:, -5:-2], context[:, -2:] = np.nan, np.inf
    assert np.isfinite(clean).all()
    assert (attention(x, context, mask=given) == clean).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 5}, "target: expected a name, .* got int"),
        ({"dims": [1]}, "dims: expected sizes by symbol, .* got list"),
        ({"records": [1]}, "records: expected a file of records, .* got int"),
    ],
)
def test_arguments_of_another_kind_are_named(options, message):
    with pytest.raises((InputError, TargetError), match=message):
        mhsa.compile(mhsa.AttentionSpec(embed_dim=32, num_heads=4), **options)
