"""What a search has besides the verbs: wrong branches, ranks and rows are found on rung 2, and in what is searched."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from runtime_support import DEPLOYMENT, GRAPH, INVARIANCE, ROLLOUT, TOKENS, VOCABULARY, Delegate, failed, judge

from runtime.backend import Array, Cache, IntArray, LayerCache
from runtime.bundle import Bundle
from runtime.contract import graph_specs
from runtime.errors import GraphError
from runtime.exam import Exam, GraphCase
from runtime.parity import sit
from runtime.parity.candidate import Candidate
from runtime.parity.search_graphs import ancestries, branch_case, select_case
from runtime.session import OrtBackend
from runtime.tokenizer import open_tokenizer
from runtime.verbs import call


class Branches(Delegate):
    """What the hypotheses have seen `(B, T, P)` goes through `told`."""

    def told(self, seen: Array) -> Array:
        return seen

    def branch(
        self, input_ids: Any, encoder_attention_mask: Any, seen: Any, cache: Cache[Any]
    ) -> tuple[Any, Cache[Any]]:
        return super().branch(input_ids, encoder_attention_mask, self.changed(seen, self.told), cache)


class SeenOfAnotherBeam(Branches):
    """Beams go on with the past of another beam."""

    def told(self, seen: Array) -> Array:
        return seen[:, ::-1]


class SeesEverything(Branches):
    def told(self, seen: Array) -> Array:
        return np.ones_like(seen)


class ForgetsItsParent(Branches):
    """The latest ancestor is lost."""

    def told(self, seen: Array) -> Array:
        if not seen.shape[2]:
            return seen
        latest = seen.shape[2] - 1 - seen[:, :, ::-1].argmax(2)
        np.put_along_axis(seen, latest[:, :, None], 0, 2)
        return seen


class SourceOfAnotherSentence(Delegate):
    def branch(self, ids: Any, mask: Any, seen: Any, cache: Cache[Any]) -> tuple[Any, Cache[Any]]:
        sides = ("encoder_key", "encoder_value")
        logits, grown = super().branch(ids, mask, seen, self.changed_caches(cache, sides, lambda array: array[::-1]))
        return logits, tuple(
            new._replace(encoder_key=old.encoder_key, encoder_value=old.encoder_value)
            for new, old in zip(grown, cache, strict=True)
        )


class SwappedWhenGrown(Delegate):
    def branch(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().branch(*inputs)
        return logits, tuple(LayerCache(layer[1], layer[0], *layer[2:]) for layer in cache)


class LostToken(Delegate):
    """The cache does not keep the last hypothesis's token."""

    def branch(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().branch(*inputs)
        return logits, self.changed_caches(cache, ("decoder_key",), lambda array: array[:, :, :-1])


class NoNumber(Delegate):
    def branch(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().branch(*inputs)

        def spoilt(array: Array) -> Array:
            array[-1, -1, 7] = np.nan
            return array

        return self.changed(logits, spoilt), cache


BRANCHES = [
    SeenOfAnotherBeam,
    SeesEverything,
    ForgetsItsParent,
    SourceOfAnotherSentence,
    SwappedWhenGrown,
    LostToken,
    NoNumber,
]


@pytest.mark.parametrize("fault", BRANCHES)
def test_a_branch_that_is_not_a_step_on_what_it_has_seen_fails_on_the_graph_rung(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, fault: type[Delegate]
) -> None:
    report = judge(tiny_bundle, exam, fault(tiny_backend))
    assert failed(report)[0] == GRAPH
    assert ROLLOUT not in failed(report)
    assert all(case.label.startswith("branch ") for case in report.rungs[GRAPH].cases if not case.passed)
    assert all(problem.startswith("branch: ") for problem in report.rungs[GRAPH].problems)
    assert "from what steps give, earned is" in report.rungs[GRAPH].problems[0]


@pytest.mark.parametrize("name", ["logits", "decoder_key", "decoder_value"])
def test_one_wrong_element_of_a_branch_fails_within_what_steps_earn(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, name: str
) -> None:
    """No more is earned than by a step, which is a few hundred-thousandths."""

    def wrong(array: Array) -> Array:
        array.flat[-1] += 1e-3
        return array

    class Fault(Delegate):
        def branch(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
            logits, cache = super().branch(*inputs)
            if name == "logits":
                return self.changed(logits, wrong), cache
            return logits, self.changed_caches(cache, (name,), wrong)

    report = judge(tiny_bundle, exam, Fault(tiny_backend))
    assert failed(report)[0] == GRAPH
    output = "logits" if name == "logits" else f"present.0.{name.replace('_', '.')}"
    (problem,) = report.rungs[GRAPH].problems
    assert problem.startswith(f"branch: {output} is 0.001 from what steps give, earned is ")
    earned = {(result.graph, result.tensor): result.earned for result in report.tensors}
    assert earned["branch", output] == earned["step", output] < 1e-3


@pytest.mark.parametrize("fault", [SwappedWhenGrown, LostToken, NoNumber])
def test_no_precision_excuses_a_branch_that_gives_no_number_or_another_cache(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, fault: type[Delegate]
) -> None:
    specs = graph_specs(tiny_bundle.passport.dims)
    passport = msgspec.structs.replace(tiny_bundle.passport, precision="int8")
    lower = Candidate(fault(tiny_backend), passport, open_tokenizer(tiny_bundle.folder), "as tested")
    assert failed(sit(exam, lower, specs, specs))[0] == GRAPH


class CoarseBranches(Delegate):
    def branch(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        logits, cache = super().branch(*inputs)
        return self.changed(logits, lambda array: array + np.float32(self.by)), cache

    by = 0.02


def test_a_lower_precision_is_judged_by_how_far_its_branches_are_from_its_steps(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = graph_specs(tiny_bundle.passport.dims)
    passport = msgspec.structs.replace(tiny_bundle.passport, precision="int8")
    lower = Candidate(CoarseBranches(tiny_backend), passport, open_tokenizer(tiny_bundle.folder), "as tested")
    found = []
    for by in (0.0, 0.02, 10.0):
        monkeypatch.setattr(CoarseBranches, "by", by)
        report = sit(exam, lower, specs, specs)
        (distance,) = [figure for figure in report.figures if figure.name == "distance"]
        found.append((distance.passed, GRAPH in failed(report)))
        assert (distance.value > 1e-4) == (by > 0)
    assert found == [(True, False), (True, False), (False, False)]
    assert GRAPH in failed(judge(tiny_bundle, exam, CoarseBranches(tiny_backend)))


def step_case(exam: Exam, batch: int) -> GraphCase:
    return next(case for case in exam.graphs if case.verb == "step" and len(case.inputs["input_ids"]) == batch)


def test_hypotheses_have_seen_the_past_half_of_it_every_other_token_and_the_last_alone() -> None:
    assert [places.tolist() for places in ancestries(4)] == [[0, 1, 2, 3], [0, 1], [0, 2, 4, 6], [7]]
    assert [places.tolist() for places in ancestries(3)] == [[0, 1, 2], [0, 1], [0, 2, 4], [5]]
    assert [places.tolist() for places in ancestries(1)] == [[0], [0], [0], [1]]


def test_branches_are_asked_over_more_than_they_may_see_and_never_beyond_the_last_position(
    tiny_backend: OrtBackend, exam: Exam
) -> None:
    for case in (case for case in exam.graphs if case.verb == "step"):
        past = case.inputs["past_key_values.0.decoder.key"].shape[2]
        asked = branch_case(case, VOCABULARY, tiny_backend)
        ids, seen = asked.inputs["input_ids"], asked.inputs["seen"]
        assert seen.shape == (*ids.shape, 2 * past)
        assert [row.nonzero()[0].tolist() for row in seen[0]] == [places.tolist() for places in ancestries(past)]
        assert (seen.sum(2) >= 1).all()
        assert seen.sum(2).max() == past
        assert all(len(set(row.tolist())) == len(row) for row in ids)
        assert ((ids >= 0) & (ids < VOCABULARY)).all()


def test_a_step_that_fails_on_what_a_branch_has_seen_is_named(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    """The exam asks for no step after nine tokens."""

    class Fault(Delegate):
        def step(self, ids: Any, mask: Any, cache: Cache[Any]) -> tuple[Any, Cache[Any]]:
            if self.get(cache[0].decoder_key).shape[2] == 9:
                raise GraphError("gave up in step: nine")
            return super().step(ids, mask, cache)

    report = judge(tiny_bundle, exam, Fault(tiny_backend))
    assert failed(report)[0] == GRAPH
    assert report.rungs[GRAPH].problems[0] == "gave up in step: nine"


@pytest.mark.parametrize("change", [lambda array: array[:, :, :0], lambda array: np.concatenate([array, array], 2)])
def test_steps_of_another_length_answer_nothing(
    tiny_backend: OrtBackend, exam: Exam, change: Callable[[Array], Array]
) -> None:
    class Fault(Delegate):
        def step(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
            logits, cache = super().step(*inputs)
            return logits, self.changed_caches(cache, ("decoder_value",), change)

    with pytest.raises(GraphError, match=r"^step: present\.0\.decoder\.value after \d tokens is of shape \("):
        branch_case(step_case(exam, 3), VOCABULARY, Fault(tiny_backend))


# Rows


class OneBeamOnly(Delegate):
    def select(self, cache: Cache[Any], rows: IntArray) -> Cache[Any]:
        return self.changed_caches(super().select(cache, rows), ("encoder_key", "encoder_value"), np.zeros_like)


class FirstRowsOnly(Delegate):
    """Keeps the first rows, whichever were asked for."""

    def select(self, cache: Cache[Any], rows: IntArray) -> Cache[Any]:
        return super().select(cache, np.arange(len(rows)) % self.get(cache[0].encoder_key).shape[0])


class SwappedWhenMoved(Delegate):
    def select(self, cache: Cache[Any], rows: IntArray) -> Cache[Any]:
        return tuple(LayerCache(layer[1], layer[0], *layer[2:]) for layer in super().select(cache, rows))


MOVES = [OneBeamOnly, FirstRowsOnly, SwappedWhenMoved]


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


def test_each_cache_that_has_wrong_rows_is_named(tiny_backend: OrtBackend, exam: Exam) -> None:
    case = step_case(exam, 3)
    assert select_case(case, tiny_backend).passed
    result = select_case(case, OneBeamOnly(tiny_backend))
    assert result.problems == [
        f"select: encoder_{kind} of layer 0 has other rows than [2, 1, 0, 0, 2]" for kind in ("key", "value")
    ]
    assert result.compared == 2


# In the search


@pytest.mark.parametrize(
    ("fault", "rung"),
    [
        (SeenOfAnotherBeam, TOKENS),
        (SeesEverything, TOKENS),
        (ForgetsItsParent, TOKENS),
        (SwappedWhenGrown, TOKENS),
        (SourceOfAnotherSentence, INVARIANCE),
        (OneBeamOnly, INVARIANCE),
        (SwappedWhenMoved, INVARIANCE),
        (FirstRowsOnly, INVARIANCE),
    ],
)
def test_what_a_search_has_besides_the_verbs_fails_in_the_words_too(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam, fault: type[Delegate], rung: int
) -> None:
    """On the rung of tokens, where one sentence shows it, and else where several do."""
    assert rung in failed(judge(tiny_bundle, exam, fault(tiny_backend)))


def test_a_runtime_that_cannot_branch_fails_on_the_graph_rung_and_in_the_search(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam
) -> None:
    class Fault(Delegate):
        def branch(self, *_: Any) -> tuple[Any, Cache[Any]]:
            raise GraphError("gave up in branch")

    report = judge(tiny_bundle, exam, Fault(tiny_backend))
    assert failed(report) == [GRAPH, TOKENS, INVARIANCE, DEPLOYMENT]
    assert all("gave up in branch" in problem for problem in report.rungs[GRAPH].problems)
    assert report.differences
    assert all(difference.found == [] and not difference.tie for difference in report.differences)


def test_a_branch_by_name_speaks_the_contract(tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam) -> None:
    asked = branch_case(step_case(exam, 3), VOCABULARY, tiny_backend)
    spec = graph_specs(tiny_bundle.passport.dims)["branch"]
    assert set(asked.inputs) == {tensor.name for tensor in spec.inputs}
    assert list(call(tiny_backend, "branch", asked.inputs)) == [tensor.name for tensor in spec.outputs]
