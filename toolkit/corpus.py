"""Parallel text on disk: reading pairs, and training the SentencePiece model that splits them."""

import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import sentencepiece

from models.data import Pair
from runtime.tokenizer import SETTINGS, SOURCE_PIECES, TARGET_PIECES, VOCABULARY, Tokenizer, open_tokenizer

from .config import TokenizerConfig


class TextPair(NamedTuple):
    """One line of parallel text."""

    source: str
    target: str


class Encoded(NamedTuple):
    """Parallel text and its ids, pair by pair."""

    texts: list[TextPair]
    ids: list[Pair]


def read_pairs(paths: Iterable[Path]) -> list[TextPair]:
    """All pairs of the files in `paths`, in order.

    Raises:
        OSError: a file cannot be read.
        click.ClickException: a file is missing, empty or not UTF-8, or a line is not `source<TAB>target`.
    """
    pairs = []
    for path in paths:
        lines = _lines(path)
        if not lines:
            raise click.ClickException(f"{path} is empty, expected lines of source<TAB>target")
        columns = [line.split("\t") for line in lines]
        wrong = [place for place, sides in enumerate(columns) if len(sides) != 2 or not all(map(str.strip, sides))]
        if wrong:
            first = wrong[0]
            more = f" ({len(wrong) - 1:,} more such lines)" if len(wrong) > 1 else ""
            raise click.ClickException(
                f"{path}, line {first + 1}: expected source<TAB>target, both with text, "
                f"got {len(columns[first])} column(s): {lines[first][:60]!r}{more}"
            )
        pairs += [TextPair(*sides) for sides in columns]
    return pairs


def _lines(path: Path) -> list[str]:
    """Lines end in LF or CR LF and nowhere else: text may hold U+2028, form feeds and the like."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise click.ClickException(f"{path} does not exist: set data.folder to where the text is") from None
    try:
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise click.ClickException(
            f"{path}, line {number}: expected UTF-8 text, got byte {error.object[error.start]:#04x}"
        ) from None
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def train_tokenizer(pairs: Sequence[TextPair], config: TokenizerConfig, folder: Path) -> Tokenizer:
    """Train one SentencePiece model on both sides of `pairs` and write the tokenizer's files to `folder`.

    Raises:
        click.ClickException: SentencePiece cannot make such a model of this text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = io.BytesIO()  # a file's path would be written into it
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([side for pair in pairs for side in pair]),
            model_writer=model,
            vocab_size=config.vocab_size,
            character_coverage=config.character_coverage,
            normalization_rule_name=config.normalization,
            hard_vocab_limit=False,
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            num_threads=1,  # more would make the pieces depend on the machine
            minloglevel=2,
        )
    except RuntimeError as error:
        raise click.ClickException(f"tokenizer: SentencePiece refuses: {error}") from None
    for name in (SOURCE_PIECES, TARGET_PIECES):
        (folder / name).write_bytes(model.getvalue())
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    vocabulary = {pieces.id_to_piece(index): index for index in range(pieces.get_piece_size())}
    (folder / VOCABULARY).write_text(json.dumps(vocabulary, ensure_ascii=False, indent=0), "utf-8")
    settings = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": False, "bos_token": "<s>"}
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2), "utf-8")
    return open_tokenizer(folder)


def encode_pairs(pairs: Sequence[TextPair], tokenizer: Tokenizer, max_tokens: int) -> Encoded:
    """Ids of `pairs`; those with a side of more than `max_tokens` ids are left out."""
    texts, ids = [], []
    for pair in pairs:
        encoded = Pair(tokenizer.encode(pair.source), tokenizer.encode_target(pair.target))
        if max(map(len, encoded)) <= max_tokens:
            texts.append(pair)
            ids.append(encoded)
    return Encoded(texts, ids)
