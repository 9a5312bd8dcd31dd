"""The ladder: a runtime sits the exam that PyTorch wrote, rung by rung, and gets one verdict.

A lower failure explains the higher ones: 0 structure, 1 cache (in PyTorch alone), 2 each graph alone, 3 chained steps,
4 tokens. Tolerance is earned: a tensor passes when its distance from the float64 reference is at most `FACTOR` times
PyTorch-float32's own.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from .backend import Array, Backend
from .contract import VERBS, GraphSpec, contract_problems
from .errors import GraphError
from .exam import CacheCheck, Exam, GraphCase, RolloutCase, TokenCase
from .generation import Hypothesis
from .verbs import call

FACTOR = 8.0
"""How many times PyTorch-float32's own distance from the reference a runtime may be away from it: three bits.

Another order of additions alone changes the distance a few times over; a fault changes it a thousand times.
"""

CACHE_TOLERANCE = 1e-9
"""Rung 1, relative to the largest logit: float64 rounds at 1e-16 a step, the smallest fault moves a logit by 1e-3."""

RUNGS = ("structure", "cache", "graph", "rollout", "tokens")


class TensorResult(msgspec.Struct, kw_only=True):
    """One output of one graph over all cases of the exam."""

    graph: str
    tensor: str
    own_error: float
    """PyTorch-float32's largest distance from the reference."""
    error: float
    """The runtime's largest distance; NaN where it gave one, infinite where the shape differs."""
    tolerance: float
    worst: str
    """The case in which the runtime was farthest away."""
    compared: int
    """How many numbers were compared."""

    @property
    def ratio(self) -> float:
        """The runtime's distance in units of PyTorch's own."""
        return self.error / (self.tolerance / FACTOR)

    @property
    def passed(self) -> bool:
        """Whether something was compared and all of it is within tolerance; NaN is not, and infinity is none."""
        return self.compared > 0 and self.error <= self.tolerance < math.inf


class TokenDifference(msgspec.Struct, kw_only=True):
    """A sentence for which the runtime found other ids than the reference."""

    label: str
    position: int
    """The first token that differs."""
    expected: list[int]
    found: list[int]
    margin: float
    """By how much the reference preferred its own choice."""
    error: float
    """How much of that the runtime's measured error can explain."""

    @property
    def tie(self) -> bool:
        """Whether the reference's preference is smaller than what rounding can turn around."""
        return self.margin <= self.error


class RungResult(msgspec.Struct, kw_only=True):
    """The verdict of one rung."""

    rung: int
    name: str
    passed: bool
    compared: int
    summary: str
    problems: list[str] = []


class Report(msgspec.Struct, kw_only=True):
    """What the ladder found."""

    rungs: list[RungResult]
    tensors: list[TensorResult]
    drift: list[float]
    """The runtime's largest error at each position of the rollout."""
    own_drift: list[float]
    """PyTorch-float32's."""
    differences: list[TokenDifference]

    @property
    def passed(self) -> bool:
        """Whether every rung was climbed."""
        return all(rung.passed for rung in self.rungs) and len(self.rungs) == len(RUNGS)


Search = Callable[[TokenCase], Hypothesis]
"""Finds the runtime's best output for a token case."""


def sit(
    exam: Exam,
    backend: Backend[Any],
    search: Search,
    contract: Mapping[str, GraphSpec],
    found: Mapping[str, GraphSpec],
) -> Report:
    """Let `backend` sit `exam`. Graphs that are not what the contract says get no further than rung 0.

    Args:
        exam: Written by the reference.
        backend: The runtime under test.
        search: Searches with the runtime under test.
        contract: What the graphs' inputs and outputs should be.
        found: What they are.
    """
    structure, cache = _structure_rung(contract, found), _cache_rung(exam.cache)
    if not structure.passed:
        untried = [_rung(rung, 0, "not tried", []) for rung in range(2, len(RUNGS))]
        return Report(rungs=[structure, cache, *untried], tensors=[], drift=[], own_drift=[], differences=[])
    tensors = graph_results(exam.graphs, backend)
    drift = _worst_per_step([_rollout_errors(case, backend) for case in exam.rollouts])
    own_drift = _worst_per_step([case.own_error for case in exam.rollouts])
    earned = _rollout_tolerance(exam.rollouts, own_drift)
    outputs = [(case, _found(search, case)) for case in exam.tokens]
    rounding = _rounding(tensors, drift, earned)
    differences = [difference for case, best in outputs if (difference := _differs(case, best, rounding))]
    logits = [earned, *(result.tolerance for result in tensors if result.tensor == "logits")]
    rungs = [
        structure,
        cache,
        _graph_rung(tensors, contract),
        _rollout_rung(exam.rollouts, drift, earned),
        _token_rung(outputs, differences, 2 * _worst(logits)),
    ]
    return Report(rungs=rungs, tensors=tensors, drift=drift, own_drift=own_drift, differences=differences)


def graph_results(cases: Sequence[GraphCase], backend: Backend[Any]) -> list[TensorResult]:
    """One result for each output of each graph, over all `cases`."""
    results: dict[tuple[str, str], TensorResult] = {}
    scale: dict[tuple[str, str], float] = {}
    for case in cases:
        label = case.label
        try:
            outputs = call(backend, case.verb, case.inputs)
        except GraphError as failure:
            outputs, label = {}, f"{label}: {failure}"
        for name, reference in case.reference.items():
            key = (case.verb, name)
            error, compared = _case_error(case, name, outputs.get(name), reference)
            result = results.setdefault(
                key,
                TensorResult(
                    graph=case.verb, tensor=name, own_error=0.0, error=0.0, tolerance=0.0, worst=label, compared=0
                ),
            )
            result.own_error = _worst([result.own_error, case.own_error[name]])
            result.compared += compared
            scale[key] = max(scale.get(key, 0.0), float(np.abs(reference).max(initial=0.0)))
            if not (error <= result.error or math.isnan(result.error)):
                result.error, result.worst = error, label
    for key, result in results.items():
        result.tolerance = earned_tolerance(result.own_error, scale[key])
    return list(results.values())


def earned_tolerance(own_error: float, scale: float) -> float:
    """`FACTOR` times PyTorch-float32's own distance, and that no less than the spacing of float32 at `scale`."""
    return FACTOR * max(own_error, float(np.spacing(np.float32(scale))))


def _case_error(case: GraphCase, name: str, output: Array | None, reference: Array) -> tuple[float, int]:
    """Largest distance and count of numbers; a grown cache must repeat its input exactly."""
    past = case.inputs.get(name.replace("present.", "past_key_values."))
    if output is not None and past is not None:
        grown = (*past.shape[:2], past.shape[2] + 1, *past.shape[3:])
        if output.shape != grown or not np.array_equal(output[:, :, :-1], past):
            return math.inf, output.size
        output = output[:, :, -1:]
    return largest_error(output, reference), reference.size


def largest_error(output: Array | None, reference: Array) -> float:
    """Largest absolute distance; infinite where `output` is missing or of another shape, NaN where it holds one."""
    if output is None or output.shape != reference.shape:
        return math.inf
    return float(np.abs(output.astype(np.float64) - reference).max(initial=0.0))


def _rollout_errors(case: RolloutCase, backend: Backend[Any]) -> list[float]:
    """The runtime's error at each position, chained on its own caches."""
    try:
        logits = rollout(backend, case.source_ids, case.source_mask, case.target_ids)
    except GraphError:
        return [math.inf] * case.target_ids.shape[1]
    return [
        largest_error(np.take_along_axis(found, case.columns[:, place], 1), case.reference[:, place])
        for place, found in enumerate(logits)
    ]


def rollout(backend: Backend[Any], source_ids: Array, source_mask: Array, target_ids: Array) -> list[Array]:
    """Logits `(B, V)` after each of `target_ids (B, N)`: prefill with the first, steps on the caches that come back."""
    mask = backend.put(source_mask)
    memory = backend.encode(backend.put(source_ids), mask)
    logits, cache = backend.prefill(backend.put(target_ids[:, :1]), memory, mask)
    found = [backend.get(logits)[:, -1]]
    for place in range(1, target_ids.shape[1]):
        logits, cache = backend.step(backend.put(target_ids[:, place : place + 1]), mask, cache)
        found.append(backend.get(logits)[:, -1])
    return found


def _worst_per_step(rollouts: Sequence[Sequence[float]]) -> list[float]:
    longest = max(map(len, rollouts), default=0)
    return [_worst([errors[place] for errors in rollouts if place < len(errors)]) for place in range(longest)]


def _worst(errors: Sequence[float]) -> float:
    """The largest; NaN where one is NaN, which `max` would lose, or where there is none."""
    return float(np.max(errors)) if errors else math.nan


def _rollout_tolerance(cases: Sequence[RolloutCase], own_drift: Sequence[float]) -> float:
    scale = max((float(np.abs(case.reference).max(initial=0.0)) for case in cases), default=0.0)
    return earned_tolerance(_worst(own_drift), scale)


def _rounding(tensors: Sequence[TensorResult], drift: Sequence[float], earned: float) -> float:
    """The largest error of a logit that rounding accounts for; what exceeds its tolerance is a fault, no excuse."""
    graphs = [result.error for result in tensors if result.tensor == "logits" and result.passed]
    steps = [error for error in drift if error <= earned < math.inf]
    return max([*graphs, *steps], default=0.0)


def _found(search: Search, case: TokenCase) -> Hypothesis:
    """The runtime's answer; one that equals no other where it has none."""
    try:
        return search(case)
    except GraphError:
        return Hypothesis([], math.nan)


def _differs(case: TokenCase, best: Hypothesis, rounding: float) -> TokenDifference | None:
    if best.ids == case.ids:
        return None
    pairs = zip(best.ids, case.ids, strict=False)
    position = next(
        (place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(best.ids), len(case.ids))
    )
    # Two logits may err in opposite directions, and so may two scores: these are means of log-probabilities.
    margin = case.margins[position] if position < len(case.margins) else abs(best.score - case.score)
    return TokenDifference(
        label=case.label,
        position=position,
        expected=case.ids,
        found=best.ids,
        margin=margin,
        error=2 * rounding,
    )


def _structure_rung(contract: Mapping[str, GraphSpec], found: Mapping[str, GraphSpec]) -> RungResult:
    compared = sum(len(graph.inputs) + len(graph.outputs) for graph in contract.values())
    return _rung(0, compared, f"{compared} inputs and outputs", contract_problems(contract, found))


def _cache_rung(check: CacheCheck) -> RungResult:
    problems = []
    if not check.error <= CACHE_TOLERANCE:
        problems = [f"prefill and steps differ from one forward by {check.error:.2g}, allowed is {CACHE_TOLERANCE:.0e}"]
    summary = f"PyTorch float64, {check.prefixes} prefixes: off by {check.error:.1e}"
    return _rung(1, check.prefixes, summary, problems)


def _graph_rung(tensors: Sequence[TensorResult], contract: Mapping[str, GraphSpec]) -> RungResult:
    problems = [
        f"{result.graph}: {result.tensor} is {result.error:.3g} from the reference, "
        f"earned is {result.tolerance:.3g} ({result.worst})"
        for result in tensors
        if not result.passed
    ]
    seen = {(result.graph, result.tensor) for result in tensors}
    for verb in VERBS:
        problems += [
            f"{verb}: {spec.name} was never compared"
            for spec in contract[verb].outputs
            if (verb, spec.name) not in seen
        ]
    worst = _worst([result.ratio for result in tensors])
    compared = sum(result.compared for result in tensors)
    return _rung(2, compared, f"{len(tensors)} outputs, worst {worst:.2f} x PyTorch's own error", problems)


def _rollout_rung(cases: Sequence[RolloutCase], drift: Sequence[float], tolerance: float) -> RungResult:
    bad = [place for place, error in enumerate(drift) if not error <= tolerance < math.inf]
    problems = [f"at position {bad[0]} the error is {drift[bad[0]]:.3g}, earned is {tolerance:.3g}"] if bad else []
    steps = max(len(drift) - 1, 0)
    worst = _worst(drift) / (tolerance / FACTOR)
    compared = sum(case.reference.size for case in cases)
    return _rung(3, compared, f"{steps} steps, worst {worst:.2f} x PyTorch's own error", problems)


def _token_rung(
    outputs: Sequence[tuple[TokenCase, Hypothesis]], differences: Sequence[TokenDifference], allowed: float
) -> RungResult:
    """The same ids, and with these the same score: a beam that goes on with another's cache may show only there."""
    real = [difference for difference in differences if not difference.tie]
    problems = [
        f"{item.label}: token {item.position} differs, the reference preferred its own by {item.margin:.3g}, "
        f"rounding explains {item.error:.3g}"
        for item in real
    ]
    problems += [
        f"{case.label}: the score is {best.score:.6g}, the reference's {case.score:.6g}, allowed apart is {allowed:.3g}"
        for case, best in outputs
        if best.ids == case.ids and not abs(best.score - case.score) <= allowed < math.inf
    ]
    equal, ties = len(outputs) - len(differences), len(differences) - len(real)
    return _rung(4, len(outputs), f"{equal} of {len(outputs)} outputs equal, {ties} ties", problems)


def _rung(rung: int, compared: int, summary: str, problems: list[str]) -> RungResult:
    """A rung passes when something was compared and nothing is wrong."""
    if not compared:
        problems = [*problems, "nothing was compared"]
    return RungResult(
        rung=rung, name=RUNGS[rung], passed=not problems, compared=compared, summary=summary, problems=problems
    )
