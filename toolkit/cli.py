"""The commands. Each parses, calls one function and shows the result."""

import sys

import click
from pathlib import Path


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Train, export, run and verify sequence-to-sequence Transformers on ONNX Runtime."""


@main.command()
@click.option("--config", "config_path", required=True, type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True)
@click.option("--resume", is_flag=True)
def train(config_path: Path, overrides: tuple[str, ...], resume: bool) -> None:
    from .config import load_run_config
    from .train import train as t

    t(
        load_run_config(config_path, overrides),
        resume=resume,
        observe=lambda m: print(m, flush=True),
        should_stop=lambda: False,
        say=print,
    )
