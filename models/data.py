"""Pairs of id sequences to training batches: bucketed by length, cut by a token budget, padded, shifted."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler

from .config import ModelConfig

IGNORED = -100
"""Label of a padded position: `torch.nn.functional.cross_entropy` leaves it out of the mean."""


class Pair(NamedTuple):
    """A training example: source ids as the encoder reads them, target ids that end in EOS and have no start token."""

    source: list[int]
    target: list[int]


class Batch(NamedTuple):
    """A padded batch for teacher forcing; all tensors are int64."""

    source_ids: Tensor
    """`(B, S)`"""
    source_mask: Tensor
    """`(B, S)`, 1 on real tokens."""
    target_ids: Tensor
    """`(B, T)`: the start token, then the target without its last token."""
    labels: Tensor
    """`(B, T)`: the target; `IGNORED` on padding."""

    @property
    def tokens(self) -> int:
        """Target tokens that count in the loss."""
        return int((self.labels != IGNORED).sum())


def collate(pairs: Sequence[Pair], config: ModelConfig) -> Batch:
    """Pad `pairs` at the end and shift the targets by one for teacher forcing."""

    def padded(rows: list[list[int]], value: int) -> Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)

    return Batch(
        source_ids=padded([pair.source for pair in pairs], config.pad_token_id),
        source_mask=padded([[1] * len(pair.source) for pair in pairs], 0),
        target_ids=padded([[config.decoder_start_token_id, *pair.target[:-1]] for pair in pairs], config.pad_token_id),
        labels=padded([pair.target for pair in pairs], IGNORED),
    )


class TokenBatchSampler(Sampler[list[int]]):
    """Batches of indices of about equal length, at most `batch_tokens` padded tokens on either side.

    The order is a function of `seed` and the epoch alone, so that a resumed run sees what an uninterrupted one would.
    A single pair that is longer than the budget makes a batch of its own. With `devices` > 1 the last batches that
    would not reach every device are left out of the epoch.
    """

    def __init__(self, pairs: Sequence[Pair], batch_tokens: int, seed: int, devices: int = 1) -> None:
        self._sizes = torch.tensor([[len(pair.source), len(pair.target)] for pair in pairs])  # (pairs, 2)
        self._budget = batch_tokens
        self._seed = seed
        self._devices = devices
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of `epoch` (0 is the first) for the next iteration."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        order = torch.randperm(len(self._sizes), generator=generator)
        # Stable sorts over a random order: equal lengths stay shuffled.
        for side in (0, 1):
            order = order[self._sizes[order, side].argsort(stable=True)]
        batches = self._cut(order.tolist())
        shuffled = torch.randperm(len(batches), generator=generator).tolist()
        for place in shuffled[: len(batches) - len(batches) % self._devices]:
            yield batches[place]

    def _cut(self, order: list[int]) -> list[list[int]]:
        lengths = self._sizes.max(dim=1).values.tolist()
        batches: list[list[int]] = []
        longest = 0
        for index in order:
            longest = max(longest, lengths[index])
            if batches and (len(batches[-1]) + 1) * longest <= self._budget:
                batches[-1].append(index)
            else:
                batches.append([index])
                longest = lengths[index]
        return batches


def training_loader(pairs: Sequence[Pair], sampler: TokenBatchSampler, config: ModelConfig) -> "DataLoader[Pair]":
    """A loader of `Batch` in the sampler's order; its own generator keeps it off the global random state."""
    return DataLoader(
        pairs,  # type: ignore[arg-type]  # any sequence is a map-style dataset
        batch_sampler=sampler,
        collate_fn=lambda chosen: collate(chosen, config),
        generator=torch.Generator(),
    )


def evaluation_batches(pairs: Sequence[Pair], config: ModelConfig, size: int = 64) -> Iterator[Batch]:
    """All pairs once, sorted by length, `size` at a time."""
    ordered = sorted(pairs, key=lambda pair: (len(pair.target), len(pair.source)))
    for start in range(0, len(ordered), size):
        yield collate(ordered[start : start + size], config)
