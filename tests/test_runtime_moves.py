"""Rows of caches that are picked where the caches are: wrong ones are found on rung 2, and in what is searched."""

from typing import Any

import numpy as np
import pytest
from runtime_support import DEPLOYMENT, GRAPH, INVARIANCE, TOKENS, Delegate, failed, judge

from runtime.backend import Cache, IntArray, LayerCache
from runtime.bundle import Bundle
from runtime.errors import GraphError
from runtime.exam import Exam
from runtime.parity.graphs import select_case
from runtime.session import OrtBackend


class LostRows(Delegate):
    """Beams go on with the cache of another beam."""

    def reorder(self, cache: Cache[Any], rows: IntArray) -> Cache[Any]:
        return super().reorder(cache, rows[::-1])


class OneBeamOnly(Delegate):
    def select(self, cache: Cache[Any], rows: IntArray) -> Cache[Any]:
        return self.changed_caches(super().select(cache, rows), ("encoder_key", "encoder_value"), np.zeros_like)


class FirstRowsOnly(Delegate):
    """Keeps the first rows, whichever were asked for."""

    def select(self, cache: Cache[Any], rows: IntArray) -> Cache[Any]:
        return super().select(cache, np.arange(len(rows)) % self.get(cache[0].encoder_key).shape[0])


class MovesCrossAttentionToo(Delegate):
    def reorder(self, cache: Cache[Any], rows: IntArray) -> Cache[Any]:
        return super().select(cache, rows)


class SwappedWhenMoved(Delegate):
    def select(self, cache: Cache[Any], rows: IntArray) -> Cache[Any]:
        return tuple(LayerCache(layer[1], layer[0], *layer[2:]) for layer in super().select(cache, rows))


MOVES = [LostRows, OneBeamOnly, FirstRowsOnly, MovesCrossAttentionToo, SwappedWhenMoved]


@pytest.mark.parametrize("fault", MOVES)
def test_rows_that_were_not_asked_for_fail_on_the_graph_rung(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, fault: type[Delegate]
) -> None:
    report = judge(tiny_bundle, exam, fault(tiny_backend))
    assert failed(report)[0] == GRAPH
    (case,) = [case for case in report.rungs[GRAPH].cases if not case.passed]
    assert case.label == "select B=5"
    assert report.rungs[GRAPH].problems == case.problems
    assert all(problem.startswith("select: ") and "layer 0 has other rows than" in problem for problem in case.problems)


@pytest.mark.parametrize(
    ("fault", "rung"),
    [(LostRows, TOKENS), (OneBeamOnly, TOKENS), (SwappedWhenMoved, TOKENS), (FirstRowsOnly, INVARIANCE)],
)
def test_a_fault_of_moving_caches_fails_in_the_words_too(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, fault: type[Delegate], rung: int
) -> None:
    """On the rung of tokens, where one sentence shows it, and else where several do."""
    assert rung in failed(judge(tiny_bundle, exam, fault(tiny_backend)))


def test_each_cache_that_has_wrong_rows_is_named(tiny_backend: OrtBackend, exam: Exam) -> None:
    case = next(case for case in exam.graphs if case.verb == "step" and len(case.inputs["input_ids"]) == 3)
    assert select_case(case, tiny_backend).passed
    result = select_case(case, OneBeamOnly(tiny_backend))
    assert result.problems == [
        f"select: encoder_{kind} of layer 0 has other rows than [2, 1, 0, 0, 2]" for kind in ("key", "value")
    ]
    assert result.compared == 2


def test_a_runtime_that_cannot_move_caches_fails_on_the_graph_rung_and_in_the_search(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    class Fault(Delegate):
        def reorder(self, *_: Any) -> Cache[Any]:
            raise GraphError("gave up in select")

    report = judge(tiny_bundle, exam, Fault(tiny_backend))
    assert failed(report) == [GRAPH, TOKENS, INVARIANCE, DEPLOYMENT]
    assert report.rungs[GRAPH].problems == ["gave up in select"]
    assert report.differences
    assert all(difference.found == [] and not difference.tie for difference in report.differences)
