"""The tokenizer: round trips, unknown and special pieces, and files that are missing or damaged."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_support import LANGUAGES, SENTENCES, write_json, write_opus, write_own

from runtime.errors import TokenizerError
from runtime.tokenizer import SOURCE_PIECES, TARGET_PIECES, VOCABULARY, Tokenizer, open_tokenizer

deterministic = settings(deadline=None, derandomize=True)


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    write_own(folder)
    return folder


@pytest.fixture(scope="module")
def own(own_folder: Path) -> Tokenizer:
    return open_tokenizer(own_folder)


@pytest.fixture(scope="module")
def opus(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("opus")
    write_opus(folder)
    return open_tokenizer(folder)


@pytest.fixture
def folder(own_folder: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    for file in own_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


# Text to ids and back.

CHARACTERS = "".join(sorted({character for sentence in SENTENCES for character in sentence} - {" "}))
texts = st.lists(st.text(CHARACTERS, min_size=1, max_size=6), max_size=6).map(" ".join)


@pytest.mark.parametrize("text", SENTENCES)
def test_known_sentences_survive_the_round_trip(own: Tokenizer, text: str) -> None:
    # SentencePiece's normalisation makes full-width punctuation half-width; the rest comes back as it was.
    narrow = text.translate(str.maketrans("？", "?"))
    assert own.decode(own.encode(text)) == own.decode(own.encode_target(text)) == narrow


@deterministic
@given(text=texts)
def test_any_text_of_known_characters_survives_the_round_trip(own: Tokenizer, text: str) -> None:
    narrow = text.translate(str.maketrans("？", "?"))
    assert own.decode(own.encode(text)) == narrow
    assert own.encode(narrow) == own.encode(text)


@deterministic
@given(text=st.text(max_size=40))
def test_every_text_has_ids_of_the_vocabulary_that_end_in_eos(own: Tokenizer, opus: Tokenizer, text: str) -> None:
    for tokenizer in (own, opus):
        for ids in (tokenizer.encode(text), tokenizer.encode_target(text)):
            assert ids[-1] == tokenizer.special.eos
            assert all(0 <= index < tokenizer.size for index in ids)
            tokenizer.decode(ids)


@deterministic
@given(text=texts)
def test_spaces_around_and_between_words_do_not_count(own: Tokenizer, text: str) -> None:
    assert own.encode("  " + text.replace(" ", " \t ") + " \n") == own.encode(text)


@pytest.mark.parametrize("text", [*SENTENCES, "the cat 猪", "猪 the cat"])
def test_decoded_text_has_no_space_at_its_ends_and_no_signs_of_spaces(
    own: Tokenizer, opus: Tokenizer, text: str
) -> None:
    for tokenizer in (own, opus):
        for ids in (tokenizer.encode(text), tokenizer.encode_target(text)):
            decoded = tokenizer.decode(ids)
            assert decoded == decoded.strip()
            assert "▁" not in decoded


def test_an_empty_text_is_eos_alone(own: Tokenizer, opus: Tokenizer) -> None:
    for tokenizer in (own, opus):
        assert tokenizer.encode("") == tokenizer.encode_target("") == [tokenizer.special.eos]
        assert tokenizer.encode("  ") == [tokenizer.special.eos]
        assert tokenizer.decode([]) == tokenizer.decode([tokenizer.special.eos]) == ""


def test_source_and_target_are_split_by_their_own_pieces(opus: Tokenizer) -> None:
    text = "The cat sat on the mat"
    assert len(opus.encode(text)) < len(opus.encode_target(text))


# Unknown and special pieces.


def test_a_character_that_was_never_seen_is_unknown_and_leaves_no_trace_in_text(own: Tokenizer) -> None:
    ids = own.encode("the cat猪")
    assert ids.count(own.unknown) == 1
    assert own.decode(ids) == "the cat"


def test_a_piece_that_the_vocabulary_lacks_is_unknown(folder: Path) -> None:
    vocabulary = json.loads((folder / VOCABULARY).read_text("utf-8"))
    del vocabulary["爱"]
    write_json(folder / VOCABULARY, vocabulary)
    tokenizer = open_tokenizer(folder)
    assert tokenizer.encode("爱").count(tokenizer.unknown) == 1
    assert tokenizer.size == max(vocabulary.values()) + 1


@deterministic
@given(text=texts, places=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 4)), max_size=6))
def test_special_and_foreign_ids_are_hidden_wherever_they_stand(
    own: Tokenizer, text: str, places: list[tuple[int, int]]
) -> None:
    hidden = [*own.special, own.unknown, own.size + 5]
    ids = own.encode(text)
    for place, which in places:
        ids.insert(place % (len(ids) + 1), hidden[which])
    assert own.decode(ids) == own.decode(own.encode(text))


def test_a_vocabulary_without_a_start_piece_starts_from_pad(own: Tokenizer, opus: Tokenizer) -> None:
    assert own.special == (0, 2, 3)
    assert opus.special == (opus.size - 1, opus.size - 1, 0)


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_language_code_at_the_front_is_one_id(opus: Tokenizer, language: str) -> None:
    code, *rest = opus.encode(f"{language} the cat")
    assert opus.encode(f"{language}the cat") == [code, *rest]
    assert rest == opus.encode("the cat")
    assert code not in (opus.unknown, *opus.special, *rest)
    assert code not in opus.encode(f"the cat {language}")


def test_an_unknown_language_code_is_unknown(opus: Tokenizer) -> None:
    assert opus.encode(">>xxx<< the cat") == [opus.unknown, *opus.encode("the cat")]


@pytest.mark.parametrize("piece", ["<pad>", "</s>", "<unk>", "<s>"])
def test_a_special_piece_written_out_is_its_id(own: Tokenizer, piece: str) -> None:
    ids = {"<pad>": own.special.pad, "</s>": own.special.eos, "<unk>": own.unknown, "<s>": own.special.start}
    assert own.encode(f"the {piece} cat") == [*own.encode("the")[:-1], ids[piece], *own.encode("cat")]


# Files.


@pytest.mark.parametrize("name", [SOURCE_PIECES, TARGET_PIECES, VOCABULARY])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(TokenizerError) as caught:
        open_tokenizer(folder)
    assert str(caught.value) == f"{folder / name} is missing: a tokenizer needs source.spm, target.spm, vocab.json"


@pytest.mark.parametrize("content", [b"", b"no model", bytes(range(256))], ids=["empty", "text", "bytes"])
@pytest.mark.parametrize("name", [SOURCE_PIECES, TARGET_PIECES])
def test_a_damaged_model_is_named_in_one_line(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        open_tokenizer(folder)
    assert str(caught.value).startswith(f"{folder / name} is not a SentencePiece model: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [SOURCE_PIECES, TARGET_PIECES])
def test_a_truncated_model_is_an_error(folder: Path, name: str) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:-7])
    with pytest.raises(TokenizerError, match=name):
        open_tokenizer(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a vocabulary, an object of pieces and ids: Input data was truncated"),
        (b'{"<pad>": 0', "is not a vocabulary"),
        (b"[]", "is not a vocabulary, an object of pieces and ids: Expected `object`, got `array`"),
        (b'{"<pad>": "0"}', "is not a vocabulary, an object of pieces and ids: Expected `int`, got `str`"),
        (b'{"\xff": 1}', "is not a vocabulary"),
        (b'{"<pad>": 0, "a": 1}', "has no </s> and no <unk>"),
        (b"{}", "has no <pad> and no </s> and no <unk>"),
        (b'{"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 2}', "expected a different id from 0 on for each of its 4 pieces"),
        (b'{"<pad>": 0, "</s>": -1, "<unk>": 2}', "expected a different id from 0 on for each of its 3 pieces"),
    ],
    ids=str,
)
def test_a_damaged_vocabulary_is_named_in_one_line(folder: Path, content: bytes, message: str) -> None:
    (folder / VOCABULARY).write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        open_tokenizer(folder)
    assert str(caught.value).startswith(f"{folder / VOCABULARY} ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
