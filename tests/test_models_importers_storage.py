"""Ways of storing one model: a file or many, safetensors or pickle, any name of a shared matrix, half precision."""

import json
from pathlib import Path

import pytest
import torch
from equality_support import EQUAL, worst
from importers_support import (
    CLASSES,
    FAMILIES,
    SHAPES,
    edit_json,
    random_folder,
    randomise,
    reference,
    save,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.importers import import_model
from models.transformer import Transformer

pytestmark = pytest.mark.usefixtures("quiet")

all_families = pytest.mark.parametrize("family", FAMILIES)


def as_pickle(folder: Path, name: str = "pytorch_model.bin", tensors: dict[str, Tensor] | None = None) -> None:
    """Take `torch.save` instead of safetensors."""
    stored = load_file(folder / "model.safetensors")
    torch.save(stored if tensors is None else tensors, folder / name)
    (folder / "model.safetensors").unlink()


def all_copies(family: str, folder: Path) -> dict[str, Tensor]:
    """Every name of every matrix, as old files have them."""
    return {name: tensor.float() for name, tensor in reference(family, folder).state_dict().items()}


def same_weights(one: Transformer, other: Transformer) -> bool:
    theirs = dict(other.named_parameters())
    return one.config == other.config and all(
        torch.equal(weight, theirs[name]) for name, weight in one.named_parameters()
    )


@all_families
def test_one_file_or_many_safetensors_or_pickle_is_the_same_model(family: str, tmp_path: Path) -> None:
    shape = SHAPES["deep decoder, odd sizes"]
    whole = import_model(random_folder(family, shape, tmp_path / "whole")).model
    model = reference(family, tmp_path / "whole").float()
    save(model, tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    assert same_weights(import_model(tmp_path / "parts").model, whole)

    save(model, tmp_path / "pickle")
    as_pickle(tmp_path / "pickle")
    assert same_weights(import_model(tmp_path / "pickle").model, whole)

    save(model, tmp_path / "copies")
    as_pickle(tmp_path / "copies", tensors=all_copies(family, tmp_path / "whole"))
    assert same_weights(import_model(tmp_path / "copies").model, whole)

    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    save(model, tmp_path / "pickles")
    first = dict(list(tensors.items())[::2])
    rest = {name: tensor for name, tensor in tensors.items() if name not in first}
    as_pickle(tmp_path / "pickles", "pytorch_model-00001-of-00002.bin", first)
    torch.save(rest, tmp_path / "pickles" / "pytorch_model-00002-of-00002.bin")
    places = dict.fromkeys(first, "pytorch_model-00001-of-00002.bin")
    places |= dict.fromkeys(rest, "pytorch_model-00002-of-00002.bin")
    (tmp_path / "pickles" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}), "utf-8")
    assert same_weights(import_model(tmp_path / "pickles").model, whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@all_families
def test_weights_of_any_precision_are_read_as_they_are(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = randomise(FAMILIES[family](SHAPES["plain"])).to(dtype)
    save(model, tmp_path)
    assert worst(reference(family, tmp_path), import_model(tmp_path).model.double()) < EQUAL


@all_families
def test_names_of_a_model_without_its_head_begin_one_word_later(family: str, tmp_path: Path) -> None:
    folder = random_folder(family, SHAPES["plain"], tmp_path)
    bare = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.startswith("model.")
    }
    save_file(bare, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", lambda config: config.update(architectures=[CLASSES[family][1]]))
    assert worst(reference(family, folder), import_model(folder).model.double()) < EQUAL


@pytest.mark.parametrize(
    "name", ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"]
)
@all_families
def test_any_one_name_of_the_shared_embedding_will_do(family: str, name: str, tmp_path: Path) -> None:
    folder = random_folder(family, SHAPES["plain"], tmp_path)
    whole = import_model(folder).model
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors.pop("model.shared.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert same_weights(import_model(folder).model, whole)


def test_untied_sides_may_differ_and_each_is_computed_with(tmp_path: Path) -> None:
    folder = random_folder("bart", SHAPES["shallow decoder, untied"], tmp_path)
    model = import_model(folder).model
    assert model.config.share_embeddings is False
    assert worst(reference("bart", folder), model.double()) < EQUAL


def test_logits_without_a_bias_need_none(tmp_path: Path) -> None:
    folder = random_folder("marian", SHAPES["plain"], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    bias = tensors.pop("final_logits_bias")
    for stored in (tensors, tensors | {"final_logits_bias": torch.zeros_like(bias)}):
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        model = import_model(folder).model
        assert model.output.bias is None
        assert worst(reference("marian", folder), model.double()) < EQUAL
