"""Sentences in, translations out: order, limits, batches that change nothing."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime_support import POSITIONS, TINY, VOCABULARY, edit_passport

from runtime import GenerationConfig, Hypothesis, Translation, Translator
from runtime.errors import BundleError, GenerationError, InputTooLongError, ProviderError, RuntimeFault, TokenizerError
from runtime.session import OrtBackend
from runtime.translator import token_batches

GREEDY = GenerationConfig()
BEAMS = GenerationConfig(num_beams=4, num_return_sequences=3)
EOS = 3
TEXTS = ["a b c d e", "f g h", "k l m n o p", "q r s t", "c b a", "e e e f f"]


def reverse(text: str) -> str:
    return " ".join(reversed(text.split()))


def same(ours: Sequence[Hypothesis], theirs: Sequence[Hypothesis]) -> bool:
    return [found.ids for found in ours] == [found.ids for found in theirs] and np.allclose(
        [found.score for found in ours], [found.score for found in theirs], atol=1e-5
    )


def test_translates_what_the_model_has_learned(translator: Translator) -> None:
    assert [found.text for found in translator.translate(TEXTS, GREEDY)] == [reverse(text) for text in TEXTS]


def test_results_stand_in_the_order_of_the_texts_though_batches_are_sorted(translator: Translator) -> None:
    texts = [TEXTS[0], TEXTS[4], TEXTS[2], TEXTS[1]]
    for batch_tokens in (1, 7, 16, 4096):
        found = translator.translate(texts, GREEDY, batch_tokens=batch_tokens)
        assert [translation.text for translation in found] == [reverse(text) for text in texts]


@pytest.mark.parametrize("empty", ["", " ", "\t", "\u2028", " \n "])
def test_an_empty_text_has_an_empty_translation(translator: Translator, empty: str) -> None:
    found = translator.translate([TEXTS[0], empty, TEXTS[1]], GREEDY)
    assert [translation.text for translation in found] == [reverse(TEXTS[0]), "", reverse(TEXTS[1])]
    assert found[1] == Translation("", 0.0, [])


def test_no_texts_have_no_translations(translator: Translator) -> None:
    assert translator.translate([]) == []
    assert translator.generate([]) == []


def test_one_str_instead_of_a_list_is_an_error(translator: Translator) -> None:
    with pytest.raises(TypeError, match="texts is one str, expected a list"):
        translator.translate("a b c")


def test_the_longest_input_and_the_longest_output_fit(translator: Translator) -> None:
    (found,) = translator.generate([[4] * POSITIONS], GenerationConfig(min_new_tokens=POSITIONS - 1))
    assert len(found[0].ids) == POSITIONS - 1
    text = " ".join("a" * (POSITIONS - 1))
    assert len(translator.encode(text)) == POSITIONS


def test_an_input_that_is_too_long_is_refused_with_both_numbers(translator: Translator) -> None:
    text = " ".join("a" * POSITIONS)
    expected = f"the input has {POSITIONS + 1} tokens, the model has {POSITIONS} positions"
    with pytest.raises(InputTooLongError, match=expected):
        translator.encode(text)
    with pytest.raises(InputTooLongError, match=f"text 2: {expected}"):
        translator.translate(["a b", text])
    with pytest.raises(InputTooLongError, match=expected):
        translator.generate([[4] * (POSITIONS + 1)])


@pytest.mark.parametrize("wrong", [VOCABULARY, -1, 10**12])
def test_an_id_outside_the_vocabulary_is_named_with_its_input(translator: Translator, wrong: int) -> None:
    expected = f"input 2 holds the id {wrong}, the source vocabulary has 0 .. {VOCABULARY - 1}"
    with pytest.raises(GenerationError, match=expected):
        translator.generate([[4, EOS], [5, wrong, EOS]])


def test_an_input_without_ids_is_an_error(translator: Translator) -> None:
    with pytest.raises(GenerationError, match=r"input 1 has no ids, expected at least EOS \(3\)"):
        translator.generate([[]])


@pytest.mark.parametrize("config", [GREEDY, BEAMS], ids=["greedy", "beams"])
def test_every_output_begins_with_the_forced_prefix(translator: Translator, config: GenerationConfig) -> None:
    prefix = (7, 4, 4)
    ids = [translator.encode(text) for text in TEXTS]
    for hypotheses in translator.generate(ids, msgspec.structs.replace(config, decoder_input_ids=prefix)):
        assert all(tuple(found.ids[:3]) == prefix for found in hypotheses)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("bad_words_ids", ((4,), (5, VOCABULARY))),
        ("suppress_tokens", (4, VOCABULARY)),
        ("forced_bos_token_id", VOCABULARY),
        ("forced_eos_token_id", VOCABULARY),
    ],
)
def test_an_option_with_an_id_outside_the_vocabulary_is_an_error(
    translator: Translator, option: str, value: Any
) -> None:
    with pytest.raises(GenerationError, match=f"{option} holds the id {VOCABULARY}, the target vocabulary has 0 .. "):
        translator.generate([[4, EOS]], GenerationConfig(**{option: value}))


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "10", None])
def test_a_batch_of_no_tokens_is_an_error(translator: Translator, wrong: Any) -> None:
    with pytest.raises(GenerationError, match=f"batch_tokens is {wrong!r}, expected an int of at least 1"):
        translator.translate(["a b"], batch_tokens=wrong)


def test_samples_are_the_same_in_every_batch(translator: Translator) -> None:
    sources = random_sources(16, seed=3)
    config = GenerationConfig(do_sample=True, temperature=2.0, num_return_sequences=4, seed=5)
    expected = translator.generate(sources, config)
    assert sum(len({tuple(sampled.ids) for sampled in found}) > 1 for found in expected) > 8
    for batch_tokens in (1, 100):
        found = translator.generate(sources, config, batch_tokens=batch_tokens)
        assert all(same(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("wrong", [VOCABULARY, -1])
def test_a_forced_prefix_outside_the_vocabulary_is_an_error(translator: Translator, wrong: int) -> None:
    with pytest.raises(GenerationError, match=f"decoder_input_ids holds the id {wrong}, the target vocabulary"):
        translator.generate([[4, EOS]], GenerationConfig(decoder_input_ids=(4, wrong)))


def test_a_search_beyond_the_position_table_is_an_error(translator: Translator) -> None:
    with pytest.raises(GenerationError, match=f"up to {POSITIONS + 1} tokens are asked for, the model has {POSITIONS}"):
        translator.generate([[4, EOS]], GenerationConfig(max_length=POSITIONS + 1))


def test_n_best_are_different_and_fall_in_score(translator: Translator) -> None:
    for hypotheses in translator.generate([translator.encode(text) for text in TEXTS], BEAMS):
        assert len(hypotheses) == 3
        assert len({tuple(found.ids) for found in hypotheses}) == 3
        scores = [found.score for found in hypotheses]
        assert scores == sorted(scores, reverse=True)


def test_a_translation_carries_the_score_and_the_alternatives(translator: Translator) -> None:
    (found,) = translator.translate(["a b c d"], BEAMS)
    (hypotheses,) = translator.generate([translator.encode("a b c d")], BEAMS)
    assert found.text == "d c b a"
    assert found.score == hypotheses[0].score < 0
    assert [other.score for other in found.alternatives] == [other.score for other in hypotheses[1:]]
    assert all(other.alternatives == [] and other.text != found.text for other in found.alternatives)


def test_without_a_config_the_bundle_s_own_search_is_used(tiny: Path, translator: Translator) -> None:
    assert translator.defaults.max_length == POSITIONS
    edit_passport(tiny, lambda passport: passport["generation"].update(max_length=3, num_beams=2))
    other = Translator.open(str(tiny), threads=1)
    assert (other.defaults.num_beams, other.defaults.max_length) == (2, 3)
    assert len(other.generate([other.encode("a b c d e")])[0][0].ids) == 2


def random_sources(count: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [[*random.integers(4, VOCABULARY, random.integers(0, 12)).tolist(), EOS] for _ in range(count)]


@pytest.mark.parametrize("config", [GREEDY, BEAMS], ids=["greedy", "beams"])
def test_a_sentence_alone_in_a_batch_and_in_another_order_gets_the_same_ids(
    translator: Translator, config: GenerationConfig
) -> None:
    sources = random_sources(24)
    together = translator.generate(sources, config)
    order = np.random.default_rng(1).permutation(len(sources))
    permuted = translator.generate([sources[index] for index in order], config)
    for place, index in enumerate(order):
        (alone,) = translator.generate([sources[index]], config)
        assert same(alone, together[index])
        assert same(permuted[place], together[index])


def test_batches_of_any_budget_give_the_same_ids(translator: Translator) -> None:
    sources = random_sources(24, seed=2)
    expected = translator.generate(sources, BEAMS)
    for batch_tokens in (1, 40, 200):
        found = translator.generate(sources, BEAMS, batch_tokens=batch_tokens)
        assert all(same(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("config", "rows_each"),
    [
        (GenerationConfig(max_new_tokens=1), 1),
        (GenerationConfig(max_new_tokens=1, num_beams=4), 4),
        (GenerationConfig(max_new_tokens=1, do_sample=True, num_return_sequences=4), 4),
    ],
    ids=["greedy", "beams", "samples"],
)
def test_a_batch_stays_within_its_tokens_beams_and_samples_counted(
    translator: Translator, monkeypatch: pytest.MonkeyPatch, config: GenerationConfig, rows_each: int
) -> None:
    shapes: list[list[int]] = []
    encode = OrtBackend.encode

    def observed(backend: OrtBackend, input_ids: Any, attention_mask: Any) -> Any:
        shapes.append(input_ids.shape())
        return encode(backend, input_ids, attention_mask)

    monkeypatch.setattr(OrtBackend, "encode", observed)
    translator.generate(random_sources(40), config, batch_tokens=96)
    assert sum(rows for rows, _ in shapes) == 40
    assert all(rows * width * rows_each <= 96 for rows, width in shapes)
    assert any(rows > 1 for rows, _ in shapes)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(-5, 300))
def test_token_batches_hold_every_input_once_and_keep_the_budget(lengths: list[int], budget: int) -> None:
    batches = list(token_batches(lengths, budget))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert batch
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= budget
    # Sorted: no batch holds an input that is longer than one of a later batch.
    longest = [lengths[index] for batch in batches for index in batch]
    assert longest == sorted(longest)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30))
def test_token_batches_are_as_full_as_the_budget_allows(lengths: list[int]) -> None:
    batches = list(token_batches(lengths, 60))
    for batch, following in pairwise(batches):
        assert (len(batch) + 1) * lengths[following[0]] > 60


def test_opening_what_is_no_bundle_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="does not exist"):
        Translator.open(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("layers", 2, "begin: present.1.decoder.key is missing"),
        ("vocab_size", 46, "expected float32 (batch_size, decoder_sequence_length, 46)"),
        ("head_dim", 8, "expected float32 (batch_size, 2, encoder_sequence_length, 8)"),
    ],
)
def test_graphs_that_are_not_what_the_passport_says_are_refused_when_they_are_needed(
    tiny: Path, field: str, value: int, expected: str
) -> None:
    edit_passport(tiny, lambda passport: passport["dims"].update({field: value}))
    translator = Translator.open(tiny)
    with pytest.raises(BundleError) as caught:
        translator.translate(TEXTS)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_provider_that_is_really_used_is_told(translator: Translator) -> None:
    assert translator.provider == "cpu"
    wrong: Any = "tpu"
    with pytest.raises(ProviderError, match="provider is 'tpu'"):
        Translator.open(TINY, provider=wrong)


def test_every_error_of_the_package_can_be_caught_as_one(translator: Translator) -> None:
    with pytest.raises(RuntimeFault):
        translator.generate([[]])
    with pytest.raises(RuntimeFault):
        Translator.open("nowhere")


def test_texts_may_come_from_a_generator(translator: Translator) -> None:
    texts = ["a b c", "", "d e f"]
    assert translator.translate(text for text in texts) == translator.translate(texts)


def test_what_is_no_text_is_named_by_its_place(translator: Translator) -> None:
    with pytest.raises(TypeError, match=r"texts\[1\] is bytes; texts\[2\] is NoneType, expected str"):
        translator.translate(["a b", b"c d", None])  # type: ignore[list-item]


def test_a_lone_surrogate_is_refused_by_its_place(translator: Translator) -> None:
    with pytest.raises(TokenizerError, match=r"text 2: the text is not valid Unicode: a lone surrogate at character 3"):
        translator.translate(["a b", "a \ud800"])


def test_more_beams_than_tokens_are_refused(translator: Translator) -> None:
    with pytest.raises(GenerationError, match=f"num_beams is {VOCABULARY + 1}, the model has {VOCABULARY} tokens"):
        translator.translate(["a b c"], GenerationConfig(num_beams=VOCABULARY + 1))
