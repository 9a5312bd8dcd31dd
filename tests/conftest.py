"""What several test modules share. Torch is imported inside fixtures alone: the tests of `runtime` pass without it."""

import shutil
import signal
from collections.abc import Callable, Iterator
from functools import cache
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

    return cache(lambda name: make_export(name, tmp_path_factory.mktemp("export")))


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """Neither progress bars nor remarks from transformers."""
    from importers_support import quiet_transformers

    with quiet_transformers():
        yield


@pytest.fixture(scope="session")
def complete_folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Random models by family with all that an export needs, each made when it is first asked for."""
    from importers_support import complete_folder

    return cache(lambda family: complete_folder(family, tmp_path_factory.mktemp("complete")))


@pytest.fixture
def complete_marian(complete_folders: Callable[[str], Path], tmp_path: Path) -> Path:
    """One of them to spoil."""
    return Path(shutil.copytree(complete_folders("marian"), tmp_path / "model"))


@pytest.fixture(scope="session")
def plain_folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Random models by family without a tokenizer, each made when it is first asked for."""
    from importers_support import SHAPES, random_folder

    return cache(lambda family: random_folder(family, SHAPES["plain"], tmp_path_factory.mktemp("plain")))


@pytest.fixture
def plain_marian(plain_folders: Callable[[str], Path], tmp_path: Path) -> Path:
    """One of them to spoil."""
    return Path(shutil.copytree(plain_folders("marian"), tmp_path / "model"))
