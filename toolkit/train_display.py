"""What a training run looks like while it runs, on standard error."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from models.training import BEST, Metrics, StepMetrics, ValidationMetrics
from models.training_state import Progress as RunProgress

from .plots import LOSS_CURVE, SCORE_NAMES


class Display:
    """A progress bar with what happens above it on a terminal, plain lines elsewhere.

    Args:
        epochs: How many the run has.
        bar: False for lines alone, as where standard output goes to the same terminal.
        quiet: Show nothing, as all processes but the first do.
    """

    def __init__(self, epochs: int, *, bar: bool, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._epochs = epochs
        self._stopping = False
        self._progress = Progress(
            TaskProgressColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            transient=True,
            expand=True,
            redirect_stdout=False,
            speed_estimate_period=3600,
            disable=not (bar and sys.stderr.isatty() and self._console.is_interactive),
        )
        self._task = self._progress.add_task("preparing", total=None, left="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, line: str, style: str = "") -> None:
        """Show one line, above the bar if there is one."""
        self._console.print(Text(line, style), soft_wrap=True)

    def show(self, metrics: Metrics) -> None:
        """Move the bar; a validation is a line of its own."""
        if isinstance(metrics, ValidationMetrics):
            best = metrics.best
            self.say(validation_text(metrics) + ("  (best so far)" if best else ""), "green" if best else "")
        else:
            self._move(metrics)

    def stopping(self) -> None:
        """Show that the run is about to stop. Takes a lock and prints nothing, so that a signal handler may call it."""
        self._stopping = True
        self._progress.update(self._task, description="stopping after this step, Ctrl-C again to abort")

    def _move(self, metrics: StepMetrics) -> None:
        # The first total starts the bar's clock: where a resumed run begins says nothing about its speed.
        self._progress.update(self._task, total=self._epochs, completed=metrics.epoch, left="left")
        if not self._stopping:
            self._progress.update(self._task, description=step_line(metrics, self._epochs))


def summary(metrics: Sequence[Metrics], progress: RunProgress, folder: Path) -> list[str]:
    """What has come of the run in `folder`, and what to do with it."""
    best = [line for line in metrics if isinstance(line, ValidationMetrics) and line.best][-1:]
    checkpoint = folder / BEST
    return [
        *(f"best: {validation_text(line)}" for line in best),
        f"checkpoint: {checkpoint}, after {duration(progress.seconds)} of training",
        f"loss curve: {folder / LOSS_CURVE}",
        f"next: {shlex.join(['toolkit', 'export', str(checkpoint), f'bundles/{folder.name}'])}",
    ]


def step_line(metrics: StepMetrics, epochs: int) -> str:
    """Where training is, how fast, and how well it goes."""
    epoch = min(int(metrics.epoch) + 1, epochs)
    return (
        f"epoch {epoch}/{epochs}  step {metrics.step:,}  {metrics.tokens_per_second:,.0f} tokens/s  "
        f"loss {metrics.loss:.3f}"
    )


def validation_text(metrics: ValidationMetrics) -> str:
    """One validation: of which epoch, loss, perplexity and scores."""
    what = f"average of {metrics.averaged} epochs" if metrics.averaged > 1 else f"epoch {metrics.epoch:.0f}"
    scores = "".join(f", {SCORE_NAMES.get(name, name)} {value:.2f}" for name, value in metrics.scores.items())
    return f"{what}: loss {metrics.loss:.3f}, perplexity {metrics.perplexity:,.2f}{scores}"


def duration(seconds: float) -> str:
    """`seconds` as people say it: two units at most."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes_left} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
