"""Attention inside of a model of PyTorch's or transformers', replaced in place by compiled artifacts, and put back.

report = mhsa.accelerate(model)
print(report)                      # what was replaced, what was kept, and why
y = model(x)
mhsa.restore(model)                # the model as it was
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import nn

from mhsa_compile.compiler import pipeline
from mhsa_compile.conversion.checkpoints.checkpoint import Checkpoint
from mhsa_compile.errors import BuildError, InputError, MhsaError, ModelError, did_you_mean
from mhsa_compile.files.foreign_errors import first_line
from mhsa_compile.files.patience import shown_stages
from mhsa_compile.hardware.profile import TargetProfile, load_profile
from mhsa_compile.integrations import torch_attention, torch_linear
from mhsa_compile.integrations import transformers as transformers_attention
from mhsa_compile.integrations.call_table import TABLE
from mhsa_compile.integrations.decoder_layer import DecoderLayerForward
from mhsa_compile.integrations.encoder_layer import EncoderForward, EncoderLayerForward, is_plain
from mhsa_compile.integrations.exported_layer import BEFORE, ExportedLayerForward, layers_of, why_kept
from mhsa_compile.integrations.first_calls import FirstCalls
from mhsa_compile.integrations.layer_export import ExportedKind, check_bound
from mhsa_compile.integrations.layer_graph import ATTENTIONS, WholeLayerKind, graph_of
from mhsa_compile.integrations.layer_state import ATTENTION
from mhsa_compile.integrations.layer_ways import LayerChoice, LayerRow, WayTimings
from mhsa_compile.integrations.quantised_layers import quantiser_of
from mhsa_compile.integrations.torch_attention import LayerForward
from mhsa_compile.integrations.torch_linear import LinearForward, LinearKind
from mhsa_compile.integrations.weight_state import ReplacedForward
from mhsa_compile.integrations.whole_layer import why_parts
from mhsa_compile.nn.modules import MultiHeadAttention
from mhsa_compile.nn.weight_blocks import WeightBlocks
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.artifact.manifest import Manifest
from mhsa_compile.runtime.compiled_attention import CompiledAttention, load
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.float32_products import Float32Request, float32_request
from mhsa_compile.spec.weight_words import BlockForm, block_form

if TYPE_CHECKING:
    import onnx

NAME = "_mhsa_acceleration"
"""The attribute of an accelerated model that holds its report."""


@dataclass(frozen=True)
class AccelerationRow:
    """One attention or linear: `name` in the model ("" is the model itself), the class, and why it was kept, "" if it
    was replaced. `weights` says what a linear of few bits multiplies, `why_floats` why one has none of a checkpoint's.
    """

    name: str
    kind: str
    why_kept: str = ""
    weights: str = ""
    why_floats: str = ""

    @property
    def replaced(self) -> bool:
        return not self.why_kept


class AccelerationReport:
    """The rows, in the order of the model's modules. Printed, it is a table.

    `layers` has a row for each layer of PyTorch's encoders and decoders, and of models of transformers: it may be one
    artifact, or left to PyTorch.
    `linears` has rows of its own, where linears were asked for, and of each that another tool quantised.
    `calls`: reason -> how many calls of replaced layers PyTorch computed itself for it. `checked`: how many first calls
    of a kind were held against PyTorch's. `float32_products` is how float32 was asked to be multiplied.
    """

    def __init__(self, float32_products: Float32Request = "auto") -> None:
        self.float32_products = float32_products
        self.rows: list[AccelerationRow] = []
        self.layers: list[LayerRow] = []
        self.linears: list[AccelerationRow] = []
        self.calls: dict[str, int] = {}
        self.checked = 0
        self._outcomes: dict[str, int] = {}
        self.undo: list[Callable[[], None]] = []  # what `restore` runs, the last first
        self.on_refresh: list[Callable[[], None]] = []
        self.registered: list[Any] = []  # what a copy in another process needs to be there

    def __iter__(self) -> Iterator[AccelerationRow]:
        return iter(self.rows)

    @property
    def replaced(self) -> list[AccelerationRow]:
        return [row for row in self.rows if row.replaced]

    @property
    def kept(self) -> list[AccelerationRow]:
        return [row for row in self.rows if not row.replaced]

    def refresh(self) -> None:
        """Binds the weights of all replaced layers anew, for edits of a few numbers that PyTorch does not count: by
        `.data`, by NumPy's views, and of inference tensors. All others are noticed by the next call: `weight_state`."""
        for bind in self.on_refresh:
            bind()

    def count(self, why: str) -> None:
        """Counts a call that PyTorch computes itself."""
        self.calls[why] = self.calls.get(why, 0) + 1

    def count_check(self) -> None:
        """Counts a call that was held against PyTorch's."""
        self.checked += 1

    def count_outcome(self, manifest: Manifest) -> None:
        """Counts an artifact that a layer was given, by how it multiplies float32."""
        if outcome := manifest.float32_outcome():
            self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1

    def float32_outcomes(self) -> dict[str, int]:
        """What layers got of `float32_products`, and why not what was asked for -> in how many artifacts: known from
        their first calls on. Those of transformers' attention are the whole process's."""
        return dict(Counter(self._outcomes) + Counter(TABLE.float32_outcomes() if self.registered else {}))

    def __repr__(self) -> str:
        lines = [f"{len(self.replaced)} of {len(self.rows)} attentions replaced"]
        width = max((len(row.name) for row in self.rows), default=0)
        for row in self.rows:
            outcome = "replaced" if row.replaced else f"kept: {row.why_kept}"
            lines.append(f"  {row.name or '(the model)':{max(width, 11)}}  {row.kind}  {outcome}")
        if self.layers:
            lines.append(
                f"{sum(not row.why_parts for row in self.layers)} of {len(self.layers)} layers can be one artifact each"
            )
            lines += [f"  {row.name or '(the model)':{max(width, 11)}}  {row.outcome()}" for row in self.layers]
        if self.linears:
            lines.append(f"{sum(row.replaced for row in self.linears)} of {len(self.linears)} linears replaced")
            reasons = Counter(row.why_kept for row in self.linears if not row.replaced)
            lines += [f"  {number} kept: {why}" for why, number in reasons.items()]
            words = Counter(row.weights for row in self.linears if row.replaced and row.weights)
            lines += [f"  {number} of {word}" for word, number in words.items()]
            floats = Counter(row.why_floats for row in self.linears if row.replaced and row.why_floats)
            lines += [f"  {number} of float32: {why}" for why, number in floats.items()]
        if self.checked:
            lines.append(f"  {self.checked} first calls of a kind checked against PyTorch's")
        lines += [f"  {number} calls computed by PyTorch: {why}" for why, number in self.calls.items()]
        outcomes = [f"{what}, in {number} artifacts" for what, number in self.float32_outcomes().items()]
        if not outcomes and self.float32_products not in ("auto", "ieee"):
            outcomes = [f"asked {self.float32_products}; first calls show what layers get"]
        lines += [f"float32 products: {outcome}" for outcome in outcomes]
        return "\n".join(lines)


def accelerate(
    model: nn.Module,
    target: str | TargetProfile = "native",
    on_unsupported: Literal["keep", "raise"] = "keep",
    *,
    linears: bool | str | Checkpoint = False,
    layers: LayerChoice = "fastest",
    float32_products: Float32Request = "auto",
    check: bool = True,
) -> AccelerationReport:
    """Lets the attention in `model` be computed by compiled artifacts, for inference, until `restore(model)`.

    Replaced are PyTorch's encoder and decoder layers, each by one artifact; every nn.MultiheadAttention elsewhere, with
    its projections; and in models of transformers the attention of all layers that ask for an implementation by name,
    and these layers, each by one artifact for calls without a cache.
    Parameters, names and hooks of the model stay. An artifact is compiled when a kind of call is first met.

    target          as in `compile`
    on_unsupported  what becomes of attention that cannot be replaced: "keep" leaves it, and the report says why;
                    "raise" is a ModelError
    linears         whether every other nn.Linear, and Conv1D of transformers, of float32 is replaced, too: faster for
                    short inputs, and a second copy of its weights. `report.linears` has a row for each. "int4", or
                    another word of `spec.weight_words` for blocks: with weights of four bits, an eighth of a copy, and
                    activations of eight bits, which is less exact. What `read_checkpoint` gave: with the numbers of
                    that file, wherever they stand for the weights that the layer has
    layers          how PyTorch's encoder and decoder layers, and transformers', are computed. "fastest": as one
                    artifact, linears, norms and sums included, by PyTorch, or by their parts where that is faster: the
                    first call of some sizes times them, with or without a mask.
                    "whole": as one artifact, unmeasured, so that results are the same bits in every run. "parts": their
                    attention alone, and linears as `linears` says. `report.layers` has a row for each
    float32_products  how what is replaced multiplies float32, as in `compile`; the report says what layers got
    check           whether the first call of each kind (inputs, masks, single queries and others) of each layer is
                    held against PyTorch's: a layer that differs by more than rounding is PyTorch's from then on, and a
                    warning names it. In models of transformers so is a kind of attention, whatever layers call it

    Raises InputError for a model in training mode or one that is accelerated, ModelError, TargetError; then the model
    is as it was.

    >>> import torch
    >>> model = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True).eval()
    >>> accelerate(model)
    1 of 1 attentions replaced
      self_attn    MultiheadAttention  replaced
    1 of 1 layers can be one artifact each
      (the model)  whole or left to PyTorch: first calls tell which is faster
    >>> with torch.no_grad():
    ...     model(torch.zeros(2, 9, 32)).shape
    torch.Size([2, 9, 32])
    >>> restore(model)
    """
    _check(model, on_unsupported)
    if layers not in get_args(LayerChoice):
        hint = did_you_mean(str(layers), get_args(LayerChoice))
        raise InputError("layers", '"fastest", "whole" or "parts"', repr(layers), hint)
    profile = target if isinstance(target, TargetProfile) else load_profile(target)
    choice = _checked_choice(linears)
    report = AccelerationReport(float32_request(float32_products))
    try:
        with torch.random.fork_rng(devices=()):  # that a layer can be replaced is shown by a module like it
            of_layers = _Layers(layers, choice, check)
            _replace_in_transformers(model, profile, report, of_layers)
            _replace_attentions(model, profile, report, check)
            _replace_layers(model, profile, report, of_layers)
            report.rows += _others(model, report)
            _replace_linears(model, profile, report, choice, check)
        if on_unsupported == "raise" and report.kept:
            row = report.kept[0]
            raise ModelError(f"attention {row.name!r} of the model", "one that can be replaced", row.why_kept)
    except BaseException:
        _undo(report)
        raise
    vars(model)[NAME] = report
    return report


def restore(model: nn.Module) -> None:
    """The model as it was before `accelerate`. Raises InputError for one that is not accelerated.

    >>> import torch
    >>> layer = torch.nn.MultiheadAttention(32, 4).eval()
    >>> report = accelerate(layer)
    >>> restore(layer)
    >>> "forward" in vars(layer)
    False
    """
    report = vars(model).pop(NAME, None)
    if not isinstance(report, AccelerationReport):
        raise InputError(
            "model", "one that accelerate() was given", f"a {type(model).__name__} that is not accelerated"
        )
    _undo(report)


def _undo(report: AccelerationReport) -> None:
    while report.undo:
        report.undo.pop()()


def _check(model: nn.Module, on_unsupported: str) -> None:
    if not isinstance(model, nn.Module):
        raise InputError("model", "an nn.Module", type(model).__name__)
    if on_unsupported not in ("keep", "raise"):
        hint = did_you_mean(str(on_unsupported), ("keep", "raise"))
        raise InputError("on_unsupported", '"keep" or "raise"', repr(on_unsupported), hint)
    for name, module in model.named_modules():
        if NAME in vars(module):
            raise InputError("model", "one that is not accelerated", f"{name or 'it'} is", "Call mhsa.restore first.")
        if module.training:
            got = f"{name or type(model).__name__} in training mode"
            raise InputError("model", "eval mode: compiled attention is for inference", got, "Call model.eval() first.")


_What: TypeAlias = AttentionSpec | LinearKind | WholeLayerKind | ExportedKind
"""What is compiled once, whatever the number of layers."""


class _Artifacts:
    """The artifacts of this process: one for each spec or kind of linear, target and word of `float32_products`,
    whatever the number of layers and models; weights are bound at load."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[str, Float32Request, _What], Artifact | MhsaError] = {}

    def get(
        self,
        profile: TargetProfile,
        products: Float32Request,
        what: _What,
        source: Callable[[], Any],
        weights: str | None,
        check: bool | None,
    ) -> Artifact:
        """That of what a source is; it is compiled where it is new. Raises MhsaError, the same again for what has no
        artifact."""
        key = (profile.to_toml(), products, what)
        with self._lock:
            if key not in self._found:
                options: dict[str, Any] = {"weights": weights, "float32_products": products, "check": check}
                try:
                    with shown_stages("mhsa.accelerate, a first call") as begin:
                        begin("export the layer")
                        graph = source()
                        options["progress"] = begin
                        artifact = pipeline.compile(graph, profile, without_attention="accept", **options)
                    if isinstance(what, ExportedKind):
                        check_bound(graph, artifact.manifest)
                    self._found[key] = artifact
                except (ModelError, BuildError) as error:
                    self._found[key] = error
            if isinstance(found := self._found[key], MhsaError):
                raise found
            return found

    def __reduce__(self) -> str:  # a copy of a model, here or in another process, shares what is compiled there
        return "_ARTIFACTS"


_ARTIFACTS = _Artifacts()


class _Loader:
    """Gives the layers of a model their artifacts, for a target, and notes in its report what they got."""

    def __init__(self, profile: TargetProfile, report: AccelerationReport) -> None:
        self._profile, self._report, self._artifacts = profile, report, _ARTIFACTS

    def attention(self, module: MultiHeadAttention, weights: Mapping[str, Any]) -> CompiledAttention:
        """The layer that a module is, with these weights."""
        return self._load(module.spec, lambda: module, weights)

    def linear(self, kind: LinearKind, weights: Mapping[str, Any]) -> CompiledAttention:
        """A linear of a kind, with these weights."""
        word = None if kind.form is None else str(kind.form)
        return self._load(kind, lambda: torch_linear.graph_of(kind), weights, word)

    def layer(self, kind: WholeLayerKind, weights: Mapping[str, Any]) -> CompiledAttention:
        """A whole layer of a kind, with these weights. Its first calls are held against PyTorch's, not its graph."""
        return self._load(kind, lambda: graph_of(kind), weights, check=False)

    def exported(
        self, what: tuple[ExportedKind, Callable[[], onnx.ModelProto]], weights: Mapping[str, Any]
    ) -> CompiledAttention:
        """A layer of transformers, with those of these weights that its graph has."""
        kind, source = what
        return self._load(kind, source, weights, check=False)

    def _load(
        self,
        what: _What,
        source: Callable[[], Any],
        weights: Mapping[str, Any],
        word: str | None = None,
        check: bool | None = None,
    ) -> CompiledAttention:
        artifact = self._artifacts.get(self._profile, self._report.float32_products, what, source, word, check)
        self._report.count_outcome(artifact.manifest)
        if isinstance(what, ExportedKind):
            weights = {info.name: weights[info.name] for info in artifact.manifest.weights}
        return load(artifact, weights=weights)


def _replace_attentions(model: nn.Module, profile: TargetProfile, report: AccelerationReport, check: bool) -> None:
    """Replaces the forward of every nn.MultiheadAttention."""
    inside = {part for layer in model.modules() if _is_layer(layer) for part in layer.children()}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.MultiheadAttention):
            continue
        why = torch_attention.why_not(layer)
        report.rows.append(AccelerationRow(name, type(layer).__name__, why))
        if not why:
            first_calls = FirstCalls(name, check, report.count_check)
            forward = LayerForward(layer, _Loader(profile, report).attention, report.count, first_calls)
            _put_forward(layer, forward, report)
            if layer not in inside:  # where a hook is there, subclasses of nn.TransformerEncoderLayer call their parts
                report.undo.append(layer.register_forward_pre_hook(_calls_parts).remove)


def _is_layer(layer: nn.Module) -> bool:
    """Whether a module is a layer of an encoder or a decoder whose forward is replaced with its attentions'."""
    return is_plain(layer) or (type(layer) is nn.TransformerDecoderLayer and "forward" not in vars(layer))


class _Layers(NamedTuple):
    """What `accelerate` was told of layers."""

    choice: LayerChoice
    linears: _Choice
    check: bool

    def why_all_parts(self) -> str:
        """Why no layer's calls are to be one artifact; "" if they may be."""
        if self.choice == "parts":
            return 'layers="parts"'
        return "" if isinstance(self.linears, bool) else "its linears have few bits"


def _replace_layers(model: nn.Module, profile: TargetProfile, report: AccelerationReport, layers: _Layers) -> None:
    """Replaces the forward of layers all of whose attentions are replaced, and of encoders around them, which drop
    padding in rows instead of nested tensors."""
    replaced = {layer for layer in model.modules() if isinstance(vars(layer).get("forward"), LayerForward)}
    timings = WayTimings() if layers.choice == "fastest" else None
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            continue
        attentions = [layer._modules[one] for one in ATTENTIONS if one in layer._modules]
        why = (layers.why_all_parts() or why_parts(layer)) if _is_layer(layer) else "it has a forward of its own"
        is_replaced = replaced.issuperset(attentions)
        row = LayerRow(name, type(layer).__name__, why if is_replaced else "attention in it is kept")
        report.layers.append(row)
        if _is_layer(layer) and is_replaced:
            first_calls = FirstCalls(name, layers.check, report.count_check)
            forward = DecoderLayerForward if isinstance(layer, nn.TransformerDecoderLayer) else EncoderLayerForward
            load = _Loader(profile, report).layer
            _put_forward(layer, forward(layer, load, report.count, first_calls, row, timings), report)
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and replaced.intersection(encoder.modules()):
            around: set[Any] = {getattr(layer, "self_attn", None) for layer in encoder.layers}
            alike = around <= replaced and len({attention.num_heads for attention in around}) == 1
            if encoder.use_nested_tensor and alike and "forward" not in vars(encoder):
                _put_forward(encoder, EncoderForward(encoder), report)
            report.undo.append(partial(_set_nested, encoder, encoder.use_nested_tensor))
            _set_nested(encoder, False)


def _checked_choice(linears: bool | str | Checkpoint) -> _Choice:
    """What becomes of linears. Raises InputError."""
    if isinstance(linears, bool | Checkpoint):
        return linears
    try:
        form = block_form(linears) if isinstance(linears, str) and linears != "int8" else None
    except InputError as error:  # of what `weights` may be
        raise InputError("linears", error.expected, error.got, error.next_step) from error
    if form is None:
        expected = 'True, False, what read_checkpoint gave, or a word for blocks, such as "int4" or "int8:block=32"'
        raise InputError("linears", expected, repr(linears))
    return form


_Choice: TypeAlias = bool | BlockForm | Checkpoint
"""Whether linears are replaced, what their weights become, or whose they are."""


def _replace_linears(
    model: nn.Module,
    profile: TargetProfile,
    report: AccelerationReport,
    choice: _Choice,
    check: bool,
) -> None:
    """Replaces every linear but those whose weights an nn.MultiheadAttention reads itself, and says of quantised ones
    that they are kept. Raises InputError where none has the weights of a checkpoint."""
    read = {part for layer in model.modules() if isinstance(layer, nn.MultiheadAttention) for part in layer.modules()}
    for name, layer in model.named_modules():
        if layer in read:
            continue
        if tool := quantiser_of(layer):
            report.linears.append(
                AccelerationRow(name, type(layer).__name__, f"quantised by {tool}, which computes it")
            )
            continue
        if choice is False or not torch_linear.is_linear(layer):
            continue
        if why := torch_linear.why_not(layer):
            report.linears.append(AccelerationRow(name, type(layer).__name__, why))
            continue
        form, stored, why = _stored_form(choice, name, layer)
        word = "" if form is None else str(form)
        report.linears.append(AccelerationRow(name, type(layer).__name__, weights=word, why_floats=why))
        first_calls = FirstCalls(name, check, report.count_check)
        forward = LinearForward(layer, _Loader(profile, report).linear, report.count, first_calls, form, stored)
        _put_forward(layer, forward, report)
    if isinstance(choice, Checkpoint) and not any(row.weights for row in report.linears):
        reasons = Counter(row.why_kept or row.why_floats for row in report.linears)
        got = "; ".join(f"{number}: {why}" for why, number in reasons.items()) or "a model without linears"
        raise InputError("linears", f"a model with weights of {choice.path!r}", got)


def _stored_form(choice: _Choice, name: str, layer: nn.Module) -> tuple[BlockForm | None, WeightBlocks | None, str]:
    """(what a linear's weights become, the blocks that a checkpoint has for it, why it has none)."""
    if not isinstance(choice, Checkpoint):
        return choice if isinstance(choice, BlockForm) else None, None, ""
    stored = choice.of_layer(name, torch_linear.rows_of(layer))
    return (None, None, stored) if isinstance(stored, str) else (stored.form(rounds_x=choice.rounds_x), stored, "")


def _put_forward(
    layer: nn.Module,
    forward: ReplacedForward[Any, Any] | EncoderForward,
    report: AccelerationReport,
) -> None:
    vars(layer)["forward"] = forward
    report.undo.append(partial(_forget_forward, layer))
    if isinstance(forward, ReplacedForward):
        report.on_refresh.append(forward.forget)


def _forget_forward(layer: nn.Module) -> None:
    del vars(layer)["forward"]


def _calls_parts(layer: nn.Module, inputs: Any) -> None:
    """A hook that changes nothing."""


def _set_nested(encoder: nn.TransformerEncoder, use: bool) -> None:
    encoder.use_nested_tensor = use


def _replace_in_transformers(
    model: nn.Module, profile: TargetProfile, report: AccelerationReport, layers: _Layers
) -> None:
    """Replaces attention in the outermost models of transformers, what asks for it by name gets ours, and the forward
    of the layers around it."""
    timings = WayTimings() if layers.choice == "fastest" else None
    for name, submodel in _outermost(model):
        configs = {id(config): config for part in submodel.modules() for config in _configs(part)}
        before = [(config, getattr(config, ATTENTION)) for config in configs.values()]
        why = _why_not_here(submodel)
        if not why:
            report.registered.append(
                transformers_attention.Registration(profile, layers.check, report.float32_products)
            )
            undo = [partial(setattr, config, ATTENTION, implementation) for config, implementation in before]
            report.undo += undo
            try:
                submodel.set_attn_implementation(transformers_attention.NAME)
            except ValueError as error:
                why = first_line(error)
                for put_back in undo:
                    put_back()
        report.rows.append(AccelerationRow(name, type(submodel).__name__, why))
        if not why:
            others = sorted({str(implementation) for _, implementation in before if implementation != BEFORE})
            hint = f'load the model with attn_implementation="{BEFORE}"'
            why_parts = f"the model's attention was {' and '.join(others)}: {hint}" if others else ""
            for place, layer in layers_of(submodel):
                row = LayerRow(f"{name}.{place}".strip("."), type(layer).__name__, why_parts)
                _replace_exported(layer, row, profile, report, layers, timings)


def _replace_exported(
    layer: nn.Module,
    row: LayerRow,
    profile: TargetProfile,
    report: AccelerationReport,
    layers: _Layers,
    timings: WayTimings | None,
) -> None:
    """Replaces the forward of a layer of transformers, unless the row says why not."""
    report.layers.append(row)
    row.why_parts = layers.why_all_parts() or row.why_parts or why_kept(layer, whatever_its_size=timings is None)
    if not row.why_parts:
        first_calls = FirstCalls(row.name, layers.check, report.count_check)
        load = _Loader(profile, report).exported
        _put_forward(layer, ExportedLayerForward(layer, load, report.count, first_calls, row, timings), report)


def _why_not_here(model: Any) -> str:
    """Why a model of transformers keeps its attention; "" if it can have ours."""
    if places := sorted({str(value.device) for value in model.parameters() if value.device.type != "cpu"}):
        return f"it has tensors on {', '.join(places)}: compiled attention reads the CPU's memory"
    asks = model._can_set_attn_implementation()
    return "" if asks else "its layers do not ask transformers' AttentionInterface"


def _outermost(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Models of transformers that are in no other one, if transformers is in use at all."""
    if (library := sys.modules.get("transformers.modeling_utils")) is None:
        return
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, library.PreTrainedModel) and module not in inside:
            inside.update(module.modules())
            yield name, module


def _configs(module: nn.Module) -> Iterator[Any]:
    """A module's config and those inside of it, where attention is named."""
    waiting = [getattr(module, "config", None)]
    while waiting:
        config = waiting.pop()
        if hasattr(config, ATTENTION):
            yield config
            waiting += [getattr(config, key, None) for key in getattr(config, "sub_configs", ())]


def _others(model: nn.Module, report: AccelerationReport) -> list[AccelerationRow]:
    """Modules that are called an attention and that nothing above looked at."""
    names = [row.name for row in report.rows]
    rows = []
    for name, module in model.named_modules():
        within = any(name == one or not one or name.startswith(f"{one}.") for one in names)
        if "Attention" in type(module).__name__ and not within:
            why = "it is none that is known; mhsa.compile takes any nn.Module"
            rows.append(AccelerationRow(name, type(module).__name__, why))
            names.append(name)
    return rows
