"""Text to ids and back: finds the family of tokenizers that a folder holds, and opens it."""

import re
from pathlib import Path

import msgspec

from .errors import TokenizerError
from .text.base import Tokenizer, check_language
from .text.fairseq import FAMILIES, FairseqTokenizer
from .text.m2m100 import M2M100Tokenizer
from .text.marian import SOURCE_PIECES, TARGET_PIECES, TARGET_VOCABULARY, VOCABULARY, MarianTokenizer
from .text.pieces import MODEL, TOKENIZER_JSON
from .text.settings import SETTINGS, SPECIAL_TOKENS_MAP, read_json, read_settings

__all__ = [
    "SETTINGS",
    "SOURCE_PIECES",
    "TARGET_PIECES",
    "TOKENIZER_FILES",
    "VOCABULARY",
    "Tokenizer",
    "open_tokenizer",
    "tokenizer_files",
]

TOKENIZER_FILES = (SOURCE_PIECES, TARGET_PIECES, VOCABULARY, SETTINGS)
"""Those of a tokenizer that we train ourselves; other families have others, see `tokenizer_files`."""

_OTHER_FILES = (TARGET_VOCABULARY, MODEL, TOKENIZER_JSON, SPECIAL_TOKENS_MAP)

_MODEL_TYPES = {
    "marian": "MarianTokenizer",
    "m2m_100": "M2M100Tokenizer",
    "mbart": "MBartTokenizer",
    "bart": "BartTokenizer",
}
_CONFIG = "config.json"


class _ModelSettings(msgspec.Struct):
    model_type: str | None = None
    tokenizer_class: str | None = None


def open_tokenizer(folder: Path, source_language: str | None = None, target_language: str | None = None) -> Tokenizer:
    """The tokenizer in `folder`: Marian, M2M100, NLLB, mBART or mBART-50.

    Which one it is says `tokenizer_class` of `tokenizer_config.json`; without that the files and `config.json` do.

    Args:
        folder: A checkpoint, a bundle, or what transformers saved.
        source_language: What the texts are written in; None for the folder's own choice. Only for a family with
            languages to choose from, see `Tokenizer.languages`.
        target_language: What to translate into; None for the folder's own choice.

    Raises:
        TokenizerError: a file is missing or damaged, the family is another one, or a language is unknown.
    """
    name = _class_name(folder)
    if name == "MarianTokenizer":
        check_language(source_language, (), "source_language", folder)
        check_language(target_language, (), "target_language", folder)
        return MarianTokenizer(folder)
    if name == "M2M100Tokenizer":
        return M2M100Tokenizer(folder, source_language, target_language)
    if name in FAMILIES:
        return FairseqTokenizer(folder, FAMILIES[name], source_language, target_language)
    known = ", ".join(["MarianTokenizer", "M2M100Tokenizer", *FAMILIES])
    raise TokenizerError(f"{folder / SETTINGS}: tokenizer_class is {name!r}, expected one of {known}")


def tokenizer_files(folder: Path) -> list[str]:
    """Names of the files in `folder` that belong to its tokenizer."""
    return [name for name in (*TOKENIZER_FILES, *_OTHER_FILES) if (folder / name).is_file()]


def _class_name(folder: Path) -> str:
    name = read_settings(folder).fields.tokenizer_class
    if name is None and not (folder / SOURCE_PIECES).exists() and (folder / _CONFIG).exists():
        model = read_json(folder / _CONFIG, _ModelSettings, "the settings of a model")
        name = model.tokenizer_class or _MODEL_TYPES.get(model.model_type or "")
    if name is None and not (folder / SOURCE_PIECES).exists() and (folder / MODEL).exists():
        if (folder / VOCABULARY).exists():
            return "M2M100Tokenizer"
        raise TokenizerError(f"{folder / SETTINGS} has no tokenizer_class, expected one of {', '.join(FAMILIES)}")
    return re.sub(r"Fast\Z", "", name or "MarianTokenizer")
