"""What a training run does to the weights, and what it leaves in its folder."""

import itertools
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from accelerate.state import AcceleratorState
from models_support import TINY, random_model, random_pairs, tiny
from safetensors.torch import load_file
from torch import Tensor

from models.checkpoint import WEIGHTS_FILE, load_checkpoint, save_checkpoint, unique_parameters
from models.data import Pair, collate
from models.errors import ConfigError, TrainingDivergedError
from models.objective import cross_entropy
from models.training import (
    StepMetrics,
    Trainer,
    TrainingConfig,
    ValidationMetrics,
    freeze,
    read_metrics,
    validation_loss,
)
from models.training_state import STATE_FILE
from models.transformer import Transformer

MODEL = tiny(dropout=0.1)
PAIRS = random_pairs(MODEL, [(2 + index % 5, 2 + index % 3) for index in range(30)])
HELD_OUT = random_pairs(MODEL, [(3, 4), (4, 3)], seed=1)
CONFIG = TrainingConfig(epochs=2, batch_tokens=40, warmup_steps=5, learning_rate=3e-3, log_steps=1)


def settings(**changes: Any) -> TrainingConfig:
    return msgspec.structs.replace(CONFIG, **changes)


def train(folder: Path, model: Transformer, config: TrainingConfig, **hooks: Any) -> list[ValidationMetrics]:
    """Train on `PAIRS`; returns the validations."""
    Trainer(model, PAIRS, HELD_OUT, config, folder, **hooks).run()
    return [line for line in read_metrics(folder) if isinstance(line, ValidationMetrics)]


def weights_of(model: Transformer) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in unique_parameters(model).items()}


def changed(model: Transformer, before: dict[str, Tensor]) -> set[str]:
    return {name for name, weight in unique_parameters(model).items() if not torch.equal(weight, before[name])}


# Learning.


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_tiny_model_learns_to_reverse(tmp_path: Path, norm: str) -> None:
    torch.manual_seed(0)
    config = tiny(norm=norm, vocab_size=8, d_model=16, dropout=0.0, encoder_layers=1, decoder_layers=1)
    rows = [[*row] for length in (2, 3) for row in itertools.product(range(4, 8), repeat=length)]
    pairs = [Pair([*row, 3], [*row[::-1], 3]) for row in rows]
    model = Transformer(config)
    training = TrainingConfig(
        epochs=20, batch_tokens=60, warmup_steps=20, learning_rate=1e-2, label_smoothing=0.0, average=0, log_steps=1
    )
    Trainer(model, pairs, pairs, training, tmp_path).run()
    lines = read_metrics(tmp_path)
    steps = [line.loss for line in lines if isinstance(line, StepMetrics)]
    validations = [line.loss for line in lines if isinstance(line, ValidationMetrics)]
    assert sum(steps[-10:]) < 0.3 * sum(steps[:10])
    assert validations[0] > 1
    assert validations[-1] < 0.6
    assert validation_loss(model.eval(), pairs) == pytest.approx(validations[-1], rel=1e-5)


def test_the_first_step_is_one_of_adam_on_the_clipped_gradient(tmp_path: Path) -> None:
    config = settings(epochs=1, batch_tokens=10_000, warmup_steps=4, learning_rate=0.01, clip_norm=0.5, average=0)
    torch.manual_seed(0)
    model = Transformer(tiny(dropout=0.0))
    start = weights_of(model)
    batch = collate(PAIRS, model.config)
    logits = model(batch.source_ids, batch.source_mask, batch.target_ids)
    torch.autograd.backward(cross_entropy(logits, batch.labels, config.label_smoothing))
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert gradients.keys() == start.keys()
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))
    assert norm > 1
    model.zero_grad()
    train(tmp_path, model, config)
    state = load_file(tmp_path / STATE_FILE)
    for index, (name, weight) in enumerate(model.named_parameters()):
        gradient = gradients[name] * (0.5 / norm)
        torch.testing.assert_close(state[f"optimizer.{index}.exp_avg"], 0.1 * gradient, rtol=1e-4, atol=1e-8)
        torch.testing.assert_close(state[f"optimizer.{index}.exp_avg_sq"], 0.02 * gradient**2, rtol=1e-4, atol=1e-10)
        # After one step both corrected moments are the gradient's own.
        moved = start[name] - 0.01 / 4 * gradient / (gradient.abs() + 1e-9)
        certain = gradient.abs() > 1e-6  # below, the order of a sum decides the sign
        torch.testing.assert_close(weight[certain], moved[certain], rtol=1e-4, atol=1e-5)
    assert [line.learning_rate for line in read_metrics(tmp_path) if isinstance(line, StepMetrics)] == [0.0025]


def test_the_optimiser_is_the_papers(tmp_path: Path) -> None:
    optimizer = Trainer(Transformer(MODEL), PAIRS, HELD_OUT, CONFIG, tmp_path)._optimizer.optimizer
    assert isinstance(optimizer, torch.optim.Adam)
    assert (optimizer.defaults["betas"], optimizer.defaults["eps"]) == ((0.9, 0.98), 1e-9)
    assert not optimizer.defaults["weight_decay"]


def test_the_learning_rate_of_every_step_is_the_schedules(tmp_path: Path) -> None:
    train(tmp_path, Transformer(MODEL), CONFIG)
    rates = {line.step: line.learning_rate for line in read_metrics(tmp_path) if isinstance(line, StepMetrics)}
    assert rates[1] == pytest.approx(3e-3 / 5)
    assert rates[5] == pytest.approx(3e-3)
    assert max(rates) > 5
    assert rates[max(rates)] == pytest.approx(3e-3 * math.sqrt(5 / max(rates)))


def test_bf16_trains_float32_weights(tmp_path: Path) -> None:
    AcceleratorState._reset_state()  # accelerate holds on to the precision of a process's first run
    try:
        torch.manual_seed(0)
        model = Transformer(MODEL)
        before = weights_of(model)
        (validation,) = train(tmp_path, model, settings(epochs=1, precision="bf16"))
        assert math.isfinite(validation.loss)
        assert changed(model, before) == before.keys()
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    finally:
        AcceleratorState._reset_state()


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_loss_that_is_no_number_ends_the_run_and_saves_nothing(tmp_path: Path, side: str) -> None:
    model = Transformer(tiny(share_embeddings=False))
    with torch.no_grad():
        model.get_submodule(f"{side}.embedding.tokens").weight.fill_(math.inf)  # type: ignore[operator]
    before = weights_of(model)
    with pytest.raises(TrainingDivergedError, match=r"diverged at step 1: loss nan, .* lower training\.learning_rate"):
        train(tmp_path, model, CONFIG)
    assert not changed(model, before)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert not read_metrics(tmp_path)


@pytest.mark.parametrize(("pairs", "held_out"), [([], HELD_OUT), (PAIRS, [])])
def test_training_without_examples_is_refused(tmp_path: Path, pairs: list[Pair], held_out: list[Pair]) -> None:
    with pytest.raises(ConfigError, match=f"got {len(pairs)} to train on and {len(held_out)} held out"):
        Trainer(Transformer(MODEL), pairs, held_out, CONFIG, tmp_path)


# Freezing.


@pytest.mark.parametrize(
    "prefixes", [("encoder",), ("decoder.layers.0", "output"), ("encoder.layers.1.feed_forward.fc1.weight",)]
)
def test_frozen_weights_stay_and_all_others_move(tmp_path: Path, prefixes: tuple[str, ...]) -> None:
    model = Transformer(tiny(share_embeddings=False, tie_output=False, output_bias=True))
    before = weights_of(model)
    train(tmp_path, model, settings(freeze=prefixes, average=0))
    frozen = {name for name in before if any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)}
    assert frozen
    assert changed(model, before) == before.keys() - frozen


@pytest.mark.parametrize("part", ["encoder", "decoder", "output", "decoder.embedding"])
def test_a_shared_weight_is_frozen_with_any_part_that_uses_it(tmp_path: Path, part: str) -> None:
    model = Transformer(MODEL)
    before = model.get_submodule(part).state_dict()
    before = {name: weight.clone() for name, weight in before.items()}
    train(tmp_path, model, settings(freeze=(part,), average=0))
    after = model.get_submodule(part).state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


@pytest.mark.parametrize("prefix", ["encodr", "encoder.layers.9", "encoder.layers.", "enc", ""])
def test_an_unknown_part_is_refused_and_the_known_ones_listed(prefix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        freeze(Transformer(MODEL), ["decoder", prefix])
    assert f"no weight begins with {prefix!r}; parts are " in str(caught.value)
    assert "decoder.layers.1.cross_attention.k_proj" in str(caught.value)


def test_something_must_be_left_to_train() -> None:
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        freeze(Transformer(MODEL), ["encoder", "decoder", "output"])


def test_what_was_frozen_before_is_trained_again() -> None:
    model = Transformer(MODEL)
    freeze(model, ["encoder"])
    freeze(model, [])
    assert all(weight.requires_grad for weight in model.parameters())


# Best checkpoint, average, fine-tuning.


def equal_weights(folder: Path, other: dict[str, Tensor]) -> bool:
    stored = load_file(folder / WEIGHTS_FILE)
    return stored.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in stored.items())


@pytest.mark.parametrize("scores", [(1.0, 3.0, 2.0, 2.5), (5.0, 3.0, 2.0, 5.0), (1.0, 2.0, 3.0, 4.0)])
def test_the_best_checkpoint_has_the_best_first_score(tmp_path: Path, scores: tuple[float, ...]) -> None:
    seen: list[dict[str, Tensor]] = []

    def score(model: Transformer) -> dict[str, float]:
        assert not model.training
        seen.append(weights_of(model))
        return {"bleu": scores[len(seen) - 1], "other": -len(seen)}

    validations = train(tmp_path, Transformer(MODEL), settings(epochs=3), score=score)
    assert [validation.scores["bleu"] for validation in validations] == list(scores)
    best = max(range(4), key=lambda index: scores[index])
    assert [index for index, validation in enumerate(validations) if validation.best][-1] == best
    assert equal_weights(tmp_path / "best", seen[best])
    assert not any(equal_weights(tmp_path / "best", weights) for weights in seen[:best] + seen[best + 1 :])
    assert load_checkpoint(tmp_path / "best").config == MODEL


def test_without_a_scorer_the_best_checkpoint_has_the_lowest_loss(tmp_path: Path) -> None:
    validations = train(tmp_path, Transformer(MODEL), settings(epochs=4, learning_rate=0.3, average=4))
    losses = [validation.loss for validation in validations]
    assert losses != sorted(losses, reverse=True), "this rate is meant to be too high"
    assert validation_loss(load_checkpoint(tmp_path / "best"), HELD_OUT) == pytest.approx(min(losses), rel=1e-5)
    for index, validation in enumerate(validations):
        assert validation.best == (validation.loss == min(losses[: index + 1]))
        assert validation.perplexity == pytest.approx(math.exp(validation.loss))


def test_the_average_is_the_mean_of_the_last_epochs(tmp_path: Path) -> None:
    model = Transformer(MODEL)
    ends: list[dict[str, Tensor]] = []

    def score(model: Transformer) -> dict[str, float]:
        ends.append(weights_of(model))
        return {}

    validations = train(tmp_path, model, settings(epochs=4, average=3), score=score)
    assert [validation.averaged for validation in validations] == [1, 1, 1, 1, 3]
    assert sorted(path.name for path in (tmp_path / "epochs").iterdir()) == ["0002", "0003", "0004"]
    for name, weight in unique_parameters(model).items():
        mean = torch.stack([end[name].double() for end in ends[1:4]]).mean(0)
        torch.testing.assert_close(weight, mean.float(), rtol=1e-6, atol=1e-9)
    assert not changed(model, ends[4])
    # The state to go on from is that of the last epoch.
    state = load_file(tmp_path / STATE_FILE)
    assert all(torch.equal(state[f"model.{name}"], weight) for name, weight in ends[3].items())


@pytest.mark.parametrize(("epochs", "average", "kept"), [(2, 0, 0), (2, 1, 1), (1, 3, 1)])
def test_no_average_is_taken_of_fewer_than_two(tmp_path: Path, epochs: int, average: int, kept: int) -> None:
    validations = train(tmp_path, Transformer(MODEL), settings(epochs=epochs, average=average))
    assert [validation.averaged for validation in validations] == [1] * epochs
    assert len(list(tmp_path.glob(f"epochs/*/{WEIGHTS_FILE}"))) == kept


def test_fine_tuning_starts_from_the_given_weights(tmp_path: Path) -> None:
    save_checkpoint(random_model(tiny(dropout=0.0)), tmp_path / "start")
    start = load_file(tmp_path / "start" / WEIGHTS_FILE)
    model = load_checkpoint(tmp_path / "start")
    # A step so small that it changes none of these numbers.
    train(tmp_path / "still", model, settings(epochs=1, learning_rate=1e-30))
    assert not changed(model, start)

    model = load_checkpoint(tmp_path / "start")
    batch = collate(PAIRS, TINY)
    loss = cross_entropy(model(batch.source_ids, batch.source_mask, batch.target_ids), batch.labels, 0.1).item()
    train(tmp_path / "tuned", model, settings(epochs=1, batch_tokens=10_000))
    assert [line.loss for line in read_metrics(tmp_path / "tuned") if isinstance(line, StepMetrics)] == [
        pytest.approx(loss, rel=1e-5)
    ]
    assert changed(model, start) == start.keys()


def test_metrics_are_told_as_they_are_written(tmp_path: Path) -> None:
    told: list[object] = []
    train(tmp_path, Transformer(MODEL), CONFIG, observe=told.append)
    assert told == read_metrics(tmp_path)
    for line in told:
        assert isinstance(line, StepMetrics | ValidationMetrics)
    speeds = [line.tokens_per_second for line in told if isinstance(line, StepMetrics)]
    assert all(speed > 0 for speed in speeds)


def test_a_line_of_metrics_is_the_mean_over_its_steps(tmp_path: Path) -> None:
    for folder, log_steps in (("each", 1), ("three", 3)):
        torch.manual_seed(0)
        train(tmp_path / folder, Transformer(MODEL), settings(epochs=1, log_steps=log_steps))
    each = [line.loss for line in read_metrics(tmp_path / "each") if isinstance(line, StepMetrics)]
    three = [line for line in read_metrics(tmp_path / "three") if isinstance(line, StepMetrics)]
    assert [line.step for line in three] == list(range(3, len(each) + 1, 3))
    for line in three:
        assert line.loss == pytest.approx(sum(each[line.step - 3 : line.step]) / 3)
        assert line.epoch == pytest.approx(line.step / len(each))
