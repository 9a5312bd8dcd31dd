"""A bundle with languages to choose from: they frame the source and begin the output."""

import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from runtime_support import tiny_copy
from tokenizer_support import write_json

from runtime import GenerationConfig, Translator
from runtime.bundle import Bundle, record_files, write_passport
from runtime.errors import TokenizerError
from runtime.text.codes import M2M100
from runtime.tokenizer import TOKENIZER_FILES

CODES = M2M100["wmt21"]
GREEDY = GenerationConfig()
SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle with the tokenizer of M2M100: the last pieces of its vocabulary are languages now."""
    folder = tiny_copy(tmp_path_factory.mktemp("languages") / "bundle")
    bundle = Bundle(folder)
    vocabulary = msgspec.json.decode((folder / "vocab.json").read_bytes(), type=dict[str, int])
    kept = {piece: index for piece, index in vocabulary.items() if index < len(vocabulary) - len(CODES)}
    (folder / "source.spm").rename(folder / "sentencepiece.bpe.model")
    (folder / "target.spm").unlink()
    write_json(folder / "vocab.json", kept)
    set_languages(folder)
    names = {*bundle.passport.files, "sentencepiece.bpe.model"} - {*TOKENIZER_FILES[:2]}
    passport = msgspec.structs.replace(bundle.passport, files=record_files(folder, names))
    write_passport(folder, passport)
    return folder


def set_languages(folder: Path) -> None:
    settings = {"tokenizer_class": "M2M100Tokenizer", "language_codes": "wmt21", "src_lang": "de"}
    write_json(folder / "tokenizer_config.json", settings)


def language_id(code: str) -> int:
    return 45 - len(CODES) + CODES.index(code)


def test_the_target_language_begins_every_output_and_does_not_show(folder: Path) -> None:
    translator = Translator.open(folder, target_language="zh")
    ids = translator.encode("a b c")
    assert ids[0] == language_id("de")
    for config in (GREEDY, GenerationConfig(num_beams=3)):
        ((best,),) = translator.generate([ids], config)
        assert best.ids[0] == language_id("zh")
        forced = msgspec.structs.replace(config, forced_bos_token_id=language_id("zh"))
        assert translator.generate([ids], forced) == [[best]]
    assert translator.defaults.forced_bos_token_id == language_id("zh")
    assert translator.generate([ids]) == translator.generate([ids], translator.defaults)
    ((hypothesis,),) = translator.generate([ids], GREEDY)
    assert "__" not in translator.translation([hypothesis]).text


def test_the_source_language_stands_before_the_text(folder: Path) -> None:
    translator = Translator.open(folder, source_language="ru", target_language="zh")
    assert translator.encode("a b c")[0] == language_id("ru")


def test_a_prefix_of_ones_own_goes_before_the_target_language(folder: Path) -> None:
    translator = Translator.open(folder, target_language="zh")
    own = (language_id("en"), 5)
    ((best,),) = translator.generate([translator.encode("a b")], GenerationConfig(decoder_input_ids=own))
    assert tuple(best.ids[:2]) == own
    start = Bundle(folder).passport.special.start
    ((best,),) = translator.generate([translator.encode("a b")], GenerationConfig(decoder_input_ids=(start,)))
    assert best.ids[0] == language_id("zh")  # a start token alone is no prefix


def test_a_forced_token_of_ones_own_goes_before_the_target_language(folder: Path) -> None:
    translator = Translator.open(folder, target_language="zh")
    ((best,),) = translator.generate(
        [translator.encode("a b")], GenerationConfig(forced_bos_token_id=language_id("en"))
    )
    assert best.ids[0] == language_id("en")


def test_a_language_that_the_bundle_forces_needs_no_choice_and_gives_way_to_one(folder: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(folder, tmp_path / "bundle"))
    passport = Bundle(bundle).passport
    search = GenerationConfig(num_beams=2, forced_bos_token_id=language_id("ru"))
    write_passport(bundle, msgspec.structs.replace(passport, generation=search))
    for chosen, expected in ((None, "ru"), ("zh", "zh")):
        translator = Translator.open(bundle, target_language=chosen)
        for config in (None, GREEDY):
            ((best,),) = translator.generate([translator.encode("a b")], config)
            assert best.ids[0] == language_id(expected)


def test_a_bundle_that_names_no_target_wants_one(folder: Path) -> None:
    with pytest.raises(TokenizerError, match=r"choose a target_language, one of en, ha, is, ja, cs, ru, zh, de"):
        Translator.open(folder)


def test_an_unknown_language_is_refused(folder: Path) -> None:
    with pytest.raises(TokenizerError, match=r"target_language is 'fr', expected one of en, ha"):
        Translator.open(folder, target_language="fr")


def toolkit(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "toolkit", "run", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, check=False, text=True, timeout=120)


def test_the_command_takes_both_languages(folder: Path) -> None:
    done = toolkit("--bundle", folder, "--source-language", "de", "--target-language", "zh", "a b c")
    assert done.returncode == 0, done.stderr
    expected = Translator.open(folder, target_language="zh").translate(["a b c"])
    assert done.stdout == f"{expected[0].text}\n"
    refused = toolkit("--bundle", folder, "a b c")
    assert refused.returncode == 1
    assert "choose a target_language" in refused.stderr.splitlines()[-1]


@pytest.mark.parametrize("option", ["--source-language", "--target-language"])
def test_the_command_refuses_a_language_where_there_are_none(option: str, tmp_path: Path) -> None:
    done = toolkit("--bundle", tiny_copy(tmp_path / "bundle"), option, "fra", "a b c")
    assert done.returncode == 1
    name = option[2:].replace("-", "_")
    assert f"{name} is 'fra', but this tokenizer has no languages to choose from" in done.stderr.splitlines()[-1]
