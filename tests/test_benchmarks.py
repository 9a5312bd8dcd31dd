"""The scripts of `make bench`, without measuring anything: builds that are kept, verdicts, and the page."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

pytest.importorskip("torch", reason="the benchmark runs in the developers' environment")

import bench
import builds
from builds import BuildError, fresh, size
from contests import AIMS, CONTESTS, ours, theirs
from footprint import IDLE, Memory, Script, ScriptError, start, starts
from results import Results, Roofline, Verdict, markdown, verdicts

from runtime.errors import BundleError
from toolkit.measure.race import Ratio, Score


def results(**changes: Any) -> Results:
    """A run in which this runtime is three times as fast as everybody, at batch 1 alone."""
    fast, slow = Score([1.0, 1.0, 1.5], 64), Score([3.0, 3.0, 4.5], 64)
    names = {
        ours("fp32"): fast,
        ours("int8"): fast,
        theirs("int8"): slow,
        theirs("float32"): slow,
        "transformers": slow,
    }
    content: dict[str, Any] = {
        "date": "2026-01-01",
        "provider": "cpu",
        "threads": 2,
        "rounds": 3,
        "environment": {"processor": "some | processor"},
        "contests": {"greedy-1": names},
        "agreement": {"greedy-1": {ours("fp32"): 1.0, "transformers": 1.0}},
        **changes,
    }
    return Results(**content)


def by_what(found: Results) -> dict[str, Verdict]:
    return {verdict.what: verdict for verdict in verdicts(found)}


def test_a_build_is_made_once_and_again_when_its_code_changes(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "file").write_text("content", "utf-8")
        made.append(folder)

    code, folder = tmp_path / "code.py", tmp_path / "build/thing"
    code.write_text("1", "utf-8")
    for _ in range(2):
        assert fresh(folder, ["*.py"], make, tmp_path) == folder
    assert len(made) == 1
    code.write_text("2", "utf-8")
    fresh(folder, ["*.py"], make, tmp_path)
    assert len(made) == 2
    (folder / "file").unlink()
    folder.rmdir()
    fresh(folder, ["*.py"], make, tmp_path)
    assert len(made) == 3


def test_a_build_that_fails_leaves_nothing_and_is_tried_again(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        folder.mkdir()
        raise BuildError("no such option")

    for _ in range(2):
        with pytest.raises(BuildError, match="no such option"):
            fresh(tmp_path / "thing", [], fail, tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_what_is_made_of_the_shipped_model_is_kept_when_the_random_one_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    made_by: list[list[str]] = []
    said: list[str] = []

    def noted(folder: Path, patterns: list[str], _make: object) -> Path:
        made_by.append(patterns)
        return folder

    monkeypatch.setattr(builds, "fresh", noted)
    for source in (builds.SHIPPED, builds.BUILD / "marian-base"):
        builds.bundle(source, "name", "int8", said.append)
        builds.ctranslate2_model(source, "name", "int8", said.append)
    assert ["benchmarks/make_marian.py" in patterns for patterns in made_by] == [False, False, True, True]


def test_the_exam_can_be_left_out_of_the_size(tmp_path: Path) -> None:
    (tmp_path / "golden").mkdir()
    (tmp_path / "golden/exam").write_bytes(b"12345")
    (tmp_path / "weights").write_bytes(b"123")
    assert (size(tmp_path), size(tmp_path, without="golden")) == (8, 3)


def test_every_aim_is_in_the_table_also_when_nobody_measured_it() -> None:
    empty = verdicts(results(contests={}, agreement={}))
    assert len(empty) == len(AIMS) + 7
    assert {verdict.word for verdict in empty} == {"not measured"}
    assert {aim.contest for aim in AIMS} <= set(CONTESTS)
    assert len({verdict.what for verdict in empty}) == len(empty)


def test_a_target_is_met_or_missed_by_the_ratio_of_medians() -> None:
    found = by_what(results())
    faster = found["batch 1, greedy: seq2onnx int8 / CTranslate2 int8"]
    assert (faster.found, faster.limit, faster.word) == (3.0, 2.5, "met")
    missed = found["batch 1, greedy: seq2onnx int8 / transformers"]
    assert (missed.found, missed.limit, missed.word) == (3.0, 5.0, "missed")
    assert found["batch 32, greedy: seq2onnx int8 / CTranslate2 int8"].word == "not measured"


def test_who_is_out_of_the_race_meets_nothing() -> None:
    out = results()
    out.contests["greedy-1"][theirs("int8")].error = "gave no tokens"
    assert by_what(out)["batch 1, greedy: seq2onnx int8 / CTranslate2 int8"].word == "not measured"
    assert "gave no tokens" in markdown(out)


def test_where_less_is_better_the_limit_is_from_above() -> None:
    assert Verdict("", 1.2, at_least=False, found=1.2).word == "met"
    assert Verdict("", 1.2, at_least=False, found=1.3).word == "missed"
    assert Verdict("", 0.5, at_least=True, found=0.5).word == "met"
    assert Verdict("", 0.5, at_least=True, found=0.4).word == "missed"


def test_sizes_memory_startup_and_roofline_are_ratios() -> None:
    memory = {
        "idle": Memory(10, 5),
        ours("int8"): Memory(110, 55),
        theirs("int8"): Memory(60, 30),
        ours("fp32"): Memory(310, 5),
    }
    found = by_what(
        results(
            sizes={"marian": {ours("int8"): 90, "seq2onnx int8, no exam": 80, theirs("int8"): 100}},
            memory=memory,
            weights=200,
            startup={ours("fp32"): [3.0, 1.0, 2.0], theirs("float32"): [1.0, 1.0, 4.0]},
            words={ours("fp32"): "a", theirs("float32"): "a"},
            roofline={ours("int8"): Roofline(step_seconds=0.5, step_bytes=30.0, bandwidth=100.0)},
        )
    )
    assert found["size of the folder: seq2onnx int8 / CTranslate2 int8"].found == 0.9
    assert found["size of the folder: seq2onnx int4 / CTranslate2 int8"].found is None
    assert found["memory above an idle Python: seq2onnx int8 / CTranslate2 int8"].found == 2.0
    assert found["memory above an idle Python: seq2onnx fp32 / its weights.bin"].found == 1.5
    start = found["process start to first translation: seq2onnx fp32 / CTranslate2 float32"]
    assert (start.found, start.note) == (2.0, "0.50 .. 3.00")
    assert found["batch 1 step, int8: share of the memory bandwidth"].found == 0.6


def test_the_page_has_every_contestant_and_tables_that_hold_together() -> None:
    page = markdown(
        results(
            ctranslate2={"int8": {"batch 1": Ratio(2.0, [2.0])}},
            missing={"marian": {ours("int4"): "Error: No such option: --precision"}},
        )
    )
    assert "some \\| processor" in page
    assert "| seq2onnx int4 | Error: No such option: --precision |" in page
    assert "| CTranslate2 int8: oneDNN / MKL | batch 1 2.00 |" in page
    assert "| seq2onnx fp32 | 3.00 (3.00 .. 3.00) | 3.00 (3.00 .. 3.00) | 3.00 (3.00 .. 3.00) |" in page
    for block in page.split("\n\n"):
        rows = [line.replace("\\|", "") for line in block.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1


def test_a_fast_wrong_answer_is_a_failure() -> None:
    assert results().wrong == []
    wrong = results(agreement={"greedy-1": {ours("fp32"): 0.5, ours("int8"): 0.1}})
    (problem,) = wrong.wrong
    assert "seq2onnx fp32 gives 50.0% of the outputs of transformers" in problem
    assert "**Wrong**" in markdown(wrong)


def test_results_can_be_read_again() -> None:
    found = results(memory={"idle": Memory(1, 2)}, ctranslate2={"int8": {"batch 1": Ratio(2.0, [2.0])}})
    assert msgspec.json.decode(msgspec.json.encode(found), type=Results) == found


def test_a_script_is_timed_and_looked_at_while_it_waits() -> None:
    found = start(Script(IDLE), 1)
    assert found.seconds > 0
    assert found.text == ""
    assert found.memory.resident >= found.memory.private > 0
    environment = Script(["-c", "import os; print(os.environ['NAME'], flush=True); input()"], (("NAME", "x"),))
    assert start(environment, 1).text == "x"


def test_scripts_keep_their_bytecode_as_what_is_installed_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert start(Script(["-c", "import sys; print(sys.dont_write_bytecode, flush=True); input()"]), 1).text == "False"


def test_a_script_that_fails_says_why() -> None:
    with pytest.raises(ScriptError, match="ValueError: too bad"):
        start(Script(["-c", "raise ValueError('too bad')"]), 1)


def test_scripts_start_in_turn_after_a_warm_up() -> None:
    said: list[str] = []
    found = starts({"A": Script(IDLE), "B": Script(IDLE)}, 1, 2, said.append)
    assert [line.rpartition(", ")[2] for line in said] == ["A", "B"] * 3
    assert {name: len(runs) for name, runs in found.items()} == {"A": 2, "B": 2}


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a run that measures nothing finds, an item a run; "stop" in an item is raised at its end."""
    runs: list[dict[str, Any]] = []

    class MadeUp:
        def __init__(self, found: Results, *_: object) -> None:
            self.found = found

        def run(self) -> None:
            content = runs.pop(0)
            stop = content.pop("stop", None)
            for name, value in content.items():
                setattr(self.found, name, value)
            if stop:
                raise stop

    monkeypatch.setattr(bench, "Measurement", MadeUp)
    monkeypatch.setattr(bench, "version", lambda _: "1")
    return runs


def run_bench(*arguments: str | int | Path) -> Any:
    return CliRunner().invoke(bench.main, ["--threads", "1", *map(str, arguments)])


def test_a_whole_run_and_one_of_parts_have_files_of_their_own(made_up: list[dict[str, Any]], tmp_path: Path) -> None:
    made_up += [{"contests": results().contests}, {}]
    done = run_bench("--results", tmp_path)
    assert done.exit_code == 0, done.output
    assert {path.name for path in tmp_path.iterdir()} == {"cpu.json", "cpu.md"}
    content = msgspec.json.decode((tmp_path / "cpu.json").read_bytes())
    assert content["contests"]["greedy-1"]["seq2onnx fp32"]["seconds"] == [1.0, 1.0, 1.5]
    assert len(content["targets"]) == len(AIMS) + 7
    assert content["targets"][0]["found"] == 3.0
    assert (tmp_path / "cpu.md").read_text("utf-8").strip() == done.stdout.strip()
    assert run_bench("--results", tmp_path, "--only", "greedy-1,memory").exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"cpu.json", "cpu.md", "cpu-partial.json", "cpu-partial.md"}


@pytest.mark.parametrize(
    ("stop", "last"),
    [
        (KeyboardInterrupt(), "Aborted!"),
        (BundleError("bundle.json is\nno JSON"), "Error: it ended early: bundle.json is no JSON"),
    ],
)
def test_what_a_run_has_found_before_it_ended_early_is_kept_apart(
    made_up: list[dict[str, Any]], tmp_path: Path, stop: BaseException, last: str
) -> None:
    made_up.append({"contests": results().contests, "stop": stop})
    done = run_bench("--results", tmp_path)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == last
    assert "3.00 (3.00 .. 3.00)" in (tmp_path / "cpu-partial.md").read_text("utf-8")
    assert not (tmp_path / "cpu.md").exists()


def test_wrong_outputs_end_in_one_line_and_exit_code_1(made_up: list[dict[str, Any]], tmp_path: Path) -> None:
    made_up.append({"agreement": {"greedy-1": {ours("fp32"): 0.5}}})
    done = run_bench("--results", tmp_path)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith("Error: batch 1, greedy: seq2onnx fp32 gives 50.0% of the outputs")


def test_what_would_be_measured_wrongly_is_refused(tmp_path: Path) -> None:
    many = run_bench("--threads", 100_000, "--results", tmp_path)
    assert many.exit_code == 1
    assert "100000 threads on" in many.stderr
    unknown = run_bench("--only", "greedy-1,greedy-2")
    assert unknown.exit_code == 2
    assert "greedy-2: expected some of greedy-1, " in unknown.stderr
    assert list(tmp_path.iterdir()) == []
