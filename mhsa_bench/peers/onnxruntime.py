"""ONNX Runtime, on the artifact's own graph and on its own fused operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from mhsa_bench.peers import onnx_graph
from mhsa_bench.peers.onnx_graph import Feed, RewrittenGraph
from mhsa_bench.peers.peer import Opened, Problem
from mhsa_compile.errors import ModelError
from mhsa_compile.hardware import environment
from mhsa_compile.runtime.artifact.manifest import MODEL, SOURCE

_ROWS_OF_A_MASK = "inconsistent q_sequence_length (between attn_mask and Q)"


class OnnxRuntimeOwnGraph:
    """The file that was compiled, where the artifact has it, else the artifact's model.onnx; all graph optimisations
    on."""

    name = "onnxruntime"

    @contextmanager
    def open(self, problem: Problem, threads: int) -> Iterator[Opened]:
        if problem.artifact.manifest.spec is not None:
            problem.check_scores_fit()
        own = SOURCE if SOURCE in problem.artifact.manifest.files else MODEL
        opened = _session(str(problem.artifact.path / own), threads, problem, lambda arrays, names: dict(arrays))
        try:
            opened.calls[0]()
        except Exception as error:  # the class is not public
            if _ROWS_OF_A_MASK not in str(error):
                raise
            expected = "a mask with a row for each query, which is all that ONNX Runtime's Attention takes"
            hint = "Its other forms take it: --against onnxruntime-fused."
            raise ModelError("onnxruntime", expected, "one row for all queries, as key_padding is", hint) from error
        yield opened


def _session(model: str | bytes, threads: int, problem: Problem, feed: Feed) -> Opened:
    """A session of ONNX Runtime; inputs and outputs are OrtValues, so no copies are charged to it."""
    environment.require("onnxruntime", extra="bench")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # what fails is raised, too
    # Its workers spin inside a call, as they do by default, but not on into the next candidate's turn.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    outputs = [output.name for output in session.get_outputs()]
    names = [value.name for value in session.get_inputs()]
    wrap = onnxruntime.OrtValue.ortvalue_from_numpy
    feeds = [{name: wrap(array) for name, array in feed(arrays, names).items()} for arrays in problem.inputs]
    calls = [partial(session.run_with_ort_values, outputs, values) for values in feeds]
    return Opened(calls, lambda result: [value.numpy() for value in result])


FUSED = (
    RewrittenGraph("Attention", onnx_graph.fused_attention, _session, holds_scores=True),
    RewrittenGraph("MultiHeadAttention", onnx_graph.fused_multi_head, _session, holds_scores=True),
    RewrittenGraph("GroupQueryAttention", onnx_graph.fused_grouped, _session, holds_scores=True),
    RewrittenGraph("MatMul and Softmax", onnx_graph.standard, _session, holds_scores=True),
)
"""Microsoft's operators; and the plain ones, out of which its optimiser may make what it likes."""
