"""`toolkit bench`: one bundle at several sizes of batch and numbers of threads, alone and against other engines."""

import shutil
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from runtime.bundle import Passport, read_passport
from runtime.environment import environment
from runtime.session import Provider
from runtime.tokenizer import open_tokenizer

from .engines import VOCABULARIES, EngineName, Entry
from .machine import read_bandwidth, step_bytes
from .race import Ratio, Score, race, ratio
from .worker import EngineError, Worker, described
from .workload import Workload, random_workload, sentences_workload

OURS: EngineName = "seq2onnx"
COMPUTE_TYPES = {"fp32": "float32", "fp16": "float16", "int8": "int8", "int4": "int8"}
"""Of CTranslate2, by the precision of the bundle: its closest."""
DEFAULT_TOKENS = (32, 64)
"""Of a source and of an output, as far as the model has positions."""
LONGEST = 64
"""Most steps that are timed one by one where outputs are as long as they come."""


class Plan(NamedTuple):
    """What is measured."""

    bundle: Path
    batches: Sequence[int]
    threads: Sequence[int]
    provider: Provider
    beams: int
    tokens: tuple[int, int] | None
    """Of a source and of an output; None for the default, or where there is a file."""
    file: Path | None
    rounds: int
    rivals: Sequence[EngineName]
    reference: Path | None


class Row(msgspec.Struct):
    """What was found at one number of threads and one size of batch."""

    threads: int
    batch: int
    sentences: int
    first_token_seconds: float
    """Median time from source ids to the first token of a batch."""
    step_median_seconds: float
    step_p95_seconds: float
    tokens_per_second: float
    """In the median round, EOS not counted."""
    sentences_per_second: float
    peak_memory_bytes: int | None
    """Of the process, None where the system does not tell."""
    roofline_share: float | None
    """Bytes of weights that a step reads, over what memory can deliver in that time; None where that is not known."""
    step_seconds: list[float]
    """Of each step: the first of them has the prompt behind it, each later one a token more."""


class Versus(msgspec.Struct):
    """Another engine on the same work."""

    engine: str
    threads: int
    batch: int
    tokens_per_second: float
    ratio: Ratio
    """How much faster this runtime is."""


class BenchReport(msgspec.Struct):
    """All that `toolkit bench` found, and where."""

    bundle: str
    precision: str
    provider: str
    beams: int
    rounds: int
    environment: dict[str, str]
    memory_bandwidth: dict[int, float] | None
    """Bytes a second, by number of threads; None on another device than the CPU."""
    rows: list[Row]
    against: list[Versus]


def bench(plan: Plan, say: Callable[[str], None]) -> BenchReport:
    """Measure what `plan` says.

    Raises:
        EngineError: an engine cannot do it.
        RuntimeFault: the bundle, its tokenizer or a sentence is not what it should be.
        OSError: a file cannot be read.
    """
    passport = read_passport(plan.bundle)
    workloads = {batch: planned_workload(plan, passport, batch) for batch in plan.batches}
    report = BenchReport(
        bundle=str(plan.bundle),
        precision=passport.precision,
        provider=plan.provider,
        beams=plan.beams,
        rounds=plan.rounds,
        environment=environment(),
        memory_bandwidth={} if plan.provider == "cpu" else None,
        rows=[],
        against=[],
    )
    with _rival_folders(plan, passport, say) as folders:
        for threads in plan.threads:
            bandwidth = None
            if report.memory_bandwidth is not None:
                say(f"memory bandwidth with {threads} threads")
                bandwidth = report.memory_bandwidth[threads] = read_bandwidth(threads)
            with _workers(plan, folders, threads, say) as workers:
                for batch, workload in workloads.items():
                    row, versus = _measure(plan, workers, workload, (threads, batch), say)
                    needed = step_bytes(passport)
                    if bandwidth is not None and needed is not None:
                        row.roofline_share = needed / bandwidth / row.step_median_seconds
                    report.rows.append(row)
                    report.against += versus
    return report


def planned_workload(plan: Plan, passport: Passport, batch: int) -> Workload:
    """Random sources, or the sentences of the file, in batches of `batch`."""
    name = f"batch {batch}"
    if plan.file is None:
        positions = passport.dims.max_positions
        source, target = plan.tokens or (min(DEFAULT_TOKENS[0], positions), min(DEFAULT_TOKENS[1], positions - 1))
        return random_workload(name, passport, source=source, tokens=target, batch=batch, beams=plan.beams)
    tokenizer = open_tokenizer(plan.bundle)
    try:
        lines = [line.strip() for line in plan.file.read_text("utf-8").split("\n")]
    except UnicodeDecodeError as error:
        raise EngineError(f"{plan.file} is not UTF-8: {error}") from None
    rows = [tokenizer.encode(line) for line in lines if line]
    if not rows:
        raise EngineError(f"{plan.file} holds no sentence")
    return sentences_workload(name, rows, batch=batch, beams=plan.beams)


@contextmanager
def _rival_folders(plan: Plan, passport: Passport, say: Callable[[str], None]) -> Iterator[dict[EngineName, Path]]:
    """What each rival reads; CTranslate2's is made of a folder of transformers, unless it is its own already."""
    with ExitStack() as stack:
        folders: dict[EngineName, Path] = {}
        for rival in plan.rivals:
            if plan.reference is None:
                raise EngineError(f"{rival} needs the model that the bundle was exported from")
            folders[rival] = plan.reference
            own = any((plan.reference / name).is_file() for name in VOCABULARIES["source"])
            if rival == "ctranslate2" and not own:
                say("converting the model for CTranslate2")
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
                convert_for_ctranslate2(plan.reference, folder, COMPUTE_TYPES.get(passport.precision, "float32"))
                folders[rival] = folder
        yield folders


def convert_for_ctranslate2(source: Path, target: Path, quantization: str) -> None:
    """Write the model of transformers in `source` as CTranslate2 reads it.

    Raises:
        EngineError: CTranslate2 is not there, or does not read that model.
    """
    if not source.is_dir():  # else the converter takes it for a name on the internet
        raise EngineError(f"{source} does not exist: expected a folder that transformers saved")
    try:
        import transformers
        from ctranslate2.converters import TransformersConverter
    except ModuleNotFoundError as error:
        raise EngineError(f"ctranslate2: {described(error)}") from None
    hugging_face: Any = transformers  # annotated in part only
    hugging_face.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):  # of a package that would split sentences as Moses does
            TransformersConverter(str(source)).convert(str(target), quantization=quantization)
    except Exception as error:  # its converters raise whatever they come across
        shutil.rmtree(target, ignore_errors=True)
        raise EngineError(f"ctranslate2 cannot convert {source}: {described(error)}") from None


@contextmanager
def _workers(
    plan: Plan, folders: dict[EngineName, Path], threads: int, say: Callable[[str], None]
) -> Iterator[dict[str, Worker]]:
    """This runtime and the rivals, opened at `threads`."""
    compute_type = COMPUTE_TYPES.get(read_passport(plan.bundle).precision, "float32")
    entries = [Entry(OURS, OURS, plan.bundle, threads, plan.provider)]
    entries += [
        Entry(rival, rival, folder, threads, plan.provider, plan.bundle, compute_type)
        for rival, folder in folders.items()
    ]
    with ExitStack() as stack:
        opened = {}
        for entry in entries:
            say(f"opening {entry.name} with {threads} threads")
            opened[entry.name] = stack.enter_context(Worker(entry))
        yield opened


def _measure(
    plan: Plan, workers: dict[str, Worker], workload: Workload, place: tuple[int, int], say: Callable[[str], None]
) -> tuple[Row, list[Versus]]:
    threads, batch = place
    course = race(workers, workload, plan.rounds, say=say)
    for score in course.scores.values():
        if score.error:
            raise EngineError(score.error)
    ours = course.scores[OURS]
    peak = workers[OURS].peak()
    say(f"{workload.name}: step by step")
    longest = min(LONGEST, max(map(len, course.outputs[OURS])))
    steps = workload.tokens or longest
    times = workers[OURS].step_times(
        workload.batches[0], beams=plan.beams, steps=max(1, steps - 1), starts=max(3, plan.rounds)
    )
    row = Row(
        threads=threads,
        batch=batch,
        sentences=workload.sentences,
        first_token_seconds=statistics.median(times.first),
        step_median_seconds=statistics.median(times.steps),
        step_p95_seconds=float(np.percentile(times.steps, 95)),
        tokens_per_second=ours.median,
        sentences_per_second=workload.sentences / statistics.median(ours.seconds),
        peak_memory_bytes=peak,
        roofline_share=None,
        step_seconds=times.steps,
    )
    return row, [_versus(name, ours, score, place) for name, score in course.scores.items() if name != OURS]


def _versus(name: str, ours: Score, theirs: Score, place: tuple[int, int]) -> Versus:
    return Versus(name, *place, theirs.median, ratio(ours, theirs))
