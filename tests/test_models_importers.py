"""Imported models against transformers' own modules over the same files, in float64: every layer, logit and cache."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from equality_support import EQUAL, differences, distance, worst
from importers_support import (
    FAMILIES,
    POSITIONS,
    SEPARATE,
    SHAPES,
    Shape,
    edit_json,
    random_folder,
    reference,
)
from models_support import random_batch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.checkpoint import load_checkpoint, save_checkpoint
from models.errors import ModelImportError
from models.importers import detect, import_model
from models.importers import hugging_face as module
from models.importers.m2m100 import fairseq_sinusoids
from models.importers.mapping import fill as plain_fill
from models.transformer import Transformer

pytestmark = pytest.mark.usefixtures("quiet")

CASES = [
    *((family, name, shape) for family in FAMILIES for name, shape in SHAPES.items()),
    *(("marian", name, shape) for name, shape in SEPARATE.items()),
]
all_cases = pytest.mark.parametrize(
    ("family", "shape"), [pytest.param(family, shape, id=f"{family}: {name}") for family, name, shape in CASES]
)
all_families = pytest.mark.parametrize("family", FAMILIES)


# The same numbers.


@all_cases
def test_every_layer_logit_and_cache_equals_that_of_transformers(family: str, shape: Shape, tmp_path: Path) -> None:
    folder = random_folder(family, shape, tmp_path)
    assert detect(folder) == family
    imported = import_model(folder)
    found = differences(reference(family, folder), imported.model.double())
    layers = shape.encoder_layers + shape.decoder_layers
    assert len(found) == 3 + layers + shape.encoder_layers + 8 * shape.decoder_layers
    assert max(found.values()) < EQUAL, found


@all_families
def test_a_change_of_any_single_weight_shows(family: str, tmp_path: Path) -> None:
    """So that the test above would see any weight that is lost, swapped or moved."""
    shape = Shape(encoder_layers=1, decoder_layers=1)
    folder = random_folder(family, shape, tmp_path)
    theirs, ours = reference(family, folder), import_model(folder).model.double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            kept = weight.clone()
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
            assert worst(theirs, ours) > 1e-4, name
            weight.copy_(kept)
    assert worst(theirs, ours) < EQUAL


@all_families
def test_the_settings_are_those_of_the_folder(family: str, tmp_path: Path) -> None:
    shape = SHAPES["deep decoder, odd sizes"]
    imported = import_model(random_folder(family, shape, tmp_path, dropout=0.25))
    config = imported.model.config
    theirs = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert imported.kind == theirs["model_type"] == family
    for name in ("vocab_size", "d_model", "encoder_layers", "decoder_layers", "encoder_ffn_dim", "decoder_ffn_dim"):
        assert getattr(config, name) == theirs[name]
    for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id", "dropout", "scale_embedding"):
        assert getattr(config, name) == theirs[name]
    assert config.max_positions == POSITIONS
    assert not imported.model.training
    assert imported.settings.items() <= theirs.items()


@all_families
def test_a_checkpoint_of_ours_keeps_the_imported_model(family: str, tmp_path: Path) -> None:
    model = import_model(random_folder(family, SHAPES["plain"], tmp_path / "theirs")).model
    save_checkpoint(model, tmp_path / "ours")
    assert detect(tmp_path / "ours") == "checkpoint"
    loaded = load_checkpoint(tmp_path / "ours")
    assert loaded.config == model.config
    assert all(torch.equal(weight, dict(model.named_parameters())[name]) for name, weight in loaded.named_parameters())


def test_what_is_one_matrix_there_is_one_here(tmp_path: Path) -> None:
    shared = import_model(random_folder("marian", SHAPES["plain"], tmp_path / "shared")).model
    assert shared.output.weight is shared.encoder.embedding.tokens.weight is shared.decoder.embedding.tokens.weight
    separate = import_model(random_folder("marian", SEPARATE["own source vocabulary"], tmp_path / "separate")).model
    assert separate.output.weight is separate.decoder.embedding.tokens.weight
    assert separate.encoder.embedding.tokens.weight is not separate.decoder.embedding.tokens.weight


# The mapping broken on purpose.


def swapped(one: str, other: str) -> Callable[[str], str]:
    whole = module.their_name

    def their_name(name: str) -> str:
        found = whole(name)
        return found.replace(one, "?").replace(other, one).replace("?", other)

    return their_name


def changed(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Transformer, dict[str, Tensor]], Transformer]:
    def fill(model: Transformer, tensors: dict[str, Tensor]) -> Transformer:
        change(tensors)
        return plain_fill(model, tensors)

    return fill


BREAKS: dict[str, tuple[str, Any]] = {
    "queries and keys of self-attention swapped": ("their_name", swapped("self_attn.q_proj", "self_attn.k_proj")),
    "keys and values of cross-attention swapped": ("their_name", swapped("encoder_attn.k_proj", "encoder_attn.v_proj")),
    "norms of a layer swapped": ("their_name", swapped("self_attn_layer_norm", "final_layer_norm")),
    "layers in another order": ("their_name", swapped("layers.0", "layers.1")),
    "a bias dropped": (
        "fill",
        changed(lambda tensors: tensors["decoder.layers.1.feed_forward.fc2.bias"].zero_()),
    ),
    "the bias of keys dropped": (
        "fill",
        changed(lambda tensors: tensors["encoder.layers.0.self_attention.k_proj.bias"].zero_()),
    ),
}


@all_families
@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_mapping_shows(family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = random_folder(family, SHAPES["plain"], tmp_path)
    where, broken = BREAKS[name]
    monkeypatch.setattr(module, where, broken)
    assert worst(reference(family, folder), import_model(folder).model.double()) > 1e-3


@pytest.mark.parametrize("family", ["bart", "mbart", "m2m_100"])
def test_positions_that_are_off_by_one_show(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shift(tensors: dict[str, Tensor]) -> None:
        name = "encoder.embedding.positions.table"
        tensors[name] = tensors[name].roll(1, 0)

    monkeypatch.setattr(module, "fill", changed(shift))
    folder = random_folder(family, SHAPES["plain"], tmp_path)
    assert worst(reference(family, folder), import_model(folder).model.double()) > 1e-3


@pytest.mark.parametrize("family", ["marian", "bart", "mbart"])
def test_a_lost_bias_of_the_logits_shows(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = module.Family.vectors
    monkeypatch.setattr(module.Family, "vectors", lambda *arguments: whole(*arguments)._replace(bias=None))
    folder = random_folder(family, SHAPES["plain"], tmp_path)
    assert worst(reference(family, folder), import_model(folder).model.double()) > 1e-3


# Positions.


@pytest.mark.parametrize("same", [True, False])
def test_marians_stored_positions_are_computed_with(tmp_path: Path, *, same: bool) -> None:
    folder = random_folder("marian", SHAPES["plain"], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for side in ("encoder", "decoder"):
        table = reference("marian", folder).model.get_submodule(side).embed_positions.weight.float()
        tensors[f"model.{side}.embed_positions.weight"] = table.clone() if same else table * 1.01
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = import_model(folder).model
    assert model.config.positions == ("sinusoidal-halves" if same else "learned")
    assert worst(reference("marian", folder), model.double()) < EQUAL


@pytest.mark.parametrize("pad", [1, 3])
@pytest.mark.parametrize("width", [24, 26])
def test_m2m100s_positions_begin_after_the_pad_row(tmp_path: Path, pad: int, width: int) -> None:
    shape = Shape(width=width, encoder_heads=2, decoder_heads=2)
    folder = random_folder("m2m_100", shape, tmp_path, pad_token_id=pad)
    model = import_model(folder).model
    theirs = reference("m2m_100", folder)
    table = theirs.model.encoder.embed_positions.weights.float()[pad + 1 : pad + 1 + POSITIONS]
    assert torch.equal(model.encoder.embedding.positions.table[: len(table)], table)
    assert worst(theirs, model.double()) < EQUAL


@pytest.mark.parametrize("rounded", [True, False])
def test_m2m100s_stored_positions_must_be_those_that_it_computes(tmp_path: Path, *, rounded: bool) -> None:
    folder = random_folder("m2m_100", SHAPES["plain"], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    table = torch.cat([torch.zeros(2, 24), fairseq_sinusoids(POSITIONS, 24, first=2)])
    name = "model.encoder.embed_positions.weights"
    tensors[name] = table.half() if rounded else table.roll(1, 0)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if rounded:
        assert worst(reference("m2m_100", folder), import_model(folder).model.double()) < EQUAL
    else:
        with pytest.raises(ModelImportError, match=f"{name} is not the table of positions that this model computes"):
            import_model(folder)


@torch.no_grad()
def test_a_pad_inside_of_an_output_has_a_position_though_m2m100_of_transformers_gives_it_none(tmp_path: Path) -> None:
    folder = random_folder("m2m_100", SHAPES["plain"], tmp_path)
    theirs, ours = reference("m2m_100", folder), import_model(folder).model.double()
    batch = random_batch(ours.config, [(6, 8)])
    target = batch.target_ids.clone()
    target[:, 4] = ours.config.pad_token_id
    expected = theirs(input_ids=batch.source_ids, attention_mask=batch.source_mask, decoder_input_ids=target).logits
    found = ours(batch.source_ids, batch.source_mask, target)
    assert distance(found[:, :4], expected[:, :4]) < EQUAL
    assert distance(found[:, 4:], expected[:, 4:]) > 1e-3


@all_families
def test_sequences_as_long_as_the_positions_are_equal_too(family: str, tmp_path: Path) -> None:
    folder = random_folder(family, SHAPES["plain"], tmp_path)
    theirs, ours = reference(family, folder), import_model(folder).model.double()
    batch = random_batch(ours.config, [(POSITIONS, POSITIONS), (2, POSITIONS)])
    with torch.no_grad():
        expected = theirs(
            input_ids=batch.source_ids, attention_mask=batch.source_mask, decoder_input_ids=batch.target_ids
        )
        assert distance(ours(batch.source_ids, batch.source_mask, batch.target_ids), expected.logits) < EQUAL


# Special ids.


@all_families
def test_the_search_settings_go_first_for_start_and_end_as_in_generate(family: str, tmp_path: Path) -> None:
    folder = random_folder(family, SHAPES["plain"], tmp_path)
    edit_json(
        folder / "generation_config.json", lambda config: config.update(decoder_start_token_id=7, eos_token_id=[8])
    )
    config = import_model(folder).model.config
    assert (config.decoder_start_token_id, config.eos_token_id) == (7, 8)
    edit_json(folder / "generation_config.json", lambda config: config.update(decoder_start_token_id=None))
    theirs = json.loads((folder / "config.json").read_text("utf-8"))
    assert import_model(folder).model.config.decoder_start_token_id == theirs["decoder_start_token_id"]
    (folder / "generation_config.json").unlink()
    assert import_model(folder).model.config.eos_token_id == theirs["eos_token_id"]


def test_old_checkpoints_know_no_norm_of_embeddings(tmp_path: Path) -> None:
    """What this version added to the settings has defaults that mean what was before."""
    model = import_model(random_folder("marian", SHAPES["plain"], tmp_path / "theirs")).model
    save_checkpoint(model, tmp_path / "ours")
    edit_json(
        tmp_path / "ours" / "model.json",
        lambda header: [header["model"].pop(name) for name in ("embedding_norm", "final_norm")],
    )
    assert load_checkpoint(tmp_path / "ours").config == model.config
    pre = msgspec.structs.replace(model.config, norm="pre")
    assert pre.ends_in_norm
    assert not model.config.ends_in_norm
