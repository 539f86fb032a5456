"""`mhsa heads`: of an artifact, and of a model of transformers with its tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support import svg
from support.command import mhsa, printed, printed_json, refused

import mhsa_compile as mhsa_library


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    spec = mhsa_library.AttentionSpec(
        embed_dim=24, num_heads=4, mask="key_padding", outputs=("y", "heads", "lse", "entropy", "weights")
    )
    path = tmp_path_factory.mktemp("heads") / "layer.mhsa"
    mhsa_library.compile(mhsa_library.MultiHeadAttention(spec)).save(path)
    return path


def test_the_heads_of_an_artifact(artifact: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((4, 20, 24), dtype=np.float32))
    np.save(tmp_path / "mask.npy", np.arange(20) < np.array([[20], [9], [14], [12]]))
    inputs = ("--input", f"x={tmp_path / 'x.npy'}", "--input", f"mask={tmp_path / 'mask.npy'}")
    page = tmp_path / "heads.html"
    said = printed_json("heads", artifact, *inputs, "--prune", 2, "--html", page)
    (layer,) = said["layers"]
    assert layer["tokens"] == 20 + 9 + 14 + 12 and [head["head"] for head in layer["heads"]] == [0, 1, 2, 3]
    (plan,) = said["prune"]
    assert 0 < plan["refit_error"] <= plan["relative_error"] < 1
    assert (plan["tokens"], plan["unseen_tokens"], plan["columns"]) == (20 + 9 + 14, 12, 12)
    assert plan["unseen_error"] > 0 and plan["unseen_refit_error"] > plan["refit_error"]
    assert "Heads of layer.mhsa" in page.read_text()
    result = " ".join(printed("heads", artifact, "--batch", 9, "--length", 30, "--prune", 1).split())
    assert "on random numbers" in result and "tokens in three of four texts" in result


def test_too_little_to_prune_by_is_refused(artifact: Path, tmp_path: Path) -> None:
    def refusal(batch: int, length: int) -> str:
        np.save(tmp_path / "mask.npy", np.ones((batch, length), bool))
        np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((batch, length, 24), dtype=np.float32))
        inputs = [word for name in ("x", "mask") for word in ("--input", f"{name}={tmp_path / name}.npy")]
        return refused(mhsa("heads", artifact, *inputs, "--prune", 1))

    assert "--prune: expected statistics of at least 4 sequences" in refusal(3, 30)
    assert (
        "--prune: expected at least 20 tokens to fit 18 columns of W_O and a bias on, which pass through any 19 "
        "whatever y is, got 18, without every 4th sequence. Add more sequences"
    ) in refusal(4, 6)


def test_pictures_of_an_artifact(artifact: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "pictures"
    drawn = printed_json("heads", artifact, "--batch", 2, "--length", 20, "--plot", folder)["plot"]
    kinds = ("steps", "heads", "subspaces", "mask", "flow")
    assert drawn == [str(folder / f"layer-{kind}.svg") for kind in kinds]
    weights = [float(word[:-2]) for word in svg.words(Path(drawn[0])) if word.endswith("%")]
    assert len(weights) == 20 and abs(sum(weights) - 100) < 1
    said = refused(mhsa("heads", artifact, "--batch", 1, "--length", 60, "--plot", folder))
    assert "--plot: expected a first text of at most 48 tokens, got 60" in said
    (tmp_path / "file").write_text("")
    assert "--plot: expected a folder" in refused(mhsa("heads", artifact, "--plot", tmp_path / "file"))


def test_an_artifact_that_returns_too_little_is_refused(tmp_path: Path) -> None:
    plain = tmp_path / "attention.mhsa"
    layer = mhsa_library.MultiHeadAttention(mhsa_library.AttentionSpec(embed_dim=24, num_heads=4))
    mhsa_library.compile(layer).save(plain)
    message = refused(mhsa("heads", plain))
    assert f"got {plain}, which returns y." in message
    assert "Compile it again with --outputs y,heads,lse,entropy,weights." in message


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("model") / "tiny"
    words = ["[UNK]", "[CLS]", "[SEP]", *["the", "cat", "sat", "on", "mat"]]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    ends = [("[CLS]", 1), ("[SEP]", 2)]
    made.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=24, num_attention_heads=4, num_hidden_layers=2, intermediate_size=32
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(path)
    made.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.thorough
def test_the_heads_of_a_model(model: Path, tmp_path: Path) -> None:
    text, page = tmp_path / "text.txt", tmp_path / "heads.html"
    text.write_text("the cat sat on the mat\n\nthe mat sat on the cat\n" * 3)
    described = printed_json("heads", model, "--text", text, "--html", page, "--plot", tmp_path / "pictures")
    layers = described["layers"]
    assert len(described["plot"]) == 2 * 5
    assert {"[CLS]", "cat", "mat", "sum"} <= set(svg.words(Path(described["plot"][0])))
    assert [layer["tokens"] for layer in layers] == [6 * 8] * 2
    assert [len(layer["heads"]) for layer in layers] == [4, 4]
    assert '["[CLS]","the","cat","sat","on","the","mat","[SEP]"]' in page.read_text()
    pruned = printed_json("heads", model, "--text", text, "--prune", 1)
    whole = pruned["unseen_text"]
    assert whole["measure"] == "cosine" and whole["texts"] == 1
    assert 0.5 < whole["without"] < 1 and 0.5 < whole["refit"] <= 1 and len(pruned["prune"]) == 2
    text.write_text("the cat")
    assert "at least 24 tokens together, 4 times the value head dim, got 4 in 1 lines" in refused(
        mhsa("heads", model, "--text", text)
    )
    text.write_text("\n")
    assert "--text: expected a text a line" in refused(mhsa("heads", model, "--text", text))
    assert "--text: expected a file with texts" in refused(mhsa("heads", model))
    assert "--input: expected an artifact" in refused(mhsa("heads", model, "--input", "x=x.npy"))


def other_model(model: Path, tmp_path: Path, name: str, **fields: object) -> Path:
    """A folder with another family's model, and the tokenizer of `model`."""
    import transformers

    fields = {"vocab_size": 8, "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 1} | fields
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**fields)
    getattr(transformers, f"{name}Model")(config).save_pretrained(tmp_path / name)
    (tmp_path / name / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    return tmp_path / name


@pytest.mark.thorough
def test_the_heads_of_a_model_with_a_bias_by_distance(model: Path, tmp_path: Path) -> None:
    """T5: the encoder of a pair, whose attention is compiled with a mask that is added."""
    fields = {"d_model": 24, "d_kv": 6, "d_ff": 32, "num_heads": 4, "num_layers": 1}
    folder, text = other_model(model, tmp_path, "T5", **fields), tmp_path / "text.txt"
    text.write_text("the cat sat on the mat\nthe mat sat\n" * 4)
    result = printed("heads", folder, "--text", text, "--prune", 1)
    assert "block.0.layer.0.SelfAttention: 52 tokens" in result
    assert "cosine on the 2 unseen texts: of each token with the whole model's, " in result


@pytest.mark.thorough
def test_a_model_that_says_the_next_token_is_measured_by_perplexity(model: Path, tmp_path: Path) -> None:
    """On every fourth text alone, as PyTorch has it with the very layer pruned; without heads it is another."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 8, "n_embd": 24, "n_head": 4, "n_layer": 2, "initializer_range": 0.3}
    decoder = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    decoder.save_pretrained(tmp_path / "gpt2")
    (tmp_path / "gpt2" / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat\nthe mat sat on\ncat on the mat\nmat the on sat cat\n" * 3)
    whole = printed_json("heads", tmp_path / "gpt2", "--text", text, "--prune", 2)["unseen_text"]
    ids = torch.tensor([[1, 7, 3, 5 + 1, 5, 4, 2]])  # [CLS] mat the on sat cat [SEP], three times
    with torch.no_grad():
        expected = float(decoder(ids, labels=ids).loss.exp())
    assert whole["measure"] == "perplexity" and whole["texts"] == 3
    assert whole["whole"] == pytest.approx(expected, rel=1e-5)
    assert whole["without"] != pytest.approx(expected, rel=1e-3)
    assert whole["refit"] != pytest.approx(whole["without"], rel=1e-6)


def test_models_that_are_refused(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat\n" * 4)
    grouped = {"num_key_value_heads": 2, "intermediate_size": 32, "head_dim": 6}
    said = refused(mhsa("heads", other_model(model, tmp_path, "Qwen3", **grouped), "--text", text))
    assert "model: expected attention as in BERT, RoBERTa" in said
    assert "layers.0.self_attn, a Qwen3Attention: its queries are no linear function" in said and "q_norm" in said
    said = refused(mhsa("heads", other_model(model, tmp_path, "Bloom", n_head=4, n_layer=1), "--text", text))
    assert "a BloomModel, whose BloomAttention asks for no attention by name and computes it itself" in said
    mamba = {"state_size": 4, "conv_kernel": 2, "expand": 2}
    said = refused(mhsa("heads", other_model(model, tmp_path, "Mamba", **mamba), "--text", text))
    assert "got a MambaModel, in which there is no attention" in said
    image = {"image_size": 16, "patch_size": 4, "intermediate_size": 32}
    said = refused(mhsa("heads", other_model(model, tmp_path, "ViT", **image), "--text", text))
    assert "SOURCE: expected a model of text, got a ViTModel of pixel_values" in said
    text.write_text("the cat " * 300)
    assert "--text: expected texts of 1 to 512 tokens, got 602 in text 1" in refused(
        mhsa("heads", model, "--text", text)
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        pytest.param(
            ["--text", __file__],
            "--text: expected a model with a tokenizer, got an artifact",
            marks=pytest.mark.thorough,
            id="--text",
        ),
        (["--prune", 4], "k: expected a number of heads from 0 to 3, got 4"),
        (["--batch", 1, "--length", 9], "stats: expected statistics of at least 24 valid tokens"),
        (["--html", "/absent/folder/heads.html"], "--html"),
    ],
    ids=str,
)
def test_what_is_refused(artifact: Path, arguments: list[object], reason: str) -> None:
    assert reason in refused(mhsa("heads", artifact, *arguments))


def test_sources_that_are_refused(tmp_path: Path) -> None:
    assert "SOURCE: expected an artifact, or a folder of transformers'" in refused(mhsa("heads", tmp_path))
    for name in ("config.json", "tokenizer.json", "text.txt"):
        (tmp_path / name).write_text("{}")
    pytest.importorskip("transformers")
    assert "SOURCE: expected a model that transformers loads" in refused(
        mhsa("heads", tmp_path, "--text", tmp_path / "text.txt")
    )


@pytest.mark.thorough
def test_an_artifact_that_says_y_alone(tmp_path: Path) -> None:
    mhsa_library.compile(mhsa_library.AttentionSpec(embed_dim=8, num_heads=2)).save(tmp_path / "plain.mhsa")
    assert '"heads" and "weights"' in refused(mhsa("heads", tmp_path / "plain.mhsa"))
