"""`toolkit verify`: prove that a bundle computes what PyTorch computes."""

import secrets
from pathlib import Path
from typing import Any

import click

from .errors import needs
from .options import json_option, provider_options, sentences_option


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
@provider_options
@json_option
def verify_command(
    *,
    bundle: Path,
    checkpoint: Path | None,
    seed: int | None,
    sentences: Path | None,
    provider: Any,
    threads: int | None,
    allow_fallback: bool,
    as_json: bool,
) -> None:
    """Let the BUNDLE sit an exam and print a verdict; exit code 1 when it fails.

    Without --checkpoint the bundle sits the exam that PyTorch wrote when it was exported, which needs no torch.
    """
    from runtime.bundle import Bundle
    from runtime.session import OrtBackend
    from runtime.verify import sit_bundle

    from .render import report_json, show_report, stages

    if checkpoint is None and (seed is not None or sentences is not None):
        raise click.UsageError("--seed and --sentences belong to the fresh exam of --checkpoint")
    opened = Bundle(bundle)
    backend = OrtBackend(opened, provider=provider, threads=threads, allow_fallback=allow_fallback)
    if backend.provider != provider:
        click.echo(f"{provider} cannot be used here: running on {backend.provider}", err=True)
    exam = None
    with stages() as say:
        if checkpoint is not None:
            with needs("export"):
                from exporters.export import fresh_exam
            seed = secrets.randbelow(2**32) if seed is None else seed
            say("PyTorch writes a fresh exam")
            exam = fresh_exam(checkpoint, opened, seed, sentences)
        say("sitting the exam")
        report = sit_bundle(opened, backend, exam)
    if as_json:
        click.echo(report_json(report, bundle, provider=backend.provider, seed=seed))
    else:
        show_report(report, provider=backend.provider, tensors=True)
        if seed is not None:
            click.echo(f"fresh exam of seed {seed}: repeat it with --seed {seed}")
    if not report.passed:
        raise click.exceptions.Exit(1)
