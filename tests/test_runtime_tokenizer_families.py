"""Tokenizers of every family where transformers is not installed: recorded answers, languages, and bad files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_support import (
    FAMILIES,
    KINDS,
    MODELS,
    RECORDED,
    model_file,
    train_fairseq,
    write_json,
    write_recorded,
)

from runtime.errors import TokenizerError
from runtime.text.charsmap import Charsmap, clusters
from runtime.text.pieces import read_model
from runtime.tokenizer import Tokenizer, open_tokenizer, tokenizer_files

SIMPLE = "unigram, nmt_nfkc, no bytes"
MULTILINGUAL = {
    "M2M100Tokenizer": ("en", "de"),
    "NllbTokenizer": ("eng_Latn", "deu_Latn"),
    "MBartTokenizer": ("en_XX", "de_DE"),
    "MBart50Tokenizer": ("en_XX", "de_DE"),
}
"""A source and a target language of each family that has some to choose from."""


@pytest.fixture(scope="module", params=KINDS)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("recorded")
    write_recorded(folder, request.param)
    return request.param, open_tokenizer(folder)


def test_ids_and_text_are_those_that_transformers_gave(recorded: tuple[str, Tokenizer]) -> None:
    family, tokenizer = recorded
    answers: dict[str, list[object]] = json.loads(RECORDED.read_text("utf-8"))["answers"][family]
    assert len(answers) >= 150
    lines = {line: list_of_ids for line, (list_of_ids, _) in answers.items() if isinstance(list_of_ids, list)}
    found: dict[str, list[object]] = {
        line: [tokenizer.encode(line), tokenizer.decode(ids)] for line, ids in lines.items()
    }
    assert {line: answer for line, answer in found.items() if answer != answers[line]} == {}


@settings(deadline=None, derandomize=True)
@given(text=st.text(max_size=40), ids=st.lists(st.integers(0, 700), max_size=10))
def test_every_text_has_ids_and_every_list_of_ids_has_text(
    recorded: tuple[str, Tokenizer], text: str, ids: list[int]
) -> None:
    _, tokenizer = recorded
    for found in (tokenizer.encode(text), tokenizer.encode_target(text)):
        assert tokenizer.special.eos in found
        assert all(0 <= index < tokenizer.size == tokenizer.target_size for index in found)
    tokenizer.decode(ids)


def test_special_tokens_and_languages_never_show(recorded: tuple[str, Tokenizer]) -> None:
    family, tokenizer = recorded
    for text in ("the cat", "猫"):
        ids = [*tokenizer.special, tokenizer.unknown, *tokenizer.encode(text), *tokenizer.encode_target(text)]
        if family in MULTILINGUAL:
            ids += [index for code in tokenizer.languages for index in tokenizer.encode(code)]
        shown = tokenizer.decode([index for index in ids if not tokenizer.piece(index).strip("▁ ").isalnum()])
        assert "<" not in shown
        assert "__" not in shown


# Languages.


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    FAMILIES[request.param](tmp_path, MODELS[SIMPLE])
    return tmp_path


def family_folder(family: str, target: Path) -> Path:
    FAMILIES[family](target, MODELS[SIMPLE])
    return target


@pytest.mark.parametrize(("family", "languages"), MULTILINGUAL.items())
def test_languages_are_where_each_family_wants_them(family: str, languages: tuple[str, str], tmp_path: Path) -> None:
    tokenizer = open_tokenizer(family_folder(family, tmp_path), *languages)
    assert (tokenizer.source_language, tokenizer.target_language) == languages
    assert {*languages} <= {*tokenizer.languages}
    eos = tokenizer.special.eos
    source, target = tokenizer.encode("the cat"), tokenizer.encode_target("the cat")
    if family == "MBartTokenizer":
        assert source[-2] == target[-2] == eos
        assert tokenizer.piece(source[-1]) == "en_XX"
        assert target[-1] == tokenizer.special.start
        assert tokenizer.piece(tokenizer.special.start) == "de_DE"
        assert tokenizer.forced_bos is None
    else:
        assert source[-1] == target[-1] == tokenizer.special.start == eos
        assert tokenizer.piece(source[0]).strip("_") == languages[0]
        assert target[0] == tokenizer.forced_bos
        assert tokenizer.piece(target[0]).strip("_") == languages[1]


@pytest.mark.parametrize("family", MULTILINGUAL)
def test_without_a_choice_the_settings_decide_and_then_english(family: str, tmp_path: Path) -> None:
    folder = family_folder(family, tmp_path)
    path = folder / "tokenizer_config.json"
    given = json.loads(path.read_text("utf-8"))
    tokenizer = open_tokenizer(folder)
    assert (tokenizer.source_language, tokenizer.target_language) == (given["src_lang"], given["tgt_lang"])
    write_json(path, {**given, "src_lang": None, "tgt_lang": None})
    tokenizer = open_tokenizer(folder)
    assert str(tokenizer.source_language).startswith("en")
    assert tokenizer.target_language is None
    assert tokenizer.forced_bos is None
    assert tokenizer.encode_target("the cat") == tokenizer.encode("the cat")


@pytest.mark.parametrize("family", MULTILINGUAL)
@pytest.mark.parametrize("side", ["source_language", "target_language"])
def test_an_unknown_language_is_refused_with_some_that_are_known(family: str, side: str, tmp_path: Path) -> None:
    folder = family_folder(family, tmp_path)
    with pytest.raises(TokenizerError) as caught:
        open_tokenizer(folder, **{side: "xx"})
    known = open_tokenizer(folder).languages
    assert str(caught.value) == (
        f"{folder}: {side} is 'xx', expected one of {', '.join(known[:8])}, ... ({len(known)} in all)"
    )


@pytest.mark.parametrize("side", ["source_language", "target_language"])
def test_a_marian_model_has_no_languages_to_choose(side: str, tmp_path: Path) -> None:
    folder = family_folder("MarianTokenizer", tmp_path)
    assert open_tokenizer(folder).languages == ()
    with pytest.raises(TokenizerError, match=f"{side} is 'fra', but this tokenizer has no languages"):
        open_tokenizer(folder, **{side: "fra"})


# Which family a folder holds.


@pytest.mark.parametrize(
    ("family", "settings", "config", "expected"),
    [
        ("MarianTokenizer", {}, None, "MarianTokenizer"),
        ("M2M100Tokenizer", {}, None, "M2M100Tokenizer"),
        ("M2M100Tokenizer", {}, {"model_type": "m2m_100"}, "M2M100Tokenizer"),
        ("NllbTokenizer", {"tokenizer_class": "NllbTokenizerFast"}, None, "NLLB"),
        ("MBartTokenizer", {}, {"model_type": "mbart"}, "mBART"),
        ("MBart50Tokenizer", {}, {"model_type": "mbart", "tokenizer_class": "MBart50Tokenizer"}, "mBART-50"),
    ],
)
def test_the_family_is_found(
    family: str, settings: dict[str, Any], config: dict[str, Any] | None, expected: str, tmp_path: Path
) -> None:
    folder = family_folder(family, tmp_path)
    write_json(folder / "tokenizer_config.json", settings)
    if config:
        write_json(folder / "config.json", config)
    tokenizer = open_tokenizer(folder)
    found = getattr(tokenizer, "family", None)
    assert expected == (found.name if found else type(tokenizer).__name__)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tokenizer_class": "T5Tokenizer"},
            "tokenizer_class is 'T5Tokenizer', expected one of MarianTokenizer, M2M100",
        ),
        ({}, "has no tokenizer_class, expected one of NllbTokenizer, MBartTokenizer, MBart50Tokenizer"),
    ],
)
def test_another_family_is_refused_by_name(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = family_folder("NllbTokenizer", tmp_path)
    write_json(folder / "tokenizer_config.json", settings)
    assert message in refusal(folder)


def test_the_files_of_a_tokenizer_are_those_that_are_there(tmp_path: Path) -> None:
    expected = {
        "MarianTokenizer": {"source.spm", "target.spm", "vocab.json"},
        "MarianTokenizer, separate": {"source.spm", "target.spm", "vocab.json", "target_vocab.json"},
        "M2M100Tokenizer": {"sentencepiece.bpe.model", "vocab.json", "special_tokens_map.json"},
        "NllbTokenizer": {"sentencepiece.bpe.model"},
    }
    for family, names in expected.items():
        (tmp_path / family).mkdir()
        folder = family_folder(family, tmp_path / family)
        write_json(folder / "config.json", {})
        assert set(tokenizer_files(folder)) == names | {"tokenizer_config.json"}


# Bad files.


def refusal(folder: Path) -> str:
    with pytest.raises(TokenizerError) as caught:
        open_tokenizer(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "name", "message"),
    [
        ("MarianTokenizer, separate", "target_vocab.json", "since its separate_vocabs is true, target_vocab.json"),
        ("M2M100Tokenizer", "vocab.json", "is missing: a tokenizer needs vocab.json, sentencepiece.bpe.model"),
        ("M2M100Tokenizer", "sentencepiece.bpe.model", "is missing: a tokenizer needs vocab.json, sentencepiece.bpe"),
        ("NllbTokenizer", "sentencepiece.bpe.model", "has neither tokenizer.json nor sentencepiece.bpe.model: a NLLB"),
        ("MBartTokenizer", "sentencepiece.bpe.model", "a mBART tokenizer needs one of them"),
    ],
)
def test_a_missing_file_is_named_with_what_is_needed(family: str, name: str, message: str, tmp_path: Path) -> None:
    folder = family_folder(family, tmp_path)
    (folder / name).unlink()
    assert message in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"no model", bytes(range(256))], ids=["empty", "text", "bytes"])
@pytest.mark.parametrize("family", MULTILINGUAL)
def test_a_damaged_model_is_named(family: str, content: bytes, tmp_path: Path) -> None:
    folder = family_folder(family, tmp_path)
    path = folder / "sentencepiece.bpe.model"
    path.write_bytes(content)
    assert refusal(folder).startswith(f"{path} is not a SentencePiece model: ")
    path.write_bytes(model_file([("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("a", -1.0)], "bpe", b"\x08\0\0\0ab"))
    if family != "MBartTokenizer":  # which has no use for the table
        assert str(path) in refusal(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (b"", "tokenizer_config.json is not an object: Input data was truncated"),
        (b"[]", "tokenizer_config.json is not an object: Expected `object`, got `array`"),
        (b'{"\xff": 1}', "tokenizer_config.json is not an object: "),
        (b'{"separate_vocabs": 3}', "tokenizer_config.json: Expected `bool`, got `int` - at `$.separate_vocabs`"),
        (b'{"src_lang": 3}', "tokenizer_config.json: Expected `str | null`, got `int` - at `$.src_lang`"),
        (b'{"sp_model_kwargs": {"nbest_size": 3}}', "sp_model_kwargs is {'nbest_size': 3}, sampling is not supported"),
        (b'{"split_special_tokens": true}', "split_special_tokens is true, which is not supported"),
        (b'{"extra_special_tokens": 3}', "extra_special_tokens is int, expected a list of tokens"),
        (
            b'{"extra_special_tokens": ["a", {"x": 3}]}',
            "extra_special_tokens[1]: Object missing required field `content`",
        ),
        (b'{"eos_token": {"content": 3}}', "eos_token: Expected `str`, got `int` - at `$.content`"),
        (b'{"added_tokens_decoder": {"x": {"content": "a"}}}', "tokenizer_config.json: Expected `int`, got `str`"),
        (
            b'{"added_tokens_decoder": {"1": {"content": "a", "single_word": true}}}',
            "single_word of 'a' is not supported",
        ),
        (
            b'{"language_codes": "x", "tokenizer_class": "M2M100Tokenizer"}',
            "language_codes is 'x', expected one of m2m100",
        ),
    ],
)
def test_damaged_settings_are_named_with_the_field(settings: bytes, message: str, tmp_path: Path) -> None:
    folder = family_folder("M2M100Tokenizer", tmp_path)
    (folder / "tokenizer_config.json").write_bytes(settings)
    assert message in refusal(folder)


TokenizerJson = dict[str, Any]


def bpe_json() -> TokenizerJson:
    vocabulary = {piece: index for index, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", "▁", "a", "b", "ab"])}
    return {"added_tokens": [], "model": {"type": "BPE", "vocab": vocabulary, "merges": ["a b"]}, "normalizer": None}


def set_model(name: str, value: object) -> Callable[[TokenizerJson], None]:
    return lambda content: content["model"].update({name: value})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda content: content.pop("model"), "is not a tokenizer of the tokenizers library: Object missing required"),
        (set_model("type", "Unigram"), "model.type is 'Unigram', expected 'BPE'"),
        (set_model("vocab", [["a", 0.0]]), "model.vocab is not that of a BPE model"),
        (set_model("vocab", {"a": 0, "b": 2}), "model.vocab: expected the ids 0 .. 1, each once"),
        (set_model("vocab", {"a": 0, "b": 1, "ab": 2}), "has no <s> and no <pad> and no </s> and no <unk>"),
        (set_model("merges", ["a b", "a b c"]), "model.merges[1] is 'a b c', expected two pieces"),
        (set_model("merges", [["a", "c"]]), "model.merges[0]: model.vocab has no 'c'"),
        (set_model("merges", [["b", "a"]]), "model.merges[0]: model.vocab has no 'ba'"),
        (lambda content: content.update(added_tokens=[{"id": 0}]), "Object missing required field `content`"),
        (
            lambda content: content.update(added_tokens=[{"id": 0, "content": "a", "single_word": True}]),
            "added_tokens: single_word of 'a' is not supported",
        ),
        (
            lambda content: content.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "?"}),
            "normalizer: precompiled_charsmap is not base64",
        ),
        (
            lambda content: content.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "/////w=="}),
            "precompiled_charsmap has 4 bytes, its first table alone 4294967295",
        ),
    ],
)
def test_a_damaged_tokenizer_json_is_named_with_the_field(
    edit: Callable[[TokenizerJson], object], message: str, tmp_path: Path
) -> None:
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "NllbTokenizer"})
    content = bpe_json()
    write_json(tmp_path / "tokenizer.json", content)
    tokenizer = open_tokenizer(tmp_path)
    assert [tokenizer.piece(index) for index in tokenizer.encode("ab")] == ["eng_Latn", "▁", "ab", "</s>"]
    edit(content)
    write_json(tmp_path / "tokenizer.json", content)
    found = refusal(tmp_path)
    assert message in found
    assert found.startswith(str(tmp_path / "tokenizer.json"))


# Normalisation.


def test_graphemes_keep_marks_with_what_they_stand_on() -> None:
    text = "ae\u0301\u0302b\r\nc\u200dd\u0301\x07\u0301\u0600e\u0903\n\u0301"
    expected = [
        "a",
        "e\u0301\u0302",
        "b",
        "\r\n",
        "c\u200d",
        "d\u0301",
        "\x07",
        "\u0301",
        "\u0600e\u0903",
        "\n",
        "\u0301",
    ]
    assert list(clusters(text)) == expected
    assert list(clusters("")) == []


@pytest.fixture(scope="module")
def charsmap(tmp_path_factory: pytest.TempPathFactory) -> Charsmap:
    folder = tmp_path_factory.mktemp("charsmap")
    train_fairseq(folder, {"normalization_rule_name": "nmt_nfkc"})
    table = read_model(folder / "sentencepiece.bpe.model").charsmap
    assert table
    return Charsmap(table)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ＡＢＣ　１", "ABC 1"),
        ("ﬁ½㍿", "fi1⁄2株式会社"),
        ("e\u0301", "é"),
        ("e\u0302\u0301", "ê"),  # SentencePiece keeps the acute
        ("ﬁ\u0301", "fi"),
        ("カ\u3099", "カ\u3099"),  # SentencePiece composes
        ("a\r\nb\tc\u200bd", "a b c d"),
        ("a\x07b", "ab"),
        ("", ""),
    ],
)
def test_text_is_normalised_as_the_tokenizers_library_does_it(charsmap: Charsmap, text: str, expected: str) -> None:
    assert charsmap.normalize(text) == expected
