"""The tokenizer against transformers: the same folder gives the same ids and the same text."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from nasty_text import NASTY
from tokenizer_support import SENTENCES, write_opus, write_own

from runtime.tokenizer import Tokenizer, open_tokenizer


class Rivals(NamedTuple):
    """The same folder opened twice."""

    ours: Tokenizer
    theirs: Any


@pytest.fixture(scope="module", params=[write_own, write_opus])
def rivals(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rivals:
    folder = tmp_path_factory.mktemp("tokenizer")
    write: Callable[[Path], None] = request.param
    write(folder)
    with warnings.catch_warnings():
        # That package would clean up punctuation in a method that no encoding calls.
        warnings.filterwarnings("ignore", message="Recommended: pip install sacremoses")
        return Rivals(open_tokenizer(folder), transformers.MarianTokenizer.from_pretrained(folder))


def assert_same_both_ways(rivals: Rivals, text: str) -> None:
    ids = rivals.ours.encode(text)
    target_ids = rivals.ours.encode_target(text)
    assert ids == rivals.theirs(text).input_ids
    assert target_ids == rivals.theirs(text_target=text).input_ids
    for each in (ids, target_ids):
        assert rivals.ours.decode(each) == rivals.theirs.decode(each, skip_special_tokens=True)


@pytest.mark.parametrize("text", [*SENTENCES, *NASTY.values()], ids=[*map(str, range(len(SENTENCES))), *NASTY])
def test_ids_and_text_are_those_of_transformers(rivals: Rivals, text: str) -> None:
    assert_same_both_ways(rivals, text)


fragments = st.sampled_from([*SENTENCES, *NASTY.values(), "<s>", "</s>", "<unk>", "<pad>", ">>fra<<", ">>", "<<", " "])


@settings(deadline=None, derandomize=True)
@given(text=st.text(max_size=30) | st.lists(fragments | st.text(max_size=4), max_size=4).map("".join))
def test_ids_and_text_of_any_input_are_those_of_transformers(rivals: Rivals, text: str) -> None:
    assert_same_both_ways(rivals, text)


@settings(deadline=None, derandomize=True)
@given(data=st.data())
def test_text_of_any_ids_is_that_of_transformers(rivals: Rivals, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, rivals.ours.size - 1), max_size=20))
    assert rivals.ours.decode(ids) == rivals.theirs.decode(ids, skip_special_tokens=True)


def test_special_ids_are_those_of_transformers(rivals: Rivals) -> None:
    special = rivals.ours.special
    assert (special.pad, special.eos) == (rivals.theirs.pad_token_id, rivals.theirs.eos_token_id)
    assert rivals.ours.unknown == rivals.theirs.unk_token_id
    assert special.start in (rivals.theirs.bos_token_id, special.pad)
    assert rivals.ours.size == len(rivals.theirs)
