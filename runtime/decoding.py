"""The decoder at work on one batch: a prompt, then step after step, on rows that move and leave."""

from collections.abc import Sequence
from typing import Generic, NamedTuple

import numpy as np

from .backend import Array, Backend, Cache, FloatArray, IntArray, Tensor
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
    """One batch between its source and its last token. A row is one hypothesis in the making, or one source's beams.

    Args:
        backend: Runs the model.
        source_ids: `(B, S)`.
        source_mask: `(B, S)`, 1 on real tokens.
    """

    _cache: Cache[Tensor]
    _logits: Tensor
    _kept: IntArray
    """Rows of the last logits."""
    _seen: IntArray
    """Of the tokens in the cache, the ancestors of each hypothesis: `(rows, K, P)`."""

    def __init__(self, backend: Backend[Tensor], source_ids: IntArray, source_mask: IntArray) -> None:
        self._backend = backend
        self._source_ids = source_ids
        self._source_mask = source_mask
        self._mask = backend.put(source_mask)
        self.rows = len(source_ids)

    def start(self, prompt: tuple[int, ...], *, branching: bool = False) -> None:
        """Encode the source and feed `prompt`, the same in every row.

        A prompt of one token goes through the graph that goes on with it, `branch` where the search is `branching` and
        `step` elsewhere, so that `prefill` is loaded for longer ones alone.
        """
        memory = self._backend.encode(self._backend.put(self._source_ids), self._mask)
        ids = np.tile(np.array(prompt, np.int64), (self.rows, 1))  # (B, T)
        if len(prompt) > 1:
            self._go_on(*self._backend.prefill(self._backend.put(ids), memory, self._mask))
        else:
            self._cache = self._backend.begin(memory)
            self._seen = np.ones((self.rows, 1, 0), np.int64)
            if branching:
                self.branch(ids, np.zeros_like(ids))
            else:
                self.step(ids[:, 0])
        self._seen = np.ones((self.rows, 1, len(prompt)), np.int64)

    def step(self, tokens: IntArray) -> None:
        """Append one token a row, `(rows,)`."""
        self._go_on(*self._backend.step(self._backend.put(tokens[:, None]), self._mask, self._cache))

    def branch(self, tokens: IntArray, origins: IntArray) -> None:
        """Append a token to each of K beams a row: beam k goes on from what beam `origins[:, k]` had seen.

        Args:
            tokens: `(rows, K)`.
            origins: `(rows, K)`; all 0 after `start`, where there is one beam yet.
        """
        seen = np.take_along_axis(self._seen, origins[:, :, None], 1)  # (rows, K, P)
        ids = self._backend.put(tokens)
        self._go_on(*self._backend.branch(ids, self._mask, self._backend.put(seen), self._cache))
        own = np.tile(np.eye(tokens.shape[1], dtype=np.int64), (self.rows, 1, 1))  # (rows, K, K)
        self._seen = np.concatenate([seen, own], 2)  # (rows, K, P + K)

    def logits(self) -> FloatArray:
        """Logits of each hypothesis's next token: `(rows, V)`, or `(rows K, V)` of beams."""
        array = self._backend.get(self._logits)
        return self._last(array).astype(np.float32, copy=False).reshape(-1, array.shape[-1])

    def best(self, count: int, forbidden: Sequence[int]) -> tuple[FloatArray, IntArray]:
        """Log-probabilities and tokens of each hypothesis's `count` best, `(rows, count)` or `(rows K, count)` each."""
        scores, tokens = self._backend.rank(self._logits, forbidden, count)
        kept = scores.shape[-1]
        return self._last(scores).reshape(-1, kept), self._last(tokens).reshape(-1, kept)

    def keep(self, rows: IntArray) -> None:
        """Go on with `rows` alone, in that order; a row may be taken more than once."""
        self._cache = self._backend.select(self._cache, rows)
        self._source_mask = self._source_mask[rows]
        self._mask = self._backend.put(self._source_mask)
        self._kept, self._seen = self._kept[rows], self._seen[rows]
        self.rows = len(rows)

    def _go_on(self, logits: Tensor, cache: Cache[Tensor]) -> None:
        self._logits, self._cache = logits, cache
        self._kept = np.arange(self.rows)

    def _last(self, array: Array) -> Array:
        """A copy of the rows that are kept, of `array (rows, T, ...)`: all beams, or the last position of a prefix."""
        if len(array) <= self._kept.max(initial=-1):
            raise GraphError(f"the graphs gave logits of {len(array)} rows, expected {self.rows}")
        kept = array[self._kept]
        return kept if self._seen.shape[1] > 1 else kept[:, -1:]
