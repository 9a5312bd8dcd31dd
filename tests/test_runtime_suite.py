"""The ladder as a test suite, as somebody's CI runs it: in an empty folder, on a bundle."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from runtime_support import TINY, edit_passport, tiny_copy

from runtime.bundle import Bundle, record_files
from runtime.contract import graph_specs
from runtime.exam import Exam, GraphCase, TokenCase
from runtime.parity import RUNGS, Report
from runtime.parity.ladder import case_labels
from runtime.parity_suite import _readable
from runtime.verify import Setting, default_sweep, examine

COMMAND = ("-p", "no:cacheprovider", "--pyargs", "runtime.parity_suite")
Results = dict[str, str]
"""Failure message by test, "" where it passed."""


def suite(folder: Path, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pytest", *COMMAND, *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
    )


def junit(path: Path) -> Results:
    """What a CI server reads."""
    found = {}
    for case in ET.parse(path).iter("testcase"):  # noqa: S314 - pytest wrote it
        failure = case.find("failure")
        found[case.attrib["name"]] = "" if failure is None else failure.attrib["message"]
    return found


def vouched(folder: Path, name: str, content: bytes) -> None:
    """Replace a file, and let the passport say that this is right."""
    (folder / name).write_bytes(content)
    entries = {key: {"size": one.size, "sha256": one.sha256} for key, one in record_files(folder, [name]).items()}
    edit_passport(folder, lambda passport: passport["files"].update(entries))


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle in which one weight is another."""
    folder = tiny_copy(tmp_path_factory.mktemp("suite") / "broken")
    weights = np.fromfile(folder / "weights.bin", np.float32)
    weights[2000] += 0.5
    vouched(folder, "weights.bin", weights.tobytes())
    return folder


def test_a_good_bundle_passes_test_by_test(tmp_path: Path, tiny_bundle: Bundle, exam: Exam) -> None:
    done = suite(tmp_path, "--bundle", TINY, "--junitxml", "parity.xml")
    assert done.returncode == 0, done.stdout
    results = junit(tmp_path / "parity.xml")
    assert not any(results.values())
    labels = case_labels(exam, tiny_bundle.passport, graph_specs(tiny_bundle.passport.dims))
    settings = [Setting(), *default_sweep(Setting())]
    assert len(results) == sum(map(len, labels)) + len(settings) + len(RUNGS)
    assert {"test_graph[step B=5 S=1 P=1]", "test_rung[4-tokens]", "test_invariance[logits permuted]"} <= set(results)
    assert f"test_deployment[{settings[1]}]" in results


def test_the_labels_are_those_of_the_report(tiny_bundle: Bundle, exam: Exam) -> None:
    report: Report = examine(tiny_bundle, [Setting()], exam)
    labels = case_labels(exam, tiny_bundle.passport, graph_specs(tiny_bundle.passport.dims))
    for rung, expected in zip(report.rungs[:6], labels, strict=False):
        assert sorted(case.label for case in rung.cases) == sorted(expected)


@pytest.mark.parametrize(
    ("verb", "name"), [("step", "input_ids"), ("prefill", "input_ids"), ("prefill", "encoder_hidden_states")]
)
def test_an_exam_whose_questions_cannot_be_asked_has_no_tests_of_graphs(
    tiny_bundle: Bundle, exam: Exam, verb: str, name: str
) -> None:
    def without(case: GraphCase) -> GraphCase:
        return replace(case, inputs={key: array for key, array in case.inputs.items() if key != name})

    graphs = [without(case) if case.verb == verb else case for case in exam.graphs]
    labels = case_labels(replace(exam, graphs=graphs), tiny_bundle.passport, graph_specs(tiny_bundle.passport.dims))
    assert labels[2] == []


def test_a_broken_bundle_fails_where_it_is_broken_and_says_how(tmp_path: Path, broken: Path) -> None:
    done = suite(tmp_path, "--bundle", broken, "--junitxml", "parity.xml")
    assert done.returncode == 1
    results = junit(tmp_path / "parity.xml")
    failed = {name for name, message in results.items() if message}
    assert "test_rung[2-graph]" in failed
    assert not [name for name in failed if name.startswith(("test_structure", "test_cache"))]
    assert any("from the reference, earned is" in results[name] for name in failed)
    assert "Traceback" not in done.stdout


def test_a_bundle_that_is_refused_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    done = suite(tmp_path, "--bundle", tmp_path / "copy")
    assert done.returncode not in (0, 5)
    assert "is not a bundle: it has no bundle.json" in done.stderr + done.stdout


def test_without_a_bundle_it_says_what_is_missing(tmp_path: Path) -> None:
    done = suite(tmp_path)
    assert done.returncode not in (0, 5)
    assert "name it with --bundle PATH" in done.stderr + done.stdout


def test_a_provider_that_cannot_be_had_fails_every_test(tmp_path: Path) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.InferenceSession(TINY / "encoder_model.onnx").get_providers():
        pytest.skip("CUDA can be used here")
    done = suite(tmp_path, "--bundle", TINY, "--provider", "cuda", "--junitxml", "parity.xml")
    assert done.returncode == 1
    assert "cuda was asked for" in done.stdout
    assert " passed" not in done.stdout.splitlines()[-1]


def test_a_sentence_that_is_not_ascii_is_named_by_its_number(exam: Exam) -> None:
    """Whatever the order, and however many searches there are of each."""
    one, *_ = exam.tokens

    def case(text: str, beams: str) -> TokenCase:
        return replace(one, text=text, label=f"{text}, {beams}")

    cases = [case("我", "1 beam"), case("a, b", "1 beam"), case("爱, 猫", "1 beam"), case("我", "4 beams")]
    found = _readable(replace(exam, tokens=cases))
    assert found == {
        "我, 1 beam": "sentence 1, 1 beam",
        "爱, 猫, 1 beam": "sentence 3, 1 beam",
        "我, 4 beams": "sentence 1, 4 beams",
    }


def test_the_options_belong_to_the_suite_alone(tmp_path: Path) -> None:
    """Pytest loads the plugin in every project where the package is installed."""
    helped = subprocess.run(
        [sys.executable, "-m", "pytest", "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "--bundle" not in helped.stdout
    assert "--provider" not in helped.stdout
    assert "--bundle" in suite(tmp_path, "--help").stdout
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--bundle', default='theirs')\n", "utf-8"
    )
    (tmp_path / "test_theirs.py").write_text(
        "def test_theirs(request):\n    assert request.config.getoption('--bundle') == 'mine'\n", "utf-8"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--bundle", "mine"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_suite_may_be_named_by_its_file_and_run_in_several_processes(tmp_path: Path) -> None:
    from runtime import parity_suite

    pytest.importorskip("xdist", reason="several processes need pytest-xdist")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", parity_suite.__file__, "-n", "1"]
    done = subprocess.run([*command, "--bundle", str(TINY)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_level_that_was_asked_for_comes_first(tmp_path: Path) -> None:
    done = suite(tmp_path, "--bundle", TINY, "--optimization", "basic", "--collect-only", "-q")
    assert done.returncode == 0, done.stdout
    levels = [line for line in done.stdout.splitlines() if "test_deployment" in line]
    assert "optimization basic" in levels[0]
    assert len(levels) == len(set(levels)) >= 4
