"""What the commands show: tables for people, JSON for machines, stages while something takes long."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
import rich.box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from runtime.bundle import Bundle
from runtime.contract import GraphSpec, graph_specs
from runtime.parity import Report

if TYPE_CHECKING:
    from models.trace import TracePoint
    from models.transformer import Transformer


def console() -> Console:
    """Standard output: as wide as the terminal, and wide enough for every table where there is none."""
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False, soft_wrap=False)


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """Yields what to call with the name of each stage as it begins: a spinner on a terminal, lines elsewhere."""
    shown = Console(stderr=True, highlight=False)
    if not shown.is_terminal:
        yield lambda stage: shown.print(stage, markup=False)
        return
    with shown.status("") as status:

        def say(stage: str) -> None:
            status.update(f"{stage} ...")

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


def show_report(report: Report, *, provider: str, tensors: bool) -> None:
    """The rungs, the outputs behind rung 2 if asked for, every problem, and the verdict."""
    out = console()
    rungs = table(f"The ladder, on {provider}", "rung", "verdict", "compared", "found", right=["compared"])
    for rung in report.rungs:
        verdict = "[green]pass[/]" if rung.passed else "[red]FAIL[/]"
        rungs.add_row(f"{rung.rung} {rung.name}", verdict, f"{rung.compared:,}", rung.summary)
    out.print(rungs)
    if tensors:
        numbers = ["PyTorch's error", "error", "ratio", "allowed"]
        errors = table("Distance from the float64 reference", "graph", "output", *numbers, "farthest in", right=numbers)
        for result in report.tensors:
            figures = (
                f"{result.own_error:.2e}",
                f"{result.error:.2e}",
                f"{result.ratio:.2f}",
                f"{result.tolerance:.2e}",
            )
            errors.add_row(result.graph, result.tensor, *figures, result.worst, style=None if result.passed else "red")
        out.print(errors)
    for rung in report.rungs:
        for problem in rung.problems:
            out.print(f"rung {rung.rung}: {problem}", style="red", markup=False)
    out.print("PASS" if report.passed else "FAIL", style="bold green" if report.passed else "bold red")


def report_json(report: Report, bundle: Path, *, provider: str, seed: int | None = None) -> str:
    """`report` for machines."""
    content = {
        "bundle": str(bundle),
        "provider": provider,
        "passed": report.passed,
        "seed": seed,
        **msgspec.to_builtins(report),
        "tensors": [
            {**msgspec.to_builtins(result), "ratio": result.ratio, "passed": result.passed} for result in report.tensors
        ],
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
        "precision": passport.precision,
        "opset, IR": f"{passport.opset}, {passport.ir_version}",
        "written by": ", ".join(f"{name} {version}" for name, version in passport.tools.items()),
        "verified at export": _verdict(bundle),
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
        files.add_row(name, f"{record.size:,}", record.sha256[:16])
    out.print(files)
    for verb, graph in specs.items():
        out.print(_graph_table(verb, passport.roles[verb], graph))


def _verdict(bundle: Bundle) -> str:
    last = bundle.passport.verification
    if last is None:
        return "never"
    rungs = ", ".join(f"{rung} {verdict}" for rung, verdict in last.rungs.items())
    return f"{'passed' if last.passed else 'FAILED'} on {last.provider} with {last.runtime} (rungs {rungs})"


def _graph_table(verb: str, file: str, graph: GraphSpec) -> Table:
    made = table(f"{verb}: {file}", "", "name", "type", "shape")
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
        made.add_row(name, str(shape))
    out.print(made)


def _facts(title: str, facts: dict[str, str]) -> Table:
    made = table(title, "", "")
    made.show_header = False
    for name, value in facts.items():
        made.add_row(name, value)
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
