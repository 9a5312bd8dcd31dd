"""Every family with its own tokenizer: from the folder by commands to a bundle that translates as transformers does."""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from importers_support import complete_folder
from toolkit_support import refusal, toolkit
from whole_support import TEXTS, WHOLES, Output, translate_with_transformers, write_whole

from runtime import Translator
from runtime.bundle import Bundle
from runtime.tokenizer import TOKENIZER_FILES, tokenizer_files

pytestmark = pytest.mark.usefixtures("quiet")

SEARCHES: dict[str, dict[str, Any]] = {
    "as the folder says": {},
    "greedy": {"num_beams": 1},
    "beams": {"num_beams": 4},
    "the best three": {"num_return_sequences": 3, "length_penalty": 0.6},
    "least and greatest length": {"num_beams": 2, "min_length": 6, "max_length": 9, "length_penalty": 2.0},
    "few new tokens": {"max_new_tokens": 5, "min_new_tokens": 4},
}
FORCING = [name for name, whole in WHOLES.items() if whole.languages and not whole.starts_with_language]
"""Families in which a target language is forced, after the start token."""


class Pair:
    """A folder and the bundle that one command made of it."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.folder, self.bundle = name, root / "model", root / "bundle"
        write_whole(name, self.folder)
        done = toolkit("export", self.folder, self.bundle)
        assert done.exit_code == 0, done.stderr
        assert "passed over" not in done.stderr

    def translator(self) -> Translator:
        """Of the bundle, with the languages of `WHOLES`."""
        source, target = WHOLES[self.name].languages or (None, None)
        return Translator.open(self.bundle, threads=1, source_language=source, target_language=target)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A pair of each family, made when it is first asked for."""
    return cache(lambda name: Pair(name, tmp_path_factory.mktemp("whole")))


def outputs(translator: Translator, **options: Any) -> list[list[Output]]:
    """What `translator` makes of `TEXTS`, all in one batch; `options` take the place of the bundle's own."""
    config = msgspec.structs.replace(translator.defaults, **options)
    found = translator.generate([translator.encode(text) for text in TEXTS], config)
    return [[Output(best.ids, translator.translation([best]).text, best.score) for best in row] for row in found]


def differences(ours: list[list[Output]], theirs: list[list[Output]]) -> list[str]:
    """Each output that is not the same in ids, text and score."""
    assert sum(map(len, ours)) >= len(TEXTS)
    return [
        f"{a} for {b}"
        for found, expected in zip(ours, theirs, strict=True)
        for a, b in zip(found, expected, strict=True)
        if a[:2] != b[:2] or not math.isclose(a.score, b.score, rel_tol=1e-4, abs_tol=1e-4)
    ]


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", WHOLES)
def test_ids_text_and_scores_are_those_of_transformers(pairs: Callable[[str], Pair], name: str, search: str) -> None:
    pair, options = pairs(name), SEARCHES[search]
    found = outputs(pair.translator(), **options)
    assert differences(found, translate_with_transformers(name, pair.folder, TEXTS, **options)) == []
    assert len({tuple(best.ids) for best, *_ in found}) > 3
    assert len({token for best, *_ in found for token in best.ids}) > 8  # not one token for ever


@pytest.mark.parametrize("name", WHOLES)
def test_the_bundle_has_all_files_of_the_tokenizer_and_passes_its_exam(pairs: Callable[[str], Pair], name: str) -> None:
    pair = pairs(name)
    names = tokenizer_files(pair.folder)
    assert len(names) > 1
    assert {*names} <= Bundle(pair.bundle).passport.files.keys()
    assert all((pair.bundle / name).read_bytes() == (pair.folder / name).read_bytes() for name in names)
    done = toolkit("verify", pair.bundle, "--threads", "1", "--optimization", "all", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["passed"] is True


@pytest.mark.parametrize("name", WHOLES)
def test_the_command_translates_as_transformers_does(pairs: Callable[[str], Pair], name: str) -> None:
    pair = pairs(name)
    languages = WHOLES[name].languages
    options = ["--source-language", languages[0], "--target-language", languages[1]] if languages else []
    done = toolkit("run", "--bundle", pair.bundle, *options, "--json", "--threads", "1", *TEXTS)
    assert done.exit_code == 0, done.stderr
    expected = translate_with_transformers(name, pair.folder, TEXTS)
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == [best.text for (best,) in expected]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("prefix", [(7, 9), ()])
@pytest.mark.parametrize("name", FORCING)
def test_a_prefix_of_ones_own_goes_before_the_target_language_as_there(
    pairs: Callable[[str], Pair], name: str, prefix: tuple[int, ...], beams: int
) -> None:
    pair = pairs(name)
    begun = (Bundle(pair.bundle).passport.special.start, *prefix)
    found = outputs(pair.translator(), num_beams=beams, decoder_input_ids=begun)
    given = {"num_beams": beams, "decoder_input_ids": torch.tensor([begun])}
    assert differences(found, translate_with_transformers(name, pair.folder, TEXTS, **given)) == []
    assert all(tuple(best.ids[: len(prefix)]) == prefix for (best,) in found)


# The tokenizer that is not supported.


def test_barts_own_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    folder = complete_folder("bart", tmp_path / "model")
    for name in TOKENIZER_FILES:
        (folder / name).unlink()
    for name in ("vocab.json", "merges.txt", "tokenizer.json"):
        (folder / name).write_text("{}", "utf-8")
    for command in ("export", "import"):
        line = refusal(command, folder, tmp_path / "target")
        assert "tokenizer_class is 'BartTokenizer', expected one of MarianTokenizer, M2M100Tokenizer, Nllb" in line
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
