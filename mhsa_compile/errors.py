"""Every error this library raises on purpose.

    MhsaError
    ├── SpecError            a field of an AttentionSpec, or the combination of several
    ├── TargetError          a target profile: unknown name, broken TOML
    ├── ModelError           a source that cannot be compiled: an .onnx file or an nn.Module
    ├── InputError           what a compiled function was called with
    ├── ArtifactError        an artifact that must not be loaded: damaged, newer, for another CPU
    ├── OutputError          a place that cannot be written: it exists, the disk is full
    ├── RecordsError         a file of tuned records: foreign, newer, on a full disk
    ├── BundleError          work for a device, or its results: damaged, newer, of other work
    ├── DeviceError          a device that is to measure or to run: absent, lost, full, of another architecture
    ├── ResourceError        memory that what was asked for needs, and this machine has not
    ├── InstallationError    this environment: a missing extra, a TVM pair that would crash
    ├── BuildError           code generation or linking failed: a defect of ours, or of the tool chain
    │   └── DefectError      our own code fell over itself, on a source that was found valid
    └── MismatchError        compiled code computes something else than the file says: a defect of ours

Each message says four things, in this order: which argument, what was expected, what came, and what to do next.
The command line prints it and exits with code 2; nothing else is printed. What other libraries raise becomes one of
these in `foreign_errors`.

>>> import mhsa_compile as mhsa
>>> try:
...     mhsa.AttentionSpec(embed_dim=64, num_heads=4, dtype="float23")
... except MhsaError as error:
...     print(type(error).__name__, "|", error.argument, "|", error.got, "|", error.next_step)
SpecError | dtype | 'float23' | Did you mean 'float32'?
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

CALL_REFUSED = "mhsa.InputError"
"""The kind under which compiled code raises what becomes an InputError. Its text is three lines: the argument, what was
expected, what came. {N} stands for the size of the dim N; where the third is empty it is the argument's own values."""


def printable(text: str) -> str:
    """`text` as a terminal may have it: names in files are anybody's, and an escape sequence in one could hide or forge
    what else is printed. What is neither a line's end nor visible is spelled as in JSON's strings."""
    if text.isprintable():
        return text
    import json

    return "".join(c if c.isprintable() or c in "\n\t" else json.dumps(c)[1:-1] for c in text)


_OTHER_WORDS = {
    "fp16": "float16", "f16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "f32": "float32",
    "float": "float32", "single": "float32", "cpu": "native", "host": "native", "auto": "native", "yes": "true",
    "ort": "onnxruntime", "pytorch": "torch",
}  # fmt: skip
"""What other tools call a choice of ours."""
_LEAST_BEGINNING = 3
"""Letters from which on a word may be the beginning of a choice."""


def did_you_mean(word: str, choices: Iterable[str], otherwise: str = "", *, most: int = 1, cutoff: float = 0.6) -> str:
    """A next step: the choices, `most` of them, that are spelled much like `word`, or `otherwise`. `cutoff` is
    difflib's, 0 to 1."""
    import difflib

    known = list(choices)
    other_word = _OTHER_WORDS.get(word.lower())
    near = [other_word] if other_word in known else difflib.get_close_matches(word, known, most, cutoff)
    longer = [choice for choice in known if len(word) >= _LEAST_BEGINNING and choice.startswith(word)]
    return _proposal(near or longer[:most], otherwise)


def did_you_mean_value(word: str, values: Mapping[str, object]) -> str:
    """A next step: the value whose word is spelled much like `word`; none where there is no such word."""
    import difflib

    return _proposal([values[near] for near in difflib.get_close_matches(word, values, 1)], "")


def _proposal(values: Sequence[object], otherwise: str) -> str:
    return f"Did you mean {' or '.join(map(repr, values))}?" if values else otherwise


class MhsaError(Exception):
    """The root. `argument`, `expected`, `got` and `next_step` stay readable as attributes."""

    def __init__(self, argument: str, expected: str, got: str, next_step: str = "") -> None:
        self.argument = argument
        self.expected = expected
        self.got = got
        self.next_step = next_step
        message = f"{argument}: expected {expected}, got {got}."
        super().__init__(printable(f"{message} {next_step}".rstrip()))


class SpecError(MhsaError, ValueError):
    """A field of an AttentionSpec is out of range, or two fields contradict each other."""


class TargetError(MhsaError, ValueError):
    """A target is unknown, or its profile does not hold together."""


class ModelError(MhsaError, ValueError):
    """The source cannot be compiled: no attention, an unsupported operator, a damaged file."""


class InputError(MhsaError, ValueError):
    """A compiled function was called with a wrong rank, dtype, dim or name."""


class ArtifactError(MhsaError, ValueError):
    """The artifact must not be loaded: a hash, the format version or the CPU does not fit."""


class OutputError(MhsaError, OSError):
    """The place to write to exists already, or cannot take what would be written."""


class RecordsError(MhsaError, ValueError):
    """A file of tuned records holds what is no record, or cannot take one more."""


class BundleError(MhsaError, ValueError):
    """A bundle of work for a device, or a file of results, is damaged, newer, or belongs to something else."""


class DeviceError(MhsaError, ConnectionError):
    """What was to measure or to run is not there, went away, is full, or is not what the target says."""


class ResourceError(MhsaError, MemoryError):
    """What was asked for needs more memory than this machine has."""


class InstallationError(MhsaError, ImportError):
    """This environment lacks a package, or holds two that crash together."""


class BuildError(MhsaError, RuntimeError):
    """Code generation or linking failed on a source that was found valid."""


class DefectError(BuildError):
    """Code of this library fell over itself on a source that was found valid; its cause is what that code raised."""


class MismatchError(MhsaError, ArithmeticError):
    """Compiled code gave another value than the file that it was compiled from, evaluated by others."""
