"""From a folder of another library to a checkpoint of ours, for training on, or to be exported later."""

from collections.abc import Callable
from pathlib import Path

from models.checkpoint import CONFIG_FILE, save_checkpoint
from models.config import ModelConfig
from models.files import emerging
from models.importers import CHECKPOINT, detect

from .companions import search_defaults, write_companions
from .errors import ExportError
from .source import SENTENCES, exam_sentences, open_source


def convert_folder(
    folder: Path,
    target: Path,
    *,
    sentences: Path | None = None,
    force: bool = False,
    say: Callable[[str], None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
) -> ModelConfig:
    """Write the model in `folder` to the checkpoint `target`, with tokenizer, search defaults and sentences.

    Args:
        folder: What another library saved, see `models.importers`.
        target: Appears only when it is whole.
        sentences: Source sentences for the exam, one a line; None for some that are made up of the vocabulary.
        force: Replace a checkpoint that stands at `target`.
        say: Called with the name of each stage as it begins.
        note: Called with what the user should know of the folder.

    Returns:
        Settings of the model.

    Raises:
        ModelError: the model cannot be imported.
        TokenizerError: a file of the tokenizer is missing or damaged.
        GenerationError: an option of the search is impossible or not supported.
        ExportError: the tokenizer is not the model's, or something else stands at `target`.
    """
    if target.exists() and not (target / CONFIG_FILE).is_file():
        raise ExportError(f"{target} exists already and is not a checkpoint: choose another folder")
    if target.exists() and not force:
        raise ExportError(f"{target} exists already: choose another folder, or replace it with --force")
    if detect(folder) == CHECKPOINT:
        raise ExportError(f"{folder} is a checkpoint already: it needs no import")
    say("reading the model")
    source = open_source(folder)
    config = source.model.config
    lines = exam_sentences(folder, source, sentences)
    defaults = search_defaults(folder, config)
    for line in defaults.notes:
        note(line)
    say("writing the checkpoint")
    with emerging(target) as new:
        save_checkpoint(source.model, new)
        write_companions(folder, new, source.settings, defaults.file)
        (new / SENTENCES).write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return config
