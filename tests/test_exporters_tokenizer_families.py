"""Every family of tokenizers against transformers: ids and text of nasty lines, in each layout of files."""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nasty_text import NASTY
from record_tokenizers import record
from tokenizer_support import FAMILIES, MODELS, RECORDED, SENTENCES, train_fairseq, write_json
from whole_support import open_theirs

from runtime.text.codes import NLLB
from runtime.tokenizer import Tokenizer, open_tokenizer

LINES = [*SENTENCES, *NASTY.values()]
RANDOM_IDS = 150
SAVED = "saved"


class Rivals(NamedTuple):
    """The same folder opened twice."""

    ours: Tokenizer
    theirs: Any


class Folders:
    """Folders of every family, model and layout, each written once."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, family: str, model: str, layout: str) -> Path:
        folder = self._root / family / model / layout
        if not folder.exists():
            if layout == SAVED:
                open_theirs(self(family, model, "downloaded"), family).save_pretrained(folder)
            else:
                folder.mkdir(parents=True)
                FAMILIES[family](folder, MODELS[model])
        return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("families"))


def differences(rivals: Rivals, text: str) -> list[str]:
    """What is not the same for `text`, in both roles and back."""
    found = []
    sides = {
        "source": (rivals.ours.encode(text), rivals.theirs(text).input_ids),
        "target": (rivals.ours.encode_target(text), rivals.theirs(text_target=text).input_ids),
    }
    for side, (ours, theirs) in sides.items():
        if ours != theirs:
            found.append(f"{side} of {text[:80]!r}: {ours[:40]} for {theirs[:40]}")
        found += decoded_differences(rivals, theirs)
    return found


def decoded_differences(rivals: Rivals, ids: list[int]) -> list[str]:
    ours, theirs = rivals.ours.decode(ids), rivals.theirs.decode(ids, skip_special_tokens=True)
    return [] if ours == theirs else [f"text of {ids[:40]}: {ours[:80]!r} for {theirs[:80]!r}"]


# The whole corpus, and ids at random.


@pytest.mark.parametrize("layout", ["downloaded", SAVED])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_text_of_nasty_lines_are_those_of_transformers(
    folders: Folders, family: str, model: str, layout: str
) -> None:
    folder = folders(family, model, layout)
    rivals = Rivals(open_tokenizer(folder), open_theirs(folder, family))
    assert len(LINES) >= 150
    assert [found for line in LINES for found in differences(rivals, line)] == []
    chosen = random.Random(1)  # noqa: S311 - not for secrets
    for _ in range(RANDOM_IDS):
        ids = [chosen.randrange(rivals.ours.target_size) for _ in range(chosen.randrange(12))]
        assert decoded_differences(rivals, ids) == []


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_special_ids_and_sizes_are_those_of_transformers(folders: Folders, family: str, model: str) -> None:
    folder = folders(family, model, "downloaded")
    ours, theirs = open_tokenizer(folder), open_theirs(folder, family)
    assert (ours.special.pad, ours.special.eos, ours.unknown) == (
        theirs.pad_token_id,
        theirs.eos_token_id,
        theirs.unk_token_id,
    )
    if "separate" in family:
        assert ours.size == len(theirs)
    else:
        assert ours.size == ours.target_size == len(theirs)
        assert [ours.piece(index) for index in range(ours.size)] == theirs.convert_ids_to_tokens(list(range(ours.size)))


fragments = st.sampled_from([*NASTY, *(line for line in LINES if len(line) < 100)])
nasty_texts = st.text(max_size=30) | st.lists(fragments | st.text(max_size=4), max_size=4).map("".join)


@pytest.fixture(
    scope="module",
    params=[(family, f"{kind}, nmt_nfkc, no bytes") for family in FAMILIES for kind in ("unigram", "bpe")],
    ids=": ".join,
)
def rivals(request: pytest.FixtureRequest, folders: Folders) -> Rivals:
    family, model = request.param
    folder = folders(family, model, "downloaded")
    return Rivals(open_tokenizer(folder), open_theirs(folder, family))


@settings(deadline=None, derandomize=True, max_examples=150)
@given(text=nasty_texts)
def test_ids_and_text_of_any_input_are_those_of_transformers(rivals: Rivals, text: str) -> None:
    assert differences(rivals, text) == []


@settings(deadline=None, derandomize=True)
@given(data=st.data())
def test_text_of_any_ids_is_that_of_transformers(rivals: Rivals, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, rivals.ours.target_size - 1), max_size=20))
    assert decoded_differences(rivals, ids) == []


@pytest.mark.filterwarnings("ignore:Recommended")
def test_the_recorded_answers_are_those_of_transformers() -> None:
    assert json.loads(RECORDED.read_text("utf-8")) == json.loads(json.dumps(record()))


# Languages.


@pytest.mark.parametrize(
    ("family", "source", "target"),
    [
        ("M2M100Tokenizer", "en", "zh"),
        ("NllbTokenizer", "zho_Hans", "kir_Cyrl"),
        ("MBartTokenizer", "de_DE", "zh_CN"),
        ("MBart50Tokenizer", "sv_SE", "gl_ES"),
    ],
)
@pytest.mark.parametrize("layout", ["downloaded", SAVED])
def test_chosen_languages_are_where_transformers_puts_them(
    folders: Folders, family: str, layout: str, source: str, target: str
) -> None:
    folder = folders(family, "bpe, nmt_nfkc, no bytes", layout)
    ours = open_tokenizer(folder, source, target)
    rivals = Rivals(ours, open_theirs(folder, family, src_lang=source, tgt_lang=target))
    assert [found for line in SENTENCES for found in differences(rivals, line)] == []
    beginning = ours.special.start if family == "MBartTokenizer" else ours.forced_bos
    code = f"__{target}__" if family == "M2M100Tokenizer" else target
    assert beginning == rivals.theirs.convert_tokens_to_ids(code)


@pytest.mark.parametrize("layout", ["downloaded", SAVED])
def test_the_legacy_behaviour_of_nllb_puts_the_language_last(folders: Folders, tmp_path: Path, layout: str) -> None:
    folder = change(folders("NllbTokenizer", "bpe, nmt_nfkc, no bytes", layout), tmp_path, legacy_behaviour=True)
    rivals = Rivals(open_tokenizer(folder), open_theirs(folder, "NllbTokenizer"))
    assert rivals.ours.encode("the cat")[-2:] == [rivals.ours.special.eos, rivals.ours.encode("eng_Latn")[0]]
    assert [found for line in SENTENCES for found in differences(rivals, line)] == []


def change(folder: Path, target: Path, **fields: Any) -> Path:
    """A copy of `folder` in `target` with other `fields` in its settings."""
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    path = target / "tokenizer_config.json"
    write_json(path, {**json.loads(path.read_text("utf-8")), **fields})
    return target


# Settings.


@pytest.mark.parametrize("cleans", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_spaces_before_punctuation_go_where_the_settings_say_so(
    folders: Folders, tmp_path: Path, family: str, *, cleans: bool
) -> None:
    folder = change(
        folders(family, "unigram, nmt_nfkc, no bytes", "downloaded"), tmp_path, clean_up_tokenization_spaces=cleans
    )
    rivals = Rivals(open_tokenizer(folder), open_theirs(folder, family))
    assert [found for line in LINES for found in differences(rivals, line)] == []
    text = rivals.ours.decode(rivals.ours.encode_target("Il est , la ?"))
    assert (" ," in text) == (not cleans or family == "NllbTokenizer")  # BPE is spared


@pytest.mark.parametrize("family", ["MarianTokenizer", "M2M100Tokenizer", "MBartTokenizer", "MBart50Tokenizer"])
def test_further_special_tokens_are_found_in_text(folders: Folders, tmp_path: Path, family: str) -> None:
    folder = folders(family, "unigram, nmt_nfkc, no bytes", SAVED)
    added = {"content": "<name>", "lstrip": True, "rstrip": True, "normalized": False, "special": True}
    given = json.loads((folder / "tokenizer_config.json").read_text("utf-8")).get("extra_special_tokens") or []
    folder = change(folder, tmp_path, extra_special_tokens=[*given, {"__type": "AddedToken", **added}])
    rivals = Rivals(open_tokenizer(folder), open_theirs(folder, family))
    for text in ("the <name> cat", "<name>", "the\t<name>\u3000<name> cat</s> <name>", "the<name>cat"):
        assert differences(rivals, text) == []
    assert rivals.ours.size == len(rivals.theirs)


# Where transformers itself is wrong, and we are not.


def test_nllb_has_its_languages_from_the_model_alone_though_transformers_loses_them(tmp_path: Path) -> None:
    """The class of 5.24 puts <unk> for the language where a folder holds the SentencePiece model alone."""
    size = train_fairseq(tmp_path, MODELS["bpe, nmt_nfkc, no bytes"]).get_piece_size() + 1
    theirs = open_theirs(tmp_path, "NllbTokenizer", src_lang="fra_Latn")
    assert theirs("the cat").input_ids[0] == theirs.unk_token_id
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "NllbTokenizer"})
    ours = open_tokenizer(tmp_path, "fra_Latn")
    assert ours.encode("the cat") == [size + NLLB.index("fra_Latn"), *theirs("the cat").input_ids[1:]]
    assert ours.size == size + len(NLLB) + 1
    theirs.save_pretrained(tmp_path / "saved")
    assert open_tokenizer(tmp_path / "saved", "fra_Latn").encode("the cat") == ours.encode("the cat")


def test_nllb_has_the_right_ids_of_languages_that_the_settings_list_though_transformers_shifts_them(
    tmp_path: Path,
) -> None:
    """The class of 5.24 gives the id after the pieces to <mask>, which belongs to the first language."""
    size = train_fairseq(tmp_path, MODELS["bpe, nmt_nfkc, no bytes"]).get_piece_size() + 1
    write_json(
        tmp_path / "tokenizer_config.json",
        {"tokenizer_class": "NllbTokenizer", "additional_special_tokens": list(NLLB), "src_lang": NLLB[0]},
    )
    theirs = open_theirs(tmp_path, "NllbTokenizer")
    assert (theirs.mask_token_id, theirs("the cat").input_ids[0]) == (size, size + 1)
    ours = open_tokenizer(tmp_path)
    assert ours.encode("the cat") == [size, *theirs("the cat").input_ids[1:]]
    assert ours.encode("<mask>")[1] == size + len(NLLB)


def test_m2m100_leaves_languages_out_of_text_though_transformers_writes_them(folders: Folders, tmp_path: Path) -> None:
    """The class of 5.24 adds no code to the special tokens itself, so without special_tokens_map.json they show."""
    folder = change(folders("M2M100Tokenizer", "unigram, nmt_nfkc, no bytes", "downloaded"), tmp_path)
    (folder / "special_tokens_map.json").unlink()
    ours, theirs = open_tokenizer(folder), open_theirs(folder, "M2M100Tokenizer")
    ids = theirs("the cat").input_ids
    assert ours.encode("the cat") == ids
    assert theirs.decode(ids, skip_special_tokens=True) == "__de__ the cat"
    assert ours.decode(ids) == "the cat"


def test_ids_that_have_no_piece(folders: Folders) -> None:
    """Padded vocabularies have such ids. Only Marian's class takes pieces for them that never had these ids."""
    for family in FAMILIES:
        folder = folders(family, "unigram, nmt_nfkc, no bytes", "downloaded")
        rivals = Rivals(open_tokenizer(folder), open_theirs(folder, family))
        ids = [*rivals.ours.encode_target("the cat")[:-1], rivals.ours.target_size + 3]
        assert rivals.ours.piece(ids[-1]) == f"#{ids[-1]}"
        if not family.startswith("Marian"):
            assert decoded_differences(rivals, ids) == []
            continue
        with pytest.raises(IndexError, match="out of range"):
            rivals.theirs.decode(ids, skip_special_tokens=True)
        assert rivals.ours.decode(ids) == rivals.ours.decode(ids[:-1])
