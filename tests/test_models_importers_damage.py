"""Weights that cannot be imported: damaged, of another model, with code in them, or cut into parts that do not fit."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from importers_support import Malice, edit_json, edit_weights, refusal_of, save
from importers_support import reference as from_transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

pytestmark = pytest.mark.usefixtures("quiet")

WEIGHTS = "model.safetensors"


SPOILT: dict[str, tuple[Callable[[dict[str, Tensor]], object], list[str]]] = {
    "tensors are missing": (
        lambda tensors: [
            tensors.pop("model.encoder.layers.1.fc1.weight"),
            tensors.pop("model.decoder.layers.0.encoder_attn.v_proj.bias"),
        ],
        ["model.encoder.layers.1.fc1.weight is missing", "model.decoder.layers.0.encoder_attn.v_proj.bias is missing"],
    ),
    "all names of the embedding are missing": (
        lambda tensors: tensors.pop("model.shared.weight"),
        ["model.shared.weight or model.encoder.embed_tokens.weight or model.decoder.embed_tokens.weight or"],
    ),
    "another shape": (
        lambda tensors: tensors.update({"model.decoder.layers.1.fc2.weight": torch.zeros(40, 24)}),
        ["model.decoder.layers.1.fc2.weight has shape [40, 24], expected [24, 40]"],
    ),
    "embedding larger than the vocabulary": (
        lambda tensors: tensors.update({"model.shared.weight": torch.ones(64, 24)}),
        ["model.shared.weight has shape [64, 24], expected [61, 24]"],
    ),
    "embedding smaller than the vocabulary": (
        lambda tensors: tensors.update({"model.shared.weight": torch.ones(60, 24)}),
        ["model.shared.weight has shape [60, 24], expected [61, 24]"],
    ),
    "NaN": (
        lambda tensors: tensors["model.encoder.layers.0.fc1.bias"].__setitem__(3, float("nan")),
        ["model.encoder.layers.0.fc1.bias holds values that are not finite"],
    ),
    "infinity": (
        lambda tensors: tensors["model.shared.weight"].__setitem__((3, 3), float("-inf")),
        ["model.shared.weight holds values that are not finite"],
    ),
    "too large for float32": (
        lambda tensors: tensors.update({"final_logits_bias": torch.full((1, 61), 1e300, dtype=torch.float64)}),
        ["final_logits_bias holds values that are not finite in float32"],
    ),
    "quantised weights": (
        lambda tensors: tensors.update({"model.encoder.layers.0.fc1.weight": torch.zeros(40, 24, dtype=torch.int8)}),
        ["model.encoder.layers.0.fc1.weight holds int8, expected floating-point numbers"],
    ),
    "strangers": (
        lambda tensors: tensors.update(
            {"model.encoder.layers.2.fc1.weight": torch.zeros(1), "classification_head.dense.bias": torch.zeros(1)}
        ),
        ["model.encoder.layers.2.fc1.weight is unexpected", "classification_head.dense.bias is unexpected"],
    ),
    "a final norm that Marian has not": (
        lambda tensors: tensors.update({"model.encoder.layer_norm.weight": torch.zeros(24)}),
        ["model.encoder.layer_norm.weight is unexpected"],
    ),
    "a head that should be tied": (
        lambda tensors: tensors.update({"lm_head.weight": torch.zeros(61, 24)}),
        ["lm_head.weight differs from model.shared.weight, but config.json says tie_word_embeddings"],
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_weights_that_do_not_fit_are_all_named(plain_marian: Path, name: str) -> None:
    change, expected = SPOILT[name]
    edit_weights(plain_marian, change)
    said = refusal_of(plain_marian)
    assert said.startswith(f"{plain_marian / WEIGHTS} does not fit the model: ")
    for problem in expected:
        assert problem in said


def test_different_kinds_of_problems_are_told_at_once(plain_marian: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors.pop("model.encoder.layers.1.fc1.weight")
        tensors["model.decoder.layers.1.fc2.weight"] = torch.zeros(1, 2)
        tensors["model.shared.weight"].fill_(float("nan"))
        tensors["stranger"] = torch.zeros(1)

    edit_weights(plain_marian, spoil)
    said = refusal_of(plain_marian)
    assert [word in said for word in ("is missing", "has shape [1, 2]", "not finite", "stranger is unexpected")] == [
        True
    ] * 4


def test_a_great_many_problems_stay_one_readable_line(plain_marian: Path) -> None:
    edit_weights(plain_marian, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers." in name])
    said = refusal_of(plain_marian)
    assert said.count("is missing") == 12
    assert said.endswith("more")


def test_missing_weights_are_refused_with_the_names_that_were_looked_for(plain_marian: Path) -> None:
    (plain_marian / WEIGHTS).unlink()
    said = refusal_of(plain_marian)
    assert "has no weights" in said
    assert all(name in said for name in (WEIGHTS, "model.safetensors.index.json", "pytorch_model.bin"))


@pytest.mark.parametrize("size", [0, 4, 100, 5000])
def test_truncated_safetensors_are_refused(plain_marian: Path, size: int) -> None:
    (plain_marian / WEIGHTS).write_bytes((plain_marian / WEIGHTS).read_bytes()[:size])
    assert refusal_of(plain_marian).startswith(f"{plain_marian / WEIGHTS} cannot be read: ")


# Pickles.


def as_pickle(folder: Path, content: object) -> Path:
    (folder / WEIGHTS).unlink()
    torch.save(content, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def test_code_in_a_pickle_is_never_run(plain_marian: Path, tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    path = as_pickle(plain_marian, {"model.shared.weight": Malice(traces)})
    said = refusal_of(plain_marian)
    assert said.startswith(f"{path} holds Python code or is damaged")
    path.write_bytes(pickle.dumps(Malice(traces)))  # of the old format, without a zip around it
    assert refusal_of(plain_marian).startswith(f"{path} ")
    assert not traces.exists()


def test_a_pickled_module_is_refused(plain_marian: Path) -> None:
    assert "Save the state_dict() of the model" in as_pickle_refused(plain_marian, torch.nn.Linear(2, 2))


def as_pickle_refused(folder: Path, content: object) -> str:
    as_pickle(folder, content)
    return refusal_of(folder)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([torch.zeros(2)], "holds a list, expected a dictionary of tensors"),
        ({"model": {"a": torch.zeros(2)}, "epoch": 3}, "holds entries that are no tensors: model, epoch"),
    ],
)
def test_a_pickle_of_something_else_is_refused(plain_marian: Path, content: object, expected: str) -> None:
    assert expected in as_pickle_refused(plain_marian, content)


@pytest.mark.parametrize("size", [0, 10, 3000])
def test_a_truncated_pickle_is_refused(plain_marian: Path, size: int) -> None:
    path = as_pickle(plain_marian, load_file(plain_marian / WEIGHTS))
    path.write_bytes(path.read_bytes()[:size])
    assert refusal_of(plain_marian).startswith(f"{path} ")


# Parts.


@pytest.fixture
def parts(plain_folders: Callable[[str], Path], tmp_path: Path) -> Path:
    """A folder whose weights are cut into files."""
    folder = save(
        from_transformers("marian", plain_folders("marian")).float(), tmp_path / "parts", max_shard_size="20KB"
    )
    assert (folder / f"{WEIGHTS}.index.json").exists()
    return folder


def test_a_part_that_is_missing_is_named(parts: Path) -> None:
    part = sorted(parts.glob("*.safetensors"))[1]
    part.unlink()
    assert refusal_of(parts) == f"{part} is missing"


def test_parts_that_hold_something_else_than_the_index_says_are_refused(parts: Path) -> None:
    part = sorted(parts.glob("*.safetensors"))[0]
    tensors = load_file(part)
    lost = next(iter(tensors))
    tensors["stranger"] = tensors.pop(lost)
    save_file(tensors, part, {"format": "pt"})
    said = refusal_of(parts)
    assert f"{part.name} has no {lost}" in said
    assert f"{part.name} holds stranger, which the index does not say" in said


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": 3}}])
def test_an_index_without_places_is_refused(parts: Path, index: dict[str, Any]) -> None:
    (parts / f"{WEIGHTS}.index.json").write_text(json.dumps(index), "utf-8")
    assert "weight_map is not an object of tensor names and file names" in refusal_of(parts)


def test_parts_outside_of_the_folder_are_refused(parts: Path) -> None:
    part = sorted(parts.glob("*.safetensors"))[0]
    shutil.move(part, parts.parent / "outside.safetensors")
    edit_json(
        parts / f"{WEIGHTS}.index.json",
        lambda index: index["weight_map"].update(
            {name: "../outside.safetensors" for name, place in index["weight_map"].items() if place == part.name}
        ),
    )
    assert "leads out of the folder" in refusal_of(parts)
