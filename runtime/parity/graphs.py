"""Rung 2: each graph alone, on inputs of the reference; every output is compared, all caches too."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..backend import Array, Backend, Cache
from ..contract import SELECT, STEP, VERBS, GraphSpec
from ..errors import GraphError
from ..exam import GraphCase
from ..verbs import call, past_caches
from .candidate import Candidate
from .report import CaseResult, RungResult, TensorResult, rung_result
from .tolerance import Earned, earned_by_output, largest_error, worst


def graph_rung(
    cases: Sequence[GraphCase], candidate: Candidate, contract: Mapping[str, GraphSpec]
) -> tuple[RungResult, list[TensorResult]]:
    """The verdict, and one result for each output over all `cases`."""
    earned = earned_by_output(cases)
    results, verdicts = [], []
    for case in cases:
        found = case_results(case, candidate.backend, earned, exact=candidate.exact)
        results += found
        problems = [_problem(result) for result in found if not result.passed]
        verdicts.append(CaseResult(label=f"{case.verb} {case.label}", compared=_compared(found), problems=problems))
    tensors = merged(results)
    problems = [_problem(result) for result in tensors if not result.passed]
    seen = {(result.graph, result.tensor) for result in tensors}
    problems += [
        f"{verb}: {spec.name} was never compared"
        for verb in VERBS
        for spec in contract[verb].outputs
        if (verb, spec.name) not in seen
    ]
    if steps := [case for case in cases if case.verb == STEP]:
        selected = select_case(max(steps, key=lambda case: len(case.inputs["input_ids"])), candidate.backend)
        verdicts.append(selected)
        problems += selected.problems
    largest = worst([result.ratio for result in tensors])
    summary = f"{len(tensors)} outputs, worst {largest:.2f} x PyTorch's own error"
    return rung_result(2, summary, verdicts, problems), tensors


def case_results(
    case: GraphCase, backend: Backend[Any], earned: Mapping[tuple[str, str], Earned], *, exact: bool = True
) -> list[TensorResult]:
    """One result for each output of one case; where not `exact`, any number is within tolerance, and NaN still none."""
    label = case.label
    try:
        outputs = call(backend, case.verb, case.inputs)
    except GraphError as failure:
        outputs, label = {}, f"{label}: {failure}"
    results = []
    for name, reference in case.reference.items():
        own = earned[case.verb, name]
        error, reason = _error(case, name, outputs.get(name), reference)
        results.append(
            TensorResult(
                graph=case.verb,
                tensor=name,
                own_error=own.own_error,
                error=error,
                tolerance=own.tolerance if exact else math.inf,
                scale=own.scale,
                worst=f"{label}: {reason}" if reason and outputs else label,
                compared=reference.size if name in outputs else 0,
            )
        )
    return results


def merged(results: Sequence[TensorResult]) -> list[TensorResult]:
    """One result for each output: the worst of its cases, NaN before all."""
    outputs: dict[tuple[str, str], list[TensorResult]] = {}
    for result in results:
        outputs.setdefault((result.graph, result.tensor), []).append(result)
    return [_merge(found) for found in outputs.values()]


def _merge(results: Sequence[TensorResult]) -> TensorResult:
    farthest = max(results, key=lambda result: (math.isnan(result.error), result.error))
    return TensorResult(
        graph=farthest.graph,
        tensor=farthest.tensor,
        own_error=farthest.own_error,
        error=farthest.error,
        tolerance=farthest.tolerance,
        scale=farthest.scale,
        worst=farthest.worst,
        compared=_compared(results),
    )


def _compared(results: Sequence[TensorResult]) -> int:
    return sum(result.compared for result in results)


def _problem(result: TensorResult) -> str:
    return (
        f"{result.graph}: {result.tensor} is {result.error:.3g} from the reference, "
        f"earned is {result.earned:.3g} ({result.worst})"
    )


def _error(case: GraphCase, name: str, output: Array | None, reference: Array) -> tuple[float, str]:
    """Largest distance, and why it is infinite where no number says so; a grown cache must repeat its input exactly."""
    if output is None:
        return math.inf, "it is missing"
    expected = reference.shape
    past = case.inputs.get(name.replace("present.", "past_key_values."))
    if past is not None:
        expected = (*past.shape[:2], past.shape[2] + 1, *past.shape[3:])
    elif name == "logits" and case.columns is not None:
        if output.shape[-1] <= largest_id(case.columns):
            return math.inf, f"it has {output.shape[-1]} columns, the exam asks for {largest_id(case.columns)}"
        expected = (*expected[:-1], output.shape[-1])
    if output.shape != expected:
        return math.inf, f"its shape is {output.shape}, expected {expected}"
    if past is not None:
        if not np.array_equal(output[:, :, :-1], past):
            return math.inf, "it does not begin with the past that went in"
        output = output[:, :, -1:]
    elif name == "logits" and case.columns is not None:
        # What is not kept must be a number all the same.
        output = output[..., case.columns] if np.isfinite(output).all() else np.full(reference.shape, np.nan)
    return largest_error(output, reference), ""


def largest_id(ids: Array) -> int:
    """The largest of `ids`."""
    return int(ids.max(initial=-1))


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
