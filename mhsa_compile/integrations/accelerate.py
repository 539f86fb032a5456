"""Attention inside of a model of PyTorch's or transformers', replaced in place by compiled artifacts, and put back.

report = mhsa.accelerate(model)
print(report)                      # what was replaced, what was kept, and why
y = model(x)
mhsa.restore(model)                # the model as it was
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from mhsa_compile.conversion.checkpoints.checkpoint import Checkpoint
from mhsa_compile.errors import InputError, ModelError, did_you_mean, did_you_mean_value
from mhsa_compile.files.foreign_errors import first_line
from mhsa_compile.hardware.profile import TargetProfile, load_profile
from mhsa_compile.integrations import torch_attention, torch_linear
from mhsa_compile.integrations import transformers as transformers_attention
from mhsa_compile.integrations.acceleration_report import AccelerationReport, AccelerationRow
from mhsa_compile.integrations.copies import put_forward, take_forward
from mhsa_compile.integrations.first_calls import FirstCalls
from mhsa_compile.integrations.layer_artifacts import LayerArtifacts
from mhsa_compile.integrations.layers.decoder import DecoderLayerForward
from mhsa_compile.integrations.layers.encoder import EncoderForward, EncoderLayerForward, is_plain
from mhsa_compile.integrations.layers.exported import BEFORE, ExportedLayerForward, layers_of, why_kept
from mhsa_compile.integrations.layers.graph import ATTENTIONS
from mhsa_compile.integrations.layers.state import ATTENTION
from mhsa_compile.integrations.layers.ways import LayerChoice, LayerRow, WayTimings
from mhsa_compile.integrations.layers.whole import why_parts
from mhsa_compile.integrations.quantised_layers import quantiser_of
from mhsa_compile.integrations.torch_attention import LayerForward
from mhsa_compile.integrations.torch_linear import LinearForward
from mhsa_compile.integrations.weight_state import LayerInUse, ReplacedForward
from mhsa_compile.nn.weight_blocks import WeightBlocks
from mhsa_compile.runtime.compiled_attention import CompiledAttention
from mhsa_compile.spec.float32_products import Float32Request, float32_request
from mhsa_compile.spec.weight_words import BlockForm, block_form

NAME = "_mhsa_acceleration"
"""The attribute of an accelerated model that holds its report."""
_UNDO = "_mhsa_restore"
"""That which holds what `restore` runs, the last first."""


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
    and these layers, each by one artifact for calls without a cache. Parameters, names and hooks of the model stay. An
    artifact is compiled when a kind of call is first met. Raises InputError for a model in training mode or one that is
    accelerated, ModelError, TargetError; then the model is as it was.

    target          as in `compile`
    on_unsupported  what becomes of attention that cannot be replaced: "keep" leaves it, and the report says why;
                    "raise" is a ModelError
    linears         whether every other nn.Linear, and Conv1D of transformers, of float32 is replaced, too: faster for
                    short inputs, and a second copy of its weights. "int4", or another word of `spec.weight_words` for
                    blocks: with weights of four bits, an eighth of a copy, and activations of eight bits, which is less
                    exact. What `read_checkpoint` gave: with that file's numbers, wherever they stand for the weights
                    that the layer has. `report.linears` has a row for each
    layers          how the layers of PyTorch's encoders and decoders, and transformers', are computed. "fastest": as
                    one artifact, linears, norms and sums included, by PyTorch, or by their parts where that is faster:
                    the first call of some sizes times them, with or without a mask. "whole": as one artifact,
                    unmeasured, so that results are the same bits in every run. "parts": their attention alone, and
                    linears as `linears` says. `report.layers` has a row for each
    float32_products  how what is replaced multiplies float32, as in `compile`; the report says what layers got
    check           whether the first call of each kind (inputs, masks, single queries and others) of each layer, and
                    of attention in transformers whatever layers call it, is held against PyTorch's: what differs by
                    more than rounding is PyTorch's from then on, and a warning names it

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
    _check(model, on_unsupported, layers)
    report = AccelerationReport(float32_request(float32_products))
    acceleration = _Acceleration(model, load_profile(target), layers, _linear_choice(linears), check, report)
    acceleration.run(on_unsupported)
    vars(model).update({NAME: report, _UNDO: acceleration.undo})
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
    report = vars(model).pop(NAME, None) if isinstance(model, nn.Module) else None
    if not isinstance(report, AccelerationReport):
        raise InputError(
            "model", "one that accelerate() was given", f"a {type(model).__name__} that is not accelerated"
        )
    _undo(vars(model).pop(_UNDO))
    for layer in model.modules():  # of those that are copies of others, the report knows nothing
        if isinstance(forward := vars(layer).get("forward"), ReplacedForward | EncoderForward):
            _put_back(layer, forward)


def _undo(steps: list[Callable[[], None]]) -> None:
    while steps:
        steps.pop()()


def _check(model: nn.Module, on_unsupported: str, layers: str) -> None:
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise InputError("model", "an nn.Module", got, "Make or load one first, as by from_pretrained.")
    if on_unsupported not in ("keep", "raise"):
        hint = did_you_mean(str(on_unsupported), ("keep", "raise"))
        raise InputError("on_unsupported", '"keep" or "raise"', repr(on_unsupported), hint)
    for name, module in model.named_modules():
        if NAME in vars(module):
            raise InputError("model", "one that is not accelerated", f"{name or 'it'} is", "Call mhsa.restore first.")
        if module.training:
            got = f"{name or type(model).__name__} in training mode"
            raise InputError("model", "eval mode: compiled attention is for inference", got, "Call model.eval() first.")
    if layers not in get_args(LayerChoice):
        hint = did_you_mean(str(layers), get_args(LayerChoice))
        raise InputError("layers", '"fastest", "whole" or "parts"', repr(layers), hint)


_BLOCKS = {"int4": "int4", "int8": "int8:block=32"}
"""What a word for blocks begins with, and a whole one."""
_LinearChoice: TypeAlias = bool | BlockForm | Checkpoint
"""Whether linears are replaced, what their weights become, or whose they are."""


def _linear_choice(linears: bool | str | Checkpoint) -> _LinearChoice:
    """What becomes of linears. Raises InputError."""
    if isinstance(linears, bool | Checkpoint):
        return linears
    word = linears if isinstance(linears, str) else ""
    try:
        form = block_form(word) if word.partition(":")[0] in _BLOCKS else None
    except InputError as error:  # of what `weights` may be
        raise InputError("linears", error.expected, error.got, error.next_step) from error
    if form is None:
        expected = 'True, False, what read_checkpoint gave, or a word for blocks, such as "int4" or "int8:block=32"'
        raise InputError("linears", expected, repr(linears), did_you_mean_value(word, _BLOCKS))
    return form


class _Acceleration:
    """One model, what is to be replaced in it, and its report."""

    def __init__(
        self,
        model: nn.Module,
        profile: TargetProfile,
        layers: LayerChoice,
        linears: _LinearChoice,
        check: bool,
        report: AccelerationReport,
    ) -> None:
        self._model, self._profile, self._linears, self._check = model, profile, linears, check
        self._report, self._artifacts = report, LayerArtifacts(profile, report)
        self.undo: list[Callable[[], None]] = []
        self._timings = WayTimings() if layers == "fastest" else None
        self._why_parts = 'layers="parts"' if layers == "parts" else ""
        if not self._why_parts and not isinstance(linears, bool):
            self._why_parts = "its linears have few bits"

    def run(self, on_unsupported: str) -> None:
        """Replaces all that can be, or nothing. Raises ModelError for attention that is kept where that is "raise"."""
        try:
            with torch.random.fork_rng(devices=()):  # that a layer can be replaced is shown by a module like it
                self._replace_in_transformers()
                self._replace_attentions()
                self._replace_layers()
                self._report.rows += _others(self._model, self._report)
                self._replace_linears()
            if on_unsupported == "raise" and self._report.kept:
                row = self._report.kept[0]
                raise ModelError(f"attention {row.name!r} of the model", "one that can be replaced", row.why_kept)
        except BaseException:
            _undo(self.undo)
            raise

    def _use(self, name: str, layer: nn.Module, load: Callable[..., CompiledAttention]) -> LayerInUse:
        report = self._report
        first_calls = FirstCalls(name, self._check, report.count_check)
        return LayerInUse(layer, load, report.count, first_calls, report.refreshes, report.count_repacked)

    def _put_forward(self, layer: nn.Module, forward: ReplacedForward[Any, Any] | EncoderForward) -> None:
        put_forward(layer, forward)
        self.undo.append(partial(_put_back, layer, forward))

    def _replace_in_transformers(self) -> None:
        """Replaces attention in the outermost models of transformers, what asks for it by name gets ours, and the
        forward of the layers around it."""
        for name, submodel in _outermost(self._model):
            configs = {id(config): config for part in submodel.modules() for config in _configs(part)}
            before = [(config, getattr(config, ATTENTION)) for config in configs.values()]
            why = _why_not_here(submodel) or self._registered(submodel, before)
            self._report.rows.append(AccelerationRow(name, type(submodel).__name__, why))
            if not why:
                layers = list(layers_of(submodel))
                for place, layer in layers:
                    row = LayerRow(
                        f"{name}.{place}".strip("."), type(layer).__name__, _why_not_plain(submodel, place, before)
                    )
                    self._replace_exported(layer, row, self._registration.name)
                if not layers:
                    self._report.layers.append(
                        LayerRow(name, type(submodel).__name__, "it has no layers that transformers names")
                    )

    @cached_property
    def _registration(self) -> transformers_attention.Registration:
        registration = transformers_attention.Registration(self._profile, self._check, self._report.float32_products)
        self._report.registered.append(registration)
        return registration

    def _registered(self, submodel: Any, before: list[tuple[Any, Any]]) -> str:
        """Has a model of transformers ask for our attention; why it does not, "" if it does."""
        undo = [partial(setattr, config, ATTENTION, implementation) for config, implementation in before]
        self.undo += undo
        try:
            submodel.set_attn_implementation(self._registration.name)
        except ValueError as error:
            for put_back in undo:
                put_back()
            return first_line(error)
        return ""

    def _replace_exported(self, layer: nn.Module, row: LayerRow, implementation: str) -> None:
        """Replaces the forward of a layer of transformers, unless the row says why not."""
        self._report.layers.append(row)
        row.why_parts = self._why_parts or row.why_parts or why_kept(layer, whatever_its_size=self._timings is None)
        if not row.why_parts:
            use = self._use(row.name, layer, self._artifacts.exported)
            self._put_forward(layer, ExportedLayerForward(use, row, self._timings, implementation))

    def _replace_attentions(self) -> None:
        """Replaces the forward of every nn.MultiheadAttention."""
        inside = {part for layer in self._model.modules() if _is_layer(layer) for part in layer.children()}
        for name, layer in self._model.named_modules():
            if not isinstance(layer, nn.MultiheadAttention):
                continue
            why = torch_attention.why_not(layer)
            self._report.rows.append(AccelerationRow(name, type(layer).__name__, why))
            if not why:
                self._put_forward(layer, LayerForward(self._use(name, layer, self._artifacts.attention)))
                if (
                    layer not in inside
                ):  # where a hook is there, subclasses of nn.TransformerEncoderLayer call their parts
                    self.undo.append(layer.register_forward_pre_hook(_calls_parts).remove)

    def _replace_layers(self) -> None:
        """Replaces the forward of layers all of whose attentions are replaced, and of encoders around them, which drop
        padding in rows instead of nested tensors."""
        replaced = {layer for layer in self._model.modules() if isinstance(vars(layer).get("forward"), LayerForward)}
        for name, layer in self._model.named_modules():
            if not isinstance(layer, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                continue
            why = (self._why_parts or why_parts(layer)) if _is_layer(layer) else "it has a forward of its own"
            is_replaced = replaced.issuperset(layer._modules[one] for one in ATTENTIONS if one in layer._modules)
            row = LayerRow(name, type(layer).__name__, why if is_replaced else "attention in it is kept")
            self._report.layers.append(row)
            if _is_layer(layer) and is_replaced:
                forward = DecoderLayerForward if isinstance(layer, nn.TransformerDecoderLayer) else EncoderLayerForward
                use = self._use(name, layer, self._artifacts.layer)
                self._put_forward(layer, forward(use, row, self._timings))
        for encoder in self._model.modules():
            if isinstance(encoder, nn.TransformerEncoder) and replaced.intersection(encoder.modules()):
                self._replace_encoder(encoder, replaced)

    def _replace_encoder(self, encoder: nn.TransformerEncoder, replaced: set[nn.Module]) -> None:
        around: set[Any] = {getattr(layer, "self_attn", None) for layer in encoder.layers}
        alike = around <= replaced and len({attention.num_heads for attention in around}) == 1
        if encoder.use_nested_tensor and alike and "forward" not in vars(encoder):
            self._put_forward(encoder, EncoderForward(encoder))
        self.undo.append(partial(_set_nested, encoder, encoder.use_nested_tensor))
        _set_nested(encoder, False)

    def _replace_linears(self) -> None:
        """Replaces every linear but those whose weights an nn.MultiheadAttention reads itself, and says of quantised
        ones that they are kept. Raises InputError where none has the weights of a checkpoint."""
        attentions = (layer for layer in self._model.modules() if isinstance(layer, nn.MultiheadAttention))
        parts = {part for attention in attentions for part in attention.modules()}
        for name, layer in self._model.named_modules():
            if layer not in parts and (row := self._linear_row(name, layer)) is not None:
                self._report.linears.append(row)
        if isinstance(self._linears, Checkpoint) and not any(row.weights for row in self._report.linears):
            reasons = Counter(row.why_kept or row.why_floats for row in self._report.linears)
            got = "; ".join(f"{number}: {why}" for why, number in reasons.items()) or "a model without linears"
            raise InputError("linears", f"a model with weights of {self._linears.path!r}", got)

    def _linear_row(self, name: str, layer: nn.Module) -> AccelerationRow | None:
        """What becomes of a linear, which is replaced where it can be; None for another, or where none are wanted."""
        kind = type(layer).__name__
        if tool := quantiser_of(layer):
            return AccelerationRow(name, kind, f"quantised by {tool}, which computes it")
        if self._linears is False or not torch_linear.is_linear(layer):
            return None
        if why := torch_linear.why_not(layer):
            return AccelerationRow(name, kind, why)
        form, stored, why = _stored_form(self._linears, name, layer)
        self._put_forward(layer, LinearForward(self._use(name, layer, self._artifacts.linear), form, stored))
        return AccelerationRow(name, kind, weights="" if form is None else str(form), why_floats=why)


def _is_layer(layer: nn.Module) -> bool:
    """Whether a module is a layer of an encoder or a decoder whose forward is replaced with its attentions'."""
    return is_plain(layer) or (type(layer) is nn.TransformerDecoderLayer and "forward" not in vars(layer))


def _stored_form(
    choice: _LinearChoice, name: str, layer: nn.Module
) -> tuple[BlockForm | None, WeightBlocks | None, str]:
    """(what a linear's weights become, the blocks that a checkpoint has for it, why it has none)."""
    if not isinstance(choice, Checkpoint):
        return choice if isinstance(choice, BlockForm) else None, None, ""
    stored = choice.of_layer(name, torch_linear.rows_of(layer))
    return (None, None, stored) if isinstance(stored, str) else (stored.form(rounds_x=choice.rounds_x), stored, "")


def _put_back(layer: nn.Module, forward: ReplacedForward[Any, Any] | EncoderForward) -> None:
    """Lets a layer have its own forward. One that somebody put there since stays: where it calls ours, as wrappers of
    libraries that move weights do, that is from now on the layer's own."""
    forward.is_restored = True
    if isinstance(vars(layer).get("forward"), ReplacedForward | EncoderForward):
        take_forward(layer).is_restored = True


def _calls_parts(layer: nn.Module, inputs: Any) -> None:
    """A hook that changes nothing."""


def _set_nested(encoder: nn.TransformerEncoder, use: bool) -> None:
    encoder.use_nested_tensor = use


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


def _why_not_plain(model: nn.Module, place: str, before: list[tuple[Any, Any]]) -> str:
    """Why a layer's own attention cannot be what it is compared with; "" if it can. A layer asks for what its parts'
    configs say, or the next config around it: those of other parts, such as a backbone of convolutions, are none of
    its."""
    inside = [vars(part).get("config") for part in model.get_submodule(place).modules()]
    names = place.split(".")
    around = (vars(model.get_submodule(".".join(names[:n]))).get("config") for n in reversed(range(len(names))))
    own = {id(config) for config in inside if config is not None} or {id(next(filter(None, around), None))}
    others = sorted({str(word) for config, word in before if id(config) in own and word != BEFORE})
    hint = f'load the model with attn_implementation="{BEFORE}"'
    return f"the model's attention was {' and '.join(others)}: {hint}" if others else ""


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
