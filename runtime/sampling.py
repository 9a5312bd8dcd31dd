"""Drawing tokens instead of taking the best: what may be drawn, and the random numbers.

The first three functions are rules as in `logit_rules`. Annotations with `numpy.random` are in quotes: to name it would
import it, which no other search needs.
"""

from collections.abc import Sequence

import numpy as np

from .backend import FloatArray, IntArray
from .generation_config import GenerationConfig


def divide_by_temperature(scores: FloatArray, _sequences: IntArray, *, temperature: float) -> FloatArray:
    """`scores (rows, V)` over `temperature`: below 1 probable tokens become more probable."""
    result: FloatArray = scores / temperature
    return result


def keep_top_k(scores: FloatArray, _sequences: IntArray, *, count: int) -> FloatArray:
    """All but the `count` best of `scores (rows, V)` become impossible; those as good as the last of them stay."""
    count = min(count, scores.shape[-1])
    last = np.partition(scores, -count, axis=-1)[:, -count, None]  # (rows, 1)
    return np.where(scores < last, -np.inf, scores)


def keep_top_p(scores: FloatArray, _sequences: IntArray, *, mass: float, at_least: int) -> FloatArray:
    """The worst of `scores (rows, V)` that have probability `1 - mass` together become impossible.

    At least `at_least` tokens stay (Holtzman et al. 2020).
    """
    order = np.argsort(scores, axis=-1, kind="stable")  # the worst first
    rising = np.take_along_axis(scores, order, 1)
    with np.errstate(invalid="ignore"):  # NaN, so that nothing is dropped, where nothing is possible any more
        probabilities = np.exp(rising - rising[:, -1:])
    probabilities /= probabilities.sum(-1, keepdims=True)
    dropped = probabilities.cumsum(-1, dtype=np.float64).astype(np.float32) <= np.float32(1 - mass)
    dropped[:, -at_least:] = False
    changed = rising.copy()
    changed[dropped] = -np.inf
    result = np.empty_like(scores)
    np.put_along_axis(result, order, changed, 1)
    return result


def random_streams(config: GenerationConfig, sources: Sequence[Sequence[int]]) -> "list[np.random.Generator]":
    """Random numbers for each output that grows by itself: one stream a source with beams, else one a hypothesis.

    With a seed they depend on it, on the source and on the number of the output alone: a sentence has the same outputs
    whatever stands beside it.
    """
    seed, outputs = config.seed, config.num_return_sequences if config.num_beams == 1 else 1
    if seed is None:
        return [np.random.default_rng() for _ in range(len(sources) * outputs)]
    return [np.random.default_rng([seed, output, *source]) for source in sources for output in range(outputs)]


def draw(log_probabilities: FloatArray, uniforms: FloatArray) -> IntArray:
    """One token a row from `(rows, V)`, by its probability, with `uniforms (rows,)`: 0 or more, less than 1."""
    cumulative = np.exp(log_probabilities).cumsum(-1, dtype=np.float64)  # (rows, V)
    # The total is 1 up to rounding. A token without probability adds nothing, so it is never the first above.
    chosen: IntArray = (cumulative > (uniforms * cumulative[:, -1])[:, None]).argmax(-1)
    return chosen


class Noise:
    """Gumbel noise for the continuations of beams.

    The k best of log-probabilities with such noise are k draws without replacement (Vieira 2014).
    """

    def __init__(self, streams: "Sequence[np.random.Generator]") -> None:
        self._streams = streams

    def __call__(self, sentences: IntArray, count: int) -> FloatArray:
        """`(len(sentences), count)`, each row from the stream of its sentence."""
        return np.stack([self._streams[sentence].gumbel(size=count) for sentence in sentences])
