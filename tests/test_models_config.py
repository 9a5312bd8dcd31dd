"""Settings: the defaults are the paper's, and every impossible one is named."""

from typing import Any

import msgspec
import pytest
from models_support import TINY, all_variants, random_batch, tiny

from models.config import ModelConfig
from models.errors import ConfigError
from models.training import TrainingConfig
from models.transformer import Transformer

SIZES = (
    "vocab_size",
    "d_model",
    "encoder_layers",
    "decoder_layers",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "max_positions",
)


def test_the_defaults_are_the_papers_base_model() -> None:
    config = ModelConfig(vocab_size=37_000)
    assert (config.d_model, config.encoder_layers, config.decoder_layers) == (512, 6, 6)
    assert (config.encoder_attention_heads, config.decoder_attention_heads, config.decoder_head_dim) == (8, 8, 64)
    assert (config.encoder_ffn_dim, config.decoder_ffn_dim, config.dropout) == (2048, 2048, 0.1)
    assert (config.norm, config.activation_function, config.positions) == ("post", "relu", "sinusoidal")
    assert (config.scale_embedding, config.share_embeddings, config.tie_output) == (True, True, True)
    assert config.encoder_vocab_size == 37_000


def test_training_defaults_are_the_papers() -> None:
    assert TrainingConfig().label_smoothing == 0.1


@all_variants
def test_every_variant_is_a_setting_and_runs(changes: dict[str, Any]) -> None:
    config = tiny(**changes)
    batch = random_batch(config)
    logits = Transformer(config)(batch.source_ids, batch.source_mask, batch.target_ids)
    assert logits.shape == (*batch.target_ids.shape, config.vocab_size)
    assert msgspec.json.decode(msgspec.json.encode(config), type=ModelConfig) == config


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    *(({name: 0}, f"{name} is 0, expected at least 1") for name in SIZES),
    ({"encoder_attention_heads": 3}, "d_model 8 is not a multiple of encoder_attention_heads 3"),
    ({"decoder_attention_heads": 5}, "d_model 8 is not a multiple of decoder_attention_heads 5"),
    (
        {"d_model": 9, "encoder_attention_heads": 3, "decoder_attention_heads": 3},
        "d_model 9 is odd, sinusoidal positions need pairs of features",
    ),
    (
        {"d_model": 7, "encoder_attention_heads": 1, "decoder_attention_heads": 1, "positions": "sinusoidal-halves"},
        "d_model 7 is odd, sinusoidal-halves positions need pairs",
    ),
    ({"source_vocab_size": 11}, "share_embeddings needs one vocabulary, but source_vocab_size is 11 and vocab_size 23"),
    (
        {"source_vocab_size": 4, "share_embeddings": False, "pad_token_id": 4},
        "pad_token_id 4 is outside the source vocabulary of 4",
    ),
    ({"source_vocab_size": 0, "share_embeddings": False}, "pad_token_id 0 is outside the source vocabulary of 0"),
    ({"layer_norm_eps": 0.0}, "layer_norm_eps is 0.0, expected more than 0"),
    ({"layer_norm_eps": float("nan")}, "layer_norm_eps is nan"),
    ({"dropout": 1.0}, "dropout is 1.0, expected 0 <= dropout < 1"),
    ({"dropout": -0.1}, "dropout is -0.1"),
    ({"dropout": float("nan")}, "dropout is nan"),
    *(
        ({name: index}, f"{name} {index} is outside the vocabulary of 23")
        for name in ("pad_token_id", "decoder_start_token_id", "eos_token_id")
        for index in (-1, 23)
    ),
]


@pytest.mark.parametrize(("changes", "message"), IMPOSSIBLE, ids=[message[:40] for _, message in IMPOSSIBLE])
def test_an_impossible_setting_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny(**changes)
    assert str(caught.value).startswith("model: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_problems_of_a_model_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        tiny(encoder_layers=0, encoder_attention_heads=3, dropout=2.0, source_vocab_size=4, eos_token_id=99)
    problems = str(caught.value).removeprefix("model: ").split("; ")
    assert [problem.split()[0] for problem in problems] == [
        "encoder_layers",
        "d_model",
        "share_embeddings",
        "eos_token_id",
        "dropout",
    ]


def test_odd_widths_are_fine_with_learned_positions() -> None:
    config = tiny(d_model=9, encoder_attention_heads=3, decoder_attention_heads=1, positions="learned")
    Transformer(config)(*random_batch(config)[:3])


def test_one_vocabulary_may_be_stated_twice() -> None:
    assert tiny(source_vocab_size=TINY.vocab_size).encoder_vocab_size == TINY.vocab_size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"vocab_size": 9, "layers": 2}', "unknown field `layers`"),
        (b'{"vocab_size": 9, "norm": "middle"}', r"Invalid enum value 'middle' - at `\$.norm`"),
        (b'{"vocab_size": 9, "d_model": "8"}', r"Expected `int`, got `str` - at `\$.d_model`"),
        (b'{"vocab_size": 9, "dropout": 1.5}', "dropout is 1.5"),
        (b"{}", "missing required field `vocab_size`"),
    ],
)
def test_a_file_with_a_wrong_field_is_refused_with_the_path_to_it(text: bytes, message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.json.decode(text, type=ModelConfig)


POSITIVE = ("epochs", "batch_tokens", "learning_rate", "warmup_steps", "clip_norm", "save_steps", "log_steps")


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_training_setting_that_must_be_positive_is(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^training: {name} is {value}, expected more than 0$"):
        TrainingConfig(**{name: value})  # type: ignore[arg-type]


def test_all_problems_of_a_training_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingConfig(epochs=0, clip_norm=-1.0, label_smoothing=1.0, average=-1)
    assert str(caught.value) == (
        "training: epochs is 0, expected more than 0; clip_norm is -1.0, expected more than 0; "
        "label_smoothing is 1.0, expected 0 <= label_smoothing < 1; average is -1, expected 0 or more"
    )
