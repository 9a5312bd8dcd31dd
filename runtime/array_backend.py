"""The three verbs on any runtime that takes arrays by name and gives arrays by name."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from .backend import Array, Cache, FloatArray, GraphVerbs, IntArray, LayerCache
from .bundle import Bundle
from .contract import Dims, graph_specs
from .errors import GraphError, ProviderError
from .ranking import rank_tokens

Run = Callable[[str, dict[str, Array]], dict[str, Array]]
"""Runs the graph of a verb: inputs by name to outputs by name (see `runtime.contract`)."""


class ArrayBackend(GraphVerbs[Array]):
    """The verbs of `Backend` on numpy arrays.

    Args:
        runtime: Name and version of what computes.
        run: Computes.
        dims: Sizes of the model, from which the contract's names follow.

    Every verb raises `GraphError` when `run` raises an exception or leaves an output out.
    """

    def __init__(self, runtime: str, run: Run, dims: Dims) -> None:
        self.runtime = runtime
        """Name and version of what computes."""
        super().__init__(dims.layers)
        self._run = run
        self._specs = graph_specs(dims)

    def rank(self, logits: Array, forbidden: Sequence[int], count: int) -> tuple[FloatArray, IntArray]:
        """See `Backend.rank`."""
        return rank_tokens(logits, forbidden, count)

    def select(self, cache: Cache[Array], rows: IntArray) -> Cache[Array]:
        """See `Backend.select`."""
        return tuple(LayerCache(*(tensor[rows] for tensor in layer)) for layer in cache)

    def put(self, array: Array) -> Array:
        """See `Backend.put`."""
        return np.ascontiguousarray(array)

    def get(self, tensor: Array) -> Array:
        """See `Backend.get`."""
        return tensor

    def _outputs(self, verb: str, inputs: Iterable[Array]) -> list[Array]:
        """Outputs for `inputs`, both in the order of the contract."""
        spec = self._specs[verb]
        named = {tensor.name: array for tensor, array in zip(spec.inputs, inputs, strict=True)}
        try:
            outputs = self._run(verb, named)
        except Exception as error:  # every runtime has exceptions of its own
            raise GraphError(f"{self.runtime} gave up in {verb}: {one_line(error)}") from None
        if missing := [tensor.name for tensor in spec.outputs if tensor.name not in outputs]:
            raise GraphError(f"{self.runtime} gave up in {verb}: it computed no {', '.join(missing)}")
        return [outputs[tensor.name] for tensor in spec.outputs]


def require_standard_operators(bundle: Bundle, runtime: str) -> None:
    """Refuse a bundle that no other runtime than ONNX Runtime can compute.

    Raises:
        ProviderError: its weights are integers, which are multiplied by operators of ONNX Runtime's own.
    """
    quantization = bundle.passport.quantization
    if quantization is not None and quantization.scheme != "none":
        raise ProviderError(
            f"{runtime} cannot run {bundle.folder}: {bundle.passport.precision} needs ONNX Runtime's own operators"
        )


def one_line(error: Exception) -> str:
    """What `error` says, however many lines it takes, and of what class it is: some messages are a bare number."""
    return " ".join(f"{type(error).__name__}: {error}".split())
