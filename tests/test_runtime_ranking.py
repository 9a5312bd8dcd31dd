"""The best tokens in numpy: in order, of equals the first, and none that is forbidden."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.ranking import best_entries, log_softmax, rank_tokens

deterministic = settings(deadline=None, derandomize=True, max_examples=200)


@deterministic
@given(st.integers(0, 10_000), st.integers(1, 50), st.integers(1, 4), st.data())
def test_the_best_entries_are_those_of_a_stable_sort(seed: int, size: int, levels: int, data: st.DataObject) -> None:
    """With few levels most entries are equal, also on both sides of the cut."""
    count = data.draw(st.integers(1, size))
    random = np.random.default_rng(seed)
    scores = random.integers(0, levels, (2, 3, size)).astype(np.float32)
    scores[random.random(scores.shape) < 0.2] = -np.inf
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    values, places = best_entries(scores, count)
    np.testing.assert_array_equal(places, order)
    np.testing.assert_array_equal(values, np.take_along_axis(scores, order, -1))


def test_entries_that_are_no_numbers_come_last_and_are_kept() -> None:
    values, places = best_entries(np.array([[np.nan, 1, np.nan, 2], [3, np.nan, 4, 5]]), 3)
    assert places[0, :2].tolist() == [3, 1]
    assert np.isnan(values[0, 2])
    assert places[1].tolist() == [3, 2, 0]


@pytest.mark.parametrize("forbidden", [(), (2,), (0, 4)])
def test_what_is_forbidden_has_no_probability_and_the_others_share_it(forbidden: tuple[int, ...]) -> None:
    logits = np.array([[[1.0, 3, 2, 3, -1]]], np.float32)
    kept = [token for token in (1, 3, 2, 0, 4) if token not in forbidden]
    scores, tokens = rank_tokens(logits, forbidden, len(kept))
    assert tokens[0, 0].tolist() == kept
    expected = logits[0, 0, kept] - np.log(np.exp(logits[0, 0, kept]).sum())
    np.testing.assert_allclose(scores[0, 0], expected, rtol=1e-6)
    assert scores.dtype == np.float32
    assert logits.max() == 3  # it was not written into


def test_no_more_tokens_come_than_there_are() -> None:
    scores, tokens = rank_tokens(np.zeros((2, 1, 3), np.float32), (), 8)
    assert tokens.tolist() == [[[0, 1, 2]]] * 2
    np.testing.assert_allclose(scores, -np.log(3), rtol=1e-6)


def test_where_all_is_forbidden_no_score_is_a_number_and_nothing_warns() -> None:
    scores, _ = rank_tokens(np.zeros((1, 1, 3), np.float32), (0, 1, 2), 1)
    assert not np.isfinite(scores).any()


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_ranks_are_computed_in_float32(kind: Any) -> None:
    logits = np.random.default_rng(0).normal(size=(2, 1, 20)).astype(kind)
    scores, tokens = rank_tokens(logits, (3,), 4)
    allowed = logits.astype(np.float32)
    allowed[..., 3] = -np.inf
    np.testing.assert_array_equal(scores, np.take_along_axis(log_softmax(allowed), tokens, -1))
