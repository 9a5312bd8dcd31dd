"""Every JSON file that is written here names its format: a file of another version is told apart from a damaged one."""

from pathlib import Path

import msgspec

from .errors import RuntimeFault

EXAM, ARRAYS = "exam.json", "exam.npz"
"""The files of an exam: its structure, and its numbers."""


class _Head(msgspec.Struct):
    """What all versions have."""

    format: str


def check_format(content: bytes, expected: str, path: Path, fault: type[RuntimeFault]) -> None:
    """Refuse `content`, read from `path`, that is of another format.

    Raises:
        fault: with both formats.
        msgspec.DecodeError: it is not JSON, or names no format.
    """
    found = msgspec.json.decode(content, type=_Head).format
    if found != expected:
        raise fault(f"{path}: format is {found!r}, this version reads {expected!r}: export the bundle again")
