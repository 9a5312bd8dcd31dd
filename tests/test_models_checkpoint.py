"""Checkpoints: what is written is what is read, and what does not fit is refused with every reason on one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models_support import TINY, all_variants, random_batch, random_model, tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.checkpoint import (
    CONFIG_FILE,
    FORMAT,
    WEIGHTS_FILE,
    average_weights,
    load_checkpoint,
    load_config,
    save_checkpoint,
    unique_parameters,
)
from models.errors import CheckpointError
from models.files import replacing
from models.transformer import Transformer


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@all_variants
def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path, changes: dict[str, Any]) -> None:
    model, batch = random_model(tiny(**changes)).float(), random_batch(tiny(**changes))
    save_checkpoint(model, tmp_path / "deep" / "folder")
    loaded = load_checkpoint(tmp_path / "deep" / "folder")
    assert files(tmp_path / "deep" / "folder") == [CONFIG_FILE, WEIGHTS_FILE]
    assert loaded.config == model.config == load_config(tmp_path / "deep" / "folder")
    assert not loaded.training
    assert [name for name, _ in loaded.named_parameters()] == [name for name, _ in model.named_parameters()]
    for weight, expected in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(weight, expected)
    assert torch.equal(loaded(*batch[:3]), model(*batch[:3]))
    # Shared weights are shared again.
    assert (loaded.output.weight is loaded.decoder.embedding.tokens.weight) == model.config.tie_output


@all_variants
def test_a_shared_weight_is_stored_once(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = tiny(**changes)
    save_checkpoint(Transformer(config), tmp_path)
    vocabulary = [name for name, tensor in load_file(tmp_path / WEIGHTS_FILE).items() if tensor.shape[1:] == (8,)]
    tables = [name for name in vocabulary if "tokens" in name or name == "output.weight"]
    assert len(tables) == 1 + (not config.share_embeddings) + (not config.tie_output)


def test_weights_can_be_stored_in_half_precision(tmp_path: Path) -> None:
    model = random_model(TINY).float()
    save_checkpoint(model, tmp_path, dtype=torch.float16)
    assert {tensor.dtype for tensor in load_file(tmp_path / WEIGHTS_FILE).values()} == {torch.float16}
    for weight, expected in zip(load_checkpoint(tmp_path).parameters(), model.parameters(), strict=True):
        assert weight.dtype == torch.float32
        assert torch.equal(weight, expected.half().float())


def damaged(folder: Path, damage: Callable[[dict[str, Tensor]], object]) -> str:
    """The error of loading a checkpoint whose weights went through `damage`."""
    save_checkpoint(random_model(TINY), folder)
    weights = load_file(folder / WEIGHTS_FILE)
    damage(weights)
    save_file(weights, folder / WEIGHTS_FILE)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    message = str(caught.value)
    assert message.startswith(f"{folder / WEIGHTS_FILE} does not fit the model: ")
    assert "\n" not in message
    return message.removeprefix(f"{folder / WEIGHTS_FILE} does not fit the model: ")


NAME = "decoder.layers.1.feed_forward.fc1.weight"


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    assert damaged(tmp_path, lambda weights: weights.pop(NAME)) == f"{NAME} is missing"


def test_a_weight_too_many_is_named(tmp_path: Path) -> None:
    message = damaged(tmp_path, lambda weights: weights.update({"decoder.extra": torch.zeros(1)}))
    assert message == "decoder.extra is not a weight of this model"


def test_a_weight_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    message = damaged(tmp_path, lambda weights: weights.update({NAME: weights[NAME].T.contiguous()}))
    assert message == f"{NAME} has shape [8, 16], expected [16, 8]"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, value: float) -> None:
    message = damaged(tmp_path, lambda weights: weights[NAME][3].fill_(value))
    assert message == f"{NAME} holds values that are not finite"


def test_all_problems_of_the_weights_are_listed_at_once(tmp_path: Path) -> None:
    def damage(weights: dict[str, Tensor]) -> None:
        del weights["decoder.layers.0.feed_forward.fc1.bias"]
        weights["a.b"] = torch.zeros(2)
        weights["decoder.layers.0.feed_forward.fc2.bias"] = torch.zeros(3)
        weights["encoder.layers.1.self_attention.q_proj.bias"][0] = float("nan")

    assert damaged(tmp_path, damage).split("; ") == [
        "a.b is not a weight of this model",
        "decoder.layers.0.feed_forward.fc1.bias is missing",
        "decoder.layers.0.feed_forward.fc2.bias has shape [3], expected [8]",
        "encoder.layers.1.self_attention.q_proj.bias holds values that are not finite",
    ]


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: it has no model\.json$"):
        load_checkpoint(tmp_path)
    save_checkpoint(Transformer(TINY), tmp_path)
    (tmp_path / WEIGHTS_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing$"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_weights_file_cut_short_is_refused(tmp_path: Path, kept: int) -> None:
    save_checkpoint(Transformer(TINY), tmp_path)
    path = tmp_path / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: "):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "seq2onnx-checkpoint-9"}, f"format is 'seq2onnx-checkpoint-9', this version reads '{FORMAT}'"),
        ({"tokenizer": "x"}, "unknown field `tokenizer`"),
        ({"model": {"vocab_size": 9, "dropout": 3}}, "dropout is 3"),
        ({"model": {"vocab_size": 9, "norm": "both"}}, r"`\$\.model\.norm`"),
        ({"model": {}}, "missing required field `vocab_size`"),
    ],
)
def test_settings_of_another_format_or_with_wrong_fields_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    save_checkpoint(Transformer(TINY), tmp_path)
    path = tmp_path / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=rf"model\.json: .*{message}") as caught:
        load_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe"])
def test_settings_that_are_no_json_are_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / CONFIG_FILE).write_bytes(text)
    with pytest.raises(CheckpointError, match=r"model\.json: "):
        load_config(tmp_path)


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = random_model(TINY, seed=1).float()
    save_checkpoint(old, tmp_path)

    write_bytes = Path.write_bytes

    def full_disk(path: Path, data: bytes) -> int:
        write_bytes(path, data[:100])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(random_model(TINY, seed=2), tmp_path)
    assert files(tmp_path) == [CONFIG_FILE, WEIGHTS_FILE]
    for weight, expected in zip(load_checkpoint(tmp_path).parameters(), old.parameters(), strict=True):
        assert torch.equal(weight, expected)


def test_a_file_is_replaced_in_one_move(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == path.parent
    assert path.read_text() == "new"
    assert files(tmp_path) == ["file"]


def averaged(folder: Path, *contents: dict[str, Tensor]) -> dict[str, Tensor]:
    paths = [folder / f"{index}.safetensors" for index in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        save_file(content, path)
    return average_weights(paths)


def test_averaging_takes_the_mean_of_every_weight(tmp_path: Path) -> None:
    models = [unique_parameters(random_model(TINY, seed).float()) for seed in range(3)]
    mean = averaged(tmp_path, *models)
    assert mean.keys() == models[0].keys()
    for name, weight in mean.items():
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight, torch.stack([model[name] for model in models]).double().mean(0).float())
    # One file is its own mean.
    for name, weight in averaged(tmp_path, models[1]).items():
        assert torch.equal(weight, models[1][name])


def test_averaging_adds_up_in_double_precision(tmp_path: Path) -> None:
    contents = [{"w": torch.tensor([value])} for value in (2.0**25, 1.0, 1.0, -(2.0**25))]
    assert averaged(tmp_path, *contents)["w"].item() == 0.5
    halves = [{"w": torch.tensor([value], dtype=torch.float16)} for value in (60_000.0, 60_000.0)]
    assert averaged(tmp_path, *halves)["w"].item() == pytest.approx(60_000, abs=32)


def test_averaging_nothing_or_different_models_is_refused(tmp_path: Path) -> None:
    one = {"w": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"^no checkpoints to average$"):
        average_weights([])
    for other in ({"v": torch.zeros(2)}, {"w": torch.zeros(1)}, {"w": torch.zeros(2), "v": torch.zeros(2)}, {}):
        with pytest.raises(CheckpointError, match="names or shapes of weights differ"):
            averaged(tmp_path, one, other)
    with pytest.raises(CheckpointError, match="is missing"):
        average_weights([tmp_path / "none.safetensors"])
