"""Shapes of what flows through a Transformer, read off the tensors while it runs, never calculated from its settings.

Letters: B batch, S source, T target, t target tokens already processed, H heads, D head size, E model width,
F feed-forward width, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .layers import MultiHeadAttention, attention_scores
from .objective import cross_entropy
from .transformer import Transformer

ENCODER_LAYER, DECODER_LAYER = "encoder.layers.0", "decoder.layers.0"


class TracePoint(NamedTuple):
    """One place on the way through the model and the shape of the tensor that was there."""

    point: str
    shape: tuple[int, ...]


class _Call(NamedTuple):
    """What a module was last called with and what it gave."""

    inputs: tuple[Any, ...]
    output: Any


@torch.no_grad()
def trace_training(
    model: Transformer, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor, labels: Tensor
) -> list[TracePoint]:
    """Every station of one teacher-forced pass, from ids to loss; of the layers, the first on either side.

    Args:
        model: Any variant, on the device of the tensors.
        source_ids: `(B, S)`.
        source_mask: `(B, S)`, 1 on real tokens.
        target_ids: `(B, T)`: the start token, then the target without its last token.
        labels: `(B, T)`.

    Returns:
        The points in the order in which the model reaches them; tensors of one point make a line for each shape.
    """
    with _observed(model) as calls:
        logits = model(source_ids, source_mask, target_ids)
    scaled = " x sqrt(E)" if model.encoder.embedding.scale != 1 else ""
    query, key, value, mask = calls[f"{ENCODER_LAYER}.self_attention.dot_product"].inputs
    encoder = [
        *_points("source ids", calls["encoder"].inputs[0]),
        *_points(f"source embedding{scaled} + position", calls["encoder.embedding"].output),
        *_points("encoder q, k, v after splitting heads", query, key, value),
        *_points("encoder scores q kT", attention_scores(query, key, mask)),
        *_points("encoder attention output, per head", calls[f"{ENCODER_LAYER}.self_attention.dot_product"].output),
        *_points("heads joined, output projection", calls[f"{ENCODER_LAYER}.self_attention.out_proj"].output),
        *_points("encoder feed-forward, inside", calls[f"{ENCODER_LAYER}.feed_forward.fc1"].output),
        *_points("encoder feed-forward", calls[f"{ENCODER_LAYER}.feed_forward"].output),
        *_points("encoder output (memory)", calls["encoder"].output),
    ]
    query, key, value, mask = calls[f"{DECODER_LAYER}.self_attention.dot_product"].inputs
    cross_query, cross_key, cross_value, cross_mask = calls[f"{DECODER_LAYER}.cross_attention.dot_product"].inputs
    decoder = [
        *_points("target input ids", calls["decoder"].inputs[0]),
        *_points("target embedding + position", calls["decoder.embedding"].output),
        *_points("decoder self q, k, v", query, key, value),
        *_points("masked scores", attention_scores(query, key, mask)),
        *_points("self-attention output, projected", calls[f"{DECODER_LAYER}.self_attention"].output),
        *_points("cross q (from the decoder)", cross_query),
        *_points("cross k, v (from memory)", cross_key, cross_value),
        *_points("cross scores", attention_scores(cross_query, cross_key, cross_mask)),
        *_points("cross output, projected", calls[f"{DECODER_LAYER}.cross_attention"].output),
        *_points("feed-forward, inside", calls[f"{DECODER_LAYER}.feed_forward.fc1"].output),
        *_points("feed-forward", calls[f"{DECODER_LAYER}.feed_forward"].output),
        *_points("decoder output", calls["output"].inputs[0]),
        *_points("logits", logits),
        *_points("labels", labels),
        *_points("loss", cross_entropy(logits, labels)),
    ]
    return encoder + decoder


@torch.no_grad()
def trace_inference(
    model: Transformer, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor
) -> list[TracePoint]:
    """Every station of one cached step, after `encode` and a `prefill` with the target so far.

    Args:
        model: Any variant, on the device of the tensors.
        source_ids: `(B, S)`.
        source_mask: `(B, S)`, 1 on real tokens.
        target_ids: `(B, t)`: the start token and what follows it, t >= 1.

    Returns:
        See `trace_training`.
    """
    with _observed(model) as calls:
        logits, cache = model.prefill(target_ids, model.encode(source_ids, source_mask), source_mask)
        logits, cache = model.step(logits[:, -1:].argmax(-1), source_mask, cache)
    self_attention = f"{DECODER_LAYER}.self_attention"
    query, key, _, mask = calls[f"{self_attention}.dot_product"].inputs
    # The attention reads its keys and values from the grown cache; these are the new ones alone.
    new = cast(MultiHeadAttention, model.get_submodule(self_attention)).key_value(
        calls[f"{self_attention}.k_proj"].inputs[0]
    )
    cross_query, cross_key, _, cross_mask = calls[f"{DECODER_LAYER}.cross_attention.dot_product"].inputs
    return [
        *_points("memory", calls["encoder"].output),
        *_points("new token id", calls["decoder"].inputs[0]),
        *_points("new token embedding", calls["decoder.embedding"].output),
        *_points("self q, new k, new v", query, *new),
        *_points("self caches after appending", *cache[0].decoder),
        *_points("self scores", attention_scores(query, key, mask)),
        *_points("self output", calls[f"{self_attention}.dot_product"].output),
        *_points("cross q", cross_query),
        *_points("cross caches (computed once)", *cache[0].encoder),
        *_points("cross scores", attention_scores(cross_query, cross_key, cross_mask)),
        *_points("decoder output", calls["output"].inputs[0]),
        *_points("logits", logits),
        *_points("next id", logits[:, -1:].argmax(-1)),
    ]


def _points(point: str, *tensors: Tensor) -> list[TracePoint]:
    """One line for all `tensors` of one shape."""
    return [TracePoint(point, shape) for shape in dict.fromkeys(tuple(tensor.shape) for tensor in tensors)]


@contextmanager
def _observed(model: Transformer) -> Iterator[dict[str, _Call]]:
    """Remember the last call of every module by its name, for as long as the context lasts."""
    calls: dict[str, _Call] = {}

    def observe(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def remember(_: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
            calls[name] = _Call(inputs, output)

        return module.register_forward_hook(remember)

    handles = []
    try:
        for name, module in model.named_modules():
            handles.append(observe(name, module))
        yield calls
    finally:
        for handle in handles:
            handle.remove()
