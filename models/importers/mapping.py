"""Tensors of another library on their way into our model: each is taken once, and what is wrong is told at once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoint import unique_parameters
from ..errors import ModelImportError
from ..transformer import Transformer
from .folder import listed


class Imported(NamedTuple):
    """A model that another library saved."""

    kind: str
    """What the folder is, see `detect`."""
    model: Transformer
    """In float32 and in evaluation mode; its special ids stand in its settings."""
    settings: dict[str, Any]
    """Fields of the folder's `config.json` that say what the model computes, so that others can open what we write."""


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Weights:
    """Tensors by the names that another library gave them.

    Args:
        path: Where they come from, named in errors.
        tensors: By name.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self._path = path
        self._tensors = tensors
        self._taken: set[str] = set()
        self.problems: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of the tensor `name`, None where there is none."""
        tensor = self._tensors.get(name)
        return None if tensor is None else tuple(tensor.shape)

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """The tensor `name` in float32. After a problem it is all zeros: see `check`."""
        self._taken.add(name)
        tensor = self._tensors.get(name)
        if tensor is None:
            self.problems.append(f"{name} is missing")
        elif tensor.dtype not in FLOATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            self.problems.append(
                f"{name} holds {kind}, expected floating-point numbers: quantised weights have lost some"
            )
        elif tuple(tensor.shape) != tuple(shape):
            self.problems.append(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
        elif not (converted := tensor.float()).isfinite().all():
            self.problems.append(f"{name} holds values that are not finite in float32")
        else:
            return converted
        return torch.zeros(*shape)

    def take_one_of(self, names: Sequence[str], shape: Sequence[int], why_equal: str) -> Tensor:
        """The tensor that goes by all of `names`, of which the file may keep only some; these must be equal.

        Args:
            names: Of which the first that is there is taken.
            shape: See `take`.
            why_equal: Who says that they are one, for the error.
        """
        present = [name for name in names if name in self]
        if not present:
            self.problems.append(f"{' or '.join(names)} is missing")
            return torch.zeros(*shape)
        first, *others = (self.take(name, shape) for name in present)
        for name, tensor in zip(present[1:], others, strict=True):
            if not torch.equal(first, tensor):
                self.problems.append(f"{name} differs from {present[0]}, but {why_equal}")
        return first

    def leave(self, *names: str) -> None:
        """These tensors, if they are there, are no part of the computation."""
        self._taken.update(names)

    def check(self) -> None:
        """Raise `ModelImportError` with all problems, tensors that nobody took among them."""
        problems = [*self.problems, *(f"{name} is unexpected" for name in self._tensors if name not in self._taken)]
        if problems:
            raise ModelImportError(f"{self._path} does not fit the model: {listed(dict.fromkeys(problems), '; ')}")


def fill(model: Transformer, tensors: Mapping[str, Tensor]) -> Transformer:
    """`model` with `tensors`, one for each of its weights by our names, in evaluation mode."""
    with torch.no_grad():
        for name, parameter in unique_parameters(model).items():
            parameter.copy_(tensors[name])
    return model.eval()
