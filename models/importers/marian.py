"""MarianMT and OPUS-MT as transformers saves them: post-norm, sinusoids in halves, a bias on the logits."""

from pathlib import Path

import torch
from torch import Tensor

from ..config import ModelConfig
from ..layers import sinusoids
from .hugging_face import Family
from .mapping import Imported, Weights

FIXED = {
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
    "static_position_embeddings": True,
}


def import_marian(folder: Path) -> Imported:
    """The Marian model in `folder`.

    Raises:
        ModelImportError: settings that this model does not know, or tensors that do not fit; all are listed.
    """
    family = Family(folder, ("MarianMTModel", "MarianModel"), FIXED)
    settings = family.settings
    fields = family.fields(scale_embedding=False)
    shared = settings.get("share_encoder_decoder_embeddings", bool, True)
    source_size = fields["vocab_size"]
    target_size = settings.get("decoder_vocab_size", int, source_size)
    if shared and target_size != source_size:
        settings.refuse(
            f"decoder_vocab_size is {target_size} and vocab_size {source_size}, "
            "but share_encoder_decoder_embeddings needs one vocabulary"
        )
    fields |= {"vocab_size": target_size, "source_vocab_size": None if shared else source_size}
    config = settings.model(lambda: ModelConfig(**fields, positions="sinusoidal-halves", share_embeddings=shared))
    weights = family.weights()
    return family.finish(config, weights, family.vectors(weights, config), _stored_tables(weights, config))


def _stored_tables(weights: Weights, config: ModelConfig) -> dict[str, Tensor] | None:
    """The tables of positions in older files; None where they are the sinusoids, or absent, which means the same."""
    computed = sinusoids(config.max_positions, config.d_model, halves=True)
    tables = {}
    for side in ("encoder", "decoder"):
        name = f"model.{side}.embed_positions.weight"
        tables[side] = weights.take(name, computed.shape) if name in weights else computed
    return None if all(torch.equal(table, computed) for table in tables.values()) else tables
