"""Beam search with the semantics of transformers' `generate`, option by option.

Letters: B sentences still in the batch, K beams, V vocabulary.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from .backend import BoolArray, FloatArray, IntArray, Tensor
from .decoding import Decoding, Limits, SpecialIds, forbid_early_end, log_softmax

NEVER = np.float32(-1e9)
"""Score of a hypothesis that does not exist; transformers' value."""

Found = list[tuple[list[int], float]]
"""Ids and scores of one sentence's hypotheses, the best first."""


class _Candidates(NamedTuple):
    """The 2K best continuations of each sentence, `(B, 2K)` each, the best first."""

    scores: FloatArray
    beams: IntArray
    tokens: IntArray


class _Finished:
    """The best K finished hypotheses of one sentence."""

    def __init__(self, beams: int) -> None:
        self._beams = beams
        self.hypotheses: Found = []

    def add(self, ids: list[int], score: float) -> None:
        # Stable: of two equal scores the earlier one stays ahead.
        self.hypotheses = sorted([*self.hypotheses, (ids, score)], key=lambda found: -found[1])[: self._beams]

    def done(self, best_possible: float, *, early_stopping: bool | Literal["never"]) -> bool:
        """Whether nothing can change any more, if no running beam will score above `best_possible`."""
        full = len(self.hypotheses) == self._beams
        return full and (early_stopping is True or not best_possible > self.hypotheses[-1][1])


def beam_search(
    decoding: Decoding[Tensor],
    limits: Limits,
    special: SpecialIds,
    *,
    beams: int,
    length_penalty: float,
    early_stopping: bool | Literal["never"],
) -> list[Found]:
    """Search the K = `beams` best outputs of every sentence in `decoding`.

    Each step takes the 2K best continuations of a sentence's K running beams. Those that end and rank among the first K
    become finished hypotheses; the best K that do not end run on. A sentence is done when no running beam can beat its
    worst finished hypothesis, judged as `early_stopping` says, or at the length limit.

    Returns:
        For each sentence up to K pairs of ids (without the start token) and score.
    """
    active = np.arange(decoding.rows)  # (B,) the sentences still in the batch
    finished = [_Finished(beams) for _ in active]
    logits = decoding.start(limits.prompt).repeat(beams, axis=0)  # (B K, V)
    decoding.keep(active.repeat(beams))
    prompt = len(limits.prompt)
    sequences = np.tile(np.array(limits.prompt, np.int64), (active.size, beams, 1))  # (B, K, length)
    totals = np.full((active.size, beams), NEVER)  # (B, K)
    totals[:, 0] = 0  # the beams are all the same yet: only one of them may count

    for length in range(prompt, limits.longest):
        scores = log_softmax(logits)
        forbid_early_end(scores, length, limits, special)
        candidates = _best_continuations(scores, totals)
        last = length + 1 == limits.longest
        ends = (candidates.tokens == special.eos) | last  # (B, 2K)
        divisor = np.float32((length + 1 - prompt) ** length_penalty)
        _finish([finished[row] for row in active], sequences, candidates, ends[:, :beams], divisor)
        if last:
            break

        totals, origins, tokens = _running(candidates, ends, beams)  # (B, K) each
        sequences = np.take_along_axis(sequences, origins[:, :, None], 1)
        sequences = np.concatenate([sequences, tokens[:, :, None]], 2)  # (B, K, length + 1)
        hopeful = limits.longest - prompt if early_stopping == "never" and length_penalty > 0 else length + 1 - prompt
        best_possible = totals[:, 0] / np.float32(hopeful**length_penalty)  # (B,)
        going = np.array(
            [
                not finished[row].done(best, early_stopping=early_stopping)
                for row, best in zip(active, best_possible, strict=True)
            ]
        )
        rows = (np.arange(active.size)[:, None] * beams + origins)[going].ravel()  # (B K,)
        if not going.any():
            break
        if going.all():
            decoding.reorder(rows)
        else:
            active, sequences, totals, tokens = active[going], sequences[going], totals[going], tokens[going]
            decoding.keep(rows)
        logits = decoding.step(tokens.ravel())
    return [sentence.hypotheses for sentence in finished]


def _best_continuations(log_probabilities: FloatArray, totals: FloatArray) -> _Candidates:
    """Of the K V continuations of each sentence, the 2K best, from `(B K, V)` and the beams' own scores `(B, K)`."""
    sentences, beams = totals.shape
    vocabulary = log_probabilities.shape[-1]
    scores = (log_probabilities.reshape(sentences, beams, vocabulary) + totals[:, :, None]).reshape(sentences, -1)
    kept = min(2 * beams, beams * vocabulary)
    best = np.sort(np.argpartition(-scores, kept - 1, axis=-1)[:, :kept])  # (B, 2K), by index: ties go to the lower one
    values = np.take_along_axis(scores, best, 1)
    order = np.argsort(-values, axis=-1, kind="stable")
    best = np.take_along_axis(best, order, 1)
    return _Candidates(np.take_along_axis(values, order, 1), best // vocabulary, best % vocabulary)


def _finish(
    finished: Sequence[_Finished], sequences: IntArray, candidates: _Candidates, ends: BoolArray, divisor: np.float32
) -> None:
    """Hand each of the first K continuations that ends, `(B, K)`, to its sentence's hypotheses."""
    for place, rank in np.argwhere(ends):
        ids = sequences[place, candidates.beams[place, rank], 1:].tolist()
        finished[place].add(
            [*ids, int(candidates.tokens[place, rank])], float(candidates.scores[place, rank] / divisor)
        )


def _running(candidates: _Candidates, ends: BoolArray, beams: int) -> _Candidates:
    """The K best continuations that do not end, `(B, K)` each; where there are fewer, others with a hopeless score."""
    scores = candidates.scores + ends * NEVER
    order = np.argsort(-scores, axis=-1, kind="stable")[:, :beams]
    return _Candidates(
        np.take_along_axis(scores, order, 1),
        np.take_along_axis(candidates.beams, order, 1),
        np.take_along_axis(candidates.tokens, order, 1),
    )
