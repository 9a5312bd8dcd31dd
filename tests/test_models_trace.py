"""The two walk-through tables (B=2, S=3, T=4, E=8, H=2, F=16, V=100), traced from the tensors of a real model."""

import pytest
import torch
from models_support import VARIANTS, WALK_THROUGH, all_variants, random_batch, random_model, tiny
from torch import nn

from models.errors import SequenceTooLongError
from models.trace import TracePoint, trace_inference, trace_training
from models.transformer import Transformer

TRAINING = [
    ("source ids", (2, 3)),
    ("source embedding x sqrt(E) + position", (2, 3, 8)),
    ("encoder q, k, v after splitting heads", (2, 2, 3, 4)),
    ("encoder scores q kT", (2, 2, 3, 3)),
    ("encoder attention output, per head", (2, 2, 3, 4)),
    ("heads joined, output projection", (2, 3, 8)),
    ("encoder feed-forward, inside", (2, 3, 16)),
    ("encoder feed-forward", (2, 3, 8)),
    ("encoder output (memory)", (2, 3, 8)),
    ("target input ids", (2, 4)),
    ("target embedding + position", (2, 4, 8)),
    ("decoder self q, k, v", (2, 2, 4, 4)),
    ("masked scores", (2, 2, 4, 4)),
    ("self-attention output, projected", (2, 4, 8)),
    ("cross q (from the decoder)", (2, 2, 4, 4)),
    ("cross k, v (from memory)", (2, 2, 3, 4)),
    ("cross scores", (2, 2, 4, 3)),
    ("cross output, projected", (2, 4, 8)),
    ("feed-forward, inside", (2, 4, 16)),
    ("feed-forward", (2, 4, 8)),
    ("decoder output", (2, 4, 8)),
    ("logits", (2, 4, 100)),
    ("labels", (2, 4)),
    ("loss", ()),
]


def inference(t: int) -> list[tuple[str, tuple[int, ...]]]:
    return [
        ("memory", (1, 3, 8)),
        ("new token id", (1, 1)),
        ("new token embedding", (1, 1, 8)),
        ("self q, new k, new v", (1, 2, 1, 4)),
        ("self caches after appending", (1, 2, t + 1, 4)),
        ("self scores", (1, 2, 1, t + 1)),
        ("self output", (1, 2, 1, 4)),
        ("cross q", (1, 2, 1, 4)),
        ("cross caches (computed once)", (1, 2, 3, 4)),
        ("cross scores", (1, 2, 1, 3)),
        ("decoder output", (1, 1, 8)),
        ("logits", (1, 1, 100)),
        ("next id", (1, 1)),
    ]


def test_training_has_the_shapes_of_the_walk_through() -> None:
    points = trace_training(Transformer(WALK_THROUGH), *random_batch(WALK_THROUGH, [(3, 4), (2, 3)]))
    assert points == [TracePoint(*row) for row in TRAINING]


@pytest.mark.parametrize("t", [1, 2, 5])
def test_a_cached_step_has_the_shapes_of_the_walk_through(t: int) -> None:
    batch = random_batch(WALK_THROUGH, [(3, t)])
    points = trace_inference(Transformer(WALK_THROUGH), batch.source_ids, batch.source_mask, batch.target_ids)
    assert points == [TracePoint(*row) for row in inference(t)]


@all_variants
def test_every_variant_can_be_traced(changes: dict[str, object]) -> None:
    model, batch = random_model(tiny(**changes)), random_batch(tiny(**changes))
    scaled = [point.replace(" x sqrt(E)", "") if "scale_embedding" in changes else point for point, _ in TRAINING]
    assert [point for point, _ in trace_training(model, *batch)] == scaled
    steps = trace_inference(model, batch.source_ids, batch.source_mask, batch.target_ids)
    assert [point for point, _ in steps] == [point for point, _ in inference(1)]


def test_each_side_is_traced_by_its_own_sizes() -> None:
    config = tiny(**VARIANTS["unequal sides"])
    shapes = dict(trace_training(random_model(config), *random_batch(config, [(3, 4), (2, 3)])))
    assert shapes["encoder q, k, v after splitting heads"] == (2, 4, 3, 2)
    assert shapes["encoder scores q kT"] == (2, 4, 3, 3)
    assert shapes["encoder feed-forward, inside"] == (2, 3, 12)
    assert shapes["decoder self q, k, v"] == (2, 2, 4, 4)
    assert shapes["feed-forward, inside"] == (2, 4, 20)


def test_shapes_come_from_the_tensors_and_not_from_the_settings() -> None:
    model, batch = Transformer(WALK_THROUGH), random_batch(WALK_THROUGH, [(3, 4), (2, 3)])
    first = model.get_submodule("decoder.layers.0")
    first.feed_forward.fc1, first.feed_forward.fc2 = nn.Linear(8, 24), nn.Linear(24, 8)  # type: ignore[union-attr]
    first.cross_attention.v_proj = nn.Linear(8, 12)  # type: ignore[union-attr]
    first.cross_attention.out_proj = nn.Linear(12, 8)  # type: ignore[union-attr]
    points = trace_training(model, *batch)
    assert dict(points)["feed-forward, inside"] == (2, 4, 24)
    # Keys and values that differ get a line each.
    assert [shape for point, shape in points if point == "cross k, v (from memory)"] == [(2, 2, 3, 4), (2, 2, 3, 6)]


def test_tracing_leaves_no_hooks_and_no_gradients_behind() -> None:
    model, batch = random_model(WALK_THROUGH), random_batch(WALK_THROUGH)
    before = model(*batch[:3])
    trace_training(model, *batch)
    trace_inference(model, batch.source_ids, batch.source_mask, batch.target_ids)
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(model(*batch[:3]), before)


def test_hooks_are_removed_after_an_error_too() -> None:
    model, batch = random_model(WALK_THROUGH), random_batch(WALK_THROUGH)
    too_long = torch.full((3, WALK_THROUGH.max_positions + 1), 5)
    with pytest.raises(SequenceTooLongError):
        trace_training(model, batch.source_ids, batch.source_mask, too_long, too_long)
    with pytest.raises(SequenceTooLongError):
        trace_inference(model, batch.source_ids, batch.source_mask, too_long[:, :-1])
    assert not any(module._forward_hooks for module in model.modules())
