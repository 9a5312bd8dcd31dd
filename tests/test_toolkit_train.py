"""`toolkit train` on a tiny model: what a run leaves, how it is interrupted and resumed, and what it refuses."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from models.training import StepMetrics, ValidationMetrics, read_metrics
from runtime.tokenizer import TOKENIZER_FILES
from toolkit.cli import main
from toolkit.config import load_run_config

ROOT = Path(__file__).parent.parent
SIZES = {"d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
SIZES |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_positions": 32}
MODEL = "[model]\n" + "".join(f"{name} = {size}\n" for name, size in SIZES.items())
TOKENIZER = "[tokenizer]\nvocab_size = 40\n"
TRAINING = """
[training]
epochs = 2
batch_tokens = 100
warmup_steps = 10
log_steps = 2
average = 2
"""


class Run(NamedTuple):
    """A configuration file, and the folders that it names."""

    config: Path
    data: Path
    folder: Path

    def train(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, ["train", "--config", str(self.config), *arguments])

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """The command in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "toolkit", "train", "--config", self.config, *arguments],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def make_run(folder: Path, sections: str = TOKENIZER + MODEL) -> Run:
    data, config = folder / "data", folder / "run.toml"
    data.mkdir(parents=True)
    lines = [f"{a} {b} {c}\t{c} {b} {a}\n" for a in "abcd" for b in "efgh" for c in "ijkl"]
    (data / "train.tsv").write_text("".join(lines[8:]))
    (data / "valid.tsv").write_text("".join(lines[:8]))
    head = f'[output]\nfolder = "{folder / "out"}"\n[data]\nfolder = "{data}"\n'
    config.write_text(head + 'train = ["train.tsv"]\nvalid = ["valid.tsv"]\n' + sections + TRAINING)
    return Run(config, data, folder / "out")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Result]:
    """A run to its end, only to be read."""
    run = make_run(tmp_path_factory.mktemp("finished"))
    result = run.train("--json")
    assert result.exit_code == 0, result.output
    return run, result


def error(result: Result) -> str:
    """The one line that an error is."""
    assert result.exit_code == 1, result.output
    *_, line = result.stderr.splitlines()
    assert "Traceback" not in result.stderr
    assert line.startswith("Error: ")
    return line.removeprefix("Error: ")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# What a run leaves.


def test_a_run_leaves_checkpoint_settings_metrics_state_and_picture(finished: tuple[Run, Result]) -> None:
    run, _ = finished
    found = {str(path.relative_to(run.folder)) for path in contents(run.folder)}
    best = {f"best/{name}" for name in (*TOKENIZER_FILES, "model.json", "model.safetensors", "sentences.txt")}
    files = {"config.toml", "metrics.jsonl", "loss-curve.png", "state.safetensors"}
    assert best | files <= found
    assert {path for path in found if not path.startswith("epochs/")} == best | files
    assert (run.folder / "loss-curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_settings_in_the_folder_are_those_of_the_run(run: Run) -> None:
    overrides = ["training.epochs=1", "training.seed=5"]
    assert run.train("--set", overrides[0], "--set", overrides[1]).exit_code == 0
    assert load_run_config(run.folder / "config.toml") == load_run_config(run.config, overrides)


def test_metrics_go_on_from_line_to_line(finished: tuple[Run, Result]) -> None:
    metrics = read_metrics(finished[0].folder)
    validations = [line for line in metrics if isinstance(line, ValidationMetrics)]
    assert [line.step for line in metrics] == sorted(line.step for line in metrics)
    assert [line.epoch for line in metrics] == sorted(line.epoch for line in metrics)
    assert [(line.epoch, line.averaged) for line in validations] == [(1, 1), (2, 1), (2, 2)]
    assert all(list(line.scores) == ["bleu", "chrf"] for line in validations)
    assert validations[0].best


def test_json_prints_the_lines_of_the_metrics_file(finished: tuple[Run, Result]) -> None:
    run, result = finished
    assert result.stdout == (run.folder / "metrics.jsonl").read_text()
    assert {json.loads(line)["event"] for line in result.stdout.splitlines()} == {"step", "validation"}


def test_without_a_terminal_progress_is_plain_lines_and_ends_in_a_summary(finished: tuple[Run, Result]) -> None:
    run, result = finished
    assert "\x1b" not in result.stderr
    assert "\r" not in result.stderr
    lines = result.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        *("tokenizer", "data", "model", "epoch 1", "epoch 2", "average of 2 epochs"),
        *("best", "checkpoint", "loss curve", "next"),
    ]
    assert lines[1] == "data: 56 pairs to train on, 8 held out"
    assert "(best so far)" in lines[3]
    assert "BLEU" in lines[3]
    assert lines[-1] == f"next: toolkit export {run.folder}/best bundles/out"


def test_the_sentences_for_the_exam_are_held_out_ones(finished: tuple[Run, Result]) -> None:
    from exporters.source import SENTENCES

    run, _ = finished
    sentences = (run.folder / "best" / SENTENCES).read_text().splitlines()
    assert sentences == [line.split("\t")[0] for line in (run.data / "valid.tsv").read_text().splitlines()]


def test_the_same_settings_give_the_same_weights(finished: tuple[Run, Result], tmp_path: Path) -> None:
    run, _ = finished
    again = tmp_path / "again"
    assert run.train("--set", f"output.folder={again}").exit_code == 0
    assert (again / "best/model.safetensors").read_bytes() == (run.folder / "best/model.safetensors").read_bytes()


def test_pairs_that_are_too_long_are_left_out_and_counted(run: Run) -> None:
    long = " ".join("abcdefghijklmnopqrst" * 2)  # more tokens than the model has positions
    for name in ("train.tsv", "valid.tsv"):
        with (run.data / name).open("a") as file:
            file.write(f"{long}\ta b c\n")
    result = run.train("--set", "training.epochs=1")
    assert result.exit_code == 0, result.output
    assert "data: 56 pairs to train on, 8 held out; left out as too long: 1 and 1\n" in result.stderr


# Interruption.


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_the_run_and_the_line_it_prints_resumes_it(run: Run, number: signal.Signals, code: int) -> None:
    process = run.start("--json", "--set", "training.epochs=100000", "--set", "training.save_steps=100000")
    assert process.stdout is not None
    first = msgspec.json.decode(process.stdout.readline(), type=StepMetrics | ValidationMetrics)
    process.send_signal(number)
    _, shown = process.communicate(timeout=120)
    assert process.returncode == code, shown
    assert "Traceback" not in shown
    last = shown.splitlines()[-1]
    stopped_at = int(last.split()[3].rstrip(",").replace(",", ""))
    assert stopped_at >= first.step
    command = shlex.split(last.partition("go on with: ")[2])
    assert command == ["toolkit", "train", "--config", str(run.folder / "config.toml"), "--resume"]
    assert (run.folder / "loss-curve.png").exists()

    epochs = int(read_metrics(run.folder)[-1].epoch) + 2
    resumed = CliRunner().invoke(main, [*command[1:], "--set", f"training.epochs={epochs}"])
    assert resumed.exit_code == 0, resumed.output
    assert "tokenizer: as before" in resumed.stderr
    steps = [line.step for line in read_metrics(run.folder) if isinstance(line, StepMetrics)]
    assert steps == list(range(2, steps[-1] + 1, 2))  # no step is missing, none is counted twice
    assert steps[-1] > stopped_at


def test_ctrl_c_before_the_first_step_aborts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.train.train_tokenizer", lambda *_: signal.raise_signal(signal.SIGINT))
    result = run.train()
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "Aborted!"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_run_that_was_aborted_before_its_first_save_can_be_started_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("models.training.Trainer.run", lambda *_, **__: signal.raise_signal(signal.SIGINT))
        assert run.train().exit_code == 130
    assert run.train("--set", "training.epochs=1").exit_code == 0


# Several processes.


def test_two_processes_share_one_run_and_one_of_them_speaks(run: Run) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "toolkit", "train", "--config", run.config, "--json", "--set", "training.epochs=1"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (run.folder / "metrics.jsonl").read_text()
    assert done.stderr.count("tokenizer: training on 56 pairs") == 1
    assert done.stderr.count("next: toolkit export") == 1


# What is refused.


def test_a_folder_with_a_run_is_not_overwritten(finished: tuple[Run, Result]) -> None:
    run, _ = finished
    before = contents(run.folder)
    # Another text would give another tokenizer.
    refused = error(run.train("--set", 'data.train=["valid.tsv"]'))
    assert refused.startswith(f"{run.folder} already holds a training run: go on with it by --resume, or")
    assert contents(run.folder) == before


def test_a_folder_with_a_checkpoint_alone_is_not_overwritten(run: Run) -> None:
    weights = run.folder / "best/model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"precious")
    assert "already holds a checkpoint" in error(run.train())
    assert contents(run.folder) == {weights: b"precious"}


def test_resume_without_a_run_is_refused_and_writes_nothing(run: Run) -> None:
    assert error(run.train("--resume")) == f"no run to resume: {run.folder}/state.safetensors does not exist"
    assert not run.folder.exists()


def test_resume_with_other_settings_names_them(finished: tuple[Run, Result]) -> None:
    run, _ = finished
    before = contents(run.folder)
    refused = error(run.train("--resume", "--set", "training.seed=2", "--set", "model.dropout=0.5"))
    assert "model.dropout was 0.1 and is 0.5; training.seed was 1 and is 2; keep these" in refused
    assert contents(run.folder) == before


def test_resume_with_other_data_is_refused(run: Run) -> None:
    assert run.train("--set", "training.epochs=1").exit_code == 0
    train = run.data / "train.tsv"
    train.write_text("".join(train.read_text().splitlines(keepends=True)[:-1]))
    assert "belongs to a run with other settings or data" in error(run.train("--resume"))


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("data.folder=nowhere", "nowhere/train.tsv does not exist"),
        ("data.bleu_tokenizer=zhh", "data.bleu_tokenizer is 'zhh', expected one of none, zh, 13a"),
        ("init_from=nowhere", "remove the section [model]"),
        ("training.epoch=3", "did you mean training.epochs?"),
        ("model.d_model=15", "d_model 15 is not a multiple of encoder_attention_heads 2"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_folder(run: Run, override: str, problem: str) -> None:
    assert problem in error(run.train("--set", override))
    assert not run.folder.exists()


def test_a_missing_configuration_is_one_line(run: Run) -> None:
    run.config.unlink()
    result = run.train()
    assert result.stderr == f"Error: {run.config}: No such file or directory\n"
    assert result.exit_code == 1


def test_an_output_folder_that_cannot_be_written_is_one_line(run: Run) -> None:
    run.folder.write_text("a file")
    assert error(run.train()).startswith(f"{run.folder}/best: ")


def test_a_part_that_is_not_there_cannot_be_frozen(run: Run) -> None:
    assert "training.freeze: no weight begins with 'encodr'" in error(run.train("--set", 'training.freeze=["encodr"]'))


def test_divergence_says_where_and_what_to_change(run: Run) -> None:
    found = error(run.train("--set", "training.learning_rate=1e30", "--set", "training.clip_norm=inf"))
    assert found.startswith("training diverged at step ")
    assert "lower training.learning_rate or raise training.warmup_steps" in found


# Fine-tuning.


def test_fine_tuning_starts_from_a_checkpoint_and_leaves_frozen_parts_alone(
    finished: tuple[Run, Result], tmp_path: Path
) -> None:
    before = finished[0].folder / "best"
    run = make_run(tmp_path, sections="")
    arguments = [
        "--set",
        f"init_from={before}",
        "--set",
        'training.freeze=["encoder.layers", "decoder.layers.0.self_attention"]',
    ]
    result = run.train(*arguments)
    assert result.exit_code == 0, result.output
    assert f"tokenizer: that of {before}" in result.stderr
    for name in TOKENIZER_FILES:
        assert (run.folder / "best" / name).read_bytes() == (before / name).read_bytes()
    old, new = (load_file(folder / "model.safetensors") for folder in (before, run.folder / "best"))
    changed = {name for name in old if not old[name].equal(new[name])}
    frozen = {name for name in old if name.startswith(("encoder.layers.", "decoder.layers.0.self_attention."))}
    assert changed
    assert changed == old.keys() - frozen
    # The settings in the folder are enough to go on.
    again = ["train", "--config", str(run.folder / "config.toml"), "--resume", "--set", "training.epochs=3"]
    assert CliRunner().invoke(main, again).exit_code == 0


def test_fine_tuning_from_what_is_no_checkpoint_is_one_line(tmp_path: Path) -> None:
    run = make_run(tmp_path, sections="")
    found = error(run.train("--set", f"init_from={tmp_path}"))
    assert found == f"{tmp_path} is not a checkpoint: it has no model.json"
    assert not run.folder.exists()
