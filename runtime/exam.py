"""The exam that PyTorch writes and a runtime sits: inputs and reference answers, as arrays and JSON.

The reference is the model in float64. Beside each answer stands PyTorch-float32's own distance from it, from which the
tolerance of a runtime is earned. Answers are rounded to float32, and both distances are measured from these.
"""

import lzma
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any, get_origin

import msgspec
import numpy as np

from .backend import Array
from .contract import VERBS
from .decoding import SpecialIds
from .errors import ExamError
from .formats import ARRAYS, EXAM, check_format
from .generation import GenerationConfig

FORMAT = "seq2onnx-exam-2"


class GraphCase(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One call of one verb. Tensor names are the contract's."""

    verb: str
    label: str
    """The sizes, for people: "B=2 S=7 T=4"."""
    inputs: dict[str, Array] = {}
    reference: dict[str, Array] = {}
    """Every output. Of a grown cache the new position alone is kept: `(B, H, 1, D)`; the rest must equal the input."""
    own_error: dict[str, float]
    """Largest absolute distance of PyTorch-float32 from the reference, by output."""
    columns: Array | None = None
    """`(C,)`: the tokens whose logits are kept, `(B, T, C)`; None where all are. Other ones in each case."""
    modules: dict[str, Array] = {}
    """For explanations: what the modules inside give, by path, such as `decoder.layers.0.self_attention.out_proj`."""
    module_errors: dict[str, float] = {}
    """PyTorch-float32's largest distance from these."""


class RolloutCase(msgspec.Struct, kw_only=True):
    """Steps on the runtime's own caches, from that of no tokens on, fed with given tokens."""

    label: str
    source_ids: Array
    """`(B, S)`"""
    source_mask: Array
    """`(B, S)`"""
    target_ids: Array
    """`(B, N)`: what is fed, the start token first."""
    columns: Array
    """`(B, N, C)`: the reference's C most probable tokens after each."""
    reference: Array
    """`(B, N, C)`: their logits."""
    own_error: list[float]
    """PyTorch-float32's largest absolute distance at each of the N positions, rolled out the same way."""


class TokenCase(msgspec.Struct, kw_only=True):
    """One real sentence searched by the reference."""

    label: str
    text: str
    source_ids: list[int]
    """What the tokenizer makes of `text`."""
    config: GenerationConfig
    ids: list[int]
    """The best output."""
    score: float
    translation: str
    """What the tokenizer makes of `ids`."""
    top_ids: Array
    """`(N, C)`: the reference's most probable tokens at each of `ids`, the first of them leading."""
    top_log_probs: Array
    """`(N, C)`: their log-probabilities after the same `ids` so far."""


class CacheCheck(msgspec.Struct, kw_only=True):
    """Rung 1, in PyTorch-float64 alone: prefill and steps against one full forward, at every prefix length."""

    prefixes: int
    """How many prefix lengths were compared."""
    error: float
    """Largest distance between the two, relative to the largest logit."""


class Exam(msgspec.Struct, kw_only=True):
    """Everything that PyTorch has to say about a model."""

    format: str = FORMAT
    seed: int
    tools: dict[str, str]
    """Versions of what wrote it."""
    special: SpecialIds
    """The ids by which the reference searches."""
    cache: CacheCheck
    graphs: list[GraphCase]
    rollouts: list[RolloutCase]
    tokens: list[TokenCase]


def save_exam(exam: Exam, folder: Path) -> None:
    """Write `exam` to `folder`: structure as JSON; beside it all arrays end to end, one row of numbers for each type.

    Vectors that several cases share are stored once: the compression sees all of them together.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[Array]] = {}
    ends: dict[str, int] = {}

    def refer(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            kind = str(value.dtype)
            start = ends.get(kind, 0)
            parts.setdefault(kind, []).append(value.ravel())
            ends[kind] = start + value.size
            return _Place(kind, start, list(value.shape))
        raise TypeError(f"cannot store {type(value).__name__}")

    text = msgspec.json.encode(exam, enc_hook=refer)
    (folder / EXAM).write_bytes(text + b"\n")
    with zipfile.ZipFile(folder / ARRAYS, "w") as file:
        for kind, arrays in parts.items():
            entry = zipfile.ZipInfo(f"{kind}.npy")  # without the time of day: the same exam, the same bytes
            entry.compress_type = zipfile.ZIP_LZMA
            with file.open(entry, "w") as member:
                np.lib.format.write_array(member, np.concatenate(arrays), allow_pickle=False)


def load_exam(folder: Path) -> Exam:
    """The exam in `folder`.

    Raises:
        ExamError: it is missing, damaged or of another format.
    """
    try:
        text = (folder / EXAM).read_bytes()
        with (folder / ARRAYS).open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except FileNotFoundError as error:
        raise ExamError(f"no exam in {folder}: {Path(error.filename).name} is missing") from None
    except (
        OSError,
        ValueError,
        KeyError,
        EOFError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
    ) as error:
        raise ExamError(f"the exam in {folder} is damaged: {error}") from None

    def resolve(kind: type, value: Any) -> Any:
        if get_origin(kind) is np.ndarray:
            place = msgspec.convert(value, _Place)
            stored = arrays.get(place.type, np.empty(0))[place.start :][: math.prod(place.shape)]
            if min(place.start, *place.shape, 0) == 0 and stored.size == math.prod(place.shape):
                return stored.reshape(place.shape)
        raise ValueError(f"expected an array of {ARRAYS}, got {value!r}")

    try:
        check_format(text, FORMAT, folder / EXAM, ExamError)
        exam = msgspec.json.decode(text, type=Exam, dec_hook=resolve)
    except ExamError:
        raise
    except (msgspec.DecodeError, ValueError) as error:
        raise ExamError(f"{folder / EXAM} is damaged: {error}") from None
    if problems := _contradictions(exam):
        raise ExamError(f"the exam in {folder} is damaged: {'; '.join(problems)}")
    return exam


class _Place(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Where an array lies among those of its type."""

    type: str
    start: int
    shape: list[int]


def _contradictions(exam: Exam) -> list[str]:
    """Answers that do not fit their questions."""
    problems = []
    for case in exam.graphs:
        if case.verb not in VERBS:
            problems.append(f"{case.label} is about {case.verb!r}, expected one of {', '.join(VERBS)}")
        if case.own_error.keys() != case.reference.keys():
            problems.append(f"{case.verb} {case.label} has answers and errors of different outputs")
        if case.modules.keys() != case.module_errors.keys():
            problems.append(f"{case.verb} {case.label} has answers and errors of different modules")
    for rollout in exam.rollouts:
        places = (*rollout.target_ids.shape, len(rollout.own_error))
        if rollout.columns.shape != rollout.reference.shape or rollout.reference.shape[:2] + places[1:2] != places:
            problems.append(f"rollout {rollout.label} has answers for other positions than it feeds")
    for tokens in exam.tokens:
        places = (len(tokens.ids), max((*tokens.top_ids.shape[1:], 2)))  # two make a margin
        if not tokens.top_ids.shape == tokens.top_log_probs.shape == places:
            problems.append(f"{tokens.label} has most probable tokens for other positions than its output")
    return problems
