"""The checkpoint that is shipped: it is whole, small, honest about itself, and translates."""

from pathlib import Path

import pytest
from sacrebleu.metrics.chrf import CHRF

from models.checkpoint import load_checkpoint
from models.transformer import Transformer
from runtime.tokenizer import open_tokenizer
from toolkit.corpus import read_pairs
from toolkit.train import translate_ids

FOLDER = Path(__file__).parent.parent / "models/pretrained/zh_en"
SAMPLE = Path(__file__).parent / "data/sample-zh-en/test.tsv"


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load_checkpoint(FOLDER)


def test_it_is_at_most_16_megabytes_and_its_card_says_how_large_the_model_is(model: Transformer) -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 16_000_000
    card = (FOLDER / "README.md").read_text("utf-8")
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters" in card
    assert all(licence in card for licence in ("CC BY 2.0 FR", "CC BY-SA 4.0", "Unicode-3.0"))


def test_its_tokenizer_splits_real_sentences_into_known_pieces_and_joins_them_again() -> None:
    tokenizer = open_tokenizer(FOLDER)
    for pair in read_pairs([SAMPLE]):
        ids = tokenizer.encode_target(pair.target)
        assert tokenizer.unknown not in [*tokenizer.encode(pair.source), *ids]
        assert tokenizer.decode(ids) == pair.target


def test_it_translates(model: Transformer) -> None:
    tokenizer = open_tokenizer(FOLDER)
    assert translate_ids(model, [tokenizer.encode("我爱猫。")], tokenizer) == ["I love cats."]
    pairs = read_pairs([SAMPLE])
    outputs = translate_ids(model, [tokenizer.encode(pair.source) for pair in pairs], tokenizer)
    assert CHRF().corpus_score(outputs, [[pair.target for pair in pairs]]).score > 40
