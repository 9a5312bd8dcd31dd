"""What an export starts from: a checkpoint of ours, or a model of another library; its text side is the same files."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import sentencepiece

from models.checkpoint import load_checkpoint
from models.config import ModelConfig
from models.importers import CHECKPOINT, detect, import_model
from models.transformer import Transformer
from runtime.bundle import PASSPORT
from runtime.text.marian import TARGET_VOCABULARY, MarianTokenizer
from runtime.tokenizer import SOURCE_PIECES, TARGET_PIECES, VOCABULARY, Tokenizer, open_tokenizer, tokenizer_files

from .errors import ExportError

SENTENCES = "sentences.txt"
"""In a checkpoint: source sentences, one a line, that the exam asks for."""
CONFIG = "config.json"
"""In a checkpoint that was imported: the settings of the library that it comes from."""
OWN_PIECES = 0.5
"""Least share of a SentencePiece model's pieces that its vocabulary knows. OPUS-MT's lack a few, a stranger's most."""
WORDS = (4, 9, 15)
"""Words in each sentence that is made up for an exam."""
FREQUENT = 4000
"""Entries at the front of a vocabulary that words are looked for in."""


class Source(NamedTuple):
    """A model on its way into a bundle."""

    model: Transformer
    settings: dict[str, Any]
    """Fields of the `config.json` that it came with; empty where it came with none."""
    tokenizer: Tokenizer
    foreign: bool
    """Whether another library saved it, now or before it was imported."""


def open_source(folder: Path) -> Source:
    """The model and the tokenizer in `folder`, whatever library saved them.

    Raises:
        ModelError: the model cannot be loaded or imported.
        TokenizerError: a file of the tokenizer is damaged.
        ExportError: the folder is a bundle, or its tokenizer is not the model's or of a kind that the runtime does not
            read.
    """
    if (folder / PASSPORT).exists():  # whose config.json is that of a model, for other programs to read
        raise ExportError(f"{folder} is not a checkpoint but a bundle: give what it was exported from")
    own = detect(folder) == CHECKPOINT
    # The small files first: what is wrong with them need not wait for gigabytes of weights.
    tokenizer = _tokenizer(folder)
    if own:
        model, settings = load_checkpoint(folder), _kept_settings(folder)
    else:
        _, model, settings = import_model(folder)
    foreign = bool(settings) or not own
    problems = [*_wrong_sizes(tokenizer, model.config, foreign=foreign)]
    if foreign:
        problems += [*_wrong_ids(tokenizer, model.config), *_strange_pieces(folder, tokenizer)]
    if problems:
        raise ExportError(f"{folder}: the tokenizer is not the model's: {'; '.join(problems)}")
    return Source(model, settings, tokenizer, foreign)


def _kept_settings(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / CONFIG
    if not path.is_file():
        return {}
    try:
        settings: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ExportError(f"{path} is not a JSON object: {error}") from None
    return settings


def _tokenizer(folder: Path) -> Tokenizer:
    for name in tokenizer_files(folder):
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise ExportError(f"{folder / name} leads out of the folder, to {(folder / name).resolve()}")
    return open_tokenizer(folder)


def _wrong_sizes(tokenizer: Tokenizer, config: ModelConfig, *, foreign: bool) -> Iterator[str]:
    """Ids without an embedding. Embeddings without a piece are common outside of Marian, and in models of our own."""
    exact = foreign and isinstance(tokenizer, MarianTokenizer)
    sides = (
        ("source", tokenizer.size, config.encoder_vocab_size),
        ("target", tokenizer.target_size, config.vocab_size),
    )
    for side, size, wanted in sides:
        if (size > wanted and (side == "source" or foreign)) or (exact and size != wanted):
            yield f"the tokenizer has {size} entries, the model's {side} vocabulary {wanted}"


def _wrong_ids(tokenizer: Tokenizer, config: ModelConfig) -> Iterator[str]:
    for name, ours in (("pad", config.pad_token_id), ("eos", config.eos_token_id)):
        theirs = getattr(tokenizer.special, name)
        if theirs != ours:
            yield f"the tokenizer has {name} at {theirs}, the model's {name}_token_id is {ours}"


def _strange_pieces(folder: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """Marian keeps pieces and their ids in files of their own, which can be of different models."""
    if not isinstance(tokenizer, MarianTokenizer):
        return
    for name, vocabulary in ((SOURCE_PIECES, VOCABULARY), (TARGET_PIECES, _target_vocabulary(folder))):
        known = msgspec.json.decode((folder / vocabulary).read_bytes(), type=dict[str, int]).keys()
        own = _ordinary_pieces(folder / name)
        found = sum(piece in known for piece in own)
        if found < OWN_PIECES * len(own):
            yield f"{name} does not match {vocabulary}: of its {len(own)} pieces only {found} are there"


def _target_vocabulary(folder: Path) -> str:
    return TARGET_VOCABULARY if (folder / TARGET_VOCABULARY).is_file() else VOCABULARY


def _ordinary_pieces(path: Path) -> list[str]:
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    special = (pieces.is_control, pieces.is_unknown, pieces.is_byte, pieces.is_unused)
    return [
        pieces.id_to_piece(index)
        for index in range(pieces.get_piece_size())
        if not any(is_special(index) for is_special in special)
    ]


def exam_sentences(folder: Path, source: Source, path: Path | None = None) -> dict[str, list[int]]:
    """Sentences and their source ids: those in `path`, else the folder's own, else made up for what has none.

    Raises:
        ExportError: there are none, they are no text, or one is too long.
    """
    positions = source.model.config.max_positions
    if path is None and source.foreign and not (folder / SENTENCES).is_file():
        path, lines = folder / VOCABULARY, made_up(source.tokenizer, positions)
        if not any(lines):
            raise ExportError(f"{path} has no words to make sentences for the exam of: give some with --sentences")
    else:
        path = path or folder / SENTENCES
        lines = _read_lines(path)
    chosen = {line: source.tokenizer.encode(line) for line in lines if line}
    if not chosen:
        raise ExportError(f"{path} holds no sentence")
    longest = max(map(len, chosen.values()))
    if longest > positions:
        raise ExportError(f"{path}: a sentence has {longest} tokens, the model has {positions} positions")
    return chosen


def _read_lines(path: Path) -> list[str]:
    if not path.is_file():
        raise ExportError(f"{path} is missing: one source sentence a line, for the exam")
    try:
        return [line.strip() for line in path.read_text("utf-8").split("\n")]
    except UnicodeDecodeError as error:
        raise ExportError(f"{path} is not UTF-8: {error}") from None


def made_up(tokenizer: Tokenizer, longest: int, lengths: Sequence[int] = WORDS) -> list[str]:
    """Sentences of words that `tokenizer` knows, at most `longest` tokens each; always the same ones.

    A model from elsewhere brings no text, and we know neither its languages nor its writing. But its vocabulary begins
    with its most frequent pieces. Those that are words make sentences that mean nothing, yet lead the model through
    embeddings that it uses, and the exam compares the model with itself. Words are dealt out in turn, so that the
    sentences differ.
    """
    counts: dict[str, int] = {}
    for index in range(min(tokenizer.size, FREQUENT)):
        word = tokenizer.decode([index])
        if word.isalpha() and tokenizer.unknown not in (ids := tokenizer.encode(word)):
            counts.setdefault(word, len(ids))
    # A word of several pieces may be a mere letter from the middle of others.
    words = sorted(counts, key=counts.__getitem__)[: sum(lengths)]
    sentences = []
    for place, length in enumerate(lengths):
        chosen = words[place :: len(lengths)][:length]
        while chosen and len(tokenizer.encode(" ".join(chosen))) > longest:
            chosen.pop()
        sentences.append(" ".join(chosen))
    return sentences
