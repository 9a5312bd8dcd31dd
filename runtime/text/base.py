"""What every tokenizer can do, whatever its family."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from ..decoding import SpecialIds
from ..errors import TokenizerError


class Tokenizer(ABC):
    """Splits source text into ids and joins target ids into text, as the tokenizer of the same name in transformers.

    `runtime.tokenizer.open_tokenizer` finds the family that a folder holds.
    """

    special: SpecialIds
    """Pad, start and end. The start is the target language where the family begins its outputs with that."""
    unknown: int
    """Id of text that the vocabulary lacks."""
    languages: tuple[str, ...] = ()
    """Codes of the languages to choose from; empty where the model has none, or where they are part of the text."""
    source_language: str | None = None
    target_language: str | None = None
    forced_bos: int | None = None
    """The first token of every output after the start token, where a target language asks for one."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Entries of the source vocabulary."""

    @property
    def target_size(self) -> int:
        """Entries of the target vocabulary; nearly always the same one."""
        return self.size

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Source ids of `text`, with the end token and the source language where the model expects them.

        Special tokens written out in `text`, like `</s>`, become their ids.
        """

    @abstractmethod
    def encode_target(self, text: str) -> list[int]:
        """Target ids of `text`, as the model was trained to produce them."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of target `ids`; special tokens, `<unk>` and the languages among them, are left out."""

    @abstractmethod
    def piece(self, index: int) -> str:
        """The piece of the target id `index`, or `#index` where there is none."""


def check_language(given: str | None, languages: Sequence[str], what: str, folder: Path) -> None:
    """Refuse a language that a model does not know.

    Raises:
        TokenizerError: `given` is none of `languages`; the message names them, or the first of many.
    """
    if given is None or given in languages:
        return
    if not languages:
        raise TokenizerError(
            f"{folder}: {what} is {given!r}, but this tokenizer has no languages to choose from "
            "(a Marian model that has them takes >>fra<< at the front of the text)"
        )
    shown = ", ".join(languages[:8]) + (f", ... ({len(languages)} in all)" if len(languages) > 8 else "")
    raise TokenizerError(f"{folder}: {what} is {given!r}, expected one of {shown}")


def clean_up(text: str) -> str:
    """`text` without the spaces before English punctuation, what `clean_up_tokenization_spaces` asks for."""
    for spaced in (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(spaced, spaced.strip())
    return text
