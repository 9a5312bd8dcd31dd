"""`toolkit verify`, `inspect` and `export` where something is wrong: one line, an exit code, nothing half-made."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner, Result
from exporters_support import VARIANTS, Export, recorded_graphs
from runtime_support import POSITIONS, TINY, edit_passport

from exporters import export as module
from models.checkpoint import CONFIG_FILE
from runtime.bundle import record_files
from toolkit.cli import main
from toolkit.inspect_command import CHECKPOINT

Exports = Callable[[str], Export]


def toolkit(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


def refusal(result: Result, code: int = 1) -> str:
    """The one line by which a command refused; stages that came before it may stand above."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert isinstance(result.exception, SystemExit)
    line: str = result.stderr.splitlines()[-1]
    assert line.startswith("Error: ")
    return line


def vouch(folder: Path, *names: str) -> None:
    """Let the passport say that the changed files are right."""
    entries = {
        name: {"size": record.size, "sha256": record.sha256} for name, record in record_files(folder, names).items()
    }
    edit_passport(folder, lambda passport: passport["files"].update(entries))


def change_weights(folder: Path, change: Callable[[np.ndarray[Any, Any]], None]) -> None:
    weights = np.fromfile(folder / "weights.bin", np.float32)
    change(weights)
    weights.tofile(folder / "weights.bin")
    vouch(folder, "weights.bin")


def spoil_one(weights: np.ndarray[Any, Any]) -> None:
    weights[2000] += 0.5


def spoil_all(weights: np.ndarray[Any, Any]) -> None:
    weights[:] = np.nan


# verify


@pytest.mark.parametrize("change", [spoil_one, spoil_all])
def test_verify_reports_failure_to_machines_with_exit_code_1(
    tiny: Path, change: Callable[[np.ndarray[Any, Any]], None]
) -> None:
    change_weights(tiny, change)
    result = toolkit("verify", tiny, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["passed"] is False
    assert report["environment"]["onnxruntime"]
    assert report["settings"][0]["setting"].startswith("ort-cpu, optimization all, ")
    failed = [rung["rung"] for rung in report["rungs"] if not rung["passed"]]
    assert failed[0] == 2
    assert any(not tensor["passed"] for tensor in report["tensors"])


def test_verify_reports_wrong_graphs_on_the_first_rung(tiny: Path) -> None:
    edit_passport(tiny, lambda passport: passport["dims"].update(layers=2))
    result = toolkit("verify", tiny)
    assert result.exit_code == 1
    assert "rung 0: step: past_key_values.1.decoder.key is missing" in result.stdout
    assert result.stdout.rstrip().endswith("FAIL")
    assert "Traceback" not in result.output


def test_verify_survives_a_graph_that_onnx_runtime_gives_up_on(tiny: Path) -> None:
    """A wrong shape computed inside the graph shows only when it runs; names of nodes are no markup."""
    graph = ir.load(tiny / "encoder_model.onnx")
    mask = graph.graph.inputs[1]
    two = ir.Value(
        name="two", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64), const_value=ir.tensor(np.array([2]))
    )
    shape = ir.node("Shape", [mask], name="fault/Shape")
    wrong = ir.node("Mul", [shape.outputs[0], two], name="fault/Mul")
    turned = ir.node("Reshape", [mask, wrong.outputs[0]], name="[/x]boom")
    for user, place in list(mask.uses()):
        if user not in (shape, turned):
            user.replace_input_with(place, turned.outputs[0])
    graph.graph.register_initializer(two)
    graph.graph.insert_before(graph.graph[0], [shape, wrong, turned])
    ir.save(graph, tiny / "encoder_model.onnx")
    vouch(tiny, "encoder_model.onnx")
    result = toolkit("verify", tiny)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 1
    assert "rung 2: encode: last_hidden_state is inf from the reference" in " ".join(result.stdout.split())
    assert "gave up in encode" in " ".join(result.stdout.split())
    assert "[/x]boom" in result.stdout
    assert "[/x]boom" in result.stderr.splitlines()[-1]
    assert "gave up in encode" in refusal(toolkit("run", "--bundle", tiny, "a b c"))


@pytest.mark.parametrize("name", ["exam.json", "exam.npz"])
def test_verify_refuses_a_damaged_exam_in_one_line(tiny: Path, name: str) -> None:
    (tiny / "golden" / name).write_bytes(b"damaged")
    assert f"golden/{name} has 7 bytes" in refusal(toolkit("verify", tiny))
    vouch(tiny, f"golden/{name}")
    assert "is damaged" in refusal(toolkit("verify", tiny))


def test_verify_refuses_a_provider_that_would_not_be_used() -> None:
    result = toolkit("verify", TINY, "--runtime", "ort-cuda")
    if result.exit_code == 0:
        pytest.skip("CUDA works here")
    assert "cuda was asked for" in refusal(result)


@pytest.mark.parametrize("path", ["nothing", "bundle.json"])
def test_verify_needs_a_bundle(tiny: Path, path: str) -> None:
    assert "expected a bundle" in refusal(toolkit("verify", tiny / path))


def test_verify_refuses_a_checkpoint_of_another_size(exports: Exports) -> None:
    other = exports("pre-norm, all shared")
    assert "is not of" in refusal(toolkit("verify", TINY, "--checkpoint", other.checkpoint))
    assert "is not a checkpoint" in refusal(toolkit("verify", TINY, "--checkpoint", TINY))


def test_sentences_belong_to_a_fresh_exam(tmp_path: Path) -> None:
    line = refusal(toolkit("verify", TINY, "--sentences", tmp_path), code=2)
    assert line == "Error: --seed and --sentences belong to the fresh exam of --checkpoint"


# inspect


def test_inspect_knows_a_checkpoint_by_the_file_that_models_writes() -> None:
    assert CHECKPOINT == CONFIG_FILE


@pytest.mark.parametrize("name", VARIANTS)
def test_shapes_of_every_variant_come_from_its_bundle(exports: Exports, name: str) -> None:
    export = exports(name)
    bundle = toolkit("inspect", export.bundle.folder, "--shapes", "a b c", "--json")
    assert bundle.exit_code == 0, bundle.output
    assert bundle.stdout == toolkit("inspect", export.checkpoint, "--shapes", "a b c", "--json").stdout
    rows = {row["point"]: row["shape"] for row in json.loads(bundle.stdout)["inference"]}
    assert rows["cross caches (computed once)"] == [1, export.config.decoder_attention_heads, 4, 16]


def test_shapes_of_an_empty_text_are_those_of_the_end_alone() -> None:
    result = toolkit("inspect", TINY, "--shapes", "", "--json")
    assert result.exit_code == 0
    rows = {row["point"]: row["shape"] for row in json.loads(result.stdout)["training"]}
    assert rows["source ids"] == [1, 1]


def test_shapes_of_a_text_that_is_too_long_are_refused_with_both_numbers() -> None:
    line = refusal(toolkit("inspect", TINY, "--shapes", "a " * POSITIONS))
    assert str(POSITIONS) in line
    assert str(POSITIONS + 1) in line


@pytest.mark.parametrize("options", [[], ["--json"], ["--shapes", "a b"]])
def test_inspect_refuses_what_is_broken_or_nothing(tiny: Path, options: list[str]) -> None:
    assert "is neither bundle nor checkpoint" in refusal(toolkit("inspect", tiny / "nothing", *options))
    assert "is neither bundle nor checkpoint" in refusal(toolkit("inspect", tiny / "vocab.json", *options))
    (tiny / "vocab.json").unlink()
    assert "vocab.json is missing" in refusal(toolkit("inspect", tiny, *options))


def test_inspect_shows_every_file_and_every_tensor_to_machines() -> None:
    shown = json.loads(toolkit("inspect", TINY, "--json").stdout)
    assert {path.name for path in TINY.rglob("*") if path.is_file()} - {"bundle.json"} == {
        Path(name).name for name in shown["passport"]["files"]
    }
    for verb, sides in shown["graphs"].items():
        graph = onnx.load(TINY / shown["passport"]["roles"][verb], load_external_data=False).graph
        assert [tensor["name"] for tensor in sides["inputs"]] == [value.name for value in graph.input]
        assert [tensor["name"] for tensor in sides["outputs"]] == [value.name for value in graph.output]


# export


@pytest.fixture
def replayed(exports: Exports, monkeypatch: pytest.MonkeyPatch) -> Export:
    """An export whose graphs need not be traced again."""
    export = exports("pre-norm, all shared")
    monkeypatch.setattr(module, "export_graphs", recorded_graphs(export))
    return export


def test_export_tells_people_what_to_do_next_and_machines_the_report(replayed: Export, tmp_path: Path) -> None:
    result = toolkit("export", replayed.checkpoint, tmp_path / "bundle")
    assert result.exit_code == 0, result.output
    assert f"Try: toolkit run --bundle {tmp_path / 'bundle'} TEXT" in result.stdout
    assert "sitting the exam" in result.stderr
    result = toolkit("export", replayed.checkpoint, tmp_path / "bundle", "--force", "--json")
    report = json.loads(result.stdout)
    assert report["passed"]
    assert report["bundle"] == str(tmp_path / "bundle")


def test_a_failed_export_is_one_line_and_leaves_nothing(
    exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(verb: str, graph: ir.Model) -> None:
        if verb == "encode":
            graph.graph.outputs[0].name = "memory"

    export = exports("pre-norm, all shared")
    monkeypatch.setattr(module, "export_graphs", recorded_graphs(export, fault))
    line = refusal(toolkit("export", export.checkpoint, tmp_path / "bundle"))
    assert "rung 0 (structure): encode: last_hidden_state is missing" in line
    assert line.endswith("Nothing was written")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_during_an_export_leaves_nothing(
    exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(verb: str, _: ir.Model) -> None:
        if verb == "step":
            raise KeyboardInterrupt

    export = exports("pre-norm, all shared")
    monkeypatch.setattr(module, "export_graphs", recorded_graphs(export, interrupt))
    result = toolkit("export", export.checkpoint, tmp_path / "bundle")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "Aborted!"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["export"], "Missing argument 'FOLDER'"),
        (["export", "a"], "Missing argument 'BUNDLE'"),
        (["export", "a", "b", "--opset", "17"], "17 is not in the range 18<=x<=23"),
        (["export", "a", "b", "--opset", "new"], "'new' is not a valid integer"),
        (["export", "a", "b", "--precision", "int3"], "'int3' is not one of 'fp32', 'fp16', 'int8', 'int4'"),
        (["verify"], "Missing argument 'BUNDLE'"),
        (["verify", "a", "--runtime", "tpu"], "'tpu' is not one of 'ort-cpu', 'ort-cuda', 'openvino', 'reference'"),
        (["verify", "a", "--optimization", "most"], "'most' is not one of 'none', 'basic', 'extended', 'all'"),
        (["verify", "a", "--threshold", "chrf"], "'chrf' is not NAME=VALUE"),
        (["verify", "a", "--threads", "0"], "0 is not in the range x>=1"),
        (["inspect"], "Missing argument 'BUNDLE|CHECKPOINT'"),
        (["translate"], "No such command 'translate'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_line_says_what_is_wrong(arguments: list[str], expected: str) -> None:
    assert expected in refusal(toolkit(*arguments), code=2)


def test_examples_in_the_help_stand_on_lines_of_their_own() -> None:
    shown = toolkit("run", "--help").stdout
    assert "\n  toolkit run --file input.txt --beam 4 > output.txt\n" in shown
    assert "\b" not in shown
    assert r"\b" not in shown
