"""What people see of a run and of errors: the bar, signals, the picture, one line for whatever goes wrong."""

import io
import signal
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from models.errors import CheckpointError
from models.training import Metrics, StepMetrics, ValidationMetrics
from runtime.errors import BundleError
from toolkit.errors import Commands, needs
from toolkit.interruption import SIGNALS, Interruption
from toolkit.plots import plot_metrics
from toolkit.train_display import Display, duration

STEP = StepMetrics(1230, 1.5, 2.345, 1e-3, 4567.8, 60.0)
VALIDATION = ValidationMetrics(1640, 2.0, 1.5, 4.4817, {"bleu": 23.456, "chrf": 45.1}, best=True, seconds=80.0)
AVERAGE = ValidationMetrics(1640, 2.0, 1.4, 4.0552, {"bleu": 24.0, "chrf": 46.0}, best=False, seconds=80.0, averaged=2)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return terminal


def test_on_a_terminal_a_bar_shows_where_the_run_is(terminal: Terminal) -> None:
    with redirect_stderr(terminal), Display(4, bar=True, quiet=False) as display:
        display.show(STEP)
    shown = terminal.getvalue()
    for part in ("38%", "epoch 2/4", "step 1,230", "4,568 tokens/s", "loss 2.345", "left"):
        assert part in shown


def test_a_validation_is_a_line_above_the_bar(terminal: Terminal) -> None:
    with redirect_stderr(terminal), Display(4, bar=True, quiet=False) as display:
        display.show(VALIDATION)
        display.show(AVERAGE)
    shown = terminal.getvalue()
    assert "epoch 2: loss 1.500, perplexity 4.48, BLEU 23.46, chrF 45.10  (best so far)" in shown
    assert "average of 2 epochs: loss 1.400, perplexity 4.06, BLEU 24.00, chrF 46.00\n" in shown


def test_the_bar_says_that_the_run_is_about_to_stop(terminal: Terminal) -> None:
    with redirect_stderr(terminal), Display(4, bar=True, quiet=False) as display:
        display.show(STEP)
        display.stopping()
        display.show(STEP)
    assert "stopping after this step, Ctrl-C again to abort" in terminal.getvalue()


def test_where_standard_output_shares_the_terminal_there_is_no_bar(terminal: Terminal) -> None:
    with redirect_stderr(terminal), Display(4, bar=False, quiet=False) as display:
        display.show(STEP)
        display.say("a line with [brackets]")
    assert terminal.getvalue() == "a line with [brackets]\n"


def test_all_processes_but_the_first_are_silent(terminal: Terminal) -> None:
    with redirect_stderr(terminal), Display(4, bar=True, quiet=True) as display:
        display.show(STEP)
        display.show(VALIDATION)
    assert terminal.getvalue() == ""


def test_long_lines_are_not_broken_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(4, bar=True, quiet=False) as display:
        display.say("word " * 100)
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.7, "1 min 0 s"), (754, "12 min 34 s"), (7384, "2 h 3 min")]
)
def test_durations_have_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# Signals.


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted_for_the_loop(number: signal.Signals) -> None:
    noted: list[str] = []
    with Interruption(lambda: noted.append("noted")) as interruption:
        assert not interruption()
        signal.raise_signal(number)
        assert interruption()
    assert interruption.signal == number
    assert noted == ["noted"]


@pytest.mark.parametrize("first", SIGNALS)
def test_a_second_ctrl_c_aborts_at_once(first: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.interruption.ECHO_SECONDS", 0.0)
    with Interruption(lambda: None) as interruption:
        interruption()
        signal.raise_signal(first)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("second", SIGNALS)
def test_a_signal_that_a_launcher_passes_on_once_more_changes_nothing(second: signal.Signals) -> None:
    with Interruption(lambda: None) as interruption:
        interruption()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(second)
    assert interruption.signal == signal.SIGINT


def test_before_the_loop_asks_a_signal_ends_the_program() -> None:
    with Interruption(lambda: None):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(SystemExit) as caught:
            signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 143


def test_the_handlers_from_before_come_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interruption(lambda: None):
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


# Errors.


def run_command(raised: BaseException) -> tuple[int, str]:
    @click.group(cls=Commands)
    def group() -> None:
        pass

    @group.command()
    def fail() -> None:
        raise raised

    result = CliRunner().invoke(group, ["fail"])
    assert "Traceback" not in result.output
    return result.exit_code, result.stderr


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (CheckpointError("no checkpoint\nhere"), "Error: no checkpoint here\n"),
        (BundleError("no bundle"), "Error: no bundle\n"),
        (PermissionError(13, "Permission denied", "runs/x"), "Error: runs/x: Permission denied\n"),
        (OSError(28, "No space left on device"), "Error: [Errno 28] No space left on device\n"),
        (OSError("disk on fire"), "Error: disk on fire\n"),
    ],
    ids=repr,
)
def test_an_error_of_the_user_is_one_line_and_exit_code_1(raised: Exception, line: str) -> None:
    assert run_command(raised) == (1, line)


def test_ctrl_c_is_exit_code_130() -> None:
    assert run_command(KeyboardInterrupt()) == (130, "Aborted!\n")


def test_a_reader_that_went_away_is_no_error_message() -> None:
    assert run_command(BrokenPipeError(32, "Broken pipe")) == (1, "")


def test_an_error_of_the_program_keeps_its_traceback() -> None:
    @click.group(cls=Commands)
    def group() -> None:
        pass

    @group.command()
    def fail() -> None:
        raise ZeroDivisionError

    assert isinstance(CliRunner().invoke(group, ["fail"]).exception, ZeroDivisionError)


def test_without_torch_train_names_what_to_install() -> None:
    blocked = "import sys; sys.modules['torch'] = None; from toolkit.cli import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", blocked, "train", "--config", "examples/reverse.toml"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == "Error: torch is not installed: pip install 'seq2onnx[train]'\n"
    assert done.returncode == 1


def test_a_module_of_our_own_that_is_missing_is_a_bug() -> None:
    with pytest.raises(ModuleNotFoundError), needs("train"):
        raise ModuleNotFoundError("No module named 'toolkit.nowhere'", name="toolkit.nowhere")


# The picture.


@pytest.mark.parametrize(
    "metrics",
    [
        [STEP],
        [VALIDATION],
        [STEP, VALIDATION],
        [STEP, VALIDATION, AVERAGE],
        [ValidationMetrics(1, 1.0, 1.5, 4.5, {}, best=True, seconds=1.0)],
    ],
    ids=["steps", "validation", "both", "average", "no scores"],
)
def test_every_course_of_a_run_can_be_drawn(metrics: list[Metrics], tmp_path: Path) -> None:
    plot_metrics(metrics, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]
