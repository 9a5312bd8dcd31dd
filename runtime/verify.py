"""A bundle on the examiner's bench: opened as it will be deployed, it sits its own exam or another."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from .backend import Backend
from .bundle import EXAM_ROLE, Bundle, Verification, write_passport
from .contract import graph_specs
from .environment import versions
from .errors import ProviderError
from .exam import Exam, load_exam
from .parity import RUNGS, Report, sit
from .parity.candidate import Candidate
from .parity.ladder import as_setting, with_settings
from .parity.report import CaseResult, SettingResult, rung_result
from .session import OPTIMIZATIONS, Optimization, OrtBackend, Provider
from .threads import available_cpus
from .tokenizer import open_tokenizer

RuntimeName = Literal["ort-cpu", "ort-cuda", "openvino", "reference"]
"""ONNX Runtime on either provider, OpenVINO, and the evaluator of the `onnx` package."""
ORT_PROVIDERS: dict[RuntimeName, Provider] = {"ort-cpu": "cpu", "ort-cuda": "cuda"}


class Setting(NamedTuple):
    """How a bundle is run. Only ONNX Runtime has optimisation levels; the reference evaluator has no threads either."""

    runtime: RuntimeName = "ort-cpu"
    optimization: Optimization = "all"
    threads: int | None = None
    """None for the CPUs at hand."""

    def __str__(self) -> str:
        """For people: "ort-cpu, optimization all, 2 threads"."""
        if self.runtime == "reference":
            return self.runtime
        count = self.threads or available_cpus()
        threads = f"{count} thread{'s' * (count > 1)}"
        if self.runtime == "openvino":
            return f"{self.runtime}, {threads}"
        return f"{self.runtime}, optimization {self.optimization}, {threads}"


Opener = Callable[[Bundle, Setting], Backend[Any]]


def open_backend(bundle: Bundle, setting: Setting) -> Backend[Any]:
    """ONNX Runtime at `setting`; who has other runtimes opens these.

    Raises:
        ProviderError: it cannot be had here.
        BundleError: it cannot load a graph.
    """
    if setting.runtime not in ORT_PROVIDERS:
        raise ProviderError(f"the runtime is {setting.runtime!r}, expected one of {', '.join(ORT_PROVIDERS)}")
    provider = ORT_PROVIDERS[setting.runtime]
    return OrtBackend(bundle, provider=provider, threads=setting.threads, optimization=setting.optimization)


def default_sweep(setting: Setting) -> list[Setting]:
    """What is tried beside `setting` when nothing else is asked for: the other levels, and a single thread."""
    if setting.runtime not in ORT_PROVIDERS:
        return []
    others = [setting._replace(optimization=level) for level in OPTIMIZATIONS if level != setting.optimization]
    alone = setting._replace(threads=1)
    return [*others, *([alone] if str(alone) != str(setting) else [])]


def examine(
    bundle: Bundle,
    settings: Sequence[Setting],
    exam: Exam | None = None,
    *,
    thresholds: Mapping[str, float] | None = None,
    opener: Opener = open_backend,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """The whole ladder for `bundle`: rungs 0 to 5 at the first of `settings`, rung 6 over all of them.

    Args:
        bundle: The opened bundle.
        settings: The one that will be deployed first.
        exam: By default the one that was recorded with the bundle.
        thresholds: For a lower precision, limits that take the place of the table's.
        opener: Opens a backend; see `open_backend`.
        say: Called before each setting is tried: which one, and how many there are.

    Raises:
        ExamError: the recorded exam is missing or damaged.
        ProviderError: a runtime cannot be had here.
    """
    questions = exam or load_exam(bundle.path(EXAM_ROLE))

    def climb(place: int) -> Report:
        setting = settings[place]
        say(f"climbing the ladder at {setting} ({place + 1} of {len(settings)})")
        return _sit(bundle, opener(bundle, setting), questions, str(setting), thresholds)

    first, *others = settings
    report = climb(0)
    rows = []
    for place, setting in enumerate(others if report.rungs[0].passed else [], 1):
        rows.append(as_setting(climb(place), str(setting)))
    whole = with_settings(report, str(first), rows)
    return _with_levels(whole, [first, *others][: len(whole.settings)])


def sit_bundle(
    bundle: Bundle,
    backend: Backend[Any],
    exam: Exam | None = None,
    *,
    setting: str | None = None,
    thresholds: Mapping[str, float] | None = None,
) -> Report:
    """Let `backend`, which runs `bundle` at `setting`, sit `exam`; see `examine`."""
    questions = exam or load_exam(bundle.path(EXAM_ROLE))
    return _sit(bundle, backend, questions, setting or str(Setting()), thresholds)


def _sit(
    bundle: Bundle, backend: Backend[Any], exam: Exam, setting: str, thresholds: Mapping[str, float] | None
) -> Report:
    candidate = Candidate(backend, bundle.passport, open_tokenizer(bundle.folder), setting)
    # The structure is that of the files: other runtimes forget the names of axes.
    graphs = backend if isinstance(backend, OrtBackend) else OrtBackend(bundle, threads=1, optimization="none")
    return sit(exam, candidate, graph_specs(bundle.passport.dims), graphs.found_specs(), thresholds)


def record(bundle: Bundle, report: Report, exam: str = "recorded") -> None:
    """Write what `report` says into the passport of `bundle`, and which `exam` it is about: see `Verification`."""
    settings = [row.setting for row in report.settings]
    rungs = {str(rung.rung): "pass" if rung.passed else "fail" for rung in report.rungs}
    found = Verification(
        passed=report.passed,
        setting=settings[0],
        versions=versions(),
        # A single setting says nothing about others.
        rungs=rungs if len(settings) > 1 else rungs | {str(len(RUNGS) - 1): "not tried"},
        exam=exam,
        settings=settings,
        thresholds={name: _finite(limit) for name, limit in report.thresholds.items()},
        figures={figure.name: _finite(figure.value) for figure in report.figures},
    )
    write_passport(bundle.folder, msgspec.structs.replace(bundle.passport, verification=found))


def _finite(value: float) -> float | None:
    """`value`, or what JSON has for a number that is none."""
    return value if math.isfinite(value) else None


def _with_levels(report: Report, settings: Sequence[Setting]) -> Report:
    """`report` with a line for each runtime that some optimisation level breaks, and a lower one does not."""
    verdicts = []
    levels = list(OPTIMIZATIONS)
    rows: dict[tuple[str, int | None], dict[int, SettingResult]] = {}
    for setting, row in zip(settings, report.settings, strict=True):
        if setting.runtime in ORT_PROVIDERS:
            tried = rows.setdefault((setting.runtime, setting.threads), {})
            tried[levels.index(setting.optimization)] = row
    for (runtime, _), tried in rows.items():
        broken = next((level for level in sorted(tried) if not tried[level].passed), None)
        sound = [levels[level] for level in sorted(tried) if broken is not None and level < broken]
        if broken is not None and sound:
            sentence = f"{runtime} breaks at optimization {levels[broken]}: {' and '.join(sound)} pass"
            verdicts.append(CaseResult(label=f"{runtime} levels", compared=1, problems=[sentence]))
    if not verdicts:
        return report
    last = report.rungs[6]
    rung = rung_result(6, last.summary, [*last.cases, *verdicts])
    return msgspec.structs.replace(report, rungs=[*report.rungs[:6], rung])
