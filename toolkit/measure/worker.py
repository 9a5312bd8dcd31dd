"""An engine in a process of its own, idle until it is asked: thread pools of several engines in one would fight."""

import contextlib
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

from .engines import Entry, Outputs, StepTimes, open_engine
from .machine import forget_peak, peak_memory
from .workload import Workload

PATIENCE = 5.0
"""Seconds that a process has to end by itself."""


class EngineError(Exception):
    """An engine cannot be opened, gave up, or gave what it was not asked for."""


class Lap(NamedTuple):
    """One run of a workload."""

    seconds: float
    outputs: Outputs


class Worker:
    """The engine of `entry`, opened in a new process. Close it, or use it in `with`.

    Raises:
        EngineError: the engine cannot be opened; every method raises it when the engine gives up or its process ends.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        context = multiprocessing.get_context("spawn")  # a fork would inherit what the parent has loaded
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, entry), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._answer()  # when the engine is open
        except BaseException:
            self.close()
            raise

    def prepare(self, workload: Workload) -> None:
        """What `run` will translate from now on; once as a warm-up."""
        self._ask("prepare", workload)

    def run(self) -> Lap:
        """Translate the workload once. Time is taken in the process, so that talking to it does not count."""
        lap: Lap = self._ask("run")
        return lap

    def step_times(self, batch: list[list[int]], *, beams: int, steps: int, starts: int) -> StepTimes:
        """See `BundleEngine.step_times`."""
        times: StepTimes = self._ask("step_times", batch, beams, steps, starts)
        return times

    def peak(self) -> int | None:
        """Most bytes of memory that the process has held since its workload was prepared, if the system tells."""
        peak: int | None = self._ask("peak")
        return peak

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(PATIENCE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, verb: str, *arguments: Any) -> Any:
        try:
            self._connection.send((verb, arguments))
        except OSError:
            raise self._ended() from None
        return self._answer()

    def _answer(self) -> Any:
        try:
            good, value = self._connection.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if not good:
            raise EngineError(f"{self.entry.name}: {value}")
        return value

    def _ended(self) -> EngineError:
        self._process.join(PATIENCE)
        return EngineError(f"{self.entry.name}: its process has ended with exit code {self._process.exitcode}")


class _Server:
    """The other end."""

    def __init__(self, entry: Entry) -> None:
        self._engine: Any = open_engine(entry)
        self._workload: Workload | None = None

    def prepare(self, workload: Workload) -> None:
        forget_peak()
        self._workload = workload
        self._engine.translate(workload)

    def run(self) -> Lap:
        if self._workload is None:
            raise ValueError("there is no workload yet")
        began = time.perf_counter()
        outputs = self._engine.translate(self._workload)
        return Lap(time.perf_counter() - began, outputs)

    def step_times(self, batch: list[list[int]], beams: int, steps: int, starts: int) -> StepTimes:
        times: StepTimes = self._engine.step_times(batch, beams, steps, starts)
        return times

    def peak(self) -> int | None:
        return peak_memory()


def _serve(connection: Connection, entry: Entry) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    os.environ.update({"OMP_NUM_THREADS": str(entry.threads), **dict(entry.environment)})
    # The parent has closed its end, or is gone: there is nobody left to tell.
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            server = _Server(entry)
        except Exception as error:  # an engine's own; the parent decides what becomes of it
            connection.send((False, described(error)))
            return
        connection.send((True, None))
        while True:
            verb, arguments = connection.recv()
            try:
                answer = (True, getattr(server, verb)(*arguments))
            except Exception as error:  # an engine's own; the parent decides what becomes of it
                answer = (False, described(error))
            connection.send(answer)


def described(error: BaseException) -> str:
    """`error` in one line, for people."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    return " ".join(str(error).split()) or type(error).__name__
