"""The file that `toolkit train` reads: TOML sections, overridden from the command line, checked key by key."""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from models.config import ModelConfig
from models.training import TrainingConfig


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which parallel text to train on: files of `source<TAB>target`, UTF-8, one pair a line."""

    train: tuple[str, ...]
    valid: tuple[str, ...]
    folder: str = "."
    """Where the files are, from the folder that the command runs in."""
    max_tokens: int = 100
    """Training pairs with a longer side are left out, and counted."""
    bleu_tokenizer: str = "13a"
    """sacreBLEU's name for how the target language is split into words ("zh" for Chinese)."""


class TokenizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The joint SentencePiece model of both languages, trained on the training text."""

    vocab_size: int = 8000
    """Most pieces; a small text may yield fewer."""
    character_coverage: float = 0.9998
    """Share of the characters of the text that get a piece; the rest become <unk>."""


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the run goes."""

    folder: str


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole training run."""

    output: OutputConfig
    data: DataConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: dict[str, Any] = {}
    """Fields of `ModelConfig`, but for the vocabulary's, which the tokenizer decides."""
    training: TrainingConfig = TrainingConfig()
    init_from: str | None = None
    """A checkpoint whose weights, settings and tokenizer the run starts from (fine-tuning)."""


FROM_TOKENIZER = ("vocab_size", "source_vocab_size", "pad_token_id", "decoder_start_token_id", "eos_token_id")
MODEL_FIELDS = tuple(name for name in ModelConfig.__struct_fields__ if name not in FROM_TOKENIZER)


def load_run_config(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read `path` and apply `overrides`, each `section.key=value` with a TOML value (quotes may be left out).

    Raises:
        click.ClickException: no such file, no TOML, an unknown key (its nearest neighbour is named) or a wrong type.
    """
    try:
        settings = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{path} is not TOML: {error}") from None
    for override in overrides:
        _apply(settings, override)
    _refuse_unknown_keys(settings, path)
    try:
        return msgspec.convert(settings, RunConfig)
    except msgspec.ValidationError as error:
        raise click.ClickException(f"{path} with its overrides: {error}") from None


def _apply(settings: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    section, _, name = key.strip().rpartition(".")
    if not equals or not name:
        raise click.ClickException(f"--set {override}: expected section.key=value, such as training.epochs=5")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    target = settings.setdefault(section, {}) if section else settings
    if not isinstance(target, dict):
        raise click.ClickException(f"--set {override}: {section} is not a section")
    target[name] = value


def _refuse_unknown_keys(settings: Mapping[str, Any], path: Path) -> None:
    known: dict[str, tuple[str, ...]] = {
        "output": OutputConfig.__struct_fields__,
        "data": DataConfig.__struct_fields__,
        "tokenizer": TokenizerConfig.__struct_fields__,
        "model": MODEL_FIELDS,
        "training": TrainingConfig.__struct_fields__,
    }
    top = RunConfig.__struct_fields__
    problems = [_unknown(section, top) for section in settings if section not in top]
    for section, names in known.items():
        values = settings.get(section, {})
        if isinstance(values, dict):
            every = [f"{section}.{name}" for name in names]
            problems += [_unknown(f"{section}.{key}", every) for key in values if key not in names]
    if problems:
        raise click.ClickException(f"{path} with its overrides: " + "; ".join(problems))


def _unknown(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.0)
    return f"unknown key {key}, did you mean {near[0]}?"
