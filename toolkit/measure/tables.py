"""What `toolkit bench` found, for people."""

from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from ..render import table
from .bench import BenchReport, Row

UNKNOWN = "unknown"


def bench_tables(report: BenchReport) -> Iterator[Table]:
    """The bundle's own figures, then those of its rivals where there are any."""
    search = "greedy" if report.beams == 1 else f"{report.beams} beams"
    where = report.environment.get("processor", report.environment["machine"])
    numbers = (
        *("threads", "batch", "first token ms", "step ms", "95 % of steps ms", "tokens/s", "sentences/s"),
        *("peak MB", "of bandwidth"),
    )
    made = table(
        escape(f"{report.bundle}: {report.precision}, {search}, median of {report.rounds} rounds, {where}"),
        *numbers,
        right=numbers,
    )
    for row in report.rows:
        made.add_row(*_figures(row))
    yield made
    if report.against:
        yield _versus_table(report)


def _figures(row: Row) -> Iterator[str]:
    yield from (str(row.threads), str(row.batch))
    for seconds in (row.first_token_seconds, row.step_median_seconds, row.step_p95_seconds):
        yield f"{1000 * seconds:.2f}"
    yield from (f"{row.tokens_per_second:,.1f}", f"{row.sentences_per_second:,.2f}")
    yield UNKNOWN if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 1e6:,.0f}"
    yield UNKNOWN if row.roofline_share is None else f"{row.roofline_share:.0%}"


def _versus_table(report: BenchReport) -> Table:
    numbers = ("threads", "batch", "its tokens/s", "ratio", "ratio in each round")
    made = table("Against others: above 1 this runtime is faster", "engine", *numbers, right=numbers)
    for row in report.against:
        rounds = f"{min(row.ratio.rounds):.2f} .. {max(row.ratio.rounds):.2f}"
        figures = (f"{row.tokens_per_second:,.1f}", f"{row.ratio.ratio:.2f}", rounds)
        made.add_row(row.engine, str(row.threads), str(row.batch), *figures)
    return made
