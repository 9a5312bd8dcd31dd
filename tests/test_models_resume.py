"""A run that was stopped or killed anywhere and resumed ends bit by bit where an uninterrupted one does."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from models_support import random_pairs, tiny
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from models.checkpoint import WEIGHTS_FILE
from models.errors import CheckpointError
from models.training import METRICS_FILE, Metrics, StepMetrics, Trainer, TrainingConfig, ValidationMetrics, read_metrics
from models.training_state import STATE_FILE, load_progress
from models.transformer import Transformer

MODEL = tiny(dropout=0.2)
PAIRS = random_pairs(MODEL, [(2 + index % 5, 2 + index % 3) for index in range(30)])
HELD_OUT = random_pairs(MODEL, [(3, 4), (4, 3)], seed=1)
CONFIG = TrainingConfig(
    epochs=3, batch_tokens=30, warmup_steps=5, learning_rate=3e-3, average=2, save_steps=4, log_steps=1
)


class Killed(Exception):  # noqa: N818  # no error, but the end of a process
    """What a test throws to end a run without warning."""


def trainer(folder: Path, seed: int = 0, config: TrainingConfig = CONFIG, **hooks: Callable[..., object]) -> Trainer:
    torch.manual_seed(seed)
    return Trainer(Transformer(MODEL), PAIRS, HELD_OUT, config, folder, **hooks)  # type: ignore[arg-type]


def untimed(folder: Path) -> list[Metrics]:
    """The metrics without what the clock says."""
    return [
        msgspec.structs.replace(
            line, seconds=0.0, **({"tokens_per_second": 0.0} if isinstance(line, StepMetrics) else {})
        )
        for line in read_metrics(folder)
    ]


def assert_equal_folders(actual: Path, expected: Path) -> None:
    """All weights equal bit by bit, all metrics equal but for the time."""
    weights = sorted(path.relative_to(expected) for path in expected.rglob("*.safetensors"))
    assert sorted(path.relative_to(actual) for path in actual.rglob("*.safetensors")) == weights
    assert len(weights) == 4
    for path in weights:
        one, other = load_file(actual / path), load_file(expected / path)
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), f"{path}: {name}"
    assert untimed(actual) == untimed(expected)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    trainer(folder).run()
    return folder


def steps_of_an_epoch(folder: Path) -> int:
    (*_, last) = (line.step for line in read_metrics(folder))
    assert last % CONFIG.epochs == 0
    return last // CONFIG.epochs


def test_an_uninterrupted_run_logs_every_step_and_every_epoch_once(uninterrupted: Path) -> None:
    lines = read_metrics(uninterrupted)
    last = CONFIG.epochs * steps_of_an_epoch(uninterrupted)
    assert [line.step for line in lines if isinstance(line, StepMetrics)] == list(range(1, last + 1))
    epochs = [(line.epoch, line.averaged) for line in lines if isinstance(line, ValidationMetrics)]
    assert epochs == [(1, 1), (2, 1), (3, 1), (3, 2)]
    losses = [line.loss for line in lines if isinstance(line, StepMetrics)]
    assert len(set(losses)) == len(losses)


@pytest.mark.parametrize(("epoch", "place"), [(0, 1), (0, 3), (0, -1), (1, 2), (1, -1), (2, 1), (2, -1)])
def test_a_stop_in_the_middle_of_an_epoch_changes_nothing(
    tmp_path: Path, uninterrupted: Path, epoch: int, place: int
) -> None:
    batches = steps_of_an_epoch(uninterrupted)
    stop_at = epoch * batches + place % (batches + 1)
    first = trainer(tmp_path, should_stop=lambda: first.progress.step == stop_at)
    assert first.run().step == stop_at
    assert load_progress(tmp_path / STATE_FILE).batch == stop_at - epoch * batches
    # Another process has other weights and another random state until it has read those of the first.
    trainer(tmp_path, seed=9).run(resume=True)
    assert_equal_folders(tmp_path, uninterrupted)


def test_a_run_that_stops_after_every_step_gets_there_too(tmp_path: Path, uninterrupted: Path) -> None:
    trainer(tmp_path, should_stop=lambda: True).run()
    while load_progress(tmp_path / STATE_FILE).epoch < CONFIG.epochs:
        trainer(tmp_path, seed=9, should_stop=lambda: True).run(resume=True)
    assert_equal_folders(tmp_path, uninterrupted)


@pytest.mark.parametrize("lines", [6, 9, 11, 14])
def test_a_kill_between_two_saves_leaves_no_line_of_metrics_twice(
    tmp_path: Path, uninterrupted: Path, lines: int
) -> None:
    count = 0

    def kill(_: Metrics) -> None:
        nonlocal count
        count += 1
        if count == lines:
            raise Killed

    with pytest.raises(Killed):
        trainer(tmp_path, observe=kill).run()
    # The last line was cut short.
    with (tmp_path / METRICS_FILE).open("ab") as file:
        file.write(b'{"event":"step","st')
    trainer(tmp_path, seed=9).run(resume=True)
    assert_equal_folders(tmp_path, uninterrupted)


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path, uninterrupted: Path) -> None:
    trainer(tmp_path).run()
    trainer(tmp_path, seed=9).run(resume=True)
    assert_equal_folders(tmp_path, uninterrupted)


def test_a_finished_run_can_be_given_more_epochs(tmp_path: Path, uninterrupted: Path) -> None:
    trainer(tmp_path, config=msgspec.structs.replace(CONFIG, epochs=2)).run()
    trainer(tmp_path, seed=9).run(resume=True)
    # The average of the first two epochs may have been the best; all else is as in one run.
    assert untimed(tmp_path) == untimed(uninterrupted)
    assert_same_file(tmp_path / STATE_FILE, uninterrupted / STATE_FILE)


def assert_same_file(actual: Path, expected: Path) -> None:
    one, other = load_file(actual), load_file(expected)
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_time_adds_up_over_interruptions(tmp_path: Path) -> None:
    first = trainer(tmp_path, should_stop=lambda: first.progress.step == 5)
    before = first.run().seconds
    after = trainer(tmp_path).run(resume=True).seconds
    assert 0 < before < after
    seconds = [line.seconds for line in read_metrics(tmp_path)]
    assert seconds == sorted(seconds)


# Refusals.


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    trainer(tmp_path, should_stop=lambda: True).run()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match="already holds a training run: resume it or choose another folder"):
        trainer(tmp_path).run()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no run to resume: .*state\.safetensors does not exist"):
        trainer(tmp_path).run(resume=True)


@pytest.mark.parametrize("damage", [lambda data: data[:50], lambda data: data[:0], lambda data: b"x" * len(data)])
def test_a_damaged_state_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    trainer(tmp_path, should_stop=lambda: True).run()
    state = tmp_path / STATE_FILE
    state.write_bytes(damage(state.read_bytes()))
    with pytest.raises(CheckpointError, match=r"state\.safetensors is not the state of a training run: "):
        trainer(tmp_path).run(resume=True)


def test_a_file_of_arrays_that_is_no_state_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / STATE_FILE)
    with pytest.raises(CheckpointError, match="is not the state of a training run"):
        trainer(tmp_path).run(resume=True)


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 1e-3},
        {"batch_tokens": 31},
        {"warmup_steps": 6},
        {"label_smoothing": 0.0},
        {"clip_norm": 2.0},
        {"seed": 2},
        {"freeze": ("encoder",)},
    ],
)
def test_a_run_does_not_go_on_with_other_settings(tmp_path: Path, change: dict[str, object]) -> None:
    trainer(tmp_path, should_stop=lambda: True).run()
    with pytest.raises(CheckpointError, match="belongs to a run with other settings or data"):
        trainer(tmp_path, config=msgspec.structs.replace(CONFIG, **change)).run(resume=True)


def test_a_run_does_not_go_on_with_another_model_or_other_data(tmp_path: Path) -> None:
    trainer(tmp_path, should_stop=lambda: True).run()
    for model, pairs in ((tiny(dropout=0.3), PAIRS), (MODEL, PAIRS[1:]), (MODEL, PAIRS[::-1])):
        with pytest.raises(CheckpointError, match="belongs to a run with other settings or data"):
            Trainer(Transformer(model), pairs, HELD_OUT, CONFIG, tmp_path).run(resume=True)


def test_how_often_to_save_and_log_may_change(tmp_path: Path, uninterrupted: Path) -> None:
    often = msgspec.structs.replace(CONFIG, save_steps=1, log_steps=3)
    first = trainer(tmp_path, config=often, should_stop=lambda: first.progress.step == 7)
    first.run()
    trainer(tmp_path).run(resume=True)
    last = f"epochs/0003/{WEIGHTS_FILE}"
    assert_same_file(tmp_path / last, uninterrupted / last)


def test_a_run_is_not_resumed_by_another_number_of_processes(uninterrupted: Path, tmp_path: Path) -> None:
    with safe_open(uninterrupted / STATE_FILE, "pt") as file:
        header = file.metadata()
    tensors = load_file(uninterrupted / STATE_FILE)
    tensors["random.cpu"] = tensors["random.cpu"].repeat(2, 1)
    save_file(tensors, tmp_path / STATE_FILE, header)
    with pytest.raises(CheckpointError, match=r"a run of 2 process\(es\), this one has 1"):
        trainer(tmp_path).run(resume=True)
