"""The commands by name. Each parses, calls one function and shows the result."""

import io
import sys

import click

from .bench_command import bench_command
from .errors import Commands
from .export_command import export_command
from .import_command import import_command
from .inspect_command import inspect_command
from .run_command import run_command
from .train_command import train_command
from .verify_command import verify_command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="seq2onnx", message="seq2onnx %(version)s")
def main() -> None:
    """Train, export, run, verify and measure sequence-to-sequence Transformers on ONNX Runtime."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # as texts are read, whatever the locale says


for command in (
    train_command,
    import_command,
    export_command,
    run_command,
    verify_command,
    inspect_command,
    bench_command,
):
    main.add_command(command)
