"""Rung 5: a sentence alone, padded, permuted, in another batch size: the same output, and how far logits move."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from ..backend import Array
from ..errors import GraphError
from ..exam import TokenCase
from ..generation import GenerationConfig, Hypothesis, pad
from .candidate import Candidate, rollout
from .report import CaseResult, RungResult, rung_result
from .tokens import first_difference
from .tolerance import largest_error, worst

SENTENCES = 8
"""Most sentences that are compared; the longest and the shortest of the exam are among them."""
FORCED = 12
"""Tokens of the chains whose logits are compared."""


COMPANIES = ("padded in one batch", "permuted", "in batches of 3", "twice in one batch")
"""The ways in which sentences come together; each is compared with every sentence alone."""
PADDED_ROW = "beside a fully padded row"


def companies(count: int) -> dict[str, list[list[int]]]:
    """How each of `COMPANIES` cuts `count` sentences into batches: indices, in the order of the rows."""
    everyone = list(range(count))
    shuffled = np.random.default_rng(5).permutation(count).tolist()
    threes = [everyone[start : start + 3] for start in range(0, count, 3)]
    return dict(zip(COMPANIES, ([everyone], [shuffled], threes, [everyone + everyone[::-1]]), strict=True))


def invariance_labels(cases: Sequence[TokenCase]) -> list[str]:
    """Labels of what the rung compares."""
    searches = [_beams(width) for width in _widths(cases)]
    names = [f"{what} {company}" for what in ("logits", *searches) for company in COMPANIES]
    return [*names, PADDED_ROW] if cases else []


def _widths(cases: Sequence[TokenCase]) -> list[int]:
    return list(dict.fromkeys(case.config.num_beams for case in cases))


def _beams(width: int) -> str:
    return f"{width} beam{'s' * (width > 1)}"


def invariance_rung(
    cases: Sequence[TokenCase], candidate: Candidate, tolerance: float, limit: float | None = None
) -> tuple[RungResult, float]:
    """The verdict, and the largest difference of a logit.

    Two runs that are each within `tolerance` of the reference are within twice that of each other. A lower precision
    may move its logits by `limit` instead; the words must stay all the same.
    """
    rounding = 2 * tolerance
    allowed = rounding if limit is None else limit
    chosen = _sentences(cases)
    found = list(_verdicts(chosen, _widths(cases), candidate, allowed, rounding))
    largest = worst([difference for _, difference in found if difference is not None])
    summary = f"{len(chosen)} sentences, logits move by {largest:.1e}, allowed is {allowed:.1e}"
    return rung_result(5, summary, [verdict for verdict, _ in found]), largest


def _sentences(cases: Sequence[TokenCase]) -> list[TokenCase]:
    """One case for each sentence, from the shortest to the longest."""
    unique = {tuple(case.source_ids): case for case in reversed(cases)}
    ordered = sorted(unique.values(), key=lambda case: len(case.source_ids))
    places = np.unique(np.linspace(0, len(ordered) - 1, min(SENTENCES, len(ordered))).round().astype(int))
    return [ordered[place] for place in places]


def _verdicts(
    cases: Sequence[TokenCase], widths: Sequence[int], candidate: Candidate, allowed: float, rounding: float
) -> "Compared":
    """Each comparison, and by how much logits moved in it, where these are compared."""
    if not cases:
        return
    sources = [case.source_ids for case in cases]
    fed = np.array([_fed(case, candidate) for case in cases], np.int64)
    longest = max(len(source) for source in sources)

    def logits(rows: Sequence[int]) -> list[Array]:
        return _forced([sources[row] for row in rows], fed[list(rows)], candidate)

    yield from _guarded("logits", lambda: _compare_logits(logits, len(cases), allowed))
    yield from _guarded(PADDED_ROW, lambda: _padded_row(sources, fed, candidate, allowed))
    limit = min(candidate.passport.dims.max_positions, 2 * longest + 20)
    for width in widths:
        config = GenerationConfig(num_beams=width, max_length=limit)

        def search(rows: Sequence[int], config: GenerationConfig = config) -> list[Hypothesis]:
            return candidate.search([sources[row] for row in rows], config)

        name = _beams(width)
        yield from _guarded(name, partial(_compare_outputs, search, cases, name, allowed, rounding))


Compared = Iterator[tuple[CaseResult, float | None]]


def _guarded(label: str, compare: Callable[[], Compared]) -> Compared:
    """What `compare` finds; a runtime that gives up has not passed."""
    try:
        yield from list(compare())
    except GraphError as failure:
        yield CaseResult(label=label, compared=1, problems=[str(failure)]), None


def _fed(case: TokenCase, candidate: Candidate) -> list[int]:
    """The start token and the reference's output, cut or filled up to the length of the chains."""
    length = min(FORCED, candidate.passport.dims.max_positions)
    ids = [candidate.passport.special.start, *case.ids[: length - 1]]
    return (ids * length)[:length]


def _forced(sources: Sequence[Sequence[int]], fed: Array, candidate: Candidate) -> list[Array]:
    """Logits `(N, V)` of each source, fed with its tokens step by step."""
    ids, mask = pad(sources, candidate.passport.special.pad)
    return list(np.stack(rollout(candidate.backend, ids, mask, fed), 1))


def _compare_logits(logits: Callable[[Sequence[int]], list[Array]], count: int, allowed: float) -> Compared:
    alone = [logits([row])[0] for row in range(count)]
    for company, batches in companies(count).items():
        difference = worst(
            [
                largest_error(together, alone[row])
                for batch in batches
                for row, together in zip(batch, logits(batch), strict=True)
            ]
        )
        yield _logits_verdict(f"logits {company}", alone[0].size * count, difference, allowed), difference


def _padded_row(sources: Sequence[Sequence[int]], fed: Array, candidate: Candidate, allowed: float) -> Compared:
    """A row without a single token beside a sentence: it must give numbers, and leave the sentence as it is."""
    (alone,) = _forced(sources[-1:], fed[-1:], candidate)
    together, empty = _forced([sources[-1], []], fed[[-1, -1]], candidate)
    difference = largest_error(together, alone)
    verdict = _logits_verdict(PADDED_ROW, alone.size, difference, allowed)
    if not np.isfinite(empty).all():
        verdict.problems.append("a fully padded row gives numbers that are none")
    yield verdict, difference


def _logits_verdict(label: str, compared: int, difference: float, allowed: float) -> CaseResult:
    problems = []
    if not difference <= allowed < math.inf:
        problems.append(f"{label}: a logit moves by {difference:.3g}, allowed is {allowed:.3g}")
    return CaseResult(label=label, compared=compared, problems=problems)


def _compare_outputs(
    search: Callable[[Sequence[int]], list[Hypothesis]],
    cases: Sequence[TokenCase],
    name: str,
    allowed: float,
    rounding: float,
) -> Compared:
    alone = [search([row])[0] for row in range(len(cases))]
    for company, batches in companies(len(cases)).items():
        problems = [
            f"{company}, {name}: {cases[row].text!r} {change}"
            for batch in batches
            for row, found in zip(batch, search(batch), strict=True)
            if (change := _change(found, alone[row], allowed, rounding))
        ]
        yield CaseResult(label=f"{name} {company}", compared=len(cases), problems=problems), None


def _change(found: Hypothesis, alone: Hypothesis, allowed: float, rounding: float) -> str:
    """What company did to an output; nothing where rounding decides between two, or accounts for the score of one.

    A beam that goes on with the cache of another sentence's may show in its score alone.
    """
    apart = abs(found.score - alone.score)
    if found.ids != alone.ids and not apart <= rounding:
        place = first_difference(found.ids, alone.ids)
        return (
            f"has other ids than alone from token {place} on, and a score that is {apart:.3g} apart, "
            f"of which rounding explains {rounding:.3g}"
        )
    if found.ids == alone.ids and not apart <= 2 * allowed:
        return f"has the same ids as alone, but a score that is {apart:.3g} apart, allowed is {2 * allowed:.3g}"
    return ""
