"""Rules that change the scores of the next token before one is chosen; transformers' logits processors.

A rule is a pure function of scores `(rows, V)` and of the sequences so far `(rows, length)`, start token and prefix
included. It returns scores, changed in a copy or as they came. Greedy search and sampling apply the rules to logits,
beam search to log-probabilities, all in the order in which transformers applies them.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from .backend import FloatArray, IntArray
from .decoding import Limits, SpecialIds
from .errors import GenerationError
from .generation_config import GenerationConfig, Ids
from .ranking import log_softmax
from .sampling import divide_by_temperature, keep_top_k, keep_top_p

Rule = Callable[[FloatArray, IntArray], FloatArray]
Bans = Callable[[int], Ids | None]
"""From a length to what is forbidden to all sequences of that length; see `shared_bans`."""


def logit_rules(config: GenerationConfig, limits: Limits, special: SpecialIds) -> list[Rule]:
    """The rules that `config` asks for, in transformers' order.

    Raises:
        GenerationError: EOS alone is among the bad words. Transformers takes it out in silence.
    """
    if (special.eos,) in config.bad_words_ids:
        raise GenerationError(
            f"generation: bad_words_ids holds EOS ({special.eos}), without which no output ends: "
            "min_length and min_new_tokens keep outputs from ending early"
        )
    return [*_bans(config, limits, special), *_choices(config, limits)]


def _bans(config: GenerationConfig, limits: Limits, special: SpecialIds) -> Iterator[Rule]:
    if config.repetition_penalty != 1:
        yield partial(penalize_repetition, penalty=config.repetition_penalty)
    if config.no_repeat_ngram_size:
        yield partial(forbid_repeated_ngrams, size=config.no_repeat_ngram_size)
    if config.bad_words_ids:
        yield partial(forbid_words, words=group_words(config.bad_words_ids))
    if limits.shortest > len(limits.prompt):
        yield partial(forbid_early_end, shortest=limits.shortest, eos=special.eos)


def _choices(config: GenerationConfig, limits: Limits) -> Iterator[Rule]:
    if config.forced_bos_token_id is not None:
        yield partial(force_at, token=config.forced_bos_token_id, place=1)
    if config.forced_eos_token_id is not None:
        yield partial(force_at, token=config.forced_eos_token_id, place=limits.longest - 1)
    if config.suppress_tokens:
        yield partial(forbid_tokens, tokens=config.suppress_tokens)
    if config.do_sample:
        # Two tokens at least where beams are drawn: one of them may be EOS.
        yield from _sampling_rules(config, at_least=1 if config.num_beams == 1 else 2)
    if config.renormalize_logits:
        yield renormalize


def _sampling_rules(config: GenerationConfig, *, at_least: int) -> Iterator[Rule]:
    if config.temperature != 1:
        yield partial(divide_by_temperature, temperature=config.temperature)
    if config.top_k:
        yield partial(keep_top_k, count=max(config.top_k, at_least))
    if config.top_p < 1:
        yield partial(keep_top_p, mass=config.top_p, at_least=at_least)


def shared_bans(config: GenerationConfig, limits: Limits, special: SpecialIds, length: int) -> Ids | None:
    """All that the rules of `config` do to sequences of `length` tokens, where that is to forbid some to every one.

    None where a rule looks at a sequence or changes other scores, so that all scores are needed.
    """
    forced = {(config.forced_bos_token_id, 1), (config.forced_eos_token_id, limits.longest - 1)}
    if (
        config.do_sample
        or config.repetition_penalty != 1
        or config.no_repeat_ngram_size
        or any(len(word) > 1 for word in config.bad_words_ids)
        or any(token is not None and place == length for token, place in forced)
    ):
        return None
    early = [special.eos] if length < limits.shortest else []
    return tuple(sorted({word[0] for word in config.bad_words_ids}.union(config.suppress_tokens, early)))


def apply_rules(rules: Sequence[Rule], scores: FloatArray, sequences: IntArray) -> FloatArray:
    """`scores (rows, V)` after all `rules`."""
    for rule in rules:
        scores = rule(scores, sequences)
    return scores


def penalize_repetition(scores: FloatArray, sequences: IntArray, *, penalty: float) -> FloatArray:
    """Tokens that a sequence holds: scores below 0 times `penalty`, others divided by it (Keskar et al. 2019)."""
    seen = np.take_along_axis(scores, sequences, 1)  # (rows, length)
    changed = scores.copy()
    np.put_along_axis(changed, sequences, np.where(seen < 0, seen * penalty, seen / penalty), 1)
    return changed


def forbid_repeated_ngrams(scores: FloatArray, sequences: IntArray, *, size: int) -> FloatArray:
    """Whatever would end a row of `size` tokens that the sequence holds already becomes impossible."""
    length = sequences.shape[1]
    if length < size:
        return scores
    windows = np.lib.stride_tricks.sliding_window_view(sequences, size, axis=1)  # (rows, length - size + 1, size)
    begun = sequences[:, None, length - size + 1 :]  # (rows, 1, size - 1)
    rows, places = np.nonzero((windows[:, :, :-1] == begun).all(-1))
    changed = scores.copy()
    changed[rows, windows[rows, places, -1]] = -np.inf
    return changed


class Words(NamedTuple):
    """Bad words, sorted by what they need before their last token."""

    alone: IntArray
    """Words of one token, `(words,)`."""
    longer: list[tuple[IntArray, IntArray]]
    """For each other length n: beginnings `(words, n - 1)` and last tokens `(words,)`."""


def group_words(words: Sequence[Sequence[int]]) -> Words:
    """`words` in the form that `forbid_words` wants."""
    groups: dict[int, list[Sequence[int]]] = {}
    for word in words:
        groups.setdefault(len(word), []).append(word)
    arrays = {length: np.array(group, np.int64) for length, group in groups.items()}
    alone = arrays.pop(1, np.empty((0, 1), np.int64))[:, 0]
    return Words(alone, [(array[:, :-1], array[:, -1]) for array in arrays.values()])


def forbid_words(scores: FloatArray, sequences: IntArray, *, words: Words) -> FloatArray:
    """The last token of a bad word becomes impossible where the sequence ends in the tokens before it."""
    changed = scores.copy()
    changed[:, words.alone] = -np.inf
    for beginnings, lasts in words.longer:
        length = beginnings.shape[1]
        if length <= sequences.shape[1]:
            rows, begun = np.nonzero((sequences[:, None, -length:] == beginnings).all(-1))  # of (rows, words)
            changed[rows, lasts[begun]] = -np.inf
    return changed


def forbid_early_end(scores: FloatArray, sequences: IntArray, *, shortest: int, eos: int) -> FloatArray:
    """EOS becomes impossible while the sequences are shorter than `shortest`."""
    if sequences.shape[1] >= shortest:
        return scores
    return _without(scores, [eos])


def force_at(scores: FloatArray, sequences: IntArray, *, token: int, place: int) -> FloatArray:
    """`token` alone is possible at `place`, with log-probability 0."""
    if sequences.shape[1] != place:
        return scores
    changed = np.full_like(scores, -np.inf)
    changed[:, token] = 0
    return changed


def forbid_tokens(scores: FloatArray, _sequences: IntArray, *, tokens: Sequence[int]) -> FloatArray:
    """`tokens` become impossible."""
    return _without(scores, tokens)


def renormalize(scores: FloatArray, _sequences: IntArray) -> FloatArray:
    """Log-probabilities; a row in which nothing is possible stays as it is, where transformers has NaN."""
    possible = scores.max(-1) > -np.inf
    if possible.all():
        return log_softmax(scores)
    changed = scores.copy()
    changed[possible] = log_softmax(scores[possible])
    return changed


def _without(scores: FloatArray, tokens: Sequence[int]) -> FloatArray:
    changed = scores.copy()
    changed[:, list(tokens)] = -np.inf
    return changed
