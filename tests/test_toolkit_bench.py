"""`toolkit bench` on the test bundle. No time is asserted: it is the machine's, not the program's."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
import pytest
from click.testing import CliRunner, Result
from runtime_support import TINY

from runtime.bundle import read_passport
from runtime.generation import GenerationConfig
from toolkit.bench_command import parse_batches, parse_tokens
from toolkit.cli import main
from toolkit.measure import worker as worker_module
from toolkit.measure.bench import BenchReport, Plan, planned_workload
from toolkit.measure.engines import BundleEngine, Entry, search_options
from toolkit.measure.worker import EngineError, Worker
from toolkit.measure.workload import Workload

if TYPE_CHECKING:
    from exporters_support import Export

TASK = Workload("task", [[[5, 6, 3], [7, 8, 9, 3]]], tokens=4)


def bench(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


@pytest.mark.parametrize(("beams", "going_on"), [(1, "step"), (3, "branch")])
def test_what_is_timed_runs_the_graphs_of_a_search_and_no_others(beams: int, going_on: str) -> None:
    engine = BundleEngine(Entry("bundle", "seq2onnx", TINY, threads=1))
    times = engine.step_times([[4, 9, 7, 3], [5, 3]], beams, steps=5, starts=2)
    assert (len(times.first), len(times.steps)) == (2, 5)
    assert set(engine._translator.backend._graphs._loaded) == {"encode", "begin", going_on, "rank"}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = bench(
        TINY, "--batch", "4,1", "--threads", "1", "--threads", "2", "--rounds", "2", "--tokens", "6,5", "--json"
    )
    assert done.exit_code == 0, done.output
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def test_json_has_a_row_for_each_number_of_threads_and_size_of_batch(found: dict[str, Any]) -> None:
    report = msgspec.convert(found, BenchReport, str_keys=True)
    assert [(row.threads, row.batch, row.sentences) for row in report.rows] == [
        (1, 1, 1),
        (1, 4, 4),
        (2, 1, 1),
        (2, 4, 4),
    ]
    assert (report.bundle, report.precision, report.provider, report.beams) == (str(TINY), "fp32", "cpu", 1)
    assert report.environment["onnxruntime"]
    assert report.memory_bandwidth is not None
    assert set(report.memory_bandwidth) == {1, 2}
    assert report.against == []


def test_figures_fit_each_other(found: dict[str, Any]) -> None:
    for row in msgspec.convert(found["rows"], list[dict[str, Any]]):
        assert row["tokens_per_second"] == pytest.approx(5 * row["sentences_per_second"])
        assert len(row["step_seconds"]) == 4  # the first of five tokens comes out of prefill
        assert min(row["step_seconds"]) <= row["step_median_seconds"] <= row["step_p95_seconds"]
        assert row["first_token_seconds"] > 0
        assert row["roofline_share"] > 0
        assert row["peak_memory_bytes"] is None or row["peak_memory_bytes"] > 10e6


def test_people_get_a_table_and_a_pipe_no_progress() -> None:
    done = bench(TINY, "--batch", "2", "--threads", "1", "--rounds", "1", "--beam", "2")
    assert done.exit_code == 0, done.output
    assert "2 beams" in done.stdout
    assert "tokens/s" in done.stdout
    assert done.stderr == ""


def test_sentences_of_a_file_are_what_is_translated(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("a b c d e\n\nq r s t\n", "utf-8")
    done = bench(TINY, "--file", tmp_path / "lines", "--batch", "2", "--threads", "1", "--rounds", "1", "--json")
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["rows"]
    assert row["sentences"] == 2
    assert row["tokens_per_second"] == pytest.approx(row["sentences_per_second"] * 9 / 2)  # it reverses them


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = bench(TINY, "--batch", "1,2", "--threads", "1", "--rounds", "1", "--plot", tmp_path / "steps.png")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([TINY, "--batch", "0"], 2, "numbers above 0"),
        ([TINY, "--batch", "1,x"], 2, "numbers above 0"),
        ([TINY, "--tokens", "5"], 2, "SOURCE,TARGET"),
        ([TINY, "--tokens", "5,1"], 2, "SOURCE,TARGET"),
        ([TINY, "--tokens", "5,5", "--file", "lines"], 2, "not both"),
        ([TINY, "--against", "torch"], 2, "belong together"),
        ([TINY, "--reference", "folder"], 2, "belong together"),
        ([TINY, "--plot", "missing/steps.png"], 2, "missing must be a folder"),
        (["missing"], 1, "missing does not exist"),
        ([TINY, "--file", "missing"], 1, "missing: No such file"),
        ([TINY, "--file", "empty"], 1, "empty holds no sentence"),
        ([TINY, "--file", "latin"], 1, "latin is not UTF-8"),
        ([TINY, "--tokens", "5,99"], 1, "the model has 24 positions"),
        ([TINY, "--tokens", "99,5"], 1, "the model has 24 positions"),
        ([TINY, "--provider", "cuda"], 1, "seq2onnx: "),
    ],
    ids=lambda value: " ".join(map(str, value[1:])) if isinstance(value, list) else None,
)
def test_what_cannot_be_measured_is_one_line(
    arguments: list[str | Path], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "cuda" in arguments:
        import onnxruntime

        if "CUDAExecutionProvider" in onnxruntime.get_available_providers() and Path("/dev/nvidia0").exists():
            pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("\n \n", "utf-8")
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    done = bench(*arguments, "--rounds", "1", "--threads", "1")
    assert done.exit_code == code
    assert done.stdout == ""
    *_, last = done.stderr.splitlines()
    assert last.startswith("Error: ")
    assert message in last
    assert "Traceback" not in done.stderr


def test_numbers_are_read_sorted_and_once() -> None:
    context, option = click.Context(main), click.Option(["--batch"])
    assert parse_batches(context, option, "8,1,8") == [1, 8]
    assert parse_tokens(context, option, "32,64") == (32, 64)
    assert parse_tokens(context, option, None) is None


def test_a_rival_takes_turns_and_the_ratio_is_shown(exports: "Callable[[str], Export]") -> None:
    pytest.importorskip("torch")
    export = exports("pre-norm, all shared")
    options = ["--against", "torch", "--reference", str(export.checkpoint), "--tokens", "5,4", "--batch", "2"]
    done = bench(export.bundle.folder, *options, "--threads", "1", "--rounds", "3", "--json")
    assert done.exit_code == 0, done.output
    ((rival,), (row,)) = (json.loads(done.stdout)[name] for name in ("against", "rows"))
    assert (rival["engine"], rival["threads"], rival["batch"]) == ("torch", 1, 2)
    assert len(rival["ratio"]["rounds"]) == 3
    assert rival["ratio"]["ratio"] == pytest.approx(row["tokens_per_second"] / rival["tokens_per_second"])
    table = bench(export.bundle.folder, *options, "--threads", "1", "--rounds", "1")
    assert "Against others" in table.stdout


@pytest.mark.parametrize("rival", ["torch", "ctranslate2", "transformers"])
def test_a_rival_without_its_model_is_one_line(rival: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    options = ["--against", rival, "--reference", str(tmp_path / "nothing"), "--threads", "1", "--rounds", "1"]
    done = bench(TINY, *options)
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: ")
    assert "nothing" in line


def test_what_is_forced_goes_before_what_the_bundle_says() -> None:
    defaults = GenerationConfig(num_beams=4, num_return_sequences=2, forced_eos_token_id=3, bad_words_ids=((0,),))
    forced = search_options(defaults, TASK)
    assert (forced.num_beams, forced.num_return_sequences) == (1, 1)
    assert (forced.min_new_tokens, forced.max_new_tokens, forced.forced_eos_token_id) == (4, 4, None)
    assert forced.bad_words_ids == ((0,),)
    free = search_options(defaults, TASK._replace(tokens=None, beams=3))
    assert (free.num_beams, free.max_new_tokens, free.forced_eos_token_id) == (3, None, 3)


def test_the_workload_has_what_the_options_say(tmp_path: Path) -> None:
    plan, passport = Plan(TINY, [3], [1], "cpu", 2, (6, 5), None, 1, [], None), read_passport(TINY)
    made = planned_workload(plan, passport, 3)
    assert (made.beams, made.tokens, [[len(row) for row in batch] for batch in made.batches]) == (2, 5, [[6, 6, 6]])
    short = planned_workload(plan._replace(tokens=None), passport, 1)
    assert (short.tokens, len(short.batches[0][0])) == (23, 24)  # the model has 24 positions, an output needs a start
    (tmp_path / "lines").write_text("a b c\nd\ne f\n", "utf-8")
    free = planned_workload(plan._replace(tokens=None, file=tmp_path / "lines"), passport, 2)
    assert (free.beams, free.tokens, [[len(row) for row in batch] for batch in free.batches]) == (
        2,
        None,
        [[2, 3], [4]],
    )


def test_an_engine_has_a_process_of_its_own_that_ends_with_it() -> None:
    before = {child.pid for child in multiprocessing.active_children()}
    with Worker(Entry("ours", "seq2onnx", TINY, 1)) as worker:
        (child,) = [child for child in multiprocessing.active_children() if child.pid not in before]
        worker.prepare(TASK)
        lap = worker.run()
        assert [len(output) for output in lap.outputs] == [4, 4]
        assert lap.seconds > 0
        assert child.is_alive()
    assert not child.is_alive()


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="Windows cannot stop a process")
def test_an_engine_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "PATIENCE", 0.1)
    before = {child.pid for child in multiprocessing.active_children()}
    with Worker(Entry("ours", "seq2onnx", TINY, 1)):
        (child,) = [child for child in multiprocessing.active_children() if child.pid not in before]
        os.kill(child.pid or 0, signal.SIGSTOP)
    assert not child.is_alive()


def test_an_engine_that_dies_is_an_error_that_says_so() -> None:
    before = {child.pid for child in multiprocessing.active_children()}
    with Worker(Entry("ours", "seq2onnx", TINY, 1)) as worker:
        (child,) = [child for child in multiprocessing.active_children() if child.pid not in before]
        child.kill()
        child.join()
        with pytest.raises(EngineError, match="ours: its process has ended with exit code -9"):
            worker.run()


def test_an_engine_that_refuses_stays_there_for_what_follows() -> None:
    with Worker(Entry("ours", "seq2onnx", TINY, 1)) as worker:
        with pytest.raises(EngineError, match="ours: there is no workload yet"):
            worker.run()
        with pytest.raises(EngineError, match="24 positions"):
            worker.prepare(TASK._replace(tokens=60))
        worker.prepare(TASK)
        assert len(worker.run().outputs) == 2
