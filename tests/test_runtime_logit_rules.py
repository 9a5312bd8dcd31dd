"""Each rule on scores that can be read, and what searches make of rules; no torch, no transformers."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from generation_support import EOS, POSITIONS, SPECIAL, START, VOCABULARY, Table, TableBackend, random_table

from runtime.backend import FloatArray
from runtime.decoding import Limits
from runtime.errors import GenerationError
from runtime.generation import Hypothesis, generate
from runtime.generation_config import GenerationConfig
from runtime.logit_rules import (
    Rule,
    forbid_early_end,
    forbid_repeated_ngrams,
    forbid_tokens,
    forbid_words,
    force_at,
    group_words,
    logit_rules,
    penalize_repetition,
    renormalize,
)
from runtime.sampling import divide_by_temperature, keep_top_k, keep_top_p

NOT = -np.inf
SCORES = [1.0, -2.0, 3.0, 0.5, 0.0]
"""Of five tokens."""


def rule_name(value: Any) -> str:
    """Of a test: the same in every process."""
    return f"{value.func.__name__} {value.keywords}" if isinstance(value, partial) else str(value)


@pytest.mark.parametrize(
    ("rule", "sequence", "expected"),
    [
        (partial(penalize_repetition, penalty=2.0), [4, 1, 2, 1], [1, -4, 1.5, 0.5, 0]),
        (partial(penalize_repetition, penalty=0.5), [1, 2], [1, -1, 6, 0.5, 0]),
        (partial(forbid_repeated_ngrams, size=1), [3, 0, 3], [NOT, -2, 3, NOT, 0]),
        (partial(forbid_repeated_ngrams, size=2), [1, 2, 1, 4, 1], [1, -2, NOT, 0.5, NOT]),
        (partial(forbid_repeated_ngrams, size=2), [1, 2, 3], SCORES),
        (partial(forbid_repeated_ngrams, size=3), [1, 2, 3, 1, 2], [1, -2, 3, NOT, 0]),
        (partial(forbid_repeated_ngrams, size=3), [2, 2], SCORES),
        (partial(forbid_repeated_ngrams, size=2), [2, 2], [1, -2, NOT, 0.5, 0]),
        (partial(forbid_words, words=group_words([[0], [3]])), [1], [NOT, -2, 3, NOT, 0]),
        (partial(forbid_words, words=group_words([[1, 2], [4, 1, 0]])), [4, 1], [NOT, -2, NOT, 0.5, 0]),
        (partial(forbid_words, words=group_words([[1, 2], [4, 1, 0]])), [1, 4], SCORES),
        (partial(forbid_words, words=group_words([[1, 1, 2]])), [1], SCORES),
        (partial(forbid_early_end, shortest=3, eos=2), [1, 1], [1, -2, NOT, 0.5, 0]),
        (partial(forbid_early_end, shortest=2, eos=2), [1, 1], SCORES),
        (partial(force_at, token=1, place=2), [3, 3], [NOT, 0, NOT, NOT, NOT]),
        (partial(force_at, token=1, place=2), [3], SCORES),
        (partial(force_at, token=1, place=2), [3, 3, 3], SCORES),
        (partial(forbid_tokens, tokens=(0, 4)), [3], [NOT, -2, 3, 0.5, NOT]),
        (partial(divide_by_temperature, temperature=0.5), [3], [2, -4, 6, 1, 0]),
        (partial(keep_top_k, count=2), [3], [1, NOT, 3, NOT, NOT]),
        (partial(keep_top_k, count=9), [3], SCORES),
        # Probabilities 0.10, 0.005, 0.78, 0.06, 0.04.
        (partial(keep_top_p, mass=0.5, at_least=1), [3], [NOT, NOT, 3, NOT, NOT]),
        (partial(keep_top_p, mass=0.5, at_least=2), [3], [1, NOT, 3, NOT, NOT]),
        (partial(keep_top_p, mass=0.85, at_least=1), [3], [1, NOT, 3, NOT, NOT]),
        (partial(keep_top_p, mass=0.0, at_least=1), [3], [NOT, NOT, 3, NOT, NOT]),
    ],
    ids=rule_name,
)
def test_a_rule_changes_what_it_should_and_nothing_that_it_was_given(
    rule: Rule, sequence: list[int], expected: list[float]
) -> None:
    scores = np.array([SCORES, SCORES], np.float32)
    other = [2] * len(sequence)  # another row is another matter
    sequences = np.array([sequence, other])
    changed = rule(scores, sequences)
    np.testing.assert_allclose(changed[0], expected)
    np.testing.assert_array_equal(changed[1], rule(scores[1:], sequences[1:])[0])
    np.testing.assert_array_equal(scores, np.array([SCORES, SCORES], np.float32))
    np.testing.assert_array_equal(sequences, [sequence, other])
    assert changed.dtype == np.float32


def test_renormalised_scores_are_log_probabilities_also_where_much_is_impossible() -> None:
    scores = np.array([[1.0, NOT, 1.0], [NOT, NOT, 5.0], [NOT, NOT, NOT]], np.float32)
    found = renormalize(scores, np.zeros((3, 1), np.int64))
    half = -np.log(2)
    np.testing.assert_allclose(found, [[half, NOT, half], [NOT, NOT, 0], [NOT, NOT, NOT]], rtol=1e-6)


def test_without_options_there_are_no_rules() -> None:
    limits = Limits((START,), 0, POSITIONS)
    assert logit_rules(GenerationConfig(), limits, SPECIAL) == []
    # A prefix that is long enough already needs no rule either.
    assert logit_rules(GenerationConfig(min_length=3), Limits((START, 1, 1), 3, POSITIONS), SPECIAL) == []


# Searches.


def search(table: Table, **options: Any) -> list[Hypothesis]:
    (found,) = generate(TableBackend(table), [(1,)], GenerationConfig(**options), SPECIAL, POSITIONS)
    return found


def falling(_source: object, _history: object) -> FloatArray:
    """Token 1 is the most probable, then 2, 3, ...; EOS is the least."""
    return np.roll(np.arange(VOCABULARY, 0, -1.0), 1)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, 1, 1]),
        ({"no_repeat_ngram_size": 1}, [1, 2, 3, 4]),
        ({"no_repeat_ngram_size": 2}, [1, 1, 2, 1]),
        ({"bad_words_ids": ((1,),)}, [2, 2, 2, 2]),
        ({"bad_words_ids": ((1, 1, 1),)}, [1, 1, 2, 1]),
        ({"bad_words_ids": ((1, 1),), "decoder_input_ids": (1,), "max_length": 4}, [1, 2, 1]),
        ({"suppress_tokens": (1, 2)}, [3, 3, 3, 3]),
        ({"forced_bos_token_id": 4}, [4, 1, 1, 1]),
        ({"forced_bos_token_id": 4, "decoder_input_ids": (3,)}, [3, 1, 1, 1]),
        ({"forced_eos_token_id": EOS}, [1, 1, 1, EOS]),
        ({"forced_eos_token_id": 5}, [1, 1, 1, 5]),
        ({"forced_bos_token_id": START, "bad_words_ids": ((START,),)}, [START, 1, 1, 1]),
        ({"forced_bos_token_id": 4, "forced_eos_token_id": 5, "max_length": 2}, [5]),
        ({"do_sample": True, "top_k": 1, "num_beams": 1}, [1, 1, 1, 1]),
    ],
    ids=str,
)
def test_rules_lead_the_search(beams: int, options: dict[str, Any], expected: list[int]) -> None:
    (found,) = search(falling, **{"num_beams": beams, "max_length": 5, **options})
    assert found.ids == expected


@pytest.mark.parametrize("beams", [1, 3])
def test_a_forced_token_costs_nothing(beams: int) -> None:
    (free,) = search(falling, num_beams=beams, max_length=4, length_penalty=0.0)
    (forced,) = search(falling, num_beams=beams, max_length=4, length_penalty=0.0, forced_bos_token_id=5)
    assert forced.score == pytest.approx(free.score * 2 / 3)


def test_beam_search_bans_after_log_softmax_unless_scores_are_renormalised() -> None:
    options: dict[str, Any] = {"num_beams": 2, "max_length": 2, "suppress_tokens": (1,)}
    scores = falling(None, None)
    lost, kept = np.log(np.exp(scores).sum()), np.log(np.exp(np.delete(scores, 1)).sum())
    assert search(falling, **options)[0].score == pytest.approx(scores[2] - lost)
    assert search(falling, **options, renormalize_logits=True)[0].score == pytest.approx(scores[2] - kept)
    assert search(falling, **(options | {"num_beams": 1}))[0].score == pytest.approx(scores[2] - kept)


@pytest.mark.parametrize("options", [{"num_beams": 1}, {"num_beams": 3}, {"do_sample": True}], ids=str)
def test_options_that_leave_no_output_are_an_error(options: dict[str, Any]) -> None:
    everything = tuple(range(VOCABULARY))
    with pytest.raises(GenerationError, match="leave a sentence no output: every token is forbidden"):
        search(random_table(0), suppress_tokens=everything, **options)
    with pytest.raises(GenerationError, match="leave a sentence no output"):
        search(falling, no_repeat_ngram_size=1, suppress_tokens=(EOS,), **options)


@pytest.mark.parametrize("renormalize_logits", [False, True])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 3, "top_p": 0.9, "seed": 5}], ids=str)
def test_there_are_no_more_outputs_than_the_options_leave(options: dict[str, Any], renormalize_logits: Any) -> None:
    allowed = (EOS, 2)
    found = search(
        random_table(1),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=2,
        suppress_tokens=tuple(set(range(VOCABULARY)) - set(allowed)),
        renormalize_logits=renormalize_logits,
        **options,
    )
    assert sorted(hypothesis.ids for hypothesis in found) == [[EOS], [2, EOS], [2, 2]]
    assert all(hypothesis.score > -100 for hypothesis in found)


def test_a_beam_with_no_way_out_does_not_count_as_finished() -> None:
    """Behind token 2 nothing may stand, behind 3 only 3, until EOS may: one beam dies, the other has to get there."""
    found = search(
        random_table(1),
        num_beams=2,
        early_stopping=True,
        suppress_tokens=(1, 4, 5, START),
        bad_words_ids=((2, 2), (2, 3), (3, 2)),
        min_length=5,
    )
    assert [hypothesis.ids for hypothesis in found] == [[3, 3, 3, 3, EOS]]


def test_a_sentence_whose_beams_are_all_dead_is_done() -> None:
    backend = TableBackend(random_table(1))
    config = GenerationConfig(num_beams=3, num_return_sequences=3, forced_bos_token_id=EOS)
    (found,) = generate(backend, [(1,)], config, SPECIAL, POSITIONS)
    assert [hypothesis.ids for hypothesis in found] == [[EOS]]
    assert backend.calls["step"] == 0


def test_eos_alone_is_no_bad_word() -> None:
    with pytest.raises(GenerationError, match=r"bad_words_ids holds EOS \(0\)"):
        search(falling, bad_words_ids=((3,), (EOS,)))
    assert search(falling, bad_words_ids=((3, EOS),), max_length=3)[0].ids == [1, 1]
