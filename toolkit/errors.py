"""Whatever a user can cause ends in one line and an exit code, for every command in this one place."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import click

from exporters.errors import ExportError
from models.errors import ModelError
from runtime.errors import RuntimeFault

FIRST_PARTY = ("toolkit", "exporters", "models", "runtime")


class Commands(click.Group):
    """A group whose commands all report errors through `one_line_errors`."""

    def invoke(self, ctx: click.Context) -> Any:
        """See `click.Group.invoke`."""
        # An exception, so that what is half-written is removed on the way out.
        signal.signal(signal.SIGTERM, _terminate)
        with one_line_errors():
            return super().invoke(ctx)


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn errors that are no fault of the program into `Error: ...` and exit code 1, Ctrl-C into exit code 130."""
    try:
        yield
    except (ModelError, ExportError, RuntimeFault) as error:
        raise click.ClickException(one_line(error)) from None
    except BrokenPipeError:
        raise  # the reader has gone away, click ends without a word
    except OSError as error:
        known = error.filename is not None and error.strerror
        raise click.ClickException(f"{error.filename}: {error.strerror}" if known else one_line(error)) from None
    except KeyboardInterrupt:
        click.echo("Aborted!", err=True)
        raise click.exceptions.Exit(130) from None


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Turn a failed import of something that comes with the optional dependencies `extra` into what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module in FIRST_PARTY:
            raise
        raise click.ClickException(f"{module} is not installed: pip install 'seq2onnx[{extra}]'") from None


def one_line(error: Exception) -> str:
    """The message of `error` without line breaks."""
    return " ".join(str(error).split())
