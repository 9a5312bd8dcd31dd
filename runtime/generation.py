"""Search: from source ids to hypotheses, over any `Backend`, with the semantics of transformers' `generate`."""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from .backend import Backend, FloatArray, IntArray, Tensor
from .beam_search import beam_search
from .decoding import Decoding, Limits, SpecialIds
from .errors import GenerationError
from .generation_config import GenerationConfig
from .logit_rules import Bans, Rule, apply_rules, logit_rules, shared_bans
from .ranking import log_softmax
from .sampling import Noise, draw, random_streams

__all__ = ["GenerationConfig", "Hypothesis", "generate", "pad"]

DIVISORS = (1e-25, 1e25)
"""What a score may be divided by, so that the result fits into float32."""


class Hypothesis(NamedTuple):
    """One output of the search."""

    ids: list[int]
    """Target ids: without the start token, with the forced prefix, ending in EOS where it was reached."""
    score: float
    """Log-probability of the new tokens, after all options that change it, divided by `count ** length_penalty`."""


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
        For each source, `config.num_return_sequences` hypotheses, the best first, or as they were drawn where there are
        no beams; fewer where the options leave fewer.

    Raises:
        GenerationError: a limit does not fit the model, or the options forbid every token.
    """
    limits = _limits(config, special, max_positions)
    rules = logit_rules(config, limits, special)
    bans = partial(shared_bans, config, limits, special)
    source_ids, source_mask = pad(sources, special.pad)
    decoding = Decoding(backend, source_ids, source_mask)
    if config.num_beams == 1:
        uniforms = None
        if config.do_sample:
            steps, streams = limits.longest - len(limits.prompt), random_streams(config, sources)
            uniforms = np.stack([stream.random(steps) for stream in streams])
        return _single_search(decoding, config, limits, special, rules=rules, bans=bans, uniforms=uniforms)
    found = beam_search(
        decoding,
        limits,
        special,
        beams=config.num_beams,
        length_penalty=config.length_penalty,
        early_stopping=config.early_stopping,
        rules=rules,
        bans=bans,
        renormalize=config.renormalize_logits,
        noise=Noise(random_streams(config, sources)) if config.do_sample else None,
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
    if not problems and not _is_divisor(longest - len(prompt), config.length_penalty):
        problems.append(
            f"length_penalty is {config.length_penalty}: {longest - len(prompt)} tokens to that power are beyond "
            f"{DIVISORS[0]} to {DIVISORS[1]}"
        )
    if problems:
        raise GenerationError("generation: " + "; ".join(problems))
    return Limits(prompt, shortest, longest)


def _is_divisor(tokens: int, length_penalty: float) -> bool:
    try:
        return DIVISORS[0] <= math.pow(tokens, length_penalty) <= DIVISORS[1]
    except OverflowError:
        return False


def _single_search(
    decoding: Decoding[Tensor],
    config: GenerationConfig,
    limits: Limits,
    special: SpecialIds,
    *,
    rules: Sequence[Rule],
    bans: Bans,
    uniforms: FloatArray | None,
) -> list[list[Hypothesis]]:
    """Outputs of each sentence that grow by themselves, one token a step. A finished one leaves the batch.

    A token is the most probable one, or is drawn with one of `uniforms (rows, steps)`. Where `bans` say all that the
    `rules` do, the backend ranks the tokens itself.
    """
    decoding.start(limits.prompt)
    outputs = config.num_return_sequences
    if outputs > 1:
        decoding.keep(np.arange(decoding.rows).repeat(outputs))
    prompt = len(limits.prompt)
    sequences = np.empty((decoding.rows, limits.longest), np.int64)
    sequences[:, :prompt] = limits.prompt
    lengths = np.full(decoding.rows, limits.longest)
    totals = np.zeros(decoding.rows)
    active = np.arange(decoding.rows)
    for length in range(prompt, limits.longest):
        forbidden = bans(length)
        best = None if forbidden is None else decoding.best(1, forbidden)
        if best is not None and np.isfinite(best[0]).all():
            gains, tokens = best[0][:, 0], best[1][:, 0]  # (rows,) each
        else:  # a rule needs all scores, or there is nothing to choose from
            logits = apply_rules(rules, decoding.logits(), sequences[active, :length])
            gains, tokens = _chosen(logits, None if uniforms is None else uniforms[active, length - prompt])
        sequences[active, length] = tokens
        totals[active] += gains
        lengths[active[tokens == special.eos]] = length + 1
        going = np.flatnonzero(tokens != special.eos)
        if not going.size or length + 1 == limits.longest:
            break
        if going.size < active.size:
            active, tokens = active[going], tokens[going]
            decoding.keep(going)
        decoding.step(tokens)
    scores: FloatArray = totals / (lengths - prompt) ** config.length_penalty
    found = [
        Hypothesis(row[1:length].tolist(), float(score))
        for row, length, score in zip(sequences, lengths, scores, strict=True)
    ]
    return [found[place : place + outputs] for place in range(0, len(found), outputs)]


def _chosen(logits: FloatArray, uniforms: FloatArray | None) -> tuple[FloatArray, IntArray]:
    """Log-probability and token of each row: the best one, or the one that is drawn with `uniforms`."""
    _require_a_choice(logits)
    log_probabilities = log_softmax(logits)
    tokens = logits.argmax(-1) if uniforms is None else draw(log_probabilities, uniforms)
    return np.take_along_axis(log_probabilities, tokens[:, None], 1)[:, 0], tokens


def _require_a_choice(scores: FloatArray) -> None:
    if np.isneginf(scores.max(-1)).any():
        raise GenerationError("generation: the options leave a sentence no output: every token is forbidden")
