"""How to search: the options, what they may be, and how to read them from a file of transformers."""

from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np

from .errors import GenerationError

Ids = tuple[int, ...]


class GenerationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to search. Names, meanings and defaults are those of `transformers.GenerationConfig`, but for `seed`.

    Lists are taken for tuples. What is not named here is not supported; `read_generation_config` says so by name.

    Raises:
        GenerationError: an option is of the wrong type or impossible, or options contradict each other; the message
            lists all of it.
    """

    num_beams: int = 1
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    """A hypothesis of n new tokens scores its log-probability divided by `n ** length_penalty`."""
    early_stopping: bool | Literal["never"] = False
    max_length: int | None = None
    """Most tokens of an output, start token and prefix included; None for as many as the model has positions."""
    max_new_tokens: int | None = None
    """Like `max_length`, counted after the prefix; goes before it where both are given."""
    min_length: int = 0
    """Fewest tokens before EOS, start token and prefix included."""
    min_new_tokens: int | None = None
    """Like `min_length`, counted after the prefix; goes before it where both are given."""
    decoder_input_ids: Ids = ()
    """Forced prefix: every output begins with these ids. The start token before them is optional."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that the output holds already become less probable; the start token and the prefix count."""
    no_repeat_ngram_size: int = 0
    """No n tokens in a row twice in an output, start token and prefix included; 0 for no such rule."""
    bad_words_ids: tuple[Ids, ...] = ()
    """Tokens, or tokens in a row, that no output may hold."""
    forced_bos_token_id: int | None = None
    """The first token after the start token; without effect behind a prefix, as in transformers."""
    forced_eos_token_id: int | None = None
    """The last token of an output that reaches its greatest length."""
    suppress_tokens: Ids = ()
    """Tokens that no output may hold."""
    renormalize_logits: bool = False
    """Whether scores are log-probabilities of what all other options have left."""
    do_sample: bool = False
    """Draw tokens by their probability; `num_return_sequences` outputs are then independent of each other. With
    `num_beams` above 1, the continuations of the beams are drawn."""
    temperature: float = 1.0
    """For `do_sample`: logits are divided by it before a token is drawn."""
    top_k: int = 50
    """For `do_sample`: only the k most probable tokens are drawn; 0 for all."""
    top_p: float = 1.0
    """For `do_sample`: only the fewest most probable tokens that have this probability together are drawn."""
    seed: int | None = None
    """For `do_sample`: a sentence with a seed always gets the same outputs, wherever it stands; None for new ones."""

    def __post_init__(self) -> None:
        problems = _mistyped(self) or [*_impossible(self), *_impossible_ids(self), *_contradictory(self)]
        if problems:
            raise GenerationError("generation: " + "; ".join(problems))


SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "seed")
"""What means nothing without `do_sample`."""

_AT_LEAST = {
    1: ("num_beams", "num_return_sequences", "max_length", "max_new_tokens"),
    0: ("min_length", "min_new_tokens", "no_repeat_ngram_size", "top_k", "seed"),
}
_ABOVE_0 = ("repetition_penalty", "temperature")
_EXPECTED = {"early_stopping": "True, False or 'never'"}


def named_ids(config: GenerationConfig) -> Iterator[tuple[str, Ids]]:
    """Every option that holds token ids, and these ids."""
    yield "decoder_input_ids", config.decoder_input_ids
    yield "bad_words_ids", tuple(token for word in config.bad_words_ids for token in word)
    yield "suppress_tokens", config.suppress_tokens
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        token = getattr(config, name)
        yield name, () if token is None else (token,)


def foreign_ids(config: GenerationConfig, vocabulary: int) -> list[str]:
    """The options that hold ids which a target vocabulary of so many entries does not have, each a line."""
    outside = {name: [token for token in ids if not 0 <= token < vocabulary] for name, ids in named_ids(config)}
    return [
        f"{name} holds the id {ids[0]}, the target vocabulary has 0 .. {vocabulary - 1}"
        for name, ids in outside.items()
        if ids
    ]


def _mistyped(config: GenerationConfig) -> list[str]:
    """Options whose type is wrong. Lists become tuples, whole numbers floats where floats are meant."""
    problems = []
    for field in msgspec.structs.fields(config):
        value = getattr(config, field.name)
        try:
            msgspec.structs.force_setattr(config, field.name, msgspec.convert(value, field.type))
        except msgspec.ValidationError as error:
            expected = _EXPECTED.get(field.name) or str(error).removeprefix("Expected ")
            problems.append(f"{field.name} is {value!r}, expected {expected}")
    return problems


def _impossible(config: GenerationConfig) -> Iterator[str]:
    for least, names in _AT_LEAST.items():
        for name in names:
            value = getattr(config, name)
            if value is not None and value < least:
                yield f"{name} is {value}, expected at least {least}"
    for name in _ABOVE_0:
        value = getattr(config, name)
        if not (np.isfinite(value) and value > 0):
            yield f"{name} is {value}, expected a number above 0"
    if not np.isfinite(config.length_penalty):
        yield f"length_penalty is {config.length_penalty}, expected a finite number"
    if not 0 <= config.top_p <= 1:
        yield f"top_p is {config.top_p}, expected 0 to 1"


def _impossible_ids(config: GenerationConfig) -> Iterator[str]:
    for name, ids in named_ids(config):
        if name != "decoder_input_ids" and any(token < 0 for token in ids):
            yield f"{name} holds the id {min(ids)}, expected ids from 0 on"
    if not all(config.bad_words_ids):
        yield "bad_words_ids holds an empty word"


def _contradictory(config: GenerationConfig) -> Iterator[str]:
    outputs, beams = config.num_return_sequences, config.num_beams
    if outputs > beams and not (config.do_sample and beams == 1):
        yield f"num_return_sequences {outputs} is more than num_beams {beams}"
    if not config.do_sample:
        defaults = {field.name: field.default for field in msgspec.structs.fields(config)}
        for name in SAMPLING_OPTIONS:
            if getattr(config, name) != defaults[name]:
                yield f"{name} is {getattr(config, name)}, which means nothing without do_sample"
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        if getattr(config, name) in config.suppress_tokens:
            yield f"{name} {getattr(config, name)} is among suppress_tokens"
