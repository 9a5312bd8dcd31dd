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
from .contract import VERBS, GraphSpec
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
        """Whether something was compared and all of it is within tolerance; NaN is not."""
        return self.compared > 0 and self.error <= self.tolerance


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
    """Let `backend` sit `exam`.

    Args:
        exam: Written by the reference.
        backend: The runtime under test.
        search: Searches with the runtime under test.
        contract: What the graphs' inputs and outputs should be.
        found: What they are.
    """
    tensors = graph_results(exam.graphs, backend)
    rollouts = [_rollout_errors(case, backend) for case in exam.rollouts]
    drift = _worst_per_step(rollouts)
    own_drift = _worst_per_step([case.own_error for case in exam.rollouts])
    logit_error = max([0.0, *drift, *(result.error for result in tensors if result.tensor == "logits")])
    differences = [difference for case in exam.tokens if (difference := _differs(case, search(case), logit_error))]
    rungs = [
        _structure_rung(contract, found),
        _cache_rung(exam.cache),
        _graph_rung(tensors, contract),
        _rollout_rung(exam.rollouts, drift, own_drift),
        _token_rung(exam.tokens, differences),
    ]
    return Report(rungs=rungs, tensors=tensors, drift=drift, own_drift=own_drift, differences=differences)


def graph_results(cases: Sequence[GraphCase], backend: Backend[Any]) -> list[TensorResult]:
    """One result for each output of each graph, over all `cases`."""
    results: dict[tuple[str, str], TensorResult] = {}
    scale: dict[tuple[str, str], float] = {}
    for case in cases:
        outputs = call(backend, case.verb, case.inputs)
        for name, reference in case.reference.items():
            key = (case.verb, name)
            error, compared = _case_error(case, name, outputs.get(name), reference)
            result = results.setdefault(
                key,
                TensorResult(
                    graph=case.verb, tensor=name, own_error=0.0, error=0.0, tolerance=0.0, worst=case.label, compared=0
                ),
            )
            result.own_error = max(result.own_error, case.own_error[name])
            result.compared += compared
            scale[key] = max(scale.get(key, 0.0), float(np.abs(reference).max(initial=0.0)))
            if not error <= result.error:
                result.error, result.worst = error, case.label
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
        grown = past.shape[:2] + (past.shape[2] + 1,) + past.shape[3:]
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
    logits = rollout(backend, case.source_ids, case.source_mask, case.target_ids)
    return [
        largest_error(np.take_along_axis(found, case.columns[:, place], 1), case.reference[:, place])
        for place, found in enumerate(logits)
    ]


def rollout(backend: Backend[Any], source_ids: Array, source_mask: Array, target_ids: Array) -> list[Array]:
    """Logits `(B, V)` after each of `target_ids (B, N)`: one prefill with the first, then steps on the caches that come back."""
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
    return [
        float(np.max([errors[place] for errors in rollouts if place < len(errors)])) for place in range(longest)
    ]  # np.max passes NaN on, max() would lose it


def _differs(case: TokenCase, best: Hypothesis, logit_error: float) -> TokenDifference | None:
    if best.ids == case.ids:
        return None
    pairs = zip(best.ids, case.ids, strict=False)
    position = next(
        (place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(best.ids), len(case.ids))
    )
    # Two logits may err in opposite directions, and so may two scores, which are means of log-probabilities.
    margin = case.margins[position] if position < len(case.margins) else abs(best.score - case.score)
    return TokenDifference(
        label=case.label,
        position=position,
        expected=case.ids,
        found=best.ids,
        margin=margin,
        error=2 * logit_error,
    )


def _structure_rung(contract: Mapping[str, GraphSpec], found: Mapping[str, GraphSpec]) -> RungResult:
    problems = []
    compared = 0
    for verb in VERBS:
        for side in ("inputs", "outputs"):
            expected, actual = getattr(contract[verb], side), getattr(found[verb], side)
            compared += len(expected)
            ours, theirs = {spec.name: spec for spec in actual}, {spec.name: spec for spec in expected}
            problems += [f"{verb}: {name} is missing" for name in theirs if name not in ours]
            problems += [f"{verb}: {name} is not in the contract" for name in ours if name not in theirs]
            problems += [
                f"{verb}: {name} is {ours[name].dtype}{list(ours[name].shape)}, expected {spec.dtype}{list(spec.shape)}"
                for name, spec in theirs.items()
                if name in ours and ours[name] != spec
            ]
            if not problems and actual != expected:
                problems.append(f"{verb}: {side} are in another order than in the contract")
    return _rung(0, compared, f"{compared} inputs and outputs", problems)


def _cache_rung(check: CacheCheck) -> RungResult:
    problems = []
    if not check.error <= CACHE_TOLERANCE:
        problems = [f"prefill and steps differ from one forward by {check.error:.2g}, allowed is {CACHE_TOLERANCE:.0e}"]
    summary = f"PyTorch float64, {check.prefixes} prefixes: off by {check.error:.1e}"
    return _rung(1, check.prefixes, summary, problems)


def _graph_rung(tensors: Sequence[TensorResult], contract: Mapping[str, GraphSpec]) -> RungResult:
    problems = [
        f"{result.graph}: {result.tensor} is {result.error:.3g} from the reference, earned is {result.tolerance:.3g} ({result.worst})"
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
    worst = max((result.ratio for result in tensors), default=math.nan)
    compared = sum(result.compared for result in tensors)
    return _rung(2, compared, f"{len(tensors)} outputs, worst {worst:.2f} x PyTorch's own error", problems)


def _rollout_rung(cases: Sequence[RolloutCase], drift: Sequence[float], own: Sequence[float]) -> RungResult:
    scale = max((float(np.abs(case.reference).max(initial=0.0)) for case in cases), default=0.0)
    tolerance = earned_tolerance(max(own, default=0.0), scale)
    bad = [place for place, error in enumerate(drift) if not error <= tolerance]
    problems = [f"at position {bad[0]} the error is {drift[bad[0]]:.3g}, earned is {tolerance:.3g}"] if bad else []
    steps = max(len(drift) - 1, 0)
    worst = f"{max(drift) / (tolerance / FACTOR):.2f}" if drift else "nothing"
    return _rung(
        3, sum(case.reference.size for case in cases), f"{steps} steps, worst {worst} x PyTorch's own error", problems
    )


def _token_rung(cases: Sequence[TokenCase], differences: Sequence[TokenDifference]) -> RungResult:
    real = [difference for difference in differences if not difference.tie]
    problems = [
        f"{item.label}: token {item.position} differs, the reference preferred its own by {item.margin:.3g}, "
        f"rounding explains {item.error:.3g}"
        for item in real
    ]
    ties = len(differences) - len(real)
    return _rung(4, len(cases), f"{len(cases) - len(differences)} of {len(cases)} outputs equal, {ties} ties", problems)


def _rung(rung: int, compared: int, summary: str, problems: list[str]) -> RungResult:
    """A rung passes when something was compared and nothing is wrong."""
    if not compared:
        problems = [*problems, "nothing was compared"]
    return RungResult(
        rung=rung, name=RUNGS[rung], passed=not problems, compared=compared, summary=summary, problems=problems
    )
