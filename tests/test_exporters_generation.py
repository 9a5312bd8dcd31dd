"""Search on ONNX Runtime against transformers: a tiny Marian model's weights, the same ids and scores."""

from typing import Any

import numpy as np
import pytest
import torch
from rivals_support import LONGEST, POSITIONS, SPECIAL, Rivals, assert_same_outputs, random_sources
from torch import Tensor

from runtime.generation import pad
from runtime.generation_config import GenerationConfig

RAGGED = random_sources(6, seed=7)


@pytest.mark.parametrize("beams", [1, 4])
def test_outputs_of_the_random_model_vary_so_that_equal_ones_prove_something(rivals: Rivals, beams: int) -> None:
    config = GenerationConfig(num_beams=beams, max_length=LONGEST)
    rows = [found[0].ids for found in rivals.search(random_sources(40, seed=1), config)]
    ended = [row for row in rows if row[-1] == SPECIAL.eos]
    assert len({tuple(row) for row in rows}) > 20
    assert len({token for row in rows for token in row}) > 25
    assert len({len(row) for row in rows}) > 6
    assert len(ended) > 10
    assert len(rows) - len(ended) > 3
    assert np.mean([len(set(row)) / len(row) for row in rows if len(row) > 6]) > 0.3


@torch.no_grad()
def test_both_models_compute_the_same_logits(rivals: Rivals) -> None:
    ids, mask = (torch.from_numpy(array) for array in pad(random_sources(8, seed=2), SPECIAL.pad))
    target = torch.from_numpy(pad(random_sources(8, seed=3), SPECIAL.pad)[0])
    memory = rivals.torch.encode(ids, mask)
    ours, _ = rivals.torch.prefill(target, memory, mask)
    theirs: Tensor = rivals.theirs(input_ids=ids, attention_mask=mask, decoder_input_ids=target).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_greedy_search_is_that_of_transformers(rivals: Rivals) -> None:
    assert_same_outputs(rivals, GenerationConfig(max_length=LONGEST), random_sources(30, seed=4))


@pytest.mark.parametrize("beams", [2, 3, 4, 5])
def test_beam_search_is_that_of_transformers(rivals: Rivals, beams: int) -> None:
    config = GenerationConfig(num_beams=beams, max_length=LONGEST)
    assert_same_outputs(rivals, config, random_sources(20, seed=beams))


@pytest.mark.parametrize("outputs", [1, 2, 4])
def test_the_best_outputs_come_in_the_order_of_transformers(rivals: Rivals, outputs: int) -> None:
    config = GenerationConfig(num_beams=4, num_return_sequences=outputs, max_length=LONGEST)
    assert_same_outputs(rivals, config, RAGGED)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_single_sentence_is_searched_as_transformers_does(rivals: Rivals, beams: int) -> None:
    for source in random_sources(5, seed=5):
        assert_same_outputs(rivals, GenerationConfig(num_beams=beams, max_length=LONGEST), [source])


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0, -1.0])
def test_length_penalty_and_early_stopping_together(rivals: Rivals, length_penalty: float, early_stopping: Any) -> None:
    config = GenerationConfig(
        num_beams=3,
        num_return_sequences=3,
        max_length=LONGEST,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    assert_same_outputs(rivals, config, random_sources(12, seed=6))


@pytest.mark.parametrize(
    "options",
    [
        {"min_length": 5},
        {"min_length": LONGEST},
        {"min_new_tokens": 5},
        {"min_new_tokens": 3, "min_length": 9},
        {"min_new_tokens": 9, "min_length": 3},
        {"min_new_tokens": 0, "min_length": 9},
        {"max_length": 2},
        {"max_length": POSITIONS},
        {"max_new_tokens": 1},
        {"max_new_tokens": 7},
        {"max_new_tokens": 4, "max_length": 9},
        {"max_new_tokens": 9, "max_length": 4},
        {"decoder_input_ids": (13,)},
        {"decoder_input_ids": (13, 13, 41)},
        {"decoder_input_ids": (SPECIAL.start,)},
        {"decoder_input_ids": (SPECIAL.start, 13, 41)},
        {"decoder_input_ids": (13, SPECIAL.start)},
        {"decoder_input_ids": (13, SPECIAL.eos, 41)},
        {"decoder_input_ids": (13, SPECIAL.eos)},
        {"decoder_input_ids": (13, 41), "max_new_tokens": 6, "min_new_tokens": 4},
        {"decoder_input_ids": (13, 41), "max_length": 6, "min_length": 5},
        {"decoder_input_ids": (13, 41), "length_penalty": 2.0, "early_stopping": "never"},
    ],
    ids=str,
)
@pytest.mark.parametrize("beams", [1, 4])
def test_limits_and_prefixes_mean_what_they_mean_in_transformers(
    rivals: Rivals, beams: int, options: dict[str, Any]
) -> None:
    defaults = {} if "max_new_tokens" in options else {"max_length": LONGEST}
    assert_same_outputs(rivals, GenerationConfig(**{"num_beams": beams, **defaults, **options}), RAGGED)


def test_the_reference_backend_hands_cross_attention_on_as_the_same_tensors(rivals: Rivals) -> None:
    ids, mask = (torch.from_numpy(array) for array in pad(RAGGED, SPECIAL.pad))
    start = torch.full((len(RAGGED), 1), SPECIAL.start)
    _, cache = rivals.torch.prefill(start, rivals.torch.encode(ids, mask), mask)
    _, grown = rivals.torch.step(start, mask, cache)
    seen = torch.ones((len(RAGGED), 1, 2), dtype=torch.int64)
    _, branched = rivals.torch.branch(start, mask, seen, grown)
    for layers in zip(cache, grown, branched, strict=True):
        for name in ("encoder_key", "encoder_value"):
            assert len({id(getattr(layer, name)) for layer in layers}) == 1
    chosen = np.array([2, 2, 0])
    for layer, picked in zip(grown, rivals.torch.select(grown, chosen), strict=True):
        for before, after in zip(layer, picked, strict=True):
            assert torch.equal(before[chosen], after)
