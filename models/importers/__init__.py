"""Models that other libraries saved, as ours: files are read, nothing is downloaded, and no code of theirs runs."""

from collections.abc import Callable
from pathlib import Path

from ..checkpoint import CONFIG_FILE
from ..errors import ModelImportError
from .bart import import_bart, import_mbart
from .folder import CONFIG, read_json, stands
from .m2m100 import import_m2m100
from .mapping import Imported
from .marian import import_marian
from .torch_transformer import DESCRIPTION, import_torch

CHECKPOINT, TORCH = "checkpoint", "torch"

IMPORTERS: dict[str, Callable[[Path], Imported]] = {
    "marian": import_marian,
    "m2m_100": import_m2m100,
    "bart": import_bart,
    "mbart": import_mbart,
    TORCH: import_torch,
}
"""By kind: the `model_type` of a `config.json`, and "torch" for what a `transformer.toml` describes."""

__all__ = ["CHECKPOINT", "IMPORTERS", "TORCH", "Imported", "detect", "import_model"]


def detect(folder: Path) -> str:
    """What `folder` holds: "checkpoint" for one of ours, else a kind of `IMPORTERS`.

    Raises:
        ModelImportError: it is none of these.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ModelImportError(f"{folder} {what}: expected the folder of a model")
    if stands(folder, CONFIG_FILE):
        return CHECKPOINT
    if stands(folder, DESCRIPTION):
        return TORCH
    if not stands(folder, CONFIG):
        raise ModelImportError(
            f"{folder} is no model: it has no {CONFIG_FILE} (a checkpoint), no {CONFIG} (a model of transformers) "
            f"and no {DESCRIPTION} (a torch.nn.Transformer)"
        )
    kind = read_json(folder, CONFIG).get("model_type")
    known = [name for name in IMPORTERS if name != TORCH]
    if kind not in known:
        raise ModelImportError(f"{folder / CONFIG}: model_type is {kind!r}, supported: {', '.join(known)}")
    return str(kind)


def import_model(folder: Path) -> Imported:
    """The model in `folder`, as ours.

    Raises:
        ModelImportError: it is not of a kind that is known, or not what its settings say; all problems are listed.
    """
    kind = detect(folder)
    if kind == CHECKPOINT:
        raise ModelImportError(f"{folder} is a checkpoint already: it needs no import")
    return IMPORTERS[kind](folder)
