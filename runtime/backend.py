"""The three verbs, as whoever runs the model must offer them; search and parity know this protocol alone.

A backend keeps its tensors where it computed them: an `OrtValue`, a `torch.Tensor`. Only `put` and `get` cross over.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from .contract import BEGIN, BRANCH, ENCODE, PREFILL, STEP

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[Any]
BoolArray = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]

Tensor = TypeVar("Tensor")
"""What the backend computes on."""


class LayerCache(NamedTuple, Generic[Tensor]):
    """What a decoder layer remembers: keys and values of the target `(B, H, P, D)` and of the source `(B, H, S, D)`."""

    decoder_key: Tensor
    decoder_value: Tensor
    encoder_key: Tensor
    encoder_value: Tensor


Cache = tuple[LayerCache[Tensor], ...]


class Backend(Protocol[Tensor]):
    """Runs one model. All masks are int64, 1 on real tokens."""

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """`(B, S)` ids and mask to memory `(B, S, E)`."""

    def prefill(
        self, input_ids: Tensor, memory: Tensor, encoder_attention_mask: Tensor
    ) -> tuple[Tensor, Cache[Tensor]]:
        """The first T target tokens `(B, T)`: logits `(B, T, V)` and their cache."""

    def begin(self, memory: Tensor) -> Cache[Tensor]:
        """The cache of no tokens, P = 0, about a source: with it the first token may come by `step` or `branch`."""

    def step(
        self, input_ids: Tensor, encoder_attention_mask: Tensor, cache: Cache[Tensor]
    ) -> tuple[Tensor, Cache[Tensor]]:
        """One more token `(B, 1)`: logits `(B, 1, V)`, and the cache grown by one around the same cross-attention."""

    def branch(
        self, input_ids: Tensor, encoder_attention_mask: Tensor, seen: Tensor, cache: Cache[Tensor]
    ) -> tuple[Tensor, Cache[Tensor]]:
        """A step of T hypotheses about each source, `(B, T)`: logits `(B, T, V)`, and the cache grown by T.

        Each token sees those of the P tokens in the cache that `seen (B, T, P)` is 1 on, its ancestors, and itself.
        """

    def rank(self, logits: Tensor, forbidden: Sequence[int], count: int) -> tuple[FloatArray, IntArray]:
        """Of `logits (B, T, V)` the `count` best: log-probabilities and tokens, `(B, T, count)` each, the best first.

        The `forbidden` tokens have no probability. Of equal tokens the one with the lower id comes first.
        """

    def select(self, cache: Cache[Tensor], rows: IntArray) -> Cache[Tensor]:
        """Caches of `rows`, which may be fewer or more than before."""

    def put(self, array: Array) -> Tensor:
        """Hand an array over to the backend."""

    def get(self, tensor: Tensor) -> Array:
        """Fetch a tensor back."""


class GraphVerbs(ABC, Generic[Tensor]):
    """The three verbs of whatever runs the three graphs: their inputs and outputs are flat, in the contract's order."""

    def __init__(self, layers: int) -> None:
        self._layers = layers

    @abstractmethod
    def _outputs(self, verb: str, inputs: Iterable[Tensor]) -> list[Tensor]:
        """Outputs of the graph of `verb` for `inputs`."""

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """See `Backend.encode`."""
        (memory,) = self._outputs(ENCODE, [input_ids, attention_mask])
        return memory

    def prefill(
        self, input_ids: Tensor, memory: Tensor, encoder_attention_mask: Tensor
    ) -> tuple[Tensor, Cache[Tensor]]:
        """See `Backend.prefill`."""
        logits, *flat = self._outputs(PREFILL, [encoder_attention_mask, input_ids, memory])
        return logits, self._layered(flat)

    def begin(self, memory: Tensor) -> Cache[Tensor]:
        """See `Backend.begin`."""
        return self._layered(self._outputs(BEGIN, [memory]))

    def step(
        self, input_ids: Tensor, encoder_attention_mask: Tensor, cache: Cache[Tensor]
    ) -> tuple[Tensor, Cache[Tensor]]:
        """See `Backend.step`."""
        return self._grown(STEP, [encoder_attention_mask, input_ids], cache)

    def branch(
        self, input_ids: Tensor, encoder_attention_mask: Tensor, seen: Tensor, cache: Cache[Tensor]
    ) -> tuple[Tensor, Cache[Tensor]]:
        """See `Backend.branch`."""
        return self._grown(BRANCH, [encoder_attention_mask, input_ids, seen], cache)

    def _layered(self, flat: Sequence[Tensor]) -> Cache[Tensor]:
        return tuple(LayerCache(*flat[4 * layer : 4 * layer + 4]) for layer in range(self._layers))

    def _grown(self, verb: str, inputs: list[Tensor], cache: Cache[Tensor]) -> tuple[Tensor, Cache[Tensor]]:
        past = [tensor for layer in cache for tensor in layer]
        logits, *grown = self._outputs(verb, [*inputs, *past])
        return logits, tuple(
            LayerCache(grown[2 * index], grown[2 * index + 1], layer.encoder_key, layer.encoder_value)
            for index, layer in enumerate(cache)
        )
