"""Folders that cannot be imported: each is refused in one line that names file and field, all problems at once."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from importers_support import FAMILIES, edit_json, refusal_of

from models.importers import detect, import_model

pytestmark = pytest.mark.usefixtures("quiet")

all_families = pytest.mark.parametrize("family", FAMILIES)
WEIGHTS = "model.safetensors"


# What the folder is.


def test_a_folder_that_is_no_model_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    said = refusal_of(tmp_path)
    assert "is no model" in said
    assert all(name in said for name in ("model.json", "config.json", "transformer.toml"))
    assert "does not exist" in refusal_of(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    assert "is a file: expected the folder of a model" in refusal_of(tmp_path / "file")


def test_a_checkpoint_of_ours_needs_no_import(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text("{}")
    assert detect(tmp_path) == "checkpoint"
    assert "is a checkpoint already" in refusal_of(tmp_path)


@pytest.mark.parametrize("kind", ["t5", "nllb-moe", "blenderbot", "gpt2", "pegasus", 7, None])
def test_an_architecture_that_is_not_supported_is_refused_by_name(plain_marian: Path, kind: object) -> None:
    edit_json(plain_marian / "config.json", lambda config: config.update(model_type=kind))
    said = refusal_of(plain_marian)
    assert f"config.json: model_type is {kind!r}, supported: marian, m2m_100, bart, mbart" in said


# config.json.

FIELDS = (
    "vocab_size",
    "d_model",
    "encoder_layers",
    "decoder_layers",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "max_position_embeddings",
    "activation_function",
    "pad_token_id",
)


@all_families
@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field_is_named(
    plain_folders: Callable[[str], Path], family: str, field: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(plain_folders(family), tmp_path / "model"))
    edit_json(folder / "config.json", lambda config: config.pop(field))
    assert refusal_of(folder).startswith(f"{folder / 'config.json'}: {field} is missing")


@all_families
def test_ids_that_neither_file_has_are_named(plain_folders: Callable[[str], Path], family: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(plain_folders(family), tmp_path / "model"))
    for name in ("config.json", "generation_config.json"):
        edit_json(folder / name, lambda config: [config.pop(f"{field}_token_id") for field in ("decoder_start", "eos")])
    said = refusal_of(folder)
    assert "decoder_start_token_id is missing" in said
    assert "eos_token_id is missing" in said


OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    (
        "marian",
        {"activation_function": "gelu_new"},
        "activation_function is 'gelu_new', supported: relu, gelu, silu, swish",
    ),
    ("bart", {"activation_function": "tanh"}, "activation_function is 'tanh', supported: relu, gelu, silu, swish"),
    ("marian", {"add_bias_logits": True}, "add_bias_logits is true, supported: false"),
    ("bart", {"add_bias_logits": True}, "add_bias_logits is true, supported: false"),
    ("marian", {"normalize_before": True}, "normalize_before is true, supported: false"),
    ("marian", {"normalize_embedding": True}, "normalize_embedding is true, supported: false"),
    ("marian", {"static_position_embeddings": False}, "static_position_embeddings is false, supported: true"),
    ("m2m_100", {"normalize_before": False}, "normalize_before is false, supported: true"),
    ("bart", {"normalize_before": True}, "normalize_before is true, supported: false"),
    ("bart", {"normalize_embedding": False}, "normalize_embedding is false, supported: true"),
    ("bart", {"static_position_embeddings": True}, "static_position_embeddings is true, supported: false"),
    ("mbart", {"normalize_before": False}, "normalize_before is false, supported: true"),
    ("mbart", {"add_final_layer_norm": False}, "add_final_layer_norm is false, supported: true"),
    ("bart", {"is_encoder_decoder": False}, "is_encoder_decoder is false, supported: true"),
    ("bart", {"tie_encoder_decoder": True}, "tie_encoder_decoder is true, supported: false"),
    ("bart", {"pruned_heads": {"0": [1]}}, 'pruned_heads is {"0":[1]}, supported: {}'),
    ("m2m_100", {"quantization_config": {"bits": 8}}, 'quantization_config is {"bits":8}, supported: nothing'),
    (
        "bart",
        {"architectures": ["BartForSequenceClassification"]},
        "architectures is ['BartForSequenceClassification']",
    ),
    ("marian", {"decoder_vocab_size": 62}, "decoder_vocab_size is 62 and vocab_size 61"),
    ("m2m_100", {"decoder_start_token_id": 1}, "decoder_start_token_id is pad_token_id 1"),
    ("marian", {"d_model": "24"}, 'd_model is "24", expected int'),
    ("marian", {"scale_embedding": 1}, "scale_embedding is 1, expected bool"),
    ("marian", {"encoder_attention_heads": 5}, "d_model 24 is not a multiple of encoder_attention_heads 5"),
    ("marian", {"encoder_layers": 0}, "encoder_layers is 0, expected at least 1"),
    ("marian", {"pad_token_id": 61}, "pad_token_id 61 is outside the vocabulary of 61"),
    ("m2m_100", {"d_model": 2}, "d_model is 2, its sinusoids need at least 4"),
]


@pytest.mark.parametrize(("family", "change", "expected"), OPTIONS, ids=[f"{case[0]} {case[1]}" for case in OPTIONS])
def test_an_option_that_is_not_supported_is_refused_by_name_before_any_work(
    plain_folders: Callable[[str], Path], tmp_path: Path, family: str, change: dict[str, Any], expected: str
) -> None:
    folder = Path(shutil.copytree(plain_folders(family), tmp_path / "model"))
    edit_json(folder / "config.json", lambda config: config.update(change))
    if "decoder_start_token_id" in change:
        (folder / "generation_config.json").unlink()
    (folder / WEIGHTS).unlink()  # which nobody got to
    said = refusal_of(folder)
    assert said.startswith(f"{folder / 'config.json'}: ")
    assert expected in said


def test_all_problems_of_the_settings_are_told_at_once(plain_marian: Path) -> None:
    def spoil(config: dict[str, Any]) -> None:
        config.update(activation_function="gelu_new", add_bias_logits=True, d_model="wide", eos_token_id=None)
        del config["encoder_layers"]

    edit_json(plain_marian / "config.json", spoil)
    edit_json(plain_marian / "generation_config.json", lambda config: config.update(eos_token_id=[0, 1]))
    said = refusal_of(plain_marian)
    for part in (
        "activation_function is 'gelu_new'",
        "add_bias_logits is true",
        'd_model is "wide"',
        "encoder_layers is missing",
        "in generation_config.json eos_token_id is [0,1], expected int",
    ):
        assert part in said


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'"text"'])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_settings_that_are_no_object_are_refused(plain_marian: Path, name: str, content: bytes) -> None:
    (plain_marian / name).write_bytes(content)
    assert refusal_of(plain_marian).startswith(f"{plain_marian / name} is not a JSON object: ")


@pytest.mark.parametrize("change", [{"encoder_layerdrop": 0.1}, {"decoder_layerdrop": 0.1}, {"attention_dropout": 0.2}])
def test_what_matters_in_training_alone_is_no_obstacle(plain_marian: Path, change: dict[str, Any]) -> None:
    edit_json(plain_marian / "config.json", lambda config: config.update(change))
    import_model(plain_marian)


# Links.


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", WEIGHTS])
def test_a_link_out_of_the_folder_is_refused(plain_marian: Path, name: str) -> None:
    outside = plain_marian.parent / f"outside-{name}"
    shutil.move(plain_marian / name, outside)
    (plain_marian / name).symlink_to(outside)
    said = refusal_of(plain_marian)
    assert said.startswith(f"{plain_marian / name} leads out of the folder, to {outside}")


def test_a_link_that_leads_nowhere_is_an_error(plain_marian: Path) -> None:
    (plain_marian / "generation_config.json").unlink()
    (plain_marian / "generation_config.json").symlink_to(plain_marian / "gone.json")
    assert refusal_of(plain_marian) == f"{plain_marian / 'generation_config.json'} is missing"


def test_links_within_the_folder_and_to_the_folder_are_followed(plain_marian: Path) -> None:
    (plain_marian / WEIGHTS).rename(plain_marian / "weights-of-yesterday")
    (plain_marian / WEIGHTS).symlink_to("weights-of-yesterday")
    (plain_marian.parent / "latest").symlink_to(plain_marian)
    import_model(plain_marian.parent / "latest")
