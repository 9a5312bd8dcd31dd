"""Tokens that are ranked where logits are: others than the best are found on rung 2, and in what is searched."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from runtime_support import GRAPH, TOKENS, VOCABULARY, Delegate, failed, judge

from runtime.backend import Array, FloatArray, IntArray
from runtime.bundle import Bundle
from runtime.errors import GraphError
from runtime.exam import Exam
from runtime.parity.search_graphs import _misranked, rank_case
from runtime.ranking import rank_tokens
from runtime.session import OrtBackend

Ranks = tuple[FloatArray, IntArray]


class Ranking(Delegate):
    """What was asked for by logits `(B, T, V)`, forbidden tokens and a count, found by `found`."""

    def rank(self, logits: Any, forbidden: Sequence[int], count: int) -> Ranks:
        return self.found(self.get(logits), forbidden, count)

    def found(self, logits: Array, forbidden: Sequence[int], count: int) -> Ranks:
        return rank_tokens(logits, forbidden, count)


class AllowsAll(Ranking):
    def found(self, logits: Array, _: Sequence[int], count: int) -> Ranks:
        return rank_tokens(logits, (), count)


class ForbidsWithoutNorming(Ranking):
    """The others get none of the probability of the forbidden ones."""

    def found(self, logits: Array, forbidden: Sequence[int], count: int) -> Ranks:
        scores, tokens = rank_tokens(logits, (), logits.shape[-1])
        places = np.argsort(np.isin(tokens, forbidden), -1, kind="stable")[..., :count]
        return np.take_along_axis(scores, places, -1), np.take_along_axis(tokens, places, -1)


class OfEqualsTheLast(Ranking):
    def found(self, logits: Array, forbidden: Sequence[int], count: int) -> Ranks:
        mirrored = [logits.shape[-1] - 1 - token for token in forbidden]
        scores, tokens = rank_tokens(logits[..., ::-1], mirrored, count)
        return scores, logits.shape[-1] - 1 - tokens


class WorstFirst(Ranking):
    def found(self, logits: Array, forbidden: Sequence[int], count: int) -> Ranks:
        scores, tokens = super().found(logits, forbidden, count)
        return scores[..., ::-1], tokens[..., ::-1]


class RawLogits(Ranking):
    def found(self, logits: Array, forbidden: Sequence[int], count: int) -> Ranks:
        tokens = super().found(logits, forbidden, count)[1]
        return np.take_along_axis(logits, tokens, -1), tokens


class LastPlaceAlone(Ranking):
    def found(self, logits: Array, forbidden: Sequence[int], count: int) -> Ranks:
        return super().found(logits[:, -1:], forbidden, count)


class NoSuchToken(Ranking):
    def found(self, logits: Array, forbidden: Sequence[int], count: int) -> Ranks:
        scores, tokens = super().found(logits, forbidden, count)
        return scores, tokens + 1


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (AllowsAll, "without 18 that are forbidden, some are tokens that were forbidden"),
        (ForbidsWithoutNorming, "without 18 that are forbidden, a log-probability is"),
        (OfEqualsTheLast, "of the best 1, some are not the best"),
        (WorstFirst, "of the best 8, some are not in order: the best first, of equals the lower id"),
        (RawLogits, "of the best 1, a log-probability is"),
        (LastPlaceAlone, "log_probabilities are (3, 1, 1) and tokens (3, 1, 1), expected (3, 4, 1)"),
        (NoSuchToken, "of the best 45, some are tokens that the vocabulary does not have"),
    ],
)
def test_other_tokens_than_the_best_fail_on_the_graph_rung(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, fault: type[Delegate], problem: str
) -> None:
    report = judge(tiny_bundle, exam, fault(tiny_backend))
    assert failed(report)[0] == GRAPH
    (case,) = [case for case in report.rungs[GRAPH].cases if not case.passed]
    assert case.label == "rank"
    assert report.rungs[GRAPH].problems == case.problems
    assert all(found.startswith("rank: ") for found in case.problems)
    assert any(problem in found for found in case.problems), case.problems


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 2, 7, 20_000])
def test_numpy_ranks_vocabularies_of_any_size(tiny_backend: OrtBackend, vocabulary: int) -> None:
    assert rank_case(vocabulary, Ranking(tiny_backend)).passed
    assert not rank_case(vocabulary, AllowsAll(tiny_backend)).passed
    assert not rank_case(vocabulary, RawLogits(tiny_backend)).passed


def test_a_runtime_that_cannot_rank_fails_on_the_graph_rung_with_its_reason(tiny_backend: OrtBackend) -> None:
    class Fault(Delegate):
        def rank(self, *_: Any) -> Ranks:
            raise GraphError("gave up in rank")

    assert rank_case(VOCABULARY, Fault(tiny_backend)).problems == ["gave up in rank"]


def test_the_sum_over_a_wide_vocabulary_may_be_rounded_as_a_runtime_does_it() -> None:
    """ONNX Runtime was off by 4.5e-6 on a sound model of 32,000 tokens, more than one rounding of the result."""
    logits = np.random.default_rng(0).normal(0, 3, (1, 1, 32_000)).astype(np.float32)
    scores, best = rank_tokens(logits, (), 1)
    assert list(_misranked(logits, (), 1, scores + np.float32(5e-6), best)) == []
    (problem,) = _misranked(logits, (), 1, scores + np.float32(1e-3), best)
    assert "a log-probability is 0.001" in problem
    narrow = logits[..., :40]
    scores, best = rank_tokens(narrow, (), 1)
    assert list(_misranked(narrow, (), 1, scores + np.float32(5e-6), best)) != []


@pytest.mark.parametrize("fault", [RawLogits, OfEqualsTheLast])
def test_only_what_changes_a_score_or_a_word_fails_in_the_search(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, fault: type[Delegate]
) -> None:
    """Real logits are hardly ever equal: that the first of equals is taken is for rung 2 to see."""
    assert (TOKENS in failed(judge(tiny_bundle, exam, fault(tiny_backend)))) == (fault is RawLogits)
