"""Files and folders that are either the old ones or the new ones, never half of each."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to: it takes the place of `path` in one move, or is removed on failure."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def emerging(target: Path) -> Iterator[Path]:
    """Yield a folder beside `target` to write to: it takes the place of `target` in the end, or vanishes on failure."""
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    # One name, so that whoever writes finds and clears what a killed one left.
    workshop = target.with_name(f".{target.name}.partial")
    shutil.rmtree(workshop, ignore_errors=True)
    folder = workshop / "new"
    folder.mkdir(parents=True)
    try:
        yield folder
        if target.exists():
            target.rename(workshop / "old")
        folder.rename(target)
    finally:
        if (workshop / "old").exists() and not target.exists():  # interrupted between the two moves
            (workshop / "old").rename(target)
        shutil.rmtree(workshop, ignore_errors=True)
