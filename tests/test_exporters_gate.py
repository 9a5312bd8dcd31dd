"""chrF is computed by hand, for what is deployed has no sacrebleu: the two agree on any texts."""

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sacrebleu.metrics.chrf import CHRF

from runtime.parity.gate import chrf
from toolkit.corpus import read_pairs

SAMPLE = Path(__file__).parent / "data/sample-zh-en/test.tsv"
WORDS = st.text("ab c", max_size=12)
"""Few letters, so that texts have something in common."""


def theirs(texts: list[str], references: list[str]) -> float:
    score: float = CHRF().corpus_score(texts, [references]).score
    return score


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4))
def test_texts_of_few_letters(pairs: list[tuple[str, str]]) -> None:
    texts, references = map(list, zip(*pairs, strict=True))
    assume(any("".join(text.split()) for text in references))
    assert chrf(texts, references) == pytest.approx(theirs(texts, references), abs=1e-9)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.text(max_size=30), st.text(min_size=1, max_size=30)), min_size=1, max_size=4))
def test_any_texts(pairs: list[tuple[str, str]]) -> None:
    texts, references = map(list, zip(*pairs, strict=True))
    assume(any("".join(text.split()) for text in references))
    assert chrf(texts, references) == pytest.approx(theirs(texts, references), abs=1e-9)


def test_real_sentences_and_damaged_ones() -> None:
    pairs = read_pairs([SAMPLE])[:60]
    references = [pair.target for pair in pairs]
    sources = [pair.source for pair in pairs]
    shuffled = references[1:] + references[:1]
    halves = [text[: len(text) // 2] for text in references]
    emptied = ["" if place % 3 else text for place, text in enumerate(references)]
    for texts in (references, sources, shuffled, halves, emptied, [""] * len(references)):
        assert chrf(texts, references) == pytest.approx(theirs(texts, references), abs=1e-9)
        assert chrf(references, texts) == pytest.approx(theirs(references, texts), abs=1e-9)
    assert 0 < chrf(shuffled, references) < chrf(halves, references) < chrf(references, references)


def test_where_sacrebleu_has_nothing_to_count_equal_texts_are_100() -> None:
    """It says 0, which would fail an exam whose reference says nothing and gets the same."""
    assert theirs(["", " "], ["", " "]) == 0
    assert chrf(["", " "], ["", " "]) == 100
