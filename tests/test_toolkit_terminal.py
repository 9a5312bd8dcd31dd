"""`toolkit run` at a terminal and at the edges of a shell: progress, hints, pipes, closed streams, other encodings."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from runtime_support import TINY

from runtime import GenerationConfig, Translator

COMMAND = [sys.executable, "-m", "toolkit", "run"]
ENVIRONMENT = os.environ | {"TOOLKIT_BUNDLE": str(TINY), "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "80"}
GENEROUS = 60


def read_terminal(master: int, until: bytes = b"") -> bytes:
    """What a terminal has shown when `until` appears, or when the program has let go of it."""
    shown = b""
    deadline = time.monotonic() + GENEROUS
    while time.monotonic() < deadline and not (until and until in shown):
        if not select.select([master], [], [], 0.2)[0]:
            continue
        try:
            part = os.read(master, 4096)
        except OSError:  # Linux: the other side is closed
            break
        if not part:
            break
        shown += part
    return shown


@contextmanager
def started(
    *arguments: str | Path,
    stdin: int | None = subprocess.DEVNULL,
    stdout: int | IO[Any] = subprocess.PIPE,
    stderr: int | IO[Any] = subprocess.PIPE,
) -> "Iterator[subprocess.Popen[bytes]]":
    """The command at work; whatever a test finds, it does not outlive the test."""
    command = [*COMMAND, *map(str, arguments)]
    with subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=ENVIRONMENT) as process:
        try:
            yield process
        finally:
            process.kill()


def run(*arguments: str | Path, **changes: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        env=ENVIRONMENT | changes,
        timeout=GENEROUS,
    )


def test_a_file_has_a_progress_bar_on_the_terminal_and_translations_alone_in_the_output(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(b"a b c\n" * 600)
    master, slave = pty.openpty()
    with started("--file", tmp_path / "input", stderr=slave) as process:
        os.close(slave)
        assert process.stdout is not None
        output = process.stdout.read()
        shown = read_terminal(master)
        assert process.wait(GENEROUS) == 0
    os.close(master)
    assert output == b"c b a\n" * 600
    assert b"/600" in shown


def test_a_file_translated_to_the_terminal_has_no_bar_among_its_lines(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(b"a b c\nd e f\n")
    master, slave = pty.openpty()
    with started("--file", tmp_path / "input", stdout=slave, stderr=slave):
        os.close(slave)
        assert read_terminal(master) == b"c b a\r\nf e d\r\n"
    os.close(master)


def test_somebody_who_types_is_told_how_and_gets_each_line_answered() -> None:
    master, slave = pty.openpty()
    with started(stdin=slave, stdout=slave, stderr=slave) as process:
        os.close(slave)
        assert b"Ctrl-D" in read_terminal(master, until=b"end.")
        os.write(master, b"a b c\n")
        assert b"c b a" in read_terminal(master, until=b"c b a")
        os.write(master, b"\x04")
        read_terminal(master)
        assert process.wait(GENEROUS) == 0
    os.close(master)


def test_a_pipe_instead_of_a_file_is_read_once_and_whole(tmp_path: Path) -> None:
    """With a terminal for the progress bar, whose length a pipe cannot tell beforehand."""
    os.mkfifo(tmp_path / "pipe")
    master, slave = pty.openpty()
    with started("--file", tmp_path / "pipe", stderr=slave) as process:
        os.close(slave)
        (tmp_path / "pipe").write_bytes(b"a b c\nd e f\n")
        output, _ = process.communicate(timeout=GENEROUS)
    os.close(master)
    assert output == b"c b a\nf e d\n"


def test_a_reader_who_goes_away_while_the_writer_is_slow_ends_the_command_without_a_word() -> None:
    """The thread that waits for the next line must not bring the interpreter down."""
    with started(stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"a b c\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"c b a\n"
        process.stdout.close()
        process.stdin.write(b"d e f\n")
        process.stdin.flush()
        assert process.wait(GENEROUS) == 1
        assert process.stderr.read() == b""


def test_a_standard_input_that_is_closed_is_one_line() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND],
        capture_output=True,
        check=False,
        env=ENVIRONMENT,
        timeout=GENEROUS,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == b"Error: there is no standard input: give TEXT or --file"


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-16"])
def test_output_is_utf_8_whatever_the_locale_says(encoding: str) -> None:
    done = run("--json", "猫 é a", PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert "猫 é a" in done.stdout.decode("utf-8")


def test_an_argument_that_is_not_utf_8_is_reported_like_a_line_that_is_not() -> None:
    done = subprocess.run(
        [*COMMAND, b"a b c", b"d \xff", b"d e f"], capture_output=True, check=False, env=ENVIRONMENT, timeout=GENEROUS
    )
    assert (done.returncode, done.stdout) == (1, b"c b a\n\nf e d\n")
    assert done.stderr == b"line 2: not UTF-8: byte 0xff at column 3\n"


def test_the_option_goes_before_the_variable_and_the_variable_before_the_default(tmp_path: Path) -> None:
    assert run("a b c").stdout == b"c b a\n"
    assert run("--bundle", TINY, "a b c", TOOLKIT_BUNDLE=str(tmp_path)).stdout == b"c b a\n"
    without = {name: value for name, value in ENVIRONMENT.items() if name != "TOOLKIT_BUNDLE"}
    done = subprocess.run(
        [*COMMAND, "a"], cwd=tmp_path, capture_output=True, check=False, env=without, timeout=GENEROUS
    )
    assert done.returncode == 1
    assert done.stderr.startswith(b"Error: bundles/zh-en does not exist: expected a bundle")


def test_beams_threads_and_batches_change_nothing_in_a_sure_translation() -> None:
    texts = ["a b c d", "e f g", "h i j k l"]
    expected = b"d c b a\ng f e\nl k j i h\n"
    for options in (["--beam", "1"], ["--beam", "4"], ["--threads", "2"], ["--batch-tokens", "1"]):
        assert run(*options, *texts).stdout == expected


def test_the_search_is_as_wide_as_it_was_asked_to_be(translator: Translator) -> None:
    texts = ["v u", "d i s f h z e z", "h i h g v v h p w m"]
    outputs = {}
    for beam in (1, 2, 4):
        outputs[beam] = run("--beam", str(beam), *texts).stdout.decode().splitlines()
        found = translator.translate(texts, GenerationConfig(num_beams=beam))
        assert outputs[beam] == [translation.text for translation in found]
    assert outputs[1] != outputs[2] != outputs[4], "these texts no longer tell widths apart"
