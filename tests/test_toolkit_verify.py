"""`toolkit verify`: settings, thresholds, explanations, reports and records."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from runtime_support import TINY, edit_passport

from exporters.restore import restore_model
from models.checkpoint import save_checkpoint
from runtime.bundle import Bundle, record_files
from runtime.parity.gate import THRESHOLDS
from runtime.threads import available_cpus
from runtime.tokenizer import TOKENIZER_FILES
from runtime.verify import Setting
from toolkit.cli import main
from toolkit.verify_command import chosen_settings


def verify(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


def as_json(*arguments: str | Path) -> dict[str, Any]:
    result = verify(*arguments, "--json")
    assert result.stdout, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["passed"] == (result.exit_code == 0)
    return found


def refusal(result: Result, code: int = 1) -> str:
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    line: str = result.stderr.splitlines()[-1]
    assert line.startswith("Error: ")
    return line


def change_weights(folder: Path, where: int = 2000, factor: float = 1.0) -> None:
    """Another number among the weights, or all of them scaled; the passport vouches for them."""
    weights = np.fromfile(folder / "weights.bin", np.float32)
    weights[where] += 0.5
    weights *= factor
    weights.tofile(folder / "weights.bin")
    (entry,) = record_files(folder, ["weights.bin"]).values()
    edit_passport(
        folder,
        lambda passport: passport["files"].update({"weights.bin": {"size": entry.size, "sha256": entry.sha256}}),
    )


# Settings


def test_one_setting_brings_what_is_usually_tried_with_it() -> None:
    names = [str(setting) for setting in chosen_settings([], [], [])]
    assert names[0] == str(Setting())
    assert [name.split(", ")[1].split()[1] for name in names[:4]] == ["all", "none", "basic", "extended"]
    assert len(names) == 4 + (available_cpus() > 1)
    assert [str(setting) for setting in chosen_settings(["openvino"], ["none"], [2])] == ["openvino, 2 threads"]


def test_several_make_every_combination_once_the_first_of_each_first() -> None:
    found = chosen_settings(["reference", "ort-cpu"], ["basic", "all"], [2, 1])
    assert [str(setting) for setting in found] == [
        "reference",
        "ort-cpu, optimization basic, 2 threads",
        "ort-cpu, optimization basic, 1 thread",
        "ort-cpu, optimization all, 2 threads",
        "ort-cpu, optimization all, 1 thread",
    ]


def test_several_runtimes_make_a_matrix() -> None:
    report = as_json(TINY, "--runtime", "reference", "--runtime", "ort-cpu", "--runtime", "openvino", "--threads", "1")
    settings = [row["setting"] for row in report["settings"]]
    assert settings == ["reference", "ort-cpu, optimization all, 1 thread", "openvino, 1 thread"]
    assert all(row["passed"] and set(row["rungs"]) == {"0", "2", "3", "4", "5"} for row in report["settings"])
    assert report["tensors"] != as_json(TINY, "--runtime", "openvino", "--threads", "1")["tensors"], "one and the same"
    shown = verify(TINY, "--runtime", "reference", "--runtime", "ort-cpu", "--threads", "1").stdout
    assert "The ladder, at reference" in shown
    assert "At every setting" in shown


def test_a_setting_that_fails_is_named_on_the_last_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    """The level at which the weights come out wrong, as a faulty rewrite would do it."""
    from runtime import verify as module
    from runtime.session import OrtBackend

    class Faulty(OrtBackend):
        def prefill(self, *inputs: Any) -> Any:
            logits, cache = super().prefill(*inputs)
            return self.put(self.get(logits) + np.float32(0.01)), cache

    def opener(bundle: Bundle, setting: Setting) -> Any:
        faulty = setting.optimization in ("extended", "all")
        return (Faulty if faulty else OrtBackend)(bundle, threads=1, optimization=setting.optimization)

    monkeypatch.setattr(module, "open_backend", opener)
    report = as_json(TINY)
    assert next(rung["rung"] for rung in report["rungs"] if not rung["passed"]) == 2
    problems = report["rungs"][6]["problems"]
    assert any(
        "optimization extended" in problem and "rung 2 (graph): prefill: logits" in problem for problem in problems
    )
    assert "ort-cpu breaks at optimization extended: none and basic pass" in problems


# Thresholds


def test_a_lower_precision_is_judged_by_figures_and_limits(tiny: Path) -> None:
    edit_passport(tiny, lambda passport: passport.update(precision="int8"))
    report = as_json(tiny)
    figures = {figure["name"]: figure for figure in report["figures"]}
    assert set(figures) == set(THRESHOLDS)
    assert figures["token_agreement"]["value"] == 1
    assert report["thresholds"]["chrf"] == 90
    assert "What a lower precision is judged by" in verify(tiny).stdout
    report = as_json(tiny, "--threshold", "chrf=100.5", "--threshold", "kl_mean=1")
    assert report["thresholds"] | {"chrf": 100.5, "kl_mean": 1} == report["thresholds"]
    assert [rung["rung"] for rung in report["rungs"] if not rung["passed"]] == [4, 6]
    assert "chrf is 100, expected at least 100.5" in report["rungs"][4]["problems"][0]


@pytest.mark.parametrize(
    ("precision", "threshold", "expected"),
    [
        ("int8", "speed=1", "threshold speed is not known, expected one of token_agreement, kl_mean"),
        ("fp32", "chrf=1", "a bundle in fp32 is held to PyTorch's own error"),
        ("int3", "chrf=1", "the precision 'int3' has no thresholds"),
    ],
)
def test_thresholds_that_mean_nothing_are_refused_before_anything_runs(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, precision: str, threshold: str, expected: str
) -> None:
    from runtime import exam as module

    edit_passport(tiny, lambda passport: passport.update(precision=precision))
    monkeypatch.setattr(module, "load_exam", None)
    # What no threshold fits is no fault of the command line.
    assert expected in refusal(verify(tiny, "--threshold", threshold), code=1 if precision == "int3" else 2)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999", "much"])
def test_a_threshold_is_a_finite_number(value: str) -> None:
    expected = f"'chrf={value}' is not NAME=VALUE with a finite number"
    assert expected in refusal(verify(TINY, "--threshold", f"chrf={value}"), code=2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--runtime", "openvino", "--optimization", "all"], "--optimization belongs to ONNX Runtime, not to openvino"),
        (
            ["--runtime", "reference", "--runtime", "openvino", "--optimization", "all"],
            "--optimization belongs to ONNX Runtime, not to reference and openvino",
        ),
        (
            ["--runtime", "reference", "--threads", "2"],
            "--threads belongs to ONNX Runtime and OpenVINO, not to reference",
        ),
    ],
)
def test_an_option_that_no_runtime_has_is_refused(options: list[str], expected: str) -> None:
    assert refusal(verify(TINY, *options), code=2) == f"Error: {expected}"


@pytest.mark.parametrize("options", [["--optimization", "all"], ["--threads", "1"]])
def test_an_option_that_one_of_the_runtimes_has_is_taken(options: list[str]) -> None:
    report = as_json(TINY, "--runtime", "reference", "--runtime", "ort-cpu", *options)
    assert len(report["settings"]) == 2


# What it says


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_failed_verdict_says_why_in_one_line_on_standard_error(tiny: Path, options: list[str]) -> None:
    change_weights(tiny)
    result = verify(tiny, *options)
    first = next(rung for rung in as_json(tiny)["rungs"] if not rung["passed"])
    assert result.stderr.splitlines()[-1] == f"FAIL: rung 2 (graph): {first['problems'][0]}"
    assert "FAIL: rung" not in result.stdout
    assert "FAIL" not in verify(TINY, *options).stderr


def test_every_stage_says_how_far_it_is() -> None:
    lines = verify(TINY, "--threads", "1", "--threads", "2").stderr.splitlines()
    assert lines == [
        "climbing the ladder at ort-cpu, optimization all, 1 thread (1 of 2)",
        "climbing the ladder at ort-cpu, optimization all, 2 threads (2 of 2)",
    ]


# What it leaves behind


def test_record_writes_the_verdict_into_the_passport(tiny: Path) -> None:
    change_weights(tiny)
    assert verify(tiny, "--record", "--threads", "1", "--threads", "2").exit_code == 1
    found = Bundle(tiny).passport.verification
    assert found is not None
    assert not found.passed
    assert found.rungs["0"] == "pass"
    assert found.rungs["2"] == "fail"
    assert found.setting == "ort-cpu, optimization all, 1 thread"
    assert found.versions["onnxruntime"]
    assert "FAILED at ort-cpu" in " ".join(CliRunner().invoke(main, ["inspect", str(tiny)]).stdout.split())


def test_record_of_a_bundle_without_numbers_leaves_it_readable(tiny: Path) -> None:
    edit_passport(tiny, lambda passport: passport.update(precision="int8"))
    change_weights(tiny, factor=np.nan)
    assert verify(tiny, "--record").exit_code == 1
    found = Bundle(tiny).passport.verification
    assert found is not None
    assert found.figures["kl_mean"] is None
    assert found.exam == "recorded"
    assert len(found.settings) >= 4


def test_record_keeps_limits_and_figures_of_a_lower_precision(tiny: Path) -> None:
    edit_passport(tiny, lambda passport: passport.update(precision="int4"))
    assert verify(tiny, "--record", "--threshold", "kl_p99=0.5").exit_code == 0
    found = Bundle(tiny).passport.verification
    assert found is not None
    assert found.thresholds["kl_p99"] == 0.5
    assert found.figures["chrf"] == 100


def test_without_record_the_bundle_stays_as_it_is(tiny: Path) -> None:
    before = (tiny / "bundle.json").read_bytes()
    assert verify(tiny).exit_code == 0
    assert (tiny / "bundle.json").read_bytes() == before


def test_explain_names_the_module_and_says_so_to_machines_too(tiny: Path) -> None:
    change_weights(tiny, where=-1)
    report = as_json(tiny, "--explain")
    sentence = report["explanation"]["sentence"]
    assert sentence.startswith("The first to leave tolerance is ")
    assert len(report["explanation"]["modules"]) > 40
    assert sentence in " ".join(verify(tiny, "--explain").stdout.split())
    assert as_json(TINY)["explanation"] is None


def test_an_explanation_says_where_it_looked(tiny: Path) -> None:
    change_weights(tiny, where=-1)
    report = as_json(tiny, "--runtime", "openvino", "--threads", "1", "--explain")
    expected = "In ONNX Runtime on the CPU: The first to leave tolerance is "
    assert report["explanation"]["sentence"].startswith(expected)


def test_what_the_recorded_exam_cannot_explain_a_fresh_one_does(tiny: Path, tmp_path: Path) -> None:
    """One number of the embedding, of a token that is not in the small cases that tell of modules."""
    save_checkpoint(restore_model(Bundle(TINY)), tmp_path / "checkpoint")
    for name in TOKENIZER_FILES:
        shutil.copyfile(TINY / name, tmp_path / "checkpoint" / name)
    (tmp_path / "checkpoint" / "sentences.txt").write_text("a b c\n", "utf-8")
    change_weights(tiny, where=2000)
    report = as_json(tiny, "--explain")
    assert not report["passed"]
    assert "with --checkpoint every case tells" in report["explanation"]["sentence"]
    report = as_json(tiny, "--explain", "--record", "--seed", "7", "--checkpoint", tmp_path / "checkpoint")
    found = Bundle(tiny).passport.verification
    assert found is not None
    assert found.exam == "fresh, seed 7"
    assert report["explanation"]["sentence"].startswith("The first to leave tolerance is encoder.embedding in encode: ")


def test_a_report_is_written_whether_it_passes_or_not(tiny: Path, tmp_path: Path) -> None:
    change_weights(tiny)
    for bundle, verdict in ((TINY, "PASS"), (tiny, "FAIL")):
        result = verify(bundle, "--explain", "--report", tmp_path / "report.html")
        assert result.exit_code == (verdict == "FAIL")
        assert verdict in (tmp_path / "report.html").read_text("utf-8")
    assert "No such file or directory" in refusal(verify(TINY, "--report", tmp_path / "missing" / "report.html"))


def test_a_report_never_takes_the_place_of_what_is_no_page(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("one", "utf-8")
    (tmp_path / "link.html").symlink_to(tiny / "bundle.json")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for place in (tiny / "bundle.json", tiny / "golden" / "new.html", tmp_path / "link.html"):
        line = refusal(verify(tiny, "--report", place))
        assert line == f"Error: {place}: lies inside the bundle: write the page elsewhere"
    place = tmp_path / "thesis.txt"
    result = verify(tiny, "--report", place)
    assert refusal(result) == f"Error: {place}: is there, and is no HTML page that could be replaced"
    assert result.stderr.count("\n") == 1, "something was computed"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    (tmp_path / "old.html").write_text("<!doctype HTML><title>old</title>", "utf-8")
    assert verify(tiny, "--threads", "1", "--threads", "2", "--report", tmp_path / "old.html").exit_code == 0
    assert "PASS" in (tmp_path / "old.html").read_text("utf-8")


def test_differences_show_both_sides_and_their_class(tiny: Path) -> None:
    change_weights(tiny, factor=1.3)
    report = as_json(tiny, "--threads", "1")
    first = report["differences"][0]
    assert first["kind"] == "real difference"
    assert len(first["reference_top"]) == len(first["runtime_top"]) == 5
    shown = verify(tiny, "--threads", "1").stdout
    assert "real difference at token" in shown
    assert "top 5" in shown
