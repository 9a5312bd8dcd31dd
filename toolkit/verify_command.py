"""`toolkit verify`: prove that a bundle computes what PyTorch computes."""

import secrets
from pathlib import Path
from typing import Any

import click

from .errors import needs
from .options import json_option, provider_options


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
@provider_options
@json_option
def verify_command(
    *,
    bundle: Path,
    checkpoint: Path | None,
    seed: int | None,
    provider: Any,
    threads: int | None,
    allow_fallback: bool,
    as_json: bool,
) -> None:
    """Let the BUNDLE sit an exam and print a verdict; exit code 1 when it fails.

    Without --checkpoint the bundle sits the exam that PyTorch wrote when it was exported, which needs no torch.
    """
    from runtime.bundle import Bundle
    from runtime.verify import sit_bundle

    from .render import report_json, show_report, stages

    if seed is not None and checkpoint is None:
        raise click.UsageError("--seed belongs to the fresh exam of --checkpoint")
    opened = Bundle(bundle)
    exam = None
    with stages() as say:
        if checkpoint is not None:
            with needs("export"):
                from exporters.export import fresh_exam
            seed = secrets.randbelow(2**32) if seed is None else seed
            say("PyTorch writes a fresh exam")
            exam = fresh_exam(checkpoint, opened, seed)
        say("sitting the exam")
        report = sit_bundle(opened, exam=exam, provider=provider, threads=threads, allow_fallback=allow_fallback)
    if as_json:
        click.echo(report_json(report, bundle, seed=seed))
    else:
        show_report(report, tensors=True)
        if seed is not None:
            click.echo(f"fresh exam of seed {seed}: repeat it with --seed {seed}")
    if not report.passed:
        raise click.exceptions.Exit(1)
