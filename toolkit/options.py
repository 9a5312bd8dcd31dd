"""Options that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

DEFAULT_BUNDLE = "bundles/zh-en"

Decorated = Callable[..., Any]

bundle_option = click.option(
    "--bundle",
    envvar="TOOLKIT_BUNDLE",
    default=DEFAULT_BUNDLE,
    show_default=f"$TOOLKIT_BUNDLE, else {DEFAULT_BUNDLE}",
    type=click.Path(path_type=Path),
    help="The bundle to translate with.",
)

sentences_option = click.option(
    "--sentences",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Source sentences that the exam asks for, one a line, instead of the checkpoint's own.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def runtime_options(command: Decorated) -> Decorated:
    """What to verify at: --runtime, --optimization, --threads, each of them several times."""
    options = [
        click.option(
            "--runtime",
            "runtimes",
            type=click.Choice(["ort-cpu", "ort-cuda", "openvino", "reference"]),
            multiple=True,
            help="What runs the graphs; the first of several is the one to be deployed.  [default: ort-cpu]",
        ),
        click.option(
            "--optimization",
            "optimizations",
            type=click.Choice(["none", "basic", "extended", "all"]),
            multiple=True,
            help="How much ONNX Runtime may rewrite the graphs.  [default: all, then each of the others]",
        ),
        click.option(
            "--threads",
            "threads",
            type=click.IntRange(min=1),
            multiple=True,
            metavar="N",
            help="Threads to compute with.  [default: the CPUs at hand, then one]",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def provider_options(command: Decorated) -> Decorated:
    """Where to compute: --provider, --threads, --allow-fallback."""
    options = [
        click.option(
            "--provider", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where to compute."
        ),
        click.option(
            "--threads",
            type=click.IntRange(min=1),
            metavar="N",
            help="Threads to compute with.  [default: the CPUs at hand]",
        ),
        click.option(
            "--allow-fallback", is_flag=True, help="Take the CPU where the provider cannot be had, instead of refusing."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command
