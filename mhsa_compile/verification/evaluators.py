"""Who else computes what an .onnx file says: onnx's evaluator in float64, and ONNX Runtime at the file's own dtypes.

`Evaluators` asks both. Each may refuse a file: then the other one stands alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx

from mhsa_compile.files.foreign_errors import first_line
from mhsa_compile.hardware import environment
from mhsa_compile.verification.oracle.evaluate import FLOATS, Reference
from mhsa_compile.verification.precision import AS_STATED, Precision
from mhsa_compile.verification.random_inputs import Arrays
from mhsa_compile.verification.runtime_process import RuntimeProcess

_MOST_BYTES = 1 << 30
"""Floating weights of so many bytes in float64: an evaluation has as much beside them."""
_RANDOM = frozenset({"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
                     "RandomUniformLike"})  # fmt: skip
_POOLS = ("AveragePool", "LpPool", "MaxPool")
_FLOAT64 = "onnx.reference in float64"


class NotEvaluated(Exception):
    """Nobody evaluates this file; the text says why."""


class Evaluators:
    """A file as its author wrote it (`original`), and the model that was read from it, in which attention is one
    operator (`canonical`); `file` is where the original lies, with its weights beside it, if it does. `precision` is
    that of the code in question: ONNX Runtime, which knows no such choice, is asked where it is plain."""

    def __init__(
        self,
        original: onnx.ModelProto,
        canonical: onnx.ModelProto,
        file: Path | None,
        precision: Precision = AS_STATED,
    ) -> None:
        self.original, self.canonical, self._file, self.precision = original, canonical, file, precision
        self.names = [value.name for value in original.graph.output]
        self.used: dict[str, None] = {}
        self.last_refusal = ""

    def check_evaluable(self) -> None:
        """Raises NotEvaluated for a file whose values are nobody's to foresee, or that is too large."""
        if operators := sorted({node.op_type for node in _nodes(self.original) if node.op_type in _RANDOM}):
            raise NotEvaluated(f"{operators[0]} draws numbers at random")
        elements = sum(int(np.prod(t.dims)) for t in self.original.graph.initializer if t.data_type in FLOATS)
        if 8 * elements > _MOST_BYTES:
            raise NotEvaluated(f"its weights in float64 are more than {_MOST_BYTES >> 30} GiB")

    @property
    def has_runtime(self) -> bool:
        """Whether ONNX Runtime was among those that took the file."""
        return any(name != _FLOAT64 for name in self.used)

    @cached_property
    def narrow(self) -> str:
        """The dtype of floats that has as many digits as the model's coarsest values: bfloat16 also where it rounds
        them to bytes, by steps that it states, or ONNX Runtime does so; "" where it has none of 16 bits."""
        nodes = list(_nodes(self.canonical))
        inputs = {name for node in nodes if node.op_type != "Cast" for name in node.input}  # not only to be widened
        kinds = {tensor.data_type for tensor in self.canonical.graph.initializer if tensor.name in inputs}
        kinds |= {a.i for node in nodes if node.op_type == "Cast" for a in node.attribute if a.name == "to"}
        rounding = {"QuantizeLinear"} & {node.op_type for node in nodes}
        rounding |= {"DynamicQuantizeLSTM"} & {node.op_type for node in _nodes(self.original)}  # its states
        if onnx.TensorProto.BFLOAT16 in kinds or rounding:
            return "bfloat16"
        return "float16" if onnx.TensorProto.FLOAT16 in kinds else ""

    @property
    def doubtful(self) -> str:
        """An operator of the file whose sizes onnx's evaluator is known to get wrong; "" where there is none."""
        for node in _nodes(self.original):
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if not a.ref_attr_name}
            same = attributes.get("auto_pad", b"NOTSET") in (b"SAME_UPPER", b"SAME_LOWER")
            if node.op_type in _POOLS and (same or attributes.get("ceil_mode")):
                return f"{node.op_type} {node.name or node.output[0]!r}"
        return ""

    def exact(self, inputs: Arrays) -> list[np.ndarray] | None:
        """The original's outputs in float64; None where onnx's evaluator refuses it."""
        return self._attempt(_FLOAT64, lambda: self._reference.oracle(inputs))

    def exact_of_canonical(self, inputs: Arrays) -> list[np.ndarray] | None:
        """The canonical model's outputs in float64, in the original's order."""
        return self._attempt("", lambda: self._in_order(self._of_canonical.oracle(inputs)))

    def blurred(self, inputs: Arrays) -> list[np.ndarray] | None:
        """The places that depend on rows which a finite fill hides whole; None if there are none."""
        places = self._attempt("", lambda: self._in_order(self._of_canonical.blurred(inputs) or []))
        return places or None

    def rounded(self, inputs: Arrays) -> list[np.ndarray] | None:
        """ONNX Runtime's outputs; None where it is not asked, not installed, or refuses the file."""
        if not self.precision.is_plain or environment.installed_version("onnxruntime") is None:
            return None
        name = f"ONNX Runtime {environment.installed_version('onnxruntime')}"
        return self._attempt(name, lambda: self._session.run(inputs))

    def eager(self, inputs: Arrays) -> list[np.ndarray] | None:
        """The outputs with PyTorch's arithmetic at the file's own dtypes."""
        outputs = self._attempt("", lambda: self._reference.eager(inputs))
        if outputs is None:
            outputs = self._attempt("", lambda: self._in_order(self._of_canonical.eager(inputs)))
        return outputs

    def _attempt(self, name: str, run: Callable[[], list[np.ndarray]]) -> list[np.ndarray] | None:
        try:
            with np.errstate(all="ignore"):
                outputs = run()
        except Exception as error:  # whatever an evaluator trips over; the next sizes may suit it
            if name:
                self.used.pop(name, None)
                self.last_refusal = f"{name} refuses it: {first_line(error)}"
            return None
        if name:
            self.used[name] = None
        return outputs

    def _in_order(self, outputs: list[np.ndarray]) -> list[np.ndarray]:
        by_name = dict(zip((value.name for value in self.canonical.graph.output), outputs, strict=False))
        return [by_name[name] for name in self.names] if outputs else []

    @cached_property
    def _reference(self) -> Reference:
        return Reference(self.original, self.precision)

    @cached_property
    def _of_canonical(self) -> Reference:
        return Reference(self.canonical, self.precision)

    @cached_property
    def _session(self) -> RuntimeProcess:
        return RuntimeProcess(self.original, self._file)


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """All nodes of a model, those of branches and functions among them."""
    for owner in (model.graph, *model.functions):
        yield from _inner(owner.node)


def _inner(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _inner(graph.node)
