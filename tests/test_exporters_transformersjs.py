"""The layout of transformers.js: both decoders in one graph, Marian's tokenizer as the tokenizers library reads it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from exporters_support import VARIANTS, Export, recorded_graphs
from nasty_text import NASTY
from tokenizer_support import LANGUAGES, SENTENCES, write_marian, write_opus, write_own, write_separate
from tokenizers import Tokenizer

from exporters import export as module
from exporters.errors import ExportError
from exporters.export import export_bundle
from exporters.merged import USE_CACHE, check_encoder, check_merged
from exporters.tokenizer_json import marian_settings, marian_tokenizer
from exporters.transformersjs import DECODER, ENCODER, write_transformersjs
from runtime.bundle import Bundle
from runtime.contract import GRAPH_FILES, PREFILL, STEP, graph_specs
from runtime.exam import Exam, load_exam
from runtime.tokenizer import open_tokenizer

Exports = Callable[[str], Export]
NAME = "pre-norm, all shared"


@pytest.fixture(scope="module")
def folders(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A bundle of each variant with the layout; made once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("layout") / "bundle"
            shutil.copytree(exports(name).bundle.folder, made[name])
            write_transformersjs(made[name], exports(name).bundle.passport.dims, exam_of(made[name]))
        return made[name]

    return folder


def exam_of(folder: Path) -> Exam:
    return load_exam(folder / "golden")


# Both decoders in one graph


@pytest.mark.parametrize("name", VARIANTS)
def test_inputs_and_outputs_are_those_of_a_merged_decoder(
    exports: Exports, folders: Callable[[str], Path], name: str
) -> None:
    session = ort.InferenceSession(folders(name) / DECODER)
    specs = graph_specs(exports(name).bundle.passport.dims)
    past = [tensor.name for tensor in specs[STEP].inputs if tensor.name.startswith("past_key_values.")]
    assert [node.name for node in session.get_inputs()] == [
        *("encoder_attention_mask", "input_ids", "encoder_hidden_states"),
        *past,
        USE_CACHE,
    ]
    assert [node.name for node in session.get_outputs()] == [tensor.name for tensor in specs[PREFILL].outputs]


@pytest.mark.parametrize("name", VARIANTS)
def test_both_branches_give_every_bit_of_the_graphs_that_they_were_made_of(
    folders: Callable[[str], Path], name: str
) -> None:
    folder = folders(name)
    check_merged(folder, folder / DECODER, exam_of(folder))
    check_encoder(folder, folder / ENCODER, exam_of(folder))


def test_the_step_branch_gives_cross_attention_caches_without_rows(folders: Callable[[str], Path]) -> None:
    folder = folders(NAME)
    case = next(case for case in exam_of(folder).graphs if case.verb == STEP)
    session = ort.InferenceSession(folder / DECODER)
    memory = np.zeros((len(case.inputs["input_ids"]), 0, 32), np.float32)
    names = [node.name for node in session.get_outputs()]
    feeds = {**case.inputs, "encoder_hidden_states": memory, USE_CACHE: np.array([True])}
    answers = dict(zip(names, session.run(names, feeds), strict=True))
    empty = [name for name, array in answers.items() if not array.size]
    assert empty == [name for name in names if ".encoder." in name]
    assert all(answers[name].shape[0] == 0 for name in empty)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_weight_of_both_branches_is_stored_once(folders: Callable[[str], Path], name: str) -> None:
    folder = folders(name)
    graphs = [onnx.load(folder / GRAPH_FILES[verb], load_external_data=False) for verb in (PREFILL, STEP)]
    merged = onnx.load(folder / DECODER, load_external_data=False)

    def places(graph: onnx.ModelProto) -> dict[str, int]:
        stored = [{pair.key: pair.value for pair in tensor.external_data} for tensor in graph.graph.initializer]
        return {place["offset"]: int(place["length"]) for place in stored if place}

    own = {**places(graphs[0]), **places(graphs[1])}
    assert sum(places(merged).values()) == sum(own.values())
    assert len(places(merged)) == len(own)


@pytest.mark.parametrize("file", [DECODER, ENCODER])
def test_other_numbers_in_the_layouts_weights_are_found(
    folders: Callable[[str], Path], tmp_path: Path, file: str
) -> None:
    folder = shutil.copytree(folders(NAME), tmp_path / "bundle")
    weights = np.fromfile(folder / f"{file}_data", np.float32)
    np.where(weights, weights * np.float32(1.001), 0).astype(np.float32).tofile(folder / f"{file}_data")
    check = check_merged if file == DECODER else check_encoder
    with pytest.raises(ExportError, match="gives other numbers than the bundle's own graph"):
        check(folder, folder / file, exam_of(folder))


def test_branches_the_wrong_way_round_are_found(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders(NAME), tmp_path / "bundle")
    graph = onnx.load(folder / DECODER, load_external_data=False)
    for attribute in graph.graph.node[0].attribute:
        attribute.name = {"then_branch": "else_branch", "else_branch": "then_branch"}[attribute.name]
    (folder / DECODER).write_bytes(graph.SerializeToString())
    with pytest.raises(Exception, match=r"other numbers|Non-zero status code|RUNTIME_EXCEPTION|INVALID"):
        check_merged(folder, folder / DECODER, exam_of(folder))


def test_an_exam_that_asks_nothing_checks_nothing(folders: Callable[[str], Path]) -> None:
    folder = folders(NAME)
    exam = exam_of(folder)
    exam.graphs = [case for case in exam.graphs if case.verb != STEP]
    with pytest.raises(ExportError, match="the exam asks nothing about step"):
        check_merged(folder, folder / DECODER, exam)


# The whole bundle


def test_an_export_of_the_layout_has_its_files_in_the_passport(
    exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = exports(NAME)
    monkeypatch.setattr(module, "export_graphs", recorded_graphs(export))
    export_bundle(export.checkpoint, tmp_path / "bundle", layout="transformersjs")
    bundle = Bundle(tmp_path / "bundle")
    added = bundle.passport.files.keys() - export.bundle.passport.files.keys()
    assert added == {ENCODER, f"{ENCODER}_data", DECODER, f"{DECODER}_data", "tokenizer.json"}
    assert bundle.passport.verification is not None
    config = json.loads((bundle.folder / "config.json").read_text("utf-8"))
    assert config["transformers.js_config"] == {"dtype": "fp32", "use_external_data_format": True}
    ours, before = open_tokenizer(bundle.folder), open_tokenizer(export.checkpoint)
    assert [ours.encode(text) for text in NASTY.values()] == [before.encode(text) for text in NASTY.values()]
    assert ours.special == before.special


def test_a_failed_check_leaves_no_bundle(exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export = exports(NAME)

    def fail(*_: object) -> None:
        raise ExportError("gives other numbers")

    monkeypatch.setattr(module, "export_graphs", recorded_graphs(export))
    monkeypatch.setattr("exporters.transformersjs.check_merged", fail)
    with pytest.raises(ExportError, match="gives other numbers"):
        export_bundle(export.checkpoint, tmp_path / "bundle", layout="transformersjs")
    assert not list(tmp_path.iterdir())


# The tokenizer


def opened(folder: Path) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(marian_tokenizer(folder)))


MARKS = {"three accents", "marks over a ligature", "half width sound mark"}
"""The library normalises one grapheme at a time, SentencePiece as far as its table reaches."""
CODES = {name for name, text in NASTY.items() if ">>" in text and "the >>" not in text and text.count("<<") > 0}
"""A code that the vocabulary does not have is one unknown token for Marian; such a file has no way to say so."""


def test_source_ids_are_those_of_our_own_tokenizer(tmp_path: Path) -> None:
    write_own(tmp_path)
    ours, theirs = open_tokenizer(tmp_path), opened(tmp_path)
    texts = {text: text for text in SENTENCES} | NASTY
    other = {name for name, text in texts.items() if ours.encode(text) != theirs.encode(text).ids}
    assert other <= MARKS | CODES
    assert other >= MARKS


def test_source_ids_of_a_model_with_other_pieces_on_the_target_side(tmp_path: Path) -> None:
    write_marian(tmp_path, {})
    ours, theirs = open_tokenizer(tmp_path), opened(tmp_path)
    assert [ours.encode(text) for text in SENTENCES[:5]] == [theirs.encode(text).ids for text in SENTENCES[:5]]


@pytest.mark.parametrize("write", [write_own, write_opus])
def test_text_is_that_of_our_own_tokenizer(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    ours, theirs = open_tokenizer(tmp_path), opened(tmp_path)
    for text in SENTENCES:
        ids = ours.encode_target(text)
        assert ours.decode(ids) == theirs.decode(ids)


def test_a_language_at_the_front_becomes_its_id(tmp_path: Path) -> None:
    write_marian(tmp_path, {})
    for language in LANGUAGES:
        text = f"{language} {SENTENCES[0]}"
        assert opened(tmp_path).encode(text).ids == open_tokenizer(tmp_path).encode(text)


def test_settings_say_what_transformersjs_would_assume_otherwise() -> None:
    given = {"bos_token": "<s>", "pad_token": "<blank>"}
    settings = marian_settings(given)
    assert settings["clean_up_tokenization_spaces"] is False
    assert {name: settings[name] for name in given} == given
    assert (settings["eos_token"], settings["unk_token"]) == ("</s>", "<unk>")


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"model_type": "bpe"}, "is a bpe model"), ({"byte_fallback": True}, "falls back to bytes")],
)
def test_a_model_that_splits_in_another_way_is_refused(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    write_marian(tmp_path, options)
    with pytest.raises(ExportError, match=problem):
        marian_tokenizer(tmp_path)


def test_two_vocabularies_are_refused(tmp_path: Path) -> None:
    write_separate(tmp_path, {})
    with pytest.raises(ExportError, match="vocabularies of their own"):
        marian_tokenizer(tmp_path)
