"""Files of a folder that somebody else wrote: settings and tensors, read without trust in names, links or contents."""

import pickle
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..errors import ModelImportError

CONFIG = "config.json"
GENERATION = "generation_config.json"
SAFETENSORS = "model.safetensors"
PICKLED = "pytorch_model.bin"
WEIGHT_FILES = (SAFETENSORS, f"{SAFETENSORS}.index.json", PICKLED, f"{PICKLED}.index.json")
"""Where weights are looked for, the first that is there counts. An index names the parts that weights are cut into."""


def stands(folder: Path, name: str) -> bool:
    """Whether `folder` has something called `name`; a link that leads nowhere counts: it is an error, no absence."""
    return (folder / name).exists() or (folder / name).is_symlink()


def own_file(folder: Path, name: str) -> Path:
    """The file `name` of `folder`.

    Raises:
        ModelImportError: it is missing, or lies outside of the folder: what comes from elsewhere must not make us read
            other files of this machine.
    """
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ModelImportError(
            f"{path} leads out of the folder, to {path.resolve()}: copy what it points to (cp -L) if you trust it"
        )
    if not path.is_file():
        raise ModelImportError(f"{path} is missing")
    return path


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in the file `name` of `folder`.

    Raises:
        ModelImportError: the file is missing, outside of the folder, or no JSON object.
    """
    path = own_file(folder, name)
    try:
        content: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelImportError(f"{path} is not a JSON object: {error}") from None
    return content


def read_weights(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """Tensors by name, of the first of `WEIGHT_FILES` that `folder` has, and that file's path.

    Raises:
        ModelImportError: there is none, one is damaged, or a part does not hold what the index says.
    """
    for name in WEIGHT_FILES:
        if stands(folder, name):
            path = own_file(folder, name)
            return path, _read_parts(folder, name) if name.endswith(".json") else read_tensors(path)
    raise ModelImportError(f"{folder} has no weights: expected one of {', '.join(WEIGHT_FILES)}")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors by name, of one safetensors file or of one that `torch.save` wrote; code in it is never run.

    Raises:
        ModelImportError: it is damaged, or holds something else.
    """
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise ModelImportError(f"{path} cannot be read: {error}") from None
    return _tensors_of(path, read_pickled(path))


def read_pickled(path: Path) -> object:
    """What `torch.save` wrote to `path`: tensors, numbers, strings and containers of these; nothing else is loaded."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles that torch did not write: these are refused or good
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ModelImportError(
            f"{path} holds Python code or is damaged: only tensors are read, code is never run. "
            "Save the state_dict() of the model"
        ) from None
    except Exception as error:  # a damaged pickle makes the reader stumble in any way
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise ModelImportError(f"{path} cannot be read: {reason or type(error).__name__}") from None


def _tensors_of(path: Path, content: object) -> dict[str, Tensor]:
    if not isinstance(content, dict):
        raise ModelImportError(f"{path} holds a {type(content).__name__}, expected a dictionary of tensors")
    strangers = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if strangers:
        raise ModelImportError(f"{path} holds entries that are no tensors: {listed(strangers)}")
    return {str(name): value for name, value in content.items()}


def _read_parts(folder: Path, index: str) -> dict[str, Tensor]:
    """All tensors of a checkpoint that was cut into files. Each must be where the index says, and nowhere else."""
    parts = read_json(folder, index).get("weight_map")
    if not isinstance(parts, dict) or not parts or not all(isinstance(part, str) for part in parts.values()):
        raise ModelImportError(f"{folder / index}: weight_map is not an object of tensor names and file names")
    tensors: dict[str, Tensor] = {}
    problems = []
    for part in dict.fromkeys(parts.values()):
        stored = read_tensors(own_file(folder, part))
        expected = {name for name, place in parts.items() if place == part}
        problems += [f"{part} has no {name}" for name in sorted(expected - stored.keys())]
        problems += [f"{part} holds {name}, which the index does not say" for name in sorted(stored.keys() - expected)]
        tensors |= stored
    if problems:
        raise ModelImportError(f"{folder / index} does not fit its parts: {listed(problems, '; ')}")
    return tensors


def listed(items: Iterable[str], separator: str = ", ", most: int = 12) -> str:
    """`items` in one line; of a great many the first, and how many more there are."""
    chosen = list(items)
    more = f"{separator}and {len(chosen) - most} more" if len(chosen) > most else ""
    return separator.join(chosen[:most]) + more
