"""What a bundle of lower precision must stand: each figure by itself, and weights that are rounded a little or much."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from runtime_support import DEPLOYMENT, GRAPH, TINY, TOKENS, Delegate, failed

from runtime.backend import Array, Cache, FloatArray
from runtime.bundle import WEIGHTS, Bundle, record_files, write_passport
from runtime.errors import GraphError, ThresholdError
from runtime.exam import Exam, TokenCase
from runtime.generation import GenerationConfig, Hypothesis
from runtime.parity.candidate import Candidate
from runtime.parity.gate import PRECISIONS, THRESHOLDS, UNKNOWN, chrf, figures, kl_divergence, loops, thresholds
from runtime.parity.report import Figure
from runtime.ranking import log_softmax
from runtime.session import OrtBackend
from runtime.tokenizer import open_tokenizer
from runtime.verify import sit_bundle

LOWER = [precision for precision in PRECISIONS if precision != "fp32"]
WORDS = list(UNKNOWN)
"""The figures of rung 4."""
BLOCK = 512
"""Weights that share one scale when they are rounded; the largest tensor of the tiny model has three blocks."""


def lower(bundle: Bundle, backend: Any, precision: str = "int8", kind: type[Candidate] = Candidate) -> Candidate:
    passport = msgspec.structs.replace(bundle.passport, precision=precision)
    return kind(backend, passport, open_tokenizer(bundle.folder), "as tested")


def by_name(found: Sequence[Figure]) -> dict[str, float]:
    return {figure.name: figure.value for figure in found}


# The thresholds


@pytest.mark.parametrize("precision", LOWER)
def test_every_lower_precision_has_a_limit_for_every_figure_and_a_reason(precision: str) -> None:
    assert thresholds(precision, {}) == {name: entry.limits[precision] for name, entry in THRESHOLDS.items()}
    assert all(entry.reason for entry in THRESHOLDS.values())


def test_limits_of_words_and_distributions_are_looser_for_lower_precisions() -> None:
    for name in WORDS:
        entry = THRESHOLDS[name]
        limits = [entry.limits[precision] for precision in LOWER]
        assert limits == sorted(limits, reverse=entry.at_least), name


def test_what_is_given_takes_the_place_of_the_table_s() -> None:
    found = thresholds("int4", {"chrf": 12.5, "kl_mean": 3})
    assert found == thresholds("int4", {}) | {"chrf": 12.5, "kl_mean": 3}
    assert thresholds("int4", {})["chrf"] != 12.5


def test_fp32_has_no_thresholds() -> None:
    assert thresholds("fp32", {}) == {}


@pytest.mark.parametrize(
    ("precision", "overrides", "expected"),
    [
        ("int8", {"bleu": 1.0, "chrf": 1.0}, "threshold bleu is not known, expected one of token_agreement, kl_mean,"),
        ("fp32", {"bleu": 1.0}, "threshold bleu is not known"),
        ("fp32", {"chrf": 1.0}, "a bundle in fp32 is held to PyTorch's own error"),
        ("int3", {}, "the precision 'int3' has no thresholds, expected one of fp32, fp16, int8, int4"),
    ],
)
def test_thresholds_that_do_not_apply_are_refused(precision: str, overrides: dict[str, float], expected: str) -> None:
    with pytest.raises(ThresholdError, match=expected):
        thresholds(precision, overrides)


@pytest.mark.parametrize(
    ("at_least", "passing", "failing"),
    [(True, [0.9, 0.95, math.inf], [0.89, math.nan]), (False, [0.9, 0.8, -1.0], [0.91, math.inf, math.nan])],
)
def test_a_figure_passes_on_the_right_side_of_its_limit(
    passing: list[float], failing: list[float], *, at_least: bool
) -> None:
    for value in passing + failing:
        figure = Figure(name="f", value=value, limit=0.9, at_least=at_least, reason="")
        assert figure.passed == (value in passing)


# Loops


@pytest.mark.parametrize(
    "ids",
    [
        [7, 7, 7, 7],
        [1, 2, 7, 7, 7, 7, 3],
        [5, 6, 5, 6, 5, 6, 5, 6],
        [9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3],
        [1, 2, 3, 4, 5, 6, 7] * 4,
    ],
)
def test_four_times_the_same_words_are_a_loop(ids: list[int]) -> None:
    assert loops(ids)


@pytest.mark.parametrize(
    "ids",
    [
        [],
        [7],
        [7, 7, 7],
        [7, 7, 7, 8, 7],
        [5, 6, 5, 6, 5, 6, 5],
        [1, 2, 3, 1, 2, 3, 1, 2, 3],
        [4, 4, 4, 5, 5, 5, 4, 4, 4],
        list(range(40)),
    ],
)
def test_less_than_four_times_is_none(ids: list[int]) -> None:
    assert not loops(ids)


# Divergence


def token_case(log_probs: FloatArray, kept: int) -> TokenCase:
    """A case whose reference has `log_probs (N, V)`, of which the `kept` most probable are recorded."""
    order = np.argsort(-log_probs, axis=-1)[:, :kept]
    return TokenCase(
        label="case",
        text="",
        source_ids=[],
        config=GenerationConfig(),
        ids=order[:, 0].tolist(),
        score=0.0,
        translation="",
        top_ids=order,
        top_log_probs=np.take_along_axis(log_probs, order, 1).astype(np.float32),
    )


def distributions(seed: int, spread: float) -> tuple[FloatArray, FloatArray]:
    """A reference and another runtime: 50 positions, 30 tokens."""
    random = np.random.default_rng(seed)
    logits = random.normal(0, 3, (50, 30))
    return log_softmax(logits), log_softmax(logits + random.normal(0, spread, logits.shape))


def full_divergence(reference: FloatArray, ours: FloatArray) -> Array:
    found: Array = (np.exp(reference) * (reference - ours)).sum(-1)
    return found


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(3))
def test_where_every_token_is_kept_the_divergence_is_kullback_and_leibler_s(seed: int, spread: float) -> None:
    reference, ours = distributions(seed, spread)
    found = kl_divergence(token_case(reference, 30), ours)
    np.testing.assert_allclose(found, full_divergence(reference, ours), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(3))
def test_where_few_are_kept_it_is_a_lower_bound_that_rises_with_their_number(seed: int, spread: float) -> None:
    reference, ours = distributions(seed, spread)
    bounds = [kl_divergence(token_case(reference, kept), ours) for kept in (1, 2, 5, 10)]
    for lower_bound, higher_bound in zip(bounds, [*bounds[1:], full_divergence(reference, ours)], strict=True):
        assert (lower_bound >= 0).all()
        assert (lower_bound <= higher_bound + 1e-5).all()
        assert lower_bound.mean() < higher_bound.mean()
    assert bounds[2].mean() > 0.5 * full_divergence(reference, ours).mean()


def test_the_same_distributions_do_not_diverge() -> None:
    reference, _ = distributions(0, 1.0)
    for kept in (1, 5, 30):
        assert kl_divergence(token_case(reference, kept), reference).max() < 1e-5


def test_a_distribution_that_is_no_number_diverges_by_none() -> None:
    reference, ours = distributions(0, 1.0)
    ours[3] = math.nan
    assert np.flatnonzero(np.isnan(kl_divergence(token_case(reference, 5), ours))).tolist() == [3]


# chrF; `tests/test_exporters_gate.py` compares it with sacrebleu's


def test_chrf_is_100_for_the_same_texts_0_for_others_and_between_for_what_is_alike() -> None:
    assert chrf(["the cat sat"], ["the cat sat"]) == pytest.approx(100)
    assert chrf(["xyz"], ["the cat sat"]) == 0
    assert 40 < chrf(["the cat sits"], ["the cat sat"]) < 90
    assert chrf(["", ""], ["", ""]) == 100
    assert chrf(["", ""], ["", "a"]) == 0


# The figures


def test_figures_of_a_runtime_that_is_right_are_perfect(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    found = figures(exam.tokens, lower(tiny_bundle, tiny_backend), thresholds("fp16", {}))
    assert [figure.name for figure in found] == WORDS
    values = by_name(found)
    assert values["token_agreement"] == 1
    assert 0 <= values["kl_mean"] <= values["kl_p99"] < 1e-6
    assert values["loops"] == 0
    assert values["chrf"] == pytest.approx(100)
    assert all(figure.passed and figure.reason for figure in found)
    assert [figure.limit for figure in found] == [THRESHOLDS[figure.name].limits["fp16"] for figure in found]


def test_agreement_is_the_share_of_positions(tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam) -> None:
    case = exam.tokens[0]
    top_ids = case.top_ids.copy()
    top_ids[:3, 0] = 40
    changed = msgspec.structs.replace(case, top_ids=top_ids)
    values = by_name(figures([changed], lower(tiny_bundle, tiny_backend), thresholds("int8", {})))
    assert values["token_agreement"] == pytest.approx(1 - 3 / len(case.ids))
    assert values["kl_mean"] > 0.1


class Shifted(Delegate):
    """The first logit of a prefill is far too large at its last position, which few of all tokens show."""

    def prefill(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        def shift(logits: Array) -> Array:
            logits[:, 4, 30] += 40
            return logits

        logits, cache = super().prefill(*inputs)
        return (self.changed(logits, shift) if logits.shape()[1] > 10 else logits), cache


def test_one_bad_position_shows_in_the_tail_before_it_shows_in_the_mean(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    values = by_name(figures(exam.tokens, lower(tiny_bundle, Shifted(tiny_backend)), thresholds("int8", {})))
    assert values["kl_p99"] > 10 * values["kl_mean"] > 0


class Looping(Candidate):
    """Says the same word again and again in every other search."""

    def search(self, sources: Sequence[Sequence[int]], config: GenerationConfig) -> list[Hypothesis]:
        found = super().search(sources, config)
        pairs = zip(sources, found, strict=True)
        return [Hypothesis([9] * 6, -1.0) if len(source) % 2 else best for source, best in pairs]


def test_loops_are_counted_where_the_reference_has_none(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    greedy = [case for case in exam.tokens if case.config.num_beams == 1]
    odd = [place for place, case in enumerate(greedy) if len(case.source_ids) % 2]
    candidate = lower(tiny_bundle, tiny_backend, kind=Looping)
    found = {figure.name: figure for figure in figures(greedy, candidate, thresholds("int8", {}))}
    assert found["loops"].value == len(odd) > 1
    assert not found["loops"].passed
    assert found["chrf"].value < 80
    greedy[odd[0]] = msgspec.structs.replace(greedy[odd[0]], ids=[9] * len(greedy[odd[0]].ids))
    assert by_name(figures(greedy, candidate, thresholds("int8", {})))["loops"] == len(odd) - 1


class GivesUp(Delegate):
    def prefill(self, *_: Any) -> tuple[Any, Cache[Any]]:
        raise GraphError("gave up in prefill")


def test_where_the_runtime_gives_up_or_nothing_is_asked_no_figure_passes(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    for cases, backend in ((exam.tokens, GivesUp(tiny_backend)), ([], tiny_backend)):
        found = figures(cases, lower(tiny_bundle, backend), thresholds("int4", {}))
        assert [figure.name for figure in found] == WORDS
        assert all(math.isnan(figure.value) and not figure.passed for figure in found)


# Whole bundles


def rounded(folder: Path, bits: int, precision: str = "int8") -> Bundle:
    """The bundle in `folder` after its weights were rounded to `bits`, as if it had been written so."""
    weights = np.fromfile(folder / WEIGHTS, np.float32)
    steps = 2 ** (bits - 1) - 1
    for start in range(0, len(weights), BLOCK):
        block = weights[start : start + BLOCK]
        scale = np.abs(block).max() / steps or 1
        block[:] = np.round(block / scale) * scale
    weights.tofile(folder / WEIGHTS)
    return signed(folder, precision)


def signed(folder: Path, precision: str) -> Bundle:
    """The bundle in `folder` with a passport that fits its files and says `precision`."""
    passport = Bundle(TINY).passport
    files = record_files(folder, passport.files)
    write_passport(folder, msgspec.structs.replace(passport, files=files, precision=precision))
    return Bundle(folder)


def sit_exam(bundle: Bundle, **settings: Any) -> Any:
    return sit_bundle(bundle, OrtBackend(bundle, threads=1), **settings)


def test_weights_of_8_bits_pass_as_int8_and_fail_as_fp32(tiny: Path) -> None:
    bundle = rounded(tiny, 8)
    report = sit_exam(bundle)
    assert failed(report) == []
    assert report.thresholds == thresholds("int8", {})
    values = by_name(report.figures)
    assert values["token_agreement"] == 1
    assert 0 < values["kl_mean"] < 0.01
    assert failed(sit_exam(signed(tiny, "fp32")))[0] == GRAPH


def test_weights_of_2_bits_fail_as_int8_and_each_figure_says_why(tiny: Path) -> None:
    report = sit_exam(rounded(tiny, 2))
    assert failed(report)[0] == TOKENS
    wrong = [figure for figure in report.figures if not figure.passed]
    assert {"token_agreement", "kl_mean", "kl_p99", "chrf"} <= {figure.name for figure in wrong}
    (agreement,) = [figure for figure in wrong if figure.name == "token_agreement"]
    assert (
        f"token_agreement is {agreement.value:.4g}, expected at least {agreement.limit:.4g} ({agreement.reason})"
        in report.rungs[TOKENS].problems
    )
    assert any(problem.startswith("kl_mean is ") for problem in report.rungs[TOKENS].problems)
    assert {case.label for case in report.rungs[TOKENS].cases if not case.passed} == {figure.name for figure in wrong}
    assert len(report.differences) > 10


def test_thresholds_that_are_given_decide(tiny: Path) -> None:
    bundle = rounded(tiny, 8)
    report = sit_exam(bundle, thresholds={"kl_mean": 0.0, "distance": 1.0})
    assert failed(report) == [TOKENS, DEPLOYMENT]
    (problem,) = report.rungs[TOKENS].problems
    assert problem.startswith("kl_mean is ")
    assert "expected at most 0 (" in problem
    assert report.thresholds == thresholds("int8", {"kl_mean": 0.0, "distance": 1.0})
    with pytest.raises(ThresholdError, match="bleu is not known"):
        sit_exam(bundle, thresholds={"bleu": 1.0})


def test_a_bundle_in_fp32_knows_no_thresholds(tiny_bundle: Bundle) -> None:
    with pytest.raises(ThresholdError, match="held to PyTorch's own error"):
        sit_exam(tiny_bundle, thresholds={"chrf": 50.0})


@pytest.mark.parametrize("fault", [GivesUp, Shifted])
def test_a_broken_runtime_is_no_lower_precision(
    tiny: Path, tiny_backend: OrtBackend, fault: Callable[[OrtBackend], Delegate]
) -> None:
    assert TOKENS in failed(sit_bundle(signed(tiny, "int8"), fault(tiny_backend)))


class StepScaled(Delegate):
    """A step that is three times too sure; a prefill is right."""

    def step(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().step(*inputs)
        return self.changed(logits, lambda array: 3 * array), cache


class StepWrongAtOnePast(Delegate):
    """A step that is wrong after 20 tokens, where no sentence of the exam gets."""

    def step(self, input_ids: Any, encoder_attention_mask: Any, cache: Cache[Any]) -> tuple[Any, Cache[Any]]:
        logits, grown = super().step(input_ids, encoder_attention_mask, cache)
        wrong = cache[0].decoder_key.shape()[2] == 20
        return self.changed(logits, lambda array: array[..., ::-1].copy()) if wrong else logits, grown


@pytest.mark.parametrize(
    ("fault", "figure"), [(StepScaled, "kl_mean"), (StepScaled, "distance"), (StepWrongAtOnePast, "distance")]
)
@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_a_wrong_step_is_no_lower_precision(
    tiny: Path, tiny_backend: OrtBackend, fault: Callable[[OrtBackend], Delegate], figure: str, precision: str
) -> None:
    report = sit_bundle(signed(tiny, precision), fault(tiny_backend))
    assert failed(report)[0] == TOKENS
    assert any(problem.startswith(f"{figure} is ") for problem in report.rungs[TOKENS].problems)
