"""Rung 2: each graph alone, on inputs of the reference; every output is compared, all caches too."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..backend import Array, Backend
from ..contract import BEGIN, BRANCH, STEP, VERBS, GraphSpec
from ..errors import GraphError
from ..exam import GraphCase
from ..verbs import call
from .candidate import Candidate
from .report import CaseResult, RungResult, TensorResult, rung_result
from .search_graphs import beginnings, branch_case, rank_case, select_case
from .tolerance import Earned, earned_by_output, largest_error, worst


def graph_rung(
    cases: Sequence[GraphCase], candidate: Candidate, contract: Mapping[str, GraphSpec]
) -> tuple[RungResult, list[TensorResult]]:
    """The verdict, and one result for each output over all `cases`."""
    known = [*cases, *beginnings(cases)]
    earned = earned_by_output(known)
    # A branch is compared with steps, so that it earns what these earn.
    earned |= {(BRANCH, name): own for (verb, name), own in earned.items() if verb == STEP}
    steps = [case for case in known if case.verb == STEP]
    vocabulary = candidate.passport.dims.vocab_size
    results, verdicts, failures = [], [], []
    for verb, case in [*((case.verb, case) for case in known), *((BRANCH, case) for case in steps)]:
        try:
            asked = branch_case(case, vocabulary, candidate.backend) if verb == BRANCH else case
        except GraphError as failure:
            failures.append(str(failure))
            verdicts.append(CaseResult(label=f"{verb} {case.label}", compared=0, problems=failures[-1:]))
            continue
        found = case_results(asked, candidate.backend, earned, exact=candidate.exact)
        results += found
        problems = [_problem(result) for result in found if not result.passed]
        verdicts.append(CaseResult(label=f"{verb} {case.label}", compared=_compared(found), problems=problems))
    tensors = merged(results)
    problems = [*(_problem(result) for result in tensors if not result.passed), *failures]
    seen = {(result.graph, result.tensor) for result in tensors}
    problems += [
        f"{verb}: {spec.name} was never compared"
        for verb in (*VERBS, BEGIN, BRANCH)
        for spec in contract[verb].outputs
        if (verb, spec.name) not in seen and 0 not in spec.shape  # a cache of no tokens has no numbers
    ]
    if steps:
        largest_step = max(steps, key=lambda case: len(case.inputs["input_ids"]))
        others = [rank_case(vocabulary, candidate.backend), select_case(largest_step, candidate.backend)]
        verdicts += others
        problems += [problem for verdict in others for problem in verdict.problems]
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
    known = "what steps give" if result.graph == BRANCH else "the reference"
    return (
        f"{result.graph}: {result.tensor} is {result.error:.3g} from {known}, "
        f"earned is {result.earned:.3g} ({result.worst})"
    )


def _error(case: GraphCase, name: str, output: Array | None, reference: Array) -> tuple[float, str]:
    """Largest distance, and why it is infinite where no number says so; a grown cache must repeat its input exactly."""
    if output is None:
        return math.inf, "it is missing"
    expected = reference.shape
    past = case.inputs.get(name.replace("present.", "past_key_values."))
    if past is not None:
        new = case.inputs["input_ids"].shape[1]
        expected = (*past.shape[:2], past.shape[2] + new, *past.shape[3:])
    elif name == "logits" and case.columns is not None:
        if output.shape[-1] <= largest_id(case.columns):
            return math.inf, f"it has {output.shape[-1]} columns, the exam asks for {largest_id(case.columns)}"
        expected = (*expected[:-1], output.shape[-1])
    if output.shape != expected:
        return math.inf, f"its shape is {output.shape}, expected {expected}"
    if past is not None:
        if not np.array_equal(output[:, :, : past.shape[2]], past):
            return math.inf, "it does not begin with the past that went in"
        output = output[:, :, past.shape[2] :]
    elif name == "logits" and case.columns is not None:
        # What is not kept must be a number all the same.
        output = output[..., case.columns] if np.isfinite(output).all() else np.full(reference.shape, np.nan)
    return largest_error(output, reference), ""


def largest_id(ids: Array) -> int:
    """The largest of `ids`."""
    return int(ids.max(initial=-1))
