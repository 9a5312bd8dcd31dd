"""PyTorch writes the exam: inputs, float64 answers, and how far PyTorch-float32 is from these."""

import copy
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.transformer import Transformer
from runtime.backend import Array
from runtime.contract import ENCODE, PREFILL, STEP
from runtime.decoding import SpecialIds
from runtime.exam import CacheCheck, Exam, GraphCase, RolloutCase, TokenCase
from runtime.generation import GenerationConfig, generate, pad
from runtime.parity import largest_error, rollout
from runtime.verbs import call

from .reference import TorchBackend

COLUMNS = 32
"""Logits that a rollout keeps at each position: the most probable ones, which decide what comes next."""


class Sizes(NamedTuple):
    """Which sizes an exam asks for: batch, source, prefix and past of each verb's cases."""

    encode: tuple[tuple[int, int], ...]
    prefill: tuple[tuple[int, int, int], ...]
    step: tuple[tuple[int, int, int], ...]
    rollout: tuple[tuple[int, int, int], ...]
    """Batch, source and number of target tokens."""


def recorded_sizes(max_positions: int) -> Sizes:
    """Few and small: what goes into a bundle. The rollout passes through every past that the model has room for."""
    source = min(7, max_positions)
    return Sizes(
        encode=((1, 1), (2, source), (1, min(33, max_positions))),
        prefill=((1, 1, 1), (2, source, 4)),
        step=((1, source, 1), (2, source, min(11, max_positions - 1))),
        rollout=((3, source, min(65, max_positions)), (1, source, max_positions)),
    )


def sweep_sizes(max_positions: int) -> Sizes:
    """Many: what an export must pass. None of them is a size that was traced."""
    batches, sources = (1, 2, 5), (1, 7, max_positions)
    pasts = sorted({1, 2, min(17, max_positions - 1), max_positions - 1})
    return Sizes(
        encode=tuple(product(batches, sources)),
        prefill=tuple(product(batches, sources, (1, 4))),
        step=tuple(product(batches, sources, pasts)),
        rollout=((1, 7, max_positions), (3, 7, min(65, max_positions))),
    )


class Examiner:
    """Writes exams about one model.

    Args:
        model: In float32; it is not changed.
        seed: Of the random inputs. The same seed, model and versions give the same exam.
    """

    def __init__(self, model: Transformer, seed: int) -> None:
        self._config = model.config
        self._seed = seed
        self._reference = TorchBackend(copy.deepcopy(model).double())
        self._float32 = TorchBackend(copy.deepcopy(model).float())
        self._random = np.random.default_rng(seed)

    def write(self, sizes: Sizes, sentences: Mapping[str, Sequence[int]]) -> Exam:
        """An exam with cases of `sizes`, and token cases for `sentences`, source ids by label."""
        graphs = [
            *(self._graph_case(ENCODE, (b, s), f"B={b} S={s}") for b, s in sizes.encode),
            *(self._graph_case(PREFILL, (b, s, t), f"B={b} S={s} T={t}") for b, s, t in sizes.prefill),
            *(self._graph_case(STEP, (b, s, p), f"B={b} S={s} P={p}") for b, s, p in sizes.step),
        ]
        return Exam(
            seed=self._seed,
            tools=tool_versions("torch"),
            cache=self.check_cache(),
            graphs=graphs,
            rollouts=[self._rollout_case(*size) for size in sizes.rollout],
            tokens=[
                self._token_case(f"{label}, {beams} beam{'s' * (beams > 1)}", ids, beams)
                for label, ids in sentences.items()
                for beams in (1, 4)
            ],
        )

    def check_cache(self, length: int = 12) -> CacheCheck:
        """Rung 1: for each split of `length` target tokens, prefill of the first part and steps over the rest."""
        length = min(length, self._config.max_positions)
        source_ids, mask = self._sources(2, min(7, self._config.max_positions))
        target_ids = self._targets(2, length)
        memory = call(self._reference, ENCODE, {"input_ids": source_ids, "attention_mask": mask})["last_hidden_state"]
        given, states = self._reference.put(mask), self._reference.put(memory)
        full, _ = self._reference.prefill(self._reference.put(target_ids), states, given)
        error = 0.0
        for prefix in range(1, length):
            logits, cache = self._reference.prefill(self._reference.put(target_ids[:, :prefix]), states, given)
            parts = [logits]
            for place in range(prefix, length):
                token = self._reference.put(target_ids[:, place : place + 1])
                logits, cache = self._reference.step(token, given, cache)
                parts.append(logits)
            # np.maximum passes NaN on, max() would lose it.
            error = float(np.maximum(error, float((torch.cat(parts, 1) - full).abs().max() / full.abs().max())))
        return CacheCheck(prefixes=length - 1, error=error)

    def _graph_case(self, verb: str, sizes: tuple[int, ...], label: str) -> GraphCase:
        inputs = self._inputs(verb, *sizes)
        exact, own = (
            _without_past(call(backend, verb, inputs), inputs) for backend in (self._reference, self._float32)
        )
        reference = {name: array.astype(np.float32) for name, array in exact.items()}
        errors = {name: largest_error(own[name], answer) for name, answer in reference.items()}
        return GraphCase(verb=verb, label=label, inputs=inputs, reference=reference, own_error=errors)

    def _inputs(self, verb: str, batch: int, source: int, target: int = 0) -> dict[str, Array]:
        """What `verb` reads; memory and caches are the reference's, rounded to float32."""
        ids, mask = self._sources(batch, source)
        if verb == ENCODE:
            return {"input_ids": ids, "attention_mask": mask}
        memory = call(self._reference, ENCODE, {"input_ids": ids, "attention_mask": mask})["last_hidden_state"]
        prefill = {
            "encoder_attention_mask": mask,
            "input_ids": self._targets(batch, target),
            "encoder_hidden_states": memory.astype(np.float32),
        }
        if verb == PREFILL:
            return prefill
        present = call(self._reference, PREFILL, prefill)
        past = {
            name.replace("present.", "past_key_values."): array.astype(np.float32)
            for name, array in present.items()
            if name != "logits"
        }
        return {"encoder_attention_mask": mask, "input_ids": self._draw((batch, 1)), **past}

    def _rollout_case(self, batch: int, source: int, length: int) -> RolloutCase:
        ids, mask = self._sources(batch, min(source, self._config.max_positions))
        target_ids = self._targets(batch, length)
        reference, own = (
            np.stack(rollout(backend, ids, mask, target_ids), 1) for backend in (self._reference, self._float32)
        )  # (B, N, V)
        columns = np.argsort(-reference, axis=-1, kind="stable")[:, :, :COLUMNS]  # (B, N, C)
        answers = np.take_along_axis(reference, columns, 2).astype(np.float32)
        errors = np.abs(np.take_along_axis(own, columns, 2).astype(np.float64) - answers).max((0, 2))  # (N,)
        return RolloutCase(
            label=f"B={batch} S={source} N={length}",
            source_ids=ids,
            source_mask=mask,
            target_ids=target_ids,
            columns=columns.astype(np.int64),
            reference=answers,
            own_error=errors.tolist(),
        )

    def _token_case(self, label: str, source_ids: Sequence[int], beams: int) -> TokenCase:
        special = special_ids(self._config)
        longest = min(self._config.max_positions, 3 * len(source_ids) + 20)
        config = GenerationConfig(num_beams=beams, max_length=longest)
        ((best,),) = generate(self._reference, [source_ids], config, special, self._config.max_positions)
        margins = self._margins(source_ids, best.ids) if beams == 1 else []
        return TokenCase(
            label=label, source_ids=list(source_ids), config=config, ids=best.ids, score=best.score, margins=margins
        )

    def _margins(self, source_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
        """By how much the reference's best logit leads the second before each of `ids`."""
        source, mask = pad([source_ids], self._config.pad_token_id)
        fed = np.array([[self._config.decoder_start_token_id, *ids[:-1]]])
        memory = self._reference.encode(self._reference.put(source), self._reference.put(mask))
        logits, _ = self._reference.prefill(self._reference.put(fed), memory, self._reference.put(mask))
        top: Tensor = logits[0].topk(2, dim=-1).values  # (T, 2)
        margins: list[float] = (top[:, 0] - top[:, 1]).tolist()
        return margins

    def _sources(self, batch: int, length: int) -> tuple[Array, Array]:
        """Random ids and a ragged mask: the first row is full, the others are shorter where they can be."""
        lengths = [length, *self._random.integers(1, length + 1, batch - 1).tolist()]
        rows = [self._draw((size,), self._config.encoder_vocab_size).tolist() for size in lengths]
        return pad(rows, self._config.pad_token_id)

    def _targets(self, batch: int, length: int) -> Array:
        """The start token and random ids after it."""
        ids = self._draw((batch, length))
        ids[:, 0] = self._config.decoder_start_token_id
        return ids

    def _draw(self, shape: tuple[int, ...], vocabulary: int | None = None) -> Array:
        return self._random.integers(0, vocabulary or self._config.vocab_size, shape, dtype=np.int64)


def share_own_errors(exam: Exam, wider: Exam) -> None:
    """Raise PyTorch's own errors in `exam` to the largest that `wider` measured for the same outputs.

    A few cases see too few numbers to show how far float32 goes astray.
    """
    largest: dict[tuple[str, str], float] = {}
    for case in (*wider.graphs, *exam.graphs):
        for name, error in case.own_error.items():
            # np.maximum passes NaN on, max() would lose it.
            largest[case.verb, name] = float(np.maximum(error, largest.get((case.verb, name), 0.0)))
    for case in exam.graphs:
        case.own_error = {name: largest[case.verb, name] for name in case.own_error}


def _without_past(outputs: Mapping[str, Array], inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Of a cache that grew, the new position alone: the rest stands in the inputs."""
    return {
        name: array[:, :, -1:] if name.replace("present.", "past_key_values.") in inputs else array
        for name, array in outputs.items()
    }


def special_ids(config: object) -> SpecialIds:
    """The ids that a search over this model must know."""
    return SpecialIds(*(getattr(config, f"{name}_token_id") for name in ("pad", "decoder_start", "eos")))


def tool_versions(*packages: str) -> dict[str, str]:
    """Versions of Python, this project and `packages`."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("seq2onnx", "numpy", *packages)},
    }
