"""`mhsa heads`: what the heads of trained layers do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mhsa_compile.cli.common import options, output
from mhsa_compile.errors import InputError, ModelError, OutputError
from mhsa_compile.files import places
from mhsa_compile.files.foreign_errors import first_line
from mhsa_compile.hardware import environment

if TYPE_CHECKING:
    from mhsa_analysis.block_flow import BlockFlow
    from mhsa_analysis.head_statistics import HeadStatistics
    from mhsa_analysis.heads_page import ShownLayer
    from mhsa_analysis.model_layers import TrainedLayer
    from mhsa_analysis.pruning import PruningPlan
    from mhsa_compile.runtime.artifact.artifact import Artifact
    from mhsa_compile.runtime.compiled_attention import CompiledAttention

_SHOWN_TEXTS = 4  # of whose tokens the page shows who looks at whom
_SEPARATORS = ("[SEP]", "</s>", "<|endoftext|>")
_WORDS = ("y", "heads", "lse", "entropy", "weights")


@dataclass(frozen=True)
class _Model:
    """What is known of each layer; `texts` are the tokens that its maps are of, `flows` what --plot draws: the first
    text through each layer. `plans` are of each layer, where heads are to go, and `whole` is how the model does without
    them."""

    title: str
    layers: Sequence[ShownLayer]
    texts: Sequence[Sequence[str]]
    plans: Sequence[PruningPlan]
    flows: Sequence[BlockFlow]
    whole: dict[str, Any] | None = None


LayerSource = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE",
        help="An artifact with --outputs y,heads,weights, or a folder of transformers' with tokenizer.json in it.",
    ),
]
TextFile = Annotated[
    Path | None,
    typer.Option("--text", metavar="FILE", help="Of a model: texts to run it on, one a line, each by itself."),
]
InputFiles = Annotated[
    list[str] | None,
    typer.Option("--input", metavar="NAME=FILE.npy", help="Of an artifact. Repeat it; what is missing is random."),
]
PrunedHeads = Annotated[
    int,
    typer.Option(
        "--prune",
        min=0,
        metavar="K",
        help="Also the K heads of each layer it can best do without, chosen "
        "and W_O fitted anew on three of four texts, measured on them and on the fourth.",
    ),
]
PageFile = Annotated[
    Path | None, typer.Option("--html", metavar="FILE.html", help="Also a page to look at, in one file.")
]
PictureFolder = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="DIR",
        help="Also pictures of the first text in each layer: a head step by step, all heads.",
    ),
]


def heads(
    source: LayerSource,
    *,
    text: TextFile = None,
    inputs: InputFiles = None,
    prune: PrunedHeads = 0,
    html: PageFile = None,
    plot: PictureFolder = None,
    dims: options.StatedDims,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """What the heads of trained layers do: what they look at, how alike they are, what a layer loses without them."""
    _check_places(html, plot)
    if _is_artifact(source, text, inputs or ()):
        model = _of_artifact(source, inputs or (), dims, seed, prune, plot)
    else:
        model = _of_model(source, text, prune, plot)
    if html is not None:
        _write_page(html, model)
    pictures = [] if plot is None else _draw(plot, model)
    if json:
        _print_json(model, html, pictures)
        return
    for layer in model.layers:
        _print(model.title, layer)
    if model.plans:
        _print_plans(model)
    if html is not None:
        output.line(f"{html} shows all of it")
    if plot is not None:
        output.line(f"{plot}: {len(pictures)} pictures")


def _check_places(html: Path | None, plot: Path | None) -> None:
    """Before the work, not after it: whether what is asked for can be written, and drawn."""
    from mhsa_compile.files.atomic_write import check_file

    if html is not None:
        check_file(html, "--html")
    if plot is not None:
        environment.require("matplotlib", extra="bench")
        places.make_folder(plot, OutputError, "--plot")


def _is_artifact(source: Path, text: Path | None, inputs: Sequence[str]) -> bool:
    """Whether SOURCE is an artifact; else it is a model's folder. Raises InputError for options of the other."""
    if places.is_there(source / "manifest.json"):
        if text is not None:
            raise InputError("--text", "a model with a tokenizer", "an artifact", "Give its inputs: --input x=x.npy.")
        return True
    if inputs:
        raise InputError("--input", "an artifact", f"the folder {source}", "Give --text FILE, with a text a line.")
    return False


def _write_page(path: Path, model: _Model) -> None:
    from mhsa_analysis.heads_page import heads_page
    from mhsa_compile.files.atomic_write import atomic_file

    page = heads_page(model.title, model.layers, model.texts)
    with atomic_file(path, "--html") as file:
        file.write(page.encode())


def _print_json(model: _Model, html: Path | None, pictures: Sequence[Path]) -> None:
    layers = [_description(layer) for layer in model.layers]
    prunes = [_costs(plan) for plan in model.plans]
    output.print_json({"layers": layers, "html": html, "plot": pictures, "prune": prunes, "unseen_text": model.whole})


def _draw(folder: Path, model: _Model) -> list[Path]:
    """The pictures of each layer, in files by its name."""
    from mhsa_analysis.head_pictures import draw_layer

    pictures: list[Path] = []
    with output.counter("draw") as advance:
        for done, (layer, flow) in enumerate(zip(model.layers, model.flows, strict=True)):
            advance(done, len(model.layers), layer.name)
            stem = re.sub(r"[^\w.-]+", "-", layer.name)
            pictures += draw_layer(folder, stem, flow)
    return pictures


def _of_artifact(
    source: Path, inputs: Sequence[str], dims: options.StatedDims, seed: int, prune: int, plot: Path | None
) -> _Model:
    from mhsa_analysis.head_statistics import HeadStatistics
    from mhsa_analysis.heads_page import ShownLayer
    from mhsa_compile.cli.common import arrays
    from mhsa_compile.runtime.artifact.artifact import Artifact
    from mhsa_compile.runtime.compiled_attention import load

    arrays_by_name = arrays.read(inputs)
    artifact = Artifact.open(source)
    _check_returns(artifact, source)
    stats = HeadStatistics(artifact)
    attention = load(artifact)
    dims.check_symbols(attention.inputs)
    arguments = arrays.complete(arrays_by_name, attention.inputs, dims.sizes(), seed)
    outputs = attention.from_host(**arguments)
    valid = arguments["mask"] if stats.spec.masks_keys and not stats.spec.is_cross else None
    stats.add(arguments["x"], outputs, valid)
    names = [str(place) for place in range(arguments["x"].shape[1])]
    maps = [] if stats.spec.is_cross else list(outputs.weights[:_SHOWN_TEXTS])
    title = f"Heads of {source.name}" + ("" if "x" in arrays_by_name else ", on random numbers")
    layers = [ShownLayer("layer", stats.report(), maps)]
    flows = [] if plot is None else [_flow(artifact, arguments["x"], outputs, names)]
    return _Model(title, layers, [names] * len(maps), _plans(layers, prune), flows)


def _check_returns(artifact: Artifact, source: Path) -> None:
    """Raises InputError for an artifact whose calls do not return what statistics of heads are made of."""
    names = [info.name for info in artifact.manifest.outputs]
    if not {"heads", "weights"} <= set(names):
        got = f"{source}, which returns {', '.join(names)}"
        hint = f"Compile it again with --outputs {','.join(_WORDS)}."
        raise InputError("SOURCE", 'an artifact that returns "heads" and "weights", too', got, hint)


def _flow(layer: Any, x: Any, outputs: Any, tokens: Sequence[str]) -> BlockFlow:
    """The first text of a call. Raises InputError for one that is too long to draw, and without what is drawn."""
    from mhsa_analysis.block_flow import flow_of
    from mhsa_analysis.head_pictures import LONGEST

    if len(tokens) > LONGEST:
        expected = f"a first text of at most {LONGEST} tokens"
        raise InputError("--plot", expected, f"{len(tokens)}", "Give a shorter one, or an artifact --length.")
    return flow_of(layer, x[:1], outputs, tokens)


def _plans(layers: Sequence[ShownLayer], prune: int) -> list[PruningPlan]:
    """The plan of each layer. Raises InputError: too little text, or none to measure on that was not fitted on."""
    from mhsa_analysis.output_fit import NEXT_STEP

    plans = [layer.report.prune(prune) for layer in layers] if prune else []
    for plan in plans:
        plan.split.unseen_or_refuse("--prune")
        if (reason := plan.split.why_not_fit(plan.kept)) is not None:
            raise InputError("--prune", *reason, NEXT_STEP)
    return plans


def _of_model(source: Path, text: Path | None, prune: int, plot: Path | None) -> _Model:
    from mhsa_compile.cli.common.sources import require_compiler
    from mhsa_compile.files import input_files

    for name in ("config.json", "tokenizer.json"):
        if not places.is_file(source / name):
            expected = "an artifact, or a folder of transformers' with config.json and tokenizer.json"
            raise ModelError("SOURCE", expected, f"{source}, without {name}")
    if text is None:
        raise InputError("--text", "a file with texts to run the model on, one a line", "none")
    lines = [
        line for line in input_files.read_text(text, InputError, "--text", "a text file").splitlines() if line.strip()
    ]
    if not lines:
        raise InputError("--text", "a text a line", f"{text}, in which there is none")
    require_compiler()
    environment.require("transformers", "tokenizers", extra="examples")
    with output.stages() as stage:
        return _measure(source, lines, prune, plot, stage)


def _measure(source: Path, lines: Sequence[str], prune: int, plot: Path | None, stage: Any) -> _Model:
    """The model runs on each text by itself, so there is no padding; its layers run again, compiled."""
    from mhsa_analysis.head_statistics import HeadStatistics
    from mhsa_analysis.heads_page import ShownLayer

    stage("load the model")
    import torch

    from mhsa_analysis.model_layers import trained_layers

    model, tokenizer = _loaded(source)
    encoded = [tokenizer.encode(line) for line in lines]
    _check_texts(model, lines, encoded)
    apart = {token for name in _SEPARATORS if (token := tokenizer.token_to_id(name)) is not None}
    stage("run it on the texts")
    layers = trained_layers(model, [{"input_ids": torch.tensor([one.ids])} for one in encoded])
    stats_of = {layer.name: HeadStatistics(layer.attention) for layer in layers}
    _check_tokens(encoded, max(stats.tokens_needed for stats in stats_of.values()))
    pages: list[ShownLayer] = []
    flows: list[BlockFlow] = []
    artifacts: dict[str, Artifact] = {}
    for layer in layers:
        stage(f"look into {layer.name}")
        stats = stats_of[layer.name]
        outputs = _run(layer, _attention_of(layer, artifacts), stats, encoded, apart)
        pages.append(ShownLayer(layer.name, stats.report(), [one.weights[0] for one in outputs]))
        if plot is not None:
            flows.append(_flow(layer.attention.with_outputs(*_WORDS), layer.inputs[0], outputs[0], encoded[0].tokens))
    plans = _plans(pages, prune)
    if plans:
        stage("run it without heads on the texts that nothing was fitted on")
    whole = _without_heads(model, layers, plans, encoded) if plans else None
    texts = [one.tokens for one in encoded[:_SHOWN_TEXTS]]
    return _Model(f"Heads of {source.resolve().name}", pages, texts, plans, flows, whole)


def _attention_of(layer: TrainedLayer, artifacts: dict[str, Artifact]) -> CompiledAttention:
    """The layer, which says how it came to its y; `artifacts` has one for all layers of a spec."""
    from mhsa_compile.compiler.pipeline import compile
    from mhsa_compile.nn.modules import weights
    from mhsa_compile.runtime.compiled_attention import load

    looked_into = layer.attention.with_outputs(*_WORDS)
    key = looked_into.spec.to_json()
    if key not in artifacts:
        artifacts[key] = compile(looked_into)
    return load(artifacts[key], weights=weights(looked_into))


def _run(
    layer: TrainedLayer, attention: CompiledAttention, stats: HeadStatistics, encoded: Sequence[Any], apart: set[int]
) -> list[Any]:
    """What the compiled layer gives for the first texts; `stats` gets those of all. `apart` are the tokens that
    separate texts. Raises ModelError where the model's own layer gives something else."""
    import torch

    outputs_of_first: list[Any] = []
    results: list[torch.Tensor] = []
    for call, (x, one) in enumerate(zip(layer.inputs, encoded, strict=True)):
        outputs = attention(**{name: value.numpy() for name, value in layer.arguments(call).items()})
        results.append(torch.from_numpy(outputs.y))
        separators = [[number in apart for number in one.ids]] if apart else None
        stats.add(x, outputs, separators=separators)
        if call < _SHOWN_TEXTS:
            outputs_of_first.append(outputs)
    layer.check(results)
    return outputs_of_first


def _without_heads(
    model: Any, layers: Sequence[TrainedLayer], plans: Sequence[PruningPlan], encoded: Sequence[Any]
) -> dict[str, Any]:
    """How the model does on every fourth text: the perplexity of one with a head for the next token, the mean cosine of
    each token's output with the whole model's of another; whole, without heads, and with W_O fitted anew."""
    import torch

    from mhsa_analysis.output_fit import PARTS
    from mhsa_analysis.pruned_model import perplexity, pruned_run, token_outputs

    inputs = [{"input_ids": torch.tensor([one.ids])} for one in encoded[PARTS - 1 :: PARTS]]
    names = {"without": False, "refit": True}
    if model.get_output_embeddings() is not None:
        values = {"whole": perplexity(model, inputs)}
        for name, refit in names.items():
            with pruned_run(model, layers, plans, refit=refit):
                values[name] = perplexity(model, inputs)
        return {"texts": len(inputs), "measure": "perplexity"} | values
    outputs, values = token_outputs(model, inputs), {}
    for name, refit in names.items():
        with pruned_run(model, layers, plans, refit=refit):
            cosines = torch.cosine_similarity(token_outputs(model, inputs), outputs, dim=1)
        values[name] = float(cosines.mean())
    return {"texts": len(inputs), "measure": "cosine"} | values


def _check_tokens(encoded: Sequence[Any], least: int) -> None:
    """Raises InputError for texts that are too short together."""
    tokens = sum(len(one.ids) for one in encoded)
    if tokens < least:
        expected = f"texts of at least {least} tokens together, 4 times the value head dim"
        raise InputError("--text", expected, f"{tokens} in {len(encoded)} lines", "Give more texts, or longer ones.")


def _check_texts(model: Any, lines: Sequence[str], encoded: Sequence[Any]) -> None:
    """Raises InputError for a text that the model cannot run on, ModelError for a model of something else."""
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        hint = f"In Python: analysis.trained_layers(model, [{{{model.main_input_name!r}: ...}}])."
        raise ModelError("SOURCE", "a model of text", f"a {type(model).__name__} of {model.main_input_name}", hint)
    longest = getattr(model.config, "max_position_embeddings", None)
    for number, (line, one) in enumerate(zip(lines, encoded, strict=True), 1):
        if not one.ids or (longest is not None and len(one.ids) > longest):
            expected = "texts of 1 to {} tokens".format(longest or "any number of")
            raise InputError("--text", expected, f"{len(one.ids)} in text {number}, {line[:30]!r}", "Split it.")


def _loaded(source: Path) -> tuple[Any, Any]:
    """The model in float32, with its head where that says the next token, and its tokenizer; nothing is asked of a
    network. Raises ModelError."""
    import os

    os.environ["HF_HUB_OFFLINE"] = "1"
    from tokenizers import Tokenizer
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        predicts = (config.architectures or [""])[0] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        family = AutoModelForCausalLM if predicts else AutoModel
        model = family.from_pretrained(source, local_files_only=True).float().eval()
    except Exception as error:  # of transformers and tokenizers, whose errors have no common root
        raise ModelError("SOURCE", "a model that transformers loads from its folder", first_line(error)) from error
    tokenizer.no_padding()
    if getattr(model.config, "is_encoder_decoder", False):
        model = model.get_encoder()  # a decoder would need a text of its own
    return model, tokenizer


def _rows(layer: ShownLayer) -> list[dict[str, Any]]:
    """Rows for the layer's table, one for each head."""
    report, rows = layer.report, []
    for head, role in enumerate(report.roles):
        others = [
            (float(report.dissimilarity[head, other]), other) for other in range(len(report.roles)) if other != head
        ]
        apart, nearest = min(others, default=(None, None))
        rows.append({
            "head": head,
            "role": role,
            "entropy": report.entropy[head],
            "entropy_share": report.entropy_share[head],
            "distance": None if report.distance is None else report.distance[head],
            "nearest": nearest,
            "dissimilarity": apart,
        })  # fmt: skip
    return rows


def _description(layer: ShownLayer) -> dict[str, Any]:
    return {"name": layer.name, "tokens": layer.report.tokens, "heads": _rows(layer)}


def _costs(plan: PruningPlan) -> dict[str, Any]:
    """What a plan costs on the text that it was fitted on, and on other text."""
    fit = plan.fit
    return {
        "heads": plan.heads,
        "tokens": fit.tokens,
        "unseen_tokens": fit.unseen_tokens,
        "relative_error": plan.relative_error,
        "unseen_error": plan.unseen_error,
        "columns": fit.out.shape[0],
        "freedom": fit.freedom,
        "refit_error": fit.training_error,
        "unseen_refit_error": fit.unseen_error,
        "carries_over": fit.carries_over,
    }


def _print_plans(model: _Model) -> None:
    costs = [_costs(plan) for plan in model.plans]
    columns = ("layer", "without heads", "off by>", "unseen>", "W_O anew>", "unseen>", "columns>", "free>")
    keys = ("relative_error", "unseen_error", "refit_error", "unseen_refit_error")
    rows = (
        (
            layer.name,
            " ".join(map(str, cost["heads"])),
            *(f"{cost[key]:.1%}" for key in keys),
            cost["columns"],
            f"{cost['freedom']:.0f}",
        )
        for layer, cost in zip(model.layers, costs, strict=True)
    )
    output.print_table(
        f"|y' - y| / |y|: of {costs[0]['tokens']} tokens in three of four texts, on which heads were chosen and W_O "
        f"was fitted anew by ridge, and of {costs[0]['unseen_tokens']} unseen ones in every fourth text",
        columns,
        rows,
    )
    for layer, cost in zip(model.layers, costs, strict=True):
        if not cost["carries_over"]:
            times, each = cost["unseen_refit_error"] / cost["refit_error"], cost["tokens"] / cost["columns"]
            output.line(
                f"{layer.name}: the fit does not carry over, unseen text shows {times:.1f} times its error; there were "
                f"{each:.1f} tokens a column. Give more text."
            )
        elif cost["freedom"] == 0:
            output.line(f"{layer.name}: no fit did better than W_O as it was on texts held out, so it stays.")
    if (whole := model.whole) is not None:
        beside = f"{whole['whole']:.4g} whole" if "whole" in whole else "of each token with the whole model's"
        text = "text" if whole["texts"] == 1 else "texts"
        output.line(
            f"{whole['measure']} on the {whole['texts']} unseen {text}: {beside}, "
            f"{whole['without']:.4g} without heads, {whole['refit']:.4g} with W_O fitted anew"
        )


def _print(title: str, layer: ShownLayer) -> None:
    columns = ("head>", "looks", "entropy>", "of most>", "distance>", "nearest>", "apart>")
    rows = (
        (
            row["head"],
            row["role"],
            f"{row['entropy']:.2f}",
            f"{row['entropy_share']:.0%}",
            "" if row["distance"] is None else f"{row['distance']:.1f}",
            "" if row["nearest"] is None else row["nearest"],
            "" if row["dissimilarity"] is None else f"{row['dissimilarity']:.2f}",
        )
        for row in _rows(layer)
    )
    output.print_table(f"{title}, {layer.name}: {layer.report.tokens} tokens", columns, rows)
