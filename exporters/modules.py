"""What the modules inside the model give while it runs: the reference's side of an explanation."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from models.layers import DotProductAttention, Embedding
from runtime.backend import Array

OBSERVED = (nn.Linear, nn.LayerNorm, DotProductAttention, Embedding)
"""Whose outputs are compared. Between two of them there is little more than one addition."""
LOGITS = "output"
"""The one module whose output is compared anyway."""


def module_outputs(model: nn.Module, run: Callable[[], object]) -> dict[str, Array]:
    """What each observed module of `model` gives during `run`, by path."""
    found: dict[str, Array] = {}

    def observer(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def observe(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            found[path] = output.detach().cpu().numpy()

        return observe

    handles = [
        module.register_forward_hook(observer(path))
        for path, module in model.named_modules()
        if isinstance(module, OBSERVED) and path != LOGITS
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found
