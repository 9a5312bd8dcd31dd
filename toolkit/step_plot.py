"""Times of decoding steps as a picture."""

from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from models.files import replacing

from .measure.bench import BenchReport

COLOURS = ("#0b6e99", "#c25700", "#5a7d2a", "#8e6bbf", "#9aa5b1")


def plot_steps(report: BenchReport, path: Path) -> None:
    """Draw step time over past length and over batch into the PNG file `path`."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    past, batch = figure.subplots(1, 2)
    threads = list(dict.fromkeys(row.threads for row in report.rows))
    past.set_title(f"A step, by tokens before it ({threads[0]} threads)", loc="left")
    for row, colour in zip([row for row in report.rows if row.threads == threads[0]], cycle(COLOURS), strict=False):
        lengths = range(1, len(row.step_seconds) + 1)
        past.plot(lengths, [1000 * value for value in row.step_seconds], color=colour, label=f"batch {row.batch}")
    past.set_xlabel("tokens in the cache")
    batch.set_title("A step, by size of the batch", loc="left")
    for count, colour in zip(threads, cycle(COLOURS), strict=False):
        rows = [row for row in report.rows if row.threads == count]
        times = [1000 * row.step_median_seconds for row in rows]
        batch.plot([row.batch for row in rows], times, "o-", color=colour, label=f"{count} threads")
    batch.set_xlabel("sentences")
    for axes in (past, batch):
        _finish(axes)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def _finish(axes: Axes) -> None:
    axes.set_ylabel("milliseconds")
    axes.set_ylim(bottom=0)
    axes.grid(color="#e4e7eb")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
