"""A team's own code around `torch.nn.Transformer`, imported by its description, against that code, in float64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from importers_support import refusal_of
from models_support import assert_same, outputs_of, random_batch
from safetensors.torch import save_file
from team_support import TeamModel, describe, team_model, write_team_folder
from torch import Tensor

from models.errors import ModelImportError
from models.importers import detect, import_model
from models.importers import torch_transformer as module
from models.transformer import Transformer

LENGTHS = ((5, 6), (3, 6), (7, 6))


@torch.no_grad()
def assert_equal(theirs: TeamModel, ours: Transformer) -> None:
    """Every layer's states, memory, logits, and the keys of every attention."""
    theirs, ours = theirs.double(), ours.double()
    batch = random_batch(ours.config, LENGTHS)
    source, mask, target = batch.source_ids, batch.source_mask, batch.target_ids
    real = mask.bool()
    layers = theirs.core.encoder.layers, theirs.core.decoder.layers
    with outputs_of([*layers[0], *layers[1]]) as expected_states:
        memory, logits = theirs(source, mask, target)
    with outputs_of([*ours.encoder.layers, *ours.decoder.layers]) as states:
        our_memory = ours.encode(source, mask)
        our_logits, cache = ours.prefill(target, our_memory, mask)
    for place, ((mine,), (other,)) in enumerate(zip(states, expected_states, strict=True)):
        if place < len(layers[0]):
            assert_same(mine[real], other[real])
        else:
            assert_same(mine, other)
    assert_same(our_memory[real], memory[real])
    assert_same(our_logits, logits)

    stepped, grown = ours.prefill(target[:, :1], our_memory, mask)
    for place in range(1, target.shape[1]):
        stepped, grown = ours.step(target[:, place : place + 1], mask, grown)
    assert_same(stepped[:, -1], logits[:, -1])
    for layer, own in zip(grown, cache, strict=True):
        for one, other in zip((*layer.decoder, *layer.encoder), (*own.decoder, *own.encoder), strict=True):
            assert_same(one, other)
    for side, theirs_layers, ours_layers in zip(
        ("encoder", "decoder"), layers, (ours.encoder.layers, ours.decoder.layers), strict=True
    ):
        for their_layer, our_layer in zip(theirs_layers, ours_layers, strict=True):
            assert_same_projections(their_layer.self_attn, our_layer.self_attention)
            if side == "decoder":
                assert_same_projections(their_layer.multihead_attn, our_layer.cross_attention)


def assert_same_projections(theirs: Any, ours: Any) -> None:
    """Queries, keys and values: the bias of keys changes nothing that comes after."""
    states = torch.randn(2, 3, theirs.embed_dim, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = torch.nn.functional.linear(states, theirs.in_proj_weight, theirs.in_proj_bias).chunk(3, -1)
    for part, projection in zip(expected, (ours.q_proj, ours.k_proj, ours.v_proj), strict=True):
        assert_same(projection(states), part)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("bias", [True, False])
def test_states_and_logits_equal_those_of_torch(
    tmp_path: Path, activation: str, *, norm_first: bool, bias: bool
) -> None:
    theirs = team_model(activation=activation, norm_first=norm_first, bias=bias)
    description = {"activation": activation, "norm_first": norm_first, "bias": bias}
    folder = write_team_folder(theirs, tmp_path, **description)
    assert detect(folder) == "torch"
    imported = import_model(folder)
    assert imported.kind == "torch"
    assert imported.settings == {}
    assert imported.model.config.final_norm is True
    assert_equal(theirs, imported.model)


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "deep decoder": ({"encoder_layers": 1, "decoder_layers": 3, "ffn": 17}, {}),
    "one vocabulary": ({"source_vocab": 47, "shared": True}, {}),
    "tied head": ({"tied": True}, {}),
    "head without a bias": ({"head_bias": False}, {}),
    "unscaled": ({"scale": False}, {"scale_embedding": False}),
    "own eps": ({"eps": 0.01}, {"layer_norm_eps": 0.01}),
    "no final norms": ({"final_norms": False}, {}),
    "learned positions": ({"positions": "learned"}, {}),
    "positions of either side": ({"positions": "two"}, {}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_the_code_around_it_are_described(tmp_path: Path, name: str) -> None:
    built, described = VARIANTS[name]
    theirs = team_model(**built)
    assert_equal(theirs, import_model(write_team_folder(theirs, tmp_path, **described)).model)


def test_what_is_one_matrix_in_the_code_is_one_here(tmp_path: Path) -> None:
    theirs = team_model(source_vocab=47, shared=True, tied=True)
    model = import_model(write_team_folder(theirs, tmp_path)).model
    assert model.output.weight is model.encoder.embedding.tokens.weight is model.decoder.embedding.tokens.weight


@pytest.mark.parametrize("kind", ["sinusoidal", "sinusoidal-halves"])
def test_sinusoids_that_no_file_holds_are_computed(tmp_path: Path, kind: str) -> None:
    theirs = team_model(positions=kind)
    ignored = {"ignore": ["source_positions.table", "target_positions.table"]}
    folder = write_team_folder(theirs, tmp_path, positions=kind, max_positions=20, **ignored)
    model = import_model(folder).model
    assert model.config.positions == kind
    assert model.config.max_positions == 20
    assert_equal(theirs, model)


def test_safetensors_and_weights_among_other_things_are_read(tmp_path: Path) -> None:
    theirs = team_model()
    folder = write_team_folder(theirs, tmp_path)
    state = theirs.state_dict()
    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, folder / "model.safetensors")
    describe(folder, weights="model.safetensors")
    assert_equal(theirs, import_model(folder).model)
    torch.save({"model": theirs.float().state_dict(), "epoch": 3, "best": [1.0, 2.0]}, folder / "run.pt")
    describe(folder, weights="run.pt", state_dict="model")
    assert_equal(theirs, import_model(folder).model)


def test_prefixes_of_wrappers_are_part_of_the_names(tmp_path: Path) -> None:
    theirs = team_model()
    folder = write_team_folder(theirs, tmp_path)
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in theirs.state_dict().items()}
    torch.save(wrapped, folder / "model.pt")
    describe(folder, prefix="module._orig_mod.")
    assert_equal(theirs, import_model(folder).model)


# The mapping broken on purpose.

BREAKS: dict[str, tuple[str, Any]] = {
    "queries and keys swapped": ("PROJECTIONS", ("k_proj", "q_proj", "v_proj")),
    "keys and values swapped": ("PROJECTIONS", ("q_proj", "v_proj", "k_proj")),
    "attentions swapped": ("ATTENTIONS", {"self_attention": "multihead_attn", "cross_attention": "self_attn"}),
    "norms of the encoder swapped": (
        "NORMS",
        {**module.NORMS, "encoder": {"self_residual.norm": "norm2", "feed_forward_residual.norm": "norm1"}},
    ),
    "norms of the decoder swapped": (
        "NORMS",
        {
            **module.NORMS,
            "decoder": {
                "self_residual.norm": "norm1",
                "cross_residual.norm": "norm3",
                "feed_forward_residual.norm": "norm2",
            },
        },
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_mapping_shows(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # With as many layers of one kind on either side, so that every wrong name is there.
    theirs = team_model()
    where, broken = BREAKS[name]
    monkeypatch.setattr(module, where, broken)
    with pytest.raises((AssertionError, ModelImportError)):
        assert_equal(theirs, import_model(write_team_folder(theirs, tmp_path)).model)


def test_a_change_of_any_single_weight_shows(tmp_path: Path) -> None:
    theirs = team_model(encoder_layers=1, decoder_layers=1)
    model = import_model(write_team_folder(theirs, tmp_path)).model
    with torch.no_grad():
        for weight in model.parameters():
            kept = weight.clone()
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
            with pytest.raises(AssertionError):
                assert_equal(theirs, model)
            weight.copy_(kept)
    assert_equal(theirs, model)


# What cannot be imported.


def test_a_description_that_says_too_little_or_too_much_is_refused_with_every_problem(tmp_path: Path) -> None:
    theirs = team_model()
    folder = write_team_folder(theirs, tmp_path)
    text = (folder / "transformer.toml").read_text("utf-8")
    text = text.replace("heads = 2\n", "").replace('activation = "relu"', 'activation = "tanh"')
    text = text.replace("eos_token_id = 3", 'eos_token_id = "three"').replace("output = ", "outptu = ")
    (folder / "transformer.toml").write_text("colour = 1\n" + text, "utf-8")
    said = refusal_of(folder)
    assert said.startswith(f"{folder / 'transformer.toml'}: ")
    assert "heads is missing" in said
    assert "activation is 'tanh', supported: relu, gelu, silu" in said
    assert 'eos_token_id is "three", expected int' in said
    assert "names.outptu is not a setting" in said
    assert "names.output is missing" in said
    assert "colour is not a setting" in said


def test_a_description_that_is_no_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "transformer.toml").write_text("heads = ", "utf-8")
    assert "is not TOML" in refusal_of(tmp_path)
    (tmp_path / "transformer.toml").write_bytes(b"\xff\xfe\xff")
    assert "is not TOML" in refusal_of(tmp_path)


STATES: dict[str, tuple[Callable[[dict[str, Tensor]], object], list[str]]] = {
    "a layer's tensor is missing": (
        lambda state: [
            state.pop("core.encoder.layers.1.norm2.weight"),
            state.pop("core.decoder.layers.0.linear1.bias"),
        ],
        ["core.encoder.layers.1.norm2.weight is missing", "core.decoder.layers.0.linear1.bias is missing"],
    ),
    "an embedding is missing": (
        lambda state: state.pop("source.weight"),
        ["source.weight, to which transformer.toml points in names.source_embedding, is missing"],
    ),
    "the transformer is elsewhere": (
        lambda state: state.update({f"x.{name}": state.pop(name) for name in list(state) if name.startswith("core")}),
        ["core.encoder.layers.0.linear1.weight, to which transformer.toml points in names.transformer, is missing"],
    ),
    "a stranger": (lambda state: state.update(mask=torch.zeros(3, 3)), ["mask is unexpected"]),
    "another shape": (
        lambda state: state.update({"core.decoder.layers.1.self_attn.in_proj_weight": torch.zeros(8, 24)}),
        ["core.decoder.layers.1.self_attn.in_proj_weight has shape [8, 24], expected [72, 24]"],
    ),
    "keys of another width": (
        lambda state: state.update({"core.decoder.layers.0.multihead_attn.k_proj_weight": torch.zeros(24, 12)}),
        ["core.decoder.layers.0.multihead_attn.k_proj_weight is unexpected"],
    ),
    "NaN": (
        lambda state: state["head.weight"].fill_(float("nan")),
        ["head.weight holds values that are not finite in float32"],
    ),
    "one final norm": (
        lambda state: [state.pop(f"core.encoder.norm.{kind}") for kind in ("weight", "bias")],
        ["one of encoder.norm and decoder.norm is there and the other is not"],
    ),
    "no bias": (
        lambda state: [state.pop(name) for name in list(state) if name.startswith("core") and "bias" in name],
        ["core.encoder.layers.0.self_attn.in_proj_bias is missing"],
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_dict_that_does_not_fit_is_refused_by_name(tmp_path: Path, name: str) -> None:
    theirs = team_model()
    folder = write_team_folder(theirs, tmp_path)
    state = dict(theirs.state_dict())
    change, expected = STATES[name]
    change(state)
    torch.save(state, folder / "model.pt")
    said = refusal_of(folder)
    assert said.startswith(f"{folder / 'model.pt'} does not fit the model: ")
    for problem in expected:
        assert problem in said


def test_contradicting_sizes_name_the_description(tmp_path: Path) -> None:
    theirs = team_model()
    said = refusal_of(write_team_folder(theirs, tmp_path, heads=5, eos_token_id=99))
    assert said.startswith(f"{tmp_path / 'transformer.toml'}: ")
    assert "d_model 24 is not a multiple of encoder_attention_heads 5" in said
    assert "eos_token_id 99 is outside the vocabulary" in said


def test_weights_under_a_name_that_is_not_there_are_refused(tmp_path: Path) -> None:
    theirs = team_model()
    folder = write_team_folder(theirs, tmp_path, state_dict="model")
    assert "has no dictionary of tensors called 'model', which transformer.toml names" in refusal_of(folder)
    describe(folder, weights="gone.pt")
    assert f"{folder / 'gone.pt'} is missing" in refusal_of(folder)
    describe(folder, weights="../model.pt")
    assert "leads out of the folder" in refusal_of(folder)
