"""`toolkit verify`: prove that a bundle computes what PyTorch computes."""

import math
import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .errors import needs
from .options import json_option, runtime_options, sentences_option

if TYPE_CHECKING:
    from runtime.backend import Backend
    from runtime.bundle import Bundle
    from runtime.exam import Exam
    from runtime.verify import Setting


def parse_thresholds(_context: click.Context, _option: click.Parameter, given: Sequence[str]) -> dict[str, float]:
    """NAME=VALUE, several times."""
    found = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = math.nan
        if not math.isfinite(found[name]):
            raise click.BadParameter(f"{text!r} is not NAME=VALUE with a finite number for a value")
    return found


@click.command("verify")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="Let PyTorch write a fresh, random exam about this checkpoint instead of replaying the recorded one.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), metavar="N", help="Of the fresh exam.  [default: random, and printed]"
)
@sentences_option
@runtime_options
@click.option(
    "--threshold",
    "thresholds",
    multiple=True,
    callback=parse_thresholds,
    metavar="NAME=VALUE",
    help="Another limit for a bundle of lower precision; docs/parity.md has the table.",
)
@click.option("--explain", "explained", is_flag=True, help="Find the first module inside the graphs that is off.")
@click.option(
    "--report", "page", type=click.Path(path_type=Path), metavar="FILE", help="Write all of it to one HTML file."
)
@click.option("--record", "recorded", is_flag=True, help="Write the verdict into the passport of the bundle.")
@json_option
def verify_command(
    *,
    bundle: Path,
    checkpoint: Path | None,
    seed: int | None,
    sentences: Path | None,
    runtimes: Sequence[Any],
    optimizations: Sequence[Any],
    threads: Sequence[int],
    thresholds: dict[str, float],
    explained: bool,
    page: Path | None,
    recorded: bool,
    as_json: bool,
) -> None:
    """Let the BUNDLE sit an exam and print a verdict; exit code 1 when it fails.

    Without --checkpoint the bundle sits the exam that PyTorch wrote when it was exported, which needs no torch.

    The ladder is climbed at the first --runtime, --optimization and --threads, which should be those that will be
    deployed; its last rung repeats it at all the others.
    """
    from runtime.bundle import EXAM_ROLE, Bundle
    from runtime.environment import environment
    from runtime.exam import load_exam
    from runtime.verify import examine, record

    from .render import report_json, show_failure, show_report, stages

    if checkpoint is None and not (seed is None and sentences is None):
        raise click.UsageError("--seed and --sentences belong to the fresh exam of --checkpoint")
    _check_options(runtimes, optimizations, threads)
    write_report = None if page is None else _report_writer(page, bundle)
    opened = Bundle(bundle)
    _check_thresholds(opened.passport.precision, thresholds)
    settings = chosen_settings(runtimes, optimizations, threads)
    with stages() as say:
        if checkpoint is None:
            exam = load_exam(opened.path(EXAM_ROLE))
        else:
            say("PyTorch writes a fresh exam")
            seed = secrets.randbelow(2**32) if seed is None else seed
            exam = _fresh_exam(checkpoint, opened, seed, sentences, explain_all=explained)
        report = examine(opened, settings, exam, thresholds=thresholds, opener=_open, say=say)
        if explained and report.rungs[0].passed:
            say("looking into the graphs")
            report.explanation = _explain(opened, exam, settings[0], failed=not report.passed)
    if recorded:
        record(opened, report, "recorded" if seed is None else f"fresh, seed {seed}")
    if write_report is not None:
        write_report(page, report, opened, environment(), _again(seed))
    if as_json:
        click.echo(report_json(report, bundle, environment=environment(), seed=seed))
    else:
        show_report(report, tensors=True)
        if seed is not None:
            click.echo(f"fresh exam of seed {seed}: repeat it with --seed {seed}")
    if not report.passed:
        show_failure(report)
        raise click.exceptions.Exit(1)


def _check_options(runtimes: Sequence[str], optimizations: Sequence[str], threads: Sequence[int]) -> None:
    """An option that no runtime has would be ignored."""
    if optimizations and runtimes and not any(runtime.startswith("ort-") for runtime in runtimes):
        others = " and ".join(dict.fromkeys(runtimes))
        raise click.UsageError(f"--optimization belongs to ONNX Runtime, not to {others}")
    if threads and runtimes and set(runtimes) == {"reference"}:
        raise click.UsageError("--threads belongs to ONNX Runtime and OpenVINO, not to reference")


def _check_thresholds(precision: str, given: dict[str, float]) -> None:
    """Before anything runs. A precision that has no thresholds is no fault of the command line."""
    from runtime.errors import ThresholdError
    from runtime.parity.gate import thresholds

    thresholds(precision, {})
    try:
        thresholds(precision, given)
    except ThresholdError as error:
        raise click.UsageError(str(error)) from None


def chosen_settings(runtimes: Sequence[Any], optimizations: Sequence[Any], threads: Sequence[int]) -> "list[Setting]":
    """Every combination, the first of each before all; where only one was asked for, what is usually tried with it."""
    from runtime.verify import Setting, default_sweep

    counts: Sequence[int | None] = threads or [None]
    asked = [
        Setting(runtime, level, count)
        for runtime in runtimes or ["ort-cpu"]
        for level in optimizations or ["all"]
        for count in counts
    ]
    # A runtime without levels says the same for each.
    settings = list({str(setting): setting for setting in reversed(asked)}.values())[::-1]
    return [*settings, *default_sweep(settings[0])] if len(settings) == 1 else settings


def _open(bundle: "Bundle", setting: "Setting") -> "Backend[Any]":
    """What runs `bundle` at `setting`; runtimes that are not deployed with every bundle are extras."""
    if setting.runtime == "reference":
        with needs("export"):
            from exporters.onnx_reference import reference_backend
        return reference_backend(bundle)
    if setting.runtime == "openvino":
        with needs("openvino"):
            from runtime.openvino_backend import openvino_backend
        return openvino_backend(bundle, setting.threads)
    from runtime.verify import open_backend

    return open_backend(bundle, setting)


def _fresh_exam(checkpoint: Path, bundle: "Bundle", seed: int, sentences: Path | None, *, explain_all: bool) -> "Exam":
    with needs("export"):
        from exporters.export import fresh_exam
    return fresh_exam(checkpoint, bundle, seed, sentences, explain_all=explain_all)


def _explain(bundle: "Bundle", exam: "Exam", setting: "Setting", *, failed: bool) -> Any:
    with needs("export"):
        from exporters.explain import explain
    explanation = explain(bundle, exam, setting.optimization, failed=failed)
    if setting.runtime != "ort-cpu":
        # Other runtimes show no values from inside a graph.
        explanation.sentence = f"In ONNX Runtime on the CPU: {explanation.sentence}"
    return explanation


def _report_writer(page: Path, bundle: Path) -> Any:
    """Before anything is computed: what is missing should be said first."""
    with needs("report"):
        from .report import check_place, write_report
    check_place(page, bundle)
    return write_report


def _again(seed: int | None) -> str:
    """The command line that repeats this verification."""
    words = ["toolkit", *sys.argv[1:]]
    if seed is not None and "--seed" not in words:
        words += ["--seed", str(seed)]
    return shlex.join(words)
