"""Drawn tokens: by their probability, reproducibly, and the same whatever else is in the batch."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from generation_support import EOS, POSITIONS, SPECIAL, TableBackend, random_table, written_table

from runtime.decoding import SpecialIds
from runtime.generation import Hypothesis, generate
from runtime.generation_config import GenerationConfig
from runtime.ranking import log_softmax
from runtime.sampling import draw


def sample(sources: list[tuple[int, ...]], **options: Any) -> list[list[Hypothesis]]:
    config = GenerationConfig(do_sample=True, **options)
    return generate(TableBackend(random_table(3)), sources, config, SPECIAL, POSITIONS)


def test_a_token_is_drawn_where_the_random_number_falls() -> None:
    scores = np.log([[0.25, 0, 0.5, 0.25, 0]], where=[[True, False, True, True, False]], out=np.full((1, 5), -np.inf))
    below_one = np.nextafter(1, 0)
    places = {0.0: 0, 0.2499: 0, 0.2501: 2, 0.7499: 2, 0.7501: 3, below_one: 3}
    for uniform, token in places.items():
        assert draw(scores, np.array([uniform])).tolist() == [token]


def test_what_is_impossible_is_never_drawn() -> None:
    random = np.random.default_rng(0)
    scores = random.normal(0, 3, (500, 50)).astype(np.float32)
    impossible = random.random(scores.shape) < 0.5
    impossible[:, 7] = False
    impossible[:, [0, -1]] = True
    scores[impossible] = -np.inf
    for uniforms in (np.zeros(500), np.full(500, np.nextafter(1, 0)), random.random(500)):
        tokens = draw(log_softmax(scores), uniforms)
        assert not impossible[np.arange(500), tokens].any()


def test_tokens_come_as_often_as_they_are_probable() -> None:
    (found,) = sample([(1, 2)], num_return_sequences=4000, max_new_tokens=1, seed=1, top_k=0)
    counts = Counter(hypothesis.ids[0] for hypothesis in found)
    probabilities = np.exp(log_softmax(random_table(3)((1, 2), (SPECIAL.start,))))
    expected = 4000 * probabilities
    deviation = sum((counts[token] - expected[token]) ** 2 / expected[token] for token in range(len(expected)))
    assert deviation < 25  # six degrees of freedom: once in 3,000 seeds


def test_scores_are_those_of_the_distribution_that_was_drawn_from() -> None:
    options: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "max_new_tokens": 1, "num_return_sequences": 50}
    (found,) = sample([(1, 2)], seed=1, **options)
    logits = random_table(3)((1, 2), (SPECIAL.start,)) / 0.5
    logits[np.argsort(logits)[:-3]] = -np.inf
    expected = log_softmax(logits)
    for hypothesis in found:
        assert hypothesis.score == pytest.approx(expected[hypothesis.ids[0]], rel=1e-5)


@pytest.mark.parametrize("options", [{"num_return_sequences": 5}, {"num_beams": 3, "num_return_sequences": 2}], ids=str)
def test_a_seed_gives_the_same_outputs_again_and_no_seed_others(options: dict[str, Any]) -> None:
    sources = [(1, 2), (3,)]
    options |= {"temperature": 3.0}
    assert sample(sources, seed=7, **options) == sample(sources, seed=7, **options)
    assert len({str(sample(sources, seed=seed, **options)) for seed in range(10)}) > 5
    assert len({str(sample(sources, **options)) for _ in range(10)}) > 2


def test_sentences_do_not_share_their_random_numbers() -> None:
    table = random_table(3)
    config = GenerationConfig(do_sample=True, num_return_sequences=20, seed=7)
    deaf = TableBackend(lambda _source, history: table((), history))
    one, other = generate(deaf, [(1,), (2,)], config, SPECIAL, POSITIONS)
    assert [hypothesis.ids for hypothesis in one] != [hypothesis.ids for hypothesis in other]


def test_a_sentence_that_stands_twice_is_drawn_twice_without_a_seed_only() -> None:
    once, again = sample([(1, 2)] * 2, seed=7, num_return_sequences=20)
    assert once == again
    once, again = sample([(1, 2)] * 2, num_return_sequences=20)
    assert once != again


def test_samples_of_a_sentence_differ_and_stand_in_the_order_in_which_they_were_drawn() -> None:
    (found,) = sample([(1, 2)], seed=7, num_return_sequences=20)
    assert len({tuple(hypothesis.ids) for hypothesis in found}) > 10
    scores = [hypothesis.score for hypothesis in found]
    assert scores != sorted(scores, reverse=True)
    (fewer,) = sample([(1, 2)], seed=7, num_return_sequences=3)
    assert fewer == found[:3]


def test_only_the_most_probable_token_is_left_at_k_1_and_at_p_0() -> None:
    greedy = generate(TableBackend(random_table(3)), [(1, 2)], GenerationConfig(), SPECIAL, POSITIONS)[0][0]
    for options in ({"top_k": 1}, {"top_p": 0.0}, {"temperature": 1e-3}):
        (found,) = sample([(1, 2)], num_return_sequences=20, **options)
        assert {tuple(hypothesis.ids) for hypothesis in found} == {tuple(greedy.ids)}


def test_beams_are_drawn_without_replacement() -> None:
    """Two beams, one step: four of four continuations for one source, so that both best ones are always found."""
    table = written_table({(): [0.1, 0.2, 0.3, 0.4]})
    config = GenerationConfig(do_sample=True, num_beams=2, num_return_sequences=2, max_new_tokens=1, top_k=0)
    special = SpecialIds(pad=3, start=3, eos=EOS)
    (found,) = generate(TableBackend(table), [(1,)], config, special, POSITIONS)
    assert [hypothesis.ids for hypothesis in found] == [[3], [2]]
    assert [hypothesis.score for hypothesis in found] == pytest.approx(np.log([0.4, 0.3]), rel=1e-5)
