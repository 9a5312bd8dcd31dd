"""Writes down what transformers' tokenizers answer, for tests that run where it is not installed.

PYTHONPATH=. python tests/record_tokenizers.py
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import transformers
from nasty_text import NASTY
from tokenizer_support import KINDS, RECORDED, SENTENCES, train_fairseq, write_recorded

from runtime.text.pieces import read_model

LONGEST = 60
"""Of the lines that are recorded, in characters."""


def answers(family: str) -> dict[str, Any]:
    """Source ids of each line, and the text that they decode to."""
    with tempfile.TemporaryDirectory() as name:
        write_recorded(Path(name), family)
        tokenizer = getattr(transformers, family).from_pretrained(name)
        lines = [line for line in [*SENTENCES, *NASTY.values()] if len(line) <= LONGEST]
        encoded = {line: tokenizer(line).input_ids for line in lines}
        return {line: [ids, tokenizer.decode(ids, skip_special_tokens=True)] for line, ids in encoded.items()}


def record() -> dict[str, Any]:
    """Everything that `tests/data/tokenizers.json` holds; the pieces stay as they are once they are there."""
    if not RECORDED.exists():
        pieces = {}
        for kind in ("unigram", "bpe"):
            with tempfile.TemporaryDirectory() as name:
                train_fairseq(Path(name), {"model_type": kind, "normalization_rule_name": "nmt_nfkc"})
                pieces[kind] = read_model(Path(name) / "sentencepiece.bpe.model").pieces
        RECORDED.write_text(json.dumps({"pieces": pieces}, ensure_ascii=False), "utf-8")
    return {
        "pieces": json.loads(RECORDED.read_text("utf-8"))["pieces"],
        "answers": {family: answers(family) for family in KINDS},
    }


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(record(), ensure_ascii=True, separators=(",", ":")) + "\n", "utf-8")
