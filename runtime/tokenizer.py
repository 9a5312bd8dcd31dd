"""Text to ids and back: SentencePiece pieces and a vocabulary, in the files of transformers' Marian tokenizer."""

import re
from pathlib import Path

import msgspec
import sentencepiece

from .decoding import SpecialIds
from .errors import TokenizerError

SOURCE_PIECES = "source.spm"
TARGET_PIECES = "target.spm"
VOCABULARY = "vocab.json"
SETTINGS = "tokenizer_config.json"
TOKENIZER_FILES = (SOURCE_PIECES, TARGET_PIECES, VOCABULARY, SETTINGS)

_LANGUAGE = re.compile(r"\A(>>.*?<<)", re.DOTALL)


class Tokenizer:
    """Splits source text into ids and joins target ids into text, as transformers' Marian tokenizer does.

    Args:
        folder: Holds `source.spm`, `target.spm` and `vocab.json` (piece to id).

    Raises:
        TokenizerError: a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._source = _pieces(folder / SOURCE_PIECES)
        self._target = _pieces(folder / TARGET_PIECES)
        self._ids = _vocabulary(folder / VOCABULARY)
        self._by_id = {index: piece for piece, index in self._ids.items()}
        self.unknown = self._ids["<unk>"]
        # Marian models without a <s> start from <pad>.
        self.special = SpecialIds(self._ids["<pad>"], self._ids.get("<s>", self._ids["<pad>"]), self._ids["</s>"])
        self._hidden = {*self.special, self.unknown}
        self._special_pieces = re.compile("(" + "|".join(self._by_id[index] for index in self._hidden) + ")")

    @property
    def size(self) -> int:
        """Entries of the vocabulary."""
        return max(self._by_id) + 1

    def encode(self, text: str) -> list[int]:
        """Source ids of `text`, EOS at the end.

        Special tokens written out in `text`, and a language code like `>>fra<<` at its front, become their ids.
        """
        return [*self._lookup(self._source, text), self.special.eos]

    def encode_target(self, text: str) -> list[int]:
        """Target ids of `text`, EOS at the end."""
        return [*self._lookup(self._target, text), self.special.eos]

    def piece(self, index: int) -> str:
        """The piece of one id, as the vocabulary has it."""
        return self._by_id.get(index, f"#{index}")

    def decode(self, ids: list[int]) -> str:
        """The text of target `ids`; special tokens, `<unk>` among them, are left out."""
        pieces = [self._by_id[index] for index in ids if index in self._by_id and index not in self._hidden]
        text: str = self._target.decode_pieces(pieces)
        return text.replace("\u2581", " ").strip()  # SentencePiece's sign for a space

    def _lookup(self, pieces: sentencepiece.SentencePieceProcessor, text: str) -> list[int]:
        found: list[str] = []
        for part in self._special_pieces.split(text):
            if self._special_pieces.fullmatch(part):
                found.append(part)
            else:
                *language, rest = _LANGUAGE.split(part)[-2:]
                found += [*language, *pieces.encode(rest, out_type=str)]
        return [self._ids.get(piece, self.unknown) for piece in found]


def _pieces(path: Path) -> sentencepiece.SentencePieceProcessor:
    if not path.is_file():
        raise TokenizerError(f"{path} is missing: a tokenizer needs {', '.join(TOKENIZER_FILES[:3])}")
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise TokenizerError(f"{path} is not a SentencePiece model: {error}") from None


def _vocabulary(path: Path) -> dict[str, int]:
    if not path.is_file():
        raise TokenizerError(f"{path} is missing: a tokenizer needs {', '.join(TOKENIZER_FILES[:3])}")
    try:
        ids = msgspec.json.decode(path.read_bytes(), type=dict[str, int])
    except (msgspec.DecodeError, OSError) as error:
        raise TokenizerError(f"{path} is not a vocabulary, an object of pieces and ids: {error}") from None
    missing = [piece for piece in ("<pad>", "</s>", "<unk>") if piece not in ids]
    if missing:
        raise TokenizerError(f"{path} has no {' and no '.join(missing)}")
    if len(set(ids.values())) < len(ids) or min(ids.values()) < 0:
        raise TokenizerError(f"{path} is damaged: expected a different id from 0 on for each of its {len(ids)} pieces")
    return ids
