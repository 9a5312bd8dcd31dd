"""Samples on ONNX Runtime have the distribution that transformers draws from; its files of options are read whole."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from rivals_support import (
    POSITIONS,
    SPECIAL,
    Rivals,
    hugging_face,
    prompt_length,
    random_sources,
    run_transformers,
    transformers_generate,
    transformers_options,
)

from runtime.generation import generate
from runtime.generation_config import GenerationConfig
from runtime.generation_files import BOOKKEEPING, NEUTRAL, OWN, read_generation_config

SOURCE = random_sources(1, seed=12)[0]
Output = tuple[int, ...]


def deviation(counts: Mapping[Output, int], probabilities: Mapping[Output, float]) -> float:
    """Chi-square in standard deviations from its mean; rare outputs are counted together."""
    assert counts.keys() <= probabilities.keys()
    total = sum(counts.values())
    expected = {output: total * probability for output, probability in probabilities.items()}
    rare = {output for output, count in expected.items() if count < 5}
    pairs = [(counts[output], expected[output]) for output in expected.keys() - rare]
    if rare:
        pairs.append((sum(counts[output] for output in rare), sum(expected[output] for output in rare)))
    freedom = len(pairs) - 1
    assert freedom > 3
    chi_square = sum((count - mean) ** 2 / max(mean, 1e-9) for count, mean in pairs)
    return float((chi_square - freedom) / np.sqrt(2 * freedom))


def reference_distribution(model: Any, config: GenerationConfig, steps: int) -> dict[Output, float]:
    """The probability of every output of at most `steps` tokens, from the scores that transformers draws from."""
    outputs: dict[Output, float] = {}
    open_ones: dict[Output, float] = {(): 1.0}
    prompt = prompt_length(config)
    for step in range(steps):
        grown: dict[Output, float] = {}
        for prefix, probability in open_ones.items():
            forced = (SPECIAL.start, *config.decoder_input_ids, *prefix)
            given = msgspec.structs.replace(
                config, decoder_input_ids=forced, max_new_tokens=None, max_length=prompt + steps, num_return_sequences=1
            )
            scores = run_transformers(model, [SOURCE], given).scores[0][0]
            for token, share in enumerate(scores.double().softmax(-1).tolist()):
                if share > 0:
                    ends = token == SPECIAL.eos or step == steps - 1
                    (outputs if ends else grown)[*prefix, token] = probability * share
        open_ones = grown
    assert sum(outputs.values()) == pytest.approx(1)
    return outputs


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"top_k": 0}, 1),
        ({}, 1),
        ({"temperature": 0.5, "top_k": 0}, 1),
        ({"temperature": 2.5, "top_k": 0}, 1),
        ({"top_k": 8}, 1),
        ({"top_k": 0, "top_p": 0.7}, 1),
        ({"temperature": 1.7, "top_k": 20, "top_p": 0.8}, 1),
        ({"temperature": 1.5, "top_k": 5}, 2),
        ({"temperature": 1.5, "top_k": 4, "no_repeat_ngram_size": 1, "repetition_penalty": 1.4}, 3),
        ({"temperature": 1.5, "top_k": 6, "bad_words_ids": ((2,), (38,)), "decoder_input_ids": (13, 41)}, 2),
        ({"top_k": 6, "forced_eos_token_id": 0, "renormalize_logits": True}, 3),
    ],
    ids=str,
)
def test_samples_come_as_often_as_transformers_would_draw_them(
    rivals: Rivals, options: dict[str, Any], steps: int
) -> None:
    config = GenerationConfig(do_sample=True, num_return_sequences=3000, max_new_tokens=steps, seed=1, **options)
    expected = reference_distribution(rivals.theirs, config, steps)
    (found,) = rivals.search([SOURCE], config)
    start = len(config.decoder_input_ids)
    counts = Counter(tuple(hypothesis.ids[start:]) for hypothesis in found)
    assert abs(deviation(counts, expected)) < 4


def test_a_wrong_temperature_would_be_seen(rivals: Rivals) -> None:
    config = GenerationConfig(do_sample=True, num_return_sequences=3000, max_new_tokens=1, seed=1, temperature=0.8)
    right = reference_distribution(rivals.theirs, config, 1)
    wrong = reference_distribution(rivals.theirs, msgspec.structs.replace(config, temperature=0.9), 1)
    (found,) = rivals.search([SOURCE], config)
    counts = Counter(tuple(hypothesis.ids) for hypothesis in found)
    assert abs(deviation(counts, right)) < 4 < deviation(counts, wrong)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2, "max_new_tokens": 1, "top_k": 0},
        {"num_beams": 2, "max_new_tokens": 2, "top_k": 4, "temperature": 2.0},
        {"num_beams": 3, "max_new_tokens": 2, "top_p": 0.9, "temperature": 2.0, "early_stopping": True},
    ],
    ids=str,
)
def test_drawn_beams_come_as_often_as_in_transformers(rivals: Rivals, options: dict[str, Any]) -> None:
    count = 1200
    config = GenerationConfig(do_sample=True, **options)
    torch.manual_seed(1)
    theirs = Counter(
        tuple(outputs[0].ids) for outputs in transformers_generate(rivals.theirs, [SOURCE] * count, config)
    )
    ours: Counter[Output] = Counter()
    for seed in range(count):
        chosen = msgspec.structs.replace(config, seed=seed)
        ours[tuple(generate(rivals.ours, [SOURCE], chosen, SPECIAL, POSITIONS)[0][0].ids)] += 1
    assert two_samples(ours, theirs) < 4


def two_samples(ours: Counter[Output], theirs: Counter[Output]) -> float:
    """Chi-square that two equally large samples are of one distribution, in standard deviations from its mean."""
    both = ours + theirs
    common = [output for output, count in both.items() if count >= 10]
    pairs = [(ours[output], theirs[output]) for output in common]
    pairs.append((ours.total() - sum(pair[0] for pair in pairs), theirs.total() - sum(pair[1] for pair in pairs)))
    filled: Sequence[tuple[int, int]] = [pair for pair in pairs if sum(pair)]
    assert len(filled) > 4
    chi_square = sum((a - b) ** 2 / (a + b) for a, b in filled)
    return float((chi_square - len(filled) + 1) / np.sqrt(2 * len(filled) - 2))


# Files of options.


def test_every_option_that_transformers_has_is_taken_passed_over_or_refused() -> None:
    theirs = {name for name in vars(hugging_face.GenerationConfig()) if name != "_original_object_hash"}
    ours = (set(GenerationConfig.__struct_fields__) - OWN) | BOOKKEEPING | NEUTRAL.keys()
    assert theirs - ours == set()
    assert not BOOKKEEPING & NEUTRAL.keys()
    assert not set(GenerationConfig.__struct_fields__) & (BOOKKEEPING | NEUTRAL.keys())


def test_what_transformers_does_by_default_is_what_we_call_neutral(tmp_path: Path) -> None:
    defaults = hugging_face.GenerationConfig._get_default_generation_params()
    hugging_face.GenerationConfig(**defaults).save_pretrained(tmp_path)
    found = read_generation_config(tmp_path / "generation_config.json")
    assert found == GenerationConfig(max_length=20)
    for name in GenerationConfig.__struct_fields__:
        if name in defaults and name != "max_length" and defaults[name] is not None:
            assert getattr(GenerationConfig(), name) == defaults[name]


@pytest.mark.parametrize(
    "config",
    [
        GenerationConfig(),
        GenerationConfig(num_beams=4, num_return_sequences=2, early_stopping="never", length_penalty=-0.5),
        GenerationConfig(
            max_length=20,
            min_new_tokens=3,
            bad_words_ids=((59,), (1, 2)),
            forced_bos_token_id=4,
            forced_eos_token_id=0,
            suppress_tokens=(7,),
            renormalize_logits=True,
            no_repeat_ngram_size=3,
            repetition_penalty=1.1,
        ),
        GenerationConfig(do_sample=True, temperature=0.6, top_k=0, top_p=0.9, num_return_sequences=3),
    ],
    ids=str,
)
def test_a_file_that_transformers_wrote_is_read(tmp_path: Path, config: GenerationConfig) -> None:
    theirs = hugging_face.GenerationConfig(
        **transformers_options(config), pad_token_id=59, eos_token_id=0, decoder_start_token_id=59
    )
    theirs.save_pretrained(tmp_path)
    assert read_generation_config(tmp_path / "generation_config.json") == config
