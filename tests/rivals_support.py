"""The same weights in transformers and in a bundle, and what both of them make of the same options."""

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import transformers
from exporters_support import write_checkpoint
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from exporters.export import export_bundle
from exporters.reference import TorchBackend
from models.importers import import_model
from models.transformer import Transformer
from runtime.backend import Backend
from runtime.bundle import Bundle
from runtime.decoding import SpecialIds
from runtime.generation import Hypothesis, generate, pad
from runtime.generation_config import GenerationConfig
from runtime.session import OrtBackend

VOCABULARY, POSITIONS, LONGEST = 60, 32, 20
SPECIAL = SpecialIds(pad=VOCABULARY - 1, start=VOCABULARY - 1, eos=0)
hugging_face: Any = transformers  # annotated in part only
Sources = Sequence[Sequence[int]]
Outputs = list[list[Hypothesis]]


class Rivals(NamedTuple):
    """The same weights three times."""

    theirs: Any
    ours: Backend[Any]
    """What is compared: the exported graphs, on ONNX Runtime."""
    torch: TorchBackend
    """What was exported."""

    def search(self, sources: Sources, config: GenerationConfig) -> Outputs:
        return generate(self.ours, sources, config, SPECIAL, POSITIONS)

    def reference(self, sources: Sources, config: GenerationConfig) -> Outputs:
        return transformers_generate(self.theirs, sources, config)


def make_rivals(folder: Path) -> Rivals:
    """A random Marian model, and the bundle in `folder` that it was exported to."""
    with one_quiet_thread():
        theirs = random_marian()
        ours = same_weights(theirs)
        export_bundle(write_checkpoint(ours, folder / "checkpoint"), folder / "bundle")
        return Rivals(theirs, OrtBackend(Bundle(folder / "bundle"), threads=1), TorchBackend(ours))


@contextmanager
def one_quiet_thread() -> Iterator[None]:
    """One thread for torch, since on tensors this small more of them wait for each other; no remarks on options."""
    threads, verbosity = torch.get_num_threads(), hugging_face.logging.get_verbosity()
    torch.set_num_threads(1)
    hugging_face.logging.set_verbosity_error()
    yield
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
    # With sharper attention float32 itself is uncertain by 1e-3, in PyTorch as in ONNX Runtime.
    gains = {"q_proj": 2.0, "k_proj": 2.0, "fc1": 8.0, "fc2": 8.0, "encoder_attn.out_proj": 0.5}
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
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return import_model(Path(folder)).model


def transformers_generate(model: Any, sources: Sources, config: GenerationConfig) -> Outputs:
    """The outputs of `model.generate` in our form."""
    output = run_transformers(model, sources, config)
    prompt = prompt_length(config)
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
    return [
        [output for output in outputs[place : place + each] if _is_real(output, config, prompt)]
        for place in range(0, len(outputs), each)
    ]


def run_transformers(model: Any, sources: Sources, config: GenerationConfig) -> Any:
    """What `model.generate` returns."""
    prefix = list(config.decoder_input_ids)
    rows = [torch.tensor(row) for row in sources]
    inputs = {
        "input_ids": pad_sequence(rows, batch_first=True, padding_value=SPECIAL.pad),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
    }
    if prefix:
        inputs["decoder_input_ids"] = torch.tensor([prefix] * len(sources))
    return model.generate(
        **inputs,
        generation_config=hugging_face.GenerationConfig(
            **transformers_options(config),
            pad_token_id=SPECIAL.pad,
            eos_token_id=SPECIAL.eos,
            decoder_start_token_id=SPECIAL.start,
            return_dict_in_generate=True,
            output_scores=True,
        ),
    )


def transformers_options(config: GenerationConfig) -> dict[str, Any]:
    """`config` as transformers' GenerationConfig takes it: the names are the same, tuples are lists."""
    options: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config))
    return {name: value for name, value in options.items() if name not in {"seed", "decoder_input_ids"}}


def prompt_length(config: GenerationConfig) -> int:
    """Of start token and prefix."""
    prefix = config.decoder_input_ids
    return len(prefix) if prefix[:1] == (SPECIAL.start,) else len(prefix) + 1


def _is_real(output: Hypothesis, config: GenerationConfig, prompt: int) -> bool:
    # Where options leave fewer outputs than beams, transformers fills up with what has a score of -1e9 before division.
    total = output.score * (len(output.ids) + 1 - prompt) ** config.length_penalty
    return config.num_beams == 1 or (output.score > -1e9 and total > -5e8)


def _until_eos(row: list[int], prompt: int) -> list[int]:
    # The start token is pad too, and a prefix may hold EOS: only what follows the prompt tells the end.
    ends = [place for place in range(prompt, len(row)) if row[place] == SPECIAL.eos]
    return row[: ends[0] + 1] if ends else row


def random_sources(count: int, seed: int, longest: int = 10) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, longest, count, endpoint=True)
    return [[*generator.integers(1, VOCABULARY - 1, length).tolist(), SPECIAL.eos] for length in lengths]


class Difference(NamedTuple):
    """A hypothesis that the two sides do not share."""

    sentence: int
    text: str


def differences(ours: Outputs, theirs: Outputs) -> list[Difference]:
    """Every hypothesis whose ids or score differ; hypotheses were compared, or it is an error."""
    assert [len(found) for found in ours] == [len(found) for found in theirs]
    assert sum(map(len, ours)) > 0
    return [
        Difference(place, f"sentence {place}, output {rank}: ours {a}, theirs {b}")
        for place, pair in enumerate(zip(ours, theirs, strict=True))
        for rank, (a, b) in enumerate(zip(*pair, strict=True))
        if a.ids != b.ids or not math.isclose(a.score, b.score, rel_tol=1e-5, abs_tol=1e-4)
    ]


def assert_same_outputs(rivals: Rivals, config: GenerationConfig, sources: Sources) -> None:
    found = differences(rivals.search(sources, config), rivals.reference(sources, config))
    assert not found, "\n".join(difference.text for difference in found)


@torch.no_grad()
def logit_error(rivals: Rivals) -> float:
    """The greatest difference of the two sides' logits on random inputs."""
    worst = 0.0
    for seed in range(20):
        ids, mask = pad(random_sources(8, seed), SPECIAL.pad)
        target, _ = pad(random_sources(8, seed + 100), SPECIAL.pad)
        put, mask_value = rivals.ours.put, rivals.ours.put(mask)
        logits, _ = rivals.ours.prefill(put(target), rivals.ours.encode(put(ids), mask_value), mask_value)
        given = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": target}
        theirs = rivals.theirs(**{name: torch.from_numpy(array) for name, array in given.items()}).logits
        worst = max(worst, float(np.abs(rivals.ours.get(logits) - theirs.numpy()).max()))
    return worst


def reference_margin(model: Any, source: Sequence[int], config: GenerationConfig) -> float:
    """The smallest gap between any two scores that transformers decided by, searching for `source` alone."""
    gaps: list[float] = []

    def note(scores: Tensor) -> None:
        ordered = scores[scores > -1e8].sort(descending=True).values
        gaps.extend((ordered[:-1] - ordered[1:]).tolist())

    def continuations(**arguments: Any) -> Any:
        note(arguments["accumulated_log_probs"][0].topk(arguments["beams_to_keep"] + 1).values)
        return type(model)._get_top_k_continuations(model, **arguments)

    def finished(**arguments: Any) -> Any:
        count = arguments["cur_len"] + 1 - arguments["decoder_prompt_len"]
        new = arguments["topk_log_probs"][0] / count ** arguments["length_penalty"]
        note(torch.cat([arguments["beam_scores"][0], new]))
        return type(model)._update_finished_beams(model, **arguments)

    if config.num_beams == 1:
        output = run_transformers(model, [source], config)
        (row,) = transformers_generate(model, [source], config)
        for scores in output.scores[: len(row[0].ids) + 1 - prompt_length(config)]:
            note(scores[0].topk(2).values)
        return min(gaps, default=math.inf)
    model._get_top_k_continuations, model._update_finished_beams = continuations, finished
    try:
        run_transformers(model, [source], config)
    finally:
        del model._get_top_k_continuations, model._update_finished_beams
    return min(gaps, default=math.inf)
