"""What a process that translates holds in memory, and how long it takes from its start to its first translation."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

HERE = Path(__file__).parent
IDLE = ("-c", "import sys; sys.stdout.write('\\n'); sys.stdout.flush(); sys.stdin.read()")
"""A Python that does nothing: what is above it belongs to the engine."""


class Script(NamedTuple):
    """Arguments of Python, for a program that writes one line when it has translated, and waits."""

    arguments: Sequence[str]
    environment: tuple[tuple[str, str], ...] = ()


class Memory(msgspec.Struct):
    """Bytes of one process."""

    resident: int
    """All of it, what is mapped from files included."""
    private: int
    """What would be free if the process ended."""


class Start(msgspec.Struct):
    """One run of a script."""

    seconds: float
    """From the start of the process to its line."""
    memory: Memory
    text: str


class ScriptError(Exception):
    """A script did not translate."""


def seq2onnx_script(bundle: Path, threads: int, text: str) -> Script:
    """The shortest program around this runtime."""
    return Script([str(HERE / "first_seq2onnx.py"), str(bundle), str(threads), text])


def ctranslate2_script(
    model: Path, pieces: Path, threads: int, text: str, environment: tuple[tuple[str, str], ...]
) -> Script:
    """The shortest program around CTranslate2."""
    arguments = [str(HERE / "first_ctranslate2.py"), str(model), str(pieces), str(threads), text]
    return Script(arguments, environment)


def start(script: Script, threads: int) -> Start:
    """Run `script` until it has written its line, and look at its memory.

    Raises:
        ScriptError: it ended without a line.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), **dict(script.environment)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed has its bytecode
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *script.arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        line = process.stdout.readline() if process.stdout else ""
        seconds = time.perf_counter() - began
        if not line:
            _, errors = process.communicate()
            raise ScriptError((errors.strip().splitlines() or ["it wrote nothing"])[-1])
        found = psutil.Process(process.pid).memory_full_info()
        process.communicate()
    return Start(seconds, Memory(found.rss, found.uss), line.rstrip("\n"))


def starts(
    scripts: Mapping[str, Script], threads: int, rounds: int, say: Callable[[str], None] = lambda _: None
) -> dict[str, list[Start]]:
    """Run `scripts` in turn, `rounds` times after one that fills the caches of the file system."""
    found: dict[str, list[Start]] = {name: [] for name in scripts}
    for turn in range(rounds + 1):
        for name, script in scripts.items():
            say(f"start to first translation: {f'round {turn} of {rounds}' if turn else 'warm-up'}, {name}")
            one = start(script, threads)
            if turn:
                found[name].append(one)
    return found
