"""Marian's tokenizer as a `tokenizer.json`, which is the only kind that transformers.js reads."""

import base64
from pathlib import Path
from typing import Any

from runtime.text.marian import SOURCE_PIECES, VOCABULARY
from runtime.text.pieces import ModelFile, read_model, read_vocabulary
from runtime.text.settings import read_settings
from runtime.tokenizer import open_tokenizer

from .errors import ExportError

SPACE = "\u2581"
"""SentencePiece's sign for a space."""
_DEFAULTS = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>"}
FAR_BELOW = 20
"""Times the worst score: no word is split into so many pieces of that, so that what scores lower is taken by none."""


def marian_tokenizer(folder: Path) -> dict[str, Any]:
    """The content of a `tokenizer.json` that splits source texts as the Marian tokenizer in `folder`.

    It has one vocabulary and one model, so that a model with two of the former cannot have it. Pieces of the target's
    model alone get a score by which no source text takes them.

    Raises:
        ExportError: SentencePiece does here what such a file cannot say.
    """
    settings = read_settings(folder)
    model = read_model(folder / SOURCE_PIECES)
    vocabulary = read_vocabulary(folder / VOCABULARY, VOCABULARY)
    _refuse(folder, model, vocabulary, separate=settings.fields.separate_vocabs)
    tokens = _special(folder)
    codes = [piece for piece in vocabulary if piece.startswith(">>") and piece.endswith("<<")]
    scores = dict(model.pieces)
    known = {piece for piece in scores.keys() & vocabulary.keys() if piece not in tokens.values()}
    below = FAR_BELOW * min(scores[piece] for piece in known)
    eos = tokens["eos_token"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            *(_added(vocabulary[token], token, special=True) for token in tokens.values() if token in vocabulary),
            *(_added(vocabulary[code], code, special=False) for code in codes),
        ],
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(model)},
        "pre_tokenizer": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": eos, "type_id": 0}}],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 0}},
                {"SpecialToken": {"id": eos, "type_id": 0}},
            ],
            "special_tokens": {eos: {"id": eos, "ids": [vocabulary[eos]], "tokens": [eos]}},
        },
        "decoder": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": False},
        "model": {
            "type": "Unigram",
            "unk_id": vocabulary[tokens["unk_token"]],
            "vocab": [
                [piece, scores[piece] if piece in known else 0.0 if piece in tokens.values() else below]
                for piece in sorted(vocabulary, key=vocabulary.__getitem__)
            ],
            "byte_fallback": False,
        },
    }


def marian_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` with what transformers.js has other defaults for than transformers."""
    return {**_DEFAULTS, "clean_up_tokenization_spaces": False, "tokenizer_class": "MarianTokenizer", **settings}


def _special(folder: Path) -> dict[str, str]:
    settings = read_settings(folder)
    tokens = {name: settings.token(name, default) for name, default in _DEFAULTS.items()}
    return tokens | {name: token.content for name, token in settings.named.items()}


def _normalizers(model: ModelFile) -> list[dict[str, Any]]:
    table = model.charsmap and base64.b64encode(model.charsmap).decode()
    return [
        *([{"type": "Precompiled", "precompiled_charsmap": table}] if table else []),
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
    ]


def _added(index: int, content: str, *, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": content, **flags, "special": special}


def _refuse(folder: Path, model: ModelFile, vocabulary: dict[str, int], *, separate: bool) -> None:
    problems = []
    if separate:
        problems.append("the two sides have vocabularies of their own (separate_vocabs)")
    if model.kind != "unigram":
        problems.append(f"{SOURCE_PIECES} is a {model.kind} model, not a unigram model")
    if model.byte_fallback:
        problems.append(f"{SOURCE_PIECES} falls back to bytes")
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        problems.append(f"the ids of {VOCABULARY} have gaps")
    if open_tokenizer(folder).size > len(vocabulary):
        problems.append(f"special tokens lie behind {VOCABULARY}")
    if problems:
        raise ExportError(f"the layout of transformers.js cannot hold this tokenizer: {'; '.join(problems)}")
