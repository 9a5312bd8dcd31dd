"""Lines of text from arguments, a file or standard input, in windows that are translated together."""

import os
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple

WINDOW = 512
"""Most lines that are translated together. Sorting by length works inside a window."""


class Line(NamedTuple):
    """One line of input, without its end."""

    number: int
    """1 is the first."""
    content: bytes


def numbered(contents: Iterable[bytes]) -> Iterator[Line]:
    r"""Lines of `contents`, ended by \n or \r\n; other characters that look like line ends belong to the text."""
    for number, content in enumerate(contents, 1):
        yield Line(number, content.removesuffix(b"\n").removesuffix(b"\r"))


def windows(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """`lines`, `WINDOW` at a time."""
    window: list[Line] = []
    for line in lines:
        window.append(line)
        if len(window) == WINDOW:
            yield window
            window = []
    if window:
        yield window


def live_windows(stream: BinaryIO) -> Iterator[list[Line]]:
    """Lines as they arrive on `stream`: a slow writer gets each line answered, a fast one fills windows."""
    arrived: queue.Queue[Line | OSError | None] = queue.Queue(2 * WINDOW)
    # The thread may still wait for a line when the program ends, and Python cannot close a stream that is being read.
    private = os.fdopen(os.dup(stream.fileno()), "rb")

    def read() -> None:
        try:
            with private:
                for line in numbered(private):
                    arrived.put(line)
            arrived.put(None)
        except OSError as error:
            arrived.put(error)

    threading.Thread(target=read, daemon=True).start()
    while window := _arrived(arrived):
        yield window


def _arrived(lines: "queue.Queue[Line | OSError | None]") -> list[Line]:
    """What is there already, but for the first line, which is waited for; nothing at the end."""
    window: list[Line] = []
    while not window or (len(window) < WINDOW and not lines.empty()):
        line = lines.get()
        if line is None:
            lines.put(None)  # for the call after this one
            break
        if isinstance(line, OSError):
            raise line
        window.append(line)
    return window
