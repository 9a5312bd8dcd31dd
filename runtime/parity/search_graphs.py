"""Rung 2, what a search has besides the spine: beginnings, branches, ranked tokens, picked rows.

The exam need not know them. A beginning is to give the caches of the source that the exam knows of prefill, and a step
from there what prefill gives for one token. Branches are to give what steps give, each on a cache cut down to what its
hypothesis has seen; steps answer to the exam. Tokens and rows are compared with what numpy finds.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..backend import Array, Backend, Cache, IntArray
from ..contract import BEGIN, BRANCH, PREFILL, RANK, SELECT, STEP
from ..errors import GraphError
from ..exam import GraphCase
from ..ranking import log_softmax, rank_tokens
from ..verbs import call, past_caches
from .report import CaseResult
from .tolerance import Earned, largest, largest_error

RANKED_ROWS, RANKED_PLACES = 3, 4
"""Of the logits that are ranked: B and T."""


def beginnings(cases: Sequence[GraphCase]) -> list[GraphCase]:
    """What the `cases` about prefill say about `begin`, and those of one token about a step from there, P = 0."""
    prefills = [case for case in cases if case.verb == PREFILL]
    firsts = [case for case in prefills if case.inputs["input_ids"].shape[1] == 1]
    return [*map(_begin_case, prefills), *map(_first_step, firsts)]


def _begin_case(case: GraphCase) -> GraphCase:
    reference = {name: array for name, array in case.reference.items() if ".encoder." in name}
    return GraphCase(
        verb=BEGIN,
        label=case.label,
        inputs={"encoder_hidden_states": case.inputs["encoder_hidden_states"]},
        reference=reference,
        own_error={name: case.own_error[name] for name in reference},
    )


def _first_step(case: GraphCase) -> GraphCase:
    reference = {name: array for name, array in case.reference.items() if ".encoder." not in name}
    past = {
        name.replace("present.", "past_key_values."): array[:, :, :0] if ".decoder." in name else array
        for name, array in case.reference.items()
        if name != "logits"
    }
    return GraphCase(
        verb=STEP,
        label=case.label.replace("T=1", "P=0"),
        inputs={name: case.inputs[name] for name in ("encoder_attention_mask", "input_ids")} | past,
        reference=reference,
        own_error={name: case.own_error[name] for name in reference},
        columns=case.columns,
    )


def ancestries(past: int) -> list[IntArray]:
    """What each hypothesis has seen of a cache of two pasts: the first past, half of it, every other token, the last.

    None has seen more than `past` tokens, but as in a search the cache holds those of others.
    """
    places = np.arange(2 * past)
    return [places[:past], places[: (past + 1) // 2], places[::2], places[-1:]]


def branch_case(case: GraphCase, vocabulary: int, backend: Backend[Any]) -> GraphCase:
    """A question about `branch` over the cache of `case`, which asks about a step, and that of its neighbour.

    The answer is made of steps.

    Raises:
        GraphError: the steps fail.
    """
    pasts = {name: array for name, array in case.inputs.items() if ".decoder." in name}
    given = case.inputs | {name: np.concatenate([array, np.roll(array, 1, 0)], 2) for name, array in pasts.items()}
    past = next(array.shape[2] for array in pasts.values())
    hypotheses = ancestries(past)
    ids = (case.inputs["input_ids"] + np.arange(len(hypotheses))) % vocabulary  # (B, T)
    seen = np.zeros((len(ids), len(hypotheses), 2 * past), np.int64)
    answers = []
    for place, ancestors in enumerate(hypotheses):
        seen[:, place, ancestors] = 1
        cut = given | {name: given[name][:, :, ancestors] for name in pasts} | {"input_ids": ids[:, place : place + 1]}
        answers.append(_new(call(backend, STEP, cut), len(ancestors)))
    reference = {
        name: np.concatenate([answer[name] for answer in answers], 1 if name == "logits" else 2) for name in answers[0]
    }
    return GraphCase(
        verb=BRANCH,
        label=case.label,
        inputs=given | {"input_ids": ids, "seen": seen},
        reference=reference,
        own_error={},
    )


def _new(outputs: dict[str, Array], past: int) -> dict[str, Array]:
    """What a step has added to `past` tokens."""
    for name, array in outputs.items():
        length = array.shape[1 if name == "logits" else 2]
        if length != (1 if name == "logits" else past + 1):
            raise GraphError(f"{STEP}: {name} after {past} tokens is of shape {array.shape}")
    return {name: array if name == "logits" else array[:, :, past:] for name, array in outputs.items()}


def rank_case(vocabulary: int, backend: Backend[Any]) -> CaseResult:
    """The best of random logits, many of them equal: to be those that numpy finds, in its order."""
    random = np.random.default_rng(0)
    logits = random.normal(0, 4, (RANKED_ROWS, RANKED_PLACES, vocabulary)).round().astype(np.float32)
    leading = np.unique(rank_tokens(logits, (), 2)[1])[: vocabulary // 2].tolist()
    problems: list[str] = []
    compared = 0
    try:
        left = vocabulary - len(leading)
        for forbidden, count in (((), 1), ((), 8), (leading, 1), (leading, min(8, left)), ((), vocabulary + 1)):
            found = backend.rank(backend.put(logits), forbidden, count)
            problems += _misranked(logits, forbidden, count, *found)
            compared += found[1].size
    except GraphError as failure:
        problems.append(str(failure))
    return CaseResult(label=RANK, compared=compared, problems=list(dict.fromkeys(problems)))


def _misranked(logits: Array, forbidden: Sequence[int], count: int, scores: Array, tokens: Array) -> Iterator[str]:
    """What is wrong with the `count` best tokens of `logits` and their log-probabilities."""
    best = rank_tokens(logits, forbidden, count)[1]
    asked = f"of the best {best.shape[-1]}" + (f" without {len(forbidden)} that are forbidden" if forbidden else "")
    if not scores.shape == tokens.shape == best.shape:
        yield f"{RANK}: {asked}, log_probabilities are {scores.shape} and tokens {tokens.shape}, expected {best.shape}"
        return
    if not ((tokens >= 0) & (tokens < logits.shape[-1])).all():
        yield f"{RANK}: {asked}, some are tokens that the vocabulary does not have"
        return
    if np.isin(tokens, forbidden).any():
        yield f"{RANK}: {asked}, some are tokens that were forbidden"
        return
    allowed = logits.astype(np.float64)
    allowed[..., list(forbidden)] = -np.inf
    wanted = np.take_along_axis(log_softmax(allowed), tokens, -1)
    # A float32 sum over the vocabulary is off by about as many roundings as the root of its terms (Higham 2002, 4.2).
    summing = math.sqrt(logits.shape[-1]) * float(np.finfo(np.float32).eps)
    error, tolerance = largest_error(scores, wanted), Earned(0.0, largest(wanted)).tolerance + summing
    if not error <= tolerance:
        yield f"{RANK}: {asked}, a log-probability is {error:.3g} from its token's, rounding is {tolerance:.3g}"
    if not np.array_equal(np.sort(tokens), np.sort(best)):
        yield f"{RANK}: {asked}, some are not the best"
    elif not np.array_equal(tokens, best):
        yield f"{RANK}: {asked}, some are not in order: the best first, of equals the lower id"


def select_case(case: GraphCase, backend: Backend[Any]) -> CaseResult:
    """Rows of caches, picked by the runtime where the caches are: to be exactly those that were asked for."""
    count = len(case.inputs["input_ids"])
    rows = np.array([*range(count - 1, -1, -1), 0, count - 1], np.int64)
    given = past_caches(backend, case.inputs)
    problems = []
    try:
        problems += _moved(backend, given, backend.select(given, rows), rows)
    except GraphError as failure:
        problems.append(str(failure))
    return CaseResult(label=f"{SELECT} B={count}", compared=2 * len(given), problems=problems)


def _moved(backend: Backend[Any], before: Cache[Any], after: Cache[Any], rows: Array) -> list[str]:
    problems = []
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        for name in old._fields:
            if not np.array_equal(backend.get(getattr(new, name)), backend.get(getattr(old, name))[rows]):
                problems.append(f"{SELECT}: {name} of layer {index} has other rows than {rows.tolist()}")
    return problems
