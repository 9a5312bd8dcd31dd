"""The examiner examined: nothing compared is a failure, tolerance is earned, every output and special id counts."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from runtime_support import (
    CACHE,
    DEPLOYMENT,
    GRAPH,
    INVARIANCE,
    ROLLOUT,
    STRUCTURE,
    TOKENS,
    Delegate,
    failed,
    graph_results,
    judge,
)

from runtime.backend import Array, Cache
from runtime.bundle import Bundle
from runtime.contract import BEGIN, BRANCH, VERBS, graph_specs
from runtime.decoding import SpecialIds
from runtime.exam import CacheCheck, Exam, GraphCase
from runtime.parity import RUNGS, sit
from runtime.parity.candidate import Candidate
from runtime.parity.graphs import graph_rung
from runtime.parity.ladder import case_labels
from runtime.parity.report import TensorResult
from runtime.parity.tolerance import CACHE_TOLERANCE, FACTOR, Earned, largest, largest_error, worst
from runtime.session import OrtBackend
from runtime.tokenizer import open_tokenizer
from runtime.verify import sit_bundle


def test_a_good_bundle_climbs_every_rung(tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam) -> None:
    report = sit_bundle(tiny_bundle, tiny_backend)
    assert report.passed
    assert [rung.name for rung in report.rungs] == list(RUNGS)
    assert all(rung.compared and not rung.problems for rung in report.rungs)
    assert all(result.ratio < FACTOR for result in report.tensors)
    assert report.differences == []
    assert (report.figures, report.thresholds) == ([], {})
    assert 0 < report.invariance < 1e-4
    assert 0 < max(report.own_drift) < report.drift_tolerance
    assert failed(judge(tiny_bundle, exam, Delegate(tiny_backend))) == []


def test_every_output_of_every_graph_is_compared(tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam) -> None:
    compared = {(result.graph, result.tensor): result.compared for result in graph_results(exam.graphs, tiny_backend)}
    specs = graph_specs(tiny_bundle.passport.dims)
    assert set(compared) == {(verb, tensor.name) for verb in VERBS for tensor in specs[verb].outputs}
    assert all(compared.values())
    report = judge(tiny_bundle, exam, tiny_backend)
    besides = {(result.graph, result.tensor): result.compared for result in report.tensors}
    assert {(verb, name) for verb, name in besides if verb not in VERBS} == {
        (verb, tensor.name) for verb in (BEGIN, BRANCH) for tensor in specs[verb].outputs if 0 not in tensor.shape
    }
    assert all(besides.values())


def test_every_case_is_named_and_has_compared_something(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    report = judge(tiny_bundle, exam, tiny_backend)
    labels = [sorted(case.label for case in rung.cases) for rung in report.rungs]
    known = case_labels(exam, tiny_bundle.passport, graph_specs(tiny_bundle.passport.dims))
    assert labels[:DEPLOYMENT] == [sorted(names) for names in known[:DEPLOYMENT]]
    assert labels[DEPLOYMENT] == ["as tested"]
    for rung in report.rungs:
        assert len({case.label for case in rung.cases}) == len(rung.cases)
        assert all(case.compared and case.passed for case in rung.cases)
        assert sum(case.compared for case in rung.cases) == rung.compared


def test_the_exam_sees_every_past_that_the_model_has_room_for(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    report = judge(tiny_bundle, exam, tiny_backend)
    assert len(report.drift) == len(report.own_drift) == tiny_bundle.passport.dims.max_positions


# Nothing compared


EMPTY: dict[str, tuple[dict[str, Any], list[int]]] = {
    "no prefixes": ({"cache": CacheCheck(prefixes=0, error=0.0)}, [CACHE]),
    "no graph cases": ({"graphs": []}, [GRAPH]),
    "no rollouts": ({"rollouts": []}, [ROLLOUT]),
    "no sentences": ({"tokens": []}, [TOKENS, INVARIANCE]),
}


@pytest.mark.parametrize(("changes", "rungs"), EMPTY.values(), ids=EMPTY)
def test_comparing_nothing_is_a_failure(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, changes: dict[str, Any], rungs: list[int]
) -> None:
    report = judge(tiny_bundle, msgspec.structs.replace(exam, **changes), tiny_backend)
    assert failed(report)[0] == rungs[0]
    assert [rung.rung for rung in report.rungs if "nothing was compared" in rung.problems] == rungs


def test_an_output_that_no_case_asks_for_is_a_failure(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    graphs = [case for case in exam.graphs if case.verb == "encode"]
    report = judge(tiny_bundle, msgspec.structs.replace(exam, graphs=graphs), tiny_backend)
    assert failed(report) == [GRAPH, DEPLOYMENT]
    for output in ("prefill: logits", "step: logits", "begin: present.0.encoder.key", "branch: logits"):
        assert f"{output} was never compared" in report.rungs[GRAPH].problems


def test_an_output_of_which_no_number_was_compared_has_not_passed() -> None:
    assert not TensorResult(graph="g", tensor="t", own_error=1, error=0, tolerance=1, worst="", compared=0).passed


# The rung of structure


class Untouched:
    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was called though the structure is wrong")


def untouched(bundle: Bundle, special: SpecialIds | None = None) -> Candidate:
    backend: Any = Untouched()
    passport = msgspec.structs.replace(bundle.passport, special=special or bundle.passport.special)
    return Candidate(backend, passport, open_tokenizer(bundle.folder), "as tested")


def test_a_graph_that_is_not_the_contract_s_gets_no_further_than_the_first_rung(
    tiny_bundle: Bundle, exam: Exam
) -> None:
    contract = graph_specs(tiny_bundle.passport.dims)
    frozen = contract["step"].inputs[0]._replace(shape=(3, 5))
    found = contract | {"step": contract["step"]._replace(inputs=(frozen, *contract["step"].inputs[1:]))}
    report = sit(exam, untouched(tiny_bundle), contract, found)
    assert failed(report) == [STRUCTURE, GRAPH, ROLLOUT, TOKENS, INVARIANCE, DEPLOYMENT]
    assert [rung.summary for rung in report.rungs[GRAPH:DEPLOYMENT]] == ["not tried"] * 4
    assert report.rungs[DEPLOYMENT].summary == "0 of 1 settings"
    assert "encoder_attention_mask is int64 (3, 5)" in report.rungs[STRUCTURE].problems[0]
    assert [case.label for case in report.rungs[STRUCTURE].cases if not case.passed] == ["step"]


@pytest.mark.parametrize(("name", "right"), [("pad", 0), ("start", 2), ("eos", 3)])
def test_another_special_id_than_pytorch_s_fails_on_the_first_rung_with_both(
    tiny_bundle: Bundle, exam: Exam, name: str, right: int
) -> None:
    special = tiny_bundle.passport.special._replace(**{name: 17})
    specs = graph_specs(tiny_bundle.passport.dims)
    report = sit(exam, untouched(tiny_bundle, special), specs, specs)
    assert failed(report) == [STRUCTURE, GRAPH, ROLLOUT, TOKENS, INVARIANCE, DEPLOYMENT]
    assert report.rungs[STRUCTURE].problems == [f"the {name} id is 17 in the passport, PyTorch's is {right}"]
    assert [case.label for case in report.rungs[STRUCTURE].cases if not case.passed] == ["special ids"]


def test_an_empty_contract_is_a_failure(tiny_bundle: Bundle, exam: Exam) -> None:
    report = sit(exam, untouched(tiny_bundle), {}, {})
    assert failed(report)[0] == STRUCTURE
    assert report.rungs[STRUCTURE].problems == ["nothing was compared"]


# The rung of the cache


@pytest.mark.parametrize("error", [1e-6, 2 * CACHE_TOLERANCE, math.nan, math.inf])
def test_a_cache_that_differs_from_one_forward_fails(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, error: float
) -> None:
    changed = msgspec.structs.replace(exam, cache=CacheCheck(prefixes=11, error=error))
    assert failed(judge(tiny_bundle, changed, tiny_backend)) == [CACHE]


# Tolerance


def test_tolerance_is_a_multiple_of_pytorch_s_own_error_and_no_less_than_a_float32() -> None:
    assert Earned(1e-6, 1.0).tolerance == 8e-6
    assert Earned(0.0, 1.0).tolerance == 8 * np.spacing(np.float32(1))
    assert Earned(0.0, 1000.0).tolerance == 8 * np.spacing(np.float32(1000))


@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_an_error_that_is_no_number_earns_nothing(error: float) -> None:
    assert math.isnan(Earned(error, 1.0).tolerance)


def test_the_largest_of_several_keeps_nan_and_of_none_is_nan() -> None:
    for errors in ([math.nan, 1.0], [1.0, math.nan], [math.nan, math.inf], []):
        assert math.isnan(worst(errors))
    assert worst([1.0, 3.0, 2.0]) == 3
    assert largest(np.array([-4.0, 3.0])) == 4
    assert math.isnan(largest(np.array([1.0, math.nan])))
    assert largest(np.empty(0)) == 0


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


class LogitsChanged(Delegate):
    """Changes the logits `(B, 1, V)` of each step."""

    def change(self, logits: Array) -> Array:
        return logits

    def step(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().step(*inputs)
        return self.changed(logits, self.change), cache


# Logits of which some are kept


KEPT = np.arange(0, 45, 2)


def with_columns(exam: Exam) -> list[GraphCase]:
    """The steps of `exam`, of whose logits every other is kept."""
    steps = [case for case in exam.graphs if case.verb == "step"]
    return [
        msgspec.structs.replace(
            case, columns=KEPT, reference=case.reference | {"logits": case.reference["logits"][..., KEPT]}
        )
        for case in steps
    ]


def logits_result(exam: Exam, backend: Any) -> TensorResult:
    return next(result for result in graph_results(with_columns(exam), backend) if result.tensor == "logits")


def test_where_some_logits_are_kept_these_are_compared(tiny_backend: OrtBackend, exam: Exam) -> None:
    result = logits_result(exam, tiny_backend)
    assert result.passed
    assert result.compared == sum(len(case.inputs["input_ids"]) for case in with_columns(exam)) * len(KEPT)


@pytest.mark.parametrize(("column", "wrong"), [(44, True), (0, True), (43, False)])
def test_a_wrong_logit_is_found_among_those_that_are_kept(
    tiny_backend: OrtBackend, exam: Exam, column: int, *, wrong: bool
) -> None:
    class Fault(LogitsChanged):
        def change(self, logits: Array) -> Array:
            logits[..., column] += 0.01
            return logits

    assert logits_result(exam, Fault(tiny_backend)).passed is not wrong


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_logit_that_is_no_number_is_found_also_where_it_is_not_kept(
    tiny_backend: OrtBackend, exam: Exam, number: float
) -> None:
    class Fault(LogitsChanged):
        def change(self, logits: Array) -> Array:
            logits[-1, 0, 43] = number
            return logits

    assert not logits_result(exam, Fault(tiny_backend)).passed


@pytest.mark.parametrize("width", [44, 1, 0])
def test_too_few_logits_are_infinitely_far(tiny_backend: OrtBackend, exam: Exam, width: int) -> None:
    class Fault(LogitsChanged):
        def change(self, logits: Array) -> Array:
            return logits[..., :width]

    result = logits_result(exam, Fault(tiny_backend))
    assert result.error == math.inf
    assert not result.passed


# A lower precision


def as_int8(bundle: Bundle, backend: Any) -> Candidate:
    passport = msgspec.structs.replace(bundle.passport, precision="int8")
    return Candidate(backend, passport, open_tokenizer(bundle.folder), "as tested")


class Coarse(LogitsChanged):
    def change(self, logits: Array) -> Array:
        return logits + np.float32(0.01)


def test_a_lower_precision_may_give_other_numbers(tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam) -> None:
    specs = graph_specs(tiny_bundle.passport.dims)
    backend = Coarse(tiny_backend)
    assert failed(judge(tiny_bundle, exam, backend)) == [GRAPH, ROLLOUT, DEPLOYMENT]
    report = sit(exam, as_int8(tiny_bundle, backend), specs, specs)
    assert failed(report) == []
    assert max(result.ratio for result in report.tensors) > FACTOR


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_no_precision_may_give_what_is_no_number(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, number: float
) -> None:
    class Fault(LogitsChanged):
        def change(self, logits: Array) -> Array:
            logits[-1, 0, 4] = number
            return logits

    specs = graph_specs(tiny_bundle.passport.dims)
    with np.errstate(invalid="ignore"):  # numpy warns of infinity less infinity
        report = sit(exam, as_int8(tiny_bundle, Fault(tiny_backend)), specs, specs)
    assert failed(report)[:2] == [GRAPH, ROLLOUT]
    assert "earned is" in report.rungs[GRAPH].problems[0]


def test_no_precision_may_leave_an_output_out(tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam) -> None:
    class Fault(Delegate):
        def prefill(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
            logits, cache = super().prefill(*inputs)
            return logits, cache[:-1]

    prefill = [case for case in exam.graphs if case.verb == "prefill"]
    specs = graph_specs(tiny_bundle.passport.dims)
    rung, tensors = graph_rung(prefill, as_int8(tiny_bundle, Fault(tiny_backend)), specs)
    assert not rung.passed
    assert [result.tensor for result in tensors if not result.passed] == [
        tensor.name for tensor in specs["prefill"].outputs if tensor.name.startswith("present.0")
    ]


# The verdict


def test_a_report_without_all_rungs_has_not_passed(tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam) -> None:
    report = judge(tiny_bundle, exam, tiny_backend)
    assert report.passed
    assert not msgspec.structs.replace(report, rungs=report.rungs[:-1]).passed
