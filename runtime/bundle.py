"""A bundle is one folder with a passport, `bundle.json`, that says what every file is and how to know it again."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from .contract import GRAPH_FILES, Dims
from .decoding import SpecialIds
from .errors import BundleError
from .formats import ARRAYS, EXAM, check_format
from .generation import GenerationConfig
from .tokenizer import TOKENIZER_FILES

PASSPORT = "bundle.json"
WEIGHTS = "weights.bin"
WEIGHTS_ROLE = "weights"
EXAM_ROLE = "exam"
ROLES = (*GRAPH_FILES, WEIGHTS_ROLE, EXAM_ROLE)
"""What every bundle has."""
COMPANIONS = ("config.json", "generation_config.json")
"""By which transformers and Optimum open the folder; the runtime itself reads the passport."""
FORMAT = "seq2onnx-bundle-4"


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to know a file again."""

    size: int
    sha256: str


class Verification(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the last recorded verification found, and where it ran."""

    passed: bool
    setting: str
    """Runtime, optimisation level and threads."""
    versions: dict[str, str]
    """Of what computed."""
    rungs: dict[str, str]
    """Verdict of each rung: "pass", "fail", or "not tried" of the last one where there was a single setting."""
    exam: str = ""
    """Which exam was sat: "recorded", or "fresh, seed N"; empty where the record does not tell."""
    settings: list[str] = []
    """All that were tried, `setting` first."""
    thresholds: dict[str, float | None] = {}
    """Of a lower precision: the limits in force. Here and in `figures` None stands for what is no finite number."""
    figures: dict[str, float | None] = {}
    """Of a lower precision: what was found."""


class Quantization(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the weights of a lower precision are stored."""

    scheme: str
    """What shares a scale: "rows", "blocks"; "none" where numbers are only shorter."""
    block: int | None
    """Most weights of a block."""
    excluded: list[str]
    """Weights that stayed float32, by their names in the model: they would spoil the words, or cannot be rounded."""


class Passport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of `bundle.json`."""

    format: str
    roles: dict[str, str]
    """What each part of the runtime opens: role to path in the folder."""
    files: dict[str, FileRecord]
    dims: Dims
    special: SpecialIds
    generation: GenerationConfig
    """How to search when the caller does not say."""
    model: dict[str, Any]
    """Settings of the model that was exported."""
    opset: int
    ir_version: int
    precision: str
    tools: dict[str, str]
    """Versions of what wrote the bundle."""
    quantization: Quantization | None = None
    """Of a lower precision."""
    verification: Verification | None = None


class Bundle:
    """An opened bundle: its folder and its passport, every file compared with its record.

    Raises:
        BundleError: no such folder, no passport, or files that do not match; all of these are listed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.passport = read_passport(folder)
        problems = [
            *_contradictions(self.passport),
            *_unrecorded(folder, self.passport),
            *(problem for name, record in self.passport.files.items() if (problem := _mismatch(folder, name, record))),
            *_strange_companions(folder, self.passport),
        ]
        if problems:
            raise BundleError(
                f"{folder} does not match its passport: {'; '.join(problems)}. Export it again, or copy it whole"
            )

    def path(self, role: str) -> Path:
        """Where the file or folder of `role` lies."""
        try:
            return self.folder / self.passport.roles[role]
        except KeyError:
            raise BundleError(f"{self.folder / PASSPORT} names no file for {role!r}") from None


def read_passport(folder: Path) -> Passport:
    """The passport of the bundle in `folder`, its files not looked at."""
    path = folder / PASSPORT
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise BundleError(f"{folder} {what}: expected a bundle, a folder that 'toolkit export' wrote")
    try:
        content = path.read_bytes()
        check_format(content, FORMAT, path, BundleError)
        return msgspec.json.decode(content, type=Passport)
    except BundleError:
        raise
    except FileNotFoundError:
        raise BundleError(f"{folder} is not a bundle: it has no {PASSPORT}") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise BundleError(f"{path} is damaged: {error}") from None


def write_passport(folder: Path, passport: Passport) -> None:
    """Write `passport` into `folder`, in one move."""
    temporary = folder / f".{PASSPORT}"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(passport), indent=2) + b"\n")
    temporary.replace(folder / PASSPORT)


def record_files(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Size and digest of each of `names`, paths in `folder` with forward slashes."""
    return {name: FileRecord((folder / name).stat().st_size, _digest(folder / name)) for name in sorted(names)}


def _contradictions(passport: Passport) -> list[str]:
    """What no exporter writes: parts that are missing or not among the recorded files, ids outside the vocabulary."""
    problems = [f"it names no file for {role!r}" for role in ROLES if role not in passport.roles]
    problems += [
        f"{role} is {path!r}, which is not among its files"
        for role, path in passport.roles.items()
        if not any(PurePosixPath(name).is_relative_to(path) for name in passport.files)
    ]
    problems += [
        f"the {name} id is {value}, the vocabulary has {passport.dims.vocab_size} entries"
        for name, value in passport.special._asdict().items()
        if not 0 <= value < passport.dims.vocab_size
    ]
    longest, positions = passport.generation.max_length or 0, passport.dims.max_positions
    if longest > positions:
        problems.append(f"outputs have up to {longest} tokens, the model {positions} positions")
    return problems


def _unrecorded(folder: Path, passport: Passport) -> list[str]:
    """What the runtime reads, and would not notice a change of: a user's own files need no record."""
    exam = passport.roles.get(EXAM_ROLE)
    needed = [WEIGHTS, *([] if exam is None else [str(PurePosixPath(exam) / name) for name in (EXAM, ARRAYS)])]
    present = [name for name in TOKENIZER_FILES if (folder / name).exists()]
    return [f"{name} is not among its files" for name in [*needed, *present] if name not in passport.files]


def _strange_companions(folder: Path, passport: Passport) -> Iterator[str]:
    """Where the files by which others open the folder say something else than the passport."""
    ours = {
        "pad_token_id": passport.special.pad,
        "decoder_start_token_id": passport.special.start,
        "eos_token_id": passport.special.eos,
    }
    for name in COMPANIONS:
        try:
            theirs = msgspec.json.decode((folder / name).read_bytes(), type=dict[str, Any])
        except OSError:
            continue
        except msgspec.DecodeError as error:
            yield f"{name} is damaged: {error}"
            continue
        yield from (
            f"{name}: {key} is {theirs[key]}, the passport says {value}"
            for key, value in ours.items()
            if theirs.get(key, value) != value
        )


def _mismatch(folder: Path, name: str, record: FileRecord) -> str | None:
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        return f"{name} lies outside the folder"
    path = folder / name
    if not path.is_file():
        return f"{name} is missing"
    size = path.stat().st_size
    if size != record.size:
        return f"{name} has {size} bytes, expected {record.size}"
    return None if _digest(path) == record.sha256 else f"{name} has other contents than recorded"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
