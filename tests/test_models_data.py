"""From pairs to batches: padding and shift, token budget, buckets, and an order that is a function of the epoch."""

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given, settings
from hypothesis import strategies as st
from models_support import TINY, random_pairs, tiny

from models.data import IGNORED, Batch, Pair, TokenBatchSampler, collate, evaluation_batches, training_loader

CONFIG = tiny(pad_token_id=1, decoder_start_token_id=2, eos_token_id=3)
ids = st.lists(st.integers(1, 22), min_size=1, max_size=9)
pairs_of_any_length = st.lists(st.builds(Pair, ids, ids), min_size=1, max_size=30)


def batches_of(sampler: TokenBatchSampler, epoch: int = 0) -> list[list[int]]:
    sampler.set_epoch(epoch)
    return list(sampler)


def test_padding_goes_to_the_end_and_targets_are_shifted_by_one() -> None:
    batch = collate([Pair([7, 8, 3], [11, 12, 13, 3]), Pair([9, 3], [14, 3])], CONFIG)
    assert batch.source_ids.tolist() == [[7, 8, 3], [9, 3, 1]]
    assert batch.source_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.target_ids.tolist() == [[2, 11, 12, 13], [2, 14, 1, 1]]
    assert batch.labels.tolist() == [[11, 12, 13, 3], [14, 3, IGNORED, IGNORED]]
    assert batch.tokens == 6
    assert all(tensor.dtype == torch.int64 for tensor in batch)


@settings(deadline=None)
@given(pairs_of_any_length)
def test_a_batch_holds_its_pairs_and_nothing_else(pairs: list[Pair]) -> None:
    batch = collate(pairs, CONFIG)
    assert batch.source_ids.shape == batch.source_mask.shape == (len(pairs), max(len(pair.source) for pair in pairs))
    assert batch.target_ids.shape == batch.labels.shape == (len(pairs), max(len(pair.target) for pair in pairs))
    assert batch.tokens == sum(len(pair.target) for pair in pairs)
    for pair, source, mask, target, labels in zip(pairs, *batch, strict=True):
        assert source[mask.bool()].tolist() == pair.source
        assert (source[~mask.bool()] == CONFIG.pad_token_id).all()
        assert labels[labels != IGNORED].tolist() == pair.target
        # What stands at a place is the label of the place before.
        assert target[0] == CONFIG.decoder_start_token_id
        assert target[1 : len(pair.target)].tolist() == pair.target[:-1]
        assert (target[len(pair.target) :] == CONFIG.pad_token_id).all()


@settings(deadline=None)
@given(pairs_of_any_length, st.integers(1, 60), st.integers(0, 5), st.integers(0, 5))
def test_an_epoch_takes_every_pair_once_within_the_budget(
    pairs: list[Pair], budget: int, seed: int, epoch: int
) -> None:
    batches = batches_of(TokenBatchSampler(pairs, budget, seed), epoch)
    assert sorted(index for batch in batches for index in batch) == list(range(len(pairs)))
    for batch in batches:
        longest = max(max(len(pairs[index].source), len(pairs[index].target)) for index in batch)
        assert len(batch) * longest <= budget or len(batch) == 1


@settings(deadline=None)
@given(pairs_of_any_length, st.integers(1, 60), st.integers(1, 4))
def test_an_epoch_gives_every_device_the_same_number_of_batches(pairs: list[Pair], budget: int, devices: int) -> None:
    everything = batches_of(TokenBatchSampler(pairs, budget, 7))
    shared = batches_of(TokenBatchSampler(pairs, budget, 7, devices))
    assert len(shared) % devices == 0
    assert shared == everything[: len(shared)]
    assert len(everything) - len(shared) < devices
    shards = [list(shard(pairs, budget, devices, rank)) for rank in range(devices)]
    assert [batch for together in zip(*shards, strict=True) for batch in together] == shared


def shard(pairs: list[Pair], budget: int, devices: int, rank: int) -> BatchSamplerShard:
    """What accelerate's process `rank` sees."""
    sampler = TokenBatchSampler(pairs, budget, 7, devices)
    return BatchSamplerShard(sampler, num_processes=devices, process_index=rank, even_batches=False)


PAIRS = random_pairs(TINY, [(2 + index % 5, 2 + index % 7) for index in range(200)])


def test_batches_hold_pairs_of_about_one_length() -> None:
    batches = batches_of(TokenBatchSampler(PAIRS, 60, 1))
    spread = [
        max(len(PAIRS[index].target) for index in batch) - min(len(PAIRS[index].target) for index in batch)
        for batch in batches
    ]
    assert max(spread) <= 1
    padded = sum(len(batch) * max(len(PAIRS[index].target) for index in batch) for batch in batches)
    assert padded < 1.1 * sum(len(pair.target) for pair in PAIRS)


def test_batches_are_as_full_as_the_budget_allows() -> None:
    batches = batches_of(TokenBatchSampler([Pair([4] * 5, [4] * 3)] * 30, 52, 1))
    assert [len(batch) for batch in batches] == [10, 10, 10]


def test_a_pair_beyond_the_budget_makes_a_batch_of_its_own() -> None:
    pairs = [Pair([4] * 30, [4]), Pair([4], [4] * 30), Pair([4], [4]), Pair([4], [4])]
    assert sorted(sorted(batch) for batch in batches_of(TokenBatchSampler(pairs, 10, 1))) == [[0], [1], [2, 3]]


def test_an_epoch_has_one_order_and_no_two_epochs_or_seeds_share_it() -> None:
    first, again = TokenBatchSampler(PAIRS, 60, 1), TokenBatchSampler(PAIRS, 60, 1)
    orders = [batches_of(first, epoch) for epoch in range(3)]
    assert [batches_of(again, epoch) for epoch in (2, 1, 0)] == orders[::-1]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert batches_of(TokenBatchSampler(PAIRS, 60, 2)) != orders[0]
    # Not the batches alone, but who is with whom.
    assert sorted(map(sorted, orders[0])) != sorted(map(sorted, orders[1]))


def test_long_and_short_batches_come_in_no_order() -> None:
    longest = [
        max(len(PAIRS[index].target) for index in batch) for batch in batches_of(TokenBatchSampler(PAIRS, 60, 1))
    ]
    assert longest not in (sorted(longest), sorted(longest, reverse=True))


def test_the_order_neither_reads_nor_moves_the_global_random_state() -> None:
    sampler = TokenBatchSampler(PAIRS, 60, 1)
    torch.manual_seed(5)
    before, order = torch.get_rng_state(), batches_of(sampler)
    assert torch.equal(torch.get_rng_state(), before)
    loaded = [Batch(*batch) for batch in training_loader(PAIRS, sampler, TINY)]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert batches_of(sampler) == order
    for batch, indices in zip(loaded, order, strict=True):
        for tensor, expected in zip(batch, collate([PAIRS[index] for index in indices], TINY), strict=True):
            assert torch.equal(tensor, expected)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_evaluation_sees_every_pair_once_sorted_by_length(size: int) -> None:
    batches = list(evaluation_batches(PAIRS, TINY, size))
    assert sum(batch.tokens for batch in batches) == sum(len(pair.target) for pair in PAIRS)
    assert [len(batch.labels) for batch in batches][:-1] == [size] * (len(batches) - 1)
    lengths = [row[row != IGNORED].numel() for batch in batches for row in batch.labels]
    assert lengths == sorted(len(pair.target) for pair in PAIRS)
