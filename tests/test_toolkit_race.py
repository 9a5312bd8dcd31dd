"""Engines that take turns, with made-up engines: order, arithmetic, and what becomes of those who fail."""

import math

import pytest
from runtime_support import TINY

from runtime.bundle import read_passport
from toolkit.measure.engines import Outputs
from toolkit.measure.machine import step_bytes
from toolkit.measure.race import Score, agreement, race, ratio
from toolkit.measure.worker import EngineError, Lap
from toolkit.measure.workload import Workload, random_workload, sentences_workload

TASK = Workload("task", [[[5, 3], [6, 3]]], tokens=2)


class Runner:
    """Notes in `log` when it runs; takes `seconds` in turn."""

    def __init__(self, name: str, log: list[str], seconds: list[float], outputs: Outputs | None = None) -> None:
        self.name, self.log, self.seconds = name, log, seconds
        self.outputs = [[1, 2], [3, 4]] if outputs is None else outputs
        self.fail_at = ""

    def prepare(self, workload: Workload) -> None:
        assert workload is TASK
        self._note("prepare")

    def run(self) -> Lap:
        self._note("run")
        return Lap(self.seconds.pop(0), self.outputs)

    def _note(self, verb: str) -> None:
        self.log.append(f"{self.name} {verb}")
        if self.fail_at == verb:
            raise EngineError(f"{self.name}: cannot {verb}")


def test_everybody_warms_up_and_then_runs_in_turn() -> None:
    log: list[str] = []
    runners = {name: Runner(name, log, [1.0, 1.0, 1.0]) for name in "ABC"}
    said: list[str] = []
    course = race(runners, TASK, 3, settle=0, say=said.append)
    assert log == [f"{name} prepare" for name in "ABC"] + [f"{name} run" for name in "ABC"] * 3
    assert said[0] == "task: warm-up, A"
    assert said[-1] == "task: round 3 of 3, C"
    assert course.outputs == {name: [[1, 2], [3, 4]] for name in "ABC"}


def test_speed_is_tokens_over_the_median_and_over_the_minimum() -> None:
    course = race({"A": Runner("A", [], [4.0, 1.0, 2.0])}, TASK, 3, settle=0)
    score = course.scores["A"]
    assert (score.seconds, score.tokens) == ([4.0, 1.0, 2.0], 4)
    assert (score.median, score.best) == (2.0, 4.0)


def test_the_ratio_is_that_of_medians_and_that_within_each_round() -> None:
    ours, theirs = Score([1.0, 2.0, 4.0], 8), Score([3.0, 5.0, 6.0], 4)
    found = ratio(ours, theirs)
    assert found.ratio == (8 / 2) / (4 / 5)
    assert found.rounds == [6.0, 5.0, 3.0]


@pytest.mark.parametrize("verb", ["prepare", "run"])
def test_who_fails_is_out_and_the_others_go_on(verb: str) -> None:
    log: list[str] = []
    runners = {name: Runner(name, log, [1.0, 1.0]) for name in "AB"}
    runners["A"].fail_at = verb
    course = race(runners, TASK, 2, settle=0)
    assert course.scores["A"].error == f"A: cannot {verb}"
    assert log.count(f"A {verb}") == 1
    assert log.count("B run") == 2
    assert [*course.outputs] == ["B"]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([[1, 2], [3]], "gave outputs of 1 tokens where 2 were forced"),
        ([[1, 2, 3], []], "gave outputs of 0, 3 tokens where 2 were forced"),
        ([[1, 2]], "gave 1 outputs for 2 sentences"),
    ],
)
def test_who_does_less_work_or_more_is_out(outputs: Outputs, message: str) -> None:
    course = race({"A": Runner("A", [], [1.0], outputs)}, TASK, 1, settle=0)
    assert course.scores["A"].error == message
    assert course.outputs == {}


def test_outputs_as_long_as_they_come_must_hold_something() -> None:
    free = TASK._replace(tokens=None)

    class Free(Runner):
        def prepare(self, workload: Workload) -> None:
            assert workload is free

    assert not race({"A": Free("A", [], [1.0], [[1], []])}, free, 1, settle=0).scores["A"].error
    assert race({"A": Free("A", [], [1.0], [[], []])}, free, 1, settle=0).scores["A"].error == "gave no tokens"


def test_agreement_counts_outputs_that_are_the_same_throughout() -> None:
    assert agreement([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == 0.5
    with pytest.raises(ValueError, match="longer"):
        agreement([[1, 2]], [[1, 2], [3, 5]])


def test_random_sources_have_the_length_end_in_eos_and_hold_no_other_special_id() -> None:
    passport = read_passport(TINY)
    made = random_workload("random", passport, source=7, tokens=5, batch=40)
    (batch,) = made.batches
    assert [len(row) for row in batch] == [7] * 40
    assert {row[-1] for row in batch} == {passport.special.eos}
    inside = {index for row in batch for index in row[:-1]}
    assert not inside & set(passport.special)
    assert max(inside) < passport.dims.source_vocab_size
    assert made == random_workload("random", passport, source=7, tokens=5, batch=40)
    assert len(set(map(tuple, batch))) == 40


def test_sentences_come_in_batches_of_about_equal_length() -> None:
    made = sentences_workload("file", [[1] * length for length in (5, 2, 4, 1, 3)], batch=2)
    assert [[len(row) for row in batch] for batch in made.batches] == [[1, 2], [3, 4], [5]]
    assert made.sentences == 5


def test_a_step_reads_the_decoder_and_the_output_projection_once() -> None:
    passport = read_passport(TINY)
    dims, inner = passport.dims, passport.model["decoder_ffn_dim"]
    matrices = [(dims.width, dims.width)] * 6 + [(dims.width, inner)] * 2
    count = dims.layers * sum(map(math.prod, matrices)) + dims.width * dims.vocab_size
    assert step_bytes(passport) == 4 * count
