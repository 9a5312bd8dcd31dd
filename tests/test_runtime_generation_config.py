"""Options that are impossible, of the wrong type or not supported: every one is named, before anything runs."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.errors import GenerationError
from runtime.generation_config import GenerationConfig, named_ids
from runtime.generation_files import BOOKKEEPING, NEUTRAL, OWN, read_generation_config


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            {"num_beams": 0, "num_return_sequences": 0},
            "num_beams is 0, expected at least 1; num_return_sequences is 0, ",
        ),
        ({"num_return_sequences": 0}, "num_return_sequences is 0, expected at least 1"),
        ({"num_return_sequences": 2}, "num_return_sequences 2 is more than num_beams 1"),
        (
            {"num_return_sequences": 4, "num_beams": 3, "do_sample": True},
            "num_return_sequences 4 is more than num_beams 3",
        ),
        ({"max_length": 0}, "max_length is 0, expected at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, expected at least 1"),
        ({"min_length": -1}, "min_length is -1, expected at least 0"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1, expected at least 0"),
        ({"early_stopping": "always"}, "early_stopping is 'always', expected True, False or 'never'"),
        ({"early_stopping": 1}, "early_stopping is 1, expected True, False or 'never'"),
        ({"length_penalty": math.nan}, "length_penalty is nan, expected a finite number"),
        ({"length_penalty": -math.inf}, "length_penalty is -inf, expected a finite number"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1, expected at least 0"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0.0, expected a number above 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf, expected a number above 0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan, expected a number above 0"),
        ({"bad_words_ids": [[1], []]}, "bad_words_ids holds an empty word"),
        ({"bad_words_ids": [[1, -2]]}, "bad_words_ids holds the id -2, expected ids from 0 on"),
        ({"suppress_tokens": [-1]}, "suppress_tokens holds the id -1, expected ids from 0 on"),
        ({"forced_bos_token_id": -3}, "forced_bos_token_id holds the id -3"),
        ({"forced_eos_token_id": -3}, "forced_eos_token_id holds the id -3"),
        ({"forced_bos_token_id": 3, "suppress_tokens": [3]}, "forced_bos_token_id 3 is among suppress_tokens"),
        ({"forced_eos_token_id": 3, "suppress_tokens": [3]}, "forced_eos_token_id 3 is among suppress_tokens"),
        ({"do_sample": True, "temperature": 0}, "temperature is 0.0, expected a number above 0"),
        ({"do_sample": True, "top_k": -1}, "top_k is -1, expected at least 0"),
        ({"do_sample": True, "top_p": 1.1}, "top_p is 1.1, expected 0 to 1"),
        ({"do_sample": True, "top_p": math.nan}, "top_p is nan, expected 0 to 1"),
        ({"do_sample": True, "seed": -1}, "seed is -1, expected at least 0"),
        ({"temperature": 0.7}, "temperature is 0.7, which means nothing without do_sample"),
        ({"top_k": 5}, "top_k is 5, which means nothing without do_sample"),
        ({"top_p": 0.5}, "top_p is 0.5, which means nothing without do_sample"),
        ({"seed": 0}, "seed is 0, which means nothing without do_sample"),
    ],
    ids=str,
)
def test_an_impossible_option_is_an_error_that_names_it(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerationError) as caught:
        GenerationConfig(**chosen)
    assert str(caught.value).startswith(f"generation: {message}")


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"num_beams": "4"}, "num_beams is '4', expected `int`, got `str`"),
        ({"num_beams": 4.0}, "num_beams is 4.0, expected `int`, got `float`"),
        ({"num_beams": True}, "num_beams is True, expected `int`, got `bool`"),
        ({"max_length": "20"}, "max_length is '20', expected `int | null`, got `str`"),
        ({"length_penalty": "long"}, "length_penalty is 'long', expected `float`, got `str`"),
        ({"do_sample": 1}, "do_sample is 1, expected `bool`, got `int`"),
        ({"bad_words_ids": [3]}, "bad_words_ids is [3], expected `array`, got `int` - at `$[0]`"),
        ({"bad_words_ids": None}, "bad_words_ids is None, expected `array`, got `null`"),
        ({"suppress_tokens": ["a"]}, "suppress_tokens is ['a'], expected `int`, got `str` - at `$[0]`"),
        ({"decoder_input_ids": 7}, "decoder_input_ids is 7, expected `array`, got `int`"),
    ],
    ids=str,
)
def test_an_option_of_the_wrong_type_is_an_error_that_names_it(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerationError) as caught:
        GenerationConfig(**chosen)
    assert str(caught.value) == f"generation: {message}"


@pytest.mark.parametrize("name", GenerationConfig.__struct_fields__)
def test_no_option_takes_a_value_of_any_type(name: str) -> None:
    wrong: Any = {name: object()}
    with pytest.raises(GenerationError, match=f"^generation: {name} is "):
        GenerationConfig(**wrong)


def test_all_impossible_options_are_named_at_once() -> None:
    with pytest.raises(GenerationError) as caught:
        GenerationConfig(num_beams=0, num_return_sequences=-1, max_length=0, min_length=-3, length_penalty=float("inf"))
    assert str(caught.value).count(";") == 4
    assert "\n" not in str(caught.value)
    wrong: Any = {"num_beams": "4", "top_k": "5", "seed": 1.5}
    with pytest.raises(GenerationError, match=r"num_beams is .*; top_k is .*; seed is "):
        GenerationConfig(**wrong)


def test_lists_are_taken_for_tuples_and_whole_numbers_for_floats() -> None:
    given: Any = {"decoder_input_ids": [1, 2], "bad_words_ids": [[3], [4, 5]], "length_penalty": 2}
    config = GenerationConfig(**given)
    assert config.decoder_input_ids == (1, 2)
    assert config.bad_words_ids == ((3,), (4, 5))
    assert isinstance(config.length_penalty, float)
    assert hash(config) == hash(GenerationConfig(**given))


def test_independent_samples_may_be_more_than_one_beam() -> None:
    assert GenerationConfig(do_sample=True, num_return_sequences=9).num_return_sequences == 9


def test_every_option_that_holds_ids_is_looked_at() -> None:
    config = GenerationConfig(
        decoder_input_ids=(1,),
        bad_words_ids=((2,), (3, 4)),
        suppress_tokens=(5,),
        forced_bos_token_id=6,
        forced_eos_token_id=7,
    )
    found = dict(named_ids(config))
    assert sorted(token for ids in found.values() for token in ids) == list(range(1, 8))
    holding = {name for name in GenerationConfig.__struct_fields__ if name.endswith(("_ids", "_id", "_tokens"))}
    assert found.keys() == holding - {"max_new_tokens", "min_new_tokens"}


def test_an_unknown_option_in_a_passport_is_an_error() -> None:
    with pytest.raises(msgspec.ValidationError, match="typical_p"):
        msgspec.json.decode(b'{"num_beams": 4, "typical_p": 0.7}', type=GenerationConfig)


def test_options_survive_the_way_through_a_passport() -> None:
    config = GenerationConfig(
        num_beams=4, early_stopping="never", decoder_input_ids=(3, 4), bad_words_ids=((1,), (2, 3)), do_sample=True
    )
    assert msgspec.json.decode(msgspec.json.encode(config), type=GenerationConfig) == config
    assert msgspec.json.encode(GenerationConfig(num_beams=4)) == b'{"num_beams":4}'


# Files of transformers.


def read(folder: Path, content: Any) -> GenerationConfig:
    path = folder / "generation_config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return read_generation_config(path)


def test_the_file_of_a_marian_model_is_read(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        {
            "_from_model_config": True,
            "bad_words_ids": [[65000]],
            "bos_token_id": 0,
            "decoder_start_token_id": 65000,
            "eos_token_id": 0,
            "forced_eos_token_id": 0,
            "max_length": 512,
            "num_beams": 6,
            "pad_token_id": 65000,
            "renormalize_logits": True,
            "transformers_version": "4.32.0.dev0",
        },
    )
    assert found == GenerationConfig(
        bad_words_ids=((65000,),), forced_eos_token_id=0, max_length=512, num_beams=6, renormalize_logits=True
    )


def test_the_file_of_a_model_that_translates_between_many_languages_is_read(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        {
            "bos_token_id": 0,
            "decoder_start_token_id": 2,
            "early_stopping": True,
            "eos_token_id": [2],
            "forced_bos_token_id": 250003,
            "forced_eos_token_id": [2],
            "max_length": 200,
            "num_beams": 5,
            "pad_token_id": 1,
        },
    )
    assert found == GenerationConfig(
        early_stopping=True, forced_bos_token_id=250003, forced_eos_token_id=2, max_length=200, num_beams=5
    )


def test_every_option_but_our_own_is_read(tmp_path: Path) -> None:
    config = GenerationConfig(
        num_beams=3,
        num_return_sequences=2,
        length_penalty=-1.5,
        early_stopping="never",
        max_length=30,
        max_new_tokens=20,
        min_length=3,
        min_new_tokens=2,
        repetition_penalty=1.2,
        no_repeat_ngram_size=3,
        bad_words_ids=((1,), (2, 3)),
        forced_bos_token_id=4,
        forced_eos_token_id=5,
        suppress_tokens=(6,),
        renormalize_logits=True,
        do_sample=True,
        temperature=0.7,
        top_k=10,
        top_p=0.9,
    )
    defaults = GenerationConfig()
    read_names = set(GenerationConfig.__struct_fields__) - OWN
    assert all(getattr(config, name) != getattr(defaults, name) for name in read_names)
    assert read(tmp_path, msgspec.to_builtins(config)) == config


def test_options_that_do_nothing_are_left_out(tmp_path: Path) -> None:
    nothing = dict.fromkeys((*NEUTRAL, *GenerationConfig.__struct_fields__, *BOOKKEEPING, "no_such_option"))
    assert read(tmp_path, nothing) == GenerationConfig()
    assert read(tmp_path, {name: value for name, value in NEUTRAL.items() if value is not None}) == GenerationConfig()
    # They mean nothing where nothing is sampled.
    assert read(tmp_path, {"temperature": 0.6, "top_p": 0.9, "top_k": 20}) == GenerationConfig()
    assert read(tmp_path, {"temperature": 0.6, "do_sample": False}) == GenerationConfig()


@pytest.mark.parametrize("name", NEUTRAL)
def test_an_option_that_is_not_supported_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(GenerationError, match=rf"generation_config.json: {name} is 0.5, which is not supported$"):
        read(tmp_path, {name: 0.5, "num_beams": 2})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"num_beams": 4, "no_such_option": 1}, "no_such_option is not known"),
        ({"seed": 1}, "seed is not known"),
        ({"decoder_input_ids": [1]}, "decoder_input_ids is not known"),
        ({"eos_token_id": [0, 2]}, "eos_token_id is [0, 2], only one is supported"),
        ({"forced_eos_token_id": [0, 2]}, "forced_eos_token_id is [0, 2], expected `int | null`, got `array`"),
        ({"num_beams": "4"}, "num_beams is '4', expected `int`, got `str`"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, expected at least 1"),
        (
            {"num_beam_groups": 2, "diversity_penalty": 0.5, "what": 1, "max_length": 0},
            (
                "num_beam_groups is 2, which is not supported; diversity_penalty is 0.5, which is not supported; "
                "what is not known; max_length is 0, expected at least 1"
            ),
        ),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_file_is_one_line_that_names_all_of_it(
    tmp_path: Path, content: dict[str, Any], message: str
) -> None:
    with pytest.raises(GenerationError) as caught:
        read(tmp_path, content)
    assert str(caught.value) == f"{tmp_path / 'generation_config.json'}: {message}"


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"num_beams": NaN}'])
def test_what_is_no_json_object_is_one_line(tmp_path: Path, content: str) -> None:
    with pytest.raises(GenerationError, match=r"^[^\n]* is no generation_config.json: [^\n]*$"):
        read(tmp_path, content)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(GenerationError, match=r"^[^\n]*nothing.json cannot be read: No such file or directory$"):
        read_generation_config(tmp_path / "nothing.json")
    with pytest.raises(GenerationError, match="cannot be read"):
        read_generation_config(tmp_path)
