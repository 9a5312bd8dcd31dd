"""The file that `toolkit train` reads: TOML sections, overridden from the command line, checked key by key."""

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import click
import msgspec
from msgspec.structs import FieldInfo, fields

from models.config import ModelConfig
from models.training import TrainingConfig

Text = Annotated[str, msgspec.Meta(min_length=1)]
Files = Annotated[tuple[Text, ...], msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which parallel text to train on: files of `source<TAB>target`, UTF-8, one pair a line."""

    train: Files
    valid: Files
    folder: Text = "."
    """Where the files are, from the folder that the command runs in."""
    max_tokens: Count = 100
    """Training pairs with a longer side are left out, and counted."""
    bleu_tokenizer: str = "13a"
    """sacreBLEU's name for how the target language is split into words ("zh" for Chinese)."""


class TokenizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The joint SentencePiece model of both languages, trained on the training text."""

    vocab_size: Count = 8000
    """Most pieces; a small text may yield fewer."""
    character_coverage: Annotated[float, msgspec.Meta(ge=0.98, le=1)] = 0.9998
    """Share of the characters of the text that get a piece; the rest become <unk>."""
    normalization: Literal["nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf", "identity"] = "nmt_nfkc"
    """SentencePiece's rule for characters that mean the same; "identity" leaves the text as it is."""


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the run goes."""

    folder: Text


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole training run."""

    init_from: Text | None = None
    """A checkpoint whose weights, settings and tokenizer the run starts from (fine-tuning)."""
    output: OutputConfig
    data: DataConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: dict[str, Any] = {}
    """Fields of `ModelConfig`, but for the vocabulary's, which the tokenizer decides."""
    training: TrainingConfig = TrainingConfig()


CONFIG_FILE = "config.toml"
SECTIONS: Mapping[str, type[msgspec.Struct]] = {
    "output": OutputConfig,
    "data": DataConfig,
    "tokenizer": TokenizerConfig,
    "model": ModelConfig,
    "training": TrainingConfig,
}
FROM_TOKENIZER = ("vocab_size", "source_vocab_size", "pad_token_id", "decoder_start_token_id", "eos_token_id")
FROM_CHECKPOINT = ("model", "tokenizer")
"""Sections that `init_from` takes the place of."""
FREE_ON_RESUME = (
    "data.folder",
    "output.folder",
    "training.epochs",
    "training.average",
    "training.save_steps",
    "training.log_steps",
)
"""What may differ between a run and its continuation."""


def load_run_config(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read `path` and apply `overrides`, each `section.key=value` with a TOML value (quotes may be left out).

    Raises:
        OSError: the file cannot be read.
        click.ClickException: it is not TOML, or keys are unknown (the nearest known one is named), missing or of the
            wrong type, or values are impossible; all of these are listed.
    """
    try:
        settings = tomllib.loads(path.read_text("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{path} is not TOML: {error}") from None
    known = _known_fields()
    problems = [problem for override in overrides for problem in _apply(settings, override, known)]
    problems = problems or _wrong_keys(settings, known) or _wrong_values(settings)
    if problems:
        raise click.ClickException(f"{path}: " + "; ".join(problems))
    if settings.get("init_from") is None:
        defaults = {name: field.default for name, field in _section_fields("model").items()}
        settings["model"] = {**defaults, **settings.get("model", {})}
    return msgspec.convert(settings, RunConfig)


def to_toml(config: RunConfig) -> str:
    """`config` with its defaults filled in, as `load_run_config` reads it."""
    lines = []
    # Keys outside of sections come first in TOML, as they do in `RunConfig`.
    for name, value in msgspec.to_builtins(config).items():
        if config.init_from is not None and name in FROM_CHECKPOINT:
            continue
        if isinstance(value, dict):
            lines += [
                "",
                f"[{name}]",
                *(f"{key} = {_toml_value(item)}" for key, item in value.items() if item is not None),
            ]
        elif value is not None:
            lines.append(f"{name} = {_toml_value(value)}")
    return "\n".join(lines).lstrip() + "\n"


def changed_settings(before: RunConfig, now: RunConfig) -> list[str]:
    """What keeps `now` from being a continuation of `before`: a line for each setting, with both values."""
    old, new = (_flat(msgspec.to_builtins(config)) for config in (before, now))
    return [
        f"{key} was {old.get(key)!r} and is {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in FREE_ON_RESUME
    ]


def _known_fields() -> dict[str, FieldInfo]:
    """Every key that a file may hold, by its path such as "training.epochs"."""
    known = {f"{section}.{name}": field for section in SECTIONS for name, field in _section_fields(section).items()}
    return known | {field.name: field for field in fields(RunConfig) if field.name not in SECTIONS}


def _section_fields(section: str) -> dict[str, FieldInfo]:
    return {
        field.name: field
        for field in fields(SECTIONS[section])
        if section != "model" or field.name not in FROM_TOKENIZER
    }


def _apply(settings: dict[str, Any], override: str, known: Mapping[str, FieldInfo]) -> list[str]:
    """Put `override` into `settings`; returns what is wrong with it."""
    key, equals, text = override.partition("=")
    key = key.strip()
    section, _, name = key.rpartition(".")
    if not equals or not name:
        return [f"--set {override}: expected section.key=value, such as training.epochs=5"]
    target = settings.setdefault(section, {}) if section else settings
    if not isinstance(target, dict):
        return [f"--set {override}: {section} is not a section"]
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    # A folder may be called 2024 or 2024-05-01.
    if key in known and known[key].type in (str, Text, Text | None) and not isinstance(value, str):
        value = text.strip()
    target[name] = value
    return []


def _wrong_keys(settings: Mapping[str, Any], known: Mapping[str, FieldInfo]) -> list[str]:
    """Unknown sections and keys, values of the wrong type, and what is missing."""
    problems = [
        f"unknown section [{name}], did you mean [{_nearest(name, SECTIONS)}]?"
        for name, value in settings.items()
        if isinstance(value, dict) and name not in SECTIONS
    ]
    given = _flat({name: value for name, value in settings.items() if not isinstance(value, dict) or name in SECTIONS})
    for key, value in given.items():
        if key in SECTIONS:
            problems.append(f"{key} is a section, expected [{key}] with its keys below")
        elif key not in known:
            problems.append(f"unknown key {key}, did you mean {_nearest(key, known)}?")
        else:
            problems += _wrong_type(key, value, known[key].type)
    return problems + [f"{key} is missing" for key, field in known.items() if field.required and key not in given]


def _wrong_type(key: str, value: object, kind: Any) -> list[str]:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if get_origin(kind) is Literal:
            return [f"{key} is {value!r}, expected one of {', '.join(map(repr, get_args(kind)))}"]
        message, _, place = str(error).partition(" - at `$")
        return [f"{key}{place.rstrip('`')}: {message}"]
    return []


def _wrong_values(settings: Mapping[str, Any]) -> list[str]:
    """What the sections themselves object to; only for settings of the right types."""
    problems = []
    sections = {name: dict(settings.get(name, {})) for name in SECTIONS}
    if settings.get("init_from") is None:
        # The tokenizer's own number comes later; it is not what people get wrong.
        sections["model"]["vocab_size"] = TokenizerConfig().vocab_size
    else:
        problems += [
            f"with init_from the {name} is that of the checkpoint: remove the section [{name}]"
            for name in FROM_CHECKPOINT
            if sections.pop(name)
        ]
    for name, section in sections.items():
        try:
            msgspec.convert(section, SECTIONS[name])
        except msgspec.ValidationError as error:
            problems.append(str(error))
    return problems


def _nearest(key: str, known: Iterable[str]) -> str:
    """The known key that was most likely meant: the same name in another section, or else similar spelling."""
    name = key.rpartition(".")[2]
    others = list(known)
    same = [other for other in others if other.rpartition(".")[2] == name]
    section = [other for other in others if other.rpartition(".")[0] == key.rpartition(".")[0]]
    return difflib.get_close_matches(key, same or section or others, n=1, cutoff=0.0)[0]


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            flat[name] = value
    return flat


def _toml_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)  # JSON has no inf
    # A JSON string is a TOML string, but for one control character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
