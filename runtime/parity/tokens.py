"""Rung 4: the same words on real sentences, and where they are not the same, why."""

import math
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from ..backend import FloatArray
from ..errors import GraphError
from ..exam import TokenCase
from ..generation import Hypothesis
from .candidate import Candidate
from .report import CaseResult, Figure, RungResult, TokenDifference, rung_result

SHOWN = 5
"""Most probable tokens that a difference shows."""


def token_rung(
    cases: Sequence[TokenCase], candidate: Candidate, rounding: float, allowed: float, figures: Sequence[Figure]
) -> tuple[RungResult, list[TokenDifference]]:
    """The same ids, and with these the same score: a beam that goes on with another's cache may show only there.

    Args:
        cases: Sentences and what the reference found.
        candidate: Searches them.
        rounding: The largest error of a logit that was measured and is within tolerance.
        allowed: The largest that would be.
        figures: What a lower precision is judged by, instead of by every single id.
    """
    verdicts, differences = [], []
    for case in cases:
        best, problems = _found(case, candidate)
        problems += _text_problems(case, candidate)
        if best.ids != case.ids:
            difference = describe(case, best, candidate, rounding)
            differences.append(difference)
            if candidate.exact and not difference.tie:
                problems.append(_sentence(difference))
        elif candidate.exact and not abs(best.score - case.score) <= 2 * allowed < math.inf:
            problems.append(
                f"{case.label}: the score is {best.score:.6g}, the reference's {case.score:.6g}, "
                f"allowed apart is {2 * allowed:.3g}"
            )
        verdicts.append(CaseResult(label=case.label, compared=1, problems=problems))
    verdicts += [
        CaseResult(label=figure.name, compared=1, problems=[] if figure.passed else [_figure_problem(figure)])
        for figure in figures
    ]
    ties = sum(difference.tie for difference in differences)
    equal = len(cases) - len(differences)
    return rung_result(4, f"{equal} of {len(cases)} outputs equal, {ties} ties", verdicts), differences


def _found(case: TokenCase, candidate: Candidate) -> tuple[Hypothesis, list[str]]:
    """The runtime's answer, and what no precision excuses; an answer that equals no other where it has none."""
    try:
        (best,) = candidate.search([case.source_ids], case.config)
    except GraphError as failure:
        return Hypothesis([], math.nan), [f"{case.label}: {failure}"]
    return best, [] if math.isfinite(best.score) else [f"{case.label}: the score is {best.score}"]


def _text_problems(case: TokenCase, candidate: Candidate) -> list[str]:
    """Where the tokenizer of the bundle is not the one that the exam was written with."""
    problems = []
    if candidate.tokenizer.encode(case.text) != case.source_ids:
        problems.append(f"the tokenizer makes other source ids of {case.text!r} than the one of the exam")
    text = candidate.tokenizer.decode(case.ids)
    if text != case.translation:
        problems.append(f"the tokenizer reads {text!r} in target ids that mean {case.translation!r}")
    return problems


def describe(case: TokenCase, best: Hypothesis, candidate: Candidate, rounding: float) -> TokenDifference:
    """What there is to say about an output that is not the reference's."""
    position = first_difference(best.ids, case.ids)
    forced = _forced(case, position, candidate)
    # Two logits may err in opposite directions, and so may two scores: these are means of log-probabilities.
    greedy = case.config.num_beams == 1 and position < len(case.ids)
    margin = _preference(case, position, best.ids) if greedy else abs(best.score - case.score)
    decode = candidate.tokenizer.decode
    return TokenDifference(
        label=case.label,
        position=position,
        expected=case.ids,
        found=best.ids,
        margin=margin,
        error=2 * rounding,
        text=case.text,
        expected_text=case.translation,
        found_text=decode(best.ids),
        reference_top=[
            (candidate.tokenizer.piece(int(index)), float(log_prob))
            for index, log_prob in zip(
                *(rows[position][:SHOWN] for rows in (case.top_ids, case.top_log_probs)), strict=True
            )
        ]
        if position < len(case.ids)
        else [],
        runtime_top=[
            (candidate.tokenizer.piece(int(index)), float(forced[index])) for index in np.argsort(-forced)[:SHOWN]
        ],
    )


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The first place where two outputs differ, which may be the end of the shorter one."""
    pairs = enumerate(zip_longest(ours, theirs))
    return next(place for place, (mine, other) in pairs if mine != other)


def _preference(case: TokenCase, position: int, found: Sequence[int]) -> float:
    """By how much the reference preferred its own token to the one `found`; at least, where that one is not kept."""
    log_probs = case.top_log_probs[position].astype(np.float64)  # (C,)
    kept = np.isin(case.top_ids[position], found[position : position + 1])  # (C,)
    return float(log_probs[0] - log_probs[kept.argmax() if kept.any() else -1])


def _forced(case: TokenCase, position: int, candidate: Candidate) -> FloatArray:
    """The runtime's log-probabilities `(V,)` after what both outputs begin with; empty where it gives up."""
    try:
        found: FloatArray = candidate.forced_log_probs(case.source_ids, case.ids[:position])[-1]
    except GraphError:
        return np.empty(0)
    return found


def _figure_problem(figure: Figure) -> str:
    bound = "at least" if figure.at_least else "at most"
    return f"{figure.name} is {figure.value:.4g}, expected {bound} {figure.limit:.4g} ({figure.reason})"


def _sentence(difference: TokenDifference) -> str:
    return (
        f"{difference.label}: token {difference.position} differs, the reference preferred its own by "
        f"{difference.margin:.3g}, rounding explains {difference.error:.3g}"
    )
