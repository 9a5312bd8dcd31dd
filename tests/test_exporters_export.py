"""A bundle appears whole and proven, or not at all."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from exporters_support import VARIANTS, Export, random_model, recorded_graphs, write_checkpoint
from runtime_support import TINY

from exporters import export as module
from exporters.errors import ExportError
from exporters.export import SENTENCES, export_bundle, fresh_exam
from exporters.golden import special_ids
from exporters.graphs import dims_of
from models.errors import ModelError
from runtime.bundle import PASSPORT, Bundle
from runtime.errors import TokenizerError
from runtime.session import OrtBackend
from runtime.tokenizer import TOKENIZER_FILES
from runtime.verify import sit_bundle

Exports = Callable[[str], Export]
NAME = "pre-norm, all shared"


@pytest.fixture
def export(exports: Exports) -> Export:
    return exports(NAME)


@pytest.fixture
def replayed(export: Export, monkeypatch: pytest.MonkeyPatch) -> Export:
    """An export whose graphs need not be traced again."""
    monkeypatch.setattr(module, "export_graphs", recorded_graphs(export))
    return export


def assert_nothing_left(folder: Path) -> None:
    assert list(folder.iterdir()) == []


def weight(graph: ir.Model, ending: str) -> ir.Value:
    return next(value for name, value in graph.graph.initializers.items() if name.endswith(ending))


# A good export


@pytest.mark.parametrize("name", VARIANTS)
def test_the_bundle_opens_and_holds_what_it_should(exports: Exports, name: str) -> None:
    export = exports(name)
    folder, passport = export.bundle.folder, export.bundle.passport
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {
        "bundle.json",
        "config.json",
        "decoder_model.onnx",
        "decoder_with_past_model.onnx",
        "encoder_model.onnx",
        "generation_config.json",
        "golden/exam.json",
        "golden/exam.npz",
        "search/select_rows.onnx",
        "source.spm",
        "target.spm",
        "tokenizer_config.json",
        "vocab.json",
        "weights.bin",
    }
    assert set(passport.files) == files - {PASSPORT}
    assert passport.dims == dims_of(export.config)
    assert passport.special == special_ids(export.config)
    assert passport.precision == "fp32"
    assert {"python", "torch", "onnx", "numpy", "seq2onnx"} <= passport.tools.keys()
    assert all((folder / file).read_bytes() == (TINY / file).read_bytes() for file in TOKENIZER_FILES)


def test_the_passport_keeps_the_verdict(export: Export) -> None:
    kept = export.bundle.passport.verification
    assert kept is not None
    assert kept.passed
    assert kept.provider == "cpu"
    assert kept.runtime.startswith("onnxruntime ")
    assert kept.rungs == dict.fromkeys("01234", "pass")


def test_nothing_is_left_beside_the_bundle(export: Export) -> None:
    assert {path.name for path in export.bundle.folder.parent.iterdir()} == {"bundle", "checkpoint"}


def test_the_stages_are_told_in_order(export: Export) -> None:
    assert export.stages == [
        "loading the checkpoint",
        "tracing encode",
        "tracing prefill",
        "tracing step",
        "checking the graphs",
        "writing the exam",
        "sweeping over sizes that were not traced",
        "sitting the exam",
    ]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_configurations_are_those_that_transformers_reads(exports: Exports, name: str) -> None:
    export = exports(name)
    config = json.loads((export.bundle.folder / "config.json").read_text("utf-8"))
    generation = json.loads((export.bundle.folder / "generation_config.json").read_text("utf-8"))
    assert config["model_type"] == "marian"
    assert config["architectures"] == ["MarianMTModel"]
    assert config["is_encoder_decoder"] is True
    for ours, theirs in {
        "vocab_size": "vocab_size",
        "vocab_size ": "decoder_vocab_size",
        "max_positions": "max_position_embeddings",
        "share_embeddings": "share_encoder_decoder_embeddings",
        "tie_output": "tie_word_embeddings",
        "scale_embedding": "scale_embedding",
        "d_model": "d_model",
        "encoder_layers": "encoder_layers",
        "decoder_layers": "decoder_layers",
        "encoder_attention_heads": "encoder_attention_heads",
        "decoder_attention_heads": "decoder_attention_heads",
        "encoder_ffn_dim": "encoder_ffn_dim",
        "decoder_ffn_dim": "decoder_ffn_dim",
        "activation_function": "activation_function",
    }.items():
        assert config[theirs] == getattr(export.config, ours.strip()), theirs
    for name_of_id in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
        assert config[name_of_id] == generation[name_of_id] == getattr(export.config, name_of_id)
    assert generation["max_length"] == export.config.max_positions


def test_the_same_checkpoint_gives_the_same_files(replayed: Export, tmp_path: Path) -> None:
    export_bundle(replayed.checkpoint, tmp_path / "one")
    export_bundle(replayed.checkpoint, tmp_path / "two")
    one, two = (Bundle(tmp_path / name).passport for name in ("one", "two"))
    assert one.files == two.files
    assert one.files["weights.bin"] == replayed.bundle.passport.files["weights.bin"]
    assert one.files["golden/exam.npz"] == replayed.bundle.passport.files["golden/exam.npz"]


def test_folders_above_the_target_are_made(replayed: Export, tmp_path: Path) -> None:
    assert export_bundle(replayed.checkpoint, tmp_path / "some" / "where" / "bundle").passed
    Bundle(tmp_path / "some" / "where" / "bundle")


def test_the_exam_asks_for_the_sentences_that_are_given(replayed: Export, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("q r s\n\n", "utf-8")
    export_bundle(replayed.checkpoint, tmp_path / "bundle", sentences=tmp_path / "mine.txt")
    exam = json.loads((tmp_path / "bundle" / "golden" / "exam.json").read_text("utf-8"))
    assert [case["label"] for case in exam["tokens"]] == ["q r s, 1 beam", "q r s, 4 beams"]


def test_a_fresh_exam_of_the_right_checkpoint_passes(export: Export) -> None:
    exam = fresh_exam(export.checkpoint, export.bundle, seed=99)
    assert exam.seed == 99
    assert sit_bundle(export.bundle, OrtBackend(export.bundle, threads=1), exam).passed


def test_a_fresh_exam_of_other_weights_fails(export: Export, tmp_path: Path) -> None:
    other = write_checkpoint(random_model(export.config, seed=11), tmp_path / "other")
    exam = fresh_exam(other, export.bundle, seed=1)
    report = sit_bundle(export.bundle, OrtBackend(export.bundle, threads=1), exam)
    assert [rung.rung for rung in report.rungs if not rung.passed] == [2, 3, 4]


def test_a_fresh_exam_of_a_model_of_other_sizes_is_refused(exports: Exports, export: Export) -> None:
    other = exports("as Marian, opset 18")
    bundle = exports("post-norm, nothing shared").bundle
    with pytest.raises(ExportError, match="is not of"):
        fresh_exam(other.checkpoint, bundle, seed=1)


# Planted faults: each makes the export fail and leaves nothing


def change_a_weight(verb: str, graph: ir.Model) -> None:
    if verb == "prefill":
        value = weight(graph, "self_attention.q_proj.weight.T")
        array = np.array(value.const_value.numpy())  # type: ignore[union-attr]
        array[3, 4] += 0.05
        value.const_value = ir.tensor(array, name=value.name)


def drop_a_bias(verb: str, graph: ir.Model) -> None:
    if verb == "step":
        value = weight(graph, "cross_attention.v_proj.bias" if False else "cross_attention.out_proj.bias")
        value.const_value = ir.tensor(np.zeros(value.shape.numpy(), np.float32), name=value.name)  # type: ignore[union-attr]


def swap_outputs(verb: str, graph: ir.Model) -> None:
    if verb == "step":
        key, value = graph.graph.outputs[1], graph.graph.outputs[2]
        key.name, value.name = "tmp", key.name
        key.name = "present.0.decoder.value"
        graph.graph.outputs[1], graph.graph.outputs[2] = value, key


def freeze_an_axis(verb: str, graph: ir.Model) -> None:
    if verb == "encode":
        graph.graph.inputs[0].shape = ir.Shape([3, "encoder_sequence_length"])


def drop_an_output(verb: str, graph: ir.Model) -> None:
    if verb == "prefill":
        graph.graph.outputs.pop()


def ignore_the_mask(verb: str, graph: ir.Model) -> None:
    """Attention without its mask, which only a batch with padding shows."""
    if verb == "step":
        for node in graph.graph:
            if node.op_type == "Attention" and "cross" in str(node.name):
                node.replace_input_with(3, None)


def always_the_first_position(verb: str, graph: ir.Model) -> None:
    """The table of positions read from its beginning, whatever the past."""
    if verb == "step":
        node = next(node for node in graph.graph if str(node.name).endswith("positions/Slice"))
        zero, one = (
            ir.Value(
                name=f"fault_{number}",
                shape=ir.Shape([1]),
                type=ir.TensorType(ir.DataType.INT64),
                const_value=ir.tensor(np.array([number])),
            )
            for number in (0, 1)
        )
        for place, constant in ((1, zero), (2, one)):
            graph.graph.register_initializer(constant)
            node.replace_input_with(place, constant)


def bake_in_a_size(verb: str, graph: ir.Model) -> None:
    """Every axis is declared free, but a reshape holds the number of rows that was traced."""
    if verb == "encode":
        ids = graph.graph.inputs[0]
        shape = ir.Value(
            name="fault",
            shape=ir.Shape([2]),
            type=ir.TensorType(ir.DataType.INT64),
            const_value=ir.tensor(np.array([4, -1])),
        )
        graph.graph.register_initializer(shape)
        turned = ir.val("turned", dtype=ir.DataType.INT64)
        node = ir.node("Reshape", [ids, shape], outputs=[turned], name="fault/Reshape")
        for user, place in list(ids.uses()):
            user.replace_input_with(place, turned)
        node.replace_input_with(0, ids)
        graph.graph.insert_before(graph.graph[0], node)


FAULTS: dict[str, tuple[Callable[[str, ir.Model], None], str]] = {
    "a changed weight": (change_a_weight, r"rung 2 \(graph\): prefill: logits is"),
    "a dropped bias": (drop_a_bias, r"rung 2 \(graph\): step: logits is"),
    "swapped outputs": (swap_outputs, r"rung 2 \(graph\): step: present.0.decoder.key is"),
    "a frozen axis": (
        freeze_an_axis,
        r"rung 0 \(structure\): encode: input_ids is int64 \(3, encoder_sequence_length\)",
    ),
    "a dropped output": (drop_an_output, r"rung 0 \(structure\): prefill: present.0.encoder.value is missing"),
    "a mask that is not read": (ignore_the_mask, r"rung 2 \(graph\): step: logits is"),
    "a position that stands still": (always_the_first_position, r"rung 2 \(graph\): step: logits is"),
    "a size baked in": (bake_in_a_size, r"rung 2 \(graph\): encode: last_hidden_state is inf"),
}


@pytest.mark.parametrize(("fault", "expected"), FAULTS.values(), ids=FAULTS)
def test_a_fault_between_the_model_and_the_bundle_fails_the_export(
    export: Export,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[str, ir.Model], None],
    expected: str,
) -> None:
    monkeypatch.setattr(module, "export_graphs", recorded_graphs(export, fault))
    with pytest.raises(ExportError, match=expected) as caught:
        export_bundle(export.checkpoint, tmp_path / "bundle")
    assert "the export failed the sweep over sizes that were not traced" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_nothing_left(tmp_path)


def test_a_graph_that_the_checker_refuses_fails_the_export(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown_operator(verb: str, graph: ir.Model) -> None:
        if verb == "prefill":
            graph.graph[3].op_type = "Teleport"

    monkeypatch.setattr(module, "export_graphs", recorded_graphs(export, unknown_operator))
    with pytest.raises(ExportError, match=r"prefill: onnx\.checker refuses the graph"):
        export_bundle(export.checkpoint, tmp_path / "bundle")
    assert_nothing_left(tmp_path)


def test_a_failure_keeps_the_bundle_that_was_there(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "export_graphs", recorded_graphs(export))
    export_bundle(export.checkpoint, tmp_path / "bundle")
    before = (tmp_path / "bundle" / PASSPORT).read_bytes()
    monkeypatch.setattr(module, "export_graphs", recorded_graphs(export, change_a_weight))
    with pytest.raises(ExportError):
        export_bundle(export.checkpoint, tmp_path / "bundle", force=True)
    assert (tmp_path / "bundle" / PASSPORT).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    Bundle(tmp_path / "bundle")


@pytest.mark.parametrize("stage", ["loading prefill", "writing the exam", "sitting the exam"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interruption_at_any_stage_leaves_nothing(
    replayed: Export, tmp_path: Path, stage: str, error: type[BaseException]
) -> None:
    def say(now: str) -> None:
        if now == stage:
            raise error

    with pytest.raises(error):
        export_bundle(replayed.checkpoint, tmp_path / "bundle", say=say)
    assert_nothing_left(tmp_path)


# What stands there already


def test_an_existing_bundle_is_replaced_only_with_force(replayed: Export, tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    export_bundle(replayed.checkpoint, target)
    (target / "note.txt").write_text("old")
    with pytest.raises(ExportError, match="exists already: choose another folder, or replace it with --force"):
        export_bundle(replayed.checkpoint, target)
    assert (target / "note.txt").exists()
    export_bundle(replayed.checkpoint, target, force=True)
    assert not (target / "note.txt").exists()
    Bundle(target)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("what", ["folder", "empty folder", "file"])
def test_what_is_no_bundle_is_never_replaced(replayed: Export, tmp_path: Path, what: str, *, force: bool) -> None:
    target = tmp_path / "precious"
    if what == "file":
        target.write_text("precious")
    else:
        target.mkdir()
        if what == "folder":
            (target / "thesis.txt").write_text("precious")
    with pytest.raises(ExportError, match="exists already and is not a bundle: choose another folder"):
        export_bundle(replayed.checkpoint, target, force=force)
    assert target.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_half_made_folder_of_a_killed_export_is_cleared_away(replayed: Export, tmp_path: Path) -> None:
    (tmp_path / ".bundle.partial").mkdir()
    (tmp_path / ".bundle.partial" / "old.bin").write_bytes(b"old")
    export_bundle(replayed.checkpoint, tmp_path / "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    assert not (tmp_path / "bundle" / "old.bin").exists()


# What cannot be exported


def checkpoint_without(source: Path, folder: Path, name: str) -> Path:
    folder.mkdir()
    for path in source.iterdir():
        if path.name != name:
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize(
    ("missing", "error"),
    [
        ("model.json", ModelError),
        ("model.safetensors", ModelError),
        ("vocab.json", TokenizerError),
        ("source.spm", TokenizerError),
        (SENTENCES, ExportError),
    ],
)
def test_an_incomplete_checkpoint_is_refused_with_the_name_of_what_is_missing(
    export: Export, tmp_path: Path, missing: str, error: type[Exception]
) -> None:
    checkpoint = checkpoint_without(export.checkpoint, tmp_path / "checkpoint", missing)
    with pytest.raises(error, match=missing):
        export_bundle(checkpoint, tmp_path / "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize(
    ("content", "expected"), [(b"\n \n", "holds no sentence"), (b"a b\n\xff\n", "is not UTF-8"), (b"a " * 30, "30")]
)
def test_sentences_that_cannot_be_asked_for_are_refused(
    replayed: Export, tmp_path: Path, content: bytes, expected: str
) -> None:
    (tmp_path / "mine.txt").write_bytes(content)
    with pytest.raises(ExportError, match=expected):
        export_bundle(replayed.checkpoint, tmp_path / "bundle", sentences=tmp_path / "mine.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
