"""The benchmark: every contestant in turn, in one run; `make bench` starts it, docs/performance.md explains it."""

import datetime
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import click
import msgspec
from builds import ROOT
from contests import CONTESTS
from measurement import SECTIONS, Measurement
from results import Results, markdown, verdicts

from runtime.environment import environment
from runtime.session import Provider
from runtime.threads import available_cpus
from toolkit.measure.worker import described
from toolkit.render import stages

FOLDER = ROOT / "benchmarks/results"


def parse_only(_context: click.Context, _option: click.Parameter, given: str) -> list[str]:
    """Names of contests and sections with commas between; all of them where there is none."""
    known = [*CONTESTS, *SECTIONS]
    names = [name.strip() for name in given.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}: expected some of {', '.join(known)}")
    return names or known


@click.command()
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--provider", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--only", default="", callback=parse_only, metavar="NAME,...", help=f"Of {', '.join(CONTESTS)}, ...")
@click.option("--results", "folder", type=click.Path(path_type=Path), default=FOLDER, show_default="benchmarks/results")
def main(*, rounds: int, threads: int, provider: Provider, only: Sequence[str], folder: Path) -> None:
    """Measure this runtime against others, print the table and write it into a folder."""
    _require(provider, threads)
    results = Results(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        provider=provider,
        threads=threads,
        rounds=rounds,
        environment=environment() | {name: version(name) for name in ("ctranslate2", "transformers")},
    )
    stopped: BaseException | None = None
    with stages() as say:
        try:
            Measurement(results, only, say).run()
        except (Exception, KeyboardInterrupt) as error:  # what half an hour has found so far is not thrown away
            stopped = error
    everything = set(only) == {*CONTESTS, *SECTIONS} and stopped is None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (provider if everything else f"{provider}-partial")
    page = markdown(results)
    path.with_suffix(".md").write_text(page, "utf-8")
    encoded = msgspec.json.encode({**msgspec.to_builtins(results), "targets": verdicts(results)})
    path.with_suffix(".json").write_bytes(msgspec.json.format(encoded, indent=1) + b"\n")
    click.echo(page)
    click.echo(f"written to {path}.md and {path}.json", err=True)
    if isinstance(stopped, KeyboardInterrupt):
        raise click.Abort
    if stopped is not None:
        raise click.ClickException(f"it ended early: {described(stopped)}")
    if results.wrong:
        raise click.ClickException("; ".join(results.wrong))


def _require(provider: Provider, threads: int) -> None:
    """Refuse what would be measured wrongly, in one line."""
    if provider == "cuda":
        import ctranslate2  # not above: the contestants' processes import this module before their variables are set

        if not ctranslate2.get_cuda_device_count():
            raise click.ClickException("PROVIDER=cuda needs a GPU, and CTranslate2 sees none")
    if threads > available_cpus():
        raise click.ClickException(f"{threads} threads on {available_cpus()} CPUs would wait for each other")


if __name__ == "__main__":
    main()
