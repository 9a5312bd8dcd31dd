"""What several test modules share. Torch is imported inside fixtures alone: the tests of `runtime` pass without it."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from runtime_support import TINY, tiny_copy

from runtime.bundle import Bundle
from runtime.exam import Exam, load_exam
from runtime.session import OrtBackend
from runtime.translator import Translator

if TYPE_CHECKING:
    from exporters_support import Export
    from rivals_support import Rivals


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """Ctrl-C reaches what the tests start, also where a shell in the background ignores it for them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A copy of the bundle in tests/data that may be tampered with."""
    return tiny_copy(tmp_path / "tiny")


@pytest.fixture(scope="session")
def tiny_bundle() -> Bundle:
    return Bundle(TINY)


@pytest.fixture(scope="session")
def tiny_backend(tiny_bundle: Bundle) -> OrtBackend:
    return OrtBackend(tiny_bundle, threads=1)


@pytest.fixture(scope="session")
def exam(tiny_bundle: Bundle) -> Exam:
    return load_exam(tiny_bundle.path("exam"))


@pytest.fixture(scope="session")
def translator() -> Translator:
    return Translator.open(TINY, threads=1)


CONCLUSIONS = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def conclude(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Takes a line that is printed when all tests have run: what was compared, how many differences were explained."""
    return pytestconfig.stash.setdefault(CONCLUSIONS, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what the tests concluded."""
    for line in config.stash.get(CONCLUSIONS, []):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def made_rivals(tmp_path_factory: pytest.TempPathFactory) -> "Rivals":
    from rivals_support import make_rivals

    return make_rivals(tmp_path_factory.mktemp("rivals"))


@pytest.fixture(scope="module")
def rivals(made_rivals: "Rivals") -> "Iterator[Rivals]":
    """The same weights in transformers and in a bundle."""
    from rivals_support import one_quiet_thread

    with one_quiet_thread():
        yield made_rivals


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> "Callable[[str], Export]":
    """Exports of `exporters_support.VARIANTS` by name, each made when it is first asked for."""
    from exporters_support import make_export

    made: dict[str, Export] = {}

    def export(name: str) -> "Export":
        if name not in made:
            made[name] = make_export(name, tmp_path_factory.mktemp("export"))
        return made[name]

    return export
