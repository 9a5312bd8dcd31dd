"""Tiny tokenizers in the two layouts that are met: our own, and that of OPUS-MT."""

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from runtime.text.codes import M2M100, MBART, MBART50, NLLB
from runtime.text.pieces import read_model

SENTENCES = [
    "The cat sat on the mat, and the dog lay by the door.",
    "Where is the station? It is not far from here.",
    "I would like a cup of tea, please!",
    "Der Hund schläft vor der Tür; die Straße ist leer.",
    "Où est la gare ? Elle n'est pas très loin d'ici.",
    "我爱猫。猫也爱我吗？",
    "今天天气很好,我们去公园。",
    'Numbers: 1 23 456 7890, and (brackets) "quotes" too.',
]
LANGUAGES = (">>fra<<", ">>zho_Hans<<")


def train_pieces(
    path: Path, sentences: Sequence[str], size: int, **options: Any
) -> sentencepiece.SentencePieceProcessor:
    """Train a SentencePiece model and write it to `path`; `options` of the trainer go before ours."""
    settings = {"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_prefix=str(path.with_suffix("")),
        vocab_size=size,
        character_coverage=1.0,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **settings,
    )
    path.with_suffix(".model").replace(path)
    path.with_suffix(".vocab").unlink()
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def write_own(folder: Path) -> None:
    """One model for both sides, the vocabulary in its order, `<s>` to start from."""
    pieces = train_pieces(folder / "source.spm", SENTENCES, 160)
    (folder / "target.spm").write_bytes((folder / "source.spm").read_bytes())
    vocabulary = {pieces.id_to_piece(index): index for index in range(pieces.get_piece_size())}
    write_json(folder / "vocab.json", vocabulary)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "MarianTokenizer", "bos_token": "<s>"})


def write_opus(folder: Path) -> None:
    """Two models and one vocabulary, which lacks some of their pieces, has language codes, and ends with `<pad>`."""
    source = train_pieces(folder / "source.spm", SENTENCES[:5], 120)
    target = train_pieces(folder / "target.spm", SENTENCES[2:], 140)
    known = {model.id_to_piece(index) for model in (source, target) for index in range(4, model.get_piece_size())}
    kept = [piece for place, piece in enumerate(sorted(known)) if place % 9]
    vocabulary = ["</s>", "<unk>", *LANGUAGES, *kept, "<pad>"]
    write_json(folder / "vocab.json", {piece: index for index, piece in enumerate(vocabulary)})
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "MarianTokenizer", "source_lang": "aa", "target_lang": "bb", "separate_vocabs": False},
    )


LAYOUTS = {"own": write_own, "opus": write_opus}

MODELS = {
    f"{kind}, {rule}, {'bytes' if fallback else 'no bytes'}": {
        "model_type": kind,
        "normalization_rule_name": rule,
        "byte_fallback": fallback,
    }
    for kind in ("unigram", "bpe")
    for rule in ("identity", "nmt_nfkc")
    for fallback in (False, True)
}
"""Options of SentencePiece's trainer for all that changes how a model splits."""
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")

Writer = Callable[[Path, dict[str, Any]], None]


def write_marian(folder: Path, model: dict[str, Any]) -> None:
    """The layout of OPUS-MT with `model` on both sides."""
    source = train_pieces(folder / "source.spm", SENTENCES[:5], 400, **model)
    target = train_pieces(folder / "target.spm", SENTENCES[2:], 400, **model)
    known = {model.id_to_piece(index) for model in (source, target) for index in range(4, model.get_piece_size())}
    vocabulary = ["</s>", "<unk>", *LANGUAGES, *sorted(known), "<pad>"]
    write_json(folder / "vocab.json", {piece: index for index, piece in enumerate(vocabulary)})
    write_json(folder / "tokenizer_config.json", {"source_lang": "aa", "target_lang": "bb"})


def write_separate(folder: Path, model: dict[str, Any]) -> None:
    """A Marian model with a vocabulary for each side."""
    for side, sentences, name in (("source", SENTENCES[:5], "vocab"), ("target", SENTENCES[2:], "target_vocab")):
        pieces = train_pieces(folder / f"{side}.spm", sentences, 400, **model)
        known = [pieces.id_to_piece(index) for index in range(4, pieces.get_piece_size())]
        vocabulary = ["</s>", "<unk>", "<pad>", *(known if side == "source" else known[::-1])]
        write_json(folder / f"{name}.json", {piece: index for index, piece in enumerate(vocabulary)})
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "MarianTokenizer", "separate_vocabs": True})


def write_m2m100(folder: Path, model: dict[str, Any]) -> None:
    """The layout of Facebook's M2M100: the codes are in `special_tokens_map.json` alone."""
    pieces = train_pieces(folder / "sentencepiece.bpe.model", SENTENCES, 400, **model)
    known = [pieces.id_to_piece(index) for index in range(4, pieces.get_piece_size())]
    write_json(folder / "vocab.json", {piece: index for index, piece in enumerate([*SPECIAL, *known])})
    codes = [f"__{code}__" for code in M2M100["m2m100"]]
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>", "pad_token": "<pad>"}
    write_json(folder / "special_tokens_map.json", {**named, "additional_special_tokens": codes})
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "M2M100Tokenizer", "src_lang": "de", "tgt_lang": "fr", "language_codes": "m2m100"},
    )


def train_fairseq(folder: Path, model: dict[str, Any]) -> sentencepiece.SentencePieceProcessor:
    """A model with SentencePiece's own ids, which the families of fairseq reorder."""
    own = {"pad_id": -1, "unk_id": 0, "bos_id": 1, "eos_id": 2}
    return train_pieces(folder / "sentencepiece.bpe.model", SENTENCES, 400, **own, **model)


def write_nllb(folder: Path, model: dict[str, Any]) -> None:
    """An NLLB tokenizer without `tokenizer.json`, as transformers 4 wrote it."""
    size = train_fairseq(folder, model).get_piece_size() + 1
    tokens = {**dict(enumerate(SPECIAL)), **{size + place: code for place, code in enumerate(NLLB)}}
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    added = {str(index): {"content": content, **flags} for index, content in tokens.items()}
    added[str(size + len(NLLB))] = {**flags, "content": "<mask>", "lstrip": True, "normalized": True}
    settings = {"tokenizer_class": "NllbTokenizer", "src_lang": "eng_Latn", "tgt_lang": "fra_Latn"}
    more = {"added_tokens_decoder": added, "additional_special_tokens": list(NLLB), "legacy_behaviour": False}
    write_json(folder / "tokenizer_config.json", {**settings, **more})


def write_mbart(folder: Path, model: dict[str, Any]) -> None:
    """The layout of Facebook's mBART."""
    train_fairseq(folder, model)
    settings = {"tokenizer_class": "MBartTokenizer", "src_lang": "en_XX", "tgt_lang": "ro_RO"}
    write_json(folder / "tokenizer_config.json", {**settings, "additional_special_tokens": list(MBART)})


def write_mbart50(folder: Path, model: dict[str, Any]) -> None:
    """The layout of Facebook's mBART-50."""
    train_fairseq(folder, model)
    settings = {"tokenizer_class": "MBart50Tokenizer", "src_lang": "en_XX", "tgt_lang": "af_ZA"}
    write_json(folder / "tokenizer_config.json", {**settings, "additional_special_tokens": list(MBART50)})


FAMILIES: dict[str, Writer] = {
    "MarianTokenizer": write_marian,
    "MarianTokenizer, separate": write_separate,
    "M2M100Tokenizer": write_m2m100,
    "NllbTokenizer": write_nllb,
    "MBartTokenizer": write_mbart,
    "MBart50Tokenizer": write_mbart50,
}
"""By the name of the class in transformers."""


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), "utf-8")


# Models whose pieces are written down, so that what they answer can be, too.

RECORDED = Path(__file__).parent / "data" / "tokenizers.json"
KINDS = {
    "MarianTokenizer": "unigram",
    "M2M100Tokenizer": "bpe",
    "NllbTokenizer": "bpe",
    "MBartTokenizer": "unigram",
    "MBart50Tokenizer": "unigram",
}


def model_file(pieces: Sequence[tuple[str, float]], kind: str, charsmap: bytes) -> bytes:
    """A SentencePiece model of `pieces`, the first three of them unknown, start and end."""
    message = b""
    for index, (piece, score) in enumerate(pieces):
        kind_of_piece = bytes([3 << 3, 2 if index == 0 else 3]) if index < 3 else b""
        fields = _field(1, piece.encode()) + bytes([2 << 3 | 5]) + struct.pack("<f", score) + kind_of_piece
        message += _field(1, fields)
    trainer = bytes([3 << 3, 1 if kind == "unigram" else 2])
    return message + _field(2, trainer) + _field(3, _field(1, b"nmt_nfkc") + _field(2, charsmap))


def write_recorded(folder: Path, family: str) -> None:
    """A folder of `family` with the pieces that are written down."""
    pieces = json.loads(RECORDED.read_text("utf-8"))["pieces"][KINDS[family]]
    train_fairseq(folder, {"normalization_rule_name": "nmt_nfkc"})
    path = folder / "sentencepiece.bpe.model"
    charsmap = read_model(path).charsmap or b""
    path.write_bytes(model_file(pieces, KINDS[family], charsmap))
    settings: dict[str, Any] = {"tokenizer_class": family}
    names = [piece for piece, _ in pieces[3:]]
    if family == "MarianTokenizer":
        for side in ("source", "target"):
            (folder / f"{side}.spm").write_bytes(path.read_bytes())
        path.unlink()
        vocabulary = ["</s>", "<unk>", *LANGUAGES, *names, "<pad>"]
    else:
        vocabulary = [*SPECIAL, *names]
    if family in {"MarianTokenizer", "M2M100Tokenizer"}:
        write_json(folder / "vocab.json", {piece: index for index, piece in enumerate(vocabulary)})
    if family == "M2M100Tokenizer":
        settings["extra_special_tokens"] = [f"__{code}__" for code in M2M100["m2m100"]]
    if family == "NllbTokenizer":
        size = len(pieces) + 1
        tokens = {**dict(enumerate(SPECIAL)), **{size + place: code for place, code in enumerate(NLLB)}}
        settings["added_tokens_decoder"] = {
            index: {"content": content, "special": True} for index, content in tokens.items()
        }
        settings["extra_special_tokens"] = list(NLLB)
    write_json(folder / "tokenizer_config.json", settings)


def _field(number: int, content: bytes) -> bytes:
    """A field of a protobuf message that holds bytes."""
    size, digits = len(content), []
    while size >= 128:
        digits.append(size % 128 + 128)
        size //= 128
    return bytes([number << 3 | 2, *digits, size]) + content
