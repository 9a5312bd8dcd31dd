"""Which weights a model can least spare: how far its output goes astray when a single one is rounded."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models.transformer import Transformer
from runtime.exam import TokenCase
from runtime.generation import pad

from .quantize import LARGEST_HALF, Precision, rounded


def divergences(
    model: Transformer, names: Iterable[str], precision: Precision, cases: Sequence[TokenCase]
) -> dict[str, float]:
    """Mean KL(model || model with one weight in `precision`) in nats, by the weight's name, the worst first.

    Measured in PyTorch-float32 after every prefix of the greedy outputs of `cases`. Where the weight belongs to a
    product, what goes in and out of it is rounded as well. A weight that makes numbers infinite comes before all.

    Args:
        model: It is not changed.
        names: Of its parameters; others are left out.
        precision: Not fp32.
        cases: Sentences and the reference's outputs.
    """
    greedy = [case for case in cases if case.config.num_beams == 1]
    parameters = dict(model.named_parameters())
    before = _log_probabilities(model, greedy)
    found = {}
    for name in names:
        if name in parameters:
            with _rounded(model, parameters[name], precision):
                found[name] = _divergence(before, _log_probabilities(model, greedy))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def overflowing(model: Transformer, cases: Sequence[TokenCase]) -> list[str]:
    """Names of weights whose products have something in or out of them that float16 cannot hold.

    A runtime that computes float16 in float32, as ONNX Runtime does on the CPU, would not notice.
    """
    found: dict[int, None] = {}

    def look(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if max(float(states.abs().max()) for states in (*inputs, output)) > LARGEST_HALF:
            found[id(module.weight)] = None

    handles = [module.register_forward_hook(look) for module in model.modules() if isinstance(module, nn.Linear)]
    try:
        _log_probabilities(model, cases)
    finally:
        for handle in handles:
            handle.remove()
    return [name for name, parameter in model.named_parameters() if id(parameter) in found]


def _log_probabilities(model: Transformer, cases: Sequence[TokenCase]) -> list[Tensor]:
    """`(N, V)` for each case: of the token after each prefix of its output."""
    config = model.config
    results = []
    for case in cases:
        ids, mask = map(torch.from_numpy, pad([case.source_ids], config.pad_token_id))
        fed = torch.tensor([[config.decoder_start_token_id, *case.ids[:-1]]])
        with torch.no_grad():
            logits, _ = model.prefill(fed, model.encode(ids, mask), mask)
        results.append(logits[0].log_softmax(-1))
    return results


def _divergence(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    both = zip(before, after, strict=True)
    rows = torch.cat([(known.exp() * (known - found)).sum(-1) for known, found in both])
    mean = float(rows.mean())
    return mean if math.isfinite(mean) else math.inf


@contextmanager
def _rounded(model: nn.Module, weight: nn.Parameter, precision: Precision) -> Iterator[None]:
    """Round `weight` for a while, and what goes in and out of the products that it belongs to."""
    kept = weight.detach().clone()
    handles = [
        handle
        for module in model.modules()
        if isinstance(module, nn.Linear) and module.weight is weight
        for handle in (
            module.register_forward_pre_hook(lambda _, inputs: tuple(_activations(x, precision) for x in inputs)),
            module.register_forward_hook(_product(precision)),
        )
    ]
    try:
        with torch.no_grad():
            weight.copy_(torch.from_numpy(rounded(kept.numpy(), precision)))
        yield
    finally:
        with torch.no_grad():
            weight.copy_(kept)
        for handle in handles:
            handle.remove()


def _activations(states: Tensor, precision: Precision) -> Tensor:
    """`states (.., K)` as a product reads them: in int4 as they are."""
    if precision == "int4":
        return states
    array = rounded(np.ascontiguousarray(states.flatten(0, -2).numpy()), precision)
    return torch.from_numpy(array).reshape(states.shape)


def _product(precision: Precision) -> Callable[[nn.Module, Any, Tensor], Tensor | None]:
    return lambda _, __, states: states.half().float() if precision == "fp16" else None
