"""The three verbs on OpenVINO's CPU device. Needs the extra `openvino`: import it where that was asked for alone."""

import sys

from .array_backend import ArrayBackend, require_standard_operators
from .backend import Array
from .bundle import Bundle
from .contract import BEGIN, BRANCH, VERBS, graph_specs
from .errors import BundleError, ProviderError
from .session import MOST_THREADS
from .threads import available_cpus

# Importing OpenVINO tells its makers so over the network, unless the package that does this is missing.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # None makes its import fail

import openvino as ov  # noqa: E402 - after the line above
from openvino.frontend import FrontEndManager  # noqa: E402 - likewise

RUNTIME = f"OpenVINO {ov.__version__.partition('-')[0]}"

OLDEST_OPSET = 18
"""Of those that are exported: every operator in it is older than OpenVINO's reader."""

NOISE = ("Exception from ", "Check '", "FrontEnd API failed ")
"""How lines begin that say where in OpenVINO's sources an error comes from."""


def openvino_backend(bundle: Bundle, threads: int | None = None) -> ArrayBackend:
    """The graphs of `bundle`, compiled once for every shape, computing in float32.

    OpenVINO takes a token id that is not in the vocabulary for a row of zeros, where ONNX Runtime gives up.

    Args:
        bundle: The opened bundle.
        threads: Threads of one operator; None for the CPUs that this process may use.

    Raises:
        ProviderError: `threads` is impossible, or the bundle has operators of ONNX Runtime's own.
        BundleError: OpenVINO cannot read a graph.
    """
    require_standard_operators(bundle, "openvino")
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise ProviderError(f"threads is {threads}, expected 1 to {MOST_THREADS}")
    settings: dict[str, str | int] = {
        "INFERENCE_PRECISION_HINT": "f32",  # or it takes bfloat16 on the processors that have it
        "INFERENCE_NUM_THREADS": threads or available_cpus(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    specs = graph_specs(bundle.passport.dims)
    core = ov.Core()
    graphs = {verb: _compiled(core, bundle, verb, settings) for verb in (*VERBS, BEGIN, BRANCH)}

    def run(verb: str, inputs: dict[str, Array]) -> dict[str, Array]:
        results = graphs[verb](inputs)
        return {tensor.name: results[tensor.name] for tensor in specs[verb].outputs}

    return ArrayBackend(RUNTIME, run, bundle.passport.dims)


def _compiled(core: ov.Core, bundle: Bundle, verb: str, settings: dict[str, str | int]) -> ov.CompiledModel:
    path, opset = bundle.path(verb), bundle.passport.opset
    # `Core.read_model` would try the readers of other formats as well, and these complain to the terminal.
    reader = FrontEndManager().load_by_framework("onnx")
    try:
        graph = reader.load(str(path))
    except Exception as error:  # OpenVINO's own exceptions share no public base
        raise BundleError(f"{RUNTIME} cannot read {path}: {_reason(error)}") from None
    try:
        return core.compile_model(reader.convert(graph), "CPU", settings)
    except Exception as error:  # OpenVINO's own exceptions share no public base
        advice = f". Older operators may do: toolkit export --opset {OLDEST_OPSET}" if opset > OLDEST_OPSET else ""
        raise BundleError(f"{RUNTIME} cannot compile {path}, opset {opset}: {_reason(error)}{advice}") from None


def _reason(error: Exception) -> str:
    """What `error` says in one line, without where it comes from."""
    lines = [line for line in str(error).splitlines() if not line.startswith(NOISE)]
    return " ".join(" ".join(lines).split()) or type(error).__name__
