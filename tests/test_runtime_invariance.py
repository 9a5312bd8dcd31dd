"""Rung 5: company changes nothing. Each fault is right for a sentence alone and wrong in one kind of company."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from runtime_support import DEPLOYMENT, GRAPH, INVARIANCE, ROLLOUT, TINY, Delegate, failed, judge

from runtime.backend import Array, Cache, IntArray
from runtime.bundle import Bundle
from runtime.contract import graph_specs
from runtime.errors import GraphError
from runtime.exam import Exam
from runtime.generation import GenerationConfig, Hypothesis
from runtime.parity import sit
from runtime.parity.candidate import Candidate
from runtime.parity.invariance import COMPANIES, PADDED_ROW, SENTENCES, companies, invariance_labels, invariance_rung
from runtime.parity.report import RungResult
from runtime.session import OrtBackend
from runtime.tokenizer import open_tokenizer

TOLERANCE = 5e-5
SEARCHES = ("1 beam", "4 beams")


def candidate(backend: Any, kind: type[Candidate] = Candidate) -> Candidate:
    return kind(backend, Bundle(TINY).passport, open_tokenizer(TINY), "as tested")


def wrong(rung: RungResult) -> dict[str, list[str]]:
    """What is wrong with each comparison."""
    assert rung.passed == all(case.passed for case in rung.cases)
    return {case.label: case.problems for case in rung.cases if not case.passed}


class Company(Delegate):
    """Changes the memory `(B, S, E)` of some rows."""

    def touched(self, lengths: Array) -> Array:
        """Which rows of a batch of sentences of `lengths` are changed."""
        raise NotImplementedError

    def encode(self, input_ids: Any, attention_mask: Any) -> Any:
        rows = self.touched(self.get(attention_mask).sum(1))

        def change(memory: Array) -> Array:
            memory[rows] = self.damage(memory[rows])
            return memory

        return self.changed(super().encode(input_ids, attention_mask), change)

    def damage(self, memory: Array) -> Array:
        damaged: Array = memory * np.float32(1.5)
        return damaged


# The ways in which sentences come together


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_every_sentence_is_in_every_company(count: int) -> None:
    ways = companies(count)
    assert tuple(ways) == COMPANIES
    for batches in ways.values():
        assert {row for batch in batches for row in batch} == set(range(count))
    padded, permuted, threes, twice = ways.values()
    assert padded == [list(range(count))]
    assert sorted(permuted[0]) == padded[0]
    assert count < 3 or permuted != padded
    assert max(len(batch) for batch in threes) <= 3
    assert sorted(twice[0]) == sorted([*range(count), *range(count)])


def test_a_good_runtime_is_compared_in_all_of_them(tiny_backend: OrtBackend, exam: Exam) -> None:
    rung, moved = invariance_rung(exam.tokens, candidate(tiny_backend), TOLERANCE)
    assert rung.passed
    labels = [f"{what} {company}" for what in ("logits", *SEARCHES) for company in COMPANIES]
    assert sorted(case.label for case in rung.cases) == sorted([*labels, PADDED_ROW])
    assert sorted(invariance_labels(exam.tokens)) == sorted([*labels, PADDED_ROW])
    assert 0 < moved < 2 * TOLERANCE


def test_the_longest_and_the_shortest_sentence_are_among_those_that_are_compared(
    tiny_backend: OrtBackend, exam: Exam
) -> None:
    asked: set[tuple[int, ...]] = set()

    class Observed(Candidate):
        def search(self, sources: Sequence[Sequence[int]], config: GenerationConfig) -> list[Hypothesis]:
            asked.update(map(tuple, sources))
            return super().search(sources, config)

    invariance_rung(exam.tokens, candidate(tiny_backend, Observed), TOLERANCE)
    lengths = {len(source) for source in asked}
    known = [len(case.source_ids) for case in exam.tokens]
    assert len(asked) == SENTENCES
    assert {min(known), max(known)} <= lengths


def test_nothing_compared_is_a_failure(tiny_backend: OrtBackend) -> None:
    rung, moved = invariance_rung([], candidate(tiny_backend), TOLERANCE)
    assert rung.problems == ["nothing was compared"]
    assert invariance_labels([]) == []
    assert math.isnan(moved)


# Faults


class ReadsItsNeighbours(Delegate):
    """One number of the whole batch reaches every row."""

    def encode(self, input_ids: Any, attention_mask: Any) -> Any:
        memory = super().encode(input_ids, attention_mask)
        return self.changed(memory, lambda array: array + np.float32(1e-3) * array.max())


def test_outputs_that_depend_on_the_neighbours_fail(tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam) -> None:
    rung, moved = invariance_rung(exam.tokens, candidate(ReadsItsNeighbours(tiny_backend)), TOLERANCE)
    assert {"logits padded in one batch", "logits permuted", "logits in batches of 3"} <= set(wrong(rung))
    assert moved > 2 * TOLERANCE
    assert f"logits permuted: a logit moves by {moved:.3g}, allowed is 0.0001" in rung.problems
    report = judge(tiny_bundle, exam, ReadsItsNeighbours(tiny_backend))
    assert INVARIANCE in failed(report)
    assert report.invariance == moved


class NoNumbersWithoutTokens(Company):
    """A softmax over nothing."""

    def touched(self, lengths: Array) -> Array:
        return np.equal(lengths, 0)

    def damage(self, memory: Array) -> Array:
        return memory * np.float32(math.nan)


def test_a_fully_padded_row_that_gives_nan_fails_there_alone(tiny_backend: OrtBackend, exam: Exam) -> None:
    rung, moved = invariance_rung(exam.tokens, candidate(NoNumbersWithoutTokens(tiny_backend)), TOLERANCE)
    assert wrong(rung) == {PADDED_ROW: ["a fully padded row gives numbers that are none"]}
    assert moved < 2 * TOLERANCE


class PaddingReachesOver(Company):
    """Beside a row of nothing but padding, all rows are others."""

    def touched(self, lengths: Array) -> Array:
        return np.full(len(lengths), 0 in lengths)


def test_a_fully_padded_row_that_changes_its_neighbour_fails_there_alone(tiny_backend: OrtBackend, exam: Exam) -> None:
    rung, moved = invariance_rung(exam.tokens, candidate(PaddingReachesOver(tiny_backend)), TOLERANCE)
    assert list(wrong(rung)) == [PADDED_ROW]
    assert wrong(rung)[PADDED_ROW] == [f"{PADDED_ROW}: a logit moves by {moved:.3g}, allowed is 0.0001"]


class TakesRowsForSorted(Company):
    """Right as long as sentences come from the shortest to the longest."""

    def touched(self, lengths: Array) -> Array:
        real = lengths[lengths > 0]
        return np.full(len(lengths), (np.diff(real) < 0).any())


class WrongInBatchesOfThree(Company):
    def touched(self, lengths: Array) -> Array:
        return np.full(len(lengths), len(lengths) in (2, 3) and 0 not in lengths)


class WrongInLargeBatches(Company):
    def touched(self, lengths: Array) -> Array:
        return np.greater_equal(np.arange(len(lengths)), SENTENCES)


class WrongWherePadded(Company):
    """Right in rows that fill the batch."""

    def touched(self, lengths: Array) -> Array:
        touched: Array = (lengths > 0) & (lengths < lengths.max())
        return touched


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (TakesRowsForSorted, ["permuted", "twice in one batch"]),
        (WrongInBatchesOfThree, ["in batches of 3"]),
        (WrongInLargeBatches, ["twice in one batch"]),
        (WrongWherePadded, list(COMPANIES)),
    ],
)
def test_each_company_finds_what_is_wrong_in_it(
    tiny_backend: OrtBackend, exam: Exam, fault: Callable[[OrtBackend], Delegate], expected: list[str]
) -> None:
    rung, _ = invariance_rung(exam.tokens, candidate(fault(tiny_backend)), TOLERANCE)
    labels = list(wrong(rung))
    assert [label for label in labels if label.startswith("logits")] == [f"logits {company}" for company in expected]
    assert all(any(label.endswith(company) for company in expected) for label in labels)
    assert any(label.startswith(SEARCHES) for label in labels)


class LeavesWrongRows(Delegate):
    """When sentences are finished, the cache of others stays; alone there is none to confuse them with."""

    def select(self, cache: Cache[Any], rows: IntArray) -> Cache[Any]:
        return super().select(cache, np.roll(np.arange(cache[0].encoder_key.shape()[0]), 1)[rows])


def test_what_only_a_search_shows_fails_in_the_words(tiny_backend: OrtBackend, exam: Exam) -> None:
    rung, _ = invariance_rung(exam.tokens, candidate(LeavesWrongRows(tiny_backend)), TOLERANCE)
    labels = list(wrong(rung))
    assert labels
    assert not [label for label in labels if label.startswith("logits")]
    assert re.match(r"padded in one batch, 1 beam: '.*' has other ids than alone from token \d+ on", rung.problems[0])


class MixesSentences(Delegate):
    """Beams of several sentences go on with the cache of another sentence; their words stay, their scores do not."""

    def branch(self, ids: Any, mask: Any, seen: Any, cache: Cache[Any]) -> tuple[Any, Cache[Any]]:
        mixed = self.changed_caches(cache, ("decoder_key", "decoder_value"), lambda array: array[::-1])
        return super().branch(ids, mask, seen, mixed)


def test_a_score_that_company_changes_fails_though_the_words_stay(tiny_backend: OrtBackend, exam: Exam) -> None:
    rung, _ = invariance_rung(exam.tokens, candidate(MixesSentences(tiny_backend)), TOLERANCE)
    assert set(wrong(rung)) <= {f"4 beams {company}" for company in COMPANIES}
    assert any("has the same ids as alone, but a score that is" in problem for problem in rung.problems)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_logit_that_is_no_number_fails_and_is_what_is_reported(
    tiny_backend: OrtBackend, exam: Exam, number: float
) -> None:
    class Fault(Company):
        def touched(self, lengths: Array) -> Array:
            return np.full(len(lengths), len(lengths) == 2 * SENTENCES)

        def damage(self, memory: Array) -> Array:
            return np.full_like(memory, number)

    with np.errstate(invalid="ignore"):  # numpy warns of infinity less infinity
        rung, moved = invariance_rung(exam.tokens, candidate(Fault(tiny_backend)), TOLERANCE)
    assert math.isnan(moved)
    assert "logits twice in one batch" in wrong(rung)
    assert "logits permuted" not in wrong(rung)


def test_a_runtime_that_gives_up_in_company_fails_with_its_reason(tiny_backend: OrtBackend, exam: Exam) -> None:
    class Fault(Delegate):
        def encode(self, input_ids: Any, attention_mask: Any) -> Any:
            if input_ids.shape()[0] > 1:
                raise GraphError("gave up in encode: out of memory")
            return super().encode(input_ids, attention_mask)

    rung, moved = invariance_rung(exam.tokens, candidate(Fault(tiny_backend)), TOLERANCE)
    assert rung.problems == ["gave up in encode: out of memory"]
    assert not any(case.passed for case in rung.cases)
    assert math.isnan(moved)


# What may differ


class Talker(Candidate):
    """Alone it says one thing, in company another, with a score that is `APART` away."""

    def search(self, sources: Sequence[Sequence[int]], config: GenerationConfig) -> list[Hypothesis]:
        found = super().search(sources, config)
        if len(sources) == 1:
            return found
        return [best._replace(ids=[best.ids[0], *SAID], score=best.score + APART) for best in found]


SAID: list[int] = [3]
APART = 0.0


@pytest.mark.parametrize(("apart", "passed"), [(0.0, True), (9e-5, True), (1.2e-4, False), (math.nan, False)])
def test_other_ids_between_which_rounding_decides_are_no_fault(
    tiny_backend: OrtBackend, exam: Exam, monkeypatch: pytest.MonkeyPatch, apart: float, *, passed: bool
) -> None:
    monkeypatch.setattr("test_runtime_invariance.APART", apart)
    rung, _ = invariance_rung(exam.tokens, candidate(tiny_backend, Talker), TOLERANCE)
    assert rung.passed is passed
    sentence = r"permuted, 1 beam: '.*' has other ids than alone from token 1 on, and a score that is .* apart"
    assert bool([problem for problem in rung.problems if re.match(sentence, problem)]) is not passed


class Slow(Company):
    """Moves logits a little in company."""

    def touched(self, lengths: Array) -> Array:
        return np.full(len(lengths), len(lengths) > 1)

    def damage(self, memory: Array) -> Array:
        damaged: Array = memory * np.float32(1 + 1e-4)
        return damaged


def test_a_lower_precision_may_move_its_logits_by_the_limit_and_no_more(tiny_backend: OrtBackend, exam: Exam) -> None:
    found, moved = invariance_rung(exam.tokens, candidate(Slow(tiny_backend)), TOLERANCE)
    assert not found.passed
    assert 2 * TOLERANCE < moved < 0.1
    for limit, passed in ((1.01 * moved, True), (0.99 * moved, False)):
        rung, _ = invariance_rung(exam.tokens, candidate(Slow(tiny_backend)), TOLERANCE, limit)
        assert rung.passed is passed


def test_the_ladder_takes_the_limit_of_the_precision(tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam) -> None:
    specs = graph_specs(tiny_bundle.passport.dims)
    passport = msgspec.structs.replace(tiny_bundle.passport, precision="int8")
    lower = Candidate(Slow(tiny_backend), passport, open_tokenizer(TINY), "as tested")
    report = sit(exam, lower, specs, specs)
    assert failed(report) == []
    assert failed(sit(exam, lower, specs, specs, {"invariance": report.invariance / 2})) == [INVARIANCE, DEPLOYMENT]
    assert failed(judge(tiny_bundle, exam, Slow(tiny_backend))) == [GRAPH, ROLLOUT, INVARIANCE, DEPLOYMENT]
