"""The examiner of beginnings: the caches of the source alone, and a first token over a cache of none."""

from typing import Any

import pytest
from runtime_support import GRAPH, Delegate, failed, judge

from runtime.backend import Array, Cache
from runtime.bundle import Bundle
from runtime.exam import Exam
from runtime.parity.search_graphs import beginnings
from runtime.session import OrtBackend


def one_wrong(array: Array) -> Array:
    array.flat[array.size // 2] += 1e-3
    return array


def test_what_the_exam_asks_about_prefill_it_asks_about_beginnings(exam: Exam) -> None:
    prefills = [case for case in exam.graphs if case.verb == "prefill"]
    asked = beginnings(exam.graphs)
    assert [case.label for case in asked if case.verb == "begin"] == [case.label for case in prefills]
    firsts = [case for case in asked if case.verb == "step"]
    assert [case.label for case in firsts] == [
        case.label[:-3] + "P=0" for case in prefills if case.label.endswith("T=1")
    ]
    assert {case.inputs["past_key_values.0.decoder.key"].shape[2] for case in firsts} == {0}
    assert len(firsts) > 1


class WrongBeginning(Delegate):
    def begin(self, memory: Any) -> Cache[Any]:
        return self.changed_caches(super().begin(memory), (self.name,), one_wrong)

    name = ""


@pytest.mark.parametrize("name", ["encoder_key", "encoder_value"])
def test_one_wrong_element_of_a_beginning_fails_on_the_graph_rung_within_what_prefill_earns(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WrongBeginning, "name", name)
    report = judge(tiny_bundle, exam, WrongBeginning(tiny_backend))
    assert failed(report)[0] == GRAPH
    output = f"present.0.{name.replace('_', '.')}"
    (problem,) = report.rungs[GRAPH].problems
    assert problem.startswith(f"begin: {output} is 0.001 from the reference, earned is ")
    earned = {(result.graph, result.tensor): result.earned for result in report.tensors}
    assert earned["begin", output] == earned["prefill", output] < 1e-3


@pytest.mark.parametrize("verb", ["step", "branch"])
def test_what_only_a_first_token_shows_fails_on_the_graph_rung(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, verb: str
) -> None:
    """A step or a branch that is wrong over the cache of no tokens alone."""

    class Fault(Delegate):
        def step(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
            return self._spoilt("step", inputs[-1], super().step(*inputs))

        def branch(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
            return self._spoilt("branch", inputs[-1], super().branch(*inputs))

        def _spoilt(self, asked: str, past: Cache[Any], found: tuple[Any, Cache[Any]]) -> tuple[Any, Cache[Any]]:
            logits, cache = found
            first = asked == verb and past[0].decoder_key.shape()[2] == 0
            return self.changed(logits, one_wrong) if first else logits, cache

    report = judge(tiny_bundle, exam, Fault(tiny_backend))
    assert failed(report)[0] == GRAPH
    wrong = [case.label for case in report.rungs[GRAPH].cases if not case.passed]
    assert f"{verb} B=5 S=1 P=0" in wrong
    assert all("P=0" in label for label in wrong)
