"""Rung 3: step after step on the runtime's own caches, and how far it drifts away from step to step.

The same tokens in one prefill must give the same, since no case of rung 2 has a prefix as long as the model has room
for; and so must a step after such a prefill, on the caches that it gave.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..backend import Array
from ..errors import GraphError
from ..exam import RolloutCase
from .candidate import Candidate, chained
from .report import CaseResult, RungResult, rung_result
from .tolerance import FACTOR, earned_by_rollout, largest_error, worst

WAYS = ("", " of one long prefill", " of a long prefill and a step")
"""In which ways the tokens of a case are fed, as problems say it: step by step first."""


class Drift(NamedTuple):
    """The runtime's error at each position."""

    errors: list[float]
    """Infinite from where it gave up."""
    failure: str = ""
    """Why it did."""

    def problems(self, tolerance: float, fed: str = "") -> list[str]:
        """The first position that is out of `tolerance`; `fed` says in which way tokens went in."""
        bad = [place for place, error in enumerate(self.errors) if not error <= tolerance or math.isinf(error)]
        if not bad:
            return []
        reason = f" ({self.failure})" if self.failure else ""
        return [f"at position {bad[0]}{fed} the error is {self.errors[bad[0]]:.3g}, earned is {tolerance:.3g}{reason}"]


def rollout_rung(cases: Sequence[RolloutCase], candidate: Candidate) -> tuple[RungResult, list[float]]:
    """The verdict, and the largest error at each position of the chains."""
    earned = earned_by_rollout(cases)
    tolerance = earned.tolerance if candidate.exact else math.inf
    ways = [[drift(case, logits) for logits in _ways(case, candidate)] for case in cases]

    def problems(drifts: Iterable[Drift]) -> list[str]:
        return [problem for drift, fed in zip(drifts, WAYS, strict=True) for problem in drift.problems(tolerance, fed)]

    verdicts = [
        CaseResult(label=case.label, compared=len(WAYS) * case.reference.size, problems=problems(drifts))
        for case, drifts in zip(cases, ways, strict=True)
    ]
    chain, *others = [together([drifts[way] for drifts in ways]) for way in range(len(WAYS))]
    largest = worst([error for drift in (chain, *others) for error in drift.errors])
    ratio = FACTOR * largest / earned.tolerance
    summary = f"{len(chain.errors)} steps, worst {ratio:.2f} x PyTorch's own error"
    return rung_result(3, summary, verdicts, problems([chain, *others])), chain.errors


def _ways(case: RolloutCase, candidate: Candidate) -> Iterator[Iterator[Array]]:
    """The logits of `case`, fed in each of `WAYS`."""
    count = case.target_ids.shape[1]
    for prompt in (0, count, count - 1):
        yield chained(candidate.backend, case.source_ids, case.source_mask, case.target_ids, prompt)


def drift(case: RolloutCase, logits: Iterator[Array]) -> Drift:
    """How far `logits (B, V)`, position by position, are away from the reference."""
    errors, failure = [], ""
    try:
        for place, found in enumerate(logits):
            errors.append(_error(found, case.columns[:, place], case.reference[:, place]))
    except GraphError as error:
        failure = str(error)
    return Drift(errors + [math.inf] * (case.target_ids.shape[1] - len(errors)), failure)


def _error(found: Array, columns: Array, reference: Array) -> float:
    """Largest distance of the kept logits `(B, C)`, or by how much another of `found (B, V)` rises above all of them.

    The kept ones are the reference's largest: none of the others may lead them.
    """
    if found.shape[-1] <= columns.max(initial=-1):
        return math.inf
    if not np.isfinite(found).all():
        return math.nan
    others = found.astype(np.float64)
    np.put_along_axis(others, columns, -math.inf, 1)
    above = float((others.max(1) - reference.min(1)).max())
    return worst([largest_error(np.take_along_axis(found, columns, 1), reference), above])


def together(drifts: Sequence[Drift]) -> Drift:
    """The largest error at each position over several chains, and the first failure."""
    failures = [drift.failure for drift in drifts if drift.failure]
    return Drift(worst_per_step([drift.errors for drift in drifts]), next(iter(failures), ""))


def worst_per_step(drifts: Sequence[Sequence[float]]) -> list[float]:
    """The largest error at each position over several chains."""
    longest = max(map(len, drifts), default=0)
    return [worst([errors[place] for errors in drifts if place < len(errors)]) for place in range(longest)]
