"""Reading `generation_config.json`, as transformers writes it: options that are known, harmless, or refused."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from .errors import GenerationError
from .generation_config import SAMPLING_OPTIONS, GenerationConfig

OWN = {"decoder_input_ids", "seed"}
"""What no file of transformers sets."""

BOOKKEEPING = {
    # Ids, which a bundle holds in its passport; eos_token_id is looked at.
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
    # Where the file comes from.
    "_commit_hash",
    "_from_model_config",
    "transformers_version",
    # How transformers computes and what it hands back beside the ids.
    "cache_config",
    "cache_implementation",
    "compile_config",
    "disable_compile",
    "max_cache_len",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "prefill_chunk_size",
    "return_dict_in_generate",
    "use_cache",
    # About a second model that helps; there is none.
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "target_lookbehind",
}
"""What changes no output."""

NEUTRAL: dict[str, Any] = {
    "assistant_early_exit": None,
    "assistant_ensemble_weight": None,
    "begin_suppress_tokens": [],
    "constraints": None,
    "continuous_batching_config": None,
    "diversity_penalty": 0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "exponential_decay_length_penalty": None,
    "force_bos_token_to_be_generated": False,
    "force_words_ids": None,
    "guidance_scale": 1,
    "low_memory": False,
    "max_matching_ngram_size": None,
    "max_time": None,
    "min_p": 0,
    "num_beam_groups": 1,
    "penalty_alpha": 0,
    "prompt_lookup_num_tokens": None,
    "remove_invalid_values": False,
    "sequence_bias": None,
    "speculation_type": None,
    "stop_strings": None,
    "token_healing": False,
    "top_h": None,
    "typical_p": 1,
    "use_mtp": False,
    "watermarking_config": None,
}
"""Options of transformers that are not supported, and the value at which they do nothing; null does nothing either."""


class FileOptions(NamedTuple):
    """How a file says to search."""

    config: GenerationConfig
    notes: list[str]
    """What the file says and nobody follows, since it means nothing or cannot be reached."""


def read_generation_config(path: Path | str) -> GenerationConfig:
    """The options in the `generation_config.json` at `path`.

    Options at a value that does nothing are left out, and so are sampling options where the file does not sample. Where
    a file sets no greatest length, transformers stops after 20 new tokens; here the model's positions are the limit.

    Raises:
        GenerationError: no such file, no JSON object, or options that are impossible or not supported and would change
            the outputs; all of these are named.
    """
    path = Path(path)
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise GenerationError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise GenerationError(f"{path} is no generation_config.json: {error}") from None
    return file_options(path, content).config


def file_options(path: Path, content: Mapping[str, Any], max_positions: int | None = None) -> FileOptions:
    """The options in `content`, which was read from `path`; see `read_generation_config`.

    Args:
        path: Named in errors.
        content: What `generation_config.json` holds, by transformers' names.
        max_positions: Of the model, to which lengths are cut down; None to leave them as they are.

    Raises:
        GenerationError: see `read_generation_config`.
    """
    given = {name: value for name, value in content.items() if value is not None}
    problems = _refused(given)
    known = {name: value for name, value in given.items() if name in GenerationConfig.__struct_fields__}
    known = {name: value for name, value in known.items() if name not in OWN}
    if isinstance(known.get("forced_eos_token_id"), list) and len(known["forced_eos_token_id"]) == 1:
        (known["forced_eos_token_id"],) = known["forced_eos_token_id"]
    notes = []
    if known.get("do_sample", False) is False:
        unused = {name: known.pop(name) for name in SAMPLING_OPTIONS if name in known}
        neutral = {field.name: field.default for field in msgspec.structs.fields(GenerationConfig)}
        notes += [
            f"{name} {value}, which means nothing without do_sample"
            for name, value in unused.items()
            if value != neutral[name]
        ]
    if max_positions is not None:
        notes += _cut(known, max_positions)
    try:
        config = GenerationConfig(**known)
    except GenerationError as error:
        problems.append(str(error).removeprefix("generation: "))
    if problems:
        raise GenerationError(f"{path}: {'; '.join(problems)}")
    return FileOptions(config, notes)


def _cut(known: dict[str, Any], max_positions: int) -> Iterator[str]:
    """Cut the greatest lengths in `known` down to what the model can reach, and tell which."""
    for name, most in (("max_length", max_positions), ("max_new_tokens", max_positions - 1)):  # after the start token
        asked = known.get(name)
        if type(asked) is int and asked > most:
            known[name] = most
            yield f"{name} {asked}, as the model has {max_positions} positions"


def _refused(given: dict[str, Any]) -> list[str]:
    """What is wrong with those options of a file that `GenerationConfig` does not hold."""
    problems = []
    for name, value in given.items():
        if name in NEUTRAL:
            if value != NEUTRAL[name]:
                problems.append(f"{name} is {value!r}, which is not supported")
        elif name in OWN or not (name in BOOKKEEPING or name in GenerationConfig.__struct_fields__):
            problems.append(f"{name} is not known")
    ends = given.get("eos_token_id")
    if isinstance(ends, list) and len(ends) != 1:
        problems.append(f"eos_token_id is {ends}, only one is supported")
    return problems
