"""Ctrl-C and SIGTERM as a polite request: finish what is half done, then stop."""

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO_SECONDS = 0.5
"""A launcher passes the terminal's Ctrl-C on to processes that have had it already; nobody means it twice so soon."""


class Interruption:
    """Within its `with` block the first signal is noted for the loop, which asks by a call; a second Ctrl-C aborts.

    Until the loop calls for the first time there is nothing to finish, and a signal ends the program at once.

    Args:
        notify: Called when the first signal is noted. It runs inside the signal handler: no printing.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self.signal: signal.Signals | None = None
        """What came, if anything."""
        self._notify = notify
        self._asked = False
        self._noted_at = 0.0

    def __call__(self) -> bool:
        """Whether to stop now."""
        self._asked = True
        return self.signal is not None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self._asked and self.signal is None:
            self.signal, self._noted_at = signal.Signals(number), time.monotonic()
            self._notify()
        elif number == signal.SIGINT:
            if self.signal is None or time.monotonic() - self._noted_at >= ECHO_SECONDS:
                raise KeyboardInterrupt
        elif self.signal is None:
            raise SystemExit(128 + number)
