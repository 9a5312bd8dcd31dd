"""The program itself: the console script, and what `accelerate launch -m toolkit` starts in every process."""

import sys


def run() -> None:
    """Run the command line; Ctrl-C while the commands are still being imported is no traceback either."""
    try:
        from .cli import main

        main(prog_name="toolkit")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run()
