"""One run of the benchmark, section by section."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from builds import BuildError, Say, size
from contests import CONTESTS, MARIAN, REFERENCES, SOURCE, TARGET, TEST_FILE, ZH_EN, Field, field, ours, workload
from footprint import IDLE, Script, ScriptError, ctranslate2_script, seq2onnx_script, start, starts
from results import Results, Roofline

from runtime.bundle import WEIGHTS, read_passport
from toolkit.measure.engines import Entry
from toolkit.measure.machine import read_bandwidth, step_bytes
from toolkit.measure.race import agreement, race, ratio
from toolkit.measure.worker import EngineError, Worker
from toolkit.measure.workload import Workload, random_workload

SECTIONS = ("memory", "startup", "roofline")
"""What is measured beside the contests, on a CPU."""
BACKENDS = {"oneDNN": (("CT2_USE_MKL", "0"),), "MKL": (("CT2_USE_MKL", "1"),)}
"""Both that CTranslate2 has for x86; which one is faster depends on the processor."""
TRIAL, TRIAL_TOKENS = 3, 16
"""Rounds, and tokens of an output, in which the two are compared."""
TEXT = "def translate(self, texts, config): return a list of translations, the best first"
"""What the random model translates while its memory is looked at: it knows the words of Python."""


class Measurement:
    """Fills `results` with what is asked for in `only`, names of contests and sections."""

    def __init__(self, results: Results, only: Sequence[str], say: Say) -> None:
        self._results = results
        self._only = only
        self._say = say
        self._fields: dict[str, Field] = {}
        self._backends: dict[str, tuple[tuple[str, str], ...]] = {}
        """By name of contestant: the variables with which CTranslate2 is faster here."""

    def run(self) -> None:
        """Make what is missing, then measure."""
        results = self._results
        for model in (MARIAN, ZH_EN):
            try:
                found = field(model, results.threads, results.provider, self._say)
            except BuildError as error:
                results.missing[model] = {"the model": str(error)}
                continue
            results.missing[model] = found.missing
            results.sizes[model] = _sizes(found)
            if ours("fp32") in found.folders:  # its vocabulary makes the workloads
                self._fields[model] = found
        on_cpu = results.provider == "cpu"
        if on_cpu:
            self._choose_backends()
        for model in self._fields:
            self._contests(model, roofline=on_cpu and model == MARIAN and "roofline" in self._only)
        if on_cpu and "memory" in self._only:
            self._memory()
        if on_cpu and "startup" in self._only:
            self._startup()

    def _choose_backends(self) -> None:
        """CTranslate2 takes part with its better one: the product of what it gains at batch 1 and 32 decides."""
        found = self._fields.get(MARIAN)
        for entry in found.entries if found else []:
            if entry.engine != "ctranslate2":
                continue
            compared = self._results.ctranslate2.setdefault(entry.compute_type, {})
            gain = 1.0
            for batch in (1, 32):
                trial = self._workload(f"oneDNN or MKL at {entry.compute_type}, batch {batch}", batch, TRIAL_TOKENS)
                entries = [entry._replace(name=name, environment=variables) for name, variables in BACKENDS.items()]
                with self._opened(entries, {}) as workers:
                    scores = race(workers, trial, TRIAL, say=self._say).scores
                if len(scores) == len(BACKENDS) and not any(score.error for score in scores.values()):
                    compared[f"batch {batch}"] = ratio(scores["oneDNN"], scores["MKL"])
                    gain *= compared[f"batch {batch}"].ratio
            self._backends[entry.name] = BACKENDS["oneDNN" if gain >= 1 else "MKL"]

    def _workload(self, name: str, batch: int, tokens: int) -> Workload:
        passport = read_passport(self._fields[MARIAN].folders[ours("fp32")])
        return random_workload(name, passport, source=SOURCE, tokens=tokens, batch=batch)

    def _contests(self, model: str, *, roofline: bool) -> None:
        """The contests of one model, and a look at single steps while its contestants are there."""
        keys = [key for key in CONTESTS if key in self._only and CONTESTS[key].model == model]
        if not (keys or roofline):
            return
        results, found = self._results, self._fields[model]
        entries = [entry._replace(environment=self._backends.get(entry.name, ())) for entry in found.entries]
        if not keys:
            entries = [entry for entry in entries if entry.engine == "seq2onnx"]
        with self._opened(entries, found.missing) as workers:
            if roofline:
                self._roofline(found, workers)
            for key in keys:
                task = workload(CONTESTS[key], found.folders[ours("fp32")])
                course = race(workers, task, results.rounds, say=self._say)
                results.contests[key] = course.scores
                expected = course.outputs.get(REFERENCES[model])
                if expected is not None:
                    results.agreement[key] = {
                        name: agreement(outputs, expected) for name, outputs in course.outputs.items()
                    }

    @contextmanager
    def _opened(self, entries: Sequence[Entry], missing: dict[str, str]) -> Iterator[dict[str, Worker]]:
        """All that can be opened; the others are noted in `missing`."""
        with ExitStack() as stack:
            workers = {}
            for entry in entries:
                self._say(f"opening {entry.name}")
                try:
                    workers[entry.name] = stack.enter_context(Worker(entry))
                except EngineError as error:
                    missing[entry.name] = str(error)
            yield workers

    def _roofline(self, found: Field, workers: dict[str, Worker]) -> None:
        (batch,) = self._workload("steps", 1, TARGET).batches
        for name, worker in workers.items():
            if worker.entry.engine != "seq2onnx":
                continue
            self._say(f"steps of {name}, and the memory's bandwidth")
            times = worker.step_times(batch, beams=1, steps=3 * TARGET, starts=3)
            needed = step_bytes(read_passport(found.folders[name]))
            if needed is not None:
                bandwidth = read_bandwidth(self._results.threads)
                self._results.roofline[name] = Roofline(statistics.median(times.steps), needed, bandwidth)

    def _memory(self) -> None:
        found = self._fields.get(MARIAN)
        if found is None:
            return
        for name, script in {"idle": Script(IDLE), **self._scripts(found, TEXT)}.items():
            self._say(f"memory of {name}")
            try:
                self._results.memory[name] = start(script, self._results.threads).memory
            except ScriptError as error:
                found.missing[name] = str(error)
        self._results.weights = (found.folders[ours("fp32")] / WEIGHTS).stat().st_size

    def _startup(self) -> None:
        found = self._fields.get(ZH_EN)
        if found is None:
            return
        results, able = self._results, {}
        for name, script in self._scripts(found, TEST_FILE.read_text("utf-8").split("\t", 1)[0]).items():
            try:
                start(script, results.threads)
                able[name] = script
            except ScriptError as error:
                found.missing[name] = str(error)
        for name, runs in starts(able, results.threads, results.rounds, self._say).items():
            results.startup[name] = [run.seconds for run in runs]
            results.words[name] = runs[0].text

    def _scripts(self, found: Field, text: str) -> dict[str, Script]:
        """The shortest program around each of the engines that are deployed."""
        scripts: dict[str, Script] = {}
        for entry in found.entries:
            if entry.engine == "seq2onnx":
                scripts[entry.name] = seq2onnx_script(entry.folder, entry.threads, text)
            elif entry.engine == "ctranslate2":
                variables = self._backends.get(entry.name, ())
                scripts[entry.name] = ctranslate2_script(entry.folder, found.source, entry.threads, text, variables)
        return scripts


def _sizes(found: Field) -> dict[str, int]:
    sizes = {}
    for name, folder in found.folders.items():
        sizes[name] = size(folder)
        if name.startswith("seq2onnx"):
            sizes[f"{name}, no exam"] = size(folder, without="golden")
    return sizes
