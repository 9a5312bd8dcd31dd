"""The tokenizer of M2M100: one SentencePiece model, one vocabulary, and language codes after its last id."""

from collections.abc import Sequence
from pathlib import Path

from ..decoding import SpecialIds
from ..errors import TokenizerError
from .added import AddedTokens
from .base import Tokenizer, check_language, clean_up
from .codes import M2M100
from .pieces import MODEL, open_pieces, read_vocabulary
from .settings import SETTINGS, AddedToken, read_settings

VOCABULARY = "vocab.json"

_NEEDED = f"{VOCABULARY}, {MODEL}"


class M2M100Tokenizer(Tokenizer):
    """As transformers' `M2M100Tokenizer`: `__en__ ... </s>`, and outputs that begin with `__fr__`.

    Args:
        folder: Holds `vocab.json` (piece to id) and `sentencepiece.bpe.model`.
        source_language: Code like "en"; None for that of `tokenizer_config.json`, and English without one.
        target_language: The same for the outputs; None leaves open what they begin with, if the settings do.

    Raises:
        TokenizerError: a file is missing or damaged, or a language is unknown.
    """

    def __init__(self, folder: Path, source_language: str | None = None, target_language: str | None = None) -> None:
        settings = read_settings(folder)
        self._model = open_pieces(folder / MODEL, _NEEDED)
        self._ids = read_vocabulary(folder / VOCABULARY, _NEEDED)
        codes = settings.fields.language_codes
        if codes not in M2M100:
            raise TokenizerError(
                f"{folder / SETTINGS}: language_codes is {codes!r}, expected one of {', '.join(M2M100)}"
            )
        self.languages = M2M100[codes]
        self.source_language = source_language or settings.fields.src_lang or "en"
        self.target_language = target_language or settings.fields.tgt_lang
        check_language(self.source_language, self.languages, "source_language", folder)
        check_language(self.target_language, self.languages, "target_language", folder)
        self._language_ids = {code: len(self._ids) + place for place, code in enumerate(self.languages)}
        self.forced_bos = self._language_ids[self.target_language] if self.target_language else None

        defaults = {"bos": "<s>", "eos": "</s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>"}
        tokens = {name: settings.token(f"{name}_token", content) for name, content in defaults.items()}
        special = [AddedToken(content) for content in tokens.values()] + [*settings.named.values(), *settings.extra]
        added = settings.fields.added_tokens_decoder or {}
        written = {**{token.content: token for token in special}, **{token.content: token for token in added.values()}}
        self._written = AddedTokens(written.values())
        codes_by_token = {f"__{code}__": index for code, index in self._language_ids.items()}
        self._added = {**codes_by_token, **{token.content: index for index, token in added.items()}}
        for content in written:
            if content not in self._added:
                following = max([*self._ids.values(), *self._added.values()]) + 1
                self._added[content] = self._ids.get(content, following)
        self._by_id = {index: piece for piece, index in {**self._ids, **self._added}.items()}
        self._hidden = {self._added[token.content] for token in special} | set(self._language_ids.values())
        self._hidden |= {index for index, token in added.items() if token.special}
        self.unknown = self._added[tokens["unk"]]
        self._unknown_piece = tokens["unk"]
        self._cleans_up = settings.cleans_up
        eos = self._added[tokens["eos"]]
        self.special = SpecialIds(self._added[tokens["pad"]], eos, eos)

    @property
    def size(self) -> int:
        """Entries of the vocabulary, languages included."""
        return max(self._by_id) + 1

    def encode(self, text: str) -> list[int]:
        """Source ids of `text` between the source language and EOS."""
        return self._encode(text, self.source_language)

    def encode_target(self, text: str) -> list[int]:
        """Target ids of `text` between the target language, the source language if there is none, and EOS."""
        return self._encode(text, self.target_language or self.source_language)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of target `ids` without special tokens and languages; an id without a piece is `<unk>`."""
        parts: list[str] = []
        pieces: list[str] = []
        for index in ids:
            if index in self._by_id and index not in self._hidden:
                pieces.append(self._by_id[index])
            elif index not in self._by_id:
                parts += [self._model.decode_pieces(pieces), self._unknown_piece]
                pieces = []
        text = "".join([*parts, self._model.decode_pieces(pieces)]).strip()
        return clean_up(text) if self._cleans_up else text

    def piece(self, index: int) -> str:
        """The piece of the id `index`, or `#index` where there is none."""
        return self._by_id.get(index, f"#{index}")

    def _encode(self, text: str, language: str | None) -> list[int]:
        found = [self._language_ids[language]] if language else []
        for part, is_token in self._written.split(text):
            pieces = [part] if is_token else self._model.encode(part, out_type=str)
            found += [self._added.get(piece, self._ids.get(piece, self.unknown)) for piece in pieces]
        return [*found, self.special.eos]
