"""What a bundle of lower precision must stand: its words and its distributions, not every number."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..backend import Array, FloatArray
from ..errors import GraphError, ThresholdError
from ..exam import TokenCase
from .candidate import Candidate
from .report import Figure
from .tolerance import worst


class Threshold(NamedTuple):
    """A bound on one figure, for each precision, and why."""

    limits: dict[str, float]
    at_least: bool
    reason: str


THRESHOLDS: dict[str, Threshold] = {
    "token_agreement": Threshold(
        {"fp16": 0.99, "int8": 0.97, "int4": 0.94},
        at_least=True,
        reason="share of positions whose most probable token is the reference's; the rest should be close calls",
    ),
    "kl_mean": Threshold(
        {"fp16": 2e-5, "int8": 2e-3, "int4": 0.02},
        at_least=False,
        reason="mean divergence of next-token distributions from the reference's, in nats; it sees what no token shows",
    ),
    "kl_p99": Threshold(
        {"fp16": 2e-4, "int8": 0.02, "int4": 0.2},
        at_least=False,
        reason="99th percentile of the same: one broken row shows in the tail before it shows in the mean",
    ),
    "loops": Threshold(
        {"fp16": 0, "int8": 0, "int4": 0},
        at_least=False,
        reason="outputs that repeat themselves where the reference's do not; one is too many",
    ),
    "chrf": Threshold(
        {"fp16": 98, "int8": 90, "int4": 80},
        at_least=True,
        reason="chrF2 against the reference's own translations: other words must be few, or spelt alike",
    ),
    "distance": Threshold(
        {"fp16": 0.005, "int8": 0.15, "int4": 0.25},
        at_least=False,
        reason="largest distance of any number of rungs 2 and 3, as a share of the largest of its tensor",
    ),
    "invariance": Threshold(
        {"fp16": 0.05, "int8": 0.02, "int4": 0.02},
        at_least=False,
        reason="how far a logit may move between a sentence alone and in company: what one scale for a batch exceeds",
    ),
}
"""The one table. The limits of divergence lie between what sound weights of that precision give and what one damaged
layer gives; `docs/parity.md` shows both, measured on the shipped model."""

PRECISIONS = ("fp32", "fp16", "int8", "int4")
UNKNOWN = dict.fromkeys(("token_agreement", "kl_mean", "kl_p99", "loops", "chrf"), math.nan)
"""What is measured on sentences, where nothing can be."""
REPEATS = 4
"""So many times in a row the same words are a loop."""


def thresholds(precision: str, overrides: Mapping[str, float]) -> dict[str, float]:
    """The limits in force for `precision`; none for fp32, which earns its tolerance.

    Raises:
        ThresholdError: an override names no threshold, or the precision has none.
    """
    if unknown := [name for name in overrides if name not in THRESHOLDS]:
        raise ThresholdError(f"threshold {', '.join(unknown)} is not known, expected one of {', '.join(THRESHOLDS)}")
    if precision == "fp32":
        if overrides:
            raise ThresholdError("a bundle in fp32 is held to PyTorch's own error: thresholds are for lower precisions")
        return {}
    if precision not in PRECISIONS:
        raise ThresholdError(f"the precision {precision!r} has no thresholds, expected one of {', '.join(PRECISIONS)}")
    return {name: threshold.limits[precision] for name, threshold in THRESHOLDS.items()} | dict(overrides)


def figure(name: str, value: float, limits: Mapping[str, float]) -> Figure:
    """`value` beside its limit."""
    threshold = THRESHOLDS[name]
    return Figure(name=name, value=value, limit=limits[name], at_least=threshold.at_least, reason=threshold.reason)


def figures(cases: Sequence[TokenCase], candidate: Candidate, limits: Mapping[str, float]) -> list[Figure]:
    """What the runtime makes of sentences, each figure beside its limit; NaN where it gives up or there are none."""
    try:
        values = UNKNOWN | _words(cases, candidate) | _distributions(cases, candidate)
    except GraphError:
        values = UNKNOWN
    return [figure(name, value, limits) for name, value in values.items()]


def _words(cases: Sequence[TokenCase], candidate: Candidate) -> dict[str, float]:
    """Of every search that the exam asks for, greedy or with beams."""
    if not cases:
        return {}
    outputs = [candidate.search([case.source_ids], case.config)[0] for case in cases]
    pairs = list(zip(outputs, cases, strict=True))
    return {
        "loops": float(sum(loops(found.ids) and not loops(case.ids) for found, case in pairs)),
        "chrf": chrf(
            [candidate.tokenizer.decode(found.ids) for found in outputs], [case.translation for case in cases]
        ),
    }


def _distributions(cases: Sequence[TokenCase], candidate: Candidate) -> dict[str, float]:
    """Along the reference's greedy outputs, by one prefill and step by step: the worse of the two."""
    greedy = [case for case in cases if case.config.num_beams == 1]
    if not greedy:
        return {}
    agreed, means, tails = [], [], []
    for stepwise in (False, True):
        found = [
            (case, candidate.forced_log_probs(case.source_ids, case.ids, stepwise=stepwise)[: len(case.ids)])
            for case in greedy
        ]
        agreed.append(float(np.concatenate([row.argmax(-1) == case.top_ids[:, 0] for case, row in found]).mean()))
        divergence = np.concatenate([kl_divergence(case, row) for case, row in found])
        means.append(float(divergence.mean()))
        tails.append(float(np.quantile(divergence, 0.99)))
    return {"token_agreement": min(agreed), "kl_mean": worst(means), "kl_p99": worst(tails)}


def kl_divergence(case: TokenCase, log_probs: FloatArray) -> Array:
    """KL(reference || runtime) in nats at each position `(N,)`.

    The tokens beyond the recorded ones count as one: a lower bound, and a tight one where the recorded ones have nearly
    all of the probability.

    Args:
        case: Holds the reference's most probable tokens.
        log_probs: The runtime's, `(N, V)`.
    """
    known = case.top_log_probs.astype(np.float64)
    ours = np.take_along_axis(log_probs, case.top_ids, 1)
    rest, our_rest = (np.clip(1 - np.exp(part).sum(-1), 1e-12, None) for part in (known, ours))
    inside = (np.exp(known) * (known - ours)).sum(-1)
    result: Array = inside + rest * (np.log(rest) - np.log(our_rest))
    return np.where(result > 0, result, np.where(np.isnan(result), np.nan, 0.0))


def loops(ids: Sequence[int]) -> bool:
    """Whether some words stand `REPEATS` times in a row: the mark of a search that has lost its way."""
    for size in range(1, len(ids) // REPEATS + 1):
        run = 0
        for place in range(size, len(ids)):
            run = run + 1 if ids[place] == ids[place - size] else 0
            if run >= size * (REPEATS - 1):
                return True
    return False


def chrf(texts: Sequence[str], references: Sequence[str]) -> float:
    """chrF2 of a corpus, 0 to 100: F-score of character n-grams, n = 1 to 6, recall counting twice (Popović 2015).

    As sacrebleu computes it by default: no spaces, counts summed over the corpus, precision and recall averaged
    over the orders, those without n-grams left out. Where none has any, equal texts are 100.
    """
    averaged = []
    for order in range(1, 7):
        pairs = [(_ngrams(text, order), _ngrams(other, order)) for text, other in zip(texts, references, strict=True)]
        common = sum((mine & other).total() for mine, other in pairs)
        found = sum(mine.total() for mine, other in pairs if other)
        wanted = sum(other.total() for _, other in pairs)
        if found and wanted:
            averaged.append((common / found, common / wanted))
    if not averaged:
        return 100.0 * (list(texts) == list(references))
    precision, recall = np.mean(averaged, axis=0)
    return float(100 * 5 * precision * recall / (4 * precision + recall)) if precision else 0.0


def _ngrams(text: str, order: int) -> Counter[str]:
    joined = "".join(text.split())
    return Counter(joined[start : start + order] for start in range(len(joined) - order + 1))
