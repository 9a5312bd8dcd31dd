"""Errors as pictures: SVG to stand inside a page, in the page's own colour of text, the same for the same numbers."""

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from runtime.parity.report import ModuleResult, TensorResult

INK = "#010203"
"""Stands for the colour of the page's text, which CSS may change."""
OWN, RUNTIME, SECOND, LIMIT, BAD = "#8a94a0", "#2b87b5", "#8e6bbf", "#c9782c", "#d1495b"
WIDTH = 6.4
"""Inches."""
DECADES = 60
"""To either side of 1, more than float32 has."""
ROWS = 40
"""Most modules of one picture: it fits on a printed page."""
NAME = 44
"""Most letters of a module's path that are shown, its end."""
STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib; the page shows its own
    "axes.titlesize": 9.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",
}
EARNED = {True: "earned tolerance", False: "float32 would earn"}
"""By whether it is a limit."""
OUT, ODD = "out of tolerance", "NaN or infinite"
LAST = (*EARNED.values(), OUT, ODD)
"""In the legend, after what is drawn."""
CACHE = re.compile(r"present\.(\d+)\.(decoder|encoder)\.(key|value)")
SERIES = {
    ("decoder", "key"): ("self-attention keys", RUNTIME, "o"),
    ("decoder", "value"): ("self-attention values", RUNTIME, "s"),
    ("encoder", "key"): ("cross-attention keys", SECOND, "o"),
    ("encoder", "value"): ("cross-attention values", SECOND, "s"),
}
"""What a cache is called, its colour and its marker."""


class Span(NamedTuple):
    """Ends of a logarithmic axis, and where numbers stand that have no place on it."""

    low: float
    """Zero, and what is less than nothing."""
    high: float
    """NaN and infinity."""

    def place(self, value: float) -> float:
        """Where `value` stands."""
        return min(max(value, self.low), self.high) if math.isfinite(value) else self.high


class Margins(NamedTuple):
    """Inches around the axes. They do not depend on the fonts of the machine, which the page may not have."""

    left: float
    top: float
    right: float = 0.15
    bottom: float = 0.5


class Unit(NamedTuple):
    """An error in units of what is earned."""

    name: str
    value: float
    passed: bool


def span(values: Sequence[float]) -> Span:
    """Whole decades around those of `values` that a logarithm exists of."""
    known = [math.log10(value) for value in values if 0 < value < math.inf]
    low, high = (math.floor(min(known)), math.ceil(max(known))) if known else (-1, 1)
    low = min(max(low, -DECADES), DECADES)
    # A margin above, so that what has no place is seen to be beyond.
    return Span(10.0**low, 10.0 ** (max(min(high, DECADES), low + 1) + 0.4))


def units(error: float, tolerance: float) -> float:
    """`error` in units of `tolerance`; NaN where there is no finite one."""
    if not math.isfinite(tolerance):
        return math.nan
    if tolerance > 0:
        return error / tolerance
    return 0.0 if error == 0 else math.inf


def drift_chart(errors: Sequence[float], own: Sequence[float], tolerance: float, *, exact: bool) -> str:
    """The error at each position of the rollout, the runtime's and PyTorch-float32's, and how far it may be.

    Where not `exact`, the tolerance of float32 is there to compare with, and nothing fails that exceeds it.
    """
    ends = span([*errors, *own, tolerance])
    with _drawing((WIDTH, 3.2)) as figure:
        axes = figure.subplots()
        axes.set(yscale="log", ylim=ends, xlabel="position", ylabel="largest error of a logit")
        _errors(axes, own, ends, OWN, "PyTorch float32")
        _errors(axes, errors, ends, RUNTIME, "this runtime")
        if 0 < tolerance < math.inf:
            axes.axhline(ends.place(tolerance), color=LIMIT, lw=1.2, ls="--", label=EARNED[exact])
        if odd := [place for place, error in enumerate(errors) if not math.isfinite(error)]:
            heights = [ends.high] * len(odd)
            axes.plot(odd, heights, "X", color=BAD, ms=6, label=ODD, clip_on=False)
        first = first_above(errors, tolerance)
        if first is not None and exact:
            axes.plot(first, ends.place(errors[first]), "o", mfc="none", mec=BAD, ms=9, mew=1.4)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _finish(figure, [axes], "y", Margins(left=0.85, top=0.4))
        worst = math.nan if any(map(math.isnan, errors)) else max(errors, default=math.nan)
        about = f"Error at {len(errors)} positions: at most {_shown(worst)}, earned is {_shown(tolerance)}"
        return _svg(figure, "drift", about)


def first_above(errors: Sequence[float], tolerance: float) -> int | None:
    """The first position whose error is a number and above tolerance: `drift_chart` draws a ring around it."""
    return next((place for place, error in enumerate(errors) if tolerance < error < math.inf), None)


def cache_chart(tensors: Sequence[TensorResult], *, exact: bool) -> str:
    """Errors of the caches by graph and layer, in units of what float32 earns; empty where there are none."""
    graphs: dict[str, dict[tuple[str, str], dict[int, Unit]]] = {}
    for tensor in tensors:
        if match := CACHE.fullmatch(tensor.tensor):
            layer, side, half = match.groups()
            series = graphs.setdefault(tensor.graph, {}).setdefault((side, half), {})
            series[int(layer)] = Unit(tensor.tensor, units(tensor.error, tensor.earned), tensor.passed)
    if not graphs:
        return ""
    found = [unit for lines in graphs.values() for series in lines.values() for unit in series.values()]
    ends = span([0.1, 1.0, *(unit.value for unit in found)])
    with _drawing((WIDTH, 3.6)) as figure:
        panels = figure.subplots(1, len(graphs), sharey=True, squeeze=False)[0]
        for axes, (graph, lines) in zip(panels, graphs.items(), strict=True):
            axes.set(yscale="log", ylim=ends, xlabel="layer")
            for key, series in lines.items():
                _layers(axes, key, series, ends)
            axes.axhline(1, color=LIMIT, lw=1.2, ls="--", label=EARNED[exact])
            axes.set_title(graph, pad=9)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        panels[0].set_ylabel("error / earned tolerance")
        _finish(figure, panels, "y", Margins(left=0.85, top=0.95), columns=3)
        off = sum(not unit.passed for unit in found)
        return _svg(
            figure, "caches", f"Errors of {len(found)} caches by graph and layer, {off} of them out of tolerance"
        )


def _layers(axes: Axes, key: tuple[str, str], series: dict[int, Unit], ends: Span) -> None:
    """One kind of cache through the layers, a line that breaks where there is no number."""
    name, colour, marker = SERIES[key]
    heights = [ends.place(unit.value) if math.isfinite(unit.value) else math.nan for unit in series.values()]
    face = "none" if key[1] == "value" else colour
    axes.plot([*series], heights, marker=marker, color=colour, mfc=face, ms=4.5, lw=0.8, label=name)
    for finite, label in ((True, OUT), (False, ODD)):
        bad = [layer for layer, unit in series.items() if not unit.passed and math.isfinite(unit.value) == finite]
        if bad:
            places = [ends.place(series[layer].value) for layer in bad]
            axes.plot(bad, places, "x" if finite else "X", color=BAD, ms=8, label=label, clip_on=False)


def module_charts(modules: Sequence[ModuleResult]) -> list[tuple[str, str]]:
    """Title and picture of the errors inside each graph, in the order of computation, in units of what is earned."""
    graphs: dict[str, list[Unit]] = {}
    for module in modules:
        value = units(module.error, module.tolerance)
        graphs.setdefault(module.graph, []).append(Unit(module.module, value, module.passed))
    ends = span([0.1, 1.0, *(row.value for rows in graphs.values() for row in rows)])
    charts: list[tuple[str, str]] = []
    for graph, rows in graphs.items():
        parts = math.ceil(len(rows) / ROWS)
        size = math.ceil(len(rows) / parts)
        for part in range(parts):
            title = f"{graph}, {part + 1} of {parts}" if parts > 1 else graph
            charts.append((title, _rows_chart(rows[part * size : (part + 1) * size], ends, title, len(charts))))
    return charts


def _rows_chart(rows: Sequence[Unit], ends: Span, title: str, number: int) -> str:
    """One line a module, the first on top."""
    with _drawing((WIDTH, 1.0 + 0.17 * len(rows))) as figure:
        axes = figure.subplots()
        axes.set(xscale="log", xlim=ends, ylim=(len(rows) - 0.4, -0.6), xlabel="error / earned tolerance")
        axes.hlines(range(len(rows)), ends.low, [ends.place(row.value) for row in rows], color=OWN, lw=0.6)
        for good, marker, colour in ((True, "o", RUNTIME), (False, "x", BAD)):
            places = [place for place, row in enumerate(rows) if row.passed == good]
            values = [ends.place(rows[place].value) for place in places]
            label = "within tolerance" if good else OUT
            if places:
                axes.plot(values, places, marker, color=colour, ms=4.5, label=label, clip_on=False)
        for place, row in enumerate(rows):
            if not row.passed:
                axes.annotate(
                    _shown(row.value),
                    (ends.place(row.value), place),
                    xytext=(6, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                )
        axes.axvline(1, color=LIMIT, lw=1.2, ls="--", label=EARNED[True])
        names = [_end(row.name) for row in rows]
        axes.set_yticks(range(len(rows)), names)
        axes.tick_params(axis="y", length=0, labelsize=8)
        for text, row in zip(axes.get_yticklabels(), rows, strict=True):
            text.set_color(INK if row.passed else BAD)
        _finish(figure, [axes], "x", Margins(left=0.2 + 0.06 * max(map(len, names)), top=0.4, right=0.7))
        off = sum(not row.passed for row in rows)
        about = f"{title}: errors of {len(rows)} modules in the order of computation, {off} of them out of tolerance"
        return _svg(figure, f"modules{number}", about)


def _errors(axes: Axes, errors: Sequence[float], ends: Span, colour: str, label: str) -> None:
    """A line that breaks where there is no number."""
    heights = [ends.place(error) if math.isfinite(error) else math.nan for error in errors]
    marker = "o" if len(errors) <= 64 else ""
    axes.plot(range(len(errors)), heights, marker=marker, color=colour, ms=3, lw=1.2, label=label)


def _end(name: str) -> str:
    plain = name.encode("ascii", "backslashreplace").decode()
    return plain if len(plain) <= NAME else f"...{plain[3 - NAME :]}"


def _tick(value: float, _place: int | None) -> str:
    """A power of ten: 0.1, 1e-5."""
    if 0.01 <= value <= 1000:
        return f"{value:g}"
    digit, _, exponent = f"{value:.0e}".partition("e")
    return f"{digit}e{int(exponent)}"


def _shown(value: float) -> str:
    if math.isfinite(value):
        return f"{value:.3g}"
    return "NaN" if math.isnan(value) else "infinite"


@contextmanager
def _drawing(size: tuple[float, float]) -> Iterator[Figure]:
    """A figure in matplotlib's own style, whatever the user has configured."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        yield Figure(figsize=size)


def _finish(figure: Figure, panels: Sequence[Axes], logarithmic: str, margins: Margins, columns: int = 4) -> None:
    """What all pictures share: plain numbers along the logarithmic axis, a faint grid, one legend above."""
    known: dict[str, Artist] = {}
    for axes in panels:
        axis = axes.yaxis if logarithmic == "y" else axes.xaxis
        axis.set_major_formatter(FuncFormatter(_tick))
        axis.set_minor_locator(NullLocator())
        axes.grid(axis="both" if logarithmic == "y" else "x", color=INK, alpha=0.12, lw=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        known |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    labels = sorted(known, key=lambda label: label in LAST)
    figure.legend([known[label] for label in labels], labels, loc="upper left", ncols=columns, frameon=False)
    width, height = figure.get_size_inches()
    figure.subplots_adjust(
        left=margins.left / width,
        right=1 - margins.right / width,
        top=1 - margins.top / height,
        bottom=margins.bottom / height,
        wspace=0.08,
    )


def _svg(figure: Figure, name: str, about: str) -> str:
    """The picture as an element; `name` keeps its ids apart from those of other pictures on the page."""
    mpl.rcParams["svg.hashsalt"] = name
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    _, _, body = file.getvalue().partition("<svg ")
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body)  # the page has the same rule
    body = re.sub(r" font-family: [^;]*;", "", body).replace(INK, "currentColor")
    body = re.sub(r'(\bid="|\burl\(#|\bhref="#)', rf"\g<1>{name}-", body)
    return f'<svg role="img" aria-label="{escape(about)}" {body.strip()}'
