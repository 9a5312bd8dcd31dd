"""What the commands show: tables for people, JSON for machines, stages while something takes long."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
import rich.box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from runtime.bundle import Bundle, Passport, Quantization
from runtime.contract import GraphSpec, graph_specs
from runtime.parity.report import Report, TokenDifference

if TYPE_CHECKING:
    from models.trace import TracePoint
    from models.transformer import Transformer


def console() -> Console:
    """Standard output: as wide as the terminal, and wide enough for every table where there is none."""
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False, soft_wrap=False)


@contextmanager
def stages(*, lines: bool = True) -> Iterator[Callable[[str], None]]:
    """Yields what to call with the name of each stage as it begins: a spinner on a terminal, `lines` elsewhere."""
    shown = Console(stderr=True, highlight=False)
    if not shown.is_terminal:
        yield lambda stage: shown.print(stage, markup=False) if lines else None
        return
    with shown.status("") as status:

        def say(stage: str) -> None:
            status.update(f"{escape(stage)} ...")

        yield say


@contextmanager
def line_progress(lines: int) -> Iterator[Callable[[int], None]]:
    """A bar over `lines` on standard error; yields what to call with lines done."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("lines"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("translating", total=lines)
        yield lambda done: progress.advance(task, done)


def table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table in the one style that all commands use."""
    made = Table(title=title, title_justify="left", box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def show_report(report: Report, *, tensors: bool) -> None:
    """The rungs, the outputs behind rung 2 if asked for, every problem, and the verdict."""
    out = console()
    rungs = table(
        f"The ladder, at {escape(report.settings[0].setting)}",
        *("rung", "verdict", "compared", "found"),
        right=["compared"],
    )
    for rung in report.rungs:
        verdict = "[green]pass[/]" if rung.passed else "[red]FAIL[/]"
        rungs.add_row(f"{rung.rung} {rung.name}", verdict, f"{rung.compared:,}", escape(rung.summary))
    out.print(rungs)
    if tensors and report.tensors:
        out.print(_tensor_table(report))
    if report.figures:
        out.print(_figure_table(report))
    if len(report.settings) > 1:
        out.print(_setting_table(report))
    for difference in report.differences:
        out.print(_difference_table(difference))
    for rung in report.rungs:
        for problem in rung.problems:
            out.print(f"rung {rung.rung}: {problem}", style="red", markup=False)
    if report.explanation is not None:
        out.print(report.explanation.sentence, markup=False)
    out.print("PASS" if report.passed else "FAIL", style="bold green" if report.passed else "bold red")


def show_failure(report: Report) -> None:
    """Why `report` is no pass, in one line on standard error."""
    failed = next((rung for rung in report.rungs if not rung.passed), None)
    if failed is not None:
        problem = " ".join(next(iter(failed.problems), "nothing was compared").split())
        click.echo(f"FAIL: rung {failed.rung} ({failed.name}): {problem}", err=True)


def _tensor_table(report: Report) -> Table:
    numbers = ["PyTorch's error", "error", "ratio", "earned", "relative"]
    errors = table("Distance from the float64 reference", "graph", "output", *numbers, "farthest in", right=numbers)
    for result in report.tensors:
        figures = (
            f"{result.own_error:.2e}",
            f"{result.error:.2e}",
            f"{result.ratio:.2f}",
            f"{result.earned:.2e}",
            f"{result.relative:.1e}",
        )
        names, worst = map(escape, (result.graph, result.tensor)), escape(result.worst)
        errors.add_row(*names, *figures, worst, style=None if result.passed else "red")
    return errors


def _figure_table(report: Report) -> Table:
    made = table("What a lower precision is judged by", "figure", "found", "limit", "why", right=["found", "limit"])
    for figure in report.figures:
        limit = f"{'>=' if figure.at_least else '<='} {figure.limit:g}"
        name, reason = escape(figure.name), escape(figure.reason)
        made.add_row(name, f"{figure.value:.4g}", limit, reason, style=None if figure.passed else "red")
    return made


def _setting_table(report: Report) -> Table:
    names = list(report.settings[0].rungs)
    made = table(
        "At every setting", "setting", *(f"rung {name}" for name in names), "worst ratio", right=["worst ratio"]
    )
    for row in report.settings:
        verdicts = ["[green]pass[/]" if row.rungs.get(name) else "[red]FAIL[/]" for name in names]
        made.add_row(escape(row.setting), *verdicts, f"{row.worst_ratio:.2f}")
    return made


def _difference_table(item: TokenDifference) -> Table:
    """Both outputs, and both runtimes' most probable tokens where they part."""
    title = f"{item.label}: {item.kind} at token {item.position} (margin {item.margin:.3g}, rounding {item.error:.3g})"
    made = table(escape(title), "", "PyTorch", "this runtime")
    made.add_row("output", escape(item.expected_text), escape(item.found_text))
    for place in range(max(len(item.reference_top), len(item.runtime_top))):
        tops = [
            escape(f"{top[place][0]}  {top[place][1]:.6f}") if place < len(top) else ""
            for top in (item.reference_top, item.runtime_top)
        ]
        made.add_row(f"top {place + 1}", *tops)
    return made


def report_json(
    report: Report,
    bundle: Path,
    *,
    environment: Mapping[str, str],
    seed: int | None = None,
    quantization: Quantization | None = None,
) -> str:
    """`report` for machines. A number that is none comes as null."""
    content = {
        "bundle": str(bundle),
        "quantization": quantization,
        "passed": report.passed,
        "seed": seed,
        "environment": environment,
        **msgspec.to_builtins(report),
        "tensors": [
            {
                **msgspec.to_builtins(result),
                "ratio": result.ratio,
                "relative": result.relative,
                "passed": result.passed,
            }
            for result in report.tensors
        ],
        "differences": [{**msgspec.to_builtins(item), "kind": item.kind} for item in report.differences],
        "figures": [{**msgspec.to_builtins(figure), "passed": figure.passed} for figure in report.figures],
        "settings": [{**msgspec.to_builtins(row), "passed": row.passed} for row in report.settings],
    }
    return msgspec.json.encode(content).decode()


def show_bundle(bundle: Bundle, *, as_json: bool) -> None:
    """The passport and the contract of every graph."""
    passport = bundle.passport
    specs = graph_specs(passport.dims)
    if as_json:
        graphs = {
            verb: {side: [spec._asdict() for spec in getattr(graph, side)] for side in ("inputs", "outputs")}
            for verb, graph in specs.items()
        }
        click.echo(msgspec.json.encode({"passport": passport, "graphs": graphs}))
        return
    out = console()
    facts = {
        "precision": _precision(passport),
        "opset, IR": f"{passport.opset}, {passport.ir_version}",
        "written by": ", ".join(f"{name} {version}" for name, version in passport.tools.items()),
        "last verified": _verdict(bundle),
        **{name: str(value) for name, value in msgspec.to_builtins(passport.dims).items()},
        "pad, start, eos": ", ".join(map(str, passport.special)),
        "search": ", ".join(
            f"{k}={v}" for k, v in msgspec.to_builtins(passport.generation).items() if v not in (None, [])
        ),
        "model": ", ".join(f"{name}={value}" for name, value in passport.model.items()),
    }
    out.print(_facts(str(bundle.folder), facts))
    files = table("Files", "file", "bytes", "sha256", right=["bytes"])
    for name, record in passport.files.items():
        files.add_row(escape(name), f"{record.size:,}", record.sha256[:16])
    out.print(files)
    for verb, graph in specs.items():
        out.print(_graph_table(verb, passport.roles[verb], graph))


def _precision(passport: Passport) -> str:
    """For people: int8, a scale for each row, float32: encoder.layers.0.feed_forward.fc2.weight."""
    found = passport.quantization
    if found is None:
        return passport.precision
    scales = {"rows": "a scale for each row", "blocks": f"a scale for each block of {found.block}"}
    parts = [passport.precision, *([scales[found.scheme]] if found.scheme in scales else [])]
    if found.excluded:
        parts.append(f"float32: {' '.join(found.excluded)}")
    return ", ".join(parts)


def _verdict(bundle: Bundle) -> str:
    last = bundle.passport.verification
    if last is None:
        return "never"
    rungs = ", ".join(f"{rung} {verdict}" for rung, verdict in last.rungs.items())
    where = f"{last.setting}, onnxruntime {last.versions.get('onnxruntime', 'unknown')}"
    return f"{'passed' if last.passed else 'FAILED'} at {where} (rungs {rungs})"


def _graph_table(verb: str, file: str, graph: GraphSpec) -> Table:
    made = table(f"{verb}: {escape(file)}", "", "name", "type", "shape")
    for side, tensors in (("in", graph.inputs), ("out", graph.outputs)):
        for tensor in tensors:
            made.add_row(side, tensor.name, tensor.dtype, "(" + ", ".join(map(str, tensor.shape)) + ")")
    return made


def show_checkpoint(path: Path, model: "Transformer", *, as_json: bool) -> None:
    """The settings and the weights of a checkpoint."""
    settings: dict[str, Any] = msgspec.to_builtins(model.config)
    weights = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    if as_json:
        click.echo(msgspec.json.encode({"model": settings, "weights": weights}))
        return
    out = console()
    size = sum(parameter.numel() for parameter in model.parameters())
    out.print(_facts(str(path), {"parameters": f"{size:,}", **{name: str(value) for name, value in settings.items()}}))
    made = table("Weights", "name", "shape")
    for name, shape in weights.items():
        made.add_row(escape(name), str(shape))
    out.print(made)


def _facts(title: str, facts: dict[str, str]) -> Table:
    made = table(escape(title), "", "")
    made.show_header = False
    for name, value in facts.items():
        made.add_row(escape(name), escape(value))
    return made


def show_shapes(training: Sequence["TracePoint"], inference: Sequence["TracePoint"], *, as_json: bool) -> None:
    """The two tables of shapes."""
    named = {"training": training, "inference": inference}
    if as_json:
        content = {
            name: [{"point": point.point, "shape": point.shape} for point in points] for name, points in named.items()
        }
        click.echo(msgspec.json.encode(content))
        return
    titles = {"training": "Training, teacher forcing", "inference": "Inference, one step with caches"}
    for name, points in named.items():
        made = table(titles[name], "point", "shape")
        for point in points:
            made.add_row(point.point, "scalar" if not point.shape else str(list(point.shape)))
        console().print(made)
