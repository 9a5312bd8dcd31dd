"""BART and mBART as transformers saves them: learned positions that begin at row 2, and a norm over embeddings."""

from pathlib import Path

from ..config import ModelConfig, NormPlacement
from .hugging_face import Family
from .mapping import Imported

OFFSET = 2
"""Rows of the position table that stand for nothing."""
FIXED = {"normalize_embedding": True, "static_position_embeddings": False}
POST_NORM = {"normalize_before": False, "add_final_layer_norm": False}
PRE_NORM = {"normalize_before": True, "add_final_layer_norm": True}


def import_bart(folder: Path) -> Imported:
    """The BART model in `folder`: post-norm.

    Raises:
        ModelImportError: settings that this model does not know, or tensors that do not fit; all are listed.
    """
    return _import(Family(folder, ("BartForConditionalGeneration", "BartModel"), FIXED | POST_NORM), "post")


def import_mbart(folder: Path) -> Imported:
    """The mBART model in `folder`: pre-norm, with a norm after the last layer.

    Raises:
        ModelImportError: settings that this model does not know, or tensors that do not fit; all are listed.
    """
    return _import(Family(folder, ("MBartForConditionalGeneration", "MBartModel"), FIXED | PRE_NORM), "pre")


def _import(family: Family, norm: NormPlacement) -> Imported:
    fields = family.fields(scale_embedding=False)
    config = family.settings.model(lambda: ModelConfig(**fields, norm=norm, positions="learned", embedding_norm=True))
    weights = family.weights()
    stored = (config.max_positions + OFFSET, config.d_model)
    tables = {
        side: weights.take(f"model.{side}.embed_positions.weight", stored)[OFFSET:] for side in ("encoder", "decoder")
    }
    return family.finish(config, weights, family.vectors(weights, config), tables)
