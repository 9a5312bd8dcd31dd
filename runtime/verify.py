"""A bundle on the examiner's bench: opened at the provider that will be deployed, it sits its own exam or another."""

from .bundle import Bundle
from .contract import graph_specs
from .exam import Exam, TokenCase, load_exam
from .generation import Hypothesis, generate
from .parity import Report, sit
from .session import OrtBackend, Provider


def sit_bundle(
    bundle: Bundle,
    *,
    exam: Exam | None = None,
    provider: Provider = "cpu",
    threads: int | None = None,
    allow_fallback: bool = False,
) -> Report:
    """Let `bundle` sit `exam`, by default the one that was recorded with it.

    Raises:
        ExamError: the recorded exam is missing or damaged.
        ProviderError: `provider` would not really be used.
    """
    passport = bundle.passport
    backend = OrtBackend(bundle, provider=provider, threads=threads, allow_fallback=allow_fallback)

    def search(case: TokenCase) -> Hypothesis:
        positions = passport.dims.max_positions
        ((best, *_),) = generate(backend, [case.source_ids], case.config, passport.special, positions)
        return best

    questions = exam or load_exam(bundle.path("exam"))
    return sit(questions, backend, search, graph_specs(passport.dims), backend.found_specs())
