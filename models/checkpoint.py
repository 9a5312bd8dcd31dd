"""A checkpoint is a folder: settings in `model.json`, weights in `model.safetensors`, and the tokenizer's files."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from .config import ModelConfig
from .errors import CheckpointError, ConfigError
from .files import replacing
from .transformer import Transformer

CONFIG_FILE = "model.json"
WEIGHTS_FILE = "model.safetensors"
FORMAT = "seq2onnx-checkpoint-1"


class CheckpointHeader(msgspec.Struct, forbid_unknown_fields=True):
    """Contents of `model.json`."""

    format: str
    model: ModelConfig


def save_checkpoint(model: Transformer, folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Write `model` to `folder`, weights as `dtype`. Each file is replaced in one move, never half-written."""
    folder.mkdir(parents=True, exist_ok=True)
    header = msgspec.json.encode(CheckpointHeader(FORMAT, model.config))
    with replacing(folder / CONFIG_FILE) as path:
        path.write_bytes(msgspec.json.format(header, indent=2) + b"\n")
    with replacing(folder / WEIGHTS_FILE) as path:
        path.write_bytes(save({name: tensor.to(dtype) for name, tensor in unique_parameters(model).items()}))


def load_config(folder: Path) -> ModelConfig:
    """The settings of the checkpoint in `folder`.

    Raises:
        CheckpointError: there is no checkpoint, or `model.json` is not what this version reads.
    """
    path = folder / CONFIG_FILE
    try:
        header = msgspec.json.decode(path.read_bytes(), type=CheckpointHeader)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {CONFIG_FILE}") from None
    except (msgspec.DecodeError, ConfigError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    if header.format != FORMAT:
        raise CheckpointError(f"{path}: format is {header.format!r}, this version reads {FORMAT!r}")
    return header.model


def load_checkpoint(folder: Path) -> Transformer:
    """The model in `folder`, in float32 and in evaluation mode.

    Raises:
        CheckpointError: a file is missing or damaged, or names, shapes or values of weights do not fit the settings;
            all problems are listed.
    """
    model = Transformer(load_config(folder))
    load_weights(model, folder / WEIGHTS_FILE)
    return model.eval()


def load_weights(model: Transformer, path: Path) -> None:
    """Copy the weights in `path` into `model`; see `load_checkpoint`."""
    stored = _read(path)
    expected = unique_parameters(model)
    problems = [f"{name} is missing" for name in expected if name not in stored]
    problems += [f"{name} is not a weight of this model" for name in stored if name not in expected]
    for name in expected.keys() & stored.keys():
        if stored[name].shape != expected[name].shape:
            problems.append(f"{name} has shape {list(stored[name].shape)}, expected {list(expected[name].shape)}")
        elif not stored[name].isfinite().all():
            problems.append(f"{name} holds values that are not finite")
    if problems:
        raise CheckpointError(f"{path} does not fit the model: " + "; ".join(sorted(problems)))
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(stored[name])


def average_weights(paths: Sequence[Path]) -> dict[str, Tensor]:
    """Mean of each weight over the files in `paths`, accumulated in float64 (section 6.1 averages the last 5 or 20).

    Raises:
        CheckpointError: there is no file, one cannot be read, or they hold weights of different models.
    """
    if not paths:
        raise CheckpointError("no checkpoints to average")
    totals = {name: tensor.double() for name, tensor in _read(paths[0]).items()}
    for path in paths[1:]:
        stored = _read(path)
        if {name: tensor.shape for name, tensor in stored.items()} != {
            name: total.shape for name, total in totals.items()
        }:
            raise CheckpointError(f"{path} cannot be averaged with {paths[0]}: names or shapes of weights differ")
        for name, tensor in stored.items():
            totals[name] += tensor.double()
    return {name: (total / len(paths)).float() for name, total in totals.items()}


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def unique_parameters(model: Transformer) -> dict[str, Tensor]:
    """The model's weights by name; a shared weight appears once, under its first name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
