"""What lies beside the graphs of a bundle: tokenizer, settings for transformers and Optimum, defaults of the search."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from models.config import ModelConfig
from models.importers.folder import GENERATION, read_json, stands
from runtime.errors import GenerationError
from runtime.generation_config import GenerationConfig, foreign_ids
from runtime.generation_files import NEUTRAL, OWN, file_options
from runtime.tokenizer import tokenizer_files

from .source import CONFIG

BEAMS = 4
"""Of the search that a bundle proposes where nobody says, the usual number for translation."""

SPECIAL = ("pad_token_id", "eos_token_id", "decoder_start_token_id")


class SearchDefaults(NamedTuple):
    """How a bundle searches when nobody says, and how other programs do that open it."""

    config: GenerationConfig
    file: dict[str, Any]
    """Contents of `generation_config.json`."""
    notes: list[str]
    """What to tell whoever brings the folder: no option is dropped in silence."""


def search_defaults(folder: Path, model: ModelConfig) -> SearchDefaults:
    """What `generation_config.json` of `folder` says, or the settings of an older model; else our own defaults.

    Raises:
        GenerationError: an option is impossible, our search does not know it, or the model has no such id; all of these
            are named.
    """
    path, content = _options(folder)
    config, unused = file_options(path, content, model.max_positions)
    if problems := foreign_ids(config, model.vocab_size):
        raise GenerationError(f"{path}: {'; '.join(problems)}")
    if config.max_length is None:
        config = msgspec.structs.replace(config, max_length=model.max_positions)
    notes = [f"{path}: passed over {'; '.join(unused)}"] if unused else []
    # Other programs search by their own rules, so that they get every option; but ids and limits are the model's.
    kept = {name: value for name, value in content.items() if not name.startswith("_")}
    limits = {name: getattr(config, name) for name in ("max_length", "max_new_tokens") if getattr(config, name)}
    special = {name: getattr(model, name) for name in SPECIAL}
    return SearchDefaults(config, {**kept, **special, **limits}, notes)


def _options(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Options of the search by transformers' names, and the file that has them: in old folders the model's settings."""
    if stands(folder, GENERATION):
        return folder / GENERATION, read_json(folder, GENERATION)
    if stands(folder, CONFIG):
        content = read_json(folder, CONFIG)
        names = ({*GenerationConfig.__struct_fields__} - OWN) | NEUTRAL.keys()
        return folder / CONFIG, {name: value for name, value in content.items() if name in names}
    return folder / GENERATION, {"num_beams": BEAMS}


def write_companions(source: Path, folder: Path, settings: dict[str, Any], generation: dict[str, Any]) -> None:
    """Copy the tokenizer in `source` to `folder`, and write `config.json` (if there are settings) and the search's."""
    for name in tokenizer_files(source):
        shutil.copyfile(source / name, folder / name)
    if settings:
        _write_json(folder / CONFIG, settings)
    _write_json(folder / GENERATION, generation)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


def model_settings(config: ModelConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Contents of `config.json`: those that the model came with, else the nearest that transformers has.

    Programs that open a bundle run its graphs, and read sizes and special ids here.
    """
    special = {name: getattr(config, name) for name in SPECIAL}
    if settings:
        return {**settings, "use_cache": True, **special}
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "decoder_vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "scale_embedding": config.scale_embedding,
        "share_encoder_decoder_embeddings": config.share_embeddings,
        "tie_word_embeddings": config.tie_output,
        "num_hidden_layers": config.encoder_layers,
        **{
            name: getattr(config, name)
            for side in ("encoder", "decoder")
            for name in (f"{side}_layers", f"{side}_attention_heads", f"{side}_ffn_dim")
        },
        "d_model": config.d_model,
        "activation_function": config.activation_function,
        "dropout": config.dropout,
        "use_cache": True,
        **special,
    }
