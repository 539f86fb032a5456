"""What no message to a user may show: the words, classes and paths of other libraries."""

from __future__ import annotations

import re

_FOREIGN = re.compile(
    r"Check failed|InternalError|ErrorContext|match_cast|TVMError|Mismatched \S*shape|heap_data|CodeGenVM"
    r"|\btirx?\b|\brelax\b|R\.(?:Tensor|Shape)|<class|span=|\w+\.(?:cc|cpp|h|py):\d+|/project/|site-packages|Traceback|InferenceError"
    r"|KeyError|IndexError|AttributeError|TypeError:|ValueError:|RuntimeError|AssertionError|NoneType|object at 0x"
    r"|\bop_type:|onnx\.\w+Proto"
)


def foreign_words(message: str) -> list[str]:
    """The words of other libraries in a message."""
    return _FOREIGN.findall(message)
