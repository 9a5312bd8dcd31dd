"""Rung 6: the whole ladder again at other settings, each row named, and the level of optimisation that breaks it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from runtime_support import (
    CACHE,
    DEPLOYMENT,
    GRAPH,
    ROLLOUT,
    STRUCTURE,
    TINY,
    Delegate,
    edit_passport,
    failed,
    judge,
    tiny_copy,
)

from runtime import session, verify
from runtime.backend import Array, Backend, Cache
from runtime.bundle import PASSPORT, Bundle
from runtime.contract import graph_specs
from runtime.errors import ExamError, ProviderError, ThresholdError
from runtime.exam import CacheCheck, Exam
from runtime.parity import Report
from runtime.parity.ladder import as_setting, with_settings
from runtime.parity.report import Figure, SettingResult
from runtime.session import OPTIMIZATIONS, OrtBackend
from runtime.verify import Setting, default_sweep, examine, open_backend, record, sit_bundle

LEVELS = list(OPTIMIZATIONS)
ONE = Setting(threads=1)


@pytest.fixture(scope="module")
def short_exam(exam: Exam) -> Exam:
    """Fewer sentences: these tests are about settings."""
    return msgspec.structs.replace(exam, tokens=exam.tokens[:2])


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "available_cpus", lambda: 4)


class WrongLogit(Delegate):
    def step(self, *inputs: Any) -> tuple[Any, Cache[Any]]:
        def change(logits: Array) -> Array:
            logits[..., 30] += 0.01
            return logits

        logits, cache = super().step(*inputs)
        return self.changed(logits, change), cache


def breaking(wrong: Callable[[Setting], bool]) -> Callable[[Bundle, Setting], Backend[Any]]:
    """Opens what is asked for, and breaks it where `wrong`."""

    def opener(bundle: Bundle, setting: Setting) -> Backend[Any]:
        backend = open_backend(bundle, setting._replace(threads=1))
        return WrongLogit(backend) if wrong(setting) and isinstance(backend, OrtBackend) else backend

    return opener


# Settings


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (Setting(), "ort-cpu, optimization all, 4 threads"),
        (Setting(optimization="none", threads=1), "ort-cpu, optimization none, 1 thread"),
        (Setting("ort-cuda", threads=2), "ort-cuda, optimization all, 2 threads"),
        (Setting("openvino"), "openvino, 4 threads"),
        (Setting("reference", threads=3), "reference"),
    ],
)
def test_a_setting_says_what_matters_for_its_runtime(setting: Setting, expected: str) -> None:
    assert str(setting) == expected


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize("runtime", ["ort-cpu", "ort-cuda"])
def test_the_sweep_tries_the_other_levels_and_a_single_thread(runtime: Any) -> None:
    setting = Setting(runtime)
    assert default_sweep(setting) == [
        Setting(runtime, "none"),
        Setting(runtime, "basic"),
        Setting(runtime, "extended"),
        Setting(runtime, "all", 1),
    ]
    middle = Setting(runtime, "basic", 3)
    assert default_sweep(middle) == [
        *(Setting(runtime, level, 3) for level in ("none", "extended", "all")),
        Setting(runtime, "basic", 1),
    ]


@pytest.mark.usefixtures("four_cpus")
def test_the_sweep_tries_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [setting.threads for setting in default_sweep(ONE)] == [1, 1, 1]
    monkeypatch.setattr(verify, "available_cpus", lambda: 1)
    assert [setting.threads for setting in default_sweep(Setting())] == [None, None, None]


@pytest.mark.parametrize("runtime", ["openvino", "reference"])
def test_a_runtime_without_levels_is_tried_once(runtime: Any) -> None:
    assert default_sweep(Setting(runtime)) == []


@pytest.mark.parametrize("level", LEVELS)
def test_a_setting_is_opened_as_it_says(tiny_bundle: Bundle, level: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(session, "set_threads", lambda _options, _verb, count: counts.append(count))
    backend = open_backend(tiny_bundle, Setting(optimization=level, threads=2))
    assert isinstance(backend, OrtBackend)
    backend.found_specs()
    options = [graph._session.get_session_options() for graph in backend._graphs._loaded.values()]
    assert {option.graph_optimization_level for option in options} == {OPTIMIZATIONS[level]}
    assert counts == [2] * len(options)


@pytest.mark.parametrize("runtime", ["openvino", "reference", "tpu"])
def test_a_runtime_that_is_not_onnx_runtime_is_opened_by_who_has_it(tiny_bundle: Bundle, runtime: Any) -> None:
    with pytest.raises(ProviderError, match=f"the runtime is '{runtime}', expected one of ort-cpu, ort-cuda"):
        open_backend(tiny_bundle, Setting(runtime))


# All settings


def test_a_good_bundle_passes_at_every_setting(tiny_bundle: Bundle, short_exam: Exam) -> None:
    told: list[str] = []
    settings = [ONE, *default_sweep(ONE), Setting(threads=2)]
    report = examine(tiny_bundle, settings, short_exam, say=told.append)
    assert failed(report) == []
    names = [str(setting) for setting in settings]
    assert names == [row.setting for row in report.settings]
    assert told == [f"climbing the ladder at {name} ({place} of 5)" for place, name in enumerate(names, 1)]
    assert [case.label for case in report.rungs[DEPLOYMENT].cases] == names
    assert report.rungs[DEPLOYMENT].summary == "5 of 5 settings"
    assert report.rungs[DEPLOYMENT].compared == 5
    for row in report.settings:
        assert row.passed
        assert row.rungs == dict.fromkeys("02345", True)
        assert 0 < row.worst_ratio < 8
        assert row.problem == ""


def test_a_setting_that_fails_is_named_with_the_lowest_rung_that_sees_it(tiny_bundle: Bundle, short_exam: Exam) -> None:
    other = Setting(threads=2)
    opener = breaking(lambda setting: setting == other)
    report = examine(tiny_bundle, [ONE, other], short_exam, opener=opener)
    assert failed(report) == [DEPLOYMENT]
    good, bad = report.settings
    assert good.passed
    assert not bad.passed
    assert bad.rungs == {"0": True, "2": False, "3": False, "4": True, "5": True}
    assert bad.worst_ratio > 100
    assert bad.problem.startswith("rung 2 (graph): step: logits is 0.01")
    assert report.rungs[DEPLOYMENT].problems == [f"{other}: {bad.problem}"]
    assert [case.label for case in report.rungs[DEPLOYMENT].cases if not case.passed] == [str(other)]
    assert report.rungs[DEPLOYMENT].summary == "1 of 2 settings"


def test_what_is_wrong_at_the_first_setting_is_wrong_there_too(tiny_bundle: Bundle, short_exam: Exam) -> None:
    report = examine(tiny_bundle, [ONE], short_exam, opener=breaking(lambda _: True))
    assert failed(report) == [GRAPH, ROLLOUT, DEPLOYMENT]
    assert report.rungs[DEPLOYMENT].summary == "0 of 1 settings"
    assert not report.settings[0].passed
    assert report.rungs[DEPLOYMENT].problems == [f"{ONE}: rung 2 (graph): {report.rungs[GRAPH].problems[0]}"]


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (["all"], "ort-cpu breaks at optimization all: none and basic and extended pass"),
        (["extended", "all"], "ort-cpu breaks at optimization extended: none and basic pass"),
        (["basic"], "ort-cpu breaks at optimization basic: none pass"),
        (["none"], None),
        (LEVELS, None),
        ([], None),
    ],
    ids=str,
)
def test_the_level_that_breaks_a_bundle_is_named(
    tiny_bundle: Bundle, short_exam: Exam, wrong: list[str], expected: str | None
) -> None:
    opener = breaking(lambda setting: setting.optimization in wrong)
    report = examine(tiny_bundle, [ONE, *default_sweep(ONE)], short_exam, opener=opener)
    sentences = [problem for problem in report.rungs[DEPLOYMENT].problems if "breaks at optimization" in problem]
    assert sentences == ([] if expected is None else [expected])
    assert report.passed is not bool(wrong)
    labels = [case.label for case in report.rungs[DEPLOYMENT].cases]
    assert labels.count("ort-cpu levels") == (0 if expected is None else 1)


def test_threads_are_not_mixed_up_with_levels(tiny_bundle: Bundle, short_exam: Exam) -> None:
    """What fails with two threads says nothing about the levels with one."""
    settings = [Setting(optimization=level, threads=1) for level in OPTIMIZATIONS] + [Setting(threads=2)]
    opener = breaking(lambda setting: setting.threads == 2)
    report = examine(tiny_bundle, settings, short_exam, opener=opener)
    assert failed(report) == [DEPLOYMENT]
    assert not any("breaks at optimization" in problem for problem in report.rungs[DEPLOYMENT].problems)


def test_where_the_structure_is_wrong_no_other_setting_is_tried(tmp_path: Path, short_exam: Exam) -> None:
    def edit(passport: dict[str, Any]) -> None:
        passport["special"][2] = 9
        for name in ("config.json", "generation_config.json"):  # they say the right ones
            passport["files"].pop(name)
            (folder / name).unlink()

    folder = tiny_copy(tmp_path / "tiny")
    edit_passport(folder, edit)
    told: list[str] = []
    report = examine(Bundle(folder), [ONE, *default_sweep(ONE)], short_exam, say=told.append)
    assert told == [f"climbing the ladder at {ONE} (1 of 4)"]
    assert failed(report)[0] == STRUCTURE
    assert [row.setting for row in report.settings] == [str(ONE)]
    assert report.rungs[DEPLOYMENT].summary == "0 of 1 settings"


def test_thresholds_apply_at_every_setting(tmp_path: Path, short_exam: Exam) -> None:
    folder = tiny_copy(tmp_path / "tiny")
    edit_passport(folder, lambda passport: passport.update(precision="int8"))
    settings = [ONE, ONE._replace(optimization="none")]
    report = examine(Bundle(folder), settings, short_exam, thresholds={"kl_mean": -1.0})
    assert [row.rungs["4"] for row in report.settings] == [False, False]
    assert failed(examine(Bundle(folder), settings, short_exam)) == []
    with pytest.raises(ThresholdError):
        examine(Bundle(folder), settings, short_exam, thresholds={"bleu": 1.0})


def test_by_default_a_bundle_sits_its_own_exam(tmp_path: Path) -> None:
    assert failed(examine(Bundle(TINY), [ONE])) == []
    bundle = Bundle(tiny_copy(tmp_path / "tiny"))
    (bundle.path("exam") / "exam.npz").unlink()
    with pytest.raises(ExamError, match=r"exam\.npz is missing"):
        examine(bundle, [ONE])


@pytest.mark.parametrize("times", [0, 1])
def test_an_exam_is_loaded_once_at_most(
    tiny_bundle: Bundle, short_exam: Exam, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    loaded: list[Path] = []

    def observe(path: Path) -> Exam:
        loaded.append(path)
        return short_exam

    monkeypatch.setattr(verify, "load_exam", observe)
    examine(tiny_bundle, [ONE, ONE._replace(optimization="none")], None if times else short_exam)
    assert len(loaded) == times


def test_the_structure_is_that_of_the_files_whatever_runs_them(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, short_exam: Exam
) -> None:
    """A backend of other runtimes cannot say what its graphs look like."""
    report = sit_bundle(tiny_bundle, Delegate(tiny_backend), short_exam, setting="something else")
    assert failed(report) == []
    assert report.settings[0].setting == "something else"
    specs = graph_specs(tiny_bundle.passport.dims)
    assert report.rungs[STRUCTURE].compared >= sum(len(spec.inputs) + len(spec.outputs) for spec in specs.values())


# The record


def test_a_record_tells_what_was_sat_and_tried(tmp_path: Path, short_exam: Exam) -> None:
    bundle = Bundle(tiny_copy(tmp_path / "tiny"))
    settings = [ONE, ONE._replace(optimization="none")]
    record(bundle, examine(bundle, settings, short_exam), "fresh, seed 7")
    found = Bundle(bundle.folder).passport.verification
    assert found is not None
    assert found.exam == "fresh, seed 7"
    assert found.settings == [str(setting) for setting in settings]
    assert found.rungs == dict.fromkeys("0123456", "pass")
    record(bundle, examine(bundle, [ONE], short_exam))
    found = Bundle(bundle.folder).passport.verification
    assert found is not None
    assert found.exam == "recorded"
    assert found.settings == [str(ONE)]
    assert found.rungs == dict.fromkeys("012345", "pass") | {"6": "not tried"}
    assert '"exam": "recorded"' in (bundle.folder / PASSPORT).read_text("utf-8")


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_record_of_numbers_that_are_none_leaves_the_bundle_readable(
    tmp_path: Path, report: Report, odd: float
) -> None:
    bundle = Bundle(tiny_copy(tmp_path / "tiny"))
    figure = Figure(name="kl_mean", value=odd, limit=odd, at_least=False, reason="")
    record(bundle, msgspec.structs.replace(report, figures=[figure], thresholds={"kl_mean": odd, "chrf": 90.0}))
    found = Bundle(bundle.folder).passport.verification
    assert found is not None
    assert found.figures == {"kl_mean": None}
    assert found.thresholds == {"kl_mean": None, "chrf": 90.0}


# Rows


@pytest.fixture
def report(tiny_bundle: Bundle, tiny_backend: OrtBackend, short_exam: Exam) -> Report:
    return judge(tiny_bundle, short_exam, tiny_backend)


def test_a_row_leaves_out_what_no_setting_changes(
    tiny_bundle: Bundle, tiny_backend: OrtBackend, short_exam: Exam
) -> None:
    """PyTorch's own cache check is not the runtime's fault, and rung 6 is the row itself."""
    broken = msgspec.structs.replace(short_exam, cache=CacheCheck(prefixes=11, error=1.0))
    row = as_setting(judge(tiny_bundle, broken, tiny_backend), "here")
    assert str(CACHE) not in row.rungs
    assert str(DEPLOYMENT) not in row.rungs
    assert row.passed


@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_the_worst_ratio_of_a_row_keeps_what_is_no_number(report: Report, error: float) -> None:
    first, *others = report.tensors
    for tensors in (
        [msgspec.structs.replace(first, error=error), *others],
        [*others, msgspec.structs.replace(first, error=error)],
    ):
        ratio = as_setting(msgspec.structs.replace(report, tensors=tensors), "here").worst_ratio
        assert not ratio < math.inf


def test_a_row_without_rungs_has_not_passed() -> None:
    assert not SettingResult(setting="here", rungs={}, worst_ratio=1.0).passed


def test_rows_take_the_place_of_those_before(report: Report) -> None:
    bad = SettingResult(setting="there", rungs={"2": False}, worst_ratio=9.0, problem="rung 2 (graph): no")
    wider = with_settings(report, "here", [bad])
    assert failed(wider) == [DEPLOYMENT]
    assert wider.rungs[DEPLOYMENT].problems == ["there: rung 2 (graph): no"]
    again = with_settings(wider, "here", [])
    assert failed(again) == []
    assert [rung.rung for rung in again.rungs] == list(range(7))
    assert [row.setting for row in again.settings] == ["here"]
