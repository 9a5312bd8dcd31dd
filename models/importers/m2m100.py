"""M2M100 and NLLB as transformers saves them: pre-norm, and fairseq's sinusoids, which begin after the pad row."""

import math
from pathlib import Path

import torch
from torch import Tensor

from ..config import ModelConfig
from .hugging_face import Family
from .mapping import Imported, Weights

FIXED = {
    "normalize_before": True,
    "normalize_embedding": False,
    "add_final_layer_norm": True,
    "static_position_embeddings": True,
}
ROUNDING = 1e-3
"""By which a stored table may differ from the computed one: half precision is as coarse as that."""


def import_m2m100(folder: Path) -> Imported:
    """The M2M100 or NLLB model in `folder`.

    Raises:
        ModelImportError: settings that this model does not know, or tensors that do not fit; all are listed.
    """
    family = Family(folder, ("M2M100ForConditionalGeneration", "M2M100Model"), FIXED)
    settings = family.settings
    fields = family.fields(scale_embedding=True)
    if fields["pad_token_id"] == fields["decoder_start_token_id"]:
        # Padding has no position there, so that a start token which is padding would shift all others.
        settings.refuse(
            f"decoder_start_token_id is pad_token_id {fields['pad_token_id']}, which this model cannot start from"
        )
    if fields["d_model"] < 4:
        settings.refuse(f"d_model is {fields['d_model']}, its sinusoids need at least 4")
    config = settings.model(lambda: ModelConfig(**fields, norm="pre", positions="learned"))
    weights = family.weights()
    # Stored as a table: where its frequencies and its first position come from matters here alone.
    table = fairseq_sinusoids(config.max_positions, config.d_model, first=config.pad_token_id + 1)
    _check_stored_tables(weights, table, config.pad_token_id + 1)
    return family.finish(config, weights, family.vectors(weights, config), {"encoder": table, "decoder": table})


def fairseq_sinusoids(count: int, width: int, *, first: int) -> Tensor:
    """Sines, then cosines, of positions `first` and on: `(count, width)`, float32.

    The frequencies fall from 1 to exactly 1/10000, and all is computed in float32, number for number as there.
    """
    half = width // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.int64).float() * -(math.log(10000) / (half - 1)))
    places = torch.arange(first, first + count, dtype=torch.int64).float()
    angles = places[:, None] * frequencies[None, :]  # (count, width / 2)
    table = torch.cat([angles.sin(), angles.cos()], dim=1)
    return torch.cat([table, torch.zeros(count, width % 2)], dim=1)  # (count, width)


def _check_stored_tables(weights: Weights, table: Tensor, first: int) -> None:
    """Older files keep the table. It is computed anew, as transformers does, and must be the one that they keep."""
    for side in ("encoder", "decoder"):
        name = f"model.{side}.embed_positions.weights"
        if name in weights:
            rows = weights.shape(name) or (0,)
            stored = weights.take(name, (rows[0], table.shape[1]))
            if stored.shape[1:] == table.shape[1:] and len(stored) > first:
                length = min(len(stored) - first, len(table))
                if not (stored[first : first + length] - table[:length]).abs().max() <= ROUNDING:
                    weights.problems.append(f"{name} is not the table of positions that this model computes")
