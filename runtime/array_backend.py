"""The three verbs on any runtime that takes arrays by name and gives arrays by name."""

from collections.abc import Callable, Iterable

import numpy as np

from .backend import Array, Cache, IntArray, LayerCache
from .contract import ENCODE, PREFILL, STEP, Dims, graph_specs
from .errors import GraphError

Run = Callable[[str, dict[str, Array]], dict[str, Array]]
"""Runs the graph of a verb: inputs by name to outputs by name (see `runtime.contract`)."""


class ArrayBackend:
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
        self._run = run
        self._specs = graph_specs(dims)
        self._layers = dims.layers

    def encode(self, input_ids: Array, attention_mask: Array) -> Array:
        """See `Backend.encode`."""
        (memory,) = self._outputs(ENCODE, [input_ids, attention_mask])
        return memory

    def prefill(self, input_ids: Array, memory: Array, encoder_attention_mask: Array) -> tuple[Array, Cache[Array]]:
        """See `Backend.prefill`."""
        logits, *flat = self._outputs(PREFILL, [encoder_attention_mask, input_ids, memory])
        return logits, tuple(LayerCache(*flat[4 * layer : 4 * layer + 4]) for layer in range(self._layers))

    def step(self, input_ids: Array, encoder_attention_mask: Array, cache: Cache[Array]) -> tuple[Array, Cache[Array]]:
        """See `Backend.step`."""
        past = [tensor for layer in cache for tensor in layer]
        logits, *grown = self._outputs(STEP, [encoder_attention_mask, input_ids, *past])
        return logits, tuple(
            LayerCache(grown[2 * index], grown[2 * index + 1], *layer[2:]) for index, layer in enumerate(cache)
        )

    def reorder(self, cache: Cache[Array], rows: IntArray) -> Cache[Array]:
        """See `Backend.reorder`."""
        return tuple(LayerCache(layer[0][rows], layer[1][rows], *layer[2:]) for layer in cache)

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


def one_line(error: Exception) -> str:
    """What `error` says, however many lines it takes, and of what class it is: some messages are a bare number."""
    return " ".join(f"{type(error).__name__}: {error}".split())
