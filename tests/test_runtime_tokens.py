"""Rung 4: the same ids, texts and scores; what differs is a tie or a real difference, and says why."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from runtime_support import DEPLOYMENT, GRAPH, ROLLOUT, TINY, TOKENS, Delegate, failed, judge

from runtime.backend import Array, Cache
from runtime.bundle import Bundle
from runtime.errors import GraphError
from runtime.exam import Exam, TokenCase
from runtime.generation import GenerationConfig, Hypothesis
from runtime.parity.candidate import Candidate
from runtime.parity.tokens import SHOWN, first_difference, token_rung
from runtime.session import OrtBackend
from runtime.tokenizer import open_tokenizer

PLACE = 2
"""Where the answers are changed."""


def with_other_ids(
    exam: Exam, beams: int, margin: float, score: Callable[[float], float], others: Sequence[float] = ()
) -> Exam:
    """`exam` with another third token in the first answer of a search with `beams`, preferred by `margin`.

    `others` are the leads over tokens that nobody chose, which come before the one that the runtime chooses.
    """
    tokens = list(exam.tokens)
    index = next(index for index, case in enumerate(tokens) if case.config.num_beams == beams)
    case = tokens[index]
    ids = [*case.ids[:PLACE], (case.ids[PLACE] + 1) % 40, *case.ids[PLACE + 1 :]]
    top_ids, top_log_probs = case.top_ids.copy(), case.top_log_probs.copy()
    first = [ids[PLACE], *range(41, 41 + len(others)), case.ids[PLACE]]
    top_ids[PLACE, : len(first)] = first
    top_log_probs[PLACE] = -0.25 - 20
    top_log_probs[PLACE, : len(first)] = -0.25 - np.array([0, *others, margin])
    tokens[index] = msgspec.structs.replace(
        case, ids=ids, top_ids=top_ids, top_log_probs=top_log_probs, score=score(case.score)
    )
    return msgspec.structs.replace(exam, tokens=tokens)


# Ids


@pytest.mark.parametrize("beams", [1, 4])
def test_other_ids_that_the_reference_clearly_refused_fail(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, beams: int
) -> None:
    report = judge(tiny_bundle, with_other_ids(exam, beams, 0.5, lambda score: score + 0.5), tiny_backend)
    assert failed(report) == [TOKENS, DEPLOYMENT]
    (difference,) = report.differences
    assert difference.position == PLACE
    assert not difference.tie
    assert difference.kind == "real difference"
    assert "token 2 differs, the reference preferred its own by 0.5" in report.rungs[TOKENS].problems[-1]
    assert [case.label for case in report.rungs[TOKENS].cases if not case.passed] == [difference.label]


@pytest.mark.parametrize("beams", [1, 4])
def test_other_ids_between_which_rounding_decides_are_a_tie(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, beams: int
) -> None:
    changed = with_other_ids(exam, beams, 1e-7, lambda score: score)
    report = judge(tiny_bundle, with_its_texts(changed, tiny_bundle), tiny_backend)
    assert failed(report) == []
    (difference,) = report.differences
    assert difference.tie
    logits = [result.error for result in report.tensors if result.tensor == "logits"]
    assert difference.error == 2 * max([*logits, *report.drift])
    assert difference.kind == "tie within error"
    assert "1 ties" in report.rungs[TOKENS].summary


def with_its_texts(exam: Exam, bundle: Bundle) -> Exam:
    """`exam` with the translations that its ids have."""
    tokenizer = open_tokenizer(bundle.folder)
    tokens = [msgspec.structs.replace(case, translation=tokenizer.decode(case.ids)) for case in exam.tokens]
    return msgspec.structs.replace(exam, tokens=tokens)


def test_a_tie_with_a_token_that_nobody_chose_excuses_nothing(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    changed = with_other_ids(exam, 1, 3.0, lambda score: score, others=[1e-8, 1e-8])
    (difference,) = judge(tiny_bundle, changed, tiny_backend).differences
    assert difference.margin == pytest.approx(3.0)
    assert not difference.tie


def test_a_token_that_the_reference_did_not_keep_was_refused_more_than_all_that_it_kept(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    changed = with_other_ids(exam, 1, 1e-8, lambda score: score)
    changed.tokens[0].top_ids[PLACE, 1] = 43
    (difference,) = judge(tiny_bundle, changed, tiny_backend).differences
    assert difference.margin == pytest.approx(20)
    assert not difference.tie


def test_a_margin_that_is_not_a_number_is_no_tie(tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam) -> None:
    changed = with_its_texts(with_other_ids(exam, 1, math.nan, lambda score: score), tiny_bundle)
    assert failed(judge(tiny_bundle, changed, tiny_backend)) == [TOKENS, DEPLOYMENT]


def test_a_fault_is_no_excuse_for_other_ids(tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam) -> None:
    """A runtime that is wrong by 3 does not make every difference of less than 6 a tie."""

    class Fault(Delegate):
        def step(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
            logits, cache = super().step(*inputs)

            def shift(array: Array) -> Array:
                array[:, :, 10] += 3
                return array

            return self.changed(logits, shift), cache

    changed = with_its_texts(with_other_ids(exam, 1, 2.5, lambda score: score), tiny_bundle)
    report = judge(tiny_bundle, changed, Fault(tiny_backend))
    assert failed(report) == [GRAPH, ROLLOUT, TOKENS, DEPLOYMENT]
    assert report.differences
    assert not any(difference.tie for difference in report.differences)


def test_an_output_that_stops_early_differs_where_it_stops(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    case = exam.tokens[0]
    longer = msgspec.structs.replace(
        case,
        ids=[*case.ids, 9],
        top_ids=np.concatenate([case.top_ids, case.top_ids[:1]]),
        top_log_probs=np.concatenate([case.top_log_probs, case.top_log_probs[:1]]),
    )
    report = judge(tiny_bundle, msgspec.structs.replace(exam, tokens=[longer]), tiny_backend)
    assert report.differences[0].position == len(case.ids)
    assert report.differences[0].reference_top
    assert failed(report) == [TOKENS, DEPLOYMENT]


def test_an_output_that_goes_on_too_long_differs_where_it_should_have_stopped(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    case = exam.tokens[0]
    shorter = msgspec.structs.replace(
        case, ids=case.ids[:4], top_ids=case.top_ids[:4], top_log_probs=case.top_log_probs[:4], score=-2.0
    )
    report = judge(tiny_bundle, msgspec.structs.replace(exam, tokens=[shorter]), tiny_backend)
    (difference,) = report.differences
    assert difference.position == 4
    assert difference.reference_top == []
    assert difference.margin == pytest.approx(2, abs=0.01)
    assert failed(report) == [TOKENS, DEPLOYMENT]


@pytest.mark.parametrize(
    ("ours", "theirs", "place"),
    [([1, 2, 3], [1, 2, 4], 2), ([1], [1, 2], 1), ([1, 2], [1], 1), ([], [1], 0), ([0], [], 0)],
)
def test_the_first_difference_may_be_the_end_of_the_shorter_one(ours: list[int], theirs: list[int], place: int) -> None:
    assert first_difference(ours, theirs) == place


# What a difference shows


def test_a_difference_shows_the_sentence_both_texts_and_both_top_fives(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    changed = with_its_texts(with_other_ids(exam, 1, 0.5, lambda score: score), tiny_bundle)
    (difference,) = judge(tiny_bundle, changed, tiny_backend).differences
    case, changed_case = exam.tokens[0], changed.tokens[0]
    tokenizer = open_tokenizer(tiny_bundle.folder)
    assert difference.text == case.text == "l q j l c h t m"
    assert (difference.found, difference.expected) == (case.ids, changed_case.ids)
    assert difference.found_text == "m t h c l j q l"
    assert difference.expected_text == changed_case.translation == tokenizer.decode(changed_case.ids)
    assert difference.margin == pytest.approx(0.5)
    assert len(difference.reference_top) == len(difference.runtime_top) == SHOWN == 5
    own, other = (tokenizer.piece(ids[PLACE]) for ids in (changed_case.ids, case.ids))
    assert difference.reference_top[:2] == [(own, -0.25), (other, -0.75)]
    assert difference.runtime_top[0][0] == other
    assert difference.runtime_top == sorted(difference.runtime_top, key=lambda entry: -entry[1])


def test_the_runtime_s_top_five_are_its_own_after_the_same_tokens(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    """Where the runtime is as good as the reference, both see the same."""
    changed = with_other_ids(exam, 1, 0.5, lambda score: score)
    (difference,) = judge(tiny_bundle, changed, tiny_backend).differences
    case, tokenizer = exam.tokens[0], open_tokenizer(tiny_bundle.folder)
    expected = [tokenizer.piece(int(index)) for index in case.top_ids[PLACE, :SHOWN]]
    assert [piece for piece, _ in difference.runtime_top] == expected
    np.testing.assert_allclose(
        [log_prob for _, log_prob in difference.runtime_top], case.top_log_probs[PLACE, :SHOWN], atol=1e-4
    )


# Scores


def test_the_same_ids_with_another_score_fail(tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam) -> None:
    tokens = [msgspec.structs.replace(case, score=case.score - 0.001) for case in exam.tokens]
    report = judge(tiny_bundle, msgspec.structs.replace(exam, tokens=tokens), tiny_backend)
    assert failed(report) == [TOKENS, DEPLOYMENT]
    assert report.differences == []
    assert "the score is -0.00" in report.rungs[TOKENS].problems[0]


class Oracle(Candidate):
    """Answers what `answers` holds, by label and number of beams."""

    def search(self, sources: Sequence[Sequence[int]], config: GenerationConfig) -> list[Hypothesis]:
        (source,) = sources
        return [ANSWERS[tuple(source), config.num_beams]]


ANSWERS: dict[tuple[tuple[int, ...], int], Hypothesis] = {}


def answering(
    bundle: Bundle, backend: Any, cases: Sequence[TokenCase], precision: str, change: Callable[[Hypothesis], Hypothesis]
) -> Candidate:
    """Gives the reference's answers after `change`."""
    ANSWERS.clear()
    for case in cases:
        ANSWERS[tuple(case.source_ids), case.config.num_beams] = change(Hypothesis(case.ids, case.score))
    passport = msgspec.structs.replace(bundle.passport, precision=precision)
    return Oracle(backend, passport, open_tokenizer(bundle.folder), "as tested")


@pytest.mark.parametrize("ids", ["the same ids", "other ids"])
@pytest.mark.parametrize("number", [math.nan, -math.inf])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_no_precision_excuses_a_score_that_is_no_number(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, *, precision: str, number: float, ids: str
) -> None:
    cases = exam.tokens[:4]

    def change(found: Hypothesis) -> Hypothesis:
        return Hypothesis(found.ids if ids == "the same ids" else [9, 3], number)

    candidate = answering(tiny_bundle, tiny_backend, cases, precision, change)
    rung, _ = token_rung(cases, candidate, 1e-5, 1e-4, [])
    assert [case.passed for case in rung.cases] == [False] * 4
    assert f"{cases[0].label}: the score is {number}" in rung.problems


def test_a_lower_precision_may_find_other_ids_and_says_which(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    cases = exam.tokens[:4]
    for precision, passed in (("int8", True), ("fp32", False)):
        candidate = answering(tiny_bundle, tiny_backend, cases, precision, lambda _: Hypothesis([9, 3], -1.0))
        rung, differences = token_rung(cases, candidate, 1e-5, 1e-4, [])
        assert rung.passed is passed
        assert [difference.found for difference in differences] == [[9, 3]] * 4
        assert rung.summary == "0 of 4 outputs equal, 0 ties"


# A runtime that gives up


class GivesUpWithBeams(Delegate):
    """Has no room for what beams remember after two tokens."""

    def branch(self, ids: Any, mask: Any, seen: Any, cache: Cache[Any]) -> tuple[Any, Cache[Any]]:
        if self.get(seen).shape[2] > 8:
            raise GraphError("gave up in branch: out of memory")
        return super().branch(ids, mask, seen, cache)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_search_that_gives_up_fails_with_its_reason_whatever_the_precision(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, precision: str
) -> None:
    passport = msgspec.structs.replace(tiny_bundle.passport, precision=precision)
    candidate = Candidate(GivesUpWithBeams(tiny_backend), passport, open_tokenizer(TINY), "as tested")
    rung, differences = token_rung(exam.tokens, candidate, 1e-5, 1e-4, [])
    labels = [case.label for case in rung.cases if not case.passed]
    assert labels == [case.label for case in exam.tokens if case.config.num_beams == 4]
    assert f"{labels[0]}: gave up in branch: out of memory" in rung.problems
    assert all(difference.found == [] and not difference.tie for difference in differences)
    assert all(difference.found_text == "" and difference.runtime_top for difference in differences)


def test_a_search_that_gives_up_where_the_reference_hesitated_is_no_tie(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    class GivesUp(Delegate):
        def encode(self, *_: Any) -> Any:
            raise GraphError("gave up in encode: Reshape")

    case = exam.tokens[0]
    hesitant = msgspec.structs.replace(case, top_log_probs=np.full_like(case.top_log_probs, -3))
    candidate = Candidate(GivesUp(tiny_backend), tiny_bundle.passport, open_tokenizer(TINY), "as tested")
    rung, differences = token_rung([hesitant], candidate, 1e-5, 1e-4, [])
    assert not rung.passed
    assert rung.problems[0] == f"{case.label}: gave up in encode: Reshape"
    assert differences[0].runtime_top == []


# The tokenizer


def test_a_bundle_with_another_tokenizer_than_the_exam_s_fails(
    tiny: Path, tiny_backend: OrtBackend, exam: Exam
) -> None:
    """Two letters have changed places in its vocabulary."""
    vocabulary = json.loads((tiny / "vocab.json").read_text("utf-8"))
    vocabulary["\u2581l"], vocabulary["\u2581q"] = vocabulary["\u2581q"], vocabulary["\u2581l"]
    (tiny / "vocab.json").write_text(json.dumps(vocabulary), "utf-8")
    candidate = Candidate(tiny_backend, Bundle(TINY).passport, open_tokenizer(tiny), "as tested")
    rung, differences = token_rung(exam.tokens, candidate, 1e-5, 1e-4, [])
    assert not rung.passed
    assert differences == []
    assert rung.problems[:2] == [
        "the tokenizer makes other source ids of 'l q j l c h t m' than the one of the exam",
        "the tokenizer reads 'm t h c q j l q' in target ids that mean 'm t h c l j q l'",
    ]
    wrong = {case.label for case in rung.cases if not case.passed}
    assert wrong == {case.label for case in exam.tokens if {"l", "q"} & set(case.text.split())}
    assert len(wrong) < len(exam.tokens)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"text": "a b"}, "the tokenizer makes other source ids of 'a b' than the one of the exam"),
        ({"translation": "b a"}, "the tokenizer reads 'm t h c l j q l' in target ids that mean 'b a'"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_source_ids_and_texts_are_compared_each_for_itself(
    tiny_bundle: Bundle,
    tiny_backend: OrtBackend,
    exam: Exam,
    *,
    precision: str,
    changes: dict[str, Any],
    expected: str,
) -> None:
    changed = msgspec.structs.replace(exam.tokens[0], **changes)
    passport = msgspec.structs.replace(tiny_bundle.passport, precision=precision)
    candidate = Candidate(tiny_backend, passport, open_tokenizer(TINY), "as tested")
    rung, _ = token_rung([changed, *exam.tokens[1:]], candidate, 1e-5, 1e-4, [])
    assert rung.problems == [expected]


def test_what_only_the_search_shows_fails_on_the_token_rung(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    """Beams whose pasts differ by one token, which rung 2 does not ask for, go on with the past of another."""

    class Fault(Delegate):
        def branch(self, ids: Any, mask: Any, seen: Any, cache: Cache[Any]) -> tuple[Any, Cache[Any]]:
            lengths = self.get(seen).sum(2)
            alike = (lengths == lengths[:, :1]).all() and lengths.max() > 1
            told = self.changed(seen, lambda array: array[:, ::-1]) if alike else seen
            return super().branch(ids, mask, told, cache)

    report = judge(tiny_bundle, exam, Fault(tiny_backend))
    assert failed(report) == [TOKENS, DEPLOYMENT]
    assert all(", 4 beams" in problem for problem in report.rungs[TOKENS].problems)
