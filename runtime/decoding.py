"""The decoder at work on one batch: prefill once, then step after step, on rows that move and leave."""

from typing import Generic, NamedTuple

import numpy as np

from .backend import Backend, Cache, FloatArray, IntArray, Tensor
from .errors import GraphError


class SpecialIds(NamedTuple):
    """Ids that the search must know."""

    pad: int
    start: int
    eos: int


class Limits(NamedTuple):
    """How long an output may be, in tokens, start token and prefix included."""

    prompt: tuple[int, ...]
    """The start token and the forced prefix."""
    shortest: int
    longest: int


class Decoding(Generic[Tensor]):
    """One batch between `prefill` and its last `step`. A row is one hypothesis in the making.

    Args:
        backend: Runs the model.
        source_ids: `(B, S)`.
        source_mask: `(B, S)`, 1 on real tokens.
    """

    def __init__(self, backend: Backend[Tensor], source_ids: IntArray, source_mask: IntArray) -> None:
        self._backend = backend
        self._source_ids = source_ids
        self._source_mask = source_mask
        self._mask = backend.put(source_mask)
        self._cache: Cache[Tensor] = ()
        self.rows = len(source_ids)

    def start(self, prompt: tuple[int, ...]) -> FloatArray:
        """Encode the source and prefill with `prompt`, the same in every row; logits `(B, V)` of the token after it."""
        memory = self._backend.encode(self._backend.put(self._source_ids), self._mask)
        ids = np.tile(np.array(prompt, np.int64), (self.rows, 1))  # (B, T)
        logits, self._cache = self._backend.prefill(self._backend.put(ids), memory, self._mask)
        return self._last(logits)

    def step(self, tokens: IntArray) -> FloatArray:
        """Append one token a row; logits `(rows, V)` of the next."""
        logits, self._cache = self._backend.step(self._backend.put(tokens[:, None]), self._mask, self._cache)
        return self._last(logits)

    def reorder(self, rows: IntArray) -> None:
        """Let row i go on from what row `rows[i]` had seen; both belong to the same sentence."""
        self._cache = self._backend.reorder(self._cache, rows)

    def keep(self, rows: IntArray) -> None:
        """Go on with `rows` alone, in that order; a row may be taken more than once."""
        self._cache = self._backend.select(self._cache, rows)
        self._source_mask = self._source_mask[rows]
        self._mask = self._backend.put(self._source_mask)
        self.rows = len(rows)

    def _last(self, logits: Tensor) -> FloatArray:
        array = self._backend.get(logits)
        if len(array) != self.rows:
            raise GraphError(f"the graphs gave logits of {len(array)} rows, expected {self.rows}")
        return array[:, -1].astype(np.float32)  # (rows, V)


def log_softmax(logits: FloatArray) -> FloatArray:
    """Log-probabilities along the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    result: FloatArray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
