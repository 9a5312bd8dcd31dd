"""Search: from source ids to hypotheses, over any `Backend`, with the semantics of transformers' `generate`."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from .backend import Backend, FloatArray, IntArray, Tensor
from .beam_search import beam_search
from .decoding import Decoding, Limits, SpecialIds, forbid_early_end, log_softmax
from .errors import GenerationError


class GenerationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to search. Names and meanings are those of `transformers.GenerationConfig`.

    Raises:
        GenerationError: options contradict each other; the message lists every contradiction.
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
    decoder_input_ids: tuple[int, ...] = ()
    """Forced prefix: every output begins with these ids. The start token before them is optional."""

    def __post_init__(self) -> None:
        problems = []
        for name in ("num_beams", "num_return_sequences", "max_length", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"{name} is {value}, expected at least 1")
        for name in ("min_length", "min_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 0:
                problems.append(f"{name} is {value}, expected at least 0")
        if self.num_return_sequences > self.num_beams:
            problems.append(f"num_return_sequences {self.num_return_sequences} is more than num_beams {self.num_beams}")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            problems.append(f"early_stopping is {self.early_stopping!r}, expected True, False or 'never'")
        if not np.isfinite(self.length_penalty):
            problems.append(f"length_penalty is {self.length_penalty}, expected a finite number")
        if problems:
            raise GenerationError("generation: " + "; ".join(problems))


class Hypothesis(NamedTuple):
    """One output of the search."""

    ids: list[int]
    """Target ids: without the start token, with the forced prefix, ending in EOS where it was reached."""
    score: float
    """Log-probability of the new tokens divided by `count ** length_penalty`."""


def generate(
    backend: Backend[Tensor],
    sources: Sequence[Sequence[int]],
    config: GenerationConfig,
    special: SpecialIds,
    max_positions: int,
) -> list[list[Hypothesis]]:
    """Search for the best outputs of one batch of sources.

    Args:
        backend: Runs the model.
        sources: Ids as the encoder reads them, at least one each; padded here.
        config: How to search.
        special: The model's pad, start and end ids.
        max_positions: Length of the model's position table.

    Returns:
        For each source, `config.num_return_sequences` hypotheses, the best first.

    Raises:
        GenerationError: a limit does not fit the model.
    """
    limits = _limits(config, special, max_positions)
    source_ids, source_mask = pad(sources, special.pad)
    decoding = Decoding(backend, source_ids, source_mask)
    if config.num_beams == 1:
        return _greedy_search(decoding, config, limits, special)
    found = beam_search(
        decoding,
        limits,
        special,
        beams=config.num_beams,
        length_penalty=config.length_penalty,
        early_stopping=config.early_stopping,
    )
    return [
        [Hypothesis(ids, score) for ids, score in hypotheses[: config.num_return_sequences]] for hypotheses in found
    ]


def pad(rows: Sequence[Sequence[int]], value: int) -> tuple[IntArray, IntArray]:
    """Ids and mask, `(B, S)` each, of rows that are filled up at the end with `value`."""
    width = max(map(len, rows))
    ids = np.full((len(rows), width), value, np.int64)
    mask = np.zeros((len(rows), width), np.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
        mask[place, : len(row)] = 1
    return ids, mask


def _limits(config: GenerationConfig, special: SpecialIds, max_positions: int) -> Limits:
    prompt = tuple(config.decoder_input_ids)
    if prompt[:1] != (special.start,):
        prompt = (special.start, *prompt)
    longest = max_positions if config.max_length is None else config.max_length
    if config.max_new_tokens is not None:
        longest = len(prompt) + config.max_new_tokens
    shortest = config.min_length
    if config.min_new_tokens is not None:
        shortest = len(prompt) + config.min_new_tokens
    problems = []
    if longest > max_positions:
        problems.append(f"outputs of up to {longest} tokens are asked for, the model has {max_positions} positions")
    if len(prompt) >= longest:
        problems.append(
            f"the prefix has {len(prompt)} tokens with the start token, which leaves none of max_length {longest}"
        )
    if shortest > longest:
        problems.append(f"at least {shortest} tokens are asked for, but at most {longest}")
    if problems:
        raise GenerationError("generation: " + "; ".join(problems))
    return Limits(prompt, shortest, longest)


def _greedy_search(
    decoding: Decoding[Tensor], config: GenerationConfig, limits: Limits, special: SpecialIds
) -> list[list[Hypothesis]]:
    """The most probable token at every step. A finished sentence leaves the batch."""
    count = decoding.rows
    ids = [list(limits.prompt[1:]) for _ in range(count)]
    totals = np.zeros(count)
    active = np.arange(count)
    logits = decoding.start(limits.prompt)
    for length in range(len(limits.prompt), limits.longest):
        forbid_early_end(logits, length, limits, special)
        tokens = logits.argmax(-1)  # (rows,)
        totals[active] += np.take_along_axis(log_softmax(logits), tokens[:, None], 1)[:, 0]
        for row, token in zip(active, tokens, strict=True):
            ids[row].append(int(token))
        going = np.flatnonzero(tokens != special.eos)
        if not going.size or length + 1 == limits.longest:
            break
        if going.size < active.size:
            active, tokens = active[going], tokens[going]
            decoding.keep(going)
        logits = decoding.step(tokens)
    new = np.array([len(row) + 1 - len(limits.prompt) for row in ids])
    scores: FloatArray = totals / new**config.length_penalty
    return [[Hypothesis(row, float(score))] for row, score in zip(ids, scores, strict=True)]
