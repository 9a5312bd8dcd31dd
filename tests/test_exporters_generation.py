"""Search against transformers: a tiny Marian model's weights in our model, option by option the same ids and scores."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from exporters.reference import TorchBackend
from models.config import ModelConfig
from models.transformer import Transformer
from runtime.decoding import SpecialIds
from runtime.generation import GenerationConfig, Hypothesis, generate, pad

VOCABULARY, POSITIONS, LONGEST = 60, 32, 20
SPECIAL = SpecialIds(pad=VOCABULARY - 1, start=VOCABULARY - 1, eos=0)
hugging_face: Any = transformers  # annotated in part only
Sources = Sequence[Sequence[int]]
Outputs = list[list[Hypothesis]]


class Rivals(NamedTuple):
    """The same weights twice."""

    theirs: Any
    ours: TorchBackend

    def search(self, sources: Sources, config: GenerationConfig) -> Outputs:
        return generate(self.ours, sources, config, SPECIAL, POSITIONS)

    def reference(self, sources: Sources, config: GenerationConfig) -> Outputs:
        return transformers_generate(self.theirs, sources, config)


@pytest.fixture(scope="module")
def rivals() -> Iterator[Rivals]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small only make more threads wait for each other
    verbosity = hugging_face.logging.get_verbosity()
    hugging_face.logging.set_verbosity_error()  # it remarks on every two limits that are given together
    theirs = random_marian()
    yield Rivals(theirs, TorchBackend(same_weights(theirs)))
    hugging_face.logging.set_verbosity(verbosity)
    torch.set_num_threads(threads)


def random_marian() -> Any:
    """Random weights whose outputs vary in ids and length; with default initialisation one token repeats for ever."""
    torch.manual_seed(0)
    model = hugging_face.MarianMTModel(
        hugging_face.MarianConfig(
            vocab_size=VOCABULARY,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            activation_function="swish",
            scale_embedding=True,
            max_position_embeddings=POSITIONS,
            pad_token_id=SPECIAL.pad,
            eos_token_id=SPECIAL.eos,
            decoder_start_token_id=SPECIAL.start,
        )
    ).eval()
    # Attention that chooses, a feed-forward part that outweighs the token it reads, and little of the source in all.
    gains = {"q_proj": 6.0, "k_proj": 6.0, "fc1": 8.0, "fc2": 8.0, "encoder_attn.out_proj": 0.5}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.05)  # zero biases would hide a dropped one
            elif "layer_norm" in name:
                parameter.normal_(mean=1, std=0.1)
            elif "embed" not in name and "shared" not in name:
                gain = next((gain for part, gain in gains.items() if part in name), 1.0)
                parameter.normal_(std=gain * parameter.shape[-1] ** -0.5)
                if "fc2" in name:
                    parameter.sub_(parameter.mean(-1, keepdim=True))  # else SiLU's mean adds one vector everywhere
        model.model.shared.weight.normal_(std=0.6 * 32**-0.5)
        last = model.model.decoder.layers[-1].final_layer_norm
        for parameter in (last.weight, last.bias):
            parameter.mul_(2.5)  # sharp logits: few near-ties
        model.final_logits_bias.normal_(std=0.5)
        model.final_logits_bias[:, SPECIAL.eos] += 1.2
    # Where a call leaves an option open, transformers fills it in from here: Marian's forced EOS must not.
    model.generation_config = hugging_face.GenerationConfig()
    return model


def same_weights(theirs: Any) -> Transformer:
    """Our model with the weights of `theirs`."""
    names = {
        "self_attn_layer_norm": "self_residual.norm",
        "self_attn": "self_attention",
        "encoder_attn_layer_norm": "cross_residual.norm",
        "encoder_attn": "cross_attention",
        "fc1": "feed_forward.fc1",
        "fc2": "feed_forward.fc2",
        "final_layer_norm": "feed_forward_residual.norm",
    }
    state = {"output.bias": theirs.final_logits_bias[0]}
    for name, tensor in theirs.state_dict().items():
        if ".layers." in name:
            side, _, layer, part, *rest = name.removeprefix("model.").split(".")
            state[".".join([side, "layers", layer, names[part], *rest])] = tensor
    for name in ("encoder.embedding.tokens", "decoder.embedding.tokens", "output"):
        state[f"{name}.weight"] = theirs.model.shared.weight
    config = ModelConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        activation_function="silu",
        positions="sinusoidal-halves",
        max_positions=POSITIONS,
        output_bias=True,
        pad_token_id=SPECIAL.pad,
        decoder_start_token_id=SPECIAL.start,
        eos_token_id=SPECIAL.eos,
    )
    ours = Transformer(config)
    ours.load_state_dict(state)
    return ours


def transformers_generate(model: Any, sources: Sources, config: GenerationConfig) -> Outputs:
    """The outputs of `model.generate` in our form. The names of all options are the same."""
    options = {name: value for name, value in msgspec.structs.asdict(config).items() if value is not None}
    prefix = options.pop("decoder_input_ids")
    rows = [torch.tensor(row) for row in sources]
    inputs = {
        "input_ids": pad_sequence(rows, batch_first=True, padding_value=SPECIAL.pad),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
    }
    if prefix:
        inputs["decoder_input_ids"] = torch.tensor([prefix] * len(sources))
    output = model.generate(
        **inputs,
        generation_config=hugging_face.GenerationConfig(
            **options,
            pad_token_id=SPECIAL.pad,
            eos_token_id=SPECIAL.eos,
            decoder_start_token_id=SPECIAL.start,
            return_dict_in_generate=True,
            output_scores=True,
        ),
    )
    prompt = _prompt_length(config)
    found = [_until_eos(row.tolist(), prompt) for row in output.sequences]
    if config.num_beams == 1:
        steps = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
        new = [len(row) - prompt for row in found]
        scores = [
            float(step[:count].double().sum()) / count**config.length_penalty
            for step, count in zip(steps, new, strict=True)
        ]
    else:
        scores = output.sequences_scores.tolist()
    outputs = [Hypothesis(row[1:], score) for row, score in zip(found, scores, strict=True)]
    each = config.num_return_sequences
    return [outputs[place : place + each] for place in range(0, len(outputs), each)]


def _prompt_length(config: GenerationConfig) -> int:
    prefix = config.decoder_input_ids
    return len(prefix) if prefix[:1] == (SPECIAL.start,) else len(prefix) + 1


def _until_eos(row: list[int], prompt: int) -> list[int]:
    # The start token is pad too, and a prefix may hold EOS: only what follows the prompt tells the end.
    ends = [place for place in range(prompt, len(row)) if row[place] == SPECIAL.eos]
    return row[: ends[0] + 1] if ends else row


def random_sources(count: int, seed: int, longest: int = 10) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, longest, count, endpoint=True)
    return [[*generator.integers(1, VOCABULARY - 1, length).tolist(), SPECIAL.eos] for length in lengths]


def differences(ours: Outputs, theirs: Outputs) -> list[str]:
    """Every hypothesis whose ids or score differ; hypotheses were compared, or it is an error."""
    assert [len(found) for found in ours] == [len(found) for found in theirs]
    assert sum(map(len, ours)) > 0
    return [
        f"sentence {place}, output {rank}: ours {a}, theirs {b}"
        for place, pair in enumerate(zip(ours, theirs, strict=True))
        for rank, (a, b) in enumerate(zip(*pair, strict=True))
        if a.ids != b.ids or not math.isclose(a.score, b.score, rel_tol=1e-5, abs_tol=1e-4)
    ]


def assert_same_outputs(rivals: Rivals, config: GenerationConfig, sources: Sources) -> None:
    found = differences(rivals.search(sources, config), rivals.reference(sources, config))
    assert not found, "\n".join(found)


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
    memory = rivals.ours.encode(ids, mask)
    ours, _ = rivals.ours.prefill(target, memory, mask)
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


@st.composite
def option_combinations(draw: st.DrawFn) -> GenerationConfig:
    """Any options that may stand together."""
    beams = draw(st.integers(1, 5))
    prefix = draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=3))
    prompt = _prompt_length(GenerationConfig(decoder_input_ids=tuple(prefix)))
    max_length = draw(st.none() | st.integers(prompt + 1, LONGEST))
    both = max_length is None or draw(st.booleans())
    max_new_tokens = draw(st.integers(1, LONGEST - prompt)) if both else None
    longest = max_length or LONGEST if max_new_tokens is None else prompt + max_new_tokens
    min_new_tokens = draw(st.none() | st.integers(0, longest - prompt))
    least = draw(st.just(0) | st.integers(0, longest if min_new_tokens is None else LONGEST))
    return GenerationConfig(
        num_beams=beams,
        num_return_sequences=draw(st.integers(1, beams)),
        length_penalty=draw(st.sampled_from([0.0, 0.6, 1.0, 1.3, 2.0, -0.5, -1.0])),
        early_stopping=draw(st.sampled_from([False, True, "never"])),
        max_length=max_length,
        max_new_tokens=max_new_tokens,
        min_length=least,
        min_new_tokens=min_new_tokens,
        decoder_input_ids=tuple(prefix),
    )


def test_any_options_together_give_the_outputs_of_transformers(rivals: Rivals) -> None:
    compared: Counter[str] = Counter()

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(option_combinations(), st.integers(3, 6), st.integers(0, 1000))
    def compare(config: GenerationConfig, count: int, seed: int) -> None:
        sources = random_sources(count, seed)
        ours, theirs = rivals.search(sources, config), rivals.reference(sources, config)
        found = differences(ours, theirs)
        assert not found, "\n".join(found)
        compared["outputs"] += sum(map(len, ours))
        compared["ended"] += sum(output.ids[-1] == SPECIAL.eos for outputs in ours for output in outputs)

    compare()
    assert compared["outputs"] > 300
    assert compared["ended"] > 75


def test_the_reference_backend_hands_cross_attention_on_as_the_same_tensors(rivals: Rivals) -> None:
    ids, mask = (torch.from_numpy(array) for array in pad(RAGGED, SPECIAL.pad))
    start = torch.full((len(RAGGED), 1), SPECIAL.start)
    _, cache = rivals.ours.prefill(start, rivals.ours.encode(ids, mask), mask)
    _, grown = rivals.ours.step(start, mask, cache)
    reordered = rivals.ours.reorder(grown, np.arange(len(RAGGED))[::-1])
    for layers in zip(cache, grown, reordered, strict=True):
        for name in ("encoder_key", "encoder_value"):
            assert len({id(getattr(layer, name)) for layer in layers}) == 1
    chosen = np.array([2, 2, 0])
    for layer, picked in zip(grown, rivals.ours.select(grown, chosen), strict=True):
        for before, after in zip(layer, picked, strict=True):
            assert torch.equal(before[chosen], after)
