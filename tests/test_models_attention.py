"""Attention forwards and backwards: the worked numbers, and what holds for all numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models_support import assert_same
from torch import Tensor

from models.layers import (
    DotProductAttention,
    MultiHeadAttention,
    attention,
    attention_scores,
    attention_weights,
    causal_mask,
    padding_mask,
)

CPU = torch.device("cpu")
sizes = st.integers(1, 6)


def tensor(*rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_scores_of_a_query_and_its_own_and_an_orthogonal_key_are_one_and_zero() -> None:
    scores = attention_scores(tensor([1, 0]), tensor([1, 0], [0, 1]))
    assert_same(scores * math.sqrt(2), tensor([1, 0]))


def test_scores_of_three_keys() -> None:
    keys = tensor([1.0, 0.7, 0.5], [1.0, 1.0, 0.95], [0.0, 0.2, 0.3])
    scores = attention_scores(tensor([0.9, 0.8, 1.0]), keys)
    assert_same(scores * math.sqrt(3), tensor([1.96, 2.65, 0.46]))


def test_output_is_the_weighted_sum_of_the_values() -> None:
    keys = tensor([0.2], [0.7], [0.1]).log()
    assert_same(attention_weights(tensor([1]), keys), tensor([0.2, 0.7, 0.1]))
    values = tensor([1, 0], [0, 2], [1, 1])
    assert_same(attention(tensor([1])[None, None], keys[None, None], values[None, None]), tensor([[[0.3, 1.5]]]))


def test_softmax_of_one_two_zero() -> None:
    weights = attention_weights(tensor([1]), tensor([1], [2], [0]))
    torch.testing.assert_close(weights, tensor([0.245, 0.665, 0.090]), rtol=0, atol=5e-4)


def test_nine_tokens_with_values_wider_than_keys() -> None:
    query, key, value = random(1, 1, 9, 3), random(1, 1, 9, 3, seed=1), random(1, 1, 9, 4, seed=2)
    assert attention_scores(query, key)[0, 0].shape == (9, 9)
    assert attention(query, key, value)[0, 0].shape == (9, 4)


@settings(deadline=None, max_examples=40)
@given(queries=sizes, keys=sizes, width=sizes, value_width=sizes, data=st.data())
def test_there_is_one_output_a_query_and_each_is_a_mean_of_the_values_it_may_see(
    queries: int, keys: int, width: int, value_width: int, data: st.DataObject
) -> None:
    visible = st.lists(st.booleans(), min_size=keys, max_size=keys).filter(any)
    mask = torch.tensor(data.draw(st.lists(visible, min_size=queries, max_size=queries)))
    query, key, value = (
        random(2, 3, queries, width),
        random(2, 3, keys, width, seed=1),
        random(2, 3, keys, value_width, seed=2),
    )
    weights = attention_weights(query, key, mask)
    assert_same(weights.sum(-1), torch.ones(2, 3, queries, dtype=torch.float64))
    assert (weights[..., ~mask] == 0).all()
    assert (weights[..., mask] > 0).all()
    output = attention(query, key, value, mask)
    assert output.shape == (2, 3, queries, value_width)
    assert_same(output, weights @ value)
    assert_same(DotProductAttention()(query, key, value, mask), output)


@pytest.mark.parametrize("width", [1, 4, 16, 64])
def test_the_variance_of_a_dot_product_is_its_width_and_that_of_a_score_is_one(width: int) -> None:
    query, key = random(40_000, 1, width), random(40_000, 1, width, seed=1)
    score = attention_scores(query, key).flatten()
    assert (score * math.sqrt(width)).var().item() == pytest.approx(width, rel=0.05)
    assert score.var().item() == pytest.approx(1, rel=0.05)


def test_the_first_row_under_the_causal_mask_sees_itself_alone_and_every_row_sums_to_one() -> None:
    query, key = random(2, 3, 5, 4), random(2, 3, 5, 4, seed=1)
    weights = attention_weights(query, key, causal_mask(5, CPU))
    assert_same(weights[:, :, 0], torch.tensor([1.0, 0, 0, 0, 0], dtype=torch.float64).expand(2, 3, 5))
    assert_same(weights.sum(-1), torch.ones(2, 3, 5, dtype=torch.float64))
    assert (weights.tril() == weights).all()
    assert (weights[:, :, *torch.tril_indices(5, 5)] > 0).all()


def test_padding_is_hidden_from_every_query() -> None:
    mask = padding_mask(torch.tensor([[1, 1, 0], [1, 0, 0]]), 4)
    assert mask.shape == (2, 1, 4, 3)
    assert mask.dtype == torch.bool
    assert (mask == torch.tensor([[True, True, False], [True, False, False]])[:, None, None]).all()


def test_a_query_that_may_see_nothing_gets_zeros_and_no_nan() -> None:
    output = attention(random(1, 1, 2, 4), random(1, 1, 3, 4), random(1, 1, 3, 4), torch.zeros(1, 1, 2, 3).bool())
    assert (output == 0).all()


@pytest.mark.parametrize("mask", [None, causal_mask(5, CPU), torch.tensor([[1, 0, 1, 1, 0]]).bool().expand(5, 5)])
def test_attention_backwards_by_hand_equals_autograd(mask: Tensor | None) -> None:
    query, key, value = (random(2, 3, 5, width, seed=width).requires_grad_() for width in (4, 4, 6))
    # Of different content, though q and k have one width.
    key = key.detach().flip(2).requires_grad_()
    d_output = random(2, 3, 5, 6, seed=9)
    torch.autograd.backward(attention(query, key, value, mask), d_output)

    with torch.no_grad():
        weights = attention_weights(query, key, mask)
        d_value = weights.transpose(-1, -2) @ d_output
        d_weights = d_output @ value.transpose(-1, -2)
        d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
        d_query = d_scores @ key / math.sqrt(4)
        d_key = d_scores.transpose(-1, -2) @ query / math.sqrt(4)
    for leaf, by_hand in ((query, d_query), (key, d_key), (value, d_value)):
        assert leaf.grad is not None
        assert_same(leaf.grad, by_hand)
    if mask is not None:
        assert (d_scores[~mask.expand_as(d_scores)] == 0).all()


def test_a_key_that_nobody_may_see_gets_no_gradient() -> None:
    query, key, value = (random(1, 2, 3, 4, seed=seed).requires_grad_() for seed in range(3))
    output = attention(query, key, value, torch.tensor([True, False, True]).expand(3, 3))
    torch.autograd.backward(output.square().sum())
    for leaf in (key, value):
        assert leaf.grad is not None
        assert (leaf.grad[:, :, 1] == 0).all()
        assert (leaf.grad[:, :, ::2] != 0).all()


def test_heads_attend_apart_on_consecutive_features_and_are_joined_in_order() -> None:
    module = MultiHeadAttention(6, 2).double()
    states, memory = random(2, 4, 6), random(2, 5, 6, seed=1)
    query, key, value = module.q_proj(states), module.k_proj(memory), module.v_proj(memory)
    heads = [
        attention_weights(query[..., part], key[..., part]) @ value[..., part] for part in (slice(0, 3), slice(3, 6))
    ]
    assert_same(module(states, module.key_value(memory), None), module.out_proj(torch.cat(heads, -1)))
