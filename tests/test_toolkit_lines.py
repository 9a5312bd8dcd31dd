"""Lines in windows: what arrives together is translated together, what comes late is not waited for."""

import os
import threading
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.lines import WINDOW, Line, live_windows, numbered, windows

GENEROUS = 30


class Pipe:
    """A pipe with its reading end as a stream."""

    def __init__(self) -> None:
        reading, self._writing = os.pipe()
        self.stream: BinaryIO = os.fdopen(reading, "rb")

    def write(self, content: bytes) -> None:
        os.write(self._writing, content)

    def close(self) -> None:
        os.close(self._writing)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.stream.close()


@given(st.binary(max_size=200))
def test_lines_end_at_newlines_and_nowhere_else(content: bytes) -> None:
    lines = list(numbered(BytesIO(content)))
    expected = content.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    assert [line.number for line in lines] == list(range(1, len(expected) + 1))
    assert [line.content for line in lines] == [part.removesuffix(b"\r") for part in expected]


def test_only_one_carriage_return_belongs_to_the_end_of_a_line() -> None:
    assert list(numbered([b"a\r\r\n", b"\r\n", b"b\rc"])) == [Line(1, b"a\r"), Line(2, b""), Line(3, b"b\rc")]


@pytest.mark.parametrize("count", [0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_windows_are_full_but_for_the_last_and_lose_nothing(count: int) -> None:
    lines = [Line(number, b"x") for number in range(1, count + 1)]
    found = list(windows(lines))
    assert [line for window in found for line in window] == lines
    assert all(len(window) == WINDOW for window in found[:-1])
    assert all(found)


@pytest.mark.parametrize("count", [0, 1, WINDOW, 5 * WINDOW + 7])
def test_everything_that_is_written_arrives_once_and_in_order(tmp_path: Path, count: int) -> None:
    (tmp_path / "input").write_bytes(b"".join(b"line %d\n" % number for number in range(1, count + 1)))
    with (tmp_path / "input").open("rb") as stream:
        found = list(live_windows(stream))
    assert [line for window in found for line in window] == [
        Line(number, b"line %d" % number) for number in range(1, count + 1)
    ]
    assert all(0 < len(window) <= WINDOW for window in found)


def test_a_line_is_handed_on_before_the_next_one_comes(pipe: Pipe) -> None:
    arriving = live_windows(pipe.stream)
    for number, text in enumerate((b"first", b"second", b"third"), 1):
        pipe.write(text + b"\n")
        assert next(arriving) == [Line(number, text)]
    pipe.write(b"no end of line")
    pipe.close()
    assert list(arriving) == [[Line(4, b"no end of line")]]


def test_a_line_is_not_handed_on_by_halves(pipe: Pipe) -> None:
    arriving = live_windows(pipe.stream)
    pipe.write(b"half a ")
    timer = threading.Timer(0.2, lambda: pipe.write(b"line\n"))
    timer.start()
    assert next(arriving) == [Line(1, b"half a line")]
    timer.join(GENEROUS)
    pipe.close()
    assert list(arriving) == []


def test_the_end_can_be_asked_for_more_than_once(pipe: Pipe) -> None:
    pipe.close()
    assert list(live_windows(pipe.stream)) == []
    assert list(live_windows(pipe.stream)) == []


def test_a_stream_that_cannot_be_read_is_an_error_and_no_endless_wait(tmp_path: Path) -> None:
    with (tmp_path / "output").open("wb") as stream, pytest.raises(OSError, match="Bad file descriptor"):
        list(live_windows(stream))


def test_the_caller_s_stream_stays_open(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(b"a\n")
    with (tmp_path / "input").open("rb") as stream:
        list(live_windows(stream))
        assert not stream.closed
        os.fstat(stream.fileno())
