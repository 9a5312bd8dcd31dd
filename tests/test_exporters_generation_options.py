"""Random combinations of all options: greedy and beam search on ONNX Runtime against transformers."""

import os
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rivals_support import (
    LONGEST,
    SPECIAL,
    VOCABULARY,
    Outputs,
    Rivals,
    assert_same_outputs,
    differences,
    logit_error,
    prompt_length,
    random_marian,
    random_sources,
    reference_margin,
    same_weights,
)

from exporters.reference import TorchBackend
from runtime.generation_config import GenerationConfig

CASES = int(os.environ.get("GENERATION_CASES", "60"))
"""Combinations to compare; the nightly run asks for more, and for other ones every time."""
RULES = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "renormalize_logits",
)
PLAIN = GenerationConfig(max_length=LONGEST)
RAGGED = random_sources(6, seed=7)


@st.composite
def searches(draw: st.DrawFn) -> GenerationConfig:
    """How many beams, how long and from which beginning."""
    beams = draw(st.integers(1, 6))
    prefix = draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=3))
    prompt = prompt_length(GenerationConfig(decoder_input_ids=tuple(prefix)))
    max_length = draw(st.none() | st.integers(prompt + 1, LONGEST))
    both = max_length is None or draw(st.booleans())
    max_new_tokens = draw(st.integers(1, LONGEST - prompt)) if both else None
    longest = max_length or LONGEST if max_new_tokens is None else prompt + max_new_tokens
    min_new_tokens = draw(st.none() | st.integers(0, longest - prompt))
    least = draw(st.just(0) | st.integers(0, longest if min_new_tokens is None else LONGEST))
    return GenerationConfig(
        num_beams=beams,
        num_return_sequences=draw(st.integers(1, beams)),
        length_penalty=draw(st.sampled_from([0.0, 0.6, 1.0, 1.3, 2.0, -0.5, -1.0, -2.0])),
        early_stopping=draw(st.sampled_from([False, True, "never"])),
        max_length=max_length,
        max_new_tokens=max_new_tokens,
        min_length=least,
        min_new_tokens=min_new_tokens,
        decoder_input_ids=tuple(prefix),
    )


@st.composite
def combinations(draw: st.DrawFn) -> tuple[GenerationConfig, list[int], list[int]]:
    """A search with any rules, and for bad words and suppressed tokens: which parts of the plain outputs they are."""
    tokens = st.integers(0, VOCABULARY - 1)
    config = msgspec.structs.replace(
        draw(searches()),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.7, 1.2, 2.5])),
        no_repeat_ngram_size=draw(st.sampled_from([0, 0, 1, 2, 3])),
        forced_bos_token_id=draw(st.none() | tokens),
        forced_eos_token_id=draw(st.none() | st.just(SPECIAL.eos) | tokens),
        renormalize_logits=draw(st.booleans()),
    )
    places = st.lists(st.integers(0, 1000), max_size=4)
    return config, draw(places), draw(places)


def with_words(config: GenerationConfig, plain: Outputs, words: list[int], tokens: list[int]) -> GenerationConfig:
    """`config` that forbids parts of what the plain search found, so that it matters, and pad, as Marian does."""
    rows = [found.ids for outputs in plain for found in outputs]
    parts: list[tuple[int, ...]] = [(token,) for row in rows for token in row if token != SPECIAL.eos]
    parts += [pair for row in rows for pair in pairwise(row)]
    parts += [(*pair, third) for row in rows for pair, third in zip(pairwise(row), row[2:], strict=False)]
    bad = tuple(parts[place * 37 % len(parts)] for place in words) if parts else ()
    every = [token for row in rows for token in row]
    forced = {config.forced_bos_token_id, config.forced_eos_token_id}
    return msgspec.structs.replace(
        config,
        bad_words_ids=(*bad, (SPECIAL.pad,)) if words else (),
        suppress_tokens=tuple({every[place * 37 % len(every)] for place in tokens} - forced),
    )


def test_any_options_together_give_the_outputs_of_transformers(rivals: Rivals, conclude: Callable[[str], None]) -> None:
    error = logit_error(rivals)
    seen: Counter[str] = Counter()

    @settings(max_examples=CASES, deadline=None, derandomize="GENERATION_CASES" not in os.environ)
    @given(combinations(), st.integers(3, 6), st.integers(0, 1000))
    def compare(combination: tuple[GenerationConfig, list[int], list[int]], count: int, seed: int) -> None:
        searched, *parts = combination
        sources = random_sources(count, seed)
        config = with_words(searched, rivals.search(sources, PLAIN), *parts)
        ours, theirs = rivals.search(sources, config), rivals.reference(sources, config)
        different = differences(ours, theirs)
        for sentence in {difference.sentence for difference in different}:
            margin = reference_margin(rivals.theirs, sources[sentence], config)
            assert margin < error, "\n".join([f"{config}: margin {margin}", *(found.text for found in different)])
            seen["explained"] += 1
        seen["cases"] += 1
        seen["outputs"] += sum(map(len, ours))
        seen["ended"] += sum(output.ids[-1] == SPECIAL.eos for outputs in ours for output in outputs)
        seen["changed by rules"] += config != searched and ours != rivals.search(sources, without_rules(config))
        seen.update(name for name in RULES if getattr(config, name) != getattr(PLAIN, name))
        seen["beams"] += config.num_beams > 1

    compare()
    conclude(
        f"search against transformers: {seen['cases']} combinations of options, {seen['outputs']} outputs compared, "
        f"{seen['explained']} differences where the reference's margin is below the logit error of {error:.1e}; "
        + ", ".join(f"{name} {seen[name]}" for name in ("ended", "changed by rules", "beams", *RULES))
    )
    assert seen["outputs"] > 4 * CASES
    assert seen["ended"] > CASES
    assert seen["explained"] <= seen["outputs"] / 100
    assert min(seen[name] for name in ("changed by rules", "beams", *RULES)) > CASES / 5


def without_rules(config: GenerationConfig) -> GenerationConfig:
    """`config` with every rule switched off."""
    return msgspec.structs.replace(config, **{name: getattr(PLAIN, name) for name in RULES})


def test_a_difference_in_the_reference_s_own_scores_is_found_where_it_is_small(rivals: Rivals) -> None:
    """The margin that may explain a difference is a gap, not noise: far above the error for ordinary sentences."""
    for beams in (1, 4):
        margins = [
            reference_margin(rivals.theirs, source, GenerationConfig(num_beams=beams, max_length=LONGEST))
            for source in RAGGED
        ]
        assert all(0 < margin < 1 for margin in margins)
        assert sum(margin > logit_error(rivals) for margin in margins) > 3


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("beams", [1, 4])
def test_a_pad_token_that_scores_high_is_banned_where_transformers_bans_it(
    high_pad: Rivals, beams: int, renormalize: Any
) -> None:
    """Greedy search bans it before log-softmax, beam search after: its share is lost, but for renormalised scores."""
    sources = random_sources(20, seed=11)
    (worst, *_), *_ = high_pad.search(sources, GenerationConfig(num_beams=beams, max_length=LONGEST))
    assert SPECIAL.pad in worst.ids
    config = GenerationConfig(
        num_beams=beams, max_length=LONGEST, bad_words_ids=((SPECIAL.pad,),), renormalize_logits=renormalize
    )
    assert_same_outputs(high_pad, config, sources)


@pytest.fixture
def high_pad(rivals: Rivals) -> Rivals:
    """Models that would put pad nearly everywhere, as Marian's do; in PyTorch, since no export is needed."""
    theirs = random_marian()
    theirs.final_logits_bias[:, SPECIAL.pad] += 9
    ours = TorchBackend(same_weights(theirs))
    return rivals._replace(theirs=theirs, ours=ours)
