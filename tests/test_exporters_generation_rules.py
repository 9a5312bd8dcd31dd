"""Each rule alone against the class of transformers that it stands for, and the order in which they are applied."""

from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rivals_support import SPECIAL, VOCABULARY, Rivals, hugging_face, transformers_options

from runtime.backend import FloatArray, IntArray
from runtime.decoding import Limits
from runtime.generation_config import GenerationConfig
from runtime.logit_rules import (
    Rule,
    apply_rules,
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

V = 12
"""Few tokens, so that sequences repeat themselves and words are met."""
processors: Any = hugging_face.generation.logits_process
WORDS = [[3], [5], [1, 2], [2, 2], [4, 0], [0, 1, 2], [1, 1, 1], [3, 2, 1, 0]]

PAIRS: dict[str, tuple[Rule, Any]] = {
    **{
        f"repetition_penalty {penalty}": (
            partial(penalize_repetition, penalty=penalty),
            processors.RepetitionPenaltyLogitsProcessor(penalty),
        )
        for penalty in (0.5, 1.3, 4.0)
    },
    **{
        f"no_repeat_ngram_size {size}": (
            partial(forbid_repeated_ngrams, size=size),
            processors.NoRepeatNGramLogitsProcessor(size),
        )
        for size in (1, 2, 3, 4)
    },
    "bad_words_ids": (
        partial(forbid_words, words=group_words(WORDS)),
        processors.NoBadWordsLogitsProcessor(WORDS, eos_token_id=0),
    ),
    "bad_words_ids, long ones only": (
        partial(forbid_words, words=group_words(WORDS[2:])),
        processors.NoBadWordsLogitsProcessor(WORDS[2:], eos_token_id=0),
    ),
    "min_length": (partial(forbid_early_end, shortest=4, eos=2), processors.MinLengthLogitsProcessor(4, 2)),
    "min_new_tokens": (
        partial(forbid_early_end, shortest=2 + 3, eos=2),
        processors.MinNewTokensLengthLogitsProcessor(2, 3, 2),
    ),
    "forced_bos_token_id": (partial(force_at, token=7, place=1), processors.ForcedBOSTokenLogitsProcessor(7)),
    "forced_eos_token_id": (partial(force_at, token=7, place=4), processors.ForcedEOSTokenLogitsProcessor(5, 7)),
    "suppress_tokens": (
        partial(forbid_tokens, tokens=(3, 0, 11)),
        processors.SuppressTokensLogitsProcessor([3, 0, 11]),
    ),
    "renormalize_logits": (renormalize, processors.LogitNormalization()),
    **{
        f"temperature {value}": (
            partial(divide_by_temperature, temperature=value),
            processors.TemperatureLogitsWarper(value),
        )
        for value in (0.1, 0.7, 3.0)
    },
    **{
        f"top_k {count}": (partial(keep_top_k, count=count), processors.TopKLogitsWarper(count))
        for count in (1, 3, V, V + 5)
    },
    **{
        f"top_p {mass}, {least}": (
            partial(keep_top_p, mass=mass, at_least=least),
            processors.TopPLogitsWarper(mass, min_tokens_to_keep=least),
        )
        for mass in (0.0, 0.3, 0.9, 0.999)
        for least in (1, 2)
    },
}


@st.composite
def situations(draw: st.DrawFn) -> tuple[FloatArray, IntArray]:
    """Scores of some rows, several of them impossible, and the sequences before them."""
    random = np.random.default_rng(draw(st.integers(0, 10_000)))
    rows, length = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    scores = random.normal(0, 3, (rows, V)).astype(np.float32)
    # One score a row stays, and there are no ties: which of two equal ones goes first is nobody's promise.
    scores[random.random((rows, V)) < draw(st.sampled_from([0.0, 0.3]))] = -np.inf
    scores[:, random.integers(V)] = 0.125
    return scores, random.integers(0, draw(st.sampled_from([3, V])), (rows, length))


@pytest.mark.parametrize("name", PAIRS)
def test_a_rule_does_what_the_processor_of_transformers_does(name: str) -> None:
    rule, processor = PAIRS[name]
    changed = 0

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(situations())
    def compare(situation: tuple[FloatArray, IntArray]) -> None:
        nonlocal changed
        scores, sequences = situation
        before = scores.copy(), sequences.copy()
        ours = rule(scores, sequences)
        theirs = processor(torch.from_numpy(sequences), torch.from_numpy(scores.copy())).numpy()
        np.testing.assert_array_equal(np.isneginf(ours), np.isneginf(theirs))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        assert ours.dtype == np.float32
        # Pure: what came in is as it was.
        np.testing.assert_array_equal(scores, before[0])
        np.testing.assert_array_equal(sequences, before[1])
        changed += not np.array_equal(ours, scores)

    compare()
    assert changed > 10 or name == f"top_k {V}" or name == f"top_k {V + 5}"


FULL = GenerationConfig(
    repetition_penalty=1.7,
    no_repeat_ngram_size=2,
    bad_words_ids=((3,), (1, 2), (SPECIAL.pad,)),
    min_length=4,
    forced_bos_token_id=9,
    forced_eos_token_id=8,
    suppress_tokens=(4, 5),
    renormalize_logits=True,
    do_sample=True,
    temperature=0.5,
    top_k=20,
    top_p=0.9,
)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("length", range(1, 8))
def test_all_rules_together_do_what_all_processors_do_in_the_order_of_transformers(
    rivals: Rivals, length: int, beams: int
) -> None:
    config = msgspec.structs.replace(FULL, num_beams=beams)
    theirs = hugging_face.GenerationConfig(
        **transformers_options(config), max_length=8, eos_token_id=SPECIAL.eos, decoder_start_token_id=SPECIAL.start
    )
    rivals.theirs._prepare_special_tokens(theirs)
    random = np.random.default_rng(length)
    scores = random.normal(0, 3, (50, VOCABULARY)).astype(np.float32)
    sequences = random.integers(0, 6, (50, length))
    listed = rivals.theirs._get_logits_processor(theirs, input_ids_seq_length=1)
    ours = apply_rules(logit_rules(config, Limits((SPECIAL.start,), 4, 8), SPECIAL), scores, sequences)
    expected = listed(torch.from_numpy(sequences), torch.from_numpy(scores)).numpy()
    np.testing.assert_array_equal(np.isneginf(ours), np.isneginf(expected))
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)
