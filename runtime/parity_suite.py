"""The ladder as a test suite for anyone's CI: `pytest --pyargs runtime.parity_suite --bundle PATH`.

One test for each rung and case, torch-free; `--junitxml` and the rest of pytest come with it. The options are those of
`toolkit.pytest_plugin`.
"""

from pathlib import Path

import pytest

from .bundle import EXAM_ROLE, Bundle
from .contract import graph_specs
from .errors import RuntimeFault
from .exam import Exam, load_exam
from .parity import RUNGS, Report
from .parity.ladder import case_labels
from .parity.report import RungResult
from .verify import ORT_PROVIDERS, Setting, default_sweep, examine

Case = tuple[int, str]
OPENED = pytest.StashKey[tuple[Bundle, Exam, list[Setting]]]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each case of the rung that the test is named after."""
    bundle, exam, settings = _opened(metafunc.config)
    labels = case_labels(exam, bundle.passport, graph_specs(bundle.passport.dims))
    labels[-1] = [str(setting) for setting in settings]
    readable = _readable(exam)
    if "case" in metafunc.fixturenames:
        rung = RUNGS.index(metafunc.function.__name__.removeprefix("test_"))
        cases = [(rung, label) for label in labels[rung]]
        metafunc.parametrize("case", cases, ids=[readable.get(label, label) for _, label in cases])
    else:
        metafunc.parametrize("rung", range(len(RUNGS)), ids=[f"{place}-{name}" for place, name in enumerate(RUNGS)])


def _opened(config: pytest.Config) -> tuple[Bundle, Exam, list[Setting]]:
    """The bundle, its exam and the settings, once for all tests."""
    if OPENED not in config.stash:
        path = config.getoption("--bundle", None)
        if path is None:
            raise pytest.UsageError("runtime.parity_suite examines a bundle: name it with --bundle PATH")
        runtime = next(name for name, provider in ORT_PROVIDERS.items() if provider == config.getoption("--provider"))
        first = Setting(runtime, config.getoption("--optimization"))
        try:
            bundle = Bundle(Path(path))
            config.stash[OPENED] = bundle, load_exam(bundle.path(EXAM_ROLE)), [first, *default_sweep(first)]
        except RuntimeFault as error:
            raise pytest.UsageError(str(error)) from None
    return config.stash[OPENED]


def _readable(exam: Exam) -> dict[str, str]:
    """Test ids of some labels: pytest spells out what is not ASCII, so such a sentence is named by its number."""
    numbers = {text: number for number, text in enumerate(dict.fromkeys(case.text for case in exam.tokens), 1)}
    return {
        case.label: f"sentence {numbers[case.text]}, {case.label.rpartition(', ')[2]}"
        for case in exam.tokens
        if not case.label.isascii()
    }


@pytest.fixture(scope="session")
def report(request: pytest.FixtureRequest) -> Report:
    """What the ladder found, at every setting."""
    bundle, exam, settings = _opened(request.config)
    try:
        return examine(bundle, settings, exam)
    except RuntimeFault as error:
        pytest.fail(str(error), pytrace=False)


def _check(report: Report, case: Case) -> None:
    rung, label = case
    found = [result for result in report.rungs[rung].cases if result.label == label]
    if not found:
        pytest.fail(f"not compared: {report.rungs[rung].summary}", pytrace=False)
    if not all(result.passed for result in found):
        problems = [problem for result in found for problem in result.problems]
        pytest.fail("\n".join(problems or ["nothing was compared"]), pytrace=False)


def test_structure(report: Report, case: Case) -> None:
    """Rung 0: a graph has the contract's inputs and outputs; the ids of the search are PyTorch's."""
    _check(report, case)


def test_cache(report: Report, case: Case) -> None:
    """Rung 1: PyTorch's own caches."""
    _check(report, case)


def test_graph(report: Report, case: Case) -> None:
    """Rung 2: every output of one graph on one input."""
    _check(report, case)


def test_rollout(report: Report, case: Case) -> None:
    """Rung 3: a chain of steps on the runtime's own caches."""
    _check(report, case)


def test_tokens(report: Report, case: Case) -> None:
    """Rung 4: one sentence, one search."""
    _check(report, case)


def test_invariance(report: Report, case: Case) -> None:
    """Rung 5: a sentence alone and in company."""
    _check(report, case)


def test_deployment(report: Report, case: Case) -> None:
    """Rung 6: the ladder at another setting."""
    _check(report, case)


def test_rung(report: Report, rung: int) -> None:
    """Each rung as a whole: what no single case can say, too."""
    found: RungResult = report.rungs[rung]
    if not found.passed:
        pytest.fail("\n".join(found.problems), pytrace=False)
