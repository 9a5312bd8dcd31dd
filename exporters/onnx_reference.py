"""The three verbs on ONNX's reference evaluator: the standard's own meaning of a graph, in numpy, made for no speed."""

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from runtime.array_backend import ArrayBackend, one_line, require_standard_operators
from runtime.backend import Array
from runtime.bundle import Bundle
from runtime.contract import BEGIN, BRANCH, VERBS
from runtime.errors import BundleError

RUNTIME = f"ONNX reference evaluator {onnx.__version__}"


def reference_backend(bundle: Bundle) -> ArrayBackend:
    """The graphs of `bundle`, evaluated node by node.

    Raises:
        ProviderError: the bundle has operators of ONNX Runtime's own.
        BundleError: a graph or its weights cannot be read.
    """
    require_standard_operators(bundle, "reference")
    graphs = {verb: _evaluator(bundle, verb) for verb in (*VERBS, BEGIN, BRANCH)}

    def run(verb: str, inputs: dict[str, Array]) -> dict[str, Array]:
        graph = graphs[verb]
        # A softmax over nothing is NaN for a moment; the exam finds a NaN that comes out.
        with np.errstate(all="ignore"):
            return dict(zip(graph.output_names, graph.run(None, inputs), strict=True))

    return ArrayBackend(RUNTIME, run, bundle.passport.dims)


def _evaluator(bundle: Bundle, verb: str) -> ReferenceEvaluator:
    path = bundle.path(verb)
    try:
        # Not `ReferenceEvaluator(path)`: it would look for the weights in the current folder.
        return ReferenceEvaluator(onnx.load(path))
    except Exception as error:  # of protobuf, of onnx and of the operating system
        raise BundleError(f"{RUNTIME} cannot read {path}: {one_line(error)}") from None
