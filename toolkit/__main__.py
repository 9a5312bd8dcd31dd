"""The program itself: the console script, and what `accelerate launch -m toolkit` starts in every process."""

import signal
import sys
from types import FrameType
from typing import NoReturn


def run() -> None:
    """Run the command line; Ctrl-C is no traceback, also while the commands are still being imported."""
    interrupted = False

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        from .cli import main

        main(prog_name="toolkit")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:
        # An extension module that is interrupted while it loads reports an ImportError of its own.
        if interrupted:
            sys.exit(130)
        raise


if __name__ == "__main__":
    run()
