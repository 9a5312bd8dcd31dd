"""What lies beside the graphs of a bundle: tokenizer, settings for transformers and Optimum, defaults of the search."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from models.config import ModelConfig
from models.importers.folder import GENERATION, read_json, stands
from runtime.errors import GenerationError
from runtime.generation import GenerationConfig
from runtime.tokenizer import tokenizer_files

from .errors import ExportError
from .source import CONFIG

BEAMS = 4
"""Of the search that a bundle proposes where nobody says, the usual number for translation."""

SPECIAL = ("pad_token_id", "eos_token_id", "decoder_start_token_id")
SILENT = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "renormalize_logits": False,
    "remove_invalid_values": False,
    "use_cache": True,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "return_dict_in_generate": False,
}
"""Options by which transformers' search does nothing: whoever writes them out asks for nothing."""
OTHER_OPTIONS = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "exponential_decay_length_penalty",
    "force_words_ids",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "sequence_bias",
    "suppress_tokens",
)
"""Further options that older folders keep among the settings of the model."""
NO_OPTIONS = (*SPECIAL, "bos_token_id", "transformers_version")
"""Entries that are no options of a search. Those that begin with "_" are none either."""


class SearchDefaults(NamedTuple):
    """How a bundle searches when nobody says, and how other programs do that open it."""

    config: GenerationConfig
    file: dict[str, Any]
    """Contents of `generation_config.json`."""
    left_out: list[str]
    """Options of the folder that our search does not follow."""

    @property
    def notes(self) -> list[str]:
        """What to tell whoever brings the folder: no option is dropped in silence."""
        return (
            [f"search defaults that are not supported, left out: {', '.join(self.left_out)}"] if self.left_out else []
        )


def search_defaults(folder: Path, model: ModelConfig) -> SearchDefaults:
    """What `generation_config.json` of `folder` says, as far as our search knows the option; else our own defaults.

    Raises:
        ExportError: an option has an impossible value.
    """
    path, content = _options(folder)
    known = {name: content[name] for name in GenerationConfig.__struct_fields__ if content.get(name) is not None}
    asked = known.setdefault("max_length", model.max_positions)
    left_out = [
        f"{name} {json.dumps(value)}"
        for name, value in content.items()
        if name not in known
        and name not in NO_OPTIONS
        and not name.startswith("_")
        and value not in (None, [], {})
        and not (name in SILENT and SILENT[name] == value)
    ]
    if isinstance(asked, int) and asked > model.max_positions:
        left_out.append(f"max_length {asked}, as the model has {model.max_positions} positions")
        known["max_length"] = model.max_positions
    try:
        config = msgspec.convert(known, GenerationConfig)
    except (msgspec.ValidationError, GenerationError) as error:
        raise ExportError(f"{path}: {error}") from None
    # Other programs search by their own rules, so that they get every option; but ids and limits are the model's.
    kept = {name: value for name, value in content.items() if not name.startswith("_")}
    special = {name: getattr(model, name) for name in SPECIAL}
    return SearchDefaults(config, {**kept, **special, "max_length": known["max_length"]}, left_out)


def _options(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Options of the search by transformers' names, and the file that has them: in old folders the model's settings."""
    if stands(folder, GENERATION):
        return folder / GENERATION, read_json(folder, GENERATION)
    if stands(folder, CONFIG):
        content = read_json(folder, CONFIG)
        names = (*GenerationConfig.__struct_fields__, *SILENT, *OTHER_OPTIONS)
        return folder / CONFIG, {name: content[name] for name in names if name in content}
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
