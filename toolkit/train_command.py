"""`toolkit train`: a run from a configuration file, with a progress bar, that can be interrupted and resumed."""

import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .errors import needs
from .interruption import Interruption

if TYPE_CHECKING:
    from models.training import Metrics


@click.command("train", epilog="Example: toolkit train --config examples/reverse.toml --set training.epochs=20")
@click.option(
    "--config", "path", required=True, metavar="FILE", type=click.Path(path_type=Path), help="The settings, in TOML."
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override one setting; may be given many times. VALUE is TOML, quotes around plain text may be left out.",
)
@click.option("--resume", is_flag=True, help="Go on with the run in the output folder.")
@click.option("--json", "as_json", is_flag=True, help="Print metrics on standard output, one JSON object a line.")
def train_command(*, path: Path, overrides: tuple[str, ...], resume: bool, as_json: bool) -> None:
    """Train a model on parallel text as FILE says.

    Ctrl-C and SIGTERM save the run, which --resume goes on with; a second Ctrl-C aborts at once.
    """
    with needs("train"):
        import msgspec

        from models.training import read_metrics

        from .config import CONFIG_FILE, load_run_config
        from .plots import LOSS_CURVE, plot_metrics
        from .train import processes, train
        from .train_display import Display, summary
    config = load_run_config(path, overrides)
    folder = Path(config.output.folder)
    main_process = processes().is_main_process
    display = Display(config.training.epochs, bar=not (as_json and sys.stdout.isatty()), quiet=not main_process)

    def observe(metrics: "Metrics") -> None:
        if as_json:
            click.echo(msgspec.json.encode(metrics))
        display.show(metrics)

    with display, Interruption(display.stopping) as interruption:
        progress = train(config, resume=resume, observe=observe, should_stop=interruption, say=display.say)
    metrics = read_metrics(folder)
    stopped = progress.epoch < config.training.epochs
    if stopped:
        command = shlex.join(["toolkit", "train", "--config", str(folder / CONFIG_FILE), "--resume"])
        display.say(f"stopped after step {progress.step:,}, the state is saved; go on with: {command}")
    if main_process and metrics:
        plot_metrics(metrics, folder / LOSS_CURVE)
    if stopped:
        # With several processes the signal may have reached another one.
        raise click.exceptions.Exit(128 + (interruption.signal or signal.SIGINT))
    for line in summary(metrics, progress, folder):
        display.say(line)
