"""Tiny tokenizers in the two layouts that are met: our own, and that of OPUS-MT."""

import json
from pathlib import Path

import sentencepiece

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


def train_pieces(path: Path, sentences: list[str], size: int) -> sentencepiece.SentencePieceProcessor:
    """Train a SentencePiece model and write it to `path`."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_prefix=str(path.with_suffix("")),
        vocab_size=size,
        character_coverage=1.0,
        hard_vocab_limit=False,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        num_threads=1,
        minloglevel=2,
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


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), "utf-8")
