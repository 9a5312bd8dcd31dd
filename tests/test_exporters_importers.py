"""Models of other libraries on their way to a bundle: tokenizer, sentences, search, and what stands beside graphs."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from importers_support import (
    FAMILIES,
    SENTENCES,
    TRANSLATING,
    complete_folder,
    edit_json,
    hugging_face,
    quiet_transformers,
    reference,
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
from runtime.errors import TokenizerError
from runtime.generation import GenerationConfig, generate
from runtime.tokenizer import TOKENIZER_FILES, open_tokenizer

all_families = pytest.mark.parametrize("family", FAMILIES)
EOS, PAD = 0, TRANSLATING.vocab - 1
"""Of Marian."""


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    with quiet_transformers():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A complete folder of each family, made when it is first asked for."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = complete_folder(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


@pytest.fixture
def marian(folders: Callable[[str], Path], tmp_path: Path) -> Path:
    """A complete folder to spoil."""
    return Path(shutil.copytree(folders("marian"), tmp_path / "model"))


def refusal(folder: Path, error: type[Exception] = ExportError, **options: Any) -> str:
    """The one line by which a conversion of `folder` is refused. Nothing is left behind."""
    with pytest.raises(error) as caught:
        convert_folder(folder, folder.parent / "checkpoint", **options)
    assert "\n" not in str(caught.value)
    assert not [path for path in folder.parent.iterdir() if "checkpoint" in path.name]
    return str(caught.value)


# The search finds what transformers finds.


@pytest.mark.parametrize("beams", [1, 4])
@all_families
def test_greedy_and_beam_search_find_the_ids_of_transformers(
    folders: Callable[[str], Path], family: str, beams: int
) -> None:
    source = open_source(folders(family))
    sentences = [source.tokenizer.encode(text)[:20] for text in SENTENCES]
    config, special = source.model.config, special_ids(source.model.config)
    options = GenerationConfig(num_beams=beams, max_length=20, length_penalty=0.8)
    found = generate(TorchBackend(source.model.double()), sentences, options, special, config.max_positions)

    theirs = reference(family, folders(family))
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


def replace_tokenizer(folder: Path, size: int, *, pad: int, eos: int = EOS) -> None:
    for name in TOKENIZER_FILES:
        (folder / name).unlink()
    write_tokenizer(folder, size, pad=pad, eos=eos)


@pytest.mark.parametrize("size", [TRANSLATING.vocab - 3, TRANSLATING.vocab + 4])
def test_a_vocabulary_of_another_size_than_the_embedding_is_refused(marian: Path, size: int) -> None:
    replace_tokenizer(marian, size, pad=size - 1)
    said = refusal(marian)
    assert said.startswith(f"{marian}: the tokenizer is not the model's: ")
    assert f"the tokenizer has {size} entries, the model's source vocabulary 120" in said


def test_one_vocabulary_does_not_serve_a_model_with_two(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_team_folder(team_model(source_vocab=41), tmp_path / "model")
    write_tokenizer(tmp_path / "model", 41, pad=0, eos=3)
    assert "has 41 entries, the model's target vocabulary 47" in refusal(tmp_path / "model")


def test_special_ids_of_vocabulary_and_settings_must_be_the_same(marian: Path) -> None:
    replace_tokenizer(marian, TRANSLATING.vocab, pad=3, eos=5)
    said = refusal(marian)
    assert "the tokenizer has pad at 3, the model's pad_token_id is 119" in said
    assert "the tokenizer has eos at 5, the model's eos_token_id is 0" in said


@pytest.mark.parametrize("name", ["source.spm", "target.spm"])
def test_pieces_that_the_vocabulary_does_not_know_are_refused(marian: Path, name: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    write_tokenizer(tmp_path / "other", 60, pad=59, eos=0, sentences=["我爱猫猫也爱我吗", "今天天气很好我们去公园"])
    shutil.copyfile(tmp_path / "other" / name, marian / name)
    said = refusal(marian)
    assert f"{name} does not match vocab.json: of its " in said


@pytest.mark.parametrize("name", TOKENIZER_FILES[:3])
def test_missing_and_damaged_files_of_the_tokenizer_are_named(marian: Path, name: str) -> None:
    (marian / name).write_bytes((marian / name).read_bytes()[:50])
    assert str(marian / name) in refusal(marian, TokenizerError)
    (marian / name).unlink()
    assert f"{marian / name} is missing" in refusal(marian, TokenizerError)


def test_a_tokenizer_of_another_kind_is_named(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders("bart"), tmp_path / "model"))
    for name in TOKENIZER_FILES:
        (folder / name).unlink()
    for name in ("merges.txt", "tokenizer.json"):
        (folder / name).write_text("{}")
    assert "tokenizer_class is 'BartTokenizer', expected one of MarianTokenizer" in refusal(folder, TokenizerError)


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_a_tokenizer_that_leads_out_of_the_folder_is_refused(marian: Path, name: str) -> None:
    shutil.move(marian / name, marian.parent / "outside")
    (marian / name).symlink_to(marian.parent / "outside")
    assert f"{marian / name} leads out of the folder" in refusal(marian)


# Sentences for the exam.


@all_families
def test_a_folder_without_sentences_gets_some_of_its_own_words(folders: Callable[[str], Path], family: str) -> None:
    source = open_source(folders(family))
    found = exam_sentences(folders(family), source)
    assert len(found) == 3
    assert list(found) == list(exam_sentences(folders(family), open_source(folders(family))))
    assert len({len(ids) for ids in found.values()}) > 1
    for ids in found.values():
        assert source.tokenizer.unknown not in ids
        assert 3 < len(ids) <= source.model.config.max_positions


def test_made_up_sentences_prefer_words_to_letters(marian: Path) -> None:
    words = " ".join(made_up(open_tokenizer(marian), 24)).split()
    assert {"is", "the"} & set(words) or sum(len(word) > 1 for word in words) > len(words) / 2


def test_made_up_sentences_fit_into_few_positions(marian: Path) -> None:
    tokenizer = open_tokenizer(marian)
    sentences = made_up(tokenizer, 6)
    assert all(1 < len(tokenizer.encode(sentence)) <= 6 for sentence in sentences)


def test_sentences_that_are_given_go_first_and_those_in_the_folder_second(marian: Path, tmp_path: Path) -> None:
    source = open_source(marian)
    (marian / "sentences.txt").write_text("the dog\n", "utf-8")
    (tmp_path / "mine.txt").write_text("the cat\n\n", "utf-8")
    assert list(exam_sentences(marian, source)) == ["the dog"]
    assert list(exam_sentences(marian, source, tmp_path / "mine.txt")) == ["the cat"]
    assert "gone.txt is missing" in refusal(marian, sentences=tmp_path / "gone.txt")


def test_a_vocabulary_without_words_asks_for_sentences(marian: Path) -> None:
    letters = json.loads((marian / "vocab.json").read_text("utf-8"))
    unknown = {piece if index in (0, PAD, 1) else f"<{index}>": index for piece, index in letters.items()}
    source = open_source(marian)
    write_json(marian / "vocab.json", unknown)
    with pytest.raises(ExportError, match=r"vocab\.json has no words .*: give some with --sentences"):
        exam_sentences(marian, source._replace(tokenizer=open_tokenizer(marian)))


# Defaults of the search.


def test_supported_options_of_the_folder_are_the_defaults(marian: Path) -> None:
    model = open_source(marian).model.config
    found = search_defaults(marian, model)
    assert found.config == GenerationConfig(num_beams=3, max_length=20, length_penalty=0.8)
    assert found.left_out == []
    assert found.file["num_beams"] == 3
    assert found.file["decoder_start_token_id"] == PAD
    edit_json(
        marian / "generation_config.json",
        lambda config: config.update(early_stopping=True, min_length=2, num_return_sequences=2, length_penalty=1),
    )
    config = search_defaults(marian, model).config
    assert (config.early_stopping, config.min_length, config.num_return_sequences) == (True, 2, 2)


def test_options_that_the_search_does_not_follow_are_told_and_handed_on(marian: Path) -> None:
    model = open_source(marian).model.config
    unsupported = {"some_new_option": [[PAD]], "penalty_alpha": 0.6}
    silent = {"top_k": 50, "use_cache": True, "_from_model_config": True, "transformers_version": "5.24.0", "x": None}
    edit_json(marian / "generation_config.json", lambda config: config.update(unsupported | silent))
    found = search_defaults(marian, model)
    assert sorted(found.left_out) == ["penalty_alpha 0.6", "some_new_option [[119]]"]
    assert found.file["some_new_option"] == [[PAD]]
    said: list[str] = []
    convert_folder(marian, marian.parent / "checkpoint", note=said.append)
    (line,) = said
    assert "some_new_option [[119]]" in line


def test_outputs_longer_than_the_positions_are_cut_down_to_them(marian: Path) -> None:
    model = open_source(marian).model.config
    edit_json(marian / "generation_config.json", lambda config: config.update(max_length=512))
    found = search_defaults(marian, model)
    assert found.config.max_length == found.file["max_length"] == model.max_positions
    assert found.left_out == [f"max_length 512, as the model has {model.max_positions} positions"]
    edit_json(marian / "generation_config.json", lambda config: config.pop("max_length"))
    assert search_defaults(marian, model).config.max_length == model.max_positions


def test_older_folders_keep_the_options_among_the_settings(marian: Path) -> None:
    model = open_source(marian).model.config
    (marian / "generation_config.json").unlink()
    edit_json(marian / "config.json", lambda config: config.pop("forced_eos_token_id", None))
    assert search_defaults(marian, model).config == GenerationConfig(max_length=model.max_positions)
    edit_json(marian / "config.json", lambda config: config.update(num_beams=6, max_length=20, suppress_tokens=[PAD]))
    found = search_defaults(marian, model)
    assert found.config == GenerationConfig(num_beams=6, max_length=20, suppress_tokens=(PAD,))
    assert found.left_out == []


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
def test_impossible_options_name_the_file(marian: Path, change: dict[str, Any], expected: str) -> None:
    edit_json(marian / "generation_config.json", lambda config: config.update(change))
    said = refusal(marian)
    assert said.startswith(f"{marian / 'generation_config.json'}: ")
    assert expected in said


# Settings for other programs.


@all_families
def test_transformers_reads_the_settings_of_a_bundle_as_its_own(
    folders: Callable[[str], Path], family: str, tmp_path: Path
) -> None:
    source = open_source(folders(family))
    write_json(tmp_path / "config.json", model_settings(source.model.config, source.settings))
    write_json(tmp_path / "generation_config.json", search_defaults(folders(family), source.model.config).file)
    ours = hugging_face.AutoConfig.from_pretrained(tmp_path)
    theirs = hugging_face.AutoConfig.from_pretrained(folders(family))
    assert ours.model_type == family
    different = {
        name: (value, theirs.to_dict().get(name))
        for name, value in ours.to_dict().items()
        if value != theirs.to_dict().get(name)
    }
    assert different.keys() <= {"dtype", "_name_or_path"}
    assert hugging_face.GenerationConfig.from_pretrained(tmp_path).num_beams == 3
