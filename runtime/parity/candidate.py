"""Who sits the exam: a runtime, with what the passport and the tokenizer of its bundle say."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array, Backend, FloatArray
from ..bundle import Passport
from ..contract import PREFILL, STEP
from ..errors import GraphError
from ..generation import GenerationConfig, Hypothesis, generate, pad
from ..ranking import log_softmax
from ..tokenizer import Tokenizer


class Candidate(NamedTuple):
    """A runtime under test."""

    backend: Backend[Any]
    passport: Passport
    tokenizer: Tokenizer
    setting: str
    """Runtime, optimisation level and threads, for people."""

    @property
    def exact(self) -> bool:
        """Whether it is held to what float32 earns; a lower precision is judged by its words."""
        return self.passport.precision == "fp32"

    def search(self, sources: Sequence[Sequence[int]], config: GenerationConfig) -> list[Hypothesis]:
        """The best output for each of `sources`, one batch."""
        passport = self.passport
        found = generate(self.backend, sources, config, passport.special, passport.dims.max_positions)
        return [best for best, *_ in found]

    def forced_log_probs(self, source: Sequence[int], target: Sequence[int], *, stepwise: bool = False) -> FloatArray:
        """Log-probabilities `(N + 1, V)` of the token after each prefix of `target (N,)`, the empty one first.

        By one prefill, or `stepwise` on the runtime's own caches.

        Raises:
            GraphError: the runtime gives up, or gives other tokens than the vocabulary has.
        """
        ids, mask = pad([source], self.passport.special.pad)
        fed = np.array([[self.passport.special.start, *target]], np.int64)
        logits = np.stack(rollout(self.backend, ids, mask, fed, 0 if stepwise else fed.shape[1]), 1)[0]
        if logits.shape[-1] != self.passport.dims.vocab_size:
            raise GraphError(f"the runtime gives {logits.shape[-1]} logits, expected {self.passport.dims.vocab_size}")
        return log_softmax(logits.astype(np.float64))


def rollout(
    backend: Backend[Any], source_ids: Array, source_mask: Array, target_ids: Array, prompt: int = 0
) -> list[Array]:
    """Logits `(B, V)` after each of `target_ids (B, N)`: see `chained`."""
    return list(chained(backend, source_ids, source_mask, target_ids, prompt))


def chained(
    backend: Backend[Any], source_ids: Array, source_mask: Array, target_ids: Array, prompt: int = 0
) -> Iterator[Array]:
    """Logits `(B, V)` after each of `target_ids (B, N)`, position by position.

    The first `prompt` of them go through one prefill, the others step by step on the caches that come back: all of them
    where `prompt` is 0.
    """
    mask = backend.put(source_mask)
    memory = backend.encode(backend.put(source_ids), mask)
    if prompt:
        logits, cache = backend.prefill(backend.put(target_ids[:, :prompt]), memory, mask)
        yield from _logits(backend, logits, (len(target_ids), prompt), PREFILL).swapaxes(0, 1)
    else:
        cache = backend.begin(memory)
    for place in range(prompt, target_ids.shape[1]):
        logits, cache = backend.step(backend.put(target_ids[:, place : place + 1]), mask, cache)
        yield _logits(backend, logits, (len(target_ids), 1), STEP)[:, -1]


def _logits(backend: Backend[Any], tensor: Any, shape: tuple[int, ...], verb: str) -> Array:
    """Logits `(*shape, V)`.

    Raises:
        GraphError: they are of other rows or positions than were asked for.
    """
    logits = backend.get(tensor)
    if logits.ndim != len(shape) + 1 or logits.shape[:-1] != shape:
        raise GraphError(f"{verb} gave logits of shape {logits.shape}, expected {(*shape, 'V')}")
    return logits
