"""Models of other libraries on their way to a bundle: tokenizer, sentences, search, and what stands beside graphs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from importers_support import (
    FAMILIES,
    SENTENCES,
    TRANSLATING,
    edit_json,
    hugging_face,
    reference,
    refusal,
    replace_tokenizer,
    write_json,
    write_tokenizer,
)
from team_support import complete_team_folder, team_model, write_team_folder
from torch.nn.utils.rnn import pad_sequence

from exporters.companions import BEAMS, model_settings, search_defaults
from exporters.conversion import convert_folder
from exporters.errors import ExportError
from exporters.golden import special_ids
from exporters.reference import TorchBackend
from exporters.source import exam_sentences, made_up, open_source
from runtime.errors import GenerationError, TokenizerError
from runtime.generation import GenerationConfig, generate
from runtime.tokenizer import TOKENIZER_FILES, open_tokenizer

pytestmark = pytest.mark.usefixtures("quiet")

all_families = pytest.mark.parametrize("family", FAMILIES)
EOS, PAD = 0, TRANSLATING.vocab - 1
"""Of Marian."""


# The search finds what transformers finds.


@pytest.mark.parametrize("beams", [1, 4])
@all_families
def test_greedy_and_beam_search_find_the_ids_of_transformers(
    complete_folders: Callable[[str], Path], family: str, beams: int
) -> None:
    source = open_source(complete_folders(family))
    sentences = [source.tokenizer.encode(text)[:20] for text in SENTENCES]
    config, special = source.model.config, special_ids(source.model.config)
    options = GenerationConfig(num_beams=beams, max_length=20, length_penalty=0.8)
    found = generate(TorchBackend(source.model.double()), sentences, options, special, config.max_positions)

    theirs = reference(family, complete_folders(family))
    rows = [torch.tensor(ids) for ids in sentences]
    ids = pad_sequence(rows, batch_first=True, padding_value=special.pad)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    plain = hugging_face.GenerationConfig(
        num_beams=beams,
        max_length=20,
        length_penalty=0.8,
        pad_token_id=special.pad,
        eos_token_id=special.eos,
        decoder_start_token_id=special.start,
    )
    with torch.no_grad():
        expected = theirs.generate(input_ids=ids, attention_mask=mask, generation_config=plain)
    for (best,), row in zip(found, expected.tolist(), strict=True):
        length = len(best.ids)
        assert row[1 : 1 + length] == best.ids
        assert set(row[1 + length :]) <= {special.pad}
    assert len({token for (best,) in found for token in best.ids}) > 12  # not one token for ever
    assert len({len(best.ids) for (best,) in found}) > 1
    assert len({tuple(best.ids) for (best,) in found}) > 3


# The tokenizer.


def test_one_vocabulary_does_not_serve_a_model_with_two(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_team_folder(team_model(source_vocab=41), tmp_path / "model")
    write_tokenizer(tmp_path / "model", 41, pad=0, eos=3)
    assert "has 41 entries, the model's target vocabulary 47" in refusal(tmp_path / "model")


def test_special_ids_of_vocabulary_and_settings_must_be_the_same(complete_marian: Path) -> None:
    replace_tokenizer(complete_marian, TRANSLATING.vocab, pad=3, eos=5)
    said = refusal(complete_marian)
    assert "the tokenizer has pad at 3, the model's pad_token_id is 119" in said
    assert "the tokenizer has eos at 5, the model's eos_token_id is 0" in said


@pytest.mark.parametrize("name", TOKENIZER_FILES[:3])
def test_missing_and_damaged_files_of_the_tokenizer_are_named(complete_marian: Path, name: str) -> None:
    (complete_marian / name).write_bytes((complete_marian / name).read_bytes()[:50])
    assert str(complete_marian / name) in refusal(complete_marian, TokenizerError)
    (complete_marian / name).unlink()
    assert f"{complete_marian / name} is missing" in refusal(complete_marian, TokenizerError)


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_a_tokenizer_that_leads_out_of_the_folder_is_refused(complete_marian: Path, name: str) -> None:
    shutil.move(complete_marian / name, complete_marian.parent / "outside")
    (complete_marian / name).symlink_to(complete_marian.parent / "outside")
    assert f"{complete_marian / name} leads out of the folder" in refusal(complete_marian)


# Sentences for the exam.


@all_families
def test_a_folder_without_sentences_gets_some_of_its_own_words(
    complete_folders: Callable[[str], Path], family: str
) -> None:
    source = open_source(complete_folders(family))
    found = exam_sentences(complete_folders(family), source)
    assert len(found) == 3
    assert list(found) == list(exam_sentences(complete_folders(family), open_source(complete_folders(family))))
    assert len({len(ids) for ids in found.values()}) > 1
    for ids in found.values():
        assert source.tokenizer.unknown not in ids
        assert 3 < len(ids) <= source.model.config.max_positions


def test_made_up_sentences_prefer_words_to_letters(complete_marian: Path) -> None:
    words = " ".join(made_up(open_tokenizer(complete_marian), 24)).split()
    assert {"is", "the"} & set(words) or sum(len(word) > 1 for word in words) > len(words) / 2


def test_made_up_sentences_fit_into_few_positions(complete_marian: Path) -> None:
    tokenizer = open_tokenizer(complete_marian)
    sentences = made_up(tokenizer, 6)
    assert all(1 < len(tokenizer.encode(sentence)) <= 6 for sentence in sentences)


def test_sentences_that_are_given_go_first_and_those_in_the_folder_second(
    complete_marian: Path, tmp_path: Path
) -> None:
    source = open_source(complete_marian)
    (complete_marian / "sentences.txt").write_text("the dog\n", "utf-8")
    (tmp_path / "mine.txt").write_text("the cat\n\n", "utf-8")
    assert list(exam_sentences(complete_marian, source)) == ["the dog"]
    assert list(exam_sentences(complete_marian, source, tmp_path / "mine.txt")) == ["the cat"]
    assert "gone.txt is missing" in refusal(complete_marian, sentences=tmp_path / "gone.txt")


def test_a_vocabulary_without_words_asks_for_sentences(complete_marian: Path) -> None:
    letters = json.loads((complete_marian / "vocab.json").read_text("utf-8"))
    unknown = {piece if index in (0, PAD, 1) else f"<{index}>": index for piece, index in letters.items()}
    source = open_source(complete_marian)
    write_json(complete_marian / "vocab.json", unknown)
    with pytest.raises(ExportError, match=r"vocab\.json has no words .*: give some with --sentences"):
        exam_sentences(complete_marian, source._replace(tokenizer=open_tokenizer(complete_marian)))


# Defaults of the search.


def test_supported_options_of_the_folder_are_the_defaults(complete_marian: Path) -> None:
    model = open_source(complete_marian).model.config
    found = search_defaults(complete_marian, model)
    assert found.config == GenerationConfig(num_beams=3, max_length=20, length_penalty=0.8)
    assert found.notes == []
    assert found.file["num_beams"] == 3
    assert found.file["decoder_start_token_id"] == PAD
    edit_json(
        complete_marian / "generation_config.json",
        lambda config: config.update(early_stopping=True, min_length=2, num_return_sequences=2, length_penalty=1),
    )
    config = search_defaults(complete_marian, model).config
    assert (config.early_stopping, config.min_length, config.num_return_sequences) == (True, 2, 2)


def test_options_that_the_search_does_not_know_are_refused_all_at_once(complete_marian: Path) -> None:
    wrong = {"some_new_option": [[PAD]], "penalty_alpha": 0.6, "num_beams": 0}
    edit_json(complete_marian / "generation_config.json", lambda config: config.update(wrong))
    said = refusal(complete_marian, GenerationError)
    assert said.startswith(f"{complete_marian / 'generation_config.json'}: ")
    for problem in ("some_new_option is not known", "penalty_alpha is 0.6, which is not supported", "num_beams is 0"):
        assert problem in said


def test_ids_that_the_model_does_not_have_are_refused_all_at_once(complete_marian: Path) -> None:
    size = open_source(complete_marian).model.config.vocab_size
    wrong = {"bad_words_ids": [[PAD], [size]], "suppress_tokens": [size + 5], "forced_eos_token_id": size - 1}
    edit_json(complete_marian / "generation_config.json", lambda config: config.update(wrong))
    said = refusal(complete_marian, GenerationError)
    assert said == (
        f"{complete_marian / 'generation_config.json'}: "
        f"bad_words_ids holds the id {size}, the target vocabulary has 0 .. {size - 1}; "
        f"suppress_tokens holds the id {size + 5}, the target vocabulary has 0 .. {size - 1}"
    )


def test_options_that_mean_nothing_are_told_and_handed_on(complete_marian: Path) -> None:
    model = open_source(complete_marian).model.config
    silent = {"top_k": 50, "use_cache": True, "_from_model_config": True, "transformers_version": "5.24.0", "x": None}
    edit_json(complete_marian / "generation_config.json", lambda config: config.update(silent | {"temperature": 0.6}))
    found = search_defaults(complete_marian, model)
    assert found.config == GenerationConfig(num_beams=3, max_length=20, length_penalty=0.8)
    assert found.file["temperature"] == 0.6
    assert "_from_model_config" not in found.file
    said: list[str] = []
    convert_folder(complete_marian, complete_marian.parent / "checkpoint", note=said.append)
    path = complete_marian / "generation_config.json"
    assert said == [f"{path}: passed over temperature 0.6, which means nothing without do_sample"]


def test_outputs_longer_than_the_positions_are_cut_down_to_them(complete_marian: Path) -> None:
    model = open_source(complete_marian).model.config
    path = complete_marian / "generation_config.json"
    edit_json(path, lambda config: config.update(max_length=512, max_new_tokens=24))
    found = search_defaults(complete_marian, model)
    assert found.config.max_length == found.file["max_length"] == model.max_positions == 24
    assert found.config.max_new_tokens == found.file["max_new_tokens"] == 23  # after the start token
    lengths = "max_length 512, as the model has 24 positions; max_new_tokens 24, as the model has 24 positions"
    assert found.notes == [f"{path}: passed over {lengths}"]
    edit_json(path, lambda config: [config.pop(name) for name in ("max_length", "max_new_tokens")])
    assert search_defaults(complete_marian, model).config.max_length == model.max_positions


def test_older_folders_keep_the_options_among_the_settings(complete_marian: Path) -> None:
    model = open_source(complete_marian).model.config
    (complete_marian / "generation_config.json").unlink()
    edit_json(complete_marian / "config.json", lambda config: config.pop("forced_eos_token_id", None))
    assert search_defaults(complete_marian, model).config == GenerationConfig(max_length=model.max_positions)
    edit_json(
        complete_marian / "config.json", lambda config: config.update(num_beams=6, max_length=20, suppress_tokens=[PAD])
    )
    found = search_defaults(complete_marian, model)
    assert found.config == GenerationConfig(num_beams=6, max_length=20, suppress_tokens=(PAD,))
    assert found.notes == []
    edit_json(
        complete_marian / "config.json", lambda config: config.update(diversity_penalty=0.5, task_specific_params={})
    )
    with pytest.raises(GenerationError, match=r"config\.json: diversity_penalty is 0\.5, which is not supported$"):
        search_defaults(complete_marian, model)


def test_where_nobody_says_the_search_is_our_own(tmp_path: Path) -> None:
    model = open_source(complete_team_folder(tmp_path)).model.config
    found = search_defaults(tmp_path, model)
    assert found.config == GenerationConfig(num_beams=BEAMS, max_length=model.max_positions)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_beams": 0}, "num_beams is 0, expected at least 1"),
        ({"num_beams": "four"}, "num_beams"),
        ({"num_beams": 2, "num_return_sequences": 5}, "num_return_sequences 5 is more than num_beams 2"),
    ],
)
def test_impossible_options_name_the_file(complete_marian: Path, change: dict[str, Any], expected: str) -> None:
    edit_json(complete_marian / "generation_config.json", lambda config: config.update(change))
    said = refusal(complete_marian, GenerationError)
    assert said.startswith(f"{complete_marian / 'generation_config.json'}: ")
    assert expected in said


# Settings for other programs.


@all_families
def test_transformers_reads_the_settings_of_a_bundle_as_its_own(
    complete_folders: Callable[[str], Path], family: str, tmp_path: Path
) -> None:
    source = open_source(complete_folders(family))
    write_json(tmp_path / "config.json", model_settings(source.model.config, source.settings))
    write_json(tmp_path / "generation_config.json", search_defaults(complete_folders(family), source.model.config).file)
    ours = hugging_face.AutoConfig.from_pretrained(tmp_path)
    theirs = hugging_face.AutoConfig.from_pretrained(complete_folders(family))
    assert ours.model_type == family
    different = {
        name: (value, theirs.to_dict().get(name))
        for name, value in ours.to_dict().items()
        if value != theirs.to_dict().get(name)
    }
    assert different.keys() <= {"dtype", "_name_or_path"}
    assert hugging_face.GenerationConfig.from_pretrained(tmp_path).num_beams == 3
