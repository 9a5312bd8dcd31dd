"""Beam search with the semantics of transformers' `generate`, option by option.

Letters: B sentences still in the batch, K beams, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from .backend import BoolArray, FloatArray, IntArray, Tensor
from .decoding import Decoding, Limits, SpecialIds
from .errors import GenerationError
from .generation_config import Ids
from .logit_rules import Bans, Rule, apply_rules
from .ranking import best_entries, log_softmax

NEVER = np.float32(-1e9)
"""Score of a hypothesis that does not exist; transformers' value."""

Found = list[tuple[list[int], float]]
"""Ids and scores of one sentence's hypotheses, the best first."""

Noise = Callable[[IntArray, int], FloatArray]
"""From the sentences in the batch and a count to what is added to that many continuations of each, `(B, count)`."""


class _Candidates(NamedTuple):
    """The 2K best continuations of each sentence, `(B, 2K)` each, the best first."""

    scores: FloatArray
    beams: IntArray
    tokens: IntArray


class _Scoring(NamedTuple):
    """How log-probabilities become scores. Lengths count start token and prefix."""

    limits: Limits
    length_penalty: float
    early_stopping: bool | Literal["never"]

    def scores(self, totals: FloatArray, length: int) -> FloatArray:
        """Of outputs of `length` tokens whose new ones have the log-probabilities `totals`."""
        result: FloatArray = totals / np.float32((length - len(self.limits.prompt)) ** self.length_penalty)
        return result

    def hopes(self, totals: FloatArray, length: int) -> FloatArray:
        """The best scores that beams of `length` tokens are thought to reach."""
        far = self.early_stopping == "never" and self.length_penalty > 0
        return self.scores(totals, self.limits.longest if far else length)


class _Finished:
    """The best K finished hypotheses of one sentence.

    A broken model's scores are NaN. Those stay: parity is to see them.
    """

    def __init__(self, beams: int, scoring: _Scoring) -> None:
        self._beams = beams
        self._scoring = scoring
        self._hypotheses: Found = []

    def add(self, ids: list[int], score: float) -> None:
        if not score <= NEVER:
            # Stable: of two equal scores the earlier one stays ahead.
            self._hypotheses = sorted([*self._hypotheses, (ids, score)], key=lambda found: -found[1])[: self._beams]

    def done(self, hope: float) -> bool:
        """Whether nothing can change any more, if no running beam will score above `hope`."""
        if len(self._hypotheses) < self._beams:
            return bool(hope <= NEVER)
        return self._scoring.early_stopping is True or not hope > self._hypotheses[-1][1]

    def real(self) -> Found:
        """The hypotheses that exist: not those that a beam which never was has left."""
        hopeless = np.array(NEVER / 2)
        found = [pair for pair in self._hypotheses if not pair[1] <= self._scoring.scores(hopeless, len(pair[0]) + 1)]
        if not found:
            raise GenerationError("generation: the options leave a sentence no output: every token is forbidden")
        return found


def beam_search(
    decoding: Decoding[Tensor],
    limits: Limits,
    special: SpecialIds,
    *,
    beams: int,
    length_penalty: float,
    early_stopping: bool | Literal["never"],
    rules: Sequence[Rule] = (),
    bans: Bans = lambda _: (),
    renormalize: bool = False,
    noise: Noise | None = None,
) -> list[Found]:
    """Search the K = `beams` best outputs of every sentence in `decoding`.

    Each step takes the 2K best continuations of a sentence's K running beams. Those that end and rank among the first K
    become finished hypotheses; the best K that do not end run on. A sentence is done when no running beam can beat its
    worst finished hypothesis, judged as `early_stopping` says, or at the length limit. With `noise` the 2K
    continuations are those that are best with it, so that they are drawn at random.

    Returns:
        For each sentence up to K pairs of ids (without the start token) and score; fewer than K where `rules` leave
        fewer.

    Raises:
        GenerationError: `rules` leave a sentence no output.
    """
    scoring = _Scoring(limits, length_penalty, early_stopping)
    active = np.arange(decoding.rows)  # (B,) the sentences still in the batch
    finished = [_Finished(beams, scoring) for _ in active]
    decoding.start(limits.prompt, branching=True)
    sequences = np.tile(np.array(limits.prompt, np.int64), (active.size, beams, 1))  # (B, K, length)
    totals = np.full((active.size, beams), NEVER)  # (B, K)
    totals[:, 0] = 0  # the beams are all the same yet: only one of them may count

    for length in range(len(limits.prompt), limits.longest):
        forbidden = bans(length)
        candidates = None if forbidden is None else _best_of_best(decoding, totals, forbidden, renormalize=renormalize)
        if candidates is None:  # a rule needs all scores, or there is too little to choose from
            copies = 1 if length > len(limits.prompt) else beams  # of the one row that the prompt gave
            log_probabilities = log_softmax(decoding.logits()).repeat(copies, axis=0)  # (B K, V)
            scores = apply_rules(rules, log_probabilities, sequences.reshape(-1, length))
            drawn = None if noise is None else noise(active, scores.size // active.size)  # (B, K V)
            candidates = _best_continuations(scores, totals, drawn)
        last = length + 1 == limits.longest
        ends = (candidates.tokens == special.eos) | last  # (B, 2K)
        ranks = scoring.scores(candidates.scores, length + 1)  # (B, 2K)
        _finish([finished[row] for row in active], sequences, candidates, ends[:, :beams], ranks)
        if last:
            break

        totals, origins, tokens = _running(candidates, ends, beams)  # (B, K) each
        sequences = np.take_along_axis(sequences, origins[:, :, None], 1)
        sequences = np.concatenate([sequences, tokens[:, :, None]], 2)  # (B, K, length + 1)
        hopes = scoring.hopes(totals[:, 0], length + 1)  # (B,)
        going = np.array([not finished[row].done(hope) for row, hope in zip(active, hopes, strict=True)])
        if not going.any():
            break
        if not going.all():
            active, sequences, totals = active[going], sequences[going], totals[going]
            origins, tokens = origins[going], tokens[going]
            decoding.keep(np.flatnonzero(going))
        # The first tokens all follow the one row of the prefix.
        decoding.branch(tokens, origins if length > len(limits.prompt) else np.zeros_like(origins))
    return [sentence.real() for sentence in finished]


def _best_of_best(
    decoding: Decoding[Tensor], totals: FloatArray, forbidden: Ids, *, renormalize: bool
) -> _Candidates | None:
    """The 2K best continuations of each sentence, out of the 2K best that the backend finds of each beam.

    Forbidden tokens have no probability at all if scores are to be normalised again, or else are passed over.
    None where that leaves fewer than 2K.
    """
    sentences, beams = totals.shape
    scores, tokens = decoding.best(2 * beams + (0 if renormalize else len(forbidden)), forbidden if renormalize else ())
    if not renormalize:
        scores = np.where(np.isin(tokens, forbidden), -np.inf, scores)
    each = scores.shape[-1]
    shape = (sentences, beams, each)
    copies = sentences * beams // len(scores)  # of the one row that the prompt gave
    scores = scores.repeat(copies, axis=0).reshape(shape) + totals[:, :, None]
    tokens = tokens.repeat(copies, axis=0).reshape(sentences, -1)
    scores = scores.reshape(sentences, -1)  # (B, K each)
    order = np.argsort(-scores, axis=-1, kind="stable")[:, : 2 * beams]
    best = np.take_along_axis(scores, order, 1)  # (B, 2K)
    if best.shape[1] < 2 * beams or not np.isfinite(best).all():
        return None
    return _Candidates(best, order // each, np.take_along_axis(tokens, order, 1))


def _best_continuations(log_probabilities: FloatArray, totals: FloatArray, noise: FloatArray | None) -> _Candidates:
    """Of the K V continuations of each sentence, the 2K best, from `(B K, V)` and the beams' own scores `(B, K)`.

    With `noise (B, K V)` they are the 2K that are best with it, ordered by their scores without it.
    """
    sentences, beams = totals.shape
    vocabulary = log_probabilities.shape[-1]
    scores = (log_probabilities.reshape(sentences, beams, vocabulary) + totals[:, :, None]).reshape(sentences, -1)
    count = min(2 * beams, beams * vocabulary)
    if noise is None:
        values, best = best_entries(scores, count)
    else:
        drawn = np.sort(best_entries(scores + noise, count)[1])
        values, order = best_entries(np.take_along_axis(scores, drawn, 1), count)
        best = np.take_along_axis(drawn, order, 1)
    return _Candidates(values, best // vocabulary, best % vocabulary)


def _finish(
    finished: Sequence[_Finished], sequences: IntArray, candidates: _Candidates, ends: BoolArray, scores: FloatArray
) -> None:
    """Hand each of the first K continuations that ends, `(B, K)`, to its sentence's hypotheses, with its score."""
    for place, rank in np.argwhere(ends):
        ids = sequences[place, candidates.beams[place, rank], 1:].tolist()
        finished[place].add([*ids, int(candidates.tokens[place, rank])], float(scores[place, rank]))


def _running(candidates: _Candidates, ends: BoolArray, beams: int) -> _Candidates:
    """The K best continuations that do not end, `(B, K)` each; where there are fewer, others with a hopeless score."""
    scores = candidates.scores + ends * NEVER
    order = np.argsort(-scores, axis=-1, kind="stable")[:, :beams]
    return _Candidates(
        np.take_along_axis(scores, order, 1),
        np.take_along_axis(candidates.beams, order, 1),
        np.take_along_axis(candidates.tokens, order, 1),
    )
