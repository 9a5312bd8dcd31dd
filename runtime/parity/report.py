"""What the ladder finds, rung by rung and case by case."""

import math
from collections.abc import Sequence

import msgspec

from .tolerance import FACTOR, Earned

RUNGS = ("structure", "cache", "graph", "rollout", "tokens", "invariance", "deployment")


class TensorResult(msgspec.Struct, kw_only=True):
    """One output of one graph, in one case or over all of them."""

    graph: str
    tensor: str
    own_error: float
    """PyTorch-float32's largest distance from the reference, over all cases."""
    error: float
    """The runtime's largest distance; NaN where it gave one, infinite where the shape differs."""
    tolerance: float
    """Earned: how far it may be; infinite where a lower precision is judged by its words instead."""
    scale: float = 0.0
    """The largest reference value."""
    worst: str
    """The case in which the runtime was farthest away."""
    compared: int
    """How many numbers were compared."""

    @property
    def ratio(self) -> float:
        """The runtime's distance in units of PyTorch's own, which is no less than float32's spacing."""
        return self.error / (self.earned / FACTOR)

    @property
    def relative(self) -> float:
        """The distance as a share of the largest reference value: the `rtol` that would have been needed."""
        return self.error / self.scale if self.scale else self.error

    @property
    def earned(self) -> float:
        """What float32 would have earned."""
        return Earned(self.own_error, self.scale).tolerance

    @property
    def passed(self) -> bool:
        """Whether something was compared and all of it is a number within tolerance."""
        return self.compared > 0 and math.isfinite(self.error) and self.error <= self.tolerance


class TokenDifference(msgspec.Struct, kw_only=True):
    """A sentence for which the runtime found other ids than the reference."""

    label: str
    position: int
    """The first token that differs."""
    expected: list[int]
    found: list[int]
    margin: float
    """By how much the reference preferred its own token to the runtime's; of beams, the distance of the two scores."""
    error: float
    """How much of that the runtime's measured error can explain."""
    text: str = ""
    expected_text: str = ""
    found_text: str = ""
    reference_top: list[tuple[str, float]] = []
    """The reference's five most probable tokens there, with log-probabilities."""
    runtime_top: list[tuple[str, float]] = []
    """The runtime's, after the same tokens."""

    @property
    def tie(self) -> bool:
        """Whether the reference's preference is smaller than what rounding can turn around."""
        return self.margin <= self.error

    @property
    def kind(self) -> str:
        """The class of the difference, in words."""
        return "tie within error" if self.tie else "real difference"


class Figure(msgspec.Struct, kw_only=True):
    """One figure by which a lower precision is judged; see `runtime.parity.gate`."""

    name: str
    value: float
    limit: float
    at_least: bool
    """Whether `limit` is a lower bound, not an upper one."""
    reason: str

    @property
    def passed(self) -> bool:
        """Whether `value` is on the right side of `limit`; NaN is on none."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


class CaseResult(msgspec.Struct, kw_only=True):
    """The verdict of one case of one rung."""

    label: str
    compared: int
    problems: list[str] = []

    @property
    def passed(self) -> bool:
        """Whether something was compared and nothing is wrong."""
        return self.compared > 0 and not self.problems


class RungResult(msgspec.Struct, kw_only=True):
    """The verdict of one rung."""

    rung: int
    name: str
    passed: bool
    compared: int
    summary: str
    problems: list[str] = []
    cases: list[CaseResult] = []


class ModuleResult(msgspec.Struct, kw_only=True):
    """What one module inside a graph gave, in the order of computation."""

    graph: str
    module: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether it is within tolerance; NaN is not."""
        return self.error <= self.tolerance < math.inf


class Explanation(msgspec.Struct, kw_only=True):
    """Where a graph leaves tolerance."""

    sentence: str
    modules: list[ModuleResult]


class SettingResult(msgspec.Struct, kw_only=True):
    """One row of the matrix: the ladder at another runtime, optimisation level or number of threads."""

    setting: str
    rungs: dict[str, bool]
    """Verdict by number of rung."""
    worst_ratio: float
    """Of its outputs, in units of PyTorch's own error."""
    problem: str = ""
    """The first of the lowest rung that failed."""

    @property
    def passed(self) -> bool:
        """Whether every rung was climbed."""
        return bool(self.rungs) and all(self.rungs.values())


class Report(msgspec.Struct, kw_only=True):
    """What the ladder found."""

    rungs: list[RungResult]
    tensors: list[TensorResult] = []
    drift: list[float] = []
    """The runtime's largest error at each position of the rollout."""
    own_drift: list[float] = []
    """PyTorch-float32's."""
    drift_tolerance: float = math.nan
    differences: list[TokenDifference] = []
    figures: list[Figure] = []
    """Of a bundle of lower precision."""
    thresholds: dict[str, float] = {}
    """The limits in force for these."""
    invariance: float = math.nan
    """The largest difference of a logit between a sentence alone and the same in company."""
    settings: list[SettingResult] = []
    explanation: Explanation | None = None

    @property
    def passed(self) -> bool:
        """Whether every rung was climbed."""
        return all(rung.passed for rung in self.rungs) and len(self.rungs) == len(RUNGS)


def untried_rung(rung: int) -> RungResult:
    """A rung above graphs that are not what the contract says."""
    return RungResult(
        rung=rung, name=RUNGS[rung], passed=False, compared=0, summary="not tried", problems=["not tried: see rung 0"]
    )


def rung_result(
    rung: int, summary: str, cases: Sequence[CaseResult], problems: Sequence[str] | None = None
) -> RungResult:
    """A rung over `cases`: it passes when something was compared in each of them and nothing is wrong.

    `problems` stand for those of the cases, where one line can say of many what is wrong. What a runtime says in
    several lines becomes one.
    """
    cases = [msgspec.structs.replace(case, problems=_one_line_each(case.problems)) for case in cases]
    compared = sum(case.compared for case in cases)
    found = [problem for case in cases for problem in case.problems] if problems is None else _one_line_each(problems)
    if not compared:
        found.append("nothing was compared")
    elif not found:
        found += [f"{case.label}: nothing was compared" for case in cases if not case.compared]
    return RungResult(
        rung=rung,
        name=RUNGS[rung],
        passed=not found and all(case.passed for case in cases),
        compared=compared,
        summary=summary,
        problems=list(dict.fromkeys(found)),
        cases=cases,
    )


def _one_line_each(problems: Sequence[str]) -> list[str]:
    return [" ".join(problem.split()) for problem in problems]
