"""The settings of a run: what a file and `--set` may say, and how mistakes are reported."""

from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.training import TrainingConfig
from toolkit.config import RunConfig, changed_settings, load_run_config, to_toml

ROOT = Path(__file__).parent.parent
MINIMAL = """
[output]
folder = "runs/x"
[data]
train = ["train.tsv"]
valid = ["valid.tsv"]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(click.ClickException) as caught:
        load_run_config(path, overrides)
    assert "\n" not in caught.value.message
    prefix = f"{path}: "
    assert caught.value.message.startswith(prefix)
    return caught.value.message.removeprefix(prefix)


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_the_examples_are_valid(example: Path) -> None:
    assert load_run_config(example).data.train


def test_what_is_not_said_has_its_default(path: Path) -> None:
    config = load_run_config(path)
    assert config.training == TrainingConfig()
    assert config.model["d_model"] == 512
    assert config.model["norm"] == "post"
    assert "vocab_size" not in config.model


@pytest.mark.parametrize(
    ("override", "section", "name", "value"),
    [
        ("training.epochs=7", "training", "epochs", 7),
        ("training.learning_rate=1e-4", "training", "learning_rate", 1e-4),
        ("training.learning_rate=1", "training", "learning_rate", 1.0),
        ("training.clip_norm=inf", "training", "clip_norm", float("inf")),
        (" training.epochs = 7 ", "training", "epochs", 7),
        ("training.precision=bf16", "training", "precision", "bf16"),
        ('training.precision="bf16"', "training", "precision", "bf16"),
        ('training.freeze=["encoder", "output"]', "training", "freeze", ("encoder", "output")),
        ("output.folder=runs/a = b", "output", "folder", "runs/a = b"),
        ("output.folder=2024", "output", "folder", "2024"),
        ("output.folder=2024-05-01", "output", "folder", "2024-05-01"),
        ("output.folder=C:\\runs", "output", "folder", "C:\\runs"),
    ],
)
def test_set_takes_a_toml_value_or_plain_text(
    path: Path, override: str, section: str, name: str, value: object
) -> None:
    assert getattr(getattr(load_run_config(path, [override]), section), name) == value


def test_set_reaches_the_model_and_keys_outside_of_sections(path: Path) -> None:
    config = load_run_config(path, ["model.d_model=64", "model.norm=pre", "model.tie_output=false"])
    assert (config.model["d_model"], config.model["norm"], config.model["tie_output"]) == (64, "pre", False)
    assert load_run_config(path, ["init_from=runs/before/best"]).init_from == "runs/before/best"


def test_the_last_set_wins(path: Path) -> None:
    assert load_run_config(path, ["training.epochs=2", "training.epochs=3"]).training.epochs == 3


@pytest.mark.parametrize("override", ["training.epochs", "=3", "training.=3", ""])
def test_set_without_a_key_or_an_equals_sign_says_what_it_looks_like(path: Path, override: str) -> None:
    assert message(path, override) == f"--set {override}: expected section.key=value, such as training.epochs=5"


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("training.epoch=3", "training.epochs"),
        ("training.lerning_rate=3", "training.learning_rate"),
        ("training.dropout=0.1", "model.dropout"),
        ("model.vocab_size=8000", "tokenizer.vocab_size"),
        ("epochs=3", "training.epochs"),
        ("init_form=x", "init_from"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(path: Path, override: str, nearest: str) -> None:
    key = override.partition("=")[0]
    assert message(path, override) == f"unknown key {key}, did you mean {nearest}?"


@pytest.mark.parametrize(("section", "nearest"), [("trainig", "training"), ("models", "model"), ("model.x", "model")])
def test_an_unknown_section_names_the_nearest_one(path: Path, section: str, nearest: str) -> None:
    assert message(path, f"{section}.epochs=3") == f"unknown section [{section}], did you mean [{nearest}]?"


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("training.epochs=many", "training.epochs: Expected `int`, got `str`"),
        ("training.epochs=1.5", "training.epochs: Expected `int`, got `float`"),
        ("model.dropout=true", "model.dropout: Expected `float`, got `bool`"),
        ("data.train=train.tsv", "data.train: Expected `array`, got `str`"),
        ('data.train=["a.tsv", 2]', "data.train[1]: Expected `str`, got `int`"),
        ("data.train=[]", "data.train: Expected `array` of length >= 1"),
        ("data.max_tokens=0", "data.max_tokens: Expected `int` >= 1"),
        ("tokenizer.character_coverage=2", "tokenizer.character_coverage: Expected `float` <= 1.0"),
        ("output.folder=", "output.folder: Expected `str` of length >= 1"),
        ("model.norm=middle", "model.norm is 'middle', expected one of 'post', 'pre'"),
        ("training=3", "training is a section, expected [training] with its keys below"),
    ],
)
def test_a_wrong_value_names_its_field_and_what_was_expected(path: Path, override: str, problem: str) -> None:
    assert message(path, override).split("; ")[0] == problem


def test_missing_settings_are_listed(path: Path) -> None:
    path.write_text("")
    assert message(path) == "output.folder is missing; data.train is missing; data.valid is missing"


def test_all_wrong_keys_and_types_are_listed_at_once(path: Path) -> None:
    found = message(path, "training.epoch=3", "trainig.epochs=3", "model.d_model=big", "data.train=3", "x")
    assert found == "--set x: expected section.key=value, such as training.epochs=5"
    found = message(path, "training.epoch=3", "trainig.epochs=3", "model.d_model=big", "data.train=3")
    for problem in ("training.epoch,", "[trainig]", "model.d_model: Expected", "data.train: Expected"):
        assert problem in found
    assert len(found.split("; ")) == 4


def test_all_impossible_values_of_all_sections_are_listed_at_once(path: Path) -> None:
    found = message(path, "training.epochs=0", "training.average=-1", "model.d_model=-2", "model.dropout=2")
    for problem in ("epochs is 0", "average is -1", "d_model is -2", "dropout is 2"):
        assert problem in found


def test_init_from_leaves_no_room_for_a_model_or_a_tokenizer(path: Path) -> None:
    found = message(path, "init_from=runs/before/best", "model.d_model=64", "tokenizer.vocab_size=100")
    assert "remove the section [model]" in found
    assert "remove the section [tokenizer]" in found


@pytest.mark.parametrize("content", [b"[output\n", b"folder = runs/x\n", b"\xff\xfe"])
def test_a_file_that_is_not_toml_is_one_line(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(click.ClickException, match="is not TOML") as caught:
        load_run_config(path)
    assert "\n" not in caught.value.message


def test_a_byte_order_mark_is_no_part_of_the_file(path: Path) -> None:
    path.write_text(MINIMAL, "utf-8-sig")
    assert load_run_config(path).output.folder == "runs/x"


def test_the_resolved_settings_read_back_as_they_were(tmp_path: Path, path: Path) -> None:
    for config in (
        load_run_config(ROOT / "examples/zh-en.toml"),
        load_run_config(path, ["training.clip_norm=inf", 'training.freeze=["encoder"]']),
        load_run_config(path, ["init_from=runs/before/best"]),
    ):
        copy = tmp_path / "copy.toml"
        copy.write_text(to_toml(config), "utf-8")
        assert load_run_config(copy) == config


@given(text=st.text(st.characters(codec="utf-8"), min_size=1), rate=st.floats(min_value=1e-300, allow_infinity=False))
def test_any_text_and_number_survives_the_way_to_toml_and_back(
    tmp_path_factory: pytest.TempPathFactory, text: str, rate: float
) -> None:
    path = tmp_path_factory.mktemp("toml") / "run.toml"
    path.write_text(MINIMAL)
    base = load_run_config(path)
    config = RunConfig(
        output=type(base.output)(folder=text),
        data=base.data,
        model=base.model,
        training=TrainingConfig(learning_rate=rate, freeze=(text,)),
    )
    path.write_bytes(to_toml(config).encode())
    assert load_run_config(path) == config


def test_a_continuation_may_be_longer_and_elsewhere_but_nothing_else(path: Path) -> None:
    before = load_run_config(path)
    free = ["training.epochs=99", "training.average=2", "training.save_steps=5", "data.folder=a", "output.folder=b"]
    assert changed_settings(before, load_run_config(path, free)) == []
    changed = load_run_config(path, ["training.seed=2", "model.d_model=64", "tokenizer.vocab_size=9"])
    assert changed_settings(before, changed) == [
        "model.d_model was 512 and is 64",
        "tokenizer.vocab_size was 8000 and is 9",
        "training.seed was 1 and is 2",
    ]
