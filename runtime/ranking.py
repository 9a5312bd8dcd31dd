"""From logits to the best tokens, in numpy: what the graph `rank` does where logits are."""

from collections.abc import Sequence

import numpy as np

from .backend import FloatArray, IntArray


def log_softmax(logits: FloatArray) -> FloatArray:
    """Log-probabilities along the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    result: FloatArray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def rank_tokens(logits: FloatArray, forbidden: Sequence[int], count: int) -> tuple[FloatArray, IntArray]:
    """See `Backend.rank`."""
    allowed = logits.astype(np.float32)
    allowed[..., list(forbidden)] = -np.inf
    with np.errstate(invalid="ignore"):  # where all tokens are forbidden, none has a probability
        log_probabilities = log_softmax(allowed)
    return best_entries(log_probabilities, min(count, logits.shape[-1]))


def best_entries(scores: FloatArray, count: int) -> tuple[FloatArray, IntArray]:
    """The `count` largest of `scores` along the last axis and their places, the largest first; of equals the first."""
    keys = -scores
    places = np.argpartition(keys, count - 1, axis=-1)[..., :count]
    chosen = np.take_along_axis(keys, places, -1)
    last = chosen[..., -1:]
    # Of those that are equal to the last of the chosen, any may have been chosen.
    tied = (keys == last).sum(-1) > (chosen == last).sum(-1)
    places[tied] = np.argsort(keys[tied], axis=-1, kind="stable")[:, :count]
    places.sort(axis=-1)
    values = np.take_along_axis(scores, places, -1)
    order = np.argsort(-values, axis=-1, kind="stable")
    return np.take_along_axis(values, order, -1), np.take_along_axis(places, order, -1)
