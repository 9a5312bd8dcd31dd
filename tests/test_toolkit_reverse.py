"""The whole chain on a task that needs no data: a tiny model learns to reverse sequences of letters."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from exporters.reference import TorchBackend
from models.checkpoint import load_checkpoint
from runtime.generation import GenerationConfig
from runtime.generation import generate as generate_ids
from runtime.tokenizer import open_tokenizer
from runtime.translator import Translator
from toolkit.corpus import TextPair, read_pairs
from toolkit.train import translate_ids

ROOT = Path(__file__).parent.parent
# More threads make so small a model no faster, and slower where others use the CPUs too.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


class Trained(NamedTuple):
    data: Path
    run: Path
    output: str
    """What the command showed."""

    @property
    def checkpoint(self) -> Path:
        return self.run / "best"

    @property
    def test(self) -> list[TextPair]:
        return read_pairs([self.data / "test.tsv"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("reverse")
    data, run = folder / "data", folder / "run"
    generate(data)
    settings = ["--set", f"data.folder={data}", "--set", f"output.folder={run}"]
    done = toolkit("train", "--config", "examples/reverse.toml", *settings)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return Trained(data, run, done.stderr)


@pytest.fixture(scope="module")
def bundle(trained: Trained) -> Path:
    folder = trained.run / "bundle"
    done = toolkit("export", trained.checkpoint, folder)
    assert done.returncode == 0, done.stderr
    return folder


def toolkit(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "toolkit", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def generate(folder: Path) -> None:
    subprocess.run([sys.executable, ROOT / "examples/reverse.py", folder], check=True)


def test_the_same_seed_gives_the_same_data_and_no_sequence_stands_in_two_files(tmp_path: Path) -> None:
    generate(tmp_path / "first")
    generate(tmp_path / "second")
    seen: set[str] = set()
    for name, size in (("train", 10_000), ("valid", 200), ("test", 500)):
        file = tmp_path / "first" / f"{name}.tsv"
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes()
        pairs = read_pairs([file])
        sources = {pair.source for pair in pairs}
        assert len(pairs) == len(sources) == size
        assert not sources & seen
        assert all(pair.target == pair.source[::-1] for pair in pairs)
        seen |= sources


def test_a_letter_is_one_piece(trained: Trained) -> None:
    tokenizer = open_tokenizer(trained.checkpoint)
    for pair in trained.test:
        assert len(tokenizer.encode(pair.source)) == len(pair.source.split()) + 1  # and EOS


def test_the_model_reverses_sequences_that_it_has_never_seen(trained: Trained) -> None:
    model, tokenizer = load_checkpoint(trained.checkpoint), open_tokenizer(trained.checkpoint)
    sources = [tokenizer.encode(pair.source) for pair in trained.test]
    outputs = translate_ids(model, sources, tokenizer, size=len(sources))
    right = sum(output == pair.target for output, pair in zip(outputs, trained.test, strict=True))
    assert right / len(trained.test) > 0.95, f"{right} of {len(trained.test)} are right"


@pytest.mark.parametrize("beams", [1, 4])
def test_the_exported_model_gives_the_ids_that_pytorch_gives_for_every_sequence(
    trained: Trained, bundle: Path, beams: int
) -> None:
    config = GenerationConfig(num_beams=beams, max_length=32)
    model, tokenizer = load_checkpoint(trained.checkpoint), open_tokenizer(trained.checkpoint)
    sources = [tokenizer.encode(pair.source) for pair in trained.test]
    translator = Translator.open(bundle)
    expected = generate_ids(TorchBackend(model), sources, config, tokenizer.special, model.config.max_positions)
    assert [best.ids for best, *_ in translator.generate(sources, config)] == [best.ids for best, *_ in expected]


def test_the_run_command_reverses_sequences_that_the_model_has_never_seen(trained: Trained, bundle: Path) -> None:
    sources = trained.run / "sources.txt"
    sources.write_text("".join(f"{pair.source}\n" for pair in trained.test), "utf-8")
    done = toolkit("run", "--bundle", bundle, "--file", sources, "--beam", "1")
    assert done.returncode == 0, done.stderr
    right = sum(output == pair.target for output, pair in zip(done.stdout.splitlines(), trained.test, strict=True))
    assert right / len(trained.test) > 0.95, f"{right} of {len(trained.test)} are right"
