"""A bundle appears whole and proven, or not at all."""

import json
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
from exporters_support import VARIANTS, Export, random_model, recorded_graphs, write_checkpoint
from runtime_support import TINY

from exporters import export as module
from exporters.errors import ExportError
from exporters.export import export_bundle, fresh_exam
from exporters.golden import special_ids
from exporters.graphs import dims_of
from exporters.source import SENTENCES
from models.errors import ModelError
from runtime.bundle import PASSPORT, Bundle
from runtime.errors import TokenizerError
from runtime.session import OrtBackend
from runtime.tokenizer import TOKENIZER_FILES
from runtime.verify import Setting, sit_bundle

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


# A good export


@pytest.mark.parametrize("name", VARIANTS)
def test_the_bundle_opens_and_holds_what_it_should(exports: Exports, name: str) -> None:
    export = exports(name)
    folder, passport = export.bundle.folder, export.bundle.passport
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {
        "begin_model.onnx",
        "branch_model.onnx",
        "bundle.json",
        "config.json",
        "decoder_model.onnx",
        "decoder_with_past_model.onnx",
        "encoder_model.onnx",
        "generation_config.json",
        "golden/exam.json",
        "golden/exam.npz",
        "search/rank_tokens.onnx",
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
    assert kept.setting == str(Setting())
    assert kept.versions["onnxruntime"] == onnxruntime.__version__
    assert kept.rungs == dict.fromkeys("012345", "pass") | {"6": "not tried"}
    assert (kept.exam, kept.settings) == ("recorded", [kept.setting])
    assert (kept.thresholds, kept.figures) == ({}, {})


def test_nothing_is_left_beside_the_bundle(export: Export) -> None:
    assert {path.name for path in export.bundle.folder.parent.iterdir()} == {"bundle", "checkpoint"}


def test_the_stages_are_told_in_order(export: Export) -> None:
    assert export.stages == [
        "loading the checkpoint",
        "tracing encode",
        "tracing prefill",
        "tracing step",
        "tracing begin",
        "tracing branch",
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
    assert [rung.rung for rung in report.rungs if not rung.passed] == [2, 3, 4, 6]


def test_a_fresh_exam_of_a_model_of_other_sizes_is_refused(exports: Exports) -> None:
    other = exports("as Marian, opset 18")
    bundle = exports("post-norm, nothing shared").bundle
    with pytest.raises(ExportError, match="is not of"):
        fresh_exam(other.checkpoint, bundle, seed=1)


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
    ("content", "expected"),
    [
        (b"\n \n", "holds no sentence"),
        (b"a b\n\xff\n", "is not UTF-8"),
        (b"a " * 30, "a sentence has 31 tokens, the model has 20 positions"),
    ],
)
def test_sentences_that_cannot_be_asked_for_are_refused(
    replayed: Export, tmp_path: Path, content: bytes, expected: str
) -> None:
    (tmp_path / "mine.txt").write_bytes(content)
    with pytest.raises(ExportError, match=expected):
        export_bundle(replayed.checkpoint, tmp_path / "bundle", sentences=tmp_path / "mine.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
