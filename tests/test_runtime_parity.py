"""The examiner examined: nothing compared is a failure, tolerance is earned, a tie is told apart from a difference."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from runtime_support import CACHE, GRAPH, ROLLOUT, STRUCTURE, TOKENS, Delegate, failed, judge

from runtime.backend import Array, Cache
from runtime.bundle import Bundle
from runtime.contract import graph_specs
from runtime.exam import CacheCheck, Exam, GraphCase
from runtime.generation import Hypothesis
from runtime.parity import (
    CACHE_TOLERANCE,
    FACTOR,
    RUNGS,
    TensorResult,
    earned_tolerance,
    graph_results,
    largest_error,
    sit,
)
from runtime.session import OrtBackend
from runtime.verify import sit_bundle


def test_a_good_bundle_climbs_every_rung(tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam) -> None:
    report = sit_bundle(tiny_bundle, tiny_backend)
    assert report.passed
    assert [rung.name for rung in report.rungs] == list(RUNGS)
    assert all(rung.compared and not rung.problems for rung in report.rungs)
    assert all(result.ratio < FACTOR for result in report.tensors)
    assert report.differences == []
    assert failed(judge(tiny_bundle, exam, Delegate(tiny_backend))) == []


def test_every_output_of_every_graph_is_compared(tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam) -> None:
    compared = {(result.graph, result.tensor): result.compared for result in graph_results(exam.graphs, tiny_backend)}
    specs = graph_specs(tiny_bundle.passport.dims)
    assert set(compared) == {
        (verb, tensor.name) for verb in specs if verb != "select" for tensor in specs[verb].outputs
    }
    assert all(compared.values())


def test_the_exam_sees_every_past_that_the_model_has_room_for(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    assert len(judge(tiny_bundle, exam, tiny_backend).drift) == tiny_bundle.passport.dims.max_positions


# Nothing compared


EMPTY: dict[str, tuple[dict[str, Any], int]] = {
    "no prefixes": ({"cache": CacheCheck(prefixes=0, error=0.0)}, CACHE),
    "no graph cases": ({"graphs": []}, GRAPH),
    "no rollouts": ({"rollouts": []}, ROLLOUT),
    "no sentences": ({"tokens": []}, TOKENS),
}


@pytest.mark.parametrize(("changes", "rung"), EMPTY.values(), ids=EMPTY)
def test_comparing_nothing_is_a_failure(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, changes: dict[str, Any], rung: int
) -> None:
    report = judge(tiny_bundle, msgspec.structs.replace(exam, **changes), tiny_backend)
    assert failed(report)[0] == rung
    assert "nothing was compared" in report.rungs[rung].problems


def test_an_output_that_no_case_asks_for_is_a_failure(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    graphs = [case for case in exam.graphs if case.verb != "step"]
    report = judge(tiny_bundle, msgspec.structs.replace(exam, graphs=graphs), tiny_backend)
    assert failed(report) == [GRAPH]
    assert "step: logits was never compared" in report.rungs[GRAPH].problems


def test_an_output_of_which_no_number_was_compared_has_not_passed() -> None:
    assert not TensorResult(graph="g", tensor="t", own_error=1, error=0, tolerance=1, worst="", compared=0).passed


# The rung of structure


def test_a_graph_that_is_not_the_contract_s_gets_no_further_than_the_first_rung(
    tiny_bundle: Bundle, exam: Exam
) -> None:
    contract = graph_specs(tiny_bundle.passport.dims)
    frozen = contract["step"].inputs[0]._replace(shape=(3, 5))
    found = contract | {"step": contract["step"]._replace(inputs=(frozen, *contract["step"].inputs[1:]))}

    class Untouched:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was called though the structure is wrong")

    def no_search(_: object) -> Hypothesis:
        raise AssertionError("searched though the structure is wrong")

    backend: Any = Untouched()
    report = sit(exam, backend, no_search, contract, found)
    assert failed(report) == [STRUCTURE, GRAPH, ROLLOUT, TOKENS]
    assert "encoder_attention_mask is int64 (3, 5)" in report.rungs[STRUCTURE].problems[0]


def test_an_empty_contract_is_a_failure(tiny_backend: OrtBackend, exam: Exam) -> None:
    report = sit(exam, tiny_backend, lambda _: Hypothesis([], 0.0), {}, {})
    assert failed(report)[0] == STRUCTURE


# The rung of the cache


@pytest.mark.parametrize("error", [1e-6, 2 * CACHE_TOLERANCE, math.nan, math.inf])
def test_a_cache_that_differs_from_one_forward_fails(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, error: float
) -> None:
    changed = msgspec.structs.replace(exam, cache=CacheCheck(prefixes=11, error=error))
    assert failed(judge(tiny_bundle, changed, tiny_backend)) == [CACHE]


# Tolerance


def test_tolerance_is_a_multiple_of_pytorch_s_own_error_and_no_less_than_a_float32() -> None:
    assert earned_tolerance(1e-6, 1.0) == 8e-6
    assert earned_tolerance(0.0, 1.0) == 8 * np.spacing(np.float32(1))
    assert earned_tolerance(0.0, 1000.0) == 8 * np.spacing(np.float32(1000))
    assert math.isnan(earned_tolerance(math.nan, 1.0))


def single_case(reference: Array, own_error: float) -> GraphCase:
    return GraphCase(
        verb="encode",
        label="one",
        inputs={"input_ids": np.zeros((1, 1), np.int64), "attention_mask": np.ones((1, 1), np.int64)},
        reference={"last_hidden_state": reference},
        own_error={"last_hidden_state": own_error},
    )


class Constant:
    """A backend whose encoder always gives the same."""

    def __init__(self, output: Array) -> None:
        self._output = output

    def encode(self, *_: Any) -> Array:
        return self._output

    def put(self, array: Array) -> Array:
        return array

    def get(self, array: Array) -> Array:
        return array


def test_where_pytorch_makes_no_error_equal_numbers_pass_and_the_spacing_of_float32_is_allowed() -> None:
    reference = np.array([[[1.0, 0.5]]], np.float32)

    def judged(output: Array) -> TensorResult:
        backend: Any = Constant(output)
        (result,) = graph_results([single_case(reference, 0.0)], backend)
        return result

    assert judged(reference).passed
    assert judged(reference).ratio == 0
    assert judged(np.nextafter(reference, 2)).passed
    assert not judged(reference + np.float32(1e-5)).passed


@pytest.mark.parametrize(("distance", "verdict"), [(7.9e-3, "pass"), (8.1e-3, "fail"), (-8.1e-3, "fail")])
def test_a_tensor_passes_up_to_eight_times_pytorch_s_own_error(distance: float, verdict: str) -> None:
    reference = np.zeros((1, 1, 3), np.float32)
    output = reference.copy()
    output[0, 0, 1] = distance
    backend: Any = Constant(output)
    (result,) = graph_results([single_case(reference, 1e-3)], backend)
    assert result.passed == (verdict == "pass")
    assert result.ratio == pytest.approx(abs(distance) / 1e-3)


def test_another_shape_is_infinitely_far_though_it_would_broadcast() -> None:
    assert largest_error(np.zeros((1, 3)), np.zeros((2, 3))) == math.inf
    assert largest_error(None, np.zeros(2)) == math.inf
    assert largest_error(np.zeros((0, 3)), np.zeros((0, 3))) == 0


# Tokens


def with_other_ids(exam: Exam, beams: int, margin: float, score: Callable[[float], float]) -> Exam:
    """`exam` with another third token in the first answer of a search with `beams`, preferred by `margin`."""
    tokens = list(exam.tokens)
    place = next(index for index, case in enumerate(tokens) if case.config.num_beams == beams)
    case = tokens[place]
    margins = [margin] * len(case.ids) if case.margins else []
    ids = [*case.ids[:2], (case.ids[2] + 1) % 40, *case.ids[3:]]
    tokens[place] = msgspec.structs.replace(case, ids=ids, margins=margins, score=score(case.score))
    return msgspec.structs.replace(exam, tokens=tokens)


@pytest.mark.parametrize("beams", [1, 4])
def test_other_ids_that_the_reference_clearly_refused_fail(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, beams: int
) -> None:
    report = judge(tiny_bundle, with_other_ids(exam, beams, 0.5, lambda score: score + 0.5), tiny_backend)
    assert failed(report) == [TOKENS]
    (difference,) = report.differences
    assert difference.position == 2
    assert not difference.tie
    assert "token 2 differs, the reference preferred its own by 0.5" in report.rungs[TOKENS].problems[0]


@pytest.mark.parametrize("beams", [1, 4])
def test_other_ids_between_which_rounding_decides_are_a_tie(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, beams: int
) -> None:
    report = judge(tiny_bundle, with_other_ids(exam, beams, 1e-7, lambda score: score), tiny_backend)
    assert failed(report) == []
    (difference,) = report.differences
    assert difference.tie
    assert "1 ties" in report.rungs[TOKENS].summary


def test_the_same_ids_with_another_score_fail(tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam) -> None:
    tokens = [msgspec.structs.replace(case, score=case.score - 0.001) for case in exam.tokens]
    report = judge(tiny_bundle, msgspec.structs.replace(exam, tokens=tokens), tiny_backend)
    assert failed(report) == [TOKENS]
    assert report.differences == []
    assert "the score is -0.00" in report.rungs[TOKENS].problems[0]


def test_a_margin_that_is_not_a_number_is_no_tie(tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam) -> None:
    report = judge(tiny_bundle, with_other_ids(exam, 1, math.nan, lambda score: score), tiny_backend)
    assert failed(report) == [TOKENS]


def test_a_fault_is_no_excuse_for_other_ids(tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam) -> None:
    """A runtime that is wrong by 3 does not make every difference of less than 6 a tie."""

    class Fault(Delegate):
        def step(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
            logits, cache = super().step(*inputs)

            def shift(array: Array) -> Array:
                array[:, :, 10] += 3
                return array

            return self.changed(logits, shift), cache

    changed = with_other_ids(exam, 1, 2.5, lambda score: score)
    report = judge(tiny_bundle, changed, Fault(tiny_backend))
    assert failed(report) == [GRAPH, ROLLOUT, TOKENS]
    assert report.differences
    assert not any(difference.tie for difference in report.differences)


def test_an_output_that_stops_early_differs_where_it_stops(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    case = exam.tokens[0]
    longer = msgspec.structs.replace(case, ids=[*case.ids, 9], margins=[*case.margins, 4.0])
    report = judge(tiny_bundle, msgspec.structs.replace(exam, tokens=[longer]), tiny_backend)
    assert report.differences[0].position == len(case.ids)
    assert failed(report) == [TOKENS]


def test_a_report_without_all_rungs_has_not_passed(tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam) -> None:
    report = judge(tiny_bundle, exam, tiny_backend)
    assert report.passed
    assert not msgspec.structs.replace(report, rungs=report.rungs[:-1]).passed
