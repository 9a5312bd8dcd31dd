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
    help="Source sentences that the exam asks for, one a line, instead of the model's own.",
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


def search_options(command: Decorated) -> Decorated:
    """How to search. Each option comes under its name in `GenerationConfig`, None where it was not given."""
    above_0 = click.FloatRange(min=0, min_open=True)
    options = [
        click.option(
            "--beam",
            "num_beams",
            type=click.IntRange(min=1),
            metavar="K",
            help="Beams of the search; 1 is greedy.  [default: the bundle's]",
        ),
        click.option(
            "--length-penalty", type=float, metavar="P", help="Above 0 favours long outputs, below 0 short ones."
        ),
        click.option("--min-new-tokens", type=click.IntRange(min=0), metavar="N", help="Fewest tokens of an output."),
        click.option("--max-new-tokens", type=click.IntRange(min=1), metavar="N", help="Most tokens of an output."),
        click.option(
            "--no-repeat-ngram",
            "no_repeat_ngram_size",
            type=click.IntRange(min=0),
            metavar="N",
            help="No N tokens in a row twice in an output; 0 for no such rule.",
        ),
        click.option(
            "--repetition-penalty", type=above_0, metavar="P", help="Above 1 makes tokens less likely to come again."
        ),
        click.option(
            "--sample/--no-sample",
            "do_sample",
            default=None,
            help="Draw tokens at random instead of searching; with --beam above 1, draw the beams.",
        ),
        click.option(
            "--temperature", type=above_0, metavar="T", help="Sampling: below 1 is less random, above 1 more."
        ),
        click.option(
            "--top-k",
            type=click.IntRange(min=0),
            metavar="K",
            help="Sampling: from the K most probable tokens; 0 for all.",
        ),
        click.option(
            "--top-p",
            type=click.FloatRange(0, 1),
            metavar="P",
            help="Sampling: from the most probable tokens that have probability P together.",
        ),
        click.option(
            "--seed", type=click.IntRange(min=0), metavar="N", help="Sampling: the same seed gives the same outputs."
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
