"""Text to ids and back: SentencePiece pieces looked up in a vocabulary, in the file layout of transformers' Marian tokenizer."""

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


class Tokenizer:
    """Splits source text into ids and joins target ids into text.

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
        missing = [piece for piece in ("<pad>", "</s>", "<unk>") if piece not in self._ids]
        if missing:
            raise TokenizerError(f"{folder / VOCABULARY} has no {' and no '.join(missing)}")
        self.unknown = self._ids["<unk>"]
        # Marian models without a <s> start from <pad>.
        self.special = SpecialIds(self._ids["<pad>"], self._ids.get("<s>", self._ids["<pad>"]), self._ids["</s>"])
        self._hidden = {*self.special}

    @property
    def size(self) -> int:
        """Entries of the vocabulary."""
        return max(self._by_id) + 1

    def encode(self, text: str) -> list[int]:
        """Source ids of `text`, EOS at the end."""
        return [*self._lookup(self._source, text), self.special.eos]

    def encode_target(self, text: str) -> list[int]:
        """Target ids of `text`, EOS at the end."""
        return [*self._lookup(self._target, text), self.special.eos]

    def decode(self, ids: list[int]) -> str:
        """The text of target `ids`; special tokens are left out."""
        pieces = [self._by_id.get(index, "<unk>") for index in ids if index not in self._hidden]
        text: str = self._target.decode_pieces(pieces)
        return text

    def _lookup(self, pieces: sentencepiece.SentencePieceProcessor, text: str) -> list[int]:
        return [self._ids.get(piece, self.unknown) for piece in pieces.encode(text, out_type=str)]


def _pieces(path: Path) -> sentencepiece.SentencePieceProcessor:
    if not path.is_file():
        raise TokenizerError(f"{path} is missing: a tokenizer needs {', '.join(TOKENIZER_FILES[:3])}")
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except RuntimeError as error:
        raise TokenizerError(f"{path} is not a SentencePiece model: {error}") from None


def _vocabulary(path: Path) -> dict[str, int]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, int])
    except FileNotFoundError:
        raise TokenizerError(f"{path} is missing") from None
    except msgspec.DecodeError as error:
        raise TokenizerError(f"{path}: {error}") from None
