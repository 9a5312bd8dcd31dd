"""Hypotheses that share a cache: a branch is a step on what it has seen, whatever else the cache holds."""

from typing import NamedTuple

import pytest
import torch
from models_support import all_variants, assert_same, random_batch, random_model, tiny
from torch import Tensor

from models.config import PositionKind
from models.layers import KeyValue, Positions, branch_mask
from models.transformer import Cache, LayerCache, Transformer

ROWS, BEAMS = 3, 4


class Grown(NamedTuple):
    """A cache of several hypotheses about each source."""

    cache: Cache
    seen: Tensor
    """`(B, K, P)`: the tokens in the cache that each hypothesis is made of."""
    sequences: Tensor
    """`(B, K, length)`: the same tokens."""


class Tree:
    """Random hypotheses in random ancestry, grown round by round."""

    def __init__(self, changes: dict[str, object], seed: int) -> None:
        config = tiny(**changes)
        self.model: Transformer = random_model(config)
        batch = random_batch(config)
        self.mask = batch.source_mask
        self.memory = self.model.encode(batch.source_ids, self.mask)
        self._random = torch.Generator().manual_seed(seed)
        prompt = self.tokens(2)
        self.logits, cache = self.model.prefill(prompt, self.memory, self.mask)
        self.grown = Grown(cache, torch.ones(ROWS, 1, 2, dtype=torch.int64), prompt[:, None])

    def tokens(self, count: int) -> Tensor:
        """Random ids `(B, count)`."""
        return torch.randint(4, self.model.config.vocab_size, (ROWS, count), generator=self._random)

    def grow(self, beams: int) -> Tensor:
        """One more token of each of `beams` hypotheses, which go on from random ones: what was seen, `(B, K, P)`."""
        cache, seen, sequences = self.grown
        origins = torch.randint(0, seen.shape[1], (ROWS, beams), generator=self._random)
        ids, rows = self.tokens(beams), torch.arange(ROWS)[:, None]
        told = seen[rows, origins]  # (B, K, P)
        self.logits, after = self.model.branch(ids, self.mask, told, cache)
        own = torch.eye(beams, dtype=torch.int64).expand(ROWS, -1, -1)
        self.grown = Grown(after, torch.cat([told, own], 2), torch.cat([sequences[rows, origins], ids[:, :, None]], 2))
        return told


@pytest.fixture(params=range(3))
def seed(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@all_variants
def test_branches_of_any_ancestry_give_what_each_hypothesis_gives_alone(changes: dict[str, object], seed: int) -> None:
    tree = Tree(changes, seed)
    for beams in (BEAMS, BEAMS, 1, 2, BEAMS):
        tree.grow(beams)
        assert tree.logits.shape == (ROWS, beams, tree.model.config.vocab_size)
        for beam in range(beams):
            whole, _ = tree.model.prefill(tree.grown.sequences[:, beam], tree.memory, tree.mask)
            assert_same(tree.logits[:, beam], whole[:, -1])


@all_variants
def test_branches_begin_with_no_token(changes: dict[str, object]) -> None:
    tree = Tree(changes, 0)
    ids, nothing = tree.tokens(3), torch.ones(ROWS, 3, 0, dtype=torch.int64)
    branched, _ = tree.model.branch(ids, tree.mask, nothing, tree.model.begin(tree.memory))
    for beam in range(3):
        first, _ = tree.model.prefill(ids[:, beam : beam + 1], tree.memory, tree.mask)
        assert_same(branched[:, beam], first[:, -1])


@all_variants
def test_a_branch_is_a_step_on_a_cache_cut_down_to_what_it_has_seen(changes: dict[str, object], seed: int) -> None:
    tree = Tree(changes, seed)
    for _ in range(3):
        before = tree.grown.cache
        told = tree.grow(BEAMS)
        for beam in range(BEAMS):
            for row in range(ROWS):
                places = told[row, beam].nonzero()[:, 0]
                logits, stepped = tree.model.step(
                    tree.grown.sequences[row : row + 1, beam, -1:],
                    tree.mask[row : row + 1],
                    cut(before, row, places),
                )
                assert_same(tree.logits[row, beam], logits[0, 0])
                for layer, alone in zip(tree.grown.cache, stepped, strict=True):
                    for ours, theirs in zip(layer.decoder, alone.decoder, strict=True):
                        assert_same(ours[row, :, beam - BEAMS], theirs[0, :, -1])


def cut(cache: Cache, row: int, places: Tensor) -> Cache:
    """The cache of one row, of its own tokens only those at `places`."""
    return tuple(
        LayerCache(
            KeyValue(*(tensor[row : row + 1, :, places] for tensor in layer.decoder)),
            KeyValue(*(tensor[row : row + 1] for tensor in layer.encoder)),
        )
        for layer in cache
    )


@all_variants
def test_the_cache_keeps_its_past_and_the_cross_cache_stays_the_same_object(changes: dict[str, object]) -> None:
    tree = Tree(changes, 0)
    before = tree.grown.cache
    past = before[0].decoder.key.shape[2]
    tree.grow(BEAMS)
    for old, new in zip(before, tree.grown.cache, strict=True):
        for ours, theirs in zip(new.decoder, old.decoder, strict=True):
            assert ours.shape[2] == past + BEAMS
            assert torch.equal(ours[:, :, :past], theirs)
        assert new.encoder.key is old.encoder.key
        assert new.encoder.value is old.encoder.value


def test_hypotheses_do_not_see_each_other() -> None:
    """Another token of one of them leaves the others as they are."""
    tree = Tree({}, 0)
    tree.grow(BEAMS)
    told, (cache, *_) = tree.grown.seen, tree.grown
    ids = tree.tokens(BEAMS)
    logits, _ = tree.model.branch(ids, tree.mask, told, cache)
    other = ids.clone()
    other[:, 2] = (other[:, 2] + 1) % tree.model.config.vocab_size
    changed, _ = tree.model.branch(other, tree.mask, told, cache)
    same = [0, 1, 3]
    assert torch.equal(changed[:, same], logits[:, same])
    assert (changed[:, 2] - logits[:, 2]).abs().max() > 1e-3


def test_one_branch_that_has_seen_all_is_a_step() -> None:
    tree = Tree({}, 0)
    ids, told = tree.tokens(1), torch.ones(ROWS, 1, 2, dtype=torch.int64)
    branched, grown = tree.model.branch(ids, tree.mask, told, tree.grown.cache)
    stepped, expected = tree.model.step(ids, tree.mask, tree.grown.cache)
    assert_same(branched, stepped)
    for ours, theirs in zip(grown, expected, strict=True):
        assert_same(ours.decoder.key, theirs.decoder.key)
        assert_same(ours.decoder.value, theirs.decoder.value)


def test_the_mask_of_branches_is_what_they_have_seen_and_themselves() -> None:
    seen = torch.tensor([[[1, 0, 1], [0, 1, 1]], [[0, 0, 0], [1, 1, 1]]])
    mask = branch_mask(seen)
    assert mask.shape == (2, 1, 2, 5)
    assert mask.dtype == torch.bool
    assert mask[:, 0].int().tolist() == [
        [[1, 0, 1, 1, 0], [0, 1, 1, 0, 1]],
        [[0, 0, 0, 1, 0], [1, 1, 1, 0, 1]],
    ]


@pytest.mark.parametrize("kind", ["sinusoidal", "sinusoidal-halves", "learned"])
def test_positions_one_by_one_are_those_of_the_table(kind: PositionKind) -> None:
    positions = Positions(kind, 6, 8)
    places = torch.tensor([[3, 0, 5], [1, 1, 4]])
    found = positions.at(places)
    assert found.shape == (2, 3, 8)
    for row, expected in zip(found.reshape(6, 8), places.flatten().tolist(), strict=True):
        assert torch.equal(row, positions(expected, 1)[0])
