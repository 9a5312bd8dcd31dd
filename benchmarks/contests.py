"""Who runs against whom on what, and what is aimed at."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from builds import SHIPPED, BuildError, Say, bundle, ctranslate2_model, marian

from runtime.bundle import read_passport
from runtime.session import Provider
from runtime.tokenizer import open_tokenizer
from toolkit.measure.engines import Entry
from toolkit.measure.workload import Workload, random_workload, sentences_workload

SOURCE, TARGET = 32, 64
"""Tokens of a source, and of an output, which is forced to that length."""
TEST_FILE = Path(__file__).parent.parent / "tests/data/sample-zh-en/test.tsv"
MARIAN, ZH_EN = "marian", "zh-en"
TRANSFORMERS, TORCH = "transformers", "PyTorch with caches"


class Contest(NamedTuple):
    """One workload."""

    model: str
    batch: int
    beams: int
    title: str


CONTESTS = {
    "greedy-1": Contest(MARIAN, 1, 1, "batch 1, greedy"),
    "greedy-32": Contest(MARIAN, 32, 1, "batch 32, greedy"),
    "greedy-128": Contest(MARIAN, 128, 1, "batch 128, greedy"),
    "beam4-1": Contest(MARIAN, 1, 4, "batch 1, beam 4"),
    "beam4-32": Contest(MARIAN, 32, 4, "batch 32, beam 4"),
    "zh-en-1": Contest(ZH_EN, 1, 1, "shipped model on its test file, batch 1, greedy"),
    "zh-en-32": Contest(ZH_EN, 32, 1, "shipped model on its test file, batch 32, greedy"),
}


class Aim(NamedTuple):
    """In `contest`, this runtime at `precision` should be at least `limit` times as fast as `rival`."""

    contest: str
    precision: str
    rival: str
    limit: float


def ours(precision: str) -> str:
    """This runtime's name in the tables."""
    return f"seq2onnx {precision}"


def theirs(quantization: str) -> str:
    """CTranslate2's name in the tables."""
    return f"CTranslate2 {quantization}"


AGAINST_CTRANSLATE2 = (
    Aim("greedy-1", "int8", theirs("int8"), 2.5),
    Aim("greedy-1", "fp32", theirs("float32"), 1.6),
    Aim("greedy-32", "int8", theirs("int8"), 1.6),
    Aim("greedy-32", "fp32", theirs("float32"), 2.4),
    Aim("beam4-32", "int8", theirs("int8"), 1.5),
    Aim("beam4-1", "int8", theirs("int8"), 2.0),
    Aim("greedy-128", "int8", theirs("int8"), 1.4),
)
AIMS = (*AGAINST_CTRANSLATE2, *(aim._replace(rival=TRANSFORMERS, limit=5.0) for aim in AGAINST_CTRANSLATE2))
REFERENCES = {MARIAN: TRANSFORMERS, ZH_EN: theirs("float32")}
"""Whose ids this runtime must give in float32, by model: transformers has no class for the shipped one."""
SPEEDS = {"cpu": ("fp32", "int8", "int4"), "cuda": ("fp32", "fp16", "int8", "int4")}
"""Precisions that run; on a CPU float16 is for the size of the folder alone."""
COMPUTE = {"cpu": ("float32", "int8"), "cuda": ("float32", "float16", "int8")}
"""What CTranslate2 runs at."""


class Field(NamedTuple):
    """Who takes part with one model."""

    source: Path
    """The model that all of them were made of, with its tokenizer."""
    entries: list[Entry]
    folders: dict[str, Path]
    """What each contestant runs, also of those that only show the size."""
    missing: dict[str, str]
    """Who cannot take part, and why."""


def field(model: str, threads: int, provider: Provider, say: Say) -> Field:
    """All contestants for `model`, made where they are missing."""
    source = marian(say) if model == MARIAN else SHIPPED
    found = Field(source, [], {}, {})

    def made(name: str, make: Callable[[], Path]) -> Path | None:
        try:
            found.folders[name] = make()
        except BuildError as error:
            found.missing[name] = str(error)
        return found.folders.get(name)

    for precision in ("fp32", "fp16", "int8", "int4"):
        name = ours(precision)
        folder = made(name, partial(bundle, source, model, precision, say))
        if folder is not None and precision in SPEEDS[provider]:
            found.entries.append(Entry(name, "seq2onnx", folder, threads, provider))
    for quantization in COMPUTE[provider]:
        name = theirs(quantization)
        folder = made(name, partial(ctranslate2_model, source, model, quantization, say))
        if folder is not None:
            found.entries.append(Entry(name, "ctranslate2", folder, threads, provider, compute_type=quantization))
    base = found.folders.get(ours("fp32"))
    if base is None:
        found.missing[TORCH] = f"searches as {ours('fp32')} does, which is missing"
    else:
        found.entries.append(Entry(TORCH, "torch", source, threads, provider, base))
    if model == MARIAN:
        found.entries.append(Entry(TRANSFORMERS, "transformers", source, threads, provider))
    return found


def workload(contest: Contest, folder: Path) -> Workload:
    """What is translated in `contest`, with the vocabulary of the bundle in `folder`."""
    if contest.model == MARIAN:
        return random_workload(
            contest.title,
            read_passport(folder),
            source=SOURCE,
            tokens=TARGET,
            batch=contest.batch,
            beams=contest.beams,
        )
    tokenizer = open_tokenizer(folder)
    sentences = [line.split("\t")[0] for line in TEST_FILE.read_text("utf-8").splitlines()]
    rows = [tokenizer.encode(sentence) for sentence in sentences]
    return sentences_workload(contest.title, rows, batch=contest.batch, beams=contest.beams)
