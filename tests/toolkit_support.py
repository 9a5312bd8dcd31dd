"""Commands as from a shell, in this process."""

import signal
from pathlib import Path

from click.testing import CliRunner, Result

from toolkit.cli import main


def toolkit(*arguments: str | Path) -> Result:
    """What `toolkit` does with `arguments`."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        return CliRunner().invoke(main, [str(argument) for argument in arguments])
    finally:
        signal.signal(signal.SIGTERM, handler)


def refusal(*arguments: str | Path) -> str:
    """The one line by which a command refuses."""
    done = toolkit(*arguments)
    assert done.exit_code == 1
    assert done.stdout == ""
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("Error: ")
    return line
