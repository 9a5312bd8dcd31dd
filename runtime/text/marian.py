"""The tokenizer of Marian and OPUS-MT models: two SentencePiece models and one vocabulary, or one for each side."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import sentencepiece

from ..decoding import SpecialIds
from .added import AddedTokens
from .base import Tokenizer, clean_up
from .pieces import open_pieces, read_vocabulary
from .settings import AddedToken, read_settings

SOURCE_PIECES = "source.spm"
TARGET_PIECES = "target.spm"
VOCABULARY = "vocab.json"
TARGET_VOCABULARY = "target_vocab.json"

_NEEDED = f"{SOURCE_PIECES}, {TARGET_PIECES}, {VOCABULARY}"
_LANGUAGE = re.compile(r"\A(>>.*?<<)", re.DOTALL)


class MarianTokenizer(Tokenizer):
    """As transformers' `MarianTokenizer`. A target language, `>>fra<<`, is the beginning of the source text.

    Args:
        folder: Holds `source.spm`, `target.spm`, `vocab.json` (piece to id), and `target_vocab.json` where
            `tokenizer_config.json` says `separate_vocabs`.

    Raises:
        TokenizerError: a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        settings = read_settings(folder)
        self._source = open_pieces(folder / SOURCE_PIECES, _NEEDED)
        self._target = open_pieces(folder / TARGET_PIECES, _NEEDED)
        self._ids = read_vocabulary(folder / VOCABULARY, _NEEDED)
        self._target_ids = self._ids
        if settings.fields.separate_vocabs:
            needed = f"{_NEEDED} and, since its separate_vocabs is true, {TARGET_VOCABULARY}"
            self._target_ids = read_vocabulary(folder / TARGET_VOCABULARY, needed)
        self._decoder = self._target if settings.fields.separate_vocabs else self._source
        self._by_id = {index: piece for piece, index in self._target_ids.items()}
        self._cleans_up = settings.cleans_up

        tokens = {name: settings.token(f"{name}_token", f"<{name}>") for name in ("unk", "pad")}
        tokens["eos"] = settings.token("eos_token", "</s>")
        special = [AddedToken(content) for content in tokens.values()]
        special += [*settings.named.values(), *settings.extra]
        added = dict(settings.fields.added_tokens_decoder or {})
        self._added = {token.content: index for index, token in added.items()}
        for token in special:
            if token.content not in self._added:
                following = max([*self._ids.values(), *self._added.values()]) + 1
                self._added[token.content] = self._ids.get(token.content, following)
        self._by_id |= {index: content for content, index in self._added.items()}
        self._written = AddedTokens({**{token.content: token for token in special}, **_by_content(added)}.values())
        self._hidden = {self._added[token.content] for token in special}
        self._hidden |= {index for index, token in added.items() if token.special}
        self.unknown = self._added[tokens["unk"]]
        pad = self._added[tokens["pad"]]
        # Marian models without a <s> start from <pad>.
        self.special = SpecialIds(pad, self._ids.get("<s>", pad), self._added[tokens["eos"]])
        self._unknown_piece = tokens["unk"]

    @property
    def size(self) -> int:
        """Entries of the source vocabulary."""
        return max([*self._ids.values(), *self._added.values()]) + 1

    @property
    def target_size(self) -> int:
        """Entries of the target vocabulary."""
        return max(self._by_id) + 1

    def encode(self, text: str) -> list[int]:
        """Source ids of `text`, EOS at the end.

        Special tokens written out in `text`, and a language code like `>>fra<<` at its front, become their ids.
        """
        return [*self._lookup(self._source, self._ids, text), self.special.eos]

    def encode_target(self, text: str) -> list[int]:
        """Target ids of `text`, EOS at the end."""
        return [*self._lookup(self._target, self._target_ids, text), self.special.eos]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of target `ids`; special tokens, `<unk>` among them, and ids that have no piece are left out."""
        pieces = [self._by_id[index] for index in ids if index in self._by_id and index not in self._hidden]
        text: str = self._decoder.decode_pieces(pieces)
        text = text.replace("\u2581", " ").strip()  # SentencePiece's sign for a space
        return clean_up(text) if self._cleans_up else text

    def piece(self, index: int) -> str:
        """The piece of the target id `index`, or `#index` where there is none."""
        return self._by_id.get(index, f"#{index}")

    def _lookup(
        self, model: sentencepiece.SentencePieceProcessor, vocabulary: Mapping[str, int], text: str
    ) -> list[int]:
        unknown = vocabulary.get(self._unknown_piece, self.unknown)
        found: list[int] = []
        for part, is_token in self._written.split(text):
            if is_token:
                found.append(self._added[part])
                continue
            *language, rest = _LANGUAGE.split(part)[-2:]
            pieces = [*language, *model.encode(rest, out_type=str)]
            # Added tokens go before the vocabulary wherever a piece is looked up, as in transformers.
            found += [self._added.get(piece, vocabulary.get(piece, unknown)) for piece in pieces]
        return found


def _by_content(added: Mapping[int, AddedToken]) -> dict[str, AddedToken]:
    return {token.content: token for token in added.values()}
