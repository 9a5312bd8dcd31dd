"""A bundle on the examiner's bench: opened as it will be deployed, it sits its own exam or another."""

from .bundle import EXAM_ROLE, Bundle
from .contract import graph_specs
from .exam import Exam, TokenCase, load_exam
from .generation import Hypothesis, generate
from .parity import Report, sit
from .session import OrtBackend


def sit_bundle(bundle: Bundle, backend: OrtBackend, exam: Exam | None = None) -> Report:
    """Let `backend`, which runs `bundle`, sit `exam`, by default the one that was recorded with the bundle.

    Raises:
        ExamError: the recorded exam is missing or damaged.
        GraphError: ONNX Runtime gave up on a question.
    """
    passport = bundle.passport

    def search(case: TokenCase) -> Hypothesis:
        positions = passport.dims.max_positions
        ((best, *_),) = generate(backend, [case.source_ids], case.config, passport.special, positions)
        return best

    questions = exam or load_exam(bundle.path(EXAM_ROLE))
    return sit(questions, backend, search, graph_specs(passport.dims), backend.found_specs())
