"""From a bundle back to the PyTorch model, by the module paths that the graphs' nodes are named after."""

from collections.abc import Iterator

import msgspec
import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.layers import Positions
from models.transformer import Transformer
from runtime.bundle import PASSPORT, Bundle
from runtime.contract import ENCODE, PREFILL

from .errors import ExportError

OPERATORS: dict[type[nn.Module], dict[str, tuple[str, int]]] = {
    nn.Linear: {"weight": ("MatMul", 1), "bias": ("Add", 1)},
    nn.LayerNorm: {"weight": ("LayerNormalization", 1), "bias": ("LayerNormalization", 2)},
    nn.Embedding: {"weight": ("Gather", 0)},
    Positions: {"table": ("Slice", 0)},
}
"""Which operator reads each weight of a module, and as which of its inputs."""


def restore_model(bundle: Bundle) -> Transformer:
    """The model that `bundle` was exported from, with the weights that the graphs compute with.

    Raises:
        ExportError: it is of a lower precision, the passport has no settings that this version reads, or a weight is
            not where its module's name says.
    """
    if bundle.passport.precision != "fp32":
        raise ExportError(f"{bundle.folder} is in {bundle.passport.precision}: only fp32 holds the model's own weights")
    try:
        model = Transformer(msgspec.convert(bundle.passport.model, ModelConfig))
    except msgspec.ValidationError as error:
        raise ExportError(f"{bundle.folder / PASSPORT}: model: {error}") from None
    nodes = {node.name: node for verb in (ENCODE, PREFILL) for node in ir.load(bundle.path(verb)).graph}
    missing = []
    with torch.no_grad():
        for path, module in model.named_modules(remove_duplicate=False):
            for name, parameter in _weights(module):
                operator, place = OPERATORS[type(module)][name]
                array = _constant(nodes.get(f"{path}/{operator}"), place)
                if array is None:
                    missing.append(f"{path}.{name}")
                else:
                    turned = array.T if isinstance(module, nn.Linear) and array.ndim == 2 else array
                    parameter.copy_(torch.from_numpy(np.array(turned)))  # a copy: the file is mapped read-only
    if missing:
        raise ExportError(f"{bundle.folder} does not show where these weights are: {', '.join(missing)}")
    return model.eval()


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    if type(module) in OPERATORS:
        yield from module.named_parameters(recurse=False)


def _constant(node: ir.Node | None, place: int) -> np.ndarray | None:
    """The constant that `node` reads at `place`, as the node sees it: a `Transpose` on the way is applied."""
    if node is None or len(node.inputs) <= place or (value := node.inputs[place]) is None:
        return None
    producer = value.producer()
    if producer is not None and producer.op_type == "Transpose":
        stored = _constant(producer, 0)
        return None if stored is None else stored.T
    return None if value.const_value is None else value.const_value.numpy()
