"""What a search has besides the verbs: wrong branches, ranks and rows are found on rung 2, and in what is searched."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from runtime_support import DEPLOYMENT, GRAPH, INVARIANCE, ROLLOUT, TOKENS, VOCABULARY, Delegate, failed, judge

from runtime.backend import Array, Cache, FloatArray, IntArray, LayerCache
from runtime.bundle import Bundle
from runtime.contract import graph_specs
from runtime.errors import GraphError
from runtime.exam import Exam, GraphCase
from runtime.parity import sit
from runtime.parity.candidate import Candidate
from runtime.parity.search_graphs import _misranked, ancestries, branch_case, rank_case, select_case
from runtime.ranking import rank_tokens
from runtime.session import OrtBackend
from runtime.tokenizer import open_tokenizer
from runtime.verbs import call


class Branches(Delegate):
    """What the hypotheses have seen `(B, T, P)` goes through `told`."""

    def told(self, seen: Array) -> Array:
        return seen

    def branch(
        self, input_ids: Any, encoder_attention_mask: Any, seen: Any, cache: Cache[Any]
    ) -> tuple[Any, Cache[Any]]:
        return super().branch(input_ids, encoder_attention_mask, self.changed(seen, self.told), cache)


class SeenOfAnotherBeam(Branches):
    """Beams go on with the past of another beam."""

    def told(self, seen: Array) -> Array:
        return seen[:, ::-1]


class SeesEverything(Branches):
    def told(self, seen: Array) -> Array:
        return np.ones_like(seen)


class ForgetsItsParent(Branches):
    """The latest ancestor is lost."""

    def told(self, seen: Array) -> Array:
        latest = seen.shape[2] - 1 - seen[:, :, ::-1].argmax(2)
        np.put_along_axis(seen, latest[:, :, None], 0, 2)
        return seen


class SourceOfAnotherSentence(Delegate):
    def branch(self, ids: Any, mask: Any, seen: Any, cache: Cache[Any]) -> tuple[Any, Cache[Any]]:
        sides = ("encoder_key", "encoder_value")
        logits, grown = super().branch(ids, mask, seen, self.changed_caches(cache, sides, lambda array: array[::-1]))
        return logits, tuple(
            new._replace(encoder_key=old.encoder_key, encoder_value=old.encoder_value)
            for new, old in zip(grown, cache, strict=True)
        )


class SwappedWhenGrown(Delegate):
    def branch(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().branch(*inputs)
        return logits, tuple(LayerCache(layer[1], layer[0], *layer[2:]) for layer in cache)


class LostToken(Delegate):
    """The cache does not keep the last hypothesis's token."""

    def branch(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().branch(*inputs)
        return logits, self.changed_caches(cache, ("decoder_key",), lambda array: array[:, :, :-1])


class NoNumber(Delegate):
    def branch(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().branch(*inputs)

        def spoilt(array: Array) -> Array:
            array[-1, -1, 7] = np.nan
            return array

        return self.changed(logits, spoilt), cache


BRANCHES = [
    SeenOfAnotherBeam,
    SeesEverything,
    ForgetsItsParent,
    SourceOfAnotherSentence,
    SwappedWhenGrown,
    LostToken,
    NoNumber,
]


@pytest.mark.parametrize("fault", BRANCHES)
def test_a_branch_that_is_not_a_step_on_what_it_has_seen_fails_on_the_graph_rung(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, fault: type[Delegate]
) -> None:
    report = judge(tiny_bundle, exam, fault(tiny_backend))
    assert failed(report)[0] == GRAPH
    assert ROLLOUT not in failed(report)
    assert all(case.label.startswith("branch ") for case in report.rungs[GRAPH].cases if not case.passed)
    assert all(problem.startswith("branch: ") for problem in report.rungs[GRAPH].problems)
    assert "from what steps give, earned is" in report.rungs[GRAPH].problems[0]


@pytest.mark.parametrize("fault", [SwappedWhenGrown, LostToken, NoNumber])
def test_no_precision_excuses_a_branch_that_gives_no_number_or_another_cache(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, fault: type[Delegate]
) -> None:
    specs = graph_specs(tiny_bundle.passport.dims)
    passport = msgspec.structs.replace(tiny_bundle.passport, precision="int8")
    lower = Candidate(fault(tiny_backend), passport, open_tokenizer(tiny_bundle.folder), "as tested")
    assert failed(sit(exam, lower, specs, specs))[0] == GRAPH


class CoarseBranches(Delegate):
    def branch(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().branch(*inputs)
        return self.changed(logits, lambda array: array + np.float32(self.by)), cache

    by = 0.02


def test_a_lower_precision_is_judged_by_how_far_its_branches_are_from_its_steps(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = graph_specs(tiny_bundle.passport.dims)
    passport = msgspec.structs.replace(tiny_bundle.passport, precision="int8")
    lower = Candidate(CoarseBranches(tiny_backend), passport, open_tokenizer(tiny_bundle.folder), "as tested")
    found = []
    for by in (0.0, 0.02, 10.0):
        monkeypatch.setattr(CoarseBranches, "by", by)
        report = sit(exam, lower, specs, specs)
        (distance,) = [figure for figure in report.figures if figure.name == "distance"]
        found.append((distance.passed, GRAPH in failed(report)))
        assert (distance.value > 1e-4) == (by > 0)
    assert found == [(True, False), (True, False), (False, False)]
    assert GRAPH in failed(judge(tiny_bundle, exam, CoarseBranches(tiny_backend)))


def step_case(exam: Exam, batch: int) -> GraphCase:
    return next(case for case in exam.graphs if case.verb == "step" and len(case.inputs["input_ids"]) == batch)


def test_branches_are_asked_over_more_than_they_may_see_and_never_beyond_the_last_position(
    tiny_backend: OrtBackend, exam: Exam
) -> None:
    for case in (case for case in exam.graphs if case.verb == "step"):
        past = case.inputs["past_key_values.0.decoder.key"].shape[2]
        asked = branch_case(case, VOCABULARY, tiny_backend)
        ids, seen = asked.inputs["input_ids"], asked.inputs["seen"]
        assert seen.shape == (*ids.shape, 2 * past)
        assert [row.nonzero()[0].tolist() for row in seen[0]] == [places.tolist() for places in ancestries(past)]
        assert (seen.sum(2) >= 1).all()
        assert seen.sum(2).max() == past
        assert all(len(set(row.tolist())) == len(row) for row in ids)
        assert ((ids >= 0) & (ids < VOCABULARY)).all()


def test_a_step_that_fails_on_what_a_branch_has_seen_is_named(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    """The exam asks for no step after nine tokens."""

    class Fault(Delegate):
        def step(self, ids: Any, mask: Any, cache: Cache[Any]) -> tuple[Any, Cache[Any]]:
            if self.get(cache[0].decoder_key).shape[2] == 9:
                raise GraphError("gave up in step: nine")
            return super().step(ids, mask, cache)

    report = judge(tiny_bundle, exam, Fault(tiny_backend))
    assert failed(report)[0] == GRAPH
    assert report.rungs[GRAPH].problems[0] == "gave up in step: nine"


@pytest.mark.parametrize("change", [lambda array: array[:, :, :0], lambda array: np.concatenate([array, array], 2)])
def test_steps_of_another_length_answer_nothing(
    tiny_backend: OrtBackend, exam: Exam, change: Callable[[Array], Array]
) -> None:
    class Fault(Delegate):
        def step(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
            logits, cache = super().step(*inputs)
            return logits, self.changed_caches(cache, ("decoder_value",), change)

    with pytest.raises(GraphError, match=r"^step: present\.0\.decoder\.value after \d tokens is of shape \("):
        branch_case(step_case(exam, 3), VOCABULARY, Fault(tiny_backend))


# Ranks


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


# Rows


class OneBeamOnly(Delegate):
    def select(self, cache: Cache[Any], rows: IntArray) -> Cache[Any]:
        return self.changed_caches(super().select(cache, rows), ("encoder_key", "encoder_value"), np.zeros_like)


class FirstRowsOnly(Delegate):
    """Keeps the first rows, whichever were asked for."""

    def select(self, cache: Cache[Any], rows: IntArray) -> Cache[Any]:
        return super().select(cache, np.arange(len(rows)) % self.get(cache[0].encoder_key).shape[0])


class SwappedWhenMoved(Delegate):
    def select(self, cache: Cache[Any], rows: IntArray) -> Cache[Any]:
        return tuple(LayerCache(layer[1], layer[0], *layer[2:]) for layer in super().select(cache, rows))


MOVES = [OneBeamOnly, FirstRowsOnly, SwappedWhenMoved]


@pytest.mark.parametrize("fault", MOVES)
def test_rows_that_were_not_asked_for_fail_on_the_graph_rung(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, fault: type[Delegate]
) -> None:
    report = judge(tiny_bundle, exam, fault(tiny_backend))
    assert failed(report)[0] == GRAPH
    (case,) = [case for case in report.rungs[GRAPH].cases if not case.passed]
    assert case.label == "select B=5"
    assert report.rungs[GRAPH].problems == case.problems
    assert all(problem.startswith("select: ") and "layer 0 has other rows than" in problem for problem in case.problems)


def test_each_cache_that_has_wrong_rows_is_named(tiny_backend: OrtBackend, exam: Exam) -> None:
    case = step_case(exam, 3)
    assert select_case(case, tiny_backend).passed
    result = select_case(case, OneBeamOnly(tiny_backend))
    assert result.problems == [
        f"select: encoder_{kind} of layer 0 has other rows than [2, 1, 0, 0, 2]" for kind in ("key", "value")
    ]
    assert result.compared == 2


# In the search


@pytest.mark.parametrize(
    ("fault", "rung"),
    [
        (SeenOfAnotherBeam, TOKENS),
        (SeesEverything, TOKENS),
        (ForgetsItsParent, TOKENS),
        (SwappedWhenGrown, TOKENS),
        (RawLogits, TOKENS),
        (SourceOfAnotherSentence, INVARIANCE),
        (OneBeamOnly, INVARIANCE),
        (SwappedWhenMoved, INVARIANCE),
        (FirstRowsOnly, INVARIANCE),
    ],
)
def test_what_a_search_has_besides_the_verbs_fails_in_the_words_too(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, fault: type[Delegate], rung: int
) -> None:
    """On the rung of tokens, where one sentence shows it, and else where several do."""
    assert rung in failed(judge(tiny_bundle, exam, fault(tiny_backend)))


def test_a_runtime_that_cannot_branch_fails_on_the_graph_rung_and_in_the_search(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    class Fault(Delegate):
        def branch(self, *_: Any) -> tuple[Any, Cache[Any]]:
            raise GraphError("gave up in branch")

    report = judge(tiny_bundle, exam, Fault(tiny_backend))
    assert failed(report) == [GRAPH, TOKENS, INVARIANCE, DEPLOYMENT]
    assert all("gave up in branch" in problem for problem in report.rungs[GRAPH].problems)
    assert report.differences
    assert all(difference.found == [] and not difference.tie for difference in report.differences)


def test_a_branch_by_name_speaks_the_contract(tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam) -> None:
    asked = branch_case(step_case(exam, 3), VOCABULARY, tiny_backend)
    spec = graph_specs(tiny_bundle.passport.dims)["branch"]
    assert set(asked.inputs) == {tensor.name for tensor in spec.inputs}
    assert list(call(tiny_backend, "branch", asked.inputs)) == [tensor.name for tensor in spec.outputs]


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
