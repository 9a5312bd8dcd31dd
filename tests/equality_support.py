"""How far an imported model is from transformers' own module over the same files."""

from typing import Any

import torch
from models_support import outputs_of, random_batch
from torch import Tensor, nn

from models.transformer import Transformer

EQUAL = 1e-12
"""Largest distance in float64 that rounding explains; a thousandth of it is usual."""
LENGTHS = ((5, 6), (3, 6), (7, 6))


def watched(encoder: Any, decoder: Any, attention: str) -> list[nn.Module]:
    """What is compared: each layer of both sides, and the encoder's keys, whose bias changes nothing after them."""
    keys = [getattr(layer, attention).k_proj for layer in encoder.layers]
    return [*encoder.layers, *decoder.layers, *keys]


@torch.no_grad()
def differences(theirs: Any, ours: Transformer) -> dict[str, float]:
    """Largest distance in every layer's states, logits and caches, prefilled and stepped, on real tokens."""
    batch = random_batch(ours.config, LENGTHS)
    source, mask, target = batch.source_ids, batch.source_mask, batch.target_ids
    real = mask.bool()
    with outputs_of(watched(theirs.model.encoder, theirs.model.decoder, "self_attn")) as expected_states:
        expected = theirs(input_ids=source, attention_mask=mask, decoder_input_ids=target)
    with outputs_of(watched(ours.encoder, ours.decoder, "self_attention")) as states:
        memory = ours.encode(source, mask)
        logits, cache = ours.prefill(target, memory, mask)
    found = {
        "memory": distance(memory[real], expected.encoder_last_hidden_state[real]),
        "logits": distance(logits, expected.logits),
    }
    for place, ((mine,), (other,)) in enumerate(zip(states, expected_states, strict=True)):
        on_source = mine.shape[1] == mask.shape[1]
        found[f"states {place}"] = distance(mine[real], other[real]) if on_source else distance(mine, other)

    past = expected.past_key_values
    stepped, stepped_cache = ours.prefill(target[:, :2], memory, mask)
    parts = [stepped]
    for place in range(2, target.shape[1]):
        stepped, stepped_cache = ours.step(target[:, place : place + 1], mask, stepped_cache)
        parts.append(stepped)
    found["stepped logits"] = distance(torch.cat(parts, 1), expected.logits)
    for way, caches in (("", cache), ("stepped ", stepped_cache)):
        for number, layer in enumerate(caches):
            own, cross = past.self_attention_cache.layers[number], past.cross_attention_cache.layers[number]
            for kind in ("key", "value"):
                mine, other = getattr(layer.decoder, kind), getattr(own, f"{kind}s")
                found[f"{way}cache {number} {kind}"] = distance(mine, other)
                mine, other = (
                    tensor.transpose(1, 2)[real]
                    for tensor in (getattr(layer.encoder, kind), getattr(cross, f"{kind}s"))
                )
                found[f"{way}cross cache {number} {kind}"] = distance(mine, other)
    return found


def distance(mine: Tensor, other: Tensor) -> float:
    assert mine.shape == other.shape
    assert mine.numel()
    return float((mine - other).abs().max())


def worst(theirs: Any, ours: Transformer) -> float:
    return max(differences(theirs, ours).values())
