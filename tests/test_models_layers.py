"""Positions, embeddings, norms and the objective: the worked numbers, and what holds for all numbers."""

import math

import pytest
import torch
from models_support import all_variants, assert_same, random_batch, random_model, random_pairs, tiny
from torch import Tensor, nn
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from models.config import PositionKind
from models.data import IGNORED, collate
from models.errors import SequenceTooLongError
from models.layers import Embedding, FeedForward, Positions, Residual, sinusoids
from models.objective import cross_entropy, inverse_square_root
from models.training import validation_loss
from models.transformer import Transformer


def tensor(*rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def near(actual: Tensor, expected: list[float], atol: float = 5e-4) -> None:
    torch.testing.assert_close(actual.detach().double(), tensor(*expected), rtol=0, atol=atol)


# Positions and embeddings.


def test_sines_stand_on_even_and_cosines_on_odd_features() -> None:
    table = sinusoids(5, 8)
    near(table[3, :4], [0.141, -0.990, 0.296, 0.955])
    near(table[4, :4], [-0.757, -0.654, 0.389, 0.921])
    near(table[0], [0, 1] * 4)


def test_frequencies_of_eight_features_are_powers_of_a_tenth() -> None:
    sines, cosines = sinusoids(2, 8)[1].reshape(4, 2).T
    near(torch.atan2(sines, cosines), [1, 1 / 10, 1 / 100, 1 / 1000], atol=1e-7)


def test_every_position_reads_all_frequencies() -> None:
    table = sinusoids(40, 8)
    for position in range(40):
        angles = [position * frequency for frequency in (1, 1 / 10, 1 / 100, 1 / 1000)]
        near(table[position], [wave(angle) for angle in angles for wave in (math.sin, math.cos)], atol=1e-7)


def test_halves_hold_the_same_numbers_in_marians_order() -> None:
    halves, interleaved = sinusoids(20, 8, halves=True), sinusoids(20, 8)
    assert torch.equal(halves, torch.cat([interleaved[:, ::2], interleaved[:, 1::2]], 1))
    marian: nn.Module = MarianSinusoidalPositionalEmbedding(20, 8)
    torch.testing.assert_close(halves, marian.create_weight(), rtol=1e-6, atol=1e-7)  # type: ignore[operator]


@pytest.mark.parametrize(("kind", "halves"), [("sinusoidal", False), ("sinusoidal-halves", True)])
def test_the_kind_of_positions_chooses_the_order(kind: PositionKind, *, halves: bool) -> None:
    positions = Positions(kind, 6, 8)
    assert torch.equal(positions(0, 6), sinusoids(6, 8, halves=halves))
    assert not list(positions.parameters())
    assert not positions.state_dict()


def test_learned_positions_are_a_weight() -> None:
    positions = Positions("learned", 6, 8)
    assert [name for name, _ in positions.named_parameters()] == ["table"]
    assert torch.equal(positions(2, 3), positions.table[2:5])


def test_an_embedding_is_the_token_times_the_root_of_the_width_plus_the_position() -> None:
    tokens, positions = nn.Embedding(10, 8), Positions("sinusoidal", 6, 8)
    ids = torch.tensor([[3, 1, 3]])
    scaled = Embedding(tokens, positions, scale=True, dropout=0.0)
    torch.testing.assert_close(scaled(ids), tokens.weight[ids] * math.sqrt(8) + sinusoids(3, 8))
    torch.testing.assert_close(scaled(ids, start=2), tokens.weight[ids] * math.sqrt(8) + sinusoids(5, 8)[2:])
    plain = Embedding(tokens, positions, scale=False, dropout=0.0)
    torch.testing.assert_close(plain(ids), tokens.weight[ids] + sinusoids(3, 8))


def test_a_sequence_beyond_the_position_table_is_refused() -> None:
    positions = Positions("sinusoidal", 6, 8)
    positions(2, 4)
    with pytest.raises(SequenceTooLongError, match="reaches position 7, the model's table ends at 6"):
        positions(3, 4)


# Norm, residual, feed-forward.


def test_layer_norm_of_one_two_three_four_is_over_the_features_of_one_token() -> None:
    norm = Residual(4, "post", 1e-5, 0.0).norm
    near(norm(torch.tensor([1.0, 2, 3, 4])), [-1.342, -0.447, 0.447, 1.342])
    states = torch.randn(2, 3, 4)
    states[0, 1] = torch.tensor([1.0, 2, 3, 4])
    near(norm(states)[0, 1], [-1.342, -0.447, 0.447, 1.342])
    torch.testing.assert_close(norm(states).mean(-1), torch.zeros(2, 3), rtol=0, atol=1e-6)


def test_scale_and_shift_of_a_norm_are_learned() -> None:
    norm = Residual(4, "post", 1e-5, 0.0).norm
    assert {name for name, weight in norm.named_parameters() if weight.requires_grad} == {"weight", "bias"}
    with torch.no_grad():
        norm.weight.fill_(2.0)
        norm.bias.fill_(1.0)
    near(norm(torch.tensor([1.0, 2, 3, 4])), [-1.683, 0.106, 1.894, 3.683])


def test_post_norm_normalises_the_sum_and_pre_norm_what_the_sub_layer_reads() -> None:
    states = torch.randn(2, 3, 8)
    sub_layer = nn.Linear(8, 8)
    for norm in ("post", "pre"):
        residual = Residual(8, norm, 1e-5, 0.0)
        nn.init.normal_(residual.norm.weight)
        actual = residual.after(states, sub_layer(residual.before(states)))
        post, pre = residual.norm(states + sub_layer(states)), states + sub_layer(residual.norm(states))
        torch.testing.assert_close(actual, post if norm == "post" else pre)


def test_only_pre_norm_ends_in_a_norm_of_its_own() -> None:
    for norm, kind in (("post", nn.Identity), ("pre", nn.LayerNorm)):
        model = Transformer(tiny(norm=norm))
        assert isinstance(model.encoder.norm, kind)
        assert isinstance(model.decoder.norm, kind)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_dropout_falls_on_the_output_of_a_sub_layer_before_it_is_added(norm: str) -> None:
    torch.manual_seed(0)
    residual = Residual(8, norm, 1e-5, 0.25).double()  # type: ignore[arg-type]
    states, output = torch.randn(2, 50, 8).double(), torch.randn(2, 50, 8).double()
    assert_same(residual.before(states), residual.norm(states) if norm == "pre" else states)
    torch.manual_seed(1)
    total = residual.after(states, output)
    torch.manual_seed(1)
    dropped = nn.functional.dropout(output, 0.25)
    assert 0.15 < (dropped == 0).double().mean().item() < 0.35
    assert_same(total, states + dropped if norm == "pre" else residual.norm(states + dropped))


@all_variants
def test_dropout_is_on_every_sub_layer_and_both_embeddings(changes: dict[str, object]) -> None:
    model = Transformer(tiny(dropout=0.3, **changes))
    rates = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    config = model.config
    assert rates == [0.3] * (2 + 2 * config.encoder_layers + 3 * config.decoder_layers)


@pytest.mark.parametrize(
    ("activation", "expected"), [("relu", [0, 0, 2]), ("gelu", [-0.1587, 0, 1.9545]), ("silu", [-0.2689, 0, 1.7616])]
)
def test_feed_forward_acts_between_its_projections(activation: str, expected: list[float]) -> None:
    layer = FeedForward(1, 1, activation)  # type: ignore[arg-type]
    nn.init.constant_(layer.fc1.weight, 1.0)
    nn.init.constant_(layer.fc2.weight, 10.0)
    for linear in (layer.fc1, layer.fc2):
        nn.init.zeros_(linear.bias)
    near(layer(torch.tensor([[-1.0], [0], [2]]))[:, 0], [10 * value for value in expected])


# The objective.


def test_cross_entropy_of_the_second_of_three_and_its_gradient() -> None:
    logits = torch.tensor([[[1.0, 2, 0]]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([[1]]))
    near(loss[None], [0.408])
    torch.autograd.backward(loss)
    assert logits.grad is not None
    near(logits.grad[0, 0], [0.245, 0.665 - 1, 0.090])


def test_label_smoothing_spreads_a_tenth_over_the_vocabulary() -> None:
    log_p = torch.tensor([1.0, 2, 0]).log_softmax(0)
    by_hand = -(0.9 * log_p[1] + 0.1 * log_p.mean())
    torch.testing.assert_close(cross_entropy(torch.tensor([[[1.0, 2, 0]]]), torch.tensor([[1]]), 0.1), by_hand)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_padding_counts_neither_in_the_sum_nor_in_the_divisor_nor_in_the_gradient(smoothing: float) -> None:
    logits = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.tensor([[1, 2, 3, IGNORED], [4, IGNORED, IGNORED, IGNORED]])
    loss = cross_entropy(logits, labels, smoothing)
    alone = [
        cross_entropy(logits[row : row + 1, :n], labels[row : row + 1, :n], smoothing) for row, n in ((0, 3), (1, 1))
    ]
    torch.testing.assert_close(loss, (3 * alone[0] + alone[1]) / 4)
    torch.autograd.backward(loss)
    assert logits.grad is not None
    assert (logits.grad[labels == IGNORED] == 0).all()
    assert (logits.grad[labels != IGNORED] != 0).all()


@all_variants
def test_more_padding_changes_no_loss(changes: dict[str, object]) -> None:
    model, batch = random_model(tiny(**changes)), random_batch(tiny(**changes))
    wider = [
        nn.functional.pad(values, (0, 3), value=padding)
        for values, padding in zip(batch, (7, 0, 8, IGNORED), strict=True)
    ]
    losses = [
        cross_entropy(model(*source_target), labels)
        for *source_target, labels in ((batch.source_ids, batch.source_mask, batch.target_ids, batch.labels), wider)
    ]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)


def test_the_validation_loss_is_the_mean_over_tokens_whatever_the_batches() -> None:
    config = tiny()
    model = random_model(config)
    pairs = random_pairs(config, [(2 + index % 7, 2 + index % 5) for index in range(70)])
    total = sum(
        cross_entropy(model(batch.source_ids, batch.source_mask, batch.target_ids), batch.labels).item() * batch.tokens
        for batch in (collate([pair], config) for pair in pairs)
    )
    assert validation_loss(model, pairs) == pytest.approx(total / sum(len(pair.target) for pair in pairs), rel=1e-6)


def test_the_learning_rate_warms_up_and_falls_as_in_the_paper() -> None:
    peak = (512 * 4000) ** -0.5
    for step in (1, 100, 3999, 4000, 4001, 100_000):
        assert inverse_square_root(step, peak, 4000) == pytest.approx(512**-0.5 * min(step**-0.5, step * 4000**-1.5))
    assert inverse_square_root(4000, 7e-4, 4000) == 7e-4
    assert inverse_square_root(1000, 7e-4, 4000) == pytest.approx(7e-4 / 4)
    assert inverse_square_root(16_000, 7e-4, 4000) == pytest.approx(7e-4 / 2)


def test_one_step_of_gradient_descent() -> None:
    residual = Residual(4, "post", 1e-5, 0.0)
    nn.init.constant_(residual.norm.bias, 0.5)
    # The bias of a norm gets the gradient of its output as it is.
    torch.autograd.backward(residual.after(torch.randn(4), torch.randn(4)), torch.full((4,), 0.2))
    torch.optim.SGD(residual.parameters(), lr=0.1).step()
    near(residual.norm.bias, [0.48] * 4, atol=1e-7)
