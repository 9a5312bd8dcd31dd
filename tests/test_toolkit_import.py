"""A folder of transformers by `toolkit export` or `toolkit import` to a bundle that runs, as from a shell."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from importers_support import TEXTS, complete_folder, edit_json, hugging_face, reference
from toolkit_support import refusal, toolkit

from exporters.restore import restore_model
from models.checkpoint import load_checkpoint
from models.importers import import_model
from runtime import Translator
from runtime.bundle import Bundle
from runtime.generation import GenerationConfig

pytestmark = pytest.mark.usefixtures("quiet")

FAMILIES = ("marian", "mbart")
"""Post-norm with sinusoids, and pre-norm with learned positions and normed embeddings."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return complete_folder(family, tmp_path_factory.mktemp("theirs") / "model")


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Path:
    """What one command makes of the folder."""
    target = folder.parent / "bundle"
    done = toolkit("export", folder, target)
    assert done.exit_code == 0, done.stderr
    assert "PASS" in done.stdout
    assert f"toolkit run --bundle {target}" in done.stdout
    return target


def test_the_bundle_passes_its_exam_and_a_fresh_one_about_the_folder(folder: Path, bundle: Path) -> None:
    assert toolkit("verify", bundle, "--threads", "1").exit_code == 0
    done = toolkit("verify", bundle, "--threads", "1", "--checkpoint", folder, "--seed", "7", "--json")
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert report["passed"] is True
    assert all(rung["compared"] for rung in report["rungs"])


@pytest.mark.parametrize("beams", [1, 4])
@torch.no_grad()
def test_the_bundle_finds_the_ids_of_transformers(folder: Path, bundle: Path, family: str, beams: int) -> None:
    translator, theirs = Translator.open(bundle, threads=1), reference(family, folder)
    for text in TEXTS:
        ids = translator.encode(text)
        ((best,),) = translator.generate([ids], GenerationConfig(num_beams=beams, max_length=20, length_penalty=0.8))
        plain = hugging_face.GenerationConfig(
            num_beams=beams,
            max_length=20,
            length_penalty=0.8,
            **{
                f"{name}_token_id": getattr(theirs.config, f"{name}_token_id")
                for name in ("pad", "eos", "decoder_start")
            },
        )
        (expected,) = theirs.generate(input_ids=torch.tensor([ids]), generation_config=plain).tolist()
        assert [theirs.config.decoder_start_token_id, *best.ids] == expected


def test_the_bundle_searches_as_the_folder_says_and_is_what_it_was_for_others(bundle: Path, family: str) -> None:
    opened = Bundle(bundle)
    assert opened.passport.generation == GenerationConfig(num_beams=3, max_length=20, length_penalty=0.8)
    config = hugging_face.AutoConfig.from_pretrained(bundle)
    assert config.model_type == family
    assert config.decoder_start_token_id == opened.passport.special.start


def test_the_graphs_hold_the_imported_model_bit_for_bit(folder: Path, bundle: Path) -> None:
    restored, imported = restore_model(Bundle(bundle)), import_model(folder).model
    assert restored.config == imported.config
    theirs = dict(imported.named_parameters())
    assert all(torch.equal(weight, theirs[name]) for name, weight in restored.named_parameters())


def test_it_runs_and_shows_its_shapes(bundle: Path) -> None:
    assert toolkit("run", "--bundle", bundle, TEXTS[0]).exit_code == 0
    done = toolkit("inspect", bundle, "--shapes", TEXTS[0])
    assert done.exit_code == 0
    assert "decoder self q, k, v" in done.stdout


def test_import_writes_a_checkpoint_that_can_be_looked_into(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    done = toolkit("import", folder, target)
    assert done.exit_code == 0, done.stderr
    assert f"toolkit export {target} BUNDLE" in done.stdout
    shown = toolkit("inspect", target, "--json")
    assert json.loads(shown.stdout)["model"]["vocab_size"] == load_checkpoint(target).config.vocab_size
    assert "exists already" in refusal("import", folder, target)
    (tmp_path / "mine.txt").write_text("the dog\n", "utf-8")
    done = toolkit("import", folder, target, "--force", "--json", "--sentences", tmp_path / "mine.txt")
    assert json.loads(done.stdout)["checkpoint"] == str(target)
    assert json.loads(done.stdout)["model"]["d_model"] == 32
    assert (target / "sentences.txt").read_text("utf-8") == "the dog\n"


def test_options_that_are_passed_over_are_told_to_people(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    edit_json(tmp_path / "model" / "generation_config.json", lambda config: config.update(top_p=0.5))
    done = toolkit("import", tmp_path / "model", tmp_path / "checkpoint", "--json")
    assert "generation_config.json: passed over top_p 0.5, which means nothing without do_sample\n" in done.stderr
    assert json.loads(done.stdout)


@pytest.mark.parametrize("command", ["import", "export"])
def test_what_cannot_be_imported_is_one_line_and_leaves_nothing(tmp_path: Path, command: str) -> None:
    folder = complete_folder("marian", tmp_path / "model")
    edit_json(
        folder / "config.json", lambda config: config.update(activation_function="gelu_new", add_bias_logits=True)
    )
    line = refusal(command, folder, tmp_path / "target")
    assert "config.json: activation_function is 'gelu_new'" in line or "add_bias_logits is true" in line
    assert "gelu_new" in line
    assert "add_bias_logits" in line
    edit_json(folder / "config.json", lambda config: config.update(model_type="t5"))
    assert "model_type is 't5', supported: marian, m2m_100, bart, mbart" in refusal(
        command, folder, tmp_path / "target"
    )
    assert "does not exist" in refusal(command, tmp_path / "nothing", tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
