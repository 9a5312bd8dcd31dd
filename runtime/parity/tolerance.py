"""Tolerance is earned, not chosen: how far a runtime may be away from PyTorch-float64, and how far it is."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..backend import Array
from ..exam import Exam, GraphCase, RolloutCase

FACTOR = 8.0
"""How many times PyTorch-float32's own distance from the reference a runtime may be away from it: three bits.

Another order of additions alone changes the distance a few times over; a fault changes it a thousand times.
"""

CACHE_TOLERANCE = 1e-9
"""Rung 1, relative to the largest logit: float64 rounds at 1e-16 a step, the smallest fault moves a logit by 1e-3."""


class Earned(NamedTuple):
    """What PyTorch-float32 itself shows to be rounding, for one tensor."""

    own_error: float
    """Its largest distance from the reference."""
    scale: float
    """The largest reference value."""

    @property
    def tolerance(self) -> float:
        """`FACTOR` times the distance, and that no less than the spacing of float32 at `scale`.

        NaN, which nothing is within, where the distance is no number.
        """
        if not math.isfinite(self.own_error):
            return math.nan
        return FACTOR * max(self.own_error, float(np.spacing(np.float32(self.scale))))


def earned_by_output(cases: Sequence[GraphCase]) -> dict[tuple[str, str], Earned]:
    """What each output `(verb, name)` earns over all cases: a few numbers alone do not show how far float32 strays."""
    found: dict[tuple[str, str], Earned] = {}
    for case in cases:
        for name, reference in case.reference.items():
            before = found.get((case.verb, name), Earned(0.0, 0.0))
            found[case.verb, name] = Earned(
                worst([before.own_error, case.own_error[name]]), worst([before.scale, largest(reference)])
            )
    return found


def earned_by_rollout(cases: Sequence[RolloutCase]) -> Earned:
    """What the logits of a chain earn, over all cases and positions."""
    errors = [error for case in cases for error in case.own_error]
    return Earned(worst(errors), worst([largest(case.reference) for case in cases]))


def logit_tolerance(exam: Exam) -> float:
    """How far a logit may be away from the reference anywhere."""
    graphs = [earned.tolerance for (_, name), earned in earned_by_output(exam.graphs).items() if name == "logits"]
    return worst([earned_by_rollout(exam.rollouts).tolerance, *graphs])


def largest(array: Array) -> float:
    """The largest absolute value; NaN where there is one."""
    return float(np.abs(array).max(initial=0.0))


def largest_error(output: Array | None, reference: Array) -> float:
    """Largest absolute distance; infinite where `output` is missing or of another shape, NaN where it holds one."""
    if output is None or output.shape != reference.shape:
        return math.inf
    return float(np.abs(output.astype(np.float64) - reference).max(initial=0.0))


def worst(errors: Sequence[float]) -> float:
    """The largest; NaN where one is NaN, which `max` would lose, or where there is none."""
    return float(np.max(errors)) if errors else math.nan
