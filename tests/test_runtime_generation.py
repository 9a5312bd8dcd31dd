"""Search over a model that is a table: invariance, limits, scores, and beam search against trying everything."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

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
    written_table,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.beam_search import beam_search
from runtime.decoding import Decoding, Limits, SpecialIds
from runtime.errors import GenerationError
from runtime.generation import Hypothesis, generate, pad
from runtime.generation_config import GenerationConfig
from runtime.ranking import log_softmax


def search(table: Table, sources: Sequence[Source], **options: Any) -> list[list[Hypothesis]]:
    return generate(TableBackend(table), sources, GenerationConfig(**options), SPECIAL, POSITIONS)


def ids_of(outputs: list[list[Hypothesis]]) -> list[list[list[int]]]:
    return [[hypothesis.ids for hypothesis in found] for found in outputs]


def scores_of(outputs: list[list[Hypothesis]]) -> list[float]:
    return [hypothesis.score for found in outputs for hypothesis in found]


seeds = st.integers(0, 10_000)
batches = st.lists(st.lists(st.integers(1, VOCABULARY - 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=6)
deterministic = settings(deadline=None, derandomize=True, max_examples=100)


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    beams = draw(st.integers(1, 4))
    prefix = draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=2))
    longest = draw(st.integers(4, POSITIONS))
    return {
        "num_beams": beams,
        "num_return_sequences": draw(st.integers(1, beams)),
        "length_penalty": draw(st.sampled_from([0.0, 0.6, 1.0, 2.0, -1.0])),
        "early_stopping": draw(st.sampled_from([False, True, "never"])),
        "max_length": longest,
        "min_length": draw(st.integers(0, longest)),
        "decoder_input_ids": tuple(prefix),
    }


@st.composite
def options_and_rules(draw: st.DrawFn) -> dict[str, Any]:
    """Options with rules that leave every sentence an output, and with sampling."""
    chosen = draw(options())
    chosen |= {
        "repetition_penalty": draw(st.sampled_from([1.0, 1.5])),
        "no_repeat_ngram_size": draw(st.sampled_from([0, 2, 3])),
        "bad_words_ids": draw(st.sampled_from([(), ((3,), (1, 2))])),
        "forced_eos_token_id": draw(st.sampled_from([None, EOS])),
        "renormalize_logits": draw(st.booleans()),
    }
    if draw(st.booleans()):
        chosen |= {"do_sample": True, "seed": draw(seeds), "temperature": 1.5, "top_k": draw(st.sampled_from([0, 5]))}
    return chosen


# What a batch may change: nothing.


@deterministic
@given(seeds, batches, options_and_rules(), st.randoms(use_true_random=False))
def test_a_sentence_has_the_same_outputs_alone_in_a_batch_and_in_another_order(
    seed: int, sources: list[Source], chosen: dict[str, Any], random: Any
) -> None:
    table = random_table(seed)
    together = search(table, sources, **chosen)
    alone = [search(table, [source], **chosen)[0] for source in sources]
    order = random.sample(range(len(sources)), len(sources))
    permuted = search(table, [sources[place] for place in order], **chosen)
    assert ids_of(together) == ids_of(alone)
    assert ids_of(permuted) == ids_of([together[place] for place in order])
    assert scores_of(together) == pytest.approx(scores_of(alone), rel=1e-6)


def later_rows(backend: TableBackend) -> list[int]:
    """How many hypotheses each step or branch after the prompt goes on with."""
    return backend.rows_of_steps[backend.calls["begin"] :]


@deterministic
@given(seeds, batches, options())
def test_finished_sentences_leave_the_batch(seed: int, sources: list[Source], chosen: dict[str, Any]) -> None:
    def steps(rows: list[Source]) -> list[int]:
        backend = TableBackend(random_table(seed))
        generate(backend, rows, GenerationConfig(**chosen), SPECIAL, POSITIONS)
        return later_rows(backend)

    alone = [len(steps([source])) for source in sources]
    running = [sum(count > place for count in alone) for place in range(max(alone))]
    assert steps(sources) == [chosen["num_beams"] * count for count in running]


@deterministic
@given(seeds, batches, options())
def test_encoder_and_prompt_run_once_and_nothing_is_fetched_but_the_best_tokens(
    seed: int, sources: list[Source], chosen: dict[str, Any]
) -> None:
    backend = TableBackend(random_table(seed))
    generate(backend, sources, GenerationConfig(**chosen), SPECIAL, POSITIONS)
    prefix = chosen["decoder_input_ids"] not in ((), (START,))
    assert (backend.calls["encode"], backend.calls["prefill"], backend.calls["begin"]) == (1, prefix, not prefix)
    assert backend.calls["rank"] == sum(backend.calls[verb] for verb in ("prefill", "step", "branch"))
    assert backend.calls["get"] == 0
    assert backend.calls["step" if chosen["num_beams"] > 1 else "branch"] == 0


@pytest.mark.parametrize("beams", [1, 3])
def test_all_logits_are_fetched_where_a_rule_looks_at_them(beams: int) -> None:
    backend = TableBackend(random_table(0))
    config = GenerationConfig(num_beams=beams, repetition_penalty=1.5)
    generate(backend, [(1,), (2, 3)], config, SPECIAL, POSITIONS)
    assert backend.calls["get"] == backend.calls["step"] + backend.calls["branch"]
    assert backend.calls["rank"] == 0


@deterministic
@given(seeds, batches, options())
def test_caches_are_copied_when_a_sentence_leaves_and_never_else(
    seed: int, sources: list[Source], chosen: dict[str, Any]
) -> None:
    backend = TableBackend(random_table(seed))
    generate(backend, sources, GenerationConfig(**chosen), SPECIAL, POSITIONS)
    counts = [chosen["num_beams"] * len(sources), *later_rows(backend)]
    assert backend.calls["select"] == sum(before > after for before, after in itertools.pairwise(counts))


@deterministic
@given(seeds, batches, options())
def test_cross_attention_stays_the_same_object_until_a_sentence_leaves(
    seed: int, sources: list[Source], chosen: dict[str, Any]
) -> None:
    backend = TableBackend(random_table(seed))
    generate(backend, sources, GenerationConfig(**chosen), SPECIAL, POSITIONS)
    distinct = len({id(held) for pair in backend.cross_of_steps for held in pair})
    # The first token of a sentence is one hypothesis, whatever the number of beams.
    first = [chosen["num_beams"] * len(sources)] * backend.calls["begin"]
    assert distinct == 2 * len({*first, *later_rows(backend)})


# Limits.


@deterministic
@given(seeds, batches, options())
def test_outputs_keep_prefix_and_limits_and_end_at_their_first_eos(
    seed: int, sources: list[Source], chosen: dict[str, Any]
) -> None:
    prefix = chosen["decoder_input_ids"]
    prefix = prefix[1:] if prefix[:1] == (START,) else prefix
    for found in search(random_table(seed), sources, **chosen):
        assert len(found) == chosen["num_return_sequences"]
        for ids, _ in found:
            new = ids[len(prefix) :]
            assert tuple(ids[: len(prefix)]) == prefix
            assert EOS not in new[:-1]
            if new[-1] == EOS:
                assert chosen["min_length"] < len(ids) + 1 <= chosen["max_length"]
            else:
                assert len(ids) + 1 == chosen["max_length"]


def always(*order: int) -> Table:
    """The first of `order` is by far the most probable token, then the second, ..."""
    logits = np.zeros(VOCABULARY)
    logits[list(order)] = 10.0 * np.arange(len(order), 0, -1)
    return lambda _source, _history: logits


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    ("limits", "length"),
    [
        ({}, 1),
        ({"min_length": 1}, 1),
        ({"min_length": 2}, 2),
        ({"min_length": 5}, 5),
        ({"min_new_tokens": 3}, 4),
        ({"min_new_tokens": 0, "min_length": 5}, 1),
        ({"min_new_tokens": 2, "min_length": 5}, 3),
        ({"decoder_input_ids": (2, 2), "min_length": 3}, 3),
        ({"decoder_input_ids": (2, 2), "min_length": 4}, 4),
        ({"decoder_input_ids": (START, 2), "min_new_tokens": 2}, 4),
    ],
    ids=str,
)
def test_eos_comes_as_soon_as_it_may(beams: int, limits: dict[str, Any], length: int) -> None:
    ((found,),) = search(always(EOS, 2), [(1,)], num_beams=beams, early_stopping=True, length_penalty=0.0, **limits)
    assert found.ids == [2] * (length - 1) + [EOS]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    ("limits", "length"),
    [
        ({}, POSITIONS),
        ({"max_length": 4}, 4),
        ({"max_new_tokens": 4}, 5),
        ({"max_new_tokens": 4, "max_length": 2}, 5),
        ({"decoder_input_ids": (2,), "max_length": 4}, 4),
        ({"decoder_input_ids": (2,), "max_new_tokens": 4}, 6),
        ({"decoder_input_ids": (START, 2), "max_new_tokens": 4}, 6),
    ],
    ids=str,
)
def test_an_output_without_eos_is_as_long_as_it_may(beams: int, limits: dict[str, Any], length: int) -> None:
    ((found,),) = search(always(2, 3, 4, 5), [(1,)], num_beams=beams, **limits)
    assert found.ids == [2] * (length - 1)


# Scores.


@deterministic
@given(seeds, batches, options())
def test_scores_are_log_probabilities_of_the_new_tokens_over_a_power_of_their_count(
    seed: int, sources: list[Source], chosen: dict[str, Any]
) -> None:
    table = random_table(seed)
    prefix = chosen["decoder_input_ids"]
    prompt = prefix if prefix[:1] == (START,) else (START, *prefix)
    for source, found in zip(sources, search(table, sources, **chosen), strict=True):
        assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
        assert len({tuple(ids) for ids, _ in found}) == len(found)
        for ids, score in found:
            total, row = 0.0, (START, *ids)
            for end in range(len(prompt), len(row)):
                logits = table(source, row[:end]).copy()
                if chosen["num_beams"] == 1 and end < chosen["min_length"]:
                    logits[EOS] = -np.inf  # greedy scores are renormalised, like transformers' transition scores
                total += log_softmax(logits)[row[end]]
            assert score == pytest.approx(total / (len(row) - len(prompt)) ** chosen["length_penalty"], rel=1e-4)


@deterministic
@given(seeds, batches, options())
def test_one_beam_that_stops_at_its_first_end_is_greedy_search(
    seed: int, sources: list[Source], chosen: dict[str, Any]
) -> None:
    table = random_table(seed)
    chosen |= {"num_beams": 1, "num_return_sequences": 1, "min_length": 0, "decoder_input_ids": ()}
    found = beam_search(
        Decoding(TableBackend(table), *pad(sources, SPECIAL.pad)),
        Limits((START,), 0, chosen["max_length"]),
        SPECIAL,
        beams=1,
        length_penalty=chosen["length_penalty"],
        early_stopping=True,
    )
    greedy = search(table, sources, **chosen)
    assert ids_of(greedy) == [[output for output, _ in outputs] for outputs in found]
    assert scores_of(greedy) == pytest.approx([score for outputs in found for _, score in outputs], rel=1e-5)


def test_log_softmax_survives_large_and_impossible_logits() -> None:
    result = log_softmax(np.array([[1e4, 1e4, -np.inf], [-1e4, 0, 1]], np.float32))
    np.testing.assert_allclose(result[0], [-np.log(2), -np.log(2), -np.inf], rtol=1e-6)
    np.testing.assert_allclose(np.exp(result).sum(-1), 1, rtol=1e-6)


# Beam search.


@deterministic
@given(seeds, st.sampled_from([0.0, 0.6, 1.0, 2.0, -1.0]), st.sampled_from([False, "never"]))
def test_with_beams_for_everything_the_best_of_all_outputs_are_found(
    seed: int, length_penalty: float, early_stopping: Any
) -> None:
    tokens, new, special = 4, 3, SpecialIds(pad=3, start=3, eos=EOS)
    table, source = random_table(seed, tokens), (1, 2)
    every = []
    for row in itertools.product(range(tokens), repeat=new):
        count = row.index(EOS) + 1 if EOS in row else new
        ids = row[:count]
        total = sum(log_softmax(table(source, (3, *ids[:end])))[ids[end]] for end in range(count))
        every.append((float(total / count**length_penalty), list(ids)))
    best = sorted({tuple(ids): (score, ids) for score, ids in every}.values(), reverse=True)
    beams = 3 * 3 * tokens  # continuations of the last step: none is ever dropped
    config = GenerationConfig(
        num_beams=beams,
        num_return_sequences=beams,
        max_new_tokens=new,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    (found,) = generate(TableBackend(table), [source], config, special, POSITIONS)
    assert [hypothesis.ids for hypothesis in found] == [ids for _, ids in best[:beams]]
    assert [hypothesis.score for hypothesis in found] == pytest.approx([score for score, _ in best[:beams]], rel=1e-4)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_broken_model_gives_scores_that_show_it(beams: int) -> None:
    ((found, *_),) = search(
        lambda _source, _history: np.full(VOCABULARY, np.nan), [(1,)], num_beams=beams, max_length=4
    )
    assert np.isnan(found.score)


A, B = 1, 2


def best_two(probabilities: Mapping[Source, Sequence[float]], **chosen: Any) -> list[list[int]]:
    """The two outputs of two beams; probabilities stand in the order EOS, A, B, start."""
    config = GenerationConfig(num_beams=2, num_return_sequences=2, **chosen)
    special = SpecialIds(pad=3, start=3, eos=EOS)
    return ids_of(generate(TableBackend(written_table(probabilities)), [(1,)], config, special, POSITIONS))[0]


def test_an_end_that_ranks_behind_the_first_k_continuations_is_dropped() -> None:
    probabilities = {(): [0.15, 0.5, 0.35, 0], (A,): [0.05, 0.9, 0.05, 0], (B,): [0.1, 0.25, 0.24, 0.41]}
    # EOS alone has 0.15, more than the second output's 0.35 x 0.41, but it was the third of three.
    assert best_two(probabilities, max_new_tokens=2, length_penalty=0.0) == [[A, A], [B, 3]]


def test_twice_k_continuations_are_looked_at_so_that_k_beams_run_on_after_an_end() -> None:
    probabilities = {(): [0.5, 0.3, 0.2, 0], (A,): [0.25] * 4, (B,): [0.99, 0.01, 0, 0]}
    assert best_two(probabilities, max_new_tokens=2, length_penalty=0.0) == [[EOS], [B, EOS]]


def test_early_stopping_takes_the_first_k_ends() -> None:
    probabilities = {
        (): [0.3, 0.6, 0.1, 0],
        (A,): [0.2, 0.7, 0.1, 0],
        (B,): [0.1, 0.3, 0.3, 0.3],
        (A, A): [0.99, 0.01, 0, 0],
    }
    assert best_two(probabilities, early_stopping=True, length_penalty=0.0) == [[EOS], [A, EOS]]
    assert best_two(probabilities, early_stopping=False, length_penalty=0.0) == [[A, A, EOS], [EOS]]


def test_only_never_goes_on_where_a_longer_output_may_still_win() -> None:
    probabilities = {
        (): [0.5, 0.3, 0.2, 0],
        (A,): [0.34, 0.33, 0.32, 0.01],
        (A, A): [0.98, 0.02, 0, 0],
    }
    # After two tokens: ends EOS with log 0.5 and A EOS with log(0.102) / 2 = -1.14; the best beam has
    # log(0.099) / 2 = -1.16 now, but may reach log(0.099) / 8.
    assert best_two(probabilities, early_stopping=False) == [[EOS], [A, EOS]]
    assert best_two(probabilities, early_stopping="never") == [[EOS], [A, A, EOS]]


def test_never_reckons_with_the_length_so_far_where_shorter_outputs_score_higher() -> None:
    probabilities = {
        (): [0.5, 0.4, 0.1, 0],
        (A,): [0.2, 0.64, 0.16, 0],
        (A, A): [0.99, 0.01, 0, 0],
    }
    # A EOS has 2 log(0.08) = -5.05; the beam A A has 2 log(0.256) = -2.72 now, and would have -10.9 at 8 tokens.
    assert best_two(probabilities, early_stopping="never", length_penalty=-1.0) == [[EOS], [A, A, EOS]]


# Limits that do not fit the model.


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"max_length": 10}, "outputs of up to 10 tokens are asked for, the model has 9 positions"),
        ({"max_new_tokens": 9}, "outputs of up to 10 tokens are asked for, the model has 9 positions"),
        ({"max_length": 1}, "the prefix has 1 tokens with the start token, which leaves none of max_length 1"),
        ({"decoder_input_ids": (2,) * 8}, "the prefix has 9 tokens with the start token, which leaves none"),
        ({"min_length": 6, "max_length": 5}, "at least 6 tokens are asked for, but at most 5"),
        ({"min_new_tokens": 5, "max_length": 5}, "at least 6 tokens are asked for, but at most 5"),
        ({"length_penalty": -1e308}, "length_penalty is -1e[+]308: 8 tokens to that power are beyond 1e-25 to 1e[+]25"),
        ({"length_penalty": 1e308}, "length_penalty is 1e[+]308: 8 tokens"),
        ({"length_penalty": 28.0}, "length_penalty is 28.0: 8 tokens"),
    ],
    ids=str,
)
def test_a_limit_that_does_not_fit_the_model_is_an_error(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        search(random_table(0), [(1,)], **chosen)


def test_all_limits_that_do_not_fit_are_named_at_once() -> None:
    with pytest.raises(GenerationError) as caught:
        search(random_table(0), [(1,)], decoder_input_ids=(2,) * 11, min_length=15, max_length=10)
    assert [text.split(" ")[0] for text in str(caught.value).split(": ")[1].split("; ")] == ["outputs", "the", "at"]
