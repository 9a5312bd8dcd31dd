"""The course of a training run as a picture."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from models.files import replacing
from models.training import Metrics, StepMetrics, ValidationMetrics

LOSS_CURVE = "loss-curve.png"
SCORE_NAMES = {"bleu": "BLEU", "chrf": "chrF"}
TRAINING, VALIDATION, SECOND = "#9aa5b1", "#0b6e99", "#c25700"


def plot_metrics(metrics: Sequence[Metrics], path: Path) -> None:
    """Draw loss, and scores on a second panel where there are any, over epochs into the PNG file `path`."""
    steps = [line for line in metrics if isinstance(line, StepMetrics)]
    every = [line for line in metrics if isinstance(line, ValidationMetrics)]
    scores = list(every[0].scores) if every else []
    figure = Figure(figsize=(8, 7 if scores else 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2 if scores else 1, sharex=True, squeeze=False)[:, 0]
    _plot_loss(panels[0], steps, every)
    if scores:
        _plot_scores(panels[1], every, scores)
    for axes in panels:
        axes.grid(color="#e4e7eb")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    panels[-1].set_xlabel("epoch")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].set_xlim(left=0)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def _plot_loss(axes: Axes, steps: Sequence[StepMetrics], every: Sequence[ValidationMetrics]) -> None:
    axes.set_title("Loss", loc="left")
    axes.set_ylabel("nats per token")
    axes.plot([line.epoch for line in steps], [line.loss for line in steps], color=TRAINING, lw=1, label="training")
    _plot_validation(axes, every, [line.loss for line in every], VALIDATION, "validation")


def _plot_scores(axes: Axes, every: Sequence[ValidationMetrics], scores: Sequence[str]) -> None:
    axes.set_title("Scores on the held-out text", loc="left")
    axes.set_ylabel("score")
    for name, colour in zip(scores, cycle((VALIDATION, SECOND)), strict=False):
        values = [line.scores[name] for line in every]
        _plot_validation(axes, every, values, colour, SCORE_NAMES.get(name, name))
    best = [line for line in every if line.best][-1:]
    axes.plot(
        [line.epoch for line in best],
        [line.scores[scores[0]] for line in best],
        "o",
        ms=11,
        mfc="none",
        mec="black",
        label="best checkpoint",
    )


def _plot_validation(
    axes: Axes, every: Sequence[ValidationMetrics], values: Sequence[float], colour: str, label: str
) -> None:
    """A line through the epochs; averages of several epochs' weights stand apart as stars."""
    points = list(zip(every, values, strict=True))
    single = [(line.epoch, value) for line, value in points if line.averaged == 1]
    averages = [(line.epoch, value) for line, value in points if line.averaged > 1]
    axes.plot(*zip(*single, strict=True), "o-", color=colour, ms=4, label=label) if single else None
    if averages:
        axes.plot(*zip(*averages, strict=True), "*", color=colour, ms=11, label=f"{label}, averaged weights")
