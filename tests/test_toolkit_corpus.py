"""Reading parallel text and training the tokenizer: what is a line, and how damage is reported."""

from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.config import TokenizerConfig
from toolkit.corpus import TextPair, encode_pairs, read_pairs, train_tokenizer

PAIRS = [TextPair(f"a b c {letter}", f"{letter} c b a") for letter in "defghij"]
SMALL = TokenizerConfig(vocab_size=40, character_coverage=1.0)


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "text.tsv"
    path.write_bytes(content)
    return path


def message(path: Path) -> str:
    with pytest.raises(click.ClickException) as caught:
        read_pairs([path])
    assert "\n" not in caught.value.message
    return caught.value.message.replace(str(path), "text.tsv")


def test_pairs_of_several_files_come_in_order(tmp_path: Path) -> None:
    first = write(tmp_path, b"a\tb\nc\td\n")
    second = tmp_path / "second.tsv"
    second.write_bytes("我\tI".encode())  # no newline at the end
    assert read_pairs([first, second, first]) == [("a", "b"), ("c", "d"), ("我", "I"), ("a", "b"), ("c", "d")]


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e", "\r"])
def test_only_newlines_end_a_line(tmp_path: Path, inside: str) -> None:
    path = write(tmp_path, f"a{inside}a\tb\nc\td{inside}d\n".encode())
    assert read_pairs([path]) == [(f"a{inside}a", "b"), ("c", f"d{inside}d")]


@given(
    st.lists(
        st.tuples(*[st.text(st.characters(codec="utf-8", exclude_characters="\t\n"), min_size=1)] * 2), min_size=1
    ),
    st.sampled_from(["\n", "\r\n"]),
)
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]], end: str
) -> None:
    # A carriage return before the newline belongs to the line's end, a byte order mark to the file's beginning.
    pairs = [(f"<{source}", f"{target}>") for source, target in pairs]
    path = write(tmp_path_factory.mktemp("pairs"), "".join("\t".join(pair) + end for pair in pairs).encode())
    assert read_pairs([path]) == pairs


def test_windows_line_ends_and_byte_order_mark_are_no_text(tmp_path: Path) -> None:
    path = write(tmp_path, b"\xef\xbb\xbfa\tb\r\nc\td\r\n")
    assert read_pairs([path]) == [("a", "b"), ("c", "d")]


def test_a_missing_file_says_where_to_look(tmp_path: Path) -> None:
    assert message(tmp_path / "text.tsv") == "text.tsv does not exist: set data.folder to where the text is"


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    assert message(write(tmp_path, b"")) == "text.tsv is empty, expected lines of source<TAB>target"


def test_bytes_that_are_not_utf8_are_found_by_line(tmp_path: Path) -> None:
    assert message(write(tmp_path, b"a\tb\nc\t\xe4d\n")) == "text.tsv, line 2: expected UTF-8 text, got byte 0xe4"


@pytest.mark.parametrize(("line", "columns"), [("no tab", 1), ("a\tb\tc", 3), ("", 1), ("a\t ", 2), ("\tb", 2)])
def test_a_line_that_is_no_pair_is_found_by_number(tmp_path: Path, line: str, columns: int) -> None:
    found = message(write(tmp_path, f"a\tb\n{line}\nc\td\n".encode()))
    expected = "text.tsv, line 2: expected source<TAB>target, both with text"
    assert found == f"{expected}, got {columns} column(s): {line!r}"


def test_more_bad_lines_are_counted(tmp_path: Path) -> None:
    assert message(write(tmp_path, b"x\na\tb\ny\nz\n")).endswith(
        "line 1: expected source<TAB>target, both with text, got 1 column(s): 'x' (2 more such lines)"
    )


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory"):
        read_pairs([tmp_path])


def test_the_trained_tokenizer_splits_and_joins_the_text(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(PAIRS, SMALL, tmp_path)
    for pair in PAIRS:
        assert tokenizer.decode(tokenizer.encode_target(pair.target)) == pair.target
        assert tokenizer.unknown not in tokenizer.encode(pair.source)
    assert (tokenizer.special.pad, tokenizer.special.start, tokenizer.special.eos) == (0, 2, 3)


def test_the_same_text_gives_the_same_tokenizer(tmp_path: Path) -> None:
    for name in ("first", "second"):
        train_tokenizer(PAIRS, SMALL, tmp_path / name)
    assert (tmp_path / "first/vocab.json").read_bytes() == (tmp_path / "second/vocab.json").read_bytes()


def test_a_vocabulary_smaller_than_the_alphabet_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(click.ClickException, match=r"^tokenizer: .*Vocabulary size is smaller") as caught:
        train_tokenizer(PAIRS, TokenizerConfig(vocab_size=5), tmp_path)
    assert "\n" not in caught.value.message


def test_long_pairs_are_left_out_as_text_and_as_ids(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(PAIRS, SMALL, tmp_path)
    pairs = [TextPair("a", "b"), TextPair("a b c a b c", "a"), TextPair("a", "a b c a b c"), TextPair("b", "a")]
    encoded = encode_pairs(pairs, tokenizer, 5)
    assert encoded.texts == [pairs[0], pairs[3]]
    assert [len(ids.source) for ids in encoded.ids] == [len(tokenizer.encode("a")), len(tokenizer.encode("b"))]
    assert all(ids.source[-1] == ids.target[-1] == tokenizer.special.eos for ids in encoded.ids)
