"""`toolkit export`, `verify` and `inspect`, as they are used from a shell."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runtime_support import TINY, edit_passport, tiny_copy

from exporters.restore import restore_model
from models.checkpoint import load_checkpoint, save_checkpoint
from runtime.bundle import Bundle
from runtime.tokenizer import TOKENIZER_FILES

SENTENCES = ["a b c d", "t s r q p", "k l m"]


class Done:
    """What a command did."""

    def __init__(self, *arguments: str | Path) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "toolkit", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            timeout=300,
        )
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        assert "Traceback" not in self.err

    @property
    def refusal(self) -> str:
        """The one line by which the command refused."""
        assert self.code == 1, self.err
        assert self.out == ""
        error = self.err.splitlines()[-1]
        assert error.startswith("Error: ")
        return error


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that the tiny bundle was exported from."""
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    save_checkpoint(restore_model(Bundle(TINY)), folder)
    for name in TOKENIZER_FILES:
        shutil.copy(TINY / name, folder / name)
    (folder / "sentences.txt").write_text("\n".join(SENTENCES), "utf-8")
    return folder


def test_a_checkpoint_becomes_a_bundle_that_passed(checkpoint: Path, tmp_path: Path) -> None:
    done = Done("export", checkpoint, tmp_path / "new" / "bundle")
    assert done.code == 0, done.err
    assert "PASS" in done.out
    bundle = Bundle(tmp_path / "new" / "bundle")
    assert bundle.passport.verification is not None
    assert bundle.passport.verification.passed
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["bundle"]
    assert "exists already" in Done("export", checkpoint, bundle.folder).refusal


@pytest.mark.parametrize("missing", ["model.json", "model.safetensors", "source.spm", "sentences.txt"])
def test_a_checkpoint_that_lacks_something_is_refused_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, missing: str
) -> None:
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    (broken / missing).unlink()
    assert missing in Done("export", broken, tmp_path / "bundle").refusal
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_what_is_no_bundle_is_never_replaced(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("one", "utf-8")
    assert "is not a bundle" in Done("export", checkpoint, tmp_path / "thesis", "--force").refusal
    assert (tmp_path / "thesis" / "chapter").read_text("utf-8") == "one"


def test_a_terminated_export_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "toolkit", "export", str(checkpoint), str(tmp_path / "bundle")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "tracing prefill" not in process.stderr.readline():
            assert process.poll() is None
        assert [path.name for path in tmp_path.iterdir()] == [".bundle.partial"]
        process.terminate()
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 143
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_behind_a_link_is_replaced_where_it_lies(checkpoint: Path, tmp_path: Path) -> None:
    tiny_copy(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    before = (tmp_path / "real" / "bundle.json").stat().st_ino
    assert Done("export", checkpoint, tmp_path / "link", "--force").code == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "bundle.json").stat().st_ino != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_a_good_bundle_passes() -> None:
    done = Done("verify", TINY)
    assert done.code == 0, done.err
    assert done.out.rstrip().endswith("PASS")
    report = json.loads(Done("verify", TINY, "--json").out)
    assert report["passed"]
    assert [rung["rung"] for rung in report["rungs"]] == [0, 1, 2, 3, 4, 5, 6]
    assert all(tensor["compared"] > 0 for tensor in report["tensors"])


def test_a_bundle_with_other_weights_fails_with_exit_code_1(tmp_path: Path) -> None:
    folder = tiny_copy(tmp_path / "tiny")
    weights = folder / "weights.bin"
    content = bytearray(weights.read_bytes())
    content[:4000] = bytes(4000)
    weights.write_bytes(content)
    assert "weights.bin" in Done("verify", folder).refusal
    # With a passport that vouches for them, the exam is what finds out.
    digest = hashlib.sha256(content).hexdigest()
    edit_passport(folder, lambda passport: passport["files"]["weights.bin"].update(sha256=digest))
    done = Done("verify", folder)
    assert done.code == 1
    assert done.out.rstrip().endswith("FAIL")
    assert "rung 2" in done.out


def test_a_fresh_exam_is_drawn_from_a_seed_that_can_be_repeated(checkpoint: Path, tmp_path: Path) -> None:
    sentences = tmp_path / "sentences"
    sentences.write_text("a b c d e f\n", "utf-8")
    arguments = ("verify", TINY, "--checkpoint", checkpoint, "--sentences", sentences, "--json")
    first = json.loads(Done(*arguments).out)
    second = json.loads(Done(*arguments, "--seed", str(first["seed"])).out)
    assert first["passed"]
    assert first["tensors"] == second["tensors"]
    assert first["rungs"][4]["compared"] == 2


def test_a_fresh_exam_of_another_checkpoint_fails(checkpoint: Path, tmp_path: Path) -> None:
    other = shutil.copytree(checkpoint, tmp_path / "other")
    model = load_checkpoint(other)
    for parameter in model.decoder.layers[0].parameters():
        parameter.data.mul_(1.01)
    save_checkpoint(model, other)
    done = Done("verify", TINY, "--checkpoint", other)
    assert done.code == 1
    assert done.out.rstrip().splitlines()[-2] == "FAIL"


def test_a_seed_without_a_checkpoint_makes_no_sense() -> None:
    done = Done("verify", TINY, "--seed", "1")
    assert done.code == 2
    assert "--checkpoint" in done.err


def test_inspect_shows_bundle_and_checkpoint_to_people_and_machines(checkpoint: Path) -> None:
    shown = Done("inspect", TINY)
    assert "past_decoder_sequence_length + decoder_sequence_length" in shown.out
    assert "weights.bin" in shown.out
    machine = json.loads(Done("inspect", TINY, "--json").out)
    assert machine["passport"]["format"] == "seq2onnx-bundle-4"
    assert machine["graphs"]["step"]["outputs"][0]["name"] == "logits"
    assert "encoder.layers.0.self_attention.q_proj.weight" in Done("inspect", checkpoint).out
    assert json.loads(Done("inspect", checkpoint, "--json").out)["model"]["d_model"] == 32


def test_shapes_are_the_same_from_a_bundle_and_its_checkpoint(checkpoint: Path) -> None:
    bundle = json.loads(Done("inspect", TINY, "--shapes", "a b c", "--json").out)
    assert bundle == json.loads(Done("inspect", checkpoint, "--shapes", "a b c", "--json").out)
    training = {row["point"]: row["shape"] for row in bundle["training"]}
    assert training["source ids"] == [1, 4]
    assert training["logits"] == [1, 4, 45]
    assert training["loss"] == []


def test_a_folder_that_is_neither_is_refused(tmp_path: Path) -> None:
    assert "neither" in Done("inspect", tmp_path).refusal
    assert "does not exist" in Done("verify", tmp_path / "nothing").refusal
