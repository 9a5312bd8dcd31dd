"""An exam about another model proves nothing: rung 0 says where its questions do not fit the passport."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from runtime_support import POSITIONS, STRUCTURE, VOCABULARY, failed, judge

from runtime.bundle import Bundle
from runtime.contract import graph_specs
from runtime.exam import Exam, GraphCase
from runtime.parity.questions import strange_questions
from runtime.session import OrtBackend


def strange(exam: Exam, bundle: Bundle, **dims: int) -> list[str]:
    """What is strange about `exam` for the model of `bundle`, where `dims` are other ones."""
    known = msgspec.structs.replace(bundle.passport.dims, **dims)
    return strange_questions(exam, known, graph_specs(known))


def with_first(exam: Exam, change: Callable[[GraphCase], dict[str, Any]]) -> Exam:
    """`exam` with other inputs of its first case, which asks encode for B=5 S=1."""
    first, *others = exam.graphs
    return msgspec.structs.replace(exam, graphs=[msgspec.structs.replace(first, inputs=change(first)), *others])


def test_the_exam_of_a_bundle_is_about_its_model(tiny_bundle: Bundle, exam: Exam) -> None:
    assert strange(exam, tiny_bundle) == []


CHANGES: dict[str, tuple[Callable[[GraphCase], dict[str, Any]], str]] = {
    "a tensor is missing": (
        lambda case: {"input_ids": case.inputs["input_ids"]},
        "the exam gives encode no attention_mask",
    ),
    "a tensor is of no contract": (
        lambda case: case.inputs | {"position_ids": case.inputs["input_ids"]},
        "the exam gives encode position_ids, which the contract does not have",
    ),
    "another type": (
        lambda case: case.inputs | {"attention_mask": np.ones((5, 1), np.float32)},
        "the exam gives encode attention_mask as float32 (5, 1), expected int64 (batch_size, encoder_sequence_length)",
    ),
    "another rank": (
        lambda case: case.inputs | {"attention_mask": np.ones((5, 1, 1), np.int64)},
        "the exam gives encode attention_mask as int64 (5, 1, 1), expected int64 (batch_size, encoder_sequence_length)",
    ),
    "an id that the vocabulary does not have": (
        lambda case: case.inputs | {"input_ids": np.full((5, 1), VOCABULARY)},
        f"the exam has the source id {VOCABULARY}, the passport {VOCABULARY} entries",
    ),
}


@pytest.mark.parametrize(("change", "expected"), CHANGES.values(), ids=CHANGES)
def test_a_question_that_the_model_does_not_answer_is_told(
    tiny_bundle: Bundle, exam: Exam, change: Callable[[GraphCase], dict[str, Any]], expected: str
) -> None:
    assert strange(with_first(exam, change), tiny_bundle) == [expected]


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ({"source_vocab_size": 40}, f"the exam has the source id {VOCABULARY - 1}, the passport 40 entries"),
        ({"vocab_size": 40}, f"the exam has the target id {VOCABULARY - 1}, the passport 40 entries"),
        ({"max_positions": 20}, f"the passport has 20 positions, the exam goes as far as {POSITIONS}"),
        ({"max_positions": 40}, f"the passport has 40 positions, the exam goes as far as {POSITIONS}"),
        ({"width": 64}, "the exam gives prefill encoder_hidden_states as float32 (5, 1, 32), expected float32 "),
        ({"heads": 4}, "the exam gives step past_key_values.0.decoder.key as float32 (5, 2, 1, 16), expected float32 "),
        ({"layers": 2}, "the exam gives step no past_key_values.1.decoder.key"),
    ],
)
def test_a_passport_of_another_model_is_told(
    tiny_bundle: Bundle, exam: Exam, dims: dict[str, int], expected: str
) -> None:
    found = strange(exam, tiny_bundle, **dims)
    assert found[0].startswith(expected)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(("factor", "expected"), [(1e-6, False), (0.2, False), (0.3, True), (np.inf, True)])
def test_an_own_error_that_is_not_float32_s_excuses_nothing(
    tiny_bundle: Bundle, exam: Exam, factor: float, *, expected: bool
) -> None:
    case = exam.graphs[0]
    scale = max(np.abs(other.reference["last_hidden_state"]).max() for other in exam.graphs if other.verb == "encode")
    loose = msgspec.structs.replace(case, own_error={"last_hidden_state": factor * float(scale)})
    found = strange(msgspec.structs.replace(exam, graphs=[loose, *exam.graphs[1:]]), tiny_bundle)
    assert [problem.startswith("PyTorch's own error of encode last_hidden_state is ") for problem in found] == (
        [True] if expected else []
    )


def test_what_is_strange_fails_on_the_first_rung(tiny_bundle: Bundle, tiny_backend: OrtBackend, exam: Exam) -> None:
    change, expected = CHANGES["another type"]
    report = judge(tiny_bundle, with_first(exam, change), tiny_backend)
    assert failed(report)[0] == STRUCTURE
    assert report.rungs[STRUCTURE].problems == [expected]
    (case,) = [case for case in report.rungs[STRUCTURE].cases if not case.passed]
    assert case.problems == [expected]
