"""Searches that see the best tokens alone find what they find with all scores before them."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from generation_support import (
    EOS,
    POSITIONS,
    SPECIAL,
    START,
    VOCABULARY,
    Source,
    Table,
    TableBackend,
    random_table,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from runtime import generation
from runtime.backend import FloatArray, IntArray
from runtime.beam_search import NEVER, _best_continuations, _best_of_best
from runtime.decoding import Decoding, Limits
from runtime.errors import GenerationError
from runtime.generation import Hypothesis, generate, pad
from runtime.generation_config import GenerationConfig
from runtime.logit_rules import apply_rules, forbid_tokens, logit_rules, renormalize, shared_bans
from runtime.ranking import log_softmax, rank_tokens

deterministic = settings(deadline=None, derandomize=True, max_examples=200)
seeds = st.integers(0, 10_000)
batches = st.lists(st.lists(st.integers(1, VOCABULARY - 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=4)
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=3, unique=True).map(tuple)
LIMITS = Limits((START,), 0, POSITIONS)

# Which rules come down to forbidden tokens


def bans(length: int, limits: Limits = LIMITS, **options: Any) -> tuple[int, ...] | None:
    return shared_bans(GenerationConfig(**options), limits, SPECIAL, length)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.5},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.5},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": ((1, 2),)},
        {"bad_words_ids": ((3,), (1, 2))},
    ],
    ids=str,
)
def test_a_rule_that_looks_at_a_sequence_or_changes_other_scores_needs_all_of_them(options: dict[str, Any]) -> None:
    assert [bans(length, **options) for length in range(1, POSITIONS)] == [None] * (POSITIONS - 1)


@pytest.mark.parametrize(("name", "place"), [("forced_bos_token_id", 1), ("forced_eos_token_id", POSITIONS - 1)])
@pytest.mark.parametrize("token", [0, 4])
def test_a_forced_token_needs_all_scores_where_it_is_forced(name: str, place: int, token: int) -> None:
    options: dict[str, Any] = {name: token}
    found = [bans(length, **options) for length in range(1, POSITIONS)]
    assert found == [None if length == place else () for length in range(1, POSITIONS)]


def test_nothing_is_forbidden_where_nothing_was_asked_for() -> None:
    assert bans(1) == bans(5, renormalize_logits=True, num_beams=4, length_penalty=2.0) == ()


def test_single_bad_words_suppressed_tokens_and_an_early_end_are_forbidden_together() -> None:
    limits = Limits((START,), 4, POSITIONS)
    options: dict[str, Any] = {"bad_words_ids": ((5,), (2,)), "suppress_tokens": (2, 1)}
    assert [bans(length, limits, **options) for length in (1, 3, 4, 5)] == [
        (EOS, 1, 2, 5),
        (EOS, 1, 2, 5),
        (1, 2, 5),
        (1, 2, 5),
    ]


@st.composite
def plain_options(draw: st.DrawFn) -> dict[str, Any]:
    """Options whose rules come down to forbidden tokens."""
    beams = draw(st.integers(1, 6))
    words, suppressed = draw(tokens.map(lambda ids: set(ids) - {EOS})), draw(tokens)
    allowed = {*range(VOCABULARY)} - words - set(suppressed)
    return {
        "num_beams": beams,
        "num_return_sequences": draw(st.integers(1, beams)),
        "length_penalty": draw(st.sampled_from([0.0, 1.0, 2.0, -1.0])),
        "early_stopping": draw(st.sampled_from([False, True, "never"])),
        "max_length": draw(st.integers(4, POSITIONS)),
        "min_length": draw(st.integers(0, 4)),
        "bad_words_ids": tuple((token,) for token in sorted(words)),
        "suppress_tokens": suppressed,
        "forced_bos_token_id": draw(st.sampled_from([None, *({3} & allowed)])),
        "forced_eos_token_id": draw(st.sampled_from([None, *({EOS} & allowed)])),
        "renormalize_logits": draw(st.booleans()),
    }


@deterministic
@given(seeds, plain_options(), st.integers(1, POSITIONS - 1))
def test_what_is_forbidden_is_all_that_the_rules_do(seed: int, chosen: dict[str, Any], length: int) -> None:
    config = GenerationConfig(**chosen)
    limits = Limits((START,), chosen["min_length"], chosen["max_length"])
    forbidden = shared_bans(config, limits, SPECIAL, length)
    assume(forbidden is not None and len(forbidden) < VOCABULARY)
    assert forbidden is not None
    random = np.random.default_rng(seed)
    scores = log_softmax(random.normal(0, 2, (3, VOCABULARY)).astype(np.float32))
    sequences = random.integers(0, VOCABULARY, (3, length))
    expected = scores.copy()
    expected[:, list(forbidden)] = -np.inf
    if chosen["renormalize_logits"]:
        expected = log_softmax(expected)
    np.testing.assert_allclose(apply_rules(logit_rules(config, limits, SPECIAL), scores, sequences), expected)


# Whole searches


def tied_table(seed: int) -> Table:
    """Many tokens are equally probable."""
    table = random_table(seed)
    return lambda source, history: np.round(table(source, history) / 2)


def outcome(table: Table, sources: Sequence[Source], chosen: dict[str, Any]) -> list[list[Hypothesis]] | str:
    try:
        return generate(TableBackend(table), sources, GenerationConfig(**chosen), SPECIAL, POSITIONS)
    except GenerationError as error:
        return str(error)


@pytest.mark.parametrize("tied", [False, True])
def test_a_search_finds_the_same_with_the_best_tokens_as_with_all_scores(*, tied: bool) -> None:
    told: list[bool] = []
    make = tied_table if tied else random_table

    @deterministic
    @given(seeds, batches, plain_options())
    def same(seed: int, sources: list[Source], chosen: dict[str, Any]) -> None:
        if tied:  # whether scores are normalised once or twice decides between equal ones
            chosen["renormalize_logits"] = False
        fast = outcome(make(seed), sources, chosen)
        with mock.patch.object(generation, "shared_bans", return_value=None):
            slow = outcome(make(seed), sources, chosen)
        told.append(isinstance(fast, str))
        if isinstance(fast, str) or isinstance(slow, str):
            assert fast == slow
            return
        assert [[found.ids for found in each] for each in fast] == [[found.ids for found in each] for each in slow]
        scores = [[found.score for each in outputs for found in each] for outputs in (fast, slow)]
        assert scores[0] == pytest.approx(scores[1], rel=1e-5, abs=1e-6)

    same()
    assert told.count(False) > 100


@pytest.mark.parametrize("beams", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"renormalize_logits": True}])
@pytest.mark.parametrize(
    "every",
    [
        {"suppress_tokens": tuple(range(VOCABULARY))},
        {"bad_words_ids": tuple((token,) for token in range(1, VOCABULARY)), "min_length": 4},
    ],
    ids=["all suppressed", "all but the end, which may not come yet"],
)
def test_where_every_token_is_forbidden_the_search_says_so(
    beams: int, options: dict[str, Any], every: dict[str, Any]
) -> None:
    assert outcome(random_table(0), [(1,), (2, 3)], {"num_beams": beams, **options, **every}) == (
        "generation: the options leave a sentence no output: every token is forbidden"
    )


# The best of the best


class Seen:
    """Stands for a `Decoding` whose last logits are `(B K, V)`."""

    def __init__(self, logits: FloatArray) -> None:
        self._logits = logits
        self.asked: list[int] = []

    def best(self, count: int, forbidden: Sequence[int]) -> tuple[FloatArray, IntArray]:
        self.asked.append(count)
        return rank_tokens(self._logits, forbidden, count)


@pytest.mark.parametrize("renormalized", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_best_of_the_best_are_the_best_of_all(*, tied: bool, renormalized: bool) -> None:
    counts = {True: 0, False: 0}

    @deterministic
    @given(seeds, st.integers(1, 3), st.integers(1, 5), st.integers(2, 12), st.data())
    def same(seed: int, sentences: int, beams: int, vocabulary: int, data: st.DataObject) -> None:
        forbidden = tuple(data.draw(st.lists(st.integers(0, vocabulary - 1), max_size=vocabulary - 1, unique=True)))
        random = np.random.default_rng(seed)
        logits = random.normal(0, 2, (sentences * beams, vocabulary)).astype(np.float32)
        totals = -random.random((sentences, beams)).astype(np.float32) * 8
        if tied:  # on a grid that sums do not leave
            logits, totals = np.zeros_like(logits), np.round(totals)
            logits[:, ::2] = np.log(np.float32(2))
        decoding: Any = Seen(logits)
        found = _best_of_best(decoding, totals, forbidden, renormalize=renormalized)
        scores = forbid_tokens(log_softmax(logits), np.empty((len(logits), 0), np.int64), tokens=forbidden)
        if renormalized:
            scores = renormalize(scores, np.empty((len(logits), 0), np.int64))
        expected = _best_continuations(scores, totals, None)
        complete = expected.scores.shape[1] == 2 * beams and bool(np.isfinite(expected.scores).all())
        counts[complete] += 1
        assert (found is not None) == complete
        if found is not None:
            np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(found.beams, expected.beams)
            np.testing.assert_array_equal(found.tokens, expected.tokens)

    same()
    assert min(counts.values()) > 10


def test_as_many_tokens_are_asked_for_as_may_be_passed_over() -> None:
    decoding: Any = Seen(np.zeros((4, 40), np.float32))
    for renormalized in (False, True):
        _best_of_best(decoding, np.zeros((2, 2), np.float32), (1, 5, 7), renormalize=renormalized)
    assert decoding.asked == [4 + 3, 4]


def test_after_the_prefix_one_row_stands_for_all_beams() -> None:
    logits = np.array([[3.0, 1, 2, 0, -1, -2, -3]], np.float32)
    decoding: Any = Seen(logits)
    found = _best_of_best(decoding, np.array([[0, NEVER]], np.float32), (0,), renormalize=False)
    assert found is not None
    assert found.beams.tolist() == [[0] * 4]
    assert found.tokens.tolist() == [[2, 1, 3, 4]]


# Rows that are kept


def hypotheses(decoding: Decoding[Any]) -> tuple[FloatArray, list[int]]:
    """Logits of all hypotheses, and the best token of each."""
    return decoding.logits(), decoding.best(1, ())[1][:, 0].tolist()


def test_rows_that_are_kept_are_the_rows_of_what_comes_next() -> None:
    """After the prefix, after a branch, and of what was computed before."""
    table = random_table(5)
    sources: list[Source] = [(1, 2), (3,), (4, 5, 1)]
    backend = TableBackend(table)
    decoding = Decoding(backend, *pad(sources, SPECIAL.pad))
    decoding.start((START, 2))
    expected: list[list[Source]] = [[(START, 2)] for _ in sources]

    def check(kept: list[int]) -> None:
        logits = np.array([table(sources[row], history) for row in kept for history in expected[row]])
        found, best = hypotheses(decoding)
        np.testing.assert_array_equal(found, logits)
        assert best == logits.argmax(-1).tolist()
        assert decoding.rows == len(kept)

    check([0, 1, 2])
    decoding.keep(np.array([2, 0]))
    check([2, 0])
    decoding.branch(np.array([[1, 3], [4, 5]]), np.zeros((2, 2), np.int64))
    expected[2], expected[0] = [(START, 2, 1), (START, 2, 3)], [(START, 2, 4), (START, 2, 5)]
    check([2, 0])
    decoding.branch(np.array([[2, 2], [1, 3]]), np.array([[1, 0], [0, 0]]))
    expected[2], expected[0] = [(START, 2, 3, 2), (START, 2, 1, 2)], [(START, 2, 4, 1), (START, 2, 4, 3)]
    check([2, 0])
    decoding.keep(np.array([1]))
    check([0])
    decoding.branch(np.array([[5, 4]]), np.array([[1, 0]]))
    expected[0] = [(START, 2, 4, 3, 5), (START, 2, 4, 1, 4)]
    check([0])


def test_one_row_may_be_kept_several_times() -> None:
    table = random_table(6)
    decoding = Decoding(TableBackend(table), *pad([(1, 2), (3,)], SPECIAL.pad))
    decoding.start((START,))
    decoding.keep(np.array([1, 1, 0]))
    decoding.step(np.array([2, 4, 2]))
    rows: list[tuple[Source, Source]] = [((3,), (START, 2)), ((3,), (START, 4)), ((1, 2), (START, 2))]
    found, best = hypotheses(decoding)
    np.testing.assert_array_equal(found, np.array([table(*row) for row in rows]))
    assert best == [int(table(*row).argmax()) for row in rows]
