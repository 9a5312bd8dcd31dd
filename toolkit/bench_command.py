"""`toolkit bench`: how fast a bundle translates here."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .errors import needs, one_line
from .options import json_option

if TYPE_CHECKING:
    from .measure.bench import BenchReport


def parse_batches(_context: click.Context, _option: click.Parameter, given: str) -> list[int]:
    """Numbers above 0 with commas between, none of them twice."""
    return sorted(set(_numbers(given)))


def parse_tokens(_context: click.Context, _option: click.Parameter, given: str | None) -> tuple[int, int] | None:
    """SOURCE,TARGET."""
    if given is None:
        return None
    numbers = _numbers(given)
    if len(numbers) != 2 or numbers[0] < 2 or numbers[1] < 2:
        raise click.BadParameter(f"{given!r} is not SOURCE,TARGET, two numbers of at least 2")
    return numbers[0], numbers[1]


def _numbers(given: str) -> list[int]:
    try:
        numbers = [int(part) for part in given.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise click.BadParameter(f"{given!r} is not numbers above 0 with commas between")
    return numbers


@click.command("bench")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--batch",
    "batches",
    default="1,8,32",
    show_default=True,
    callback=parse_batches,
    metavar="N,N,...",
    help="Sentences in a batch.",
)
@click.option(
    "--threads",
    "threads",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="N",
    help="Threads to compute with; several times for a sweep.  [default: the CPUs at hand]",
)
@click.option(
    "--beam", "beams", type=click.IntRange(min=1), default=1, show_default=True, metavar="K", help="1 is greedy."
)
@click.option(
    "--tokens",
    callback=parse_tokens,
    metavar="SOURCE,TARGET",
    help="Tokens of random sources, and of outputs, which are forced to that length.  "
    "[default: 32,64, or as many as the model has positions]",
)
@click.option(
    "--file",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Translate the lines of FILE instead, outputs as long as they come.",
)
@click.option(
    "--provider", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where to compute."
)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=5, show_default=True, metavar="N", help="After a warm-up."
)
@click.option(
    "--against",
    "rivals",
    type=click.Choice(["torch", "ctranslate2", "transformers"]),
    multiple=True,
    help="Let another engine take turns with this runtime; may be given several times.",
)
@click.option(
    "--reference",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="For --against: the model that BUNDLE was exported from, as that engine reads it.",
)
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw step times into a PNG file.")
@json_option
def bench_command(
    *,
    bundle: Path,
    batches: Sequence[int],
    threads: Sequence[int],
    beams: int,
    tokens: tuple[int, int] | None,
    file: Path | None,
    provider: Any,
    rounds: int,
    rivals: Sequence[Any],
    reference: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure how fast BUNDLE translates on this machine: time to the first token, of a step, tokens and sentences a
    second, memory, and how much of the machine's memory bandwidth a step makes use of.

    Every engine runs in a process of its own and is idle while another one runs.

    \b
    toolkit bench bundles/zh-en
    toolkit bench bundles/zh-en --batch 1,32 --threads 1 --threads 2 --file input.txt --plot steps.png
    """  # noqa: D205, D301 - click reads the backspace, not its name
    if file and tokens:
        raise click.UsageError("give --tokens or --file, not both")
    if bool(rivals) != bool(reference):
        raise click.UsageError("--against and --reference FOLDER belong together")
    draw = None if plot is None else _plotter(plot)
    from runtime.threads import available_cpus

    from .measure.bench import Plan, bench
    from .measure.worker import EngineError
    from .render import stages

    counts = list(dict.fromkeys(threads)) or [available_cpus()]
    engines = list(dict.fromkeys(rivals))
    plan = Plan(bundle, batches, counts, provider, beams, tokens, file, rounds, engines, reference)
    try:
        with stages(lines=False) as say:
            report = bench(plan, say)
    except EngineError as error:
        raise click.ClickException(one_line(error)) from None
    if draw is not None:
        draw(report, plot)
    _show(report, as_json=as_json)


def _plotter(plot: Path) -> Any:
    """Before anything is measured: what is missing should be said first."""
    if plot.is_dir() or not plot.parent.is_dir():
        raise click.BadParameter(f"{plot} cannot be written: {plot.parent} must be a folder, {plot} must be none")
    with needs("report"):
        from .step_plot import plot_steps
    return plot_steps


def _show(report: "BenchReport", *, as_json: bool) -> None:
    import msgspec

    from .measure.tables import bench_tables
    from .render import console

    if as_json:
        click.echo(msgspec.json.encode(report))
        return
    for made in bench_tables(report):
        console().print(made)
