"""The ladder: a runtime sits the exam that PyTorch wrote, rung by rung, and gets one verdict.

A lower failure explains the higher ones: 0 structure, 1 cache (in PyTorch alone), 2 each graph alone, 3 chained steps,
4 tokens, 5 invariance, 6 all of it at other settings. Tolerance is earned, see `runtime.parity.tolerance`.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from ..bundle import Passport
from ..contract import BRANCH, RANK, SELECT, STEP, GraphSpec, contract_problems
from ..exam import Exam
from .candidate import Candidate
from .chain import rollout_rung, worst_per_step
from .gate import THRESHOLDS, figure, figures, thresholds
from .graphs import graph_rung
from .invariance import invariance_labels, invariance_rung
from .questions import strange_questions
from .report import RUNGS, CaseResult, Report, RungResult, SettingResult, TensorResult, rung_result, untried_rung
from .search_graphs import beginnings
from .tokens import token_rung
from .tolerance import CACHE_TOLERANCE, earned_by_rollout, logit_tolerance, worst

Specs = Mapping[str, GraphSpec]
SPECIAL, QUESTIONS, PREFIXES = "special ids", "questions", "prefixes"
"""Labels of cases."""


def sit(
    exam: Exam, candidate: Candidate, contract: Specs, found: Specs, overrides: Mapping[str, float] | None = None
) -> Report:
    """Let `candidate` sit `exam`. Graphs that are not what the contract says get no further than rung 0.

    Args:
        exam: Written by the reference.
        candidate: The runtime under test.
        contract: What the graphs' inputs and outputs should be.
        found: What they are.
        overrides: Thresholds of a lower precision that take the place of the table's.

    Raises:
        ThresholdError: an override names no threshold.
    """
    limits = thresholds(candidate.passport.precision, overrides or {})
    structure, cache = structure_rung(exam, candidate, contract, found), cache_rung(exam)
    if not structure.passed:
        untried = [untried_rung(rung) for rung in range(2, len(RUNGS) - 1)]
        return with_settings(Report(rungs=[structure, cache, *untried]), candidate.setting, [])
    graph, tensors = graph_rung(exam.graphs, candidate, contract)
    chain, drift = rollout_rung(exam.rollouts, candidate)
    drift_tolerance = earned_by_rollout(exam.rollouts).tolerance
    rounding = _rounding(tensors, drift, drift_tolerance)
    allowed = logit_tolerance(exam)
    judged = [] if candidate.exact else figures(exam.tokens, candidate, limits)
    if not candidate.exact:
        scale = earned_by_rollout(exam.rollouts).scale
        farthest = worst([*(result.relative for result in tensors), *(error / scale for error in drift)])
        judged.append(figure("distance", farthest, limits))
    tokens, differences = token_rung(exam.tokens, candidate, rounding, allowed, judged)
    invariance, moved = invariance_rung(exam.tokens, candidate, allowed, limits.get("invariance"))
    if not candidate.exact:
        judged.append(figure("invariance", moved, limits))
    report = Report(
        rungs=[structure, cache, graph, chain, tokens, invariance],
        tensors=tensors,
        drift=drift,
        own_drift=worst_per_step([case.own_error for case in exam.rollouts]),
        drift_tolerance=drift_tolerance,
        differences=differences,
        figures=judged,
        thresholds=limits,
        invariance=moved,
    )
    return with_settings(report, candidate.setting, [])


def case_labels(exam: Exam, passport: Passport, contract: Specs) -> list[list[str]]:
    """Labels of the cases of each rung, known before anything is computed; of rung 6 the settings decide."""
    # Who asks strange questions gets no further than rung 0.
    graphs = [] if strange_questions(exam, passport.dims, contract) else exam.graphs
    known = [*graphs, *beginnings(graphs)]
    largest = max((len(case.inputs["input_ids"]) for case in graphs if case.verb == STEP), default=None)
    gate = [] if passport.precision == "fp32" else [name for name in THRESHOLDS if name != "invariance"]
    return [
        [*contract, SPECIAL, QUESTIONS],
        [PREFIXES],
        [
            *(f"{case.verb} {case.label}" for case in known),
            *(f"{BRANCH} {case.label}" for case in known if case.verb == STEP),
            *([] if largest is None else [RANK, f"{SELECT} B={largest}"]),
        ],
        [case.label for case in exam.rollouts],
        [*(case.label for case in exam.tokens), *gate],
        invariance_labels(exam.tokens),
        [],
    ]


def structure_rung(exam: Exam, candidate: Candidate, contract: Specs, found: Specs) -> RungResult:
    """Names, types and axes of every graph, the ids that the search begins and ends with, what the exam asks for."""
    verdicts = []
    for verb, graph in contract.items():
        problems = contract_problems({verb: graph}, found)
        verdicts.append(CaseResult(label=verb, compared=len(graph.inputs) + len(graph.outputs), problems=problems))
    theirs, ours = exam.special._asdict(), candidate.passport.special._asdict()
    problems = [
        f"the {name} id is {ours[name]} in the passport, PyTorch's is {theirs[name]}"
        for name in theirs
        if ours[name] != theirs[name]
    ]
    if contract:
        verdicts.append(CaseResult(label=SPECIAL, compared=len(theirs), problems=problems))
        strange = strange_questions(exam, candidate.passport.dims, contract)
        verdicts.append(CaseResult(label=QUESTIONS, compared=1, problems=strange))
    compared = sum(verdict.compared for verdict in verdicts)
    return rung_result(0, f"{compared} inputs, outputs and special ids", verdicts)


def cache_rung(exam: Exam) -> RungResult:
    """What PyTorch found about its own caches when it wrote the exam."""
    check, problems = exam.cache, []
    if not check.error <= CACHE_TOLERANCE:
        problems = [f"prefill and steps differ from one forward by {check.error:.2g}, allowed is {CACHE_TOLERANCE:.0e}"]
    summary = f"PyTorch float64, {check.prefixes} prefixes: off by {check.error:.1e}"
    return rung_result(1, summary, [CaseResult(label=PREFIXES, compared=check.prefixes, problems=problems)])


def as_setting(report: Report, setting: str) -> SettingResult:
    """`report` in one row: what rungs 0 and 2 to 5 say at `setting`."""
    rungs = [rung for rung in report.rungs if rung.rung not in (1, 6)]
    failed = [f"rung {rung.rung} ({rung.name}): {rung.problems[0]}" for rung in rungs if not rung.passed]
    return SettingResult(
        setting=setting,
        rungs={str(rung.rung): rung.passed for rung in rungs},
        worst_ratio=worst([result.ratio for result in report.tensors]),
        problem=failed[0] if failed else "",
    )


def with_settings(report: Report, setting: str, others: Sequence[SettingResult]) -> Report:
    """`report`, which was made at `setting`, with rung 6 over this and all `others`."""
    rows = [as_setting(report, setting), *others]
    verdicts = [
        CaseResult(label=row.setting, compared=1, problems=[] if row.passed else [f"{row.setting}: {row.problem}"])
        for row in rows
    ]
    passed = sum(row.passed for row in rows)
    rung = rung_result(6, f"{passed} of {len(rows)} settings", verdicts)
    return msgspec.structs.replace(report, rungs=[*report.rungs[:6], rung], settings=rows)


def _rounding(tensors: Sequence[TensorResult], drift: Sequence[float], tolerance: float) -> float:
    """The largest error of a logit that rounding accounts for; what exceeds its tolerance is a fault, no excuse."""
    graphs = [result.error for result in tensors if result.tensor == "logits" and result.passed]
    steps = [error for error in drift if error <= tolerance < math.inf]
    return max([*graphs, *steps], default=0.0)
