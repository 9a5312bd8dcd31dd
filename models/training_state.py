"""Everything that a killed training run needs to go on as if nothing had happened, in one file of arrays and JSON.

No pickles: tensors go into safetensors, the rest into that file's header.
"""

from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.optim import Optimizer

from .errors import CheckpointError
from .files import replacing
from .transformer import Transformer

STATE_FILE = "state.safetensors"


class Progress(msgspec.Struct):
    """How far a run has come. The learning rate follows from `step`, the order of the data from `epoch` and `batch`."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """Batches of `epoch` that were trained on."""
    seconds: float = 0.0
    best: float | None = None
    """Best value so far of what the best checkpoint is chosen by; more is better."""
    fingerprint: str = ""
    """Digest of the settings and data that must not change between a run and its continuation."""


def save_state(
    path: Path, model: Transformer, optimizer: Optimizer, random_states: dict[str, Tensor], progress: Progress
) -> None:
    """Write the state of a run to `path`, replacing the one before in one move."""
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for index, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            tensors[f"optimizer.{index}.{name}"] = value.clone()
    tensors |= {f"random.{name}": state for name, state in random_states.items()}
    with replacing(path) as temporary:
        temporary.write_bytes(save(tensors, {"progress": msgspec.json.encode(progress).decode()}))


def load_progress(path: Path) -> Progress:
    """How far the run whose state is at `path` has come."""
    try:
        with safe_open(path, "pt") as file:
            return msgspec.json.decode(file.metadata()["progress"], type=Progress)
    except FileNotFoundError:
        raise CheckpointError(f"no run to resume: {path} does not exist") from None
    except Exception as error:  # safetensors raises many kinds; each means that the file is damaged
        raise CheckpointError(f"{path} is not the state of a training run: {error}") from None


def load_state(path: Path, model: Transformer, optimizer: Optimizer) -> dict[str, Tensor]:
    """Put the state at `path` back into `model` and `optimizer`; returns the random states."""
    state: dict[int, dict[str, Any]] = {}
    random_states = {}
    parameters = dict(model.named_parameters())
    with safe_open(path, "pt") as file, torch.no_grad():
        for key in file.keys():  # noqa: SIM118  # safe_open is no mapping
            kind, _, name = key.partition(".")
            tensor = file.get_tensor(key)
            if kind == "model":
                parameters[name].copy_(tensor)
            elif kind == "optimizer":
                index, _, slot = name.partition(".")
                state.setdefault(int(index), {})[slot] = tensor
            else:
                random_states[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return random_states
