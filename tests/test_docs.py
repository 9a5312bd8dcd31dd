"""What the documentation says about commands is what the commands do."""

import re
import shlex
from pathlib import Path

import click
import pytest

from runtime.generation_config import GenerationConfig
from toolkit.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "tests/data/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
PAGES += sorted((ROOT / "models/pretrained").glob("*/README.md"))


def code_lines(page: Path) -> list[str]:
    """Lines of the page's shell blocks, comments cut off."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    joined = re.sub(r"\\\n", " ", "".join(blocks))
    return [line.split("  #")[0].strip() for line in joined.splitlines() if line.strip()]


SHOWN = [
    (page, part) for page in PAGES for line in code_lines(page) for part in line.split(" | ") if "toolkit " in part
]


@pytest.mark.parametrize(("page", "line"), SHOWN, ids=[f"{page.name}: {line}" for page, line in SHOWN])
def test_a_command_shown_in_the_docs_parses(page: Path, line: str) -> None:
    words = shlex.split(line.split(" > ", maxsplit=1)[0])
    name, *arguments = words[words.index("toolkit") + 1 :]
    command = main.commands.get(name)
    assert command is not None, f"{page.name} shows toolkit {name}, which does not exist"
    command.make_context(name, arguments)


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_and_option_is_described(name: str) -> None:
    page = (ROOT / "docs/commands.md").read_text("utf-8")
    section = page.split(f"## toolkit {name}\n")[1].split("\n## ")[0]
    described = set(re.findall(r"`(--[a-z-]+)", section))
    options = {
        option for parameter in main.commands[name].params for option in parameter.opts if option.startswith("--")
    }
    assert options - {"--help"} == described


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_quick_start_is_two_commands() -> None:
    assert [line.split("#")[0].strip() for line in code_lines(ROOT / "README.md")][:2] == ["make demo", "make test"]
    first_block = re.search(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert first_block is not None
    assert len(first_block[1].strip().splitlines()) == 2


def test_every_make_target_that_the_docs_name_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"`make ([a-z]+)`", page.read_text("utf-8")))
        assert named <= targets


def test_every_setting_is_described() -> None:
    pytest.importorskip("torch", reason="the settings of a training run are read from the training code")
    from models.config import ModelConfig
    from models.training import TrainingConfig
    from toolkit.config import FROM_TOKENIZER, DataConfig, OutputConfig, TokenizerConfig

    page = (ROOT / "docs/training.md").read_text("utf-8")
    for struct in (DataConfig, OutputConfig, TokenizerConfig, TrainingConfig):
        assert not [name for name in struct.__struct_fields__ if f"`{name}`" not in page]
    own = [name for name in ModelConfig.__struct_fields__ if name not in FROM_TOKENIZER]
    assert not [name for name in own if f"`{name}`" not in page]


def test_click_is_what_parses() -> None:
    with pytest.raises(click.UsageError):
        main.commands["run"].make_context("run", ["--no-such-option"])


def test_every_family_that_can_be_imported_is_described() -> None:
    pytest.importorskip("torch", reason="the importers read tensors")
    from models.importers import IMPORTERS, TORCH
    from models.importers.hugging_face import ACTIVATIONS, FIXED

    page = (ROOT / "docs/bring-your-own.md").read_text("utf-8")
    assert not [kind for kind in IMPORTERS if kind != TORCH and f"`{kind}`" not in page]
    assert not [name for name in ACTIVATIONS if f"`{name}`" not in page]
    assert not [name for name in FIXED if name != "is_encoder_decoder" and f"`{name}`" not in page]


def tables(page: Path) -> dict[str, dict[str, str]]:
    """Of each table the last cell of every row by its first one; tables by the first cell of their head."""
    found: dict[str, dict[str, str]] = {}
    for table in re.findall(r"(?:^\|.*\n)+", page.read_text("utf-8"), re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
        found[head[0]] = {row[0]: row[-1] for row in rows}
    return found


def test_every_row_of_what_can_be_imported_names_a_test_that_exists() -> None:
    found = tables(ROOT / "docs/bring-your-own.md")
    proofs = {row: proof for named, proof in found["row"].items() for row in named.split("; ")}
    assert proofs.keys() == found[""].keys() | found["refused"].keys()
    for row, proof in proofs.items():
        named = [re.findall(r"`(\w+(?:\.py)?)`", part) for part in proof.split("; ")]
        assert named, row
        for file, *tests in named:
            source = (ROOT / "tests" / file).read_text("utf-8")
            assert tests, row
            assert not [name for name in tests if f"\ndef {name}(" not in source], row


def test_every_option_of_the_search_is_described() -> None:
    described = {name for row in tables(ROOT / "docs/search.md")["option"] for name in re.findall(r"`(\w+)`", row)}
    assert described == {*GenerationConfig.__struct_fields__}


def test_the_description_in_the_docs_is_complete_and_good(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the importers read tensors")
    from models.errors import ModelImportError
    from models.importers import import_model
    from models.importers.torch_transformer import DESCRIPTION, FIELDS, NAMES

    page = (ROOT / "docs/bring-your-own.md").read_text("utf-8")
    (example,) = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"^(?:# )?(\w+) =", example, re.MULTILINE)) == (FIELDS | NAMES) - {"names"}
    # With every line that is commented out it is good too.
    for text in (example, re.sub(r"^# (\w+ =)", r"\1", example, flags=re.MULTILINE)):
        (tmp_path / DESCRIPTION).write_text(text, "utf-8")
        with pytest.raises(ModelImportError, match=r"model\.pt is missing"):
            import_model(tmp_path)
