"""The pieces of a model, read from a SentencePiece file or from the `tokenizer.json` of the tokenizers library."""

import base64
import binascii
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import sentencepiece

from ..errors import TokenizerError
from .settings import AddedToken, read_json

MODEL = "sentencepiece.bpe.model"
TOKENIZER_JSON = "tokenizer.json"

_CONTROL, _USER_DEFINED = 3, 4  # SentencePiece's types of pieces
_KINDS = ("unigram", "bpe", "word", "char")  # of models, from 1 on


class ModelFile(NamedTuple):
    """What a SentencePiece model holds."""

    pieces: list[tuple[str, float]]
    """Piece and score, in the model's own order."""
    added: list[AddedToken]
    """Control pieces and those that the user defined."""
    charsmap: bytes | None
    """The normalisation, compiled; None for identity."""
    kind: str
    """How it splits: "unigram", "bpe", "word" or "char"."""
    byte_fallback: bool
    """Whether it writes what it does not know in bytes."""


class _JsonModel(msgspec.Struct):
    type: str
    vocab: dict[str, int] | list[tuple[str, float]]
    merges: list[str | tuple[str, str]] = []


class _JsonToken(AddedToken, frozen=True):
    id: int = -1


class _JsonFile(msgspec.Struct):
    model: _JsonModel
    added_tokens: list[_JsonToken] = []
    normalizer: dict[str, Any] | None = None


class JsonFile(NamedTuple):
    """What a `tokenizer.json` holds, as far as the three families use it."""

    pieces: list[tuple[str, float]]
    """Piece and score, in the order of ids; scores are 0 where the kind has none."""
    ranks: dict[tuple[str, str], int]
    """Rank of the pairs that BPE merges."""
    added: list[AddedToken]
    charsmap: bytes | None


def open_pieces(path: Path, needed: str) -> sentencepiece.SentencePieceProcessor:
    """The SentencePiece model in `path`, one of the files `needed`.

    Raises:
        TokenizerError: it is missing or damaged.
    """
    if not path.is_file():
        raise TokenizerError(f"{path} is missing: a tokenizer needs {needed}")
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise TokenizerError(f"{path} is not a SentencePiece model: {error}") from None


def read_vocabulary(path: Path, needed: str) -> dict[str, int]:
    """Piece to id of a `vocab.json`, one of the files `needed`.

    Raises:
        TokenizerError: it is missing or damaged.
    """
    if not path.is_file():
        raise TokenizerError(f"{path} is missing: a tokenizer needs {needed}")
    ids = read_json(path, dict[str, int], "a vocabulary, an object of pieces and ids")
    missing = [piece for piece in ("<pad>", "</s>", "<unk>") if piece not in ids]
    if missing:
        raise TokenizerError(f"{path} has no {' and no '.join(missing)}")
    if len(set(ids.values())) < len(ids) or min(ids.values()) < 0:
        raise TokenizerError(f"{path} is damaged: expected a different id from 0 on for each of its {len(ids)} pieces")
    return ids


def read_model(path: Path) -> ModelFile:
    """Pieces, scores and normalisation of a SentencePiece model.

    Raises:
        TokenizerError: the file is damaged.
    """
    open_pieces(path, MODEL)  # SentencePiece's own check, and its words
    try:
        return _parse_model(path.read_bytes())
    except (ValueError, struct.error, IndexError) as error:
        raise TokenizerError(f"{path} is not a SentencePiece model: {error}") from None


def _parse_model(content: bytes) -> ModelFile:
    """The fields that are needed of SentencePiece's `ModelProto`."""
    pieces, added, charsmap, trainer = [], [], None, dict[int, int | bytes]()
    for number, value in _fields(content):
        if number == 1:  # pieces
            fields = dict(_fields(_as_bytes(value)))
            piece = _as_bytes(fields.get(1, b"")).decode("utf-8")
            pieces.append((piece, struct.unpack("<f", _as_bytes(fields.get(2, bytes(4))))[0]))
            if fields.get(3) in {_CONTROL, _USER_DEFINED}:
                added.append(AddedToken(piece, special=fields[3] == _CONTROL))
        elif number == 2:  # trainer_spec
            trainer = dict(_fields(_as_bytes(value)))
        elif number == 3:  # normalizer_spec
            charsmap = _as_bytes(dict(_fields(_as_bytes(value))).get(2, b"")) or None
    kind = _KINDS[_as_number(trainer.get(3, 1)) - 1]
    return ModelFile(pieces, added, charsmap, kind, bool(trainer.get(35, 0)))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a protobuf message."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        if key & 7 == 0:
            number, place = _varint(message, place)
            yield key >> 3, number
            continue
        if key & 7 == 2:
            size, place = _varint(message, place)
        elif key & 7 in {1, 5}:
            size = 8 if key & 7 == 1 else 4
        else:
            raise ValueError(f"field {key >> 3} has the unknown wire type {key & 7}")
        if place + size > len(message):
            raise ValueError(f"field {key >> 3} is cut off")
        yield key >> 3, message[place : place + size]
        place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a field holds a number, expected bytes")
    return value


def _as_number(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a field holds bytes, expected a number")
    return value


def read_tokenizer_json(path: Path, kind: str) -> JsonFile:
    """Pieces, merges, added tokens and normalisation of a `tokenizer.json` whose model is of `kind`.

    Raises:
        TokenizerError: the file is damaged, or its model is another one.
    """
    file = read_json(path, _JsonFile, "a tokenizer of the tokenizers library")
    model = file.model
    if model.type != kind:
        raise TokenizerError(f"{path}: model.type is {model.type!r}, expected {kind!r}")
    if isinstance(model.vocab, dict) != (kind == "BPE"):
        raise TokenizerError(f"{path}: model.vocab is not that of a {kind} model")
    if isinstance(model.vocab, dict):
        pieces = [("", 0.0)] * len(model.vocab)
        if sorted(model.vocab.values()) != list(range(len(pieces))):
            raise TokenizerError(f"{path}: model.vocab: expected the ids 0 .. {len(pieces) - 1}, each once")
        for piece, index in model.vocab.items():
            pieces[index] = (piece, 0.0)
    else:
        pieces = model.vocab
    problem = next((token for token in file.added_tokens if token.single_word), None)
    if problem:
        raise TokenizerError(f"{path}: added_tokens: single_word of {problem.content!r} is not supported")
    added = sorted(file.added_tokens, key=lambda token: token.id)
    return JsonFile(pieces, _ranks(model, path), [*added], _charsmap(file.normalizer, path))


def _ranks(model: _JsonModel, path: Path) -> dict[tuple[str, str], int]:
    ranks = {}
    for rank, merge in enumerate(model.merges):
        parts = tuple(merge.split(" ")) if isinstance(merge, str) else merge
        if len(parts) != 2:
            raise TokenizerError(f"{path}: model.merges[{rank}] is {merge!r}, expected two pieces")
        left, right = parts
        unknown = [piece for piece in (left, right, left + right) if piece not in model.vocab]
        if unknown:
            raise TokenizerError(f"{path}: model.merges[{rank}]: model.vocab has no {unknown[0]!r}")
        ranks[left, right] = rank
    return ranks


def _charsmap(normalizer: dict[str, Any] | None, path: Path) -> bytes | None:
    """The first compiled table of `normalizer`, which may be one or a sequence."""
    parts = (normalizer or {}).get("normalizers", [normalizer])
    for part in parts if isinstance(parts, list) else []:
        if isinstance(part, dict) and part.get("type") == "Precompiled" and part.get("precompiled_charsmap"):
            try:
                return base64.b64decode(part["precompiled_charsmap"], validate=True)
            except (binascii.Error, TypeError, ValueError) as error:
                raise TokenizerError(f"{path}: normalizer: precompiled_charsmap is not base64: {error}") from None
    return None
