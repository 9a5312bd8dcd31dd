"""What a run of the benchmark found: JSON for machines, Markdown for people, and the targets with their verdicts."""

import statistics
from collections.abc import Iterator, Sequence

import msgspec
from contests import AIMS, CONTESTS, REFERENCES, ours, theirs
from footprint import Memory

from runtime.session import Provider
from toolkit.measure.race import Ratio, Score, ratio

ALIKE = 0.95
"""Least share of outputs in which float32 must be the reference's, id by id; the rest are near-ties."""


READ = (
    "Read the ratios: times hold for this machine on this day. `make bench` repeats all of it; "
    "[docs/performance.md](../../docs/performance.md) says how it is measured."
)


class Roofline(msgspec.Struct):
    """How close a step of one sentence comes to reading its weights as fast as memory delivers them."""

    step_seconds: float
    """Median."""
    step_bytes: float
    bandwidth: float
    """Bytes a second."""

    @property
    def share(self) -> float:
        """Of what memory could deliver."""
        return self.step_bytes / self.step_seconds / self.bandwidth


class Verdict(msgspec.Struct):
    """One line of the table of targets."""

    what: str
    limit: float
    at_least: bool
    found: float | None = None
    """None where it was not measured, or somebody is missing."""
    note: str = ""

    @property
    def word(self) -> str:
        """Met, missed or not measured."""
        if self.found is None:
            return "not measured"
        met = self.found >= self.limit if self.at_least else self.found <= self.limit
        return "met" if met else "missed"


class Results(msgspec.Struct, kw_only=True):
    """All of it."""

    date: str
    provider: Provider
    threads: int
    rounds: int
    environment: dict[str, str]
    """Processor, system, versions."""
    ctranslate2: dict[str, dict[str, Ratio]] = {}
    """By compute type: how much faster oneDNN (CT2_USE_MKL=0) is than MKL here; the faster one takes part."""
    contests: dict[str, dict[str, Score]] = {}
    agreement: dict[str, dict[str, float]] = {}
    """Share of outputs that are the reference's, id by id."""
    missing: dict[str, dict[str, str]] = {}
    """By model: who could not take part, and why."""
    sizes: dict[str, dict[str, int]] = {}
    """By model: bytes of the folder; and without the exam, which only a verification reads."""
    memory: dict[str, Memory] = {}
    """Of a process that has translated once; "idle" is a Python that does nothing."""
    weights: int | None = None
    """Bytes of weights.bin in float32."""
    startup: dict[str, list[float]] = {}
    """Seconds from the start of the process to the first translation, the shipped model."""
    words: dict[str, str] = {}
    """What that translation was."""
    roofline: dict[str, Roofline] = {}

    @property
    def wrong(self) -> list[str]:
        """Where float32 is not what the reference is: a fast wrong answer is no answer."""
        return [
            f"{CONTESTS[key].title}: {ours('fp32')} gives {shares[ours('fp32')]:.1%} of the outputs of "
            f"{REFERENCES[CONTESTS[key].model]}"
            for key, shares in self.agreement.items()
            if shares.get(ours("fp32"), 1.0) < ALIKE
        ]


def verdicts(results: Results) -> list[Verdict]:
    """Every target, also those that nobody measured."""
    return [
        *_speed_verdicts(results),
        *_size_verdicts(results),
        *_memory_verdicts(results),
        *_startup_verdicts(results),
        Verdict(
            "batch 1 step, int8: share of the memory bandwidth",
            0.5,
            at_least=True,
            found=results.roofline[ours("int8")].share if ours("int8") in results.roofline else None,
        ),
    ]


def _speed_verdicts(results: Results) -> Iterator[Verdict]:
    for aim in AIMS:
        scores = results.contests.get(aim.contest, {})
        name = ours(aim.precision)
        verdict = Verdict(f"{CONTESTS[aim.contest].title}: {name} / {aim.rival}", aim.limit, at_least=True)
        if name in scores and aim.rival in scores and not (scores[name].error or scores[aim.rival].error):
            found = ratio(scores[name], scores[aim.rival])
            verdict.found = found.ratio
            verdict.note = f"{min(found.rounds):.2f} .. {max(found.rounds):.2f}"
        yield verdict


def _size_verdicts(results: Results) -> Iterator[Verdict]:
    sizes = results.sizes.get("marian", {})
    for precision, limit in (("int8", 1.05), ("int4", 0.6)):
        name, rival = ours(precision), theirs("int8")
        verdict = Verdict(f"size of the folder: {name} / {rival}", limit, at_least=False)
        if name in sizes and rival in sizes:
            verdict.found = sizes[name] / sizes[rival]
            verdict.note = f"{sizes[f'{name}, no exam'] / sizes[rival]:.2f} without the exam"
        yield verdict


def _memory_verdicts(results: Results) -> Iterator[Verdict]:
    memory = results.memory

    def above(name: str, kind: str) -> int:
        """Bytes above those of an idle Python."""
        found: int = getattr(memory[name], kind) - getattr(memory["idle"], kind)
        return found

    name, rival = ours("int8"), theirs("int8")
    verdict = Verdict(f"memory above an idle Python: {name} / {rival}", 1.2, at_least=False)
    if name in memory and rival in memory:
        verdict.found = above(name, "resident") / above(rival, "resident")
        verdict.note = f"{above(name, 'private') / above(rival, 'private'):.2f} of private memory"
    yield verdict
    name = ours("fp32")
    verdict = Verdict(f"memory above an idle Python: {name} / its weights.bin", 1.6, at_least=False)
    if name in memory and results.weights:
        verdict.found = above(name, "resident") / results.weights
        verdict.note = f"{above(name, 'private') / results.weights:.2f} of private memory"
    yield verdict


def _startup_verdicts(results: Results) -> Iterator[Verdict]:
    for precision, quantization in (("fp32", "float32"), ("int8", "int8")):
        name, rival = ours(precision), theirs(quantization)
        verdict = Verdict(f"process start to first translation: {name} / {rival}", 1.2, at_least=False)
        if name in results.startup and rival in results.startup:
            mine, other = results.startup[name], results.startup[rival]
            verdict.found = statistics.median(mine) / statistics.median(other)
            rounds = [one / two for one, two in zip(mine, other, strict=True)]
            verdict.note = f"{min(rounds):.2f} .. {max(rounds):.2f}"
        yield verdict


def markdown(results: Results) -> str:
    """The page for people."""
    parts = [
        f"# Benchmark, {results.provider}, {results.date}",
        READ,
        _lines(["", ""], [[name, value] for name, value in _where(results).items()]),
        "## Targets",
        _lines(
            ["target", "aim", "found", "each round", "verdict"],
            [
                [
                    verdict.what,
                    f"{'>=' if verdict.at_least else '<='} {verdict.limit:g}",
                    "" if verdict.found is None else f"{verdict.found:.2f}",
                    verdict.note,
                    verdict.word,
                ]
                for verdict in verdicts(results)
            ],
        ),
        *(f"**Wrong**: {problem}." for problem in results.wrong),
        *(part for key in results.contests for part in _contest(results, key)),
        *_machine(results),
    ]
    for model, missing in results.missing.items():
        if missing:
            rows = [[name, reason] for name, reason in missing.items()]
            parts += [f"## Missing, {model} model", _lines(["contestant", "reason"], rows)]
    return "\n\n".join(parts) + "\n"


def _where(results: Results) -> dict[str, str]:
    best = {
        f"CTranslate2 {kind}: oneDNN / MKL": ", ".join(f"{name} {found.ratio:.2f}" for name, found in found.items())
        for kind, found in results.ctranslate2.items()
    }
    return {**results.environment, "threads": str(results.threads), "rounds": str(results.rounds), **best}


def _contest(results: Results, key: str) -> Iterator[str]:
    scores, shares = results.contests[key], results.agreement.get(key, {})
    good = {name: score for name, score in scores.items() if not score.error}
    yield f"## {CONTESTS[key].title}"
    columns = ["", "seconds, minimum", "median", "tokens/s", f"same ids as {REFERENCES[CONTESTS[key].model]}"]
    yield _lines(
        columns,
        [
            [
                name,
                f"{min(score.seconds):.3f}",
                f"{statistics.median(score.seconds):.3f}",
                f"{score.median:,.1f}",
                f"{shares[name]:.1%}" if name in shares else "",
            ]
            for name, score in good.items()
        ]
        + [[name, "out:", score.error, "", ""] for name, score in scores.items() if score.error],
    )
    own = [name for name in good if name.startswith("seq2onnx")]
    rivals = [name for name in good if name not in own]
    if own and rivals:
        yield "How much faster, ratio of the medians (least .. greatest ratio within one round):"
        yield _lines(["", *rivals], [[name, *(_cell(good[name], good[rival]) for rival in rivals)] for name in own])


def _cell(ours: Score, theirs: Score) -> str:
    found = ratio(ours, theirs)
    return f"{found.ratio:.2f} ({min(found.rounds):.2f} .. {max(found.rounds):.2f})"


def _machine(results: Results) -> Iterator[str]:
    for model, sizes in results.sizes.items():
        yield f"## Size, {model} model"
        yield _lines(["", "MB"], [[name, f"{value / 1e6:.1f}"] for name, value in sizes.items()])
    if results.memory:
        yield "## Memory of a process that has translated one sentence"
        rows = [
            [name, f"{found.resident / 1e6:.0f}", f"{found.private / 1e6:.0f}"]
            for name, found in results.memory.items()
        ]
        yield _lines(["", "resident MB", "private MB"], rows)
    if results.startup:
        yield "## From process start to the first translation, shipped model"
        rows = [
            [name, f"{min(times):.2f}", f"{statistics.median(times):.2f}", results.words[name]]
            for name, times in results.startup.items()
        ]
        yield _lines(["", "seconds, minimum", "median", "translation"], rows)
    if results.roofline:
        yield "## A step of one sentence against the memory's bandwidth"
        rows = [
            [
                name,
                f"{1000 * found.step_seconds:.2f}",
                f"{found.step_bytes / 1e6:.1f}",
                f"{found.bandwidth / 1e9:.1f}",
                f"{found.share:.0%}",
            ]
            for name, found in results.roofline.items()
        ]
        yield _lines(["", "step, ms", "weights it reads, MB", "bandwidth, GB/s", "share"], rows)


def _lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (columns, ["---"] * len(columns), *rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
