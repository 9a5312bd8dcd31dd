"""From a folder of another library to a checkpoint of ours: the same model, text and defaults, or nothing at all."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from importers_support import FAMILIES, refusal
from runtime_support import TINY
from team_support import complete_team_folder

from exporters.companions import model_settings, search_defaults
from exporters.conversion import convert_folder
from exporters.errors import ExportError
from exporters.source import exam_sentences, open_source
from models.errors import ModelError
from runtime.tokenizer import TOKENIZER_FILES

pytestmark = pytest.mark.usefixtures("quiet")

all_families = pytest.mark.parametrize("family", FAMILIES)


@all_families
def test_a_converted_folder_holds_the_same_model_text_and_defaults(
    complete_folders: Callable[[str], Path], family: str, tmp_path: Path
) -> None:
    folder, target = complete_folders(family), tmp_path / "some" / "where"
    said: list[str] = []
    config = convert_folder(folder, target, say=said.append)
    assert said == ["reading the model", "writing the checkpoint"]
    names = {
        *TOKENIZER_FILES,
        "model.json",
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "sentences.txt",
    }
    assert {path.name for path in target.iterdir()} == names
    assert [path.name for path in target.parent.iterdir()] == ["where"]

    before, after = open_source(folder), open_source(target)
    assert before.model.config == after.model.config == config
    theirs = dict(before.model.named_parameters())
    assert all(torch.equal(weight, theirs[name]) for name, weight in after.model.named_parameters())
    assert before.settings == after.settings
    assert after.foreign
    assert search_defaults(folder, config) == search_defaults(target, config)
    assert exam_sentences(folder, before) == exam_sentences(target, after)


def test_a_transformer_of_torch_becomes_a_checkpoint_too(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder = complete_team_folder(tmp_path / "model")
    convert_folder(folder, tmp_path / "checkpoint")
    source = open_source(tmp_path / "checkpoint")
    assert source.settings == {}
    assert not (tmp_path / "checkpoint" / "config.json").exists()
    assert model_settings(source.model.config, source.settings)["model_type"] == "marian"
    assert len(exam_sentences(tmp_path / "checkpoint", source)) == 3


def test_what_stands_at_the_target_is_replaced_only_with_force_and_if_it_is_a_checkpoint(
    complete_marian: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    convert_folder(complete_marian, target)
    (target / "note.txt").write_text("old")
    with pytest.raises(ExportError, match="exists already: choose another folder, or replace it with --force"):
        convert_folder(complete_marian, target)
    assert (target / "note.txt").exists()
    convert_folder(complete_marian, target, force=True)
    assert not (target / "note.txt").exists()
    with pytest.raises(ExportError, match="is not a checkpoint: choose another folder"):
        convert_folder(complete_marian, complete_marian, force=True)
    with pytest.raises(ExportError, match="is a checkpoint already: it needs no import"):
        convert_folder(target, tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "target"]


def test_a_bundle_is_nothing_to_start_from(tmp_path: Path) -> None:
    """Although its `config.json` looks like that of a model."""
    shutil.copytree(TINY, tmp_path / "bundle")
    assert "is not a checkpoint but a bundle: give what it was exported from" in refusal(tmp_path / "bundle")


def test_a_failure_half_way_leaves_nothing(complete_marian: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("exporters.conversion.write_companions", fail)
    assert refusal(complete_marian, OSError) == "disk full"


def test_bad_weights_leave_nothing(complete_marian: Path) -> None:
    (complete_marian / "model.safetensors").write_bytes(b"1234")
    assert "model.safetensors cannot be read" in refusal(complete_marian, ModelError)


def test_damaged_settings_in_a_checkpoint_name_the_file(complete_marian: Path, tmp_path: Path) -> None:
    convert_folder(complete_marian, tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text("[")
    with pytest.raises(ExportError, match=r"config\.json is not a JSON object"):
        open_source(tmp_path / "target")
