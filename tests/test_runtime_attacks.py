"""Ways to pass that were found by trying: logits nobody kept, excuses nobody earned, answers nobody gave, shapes."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from runtime_support import GRAPH, ROLLOUT, STRUCTURE, VOCABULARY, Delegate, failed, judge

from runtime.backend import Array, Cache
from runtime.bundle import Bundle
from runtime.exam import Exam
from runtime.session import OrtBackend


@pytest.mark.parametrize("number", [1e6, math.nan, math.inf])
def test_a_logit_that_the_rollout_did_not_keep_must_not_lead_the_kept_ones(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, number: float
) -> None:
    """At a past that no graph case asks for."""
    least = int(np.setdiff1d(np.arange(VOCABULARY), exam.rollouts[0].columns[:, 20].ravel())[0])

    class Fault(Delegate):
        def step(self, input_ids: Any, encoder_attention_mask: Any, cache: Cache[Any]) -> tuple[Any, Cache[Any]]:
            logits, grown = super().step(input_ids, encoder_attention_mask, cache)

            def spoil(array: Array) -> Array:
                array[..., least] = number
                return array

            return self.changed(logits, spoil) if cache[0].decoder_key.shape()[2] == 20 else logits, grown

    report = judge(tiny_bundle, exam, Fault(tiny_backend))
    assert failed(report)[0] == ROLLOUT
    assert report.rungs[ROLLOUT].problems[0].startswith("at position 20 ")


def test_an_own_error_that_is_not_float32_s_excuses_no_rollout(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    rollouts = [msgspec.structs.replace(case, own_error=[5.0] * len(case.own_error)) for case in exam.rollouts]
    report = judge(tiny_bundle, msgspec.structs.replace(exam, rollouts=rollouts), tiny_backend)
    assert failed(report)[0] == STRUCTURE
    assert "PyTorch's own error of a rollout is 5" in report.rungs[STRUCTURE].problems[0]


def test_a_question_without_an_answer_is_told(tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam) -> None:
    first = exam.graphs[0]
    silent = msgspec.structs.replace(first, reference={}, own_error={})
    report = judge(tiny_bundle, msgspec.structs.replace(exam, graphs=[silent, *exam.graphs[1:]]), tiny_backend)
    assert failed(report)[0] == STRUCTURE
    assert "with other outputs than the contract has" in report.rungs[STRUCTURE].problems[0]


class OneRowTooMany(Delegate):
    def step(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().step(*inputs)
        return self.changed(logits, lambda array: np.concatenate([array, array[:1]])), cache


class OnePositionTooMany(Delegate):
    def prefill(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().prefill(*inputs)
        return self.changed(logits, lambda array: np.concatenate([array, array[:, :1]], 1)), cache


@pytest.mark.parametrize("fault", [OneRowTooMany, OnePositionTooMany])
def test_logits_of_another_shape_are_a_verdict_and_no_accident(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, fault: type[Delegate]
) -> None:
    report = judge(tiny_bundle, exam, fault(tiny_backend))
    assert failed(report)[0] == GRAPH
    assert not report.rungs[ROLLOUT].passed
